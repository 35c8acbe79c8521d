//! Commands on memories, runs and snapshots.

mod bench;
mod buffer;
mod change;
mod delete;
mod describe;
mod export;
mod get;
pub(crate) mod graph;
pub(crate) mod import;
mod insert;
mod job;
mod list;
mod predict;
mod quality;
mod rank;
mod reads;
mod recall;
pub(crate) mod run;
mod run_report;
mod select;
mod snapshot;
mod suspend;

use crate::context::Context;
use crate::error::problem;
use crate::local::state::Cluster;
use engram_api::{Code, ExitCode};
use std::path::Path;

/// Commands on memories, runs and snapshots.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Data {
    Run(run::Run),
    Suspend(suspend::Suspend),
    Resume(suspend::Resume),
    Get(get::Get),
    Rank(rank::Rank),
    Recall(recall::Recall),
    Predict(predict::Predict),
    Quality(quality::Quality),
    Insert(Box<insert::Insert>),
    Remove(change::Remove),
    Reinforce(Box<change::Reinforce>),
    Decay(change::Decay),
    Export(export::Export),
    #[command(subcommand)]
    Import(Box<import::Import>),
    #[command(subcommand)]
    Snapshot(snapshot::Snapshot),
    #[command(subcommand)]
    List(list::List),
    #[command(subcommand)]
    Describe(describe::Describe),
    #[command(subcommand)]
    Delete(delete::Delete),
    #[command(subcommand)]
    Buffer(buffer::BufferCommand),
    Bench(bench::Bench),
}

/// Runs the command.
pub(crate) async fn run(command: Data, context: &Context) -> anyhow::Result<ExitCode> {
    match command {
        Data::Run(arguments) => run::run(&arguments, context).await,
        Data::Suspend(arguments) => suspend::suspend(&arguments, context).await,
        Data::Resume(arguments) => suspend::resume(&arguments, context).await,
        Data::Get(arguments) => get::run(&arguments, context).await,
        Data::Rank(arguments) => rank::run(&arguments, context).await,
        Data::Recall(arguments) => recall::run(arguments, context).await,
        Data::Predict(arguments) => predict::run(&arguments, context).await,
        Data::Quality(arguments) => quality::run(&arguments, context).await,
        Data::Insert(arguments) => insert::run(*arguments, context).await,
        Data::Remove(arguments) => change::remove(&arguments, context).await,
        Data::Reinforce(arguments) => change::reinforce(&arguments, context).await,
        Data::Decay(arguments) => change::decay(&arguments, context).await,
        Data::Export(arguments) => export::run(&arguments, context).await,
        Data::Import(import) => import.run(context).await,
        Data::Snapshot(snapshot) => snapshot.run(context).await,
        Data::List(list) => list.run(context).await,
        Data::Describe(describe) => describe.run(context).await,
        Data::Delete(delete) => delete.run(context).await,
        Data::Buffer(command) => command.run(context).await,
        Data::Bench(arguments) => bench::run(&arguments, context).await,
    }
}

/// Reads `cluster.json` of a state directory without taking its lock; `None` if it does not exist.
///
/// # Errors
/// The file cannot be read, or has a newer format.
fn created(folder: &Path) -> anyhow::Result<Option<Cluster>> {
    let path = folder.join("cluster.json");
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => {
            return Err(problem(Code::StateDirectoryUnusable, format!("failed to read {}: {error}", path.display())));
        }
    };
    crate::local::state::check_format(&path, &text)?;
    let damaged = |error| format!("{} is damaged: {error}", path.display());
    serde_json::from_str(&text).map(Some).map_err(|error| problem(Code::StateDirectoryUnusable, damaged(error)))
}
