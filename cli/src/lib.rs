//! The `engram` command: client of a cluster, and supervisor of local clusters.
//!
//! ```text
//! args ── context ── target (which cluster) ── commands ── engram-client ── route ── cluster, local or in Kubernetes
//!                                          └── local: supervisor of `engram coordinator` and `engram worker` processes
//! ```
//!
//! Results go to stdout, everything else to stderr. Every failure ends in [`error::report`], which decides the exit code.
//! The library exists for the binary, for the generated reference page and for tests of documented commands.
#![forbid(unsafe_code)]

mod args;
mod commands;
mod context;
mod error;
mod kubernetes;
mod local;
mod output;
mod output_file;
mod plugin;
mod progress;
mod reference;
mod route;
mod rows;
mod snapshot;
mod target;

use args::Arguments;
use clap::CommandFactory as _;
use engram_trace::{Span, in_span};
use std::process::ExitCode;

pub use reference::reference;

/// Returns the grammar of the command line.
pub fn command() -> clap::Command {
    Arguments::command()
}

/// Runs a command as a trace, if the environment names a collector. Those that last are no trace: their calls are.
async fn traced(
    name: String,
    command: impl Future<Output = anyhow::Result<engram_api::ExitCode>>,
) -> anyhow::Result<engram_api::ExitCode> {
    let Some(telemetry) = engram_telemetry::start_traces("engram-cli", env!("CARGO_PKG_VERSION"))? else {
        return command.await;
    };
    let lasts = matches!(name.as_str(), "engram up" | "engram top" | "engram logs" | "engram chaos");
    let mut span = if lasts { Span::none() } else { Span::root(name) };
    let result = in_span(&span, command).await;
    span.note(&result);
    drop(span);
    // This thread carries the connection on which the last spans are sent.
    let sent = tokio::task::spawn_blocking(move || drop(telemetry));
    let _ = sent.await;
    result
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let role = plugin::Role::of(std::env::args_os().next().as_deref());
    if role == plugin::Role::Completion {
        return plugin::complete(&command());
    }
    let arguments = Arguments::read();
    let context = arguments.global.context(role == plugin::Role::Plugin);
    if matches!(arguments.command, commands::Command::Up(_)) && local::detach::is_child() {
        local::detach::close_inherited();
    }
    // Single-threaded: child processes of `up` are tied to the thread that starts them, and the main thread lives as long as the
    // process.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return error::report(&anyhow::Error::new(error).context("failed to start"), &context),
    };
    let result = match arguments.command {
        commands::Command::Process(process) => process.run(),
        subcommand => runtime.block_on(traced(arguments.name, commands::run(subcommand, &context, command))),
    };
    // A blocked task (a read that never returns) must not keep the process alive.
    runtime.shutdown_background();
    match result {
        Ok(code) => code.into(),
        Err(error) => error::report(&error, &context),
    }
}
