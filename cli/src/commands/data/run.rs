//! `engram run`: submits the runs of a manifest, one after another, and follows each until it ends.

use crate::args::Context;
use crate::commands::manifest;
use crate::error::{Ended, problem};
use crate::output::{Format, Output, Table, bytes, count};
use crate::progress::Progress;
use crate::target::{Local, Target};
use anyhow::Context as _;
use engram_api::{Code, Events, ExitCode, LearnerRun, LearnerRunSpec, Manifest, Needs, Problem, Source};
use engram_client::{Client, Watch};
use engram_learn::report::{self, RunReport};
use engram_learn::source::{self, Limits, SourceOptions};
use engram_proto::v1::{RunPhase, RunStatus};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};

/// Between looks at the rows of a run that goes on, for `-o json`: the report is read whole.
const ROWS_EVERY: Duration = Duration::from_secs(1);
/// How often a run that was told to stop is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// Learn: submit the runs of a file to a cluster and follow them until they end
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram run runs.yaml                          follow the runs; the exit code is their result
  engram run runs.yaml --report report.html     and write a page with charts
  engram run runs.yaml --no-wait                submit and leave; see: engram list runs
  engram run runs.yaml -o json                  a JSON line per learning epoch, then one with the result

In Kubernetes a LearnerRun is made of each, and the operator hands it to the workers.
Ctrl-C asks the run to stop after its epoch and waits; a second one leaves it to the cluster.")]
pub(crate) struct Arguments {
    /// Manifest with one or more LearnerRuns; `-` is stdin
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Submit and do not wait for the end
    #[arg(long, conflicts_with = "report")]
    no_wait: bool,
    /// Write a self-contained HTML page about the run (one run in the file)
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
}

pub(crate) async fn run(arguments: &Arguments, context: &Context) -> anyhow::Result<ExitCode> {
    let manifest = manifest::read(&arguments.file, Needs::Runs)?;
    manifest::tell_notes(&manifest, context);
    if arguments.report.is_some() && manifest.runs.len() != 1 {
        let message =
            format!("--report is for a file with one run; {} has {}", arguments.file.display(), manifest.runs.len());
        return Err(problem(Code::Conflicting, message));
    }
    let target = Target::find(context).await?;
    let client = target.connect().await?;
    check(&manifest, &target, &client)?;
    for run in &manifest.runs {
        let name = &run.metadata.name;
        let submitted = match &target {
            Target::Kubernetes(cluster) => cluster.make_run(run).await?,
            _ => submit(&client, &manifest, run).await?,
        };
        if !submitted {
            context.output.note(format!("run {name} is on the cluster already; a new run needs a new name"));
        }
        if arguments.no_wait {
            context.output.note(format!("submitted run {name}; follow it: engram describe run {name}"));
            continue;
        }
        if let Target::Kubernetes(cluster) = &target {
            cluster.handed_over(name, |why| context.output.note(format!("run {name} waits: {why}"))).await?;
        }
        let report = follow(&client, name, &context.output).await?;
        if let (Some(path), Some(report)) = (&arguments.report, &report) {
            write_page(report, path)?;
            context.output.note(format!("wrote {}", path.display()));
        }
    }
    Ok(ExitCode::Ok)
}

/// Checks what can be checked before anything is submitted: a name stands for one run for ever, and a run that fails at once
/// would take its name with it.
pub(super) fn check(manifest: &Manifest, target: &Target, client: &Client) -> anyhow::Result<()> {
    if matches!(target, Target::Kubernetes(_)) {
        manifest.runs.iter().try_for_each(|run| check_reachable(&run.metadata.name, &run.spec))?;
    }
    let Target::Local(Local { folder, .. }) = target else {
        let name = client.map()?.cluster_name.clone();
        return match manifest.runs.iter().find(|run| run.spec.cluster_ref.name != name) {
            Some(run) => Err(problem(
                Code::ClusterNotFound,
                format!(
                    "run {} is for cluster {}; the cluster that answers is {name}",
                    run.metadata.name, run.spec.cluster_ref.name
                ),
            )),
            None => Ok(()),
        };
    };
    let Some(cluster) = super::created(folder)? else { return Ok(()) };
    manifest.check_runs_on(&cluster.name, &cluster.spec)?;
    manifest.runs.iter().try_for_each(|run| check_source(&absolute(manifest, &run.spec)?))
}

