//! Runs of kind `Job` on a local cluster: processes of the command that executes the run, and their records in the state directory.
//!
//! Invariants: a process never outlives the command that started it (Linux: the kernel kills it with its parent); the record of a run
//! whose command was killed reads as failed; all processes of a job are stopped when it fails or is cancelled.
//!
//! ```text
//! jobs/NAME/status.json   state of the run and its processes
//! jobs/NAME/INDEX.log     output of a process
//! ```

mod record;
mod supervisor;

pub(crate) use record::{JobPhase, JobRecord};
pub(crate) use supervisor::{Job, JobPlan, stopped};

use anyhow::Context as _;
use engram_api::ExitCode;
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;

/// Becomes the program of a user, as a process that the kernel kills with its parent (Linux).
pub(crate) fn become_program(command: &[OsString]) -> anyhow::Result<ExitCode> {
    #[cfg(target_os = "linux")]
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)
        .context("failed to tie this process to its parent")?;
    let (program, arguments) = command.split_first().context("no program given")?;
    let error = std::process::Command::new(program).args(arguments).exec();
    // The exit code that shells use for a program that was not found.
    eprintln!("failed to start {}: {error}", program.display());
    std::process::exit(127)
}
