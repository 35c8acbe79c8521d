//! Hidden commands `worker` and `coordinator`: one process of a local cluster, configured by a file.

use crate::local::child;
use engram_api::ExitCode;
use std::path::PathBuf;

/// A process of a local cluster.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Process {
    /// Run a worker process
    #[command(hide = true)]
    Worker(ProcessOptions),
    /// Run the coordinator process
    #[command(hide = true)]
    Coordinator(ProcessOptions),
}

#[derive(Debug, clap::Args)]
pub(crate) struct ProcessOptions {
    /// Options in JSON
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

impl Process {
    /// Runs the process until it is stopped or its parent exits.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Worker(arguments) => child::worker(&arguments.config),
            Self::Coordinator(arguments) => child::coordinator(&arguments.config),
        }
    }
}
