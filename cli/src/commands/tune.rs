//! `engram tune`: searches learning settings that predict a history best, without a cluster.

use crate::commands::data::import::source_problem;
use crate::commands::data::run::absolute;
use crate::commands::manifest;
use crate::context::Context;
use crate::error::{failure, problem};
use crate::output::{Format, Table, count};
use crate::progress::Progress;
use anyhow::Context as _;
use engram_api::{API_VERSION, Code, ExitCode, LearnerRun, Learning, Manifest, OnMissing, Requirement};
use engram_learn::source::{self, Limits, SourceOptions};
use engram_learn::tune::{Candidate, History, Judgement, MAX_EVENTS, TuneOptions, Tuning, tune};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Search decay, learning rate and initial weight that predict a history best
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram tune examples/cluster.yaml > tuned.yaml      print the manifest with the settings found
  engram tune run.yaml --top-k 20,100 --held-out 0.2
  engram tune ../linux --top-k 20                     the history of a git repository
  engram tune run.yaml -o json                        settings and hit rates

The search learns the first part of the history in this process, and the settings that it finds are judged on the rest, next to the most
often and the most recently touched memories. The same history gives the same result.")]
pub(crate) struct Tune {
    /// Manifest with a LearnerRun of kind Memory, or the folder of a git repository; `-` is stdin
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Run of the manifest [default: the only one of kind Memory]
    #[arg(long, value_name = "NAME")]
    run: Option<String>,
    /// Lengths of the rankings to predict with, 1 to 100,000, separated by commas [default: report.topK of the run]
    #[arg(long, value_name = "K,...", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=100_000))]
    top_k: Vec<u32>,
    /// Share of the epochs at the end that judges the result, 0.05 to 0.9
    #[arg(long, value_name = "SHARE", default_value_t = 0.3)]
    held_out: f64,
    /// Do not search the decay: use that of the run or the cluster
    #[arg(long)]
    keep_decay: bool,
}

pub(crate) async fn run(arguments: &Tune, context: &Context) -> anyhow::Result<ExitCode> {
    if !(0.05..=0.9).contains(&arguments.held_out) {
        let message = format!("--held-out is {}; allowed: 0.05 to 0.9", arguments.held_out);
        return Err(failure(ExitCode::Usage, message));
    }
    let manifest = read(&arguments.file)?;
    let run = select(&manifest, arguments.run.as_deref())?;
    let learning = manifest.cluster.as_ref().map(|cluster| cluster.spec.learning.clone()).unwrap_or_default();
    let memory = run.spec.memory.as_ref().context("the run has no block memory")?;
    if memory.on_missing == OnMissing::Report {
        let message = "spec.memory.onMissing is Report; allowed: Create: a search begins without memories";
        return Err(problem(Code::NotSupported, message));
    }
    let decay = memory.decay.unwrap_or(learning.decay);
    let top_k = if arguments.top_k.is_empty() {
        memory.report.top_k().iter().map(|k| u32::try_from(*k).unwrap_or(u32::MAX)).collect()
    } else {
        arguments.top_k.clone()
    };
    let options = TuneOptions {
        top_k,
        held_out: arguments.held_out,
        skip: memory.report.skip(),
        current: Candidate { decay, rate: learning.rate, initial_weight: learning.initial_weight },
        fixed_decay: arguments.keep_decay.then_some(decay),
    };
    let spec = absolute(&manifest, &run.spec)?;
    let source = &spec.memory.as_ref().context("the run has no block memory")?.source;
    let history = read_history(SourceOptions::from_manifest(source, Path::new("")), context).await?;
    let tuning = search(history, options, context).await?;
    print(&manifest, run, &tuning, context)?;
    Ok(ExitCode::Ok)
}

/// Reads the manifest at `path`; that of a folder is one for the history of the git repository there.
fn read(path: &Path) -> anyhow::Result<Manifest> {
    if !path.is_dir() {
        return manifest::read(path, Requirement::Runs);
    }
    let folder = std::path::absolute(path).context("failed to get the current directory")?;
    let run = json!({
        "apiVersion": API_VERSION, "kind": "LearnerRun", "metadata": { "name": "history" },
        "spec": { "clusterRef": { "name": "history" }, "kind": "Memory", "memory": { "source": { "git": { "path": folder } } } },
    });
    let cluster = json!({
        "apiVersion": API_VERSION, "kind": "LearnerCluster", "metadata": { "name": "history" }, "spec": { "workers": 1 },
    });
    Ok(engram_api::parse(&format!("{cluster}\n---\n{run}"), "command line", Requirement::Runs)?)
}

/// Returns the run to tune.
fn select<'a>(manifest: &'a Manifest, name: Option<&str>) -> anyhow::Result<&'a LearnerRun> {
    let is_wanted = |run: &&LearnerRun| run.spec.memory.is_some() && name.is_none_or(|name| run.metadata.name == name);
    let wanted: Vec<&LearnerRun> = manifest.runs.iter().filter(is_wanted).collect();
    match &wanted[..] {
        [run] => Ok(run),
        [] => {
            let which = name.map_or_else(String::new, |name| format!(" named {name}"));
            Err(failure(ExitCode::Usage, format!("the manifest has no LearnerRun of kind Memory{which}; needed: one")))
        }
        runs => {
            let names: Vec<&str> = runs.iter().map(|run| run.metadata.name.as_str()).collect();
            let message =
                format!("the manifest has several runs of kind Memory; choose one with --run: {}", names.join(", "));
            Err(failure(ExitCode::Usage, message))
        }
    }
}

