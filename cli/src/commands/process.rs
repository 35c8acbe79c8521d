//! The hidden commands `worker` and `coordinator`: one process of a local cluster, told by a file what it is for.

use crate::local::child;
use engram_api::ExitCode;
use std::path::PathBuf;

/// A process of a local cluster.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Process {
    /// Run one worker
    #[command(hide = true)]
    Worker(Arguments),
    /// Run the coordinator
    #[command(hide = true)]
    Coordinator(Arguments),
}

/// Where a process finds what it is for.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Options as JSON
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

impl Process {
    /// Runs it until it is told to stop, or until whoever started it is gone.
    ///
    /// # Errors
    /// It cannot start, or failed.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Worker(arguments) => child::worker(&arguments.config),
            Self::Coordinator(arguments) => child::coordinator(&arguments.config),
        }
    }
}
