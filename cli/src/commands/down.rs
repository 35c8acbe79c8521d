//! `engram down`: stops a local cluster in order.

use crate::args::Context;
use crate::error::{problem, said};
use crate::local::state::{self, StateDir};
use crate::target::Local;
use anyhow::Context as _;
use engram_api::{Code, ExitCode};
use nix::sys::signal::Signal;
use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::time::Duration;
use tokio::time::Instant;

/// Between looks at a process that is stopping.
const LOOK: Duration = Duration::from_millis(50);

/// Stop a local cluster in order; the data stays
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram down                        stop it; the data is there at the next `up`
  engram down --delete-data          stop it and delete its data, after asking
  engram down --cluster words --delete-data --yes")]
pub(crate) struct Arguments {
    /// Delete the state directory as well
    #[arg(long)]
    delete_data: bool,
    /// Do not ask
    #[arg(short, long)]
    yes: bool,
    /// How long it may take to stop in order, in seconds; then it is killed
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
}

pub(crate) async fn run(arguments: &Arguments, context: &Context) -> anyhow::Result<ExitCode> {
    let (folder, running) = match Local::find(context) {
        Ok(local) => (local.folder.clone(), Some(local)),
        // Data can be deleted of a cluster that does not run, if it was named.
        Err(error) if arguments.delete_data => match named(context)? {
            Some(folder) if folder.join("cluster.json").exists() => (folder, None),
            _ => return Err(error),
        },
        Err(error) => return Err(error),
    };
    if arguments.delete_data && !arguments.yes {
        confirm(&format!("delete everything in {}?", folder.display()))?;
    }
    if let Some(local) = running {
        stop(&local, Duration::from_secs(arguments.timeout), context).await?;
        context.output.note(format!("cluster {} is stopped", local.endpoints.name));
    }
    if arguments.delete_data {
        let state = StateDir::hold(&folder)?;
        // Only a folder that is a cluster's is deleted.
        let cluster = state.cluster()?;
        let name = cluster.map_or_else(String::new, |cluster| cluster.name);
        state.delete()?;
        context.output.note(format!("the data of cluster {name} is deleted"));
    } else {
        context.output.note(format!("its data is in {}; `engram up` goes on with it", folder.display()));
    }
    Ok(ExitCode::Ok)
}

fn named(context: &Context) -> anyhow::Result<Option<PathBuf>> {
    match (&context.state_dir, &context.cluster) {
        (Some(folder), _) => Ok(Some(folder.clone())),
        (None, Some(name)) => Ok(Some(state::base()?.join(name))),
        (None, None) => Ok(None),
    }
}

/// Asks its supervisor to stop, and kills it when that takes too long: its processes end with it.
async fn stop(local: &Local, limit: Duration, context: &Context) -> anyhow::Result<()> {
    let supervisor = local.endpoints.supervisor;
    let deadline = Instant::now() + limit;
    supervisor.signal(Signal::SIGTERM);
    while supervisor.is_alive() {
        if Instant::now() >= deadline {
            context.output.note(format!("process {} does not stop in order; killing it", supervisor.pid));
            supervisor.signal(Signal::SIGKILL);
        }
        if Instant::now() >= deadline + limit {
            let message = format!("process {} does not end", supervisor.pid);
            return Err(problem(Code::DeadlineExceeded, message));
        }
        tokio::time::sleep(LOOK).await;
    }
    Ok(())
}

fn confirm(question: &str) -> anyhow::Result<()> {
    if !std::io::stdin().is_terminal() {
        return Err(said(ExitCode::Usage, format!("{question} nobody can be asked here; say --yes")));
    }
    write!(std::io::stderr(), "{question} [y/N] ").context("failed to ask")?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer).context("failed to read the answer")?;
    if matches!(answer.trim(), "y" | "Y" | "yes") {
        return Ok(());
    }
    Err(crate::error::Ended(ExitCode::Interrupted).into())
}