async fn read_history(options: SourceOptions, context: &Context) -> anyhow::Result<History> {
    let mut progress = Progress::new(&context.output, "reading epochs", None);
    let read = tokio::task::spawn_blocking(move || {
        let mut source = source::open(&options, Limits::default(), 0)?;
        History::read(&mut *source, MAX_EVENTS, |done, total| {
            if let Some(total) = total {
                progress.set_total(total);
            }
            progress.set(done, "");
        })
    });
    let history = read.await.context("the task that reads the history failed")?;
    let history = history.map_err(|error| source_problem(&error))?;
    let history = history.ok_or_else(|| {
        problem(
            Code::NotSupported,
            "the source has no events of single memories; allowed: example, events or git with events",
        )
    })?;
    if history.skipped_epochs() > 0 {
        let (kept, skipped) = (count(history.len() as u64), count(history.skipped_epochs()));
        let text = format!(
            "using the newest {kept} epochs, {} events; {skipped} older epochs are not used",
            count(history.events() as u64)
        );
        context.output.note(text);
    }
    Ok(history)
}

async fn search(history: History, options: TuneOptions, context: &Context) -> anyhow::Result<Tuning> {
    let (epochs, memories) = (count(history.len() as u64), count(history.distinct_memories() as u64));
    context.output.note(format!(
        "searching over {epochs} epochs, {} events, {memories} memories",
        count(history.events() as u64)
    ));
    let progress = Mutex::new(Progress::new(&context.output, "events", None));
    let searched = tokio::task::spawn_blocking(move || {
        tune(&history, &options, |done, total| {
            // A report that another thread makes meanwhile is enough.
            if let Ok(mut progress) = progress.try_lock() {
                progress.set_total(total);
                progress.set(done, "");
            }
        })
    });
    let tuning = searched.await.context("the search failed")?;
    tuning.map_err(|error| problem(Code::InvalidValue, error.to_string()))
}

/// Prints the manifest with the settings found on stdout and the hit rates on stderr; with `-o json` or `-o yaml` all of it on stdout.
fn print(manifest: &Manifest, run: &LearnerRun, tuning: &Tuning, context: &Context) -> anyhow::Result<()> {
    let verdict = verdict(tuning);
    let text = tuned_manifest(manifest, run, tuning)?;
    if matches!(context.output.format, Format::Json | Format::Yaml) {
        let value = json!({
            "kind": "Tuning", "run": run.metadata.name, "tuned": tuning.tuned, "current": tuning.current,
            "candidates": tuning.candidates, "searchedEpochs": tuning.searched_epochs, "searched": tuning.searched,
            "heldOut": tuning.held_out, "holds": tuning.holds(), "verdict": verdict, "manifest": text,
        });
        return context.output.value(&value);
    }
    let mut table =
        Table::new(&["hit rate", ">top", ">epochs", ">tuned", ">current", ">most frequent", ">most recent"]);
    let rate = |value: f64| format!("{value:.4}");
    let parts = [("searched", &tuning.searched), ("held out", &tuning.held_out)];
    for (part, judgement) in parts.into_iter().flat_map(|(part, list)| list.iter().map(move |row| (part, row))) {
        let Judgement { k, epochs, tuned, current, frequent, recent } = *judgement;
        let rates = [tuned, current, frequent, recent].map(rate);
        table.row([part.to_owned(), k.to_string(), epochs.to_string()].into_iter().chain(rates));
    }
    context.output.note(format!("{}{verdict}", table.render(&context.output)));
    Ok(context.output.text(&text)?)
}

/// Describes whether the tuned memory predicts better than the baselines.
fn verdict(tuning: &Tuning) -> String {
    let Candidate { decay, rate, initial_weight } = tuning.tuned;
    let found = format!(
        "found decay {decay}, rate {rate}, initialWeight {initial_weight} among {} candidates",
        tuning.candidates
    );
    let missed = tuning.held_out.iter().filter(|judgement| !judgement.holds());
    let missed: Vec<String> = missed
        .map(|judgement| {
            let better = if judgement.frequent > judgement.recent { "most often" } else { "most recently" };
            format!("the top {} of the {better} touched memories", judgement.k)
        })
        .collect();
    if missed.is_empty() {
        format!("{found}; on the held-out epochs it predicts at least as well as both baselines")
    } else {
        format!("{found}; on the held-out epochs it predicts worse than {}", missed.join(" and "))
    }
}

/// Returns the manifest with the settings found: the cluster with `learning`, and the run.
fn tuned_manifest(manifest: &Manifest, run: &LearnerRun, tuning: &Tuning) -> anyhow::Result<String> {
    let Candidate { decay, rate, initial_weight } = tuning.tuned;
    let found = Learning { decay, rate, initial_weight, ..Learning::default() };
    let mut run = run.clone();
    let memory = run.spec.memory.as_mut().context("the run has no block memory")?;
    // The cluster has the decay, if it is in the manifest.
    memory.decay = manifest.cluster.is_none().then_some(decay);
    let failed = "failed to serialize the manifest";
    let mut documents = Vec::new();
    if let Some(mut cluster) = manifest.cluster.clone() {
        cluster.spec.learning = Learning { law: cluster.spec.learning.law, ..found };
        documents.push(serde_json::to_value(cluster).context(failed)?);
    }
    documents.push(serde_json::to_value(&run).context(failed)?);
    let documents = documents.iter().map(serde_saphyr::to_string).collect::<Result<Vec<_>, _>>().context(failed)?;
    if manifest.cluster.is_none() {
        let name = &run.spec.cluster_ref.name;
        let settings = format!("{{ rate: {rate}, initialWeight: {initial_weight} }}");
        return Ok(format!("# The LearnerCluster {name} needs spec.learning: {settings}\n{}", documents.concat()));
    }
    Ok(documents.join("---\n"))
}
