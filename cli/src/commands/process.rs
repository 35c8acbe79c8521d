//! Hidden commands `worker` and `coordinator`, one process of a local cluster, configured by a file, and `job-process`, one process
//! of a run of kind `Job`.

use crate::local::{child, job};
use engram_api::ExitCode;
use std::ffi::OsString;
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
    /// Run a process of a job
    #[command(hide = true)]
    JobProcess(JobProcess),
}

#[derive(Debug, clap::Args)]
pub(crate) struct JobProcess {
    /// Program and arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
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
            Self::JobProcess(arguments) => job::become_program(&arguments.command),
        }
    }
}