/// Refuses a source that lies on this machine, for a cluster whose workers do not.
fn check_reachable(name: &str, spec: &LearnerRunSpec) -> anyhow::Result<()> {
    let path = match spec.memory.as_ref().map(|memory| &memory.source) {
        Some(Source::Events(Events { path: Some(path), input: None, .. })) => path,
        Some(Source::Git(git)) => &git.path,
        Some(Source::Example(_) | Source::Events(_) | Source::Synthetic(_)) | None => return Ok(()),
    };
    let message = format!(
        "run {name}: source {path} is a path of this machine, which workers in Kubernetes cannot read; there it is a ConfigMap \
         (events.configMap), a file in a storage (events.s3), or a volume of the cluster (events.input and path)"
    );
    Err(problem(Code::NotSupported, message))
}

/// Opens the source of a run and reads its first epoch: what is wrong with the whole file shows there. What lies in a storage is for
/// the worker that fetches it: it may have other credentials, and another way there.
///
/// # Errors
/// The source cannot be read, under the code that explains it.
pub(crate) fn check_source(spec: &LearnerRunSpec) -> anyhow::Result<()> {
    let Some(memory) = &spec.memory else { return Ok(()) };
    if matches!(memory.source, Source::Events(Events { s3: Some(_), .. })) {
        return Ok(());
    }
    let options = SourceOptions::from_manifest(&memory.source, Path::new(""));
    let looked = source::open(&options, Limits::default(), 0).and_then(|mut source| source.next_epoch());
    looked.map(drop).map_err(|error| super::import::source_problem(&error).into())
}

/// The spec of a run as a worker needs it: every path absolute.
///
/// # Errors
/// There is no current folder to start from.
pub(crate) fn absolute(manifest: &Manifest, spec: &LearnerRunSpec) -> anyhow::Result<LearnerRunSpec> {
    let mut spec = spec.clone();
    let place = |path: &str| -> anyhow::Result<String> {
        let path = std::path::absolute(manifest.resolve(path)).context("failed to find the current folder")?;
        path.into_os_string().into_string().map_err(|path| {
            problem(Code::SourceUnreadable, format!("the path {} is not UTF-8", Path::new(&path).display()))
        })
    };
    if let Some(volume) = spec.snapshot.as_ref().and_then(|place| place.volume.as_ref()) {
        let message = format!(
            "spec.snapshot.volume is {volume}; allowed in clusters in Kubernetes only: here set url: to a storage for objects"
        );
        let help = "or write into a folder: engram snapshot create --to FOLDER";
        return Err(Problem::new(Code::NotSupported, message).help(help).into());
    }
    if let Some(memory) = &mut spec.memory {
        match &mut memory.source {
            Source::Events(Events { path: Some(path), input: None, .. }) => *path = place(path)?,
            Source::Events(Events { s3: Some(_), .. }) => {}
            Source::Events(_) => {
                let message = "spec.memory.source.events.configMap and input are for clusters in Kubernetes; set path: to a file here, or s3";
                return Err(problem(Code::NotSupported, message));
            }
            Source::Git(git) => git.path = place(&git.path)?,
            Source::Example(_) | Source::Synthetic(_) => {}
        }
    }
    Ok(spec)
}

/// Submits a run; `false` where it was on the cluster already.
///
/// # Errors
/// The cluster refuses it or does not answer.
pub(crate) async fn submit(client: &Client, manifest: &Manifest, run: &LearnerRun) -> anyhow::Result<bool> {
    let spec = absolute(manifest, &run.spec)?;
    let spec = serde_json::to_string(&spec).context("failed to write the run as JSON")?;
    Ok(client.submit_run(&run.metadata.name, &spec, None, None).await?.created)
}

