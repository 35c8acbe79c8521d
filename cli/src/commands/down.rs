//! `engram down`: stops a local cluster gracefully.

use crate::context::Context;
use crate::error::{failure, problem};
use crate::local::state::{self, StateDir};
use crate::target::Running;
use anyhow::Context as _;
use engram_api::{Code, ExitCode};
use nix::sys::signal::Signal;
use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::time::Duration;
use tokio::time::Instant;

/// Poll interval while the supervisor stops.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Stop a local cluster gracefully and keep its data
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram down                        stop the cluster; the next `engram up` reuses its data
  engram down --delete-data          stop the cluster and delete its data, after confirmation
  engram down --cluster words --delete-data --yes")]
pub(crate) struct Down {
    /// Delete the state directory
    #[arg(long)]
    delete_data: bool,
    /// Skip the confirmation
    #[arg(short, long)]
    yes: bool,
    /// Grace period in seconds, after which the cluster is killed
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
}

pub(crate) async fn run(arguments: &Down, context: &Context) -> anyhow::Result<ExitCode> {
    let (folder, running) = match Running::find(context) {
        Ok(running) => (running.folder.clone(), Some(running)),
        // The data of a stopped cluster can be deleted if the cluster is named.
        Err(error) if arguments.delete_data => match named_folder(context)? {
            Some(folder) if folder.join("cluster.json").exists() => (folder, None),
            _ => return Err(error),
        },
        Err(error) => return Err(error),
    };
    if arguments.delete_data && !arguments.yes {
        confirm(&format!("delete everything in {}?", folder.display()))?;
    }
    if let Some(running) = running {
        stop(&running, Duration::from_secs(arguments.timeout), context).await?;
        context.output.note(format!("stopped cluster {}", running.endpoints.name));
    }
    if arguments.delete_data {
        let state = StateDir::hold(&folder)?;
        // Fails unless the folder is the state directory of a cluster.
        let cluster = state.cluster()?;
        let name = cluster.map_or_else(String::new, |cluster| cluster.name);
        state.delete()?;
        context.output.note(format!("deleted the data of cluster {name}"));
    } else {
        context.output.note(format!("its data is kept in {}; `engram up FILE` reuses it", folder.display()));
    }
    Ok(ExitCode::Ok)
}

fn named_folder(context: &Context) -> anyhow::Result<Option<PathBuf>> {
    match (&context.state_dir, &context.cluster) {
        (Some(folder), _) => Ok(Some(folder.clone())),
        (None, Some(name)) => Ok(Some(state::base()?.join(name))),
        (None, None) => Ok(None),
    }
}

/// Sends SIGTERM to the supervisor, and SIGKILL after the grace period; its child processes exit with it.
async fn stop(running: &Running, limit: Duration, context: &Context) -> anyhow::Result<()> {
    let supervisor = running.endpoints.supervisor;
    let deadline = Instant::now() + limit;
    supervisor.signal(Signal::SIGTERM);
    while supervisor.is_alive() {
        if Instant::now() >= deadline {
            context.output.note(format!("process {} did not stop in time; killing it", supervisor.pid));
            supervisor.signal(Signal::SIGKILL);
        }
        if Instant::now() >= deadline + limit {
            let message = format!("process {} did not exit", supervisor.pid);
            return Err(problem(Code::DeadlineExceeded, message));
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(())
}

fn confirm(question: &str) -> anyhow::Result<()> {
    if !std::io::stdin().is_terminal() {
        return Err(failure(ExitCode::Usage, format!("{question} stdin is not a terminal; confirm with --yes")));
    }
    write!(std::io::stderr(), "{question} [y/N] ").context("failed to prompt")?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer).context("failed to read the answer")?;
    if matches!(answer.trim(), "y" | "Y" | "yes") {
        return Ok(());
    }
    Err(crate::error::Exit(ExitCode::Interrupted).into())
}
