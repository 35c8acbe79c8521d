//! `engram autoscale explain`: history, forecast and decisions of a cluster.

use super::explain_page::history_page;
use super::explain_plot::plot;
use super::time_text;
use crate::context::{CLUSTER_ARGUMENT, ClusterArgument, Context};
use crate::error::failure;
use crate::output::{Format, Table};
use crate::output_file::OutputFile;
use crate::target::Target;
use anyhow::Context as _;
use engram_api::ExitCode;
use engram_forecast::history::{History, MAX_BYTES, Record};
use serde_json::{Value, json};
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// Show the load, its forecast and the decisions about the number of workers
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram -n research autoscale explain words                   plot, and the last changes with their reasons
  engram -n research autoscale explain words --to page.html    the same as a page
  engram -n research autoscale explain words -o json | jq '.items[] | select(.desired != .workers)'
  engram autoscale explain --file decisions.csv                decisions in a file

The operator writes the last 4,320 decisions into the ConfigMap CLUSTER-autoscaling, key decisions.csv. The columns time and load of such a
file are a load for `engram autoscale simulate --load`.")]
pub(crate) struct Explain {
    #[command(flatten)]
    cluster: ClusterArgument,
    /// Read the decisions from a file instead of a cluster; `-` is stdin
    #[arg(long, value_name = "FILE", conflicts_with = CLUSTER_ARGUMENT)]
    file: Option<PathBuf>,
    /// Write a page with the plot and all changes
    #[arg(long, value_name = "PAGE")]
    to: Option<PathBuf>,
    /// Changes to list, the newest last
    #[arg(long, value_name = "N", default_value_t = 10)]
    changes: usize,
}

/// Decisions with their origin.
struct Explained {
    title: String,
    history: History,
    last: Option<String>,
}

pub(crate) async fn run(arguments: &Explain, context: &Context) -> anyhow::Result<ExitCode> {
    let explained = match &arguments.file {
        Some(path) => from_file(path)?,
        None => from_cluster(arguments, context).await?,
    };
    let records: Vec<&Record> = explained.history.records().collect();
    if let Some(path) = &arguments.to {
        let page = history_page(&explained.title, &records);
        OutputFile::write(path, page.as_bytes()).with_context(|| format!("failed to write {}", path.display()))?;
        context.output.note(format!("Wrote {}.", path.display()));
        return Ok(ExitCode::Ok);
    }
    if context.output.is_structured() {
        let items: Vec<Value> = records.iter().map(|record| item(record)).collect();
        context.output.list(&items, &Table::new(&[]))?;
        return Ok(ExitCode::Ok);
    }
    if matches!(context.output.format, Format::Table | Format::Wide) {
        context.output.text(&plot(&explained.title, &records))?;
    }
    let changes: Vec<&Record> = records.iter().copied().filter(|record| is_change(record)).collect();
    let newest = &changes[changes.len().saturating_sub(arguments.changes)..];
    let mut table = Table::new(&["time", ">from", ">to", "reason", "message"]);
    for record in newest {
        let (from, to) = (record.workers.to_string(), record.desired.to_string());
        table.row([time_text(record.seconds as f64), from, to, record.reason.clone(), record.message.clone()]);
    }
    if !newest.is_empty() {
        let items: Vec<Value> = newest.iter().map(|record| item(record)).collect();
        context.output.list(&items, &table)?;
    }
    if let Some(last) = &explained.last {
        context.output.note(format!("Last decision: {last}"));
    }
    Ok(ExitCode::Ok)
}

/// Returns whether a decision changes the number of workers, or is not written because of another writer.
pub(super) fn is_change(record: &Record) -> bool {
    record.desired != record.workers || !record.message.is_empty()
}

fn from_file(path: &Path) -> anyhow::Result<Explained> {
    let name = path.display().to_string();
    let failed = || format!("failed to read {name}");
    let mut text = String::new();
    if path == Path::new("-") {
        std::io::stdin().take(MAX_BYTES as u64).read_to_string(&mut text).with_context(failed)?;
    } else {
        let file = std::fs::File::open(path).with_context(failed)?;
        file.take(MAX_BYTES as u64).read_to_string(&mut text).with_context(failed)?;
    }
    let (history, invalid) = History::parse(&text);
    if history.records().len() == 0 || invalid > 0 {
        let header = engram_forecast::history::HEADER;
        let message = format!("{name} has {invalid} invalid lines; allowed: lines with the columns {header}");
        return Err(failure(ExitCode::Usage, message));
    }
    Ok(Explained { title: name, history, last: None })
}

async fn from_cluster(arguments: &Explain, context: &Context) -> anyhow::Result<Explained> {
    let Target::Kubernetes(cluster) = Target::find(&context.for_cluster(&arguments.cluster)).await? else {
        let message =
            "only clusters in Kubernetes have autoscaling; select one with -n NAMESPACE, or read decisions with --file";
        return Err(failure(ExitCode::Usage, message));
    };
    let history = cluster.autoscaling_history().await?;
    Ok(Explained { title: cluster.to_string(), history, last: cluster.last_decision().map(str::to_owned) })
}

fn item(record: &Record) -> Value {
    let Record { load, workers, desired, expected, upper, horizon_seconds, startup_seconds, .. } = record;
    json!({
        "time": time_text(record.seconds as f64),
        "load": load,
        "workers": workers,
        "desired": desired,
        "expectedLoad": expected,
        "upperLoad": upper,
        "horizonSeconds": horizon_seconds,
        "startupSeconds": startup_seconds,
        "forecast": record.forecast,
        "reason": record.reason,
        "message": record.message,
    })
}