/// Has a run suspended, or go on, and waits until it does; its status then. It may have ended before.
///
/// # Errors
/// The cluster does not know the run, or does not answer.
pub(crate) async fn suspend(client: &Client, name: &str, suspend: bool) -> anyhow::Result<RunStatus> {
    loop {
        let status = client.suspend_run(name, suspend).await?;
        let phase = status.phase();
        let ended = matches!(phase, RunPhase::Succeeded | RunPhase::Failed | RunPhase::Cancelled);
        if ended || (phase == RunPhase::Suspended) == suspend {
            return Ok(status);
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Follows a run until it ends, shows how far it is, and prints what it found; a snapshot has no report. The first Ctrl-C asks it to stop after its
/// epoch, the second leaves it to the cluster.
///
/// # Errors
/// The run failed (under its own code), was stopped, or the cluster does not answer.
pub(crate) async fn follow(client: &Client, name: &str, output: &Output) -> anyhow::Result<Option<RunReport>> {
    let mut follower = Follower::new(client, name, output);
    let mut watch = client.watch_run(name);
    // One listener for all: what comes while a status is shown would reach nobody who listens anew each time.
    let mut interrupted = signal(SignalKind::interrupt()).context("failed to listen for Ctrl-C")?;
    let mut interrupts = 0;
    loop {
        let status = tokio::select! {
            status = next(&mut watch) => status?,
            Some(()) = interrupted.recv() => {
                interrupts += 1;
                if interrupts > 1 {
                    follower.note(&format!("run {name} goes on in the cluster: engram describe run {name}"));
                    return Err(Ended(ExitCode::Interrupted).into());
                }
                follower.note(&format!("stopping run {name} after its epoch; Ctrl-C again leaves it running"));
                client.cancel_run(name).await?;
                continue;
            }
        };
        match status {
            Some(status) => follower.show(status).await?,
            None => return follower.finish().await,
        }
    }
}

/// The same, for who listens to signals itself.
///
/// # Errors
/// As [`follow`].
pub(crate) async fn follow_to_end(client: &Client, name: &str, output: &Output) -> anyhow::Result<Option<RunReport>> {
    let mut follower = Follower::new(client, name, output);
    let mut watch = client.watch_run(name);
    while let Some(status) = next(&mut watch).await? {
        follower.show(status).await?;
    }
    follower.finish().await
}

async fn next(watch: &mut Watch) -> anyhow::Result<Option<RunStatus>> {
    Ok(watch.next().await?)
}

/// How a run ended that did not succeed, for the exit code and for people.
fn check_end(status: &RunStatus, output: &Output) -> anyhow::Result<()> {
    let steps = if is_snapshot(status) { "partitions" } else { "epochs" };
    match status.phase() {
        RunPhase::Failed => {
            let code = Code::find(&status.code).unwrap_or(Code::RunFailed);
            let message = format!("run {} failed after {} {steps}: {}", status.name, status.epoch, status.message);
            Err(problem(code, message))
        }
        RunPhase::Cancelled => {
            output.note(format!("run {} was stopped after {} {steps}", status.name, status.epoch));
            Err(Ended(ExitCode::Interrupted).into())
        }
        _ => Ok(()),
    }
}

fn is_snapshot(status: &RunStatus) -> bool {
    status.kind == "Snapshot"
}

/// What a snapshot has written.
fn show_snapshot(status: &RunStatus, output: &Output) -> anyhow::Result<()> {
    let Some(written) = &status.snapshot else { return Ok(()) };
    let mut table = Table::new(&["snapshot", ">memories", ">size", ">partitions", "digest"]);
    let (memories, partitions) = (count(written.memories), written.partitions.to_string());
    table.row([written.url.clone(), memories, bytes(written.bytes), partitions, written.digest.clone()]);
    let value = json!({
        "kind": "RunResult", "run": status.name, "snapshot": written.url, "memories": written.memories,
        "bytes": written.bytes, "partitions": written.partitions, "digest": written.digest,
    });
    if output.format == Format::Json { line(&value) } else { output.object(&value, &table) }
}

/// The end of a run that learned.
fn conclude(status: &RunStatus, report: RunReport, output: &Output) -> anyhow::Result<RunReport> {
    match output.format {
        Format::Json => line(&result(status, &report))?,
        Format::Yaml => output.value(&serde_json::to_value(&report)?)?,
        _ => output.text(&report::summary(&report))?,
    }
    Ok(report)
}

/// Shows a run while it goes on.
struct Follower<'a> {
    client: &'a Client,
    name: &'a str,
    output: &'a Output,
    last: Option<RunStatus>,
    progress: Progress,
    /// With `-o json`: rows printed, and when to look for more.
    rows: Option<(usize, Instant)>,
}

impl<'a> Follower<'a> {
    fn new(client: &'a Client, name: &'a str, output: &'a Output) -> Self {
        let rows = (output.format == Format::Json).then(|| (0, Instant::now()));
        Self { client, name, output, last: None, progress: Progress::new(output, name, None), rows }
    }

    fn note(&self, text: &str) {
        self.progress.note(self.output, text);
    }

    async fn show(&mut self, status: RunStatus) -> anyhow::Result<()> {
        if status.epochs > 0 {
            self.progress.set_total(status.epochs);
        }
        self.progress.set(status.epoch, &told(&status));
        let learns = !is_snapshot(&status);
        if learns && self.rows.is_some_and(|(printed, due)| printed < status.epoch as usize && Instant::now() >= due) {
            self.print_rows().await?;
        }
        self.last = Some(status);
        Ok(())
    }

    async fn finish(mut self) -> anyhow::Result<Option<RunReport>> {
        let report = match self.rows {
            _ if self.last.as_ref().is_some_and(is_snapshot) => None,
            Some(_) => Some(self.print_rows().await?),
            None => Some(read(self.client, self.name).await?),
        };
        let Self { name, output, last, progress, .. } = self;
        // What moves is gone before the result is printed.
        drop(progress);
        match last {
            Some(status) => {
                check_end(&status, output)?;
                if let Some(report) = report {
                    return conclude(&status, report, output).map(Some);
                }
                show_snapshot(&status, output)?;
                Ok(None)
            }
            None => Err(problem(Code::RunUnknown, format!("run {name} is not on the cluster"))),
        }
    }

    /// Prints the rows that were not printed yet, a JSON object a line.
    async fn print_rows(&mut self) -> anyhow::Result<RunReport> {
        let began = Instant::now();
        let report = read(self.client, self.name).await?;
        let printed = self.rows.map_or(0, |(printed, _)| printed);
        for row in report.epochs.iter().skip(printed) {
            #[derive(Serialize)]
            struct Row<'a> {
                kind: &'static str,
                run: &'a str,
                #[serde(flatten)]
                row: &'a report::EpochRow,
            }
            line(&serde_json::to_value(Row { kind: "Epoch", run: self.name, row })?)?;
        }
        // A report takes the longer to read the more rows it has: most of the time is for the run.
        let pause = ROWS_EVERY.max(began.elapsed() * 10);
        self.rows = Some((report.epochs.len(), Instant::now() + pause));
        Ok(report)
    }
}

/// Reads the report of a run.
///
/// # Errors
/// The cluster does not answer, or not with a report of this version.
pub(crate) async fn read(client: &Client, name: &str) -> anyhow::Result<RunReport> {
    let json = client.report(name).await?;
    serde_json::from_str(&json).with_context(|| format!("the report of run {name} is of another version"))
}

/// What a status says beside the number of epochs.
fn told(status: &RunStatus) -> String {
    let mut parts = Vec::new();
    if !status.message.is_empty() {
        parts.push(status.message.clone());
    }
    if !status.label.is_empty() {
        parts.push(status.label.clone());
    }
    if status.epochs_per_second > 0.0 {
        parts.push(format!("{:.0} epochs/s", status.epochs_per_second));
    }
    if status.updates_per_second >= 1.0 {
        parts.push(format!("{} updates/s", count(status.updates_per_second as u64)));
    }
    for (name, figure) in [("separation", "separation"), ("convergence", "convergence")] {
        if let Some(value) = status.metrics.get(name) {
            parts.push(format!("{figure} {value:.3}"));
        }
    }
    // From the wire they come in any order.
    let rate = |(name, value): (&String, &f64)| Some((name.strip_prefix("hit_rate_")?.parse::<u32>().ok()?, *value));
    let rates: BTreeMap<u32, f64> = status.metrics.iter().filter_map(rate).collect();
    parts.extend(rates.into_iter().map(|(first, value)| format!("top {first} {value:.3}")));
    parts.join(", ")
}

/// The last line of `-o json`: the report without its rows and tables, which stand in `describe run`.
fn result(status: &RunStatus, report: &RunReport) -> Value {
    json!({
        "kind": "RunResult",
        "run": status.name,
        "cluster": report.cluster,
        "phase": status.phase().as_str_name().trim_start_matches("RUN_PHASE_").to_lowercase(),
        "epochs": report.epochs.len(),
        "updates": report.events(),
        "memories": report.memories(),
        "elapsedS": report.elapsed_s,
        "epochsPerS": report.epochs_per_s,
        "updatesPerS": report.updates_per_s,
        "prediction": report.prediction,
        "experiment": report.experiment,
        "digest": report.digest,
    })
}

/// One line of JSON on stdout.
fn line(value: &Value) -> anyhow::Result<()> {
    use std::io::Write as _;
    Ok(writeln!(std::io::stdout().lock(), "{value}")?)
}

/// Writes the page of a report; the file appears whole or not at all.
///
/// # Errors
/// It cannot be drawn or written.
pub(crate) fn write_page(report: &RunReport, path: &Path) -> anyhow::Result<()> {
    let page = report::page(report)?;
    crate::rows::write_whole(path, page.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hit_rates_are_told_in_the_order_of_their_numbers() {
        let rates =
            [("hit_rate_1000", 0.6), ("hit_rate_500", 0.7), ("hit_rate_500_most_recent", 0.1), ("separation", 2.0)];
        let metrics = rates.map(|(name, value)| (name.to_owned(), value)).into_iter().collect();
        let status = RunStatus { metrics, ..RunStatus::default() };
        assert_eq!(told(&status), "separation 2.000, top 500 0.700, top 1000 0.600");
    }
}
