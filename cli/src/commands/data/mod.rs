//! Commands about memories: what is in them, how they are written, where they come from and go to.

mod bench;
mod change;
mod export;
mod get;
mod import;
mod insert;
mod quality;
mod rank;
mod reads;
mod recall;
pub(crate) mod run;
mod select;
mod show;
mod snapshot;
mod suspend;

use crate::args::Context;
use crate::error::problem;
use crate::local::state::Cluster;
use engram_api::{Code, ExitCode};
use std::path::Path;

/// Commands about memories.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Data {
    Run(run::Arguments),
    Suspend(suspend::Suspend),
    Resume(suspend::Resume),
    Get(get::Arguments),
    Rank(rank::Arguments),
    Recall(recall::Arguments),
    Quality(quality::Arguments),
    Insert(Box<insert::Arguments>),
    Remove(change::Remove),
    Reinforce(Box<change::Reinforce>),
    Decay(change::Decay),
    Export(export::Arguments),
    #[command(subcommand)]
    Import(Box<import::Import>),
    #[command(subcommand)]
    Snapshot(snapshot::Snapshot),
    #[command(subcommand)]
    List(show::List),
    #[command(subcommand)]
    Describe(show::Describe),
    Bench(bench::Arguments),
}

/// Runs one of them.
///
/// # Errors
/// As the command says.
pub(crate) async fn run(command: Data, context: &Context) -> anyhow::Result<ExitCode> {
    match command {
        Data::Run(arguments) => run::run(&arguments, context).await,
        Data::Suspend(arguments) => suspend::suspend(&arguments, context).await,
        Data::Resume(arguments) => suspend::resume(&arguments, context).await,
        Data::Get(arguments) => get::run(&arguments, context).await,
        Data::Rank(arguments) => rank::run(&arguments, context).await,
        Data::Recall(arguments) => recall::run(arguments, context).await,
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
        Data::Bench(arguments) => bench::run(&arguments, context).await,
    }
}

/// What the cluster of a state directory was created with, without taking its lock; `None` where nothing was created there.
///
/// # Errors
/// It cannot be read, or is of a newer version.
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
