//! The `engram` command: one binary that talks to a cluster, and that is a local cluster when asked to be.
//!
//! ```text
//! arguments ── target (which cluster?) ── commands ── engram-client ── route ── cluster, here or in Kubernetes
//!                                     └── local: supervisor of `engram coordinator` and `engram worker` processes
//! ```
//!
//! Data goes to stdout, everything else to stderr. Every failure ends in [`error::report`], which decides the exit code.
#![forbid(unsafe_code)]

mod args;
mod commands;
mod error;
mod kubernetes;
mod local;
mod output;
mod plugin;
mod progress;
mod route;
mod rows;
mod snapshot;
mod target;

use args::Arguments;
use std::process::ExitCode;

fn main() -> ExitCode {
    let role = plugin::Role::of(std::env::args_os().next().as_deref());
    if role == plugin::Role::Completion {
        return plugin::complete();
    }
    let arguments = Arguments::read();
    let context = arguments.global.context(role == plugin::Role::Plugin);
    // All tasks run on this thread: children that `up` starts die with the thread that started them, and this one lasts
    // as long as the process.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return error::report(&anyhow::Error::new(error).context("failed to start"), &context),
    };
    let result = match arguments.command {
        commands::Command::Process(process) => process.run(),
        command => runtime.block_on(commands::run(command, &context)),
    };
    // A task that blocks (a read of a file that never answers) must not keep the command from ending.
    runtime.shutdown_background();
    match result {
        Ok(code) => code.into(),
        Err(error) => error::report(&error, &context),
    }
}
