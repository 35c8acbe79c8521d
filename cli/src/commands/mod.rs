//! One file per command. A command finds its cluster, asks, prints; what it prints goes through `output`.

mod completions;
mod config;
pub(crate) mod data;
mod down;
mod explain;
mod logs;
pub(crate) mod manifest;
mod process;
mod ps;
mod status;
mod top;
mod up;
mod validate;
mod version;
mod watch;

use crate::args::Context;
use engram_api::ExitCode;

/// The commands, in the order of the help.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    Up(up::Arguments),
    Down(down::Arguments),
    Ps(ps::Arguments),
    Logs(logs::Arguments),
    Status(status::Arguments),
    Top(top::Arguments),
    #[command(flatten)]
    Data(data::Data),
    Validate(validate::Arguments),
    Config(config::Arguments),
    Explain(explain::Arguments),
    Version(version::Arguments),
    Completions(completions::Arguments),
    #[command(flatten)]
    Process(process::Process),
}

/// Runs a command on the runtime.
///
/// # Errors
/// As the command says.
pub(crate) async fn run(command: Command, context: &Context) -> anyhow::Result<ExitCode> {
    match command {
        Command::Up(arguments) => up::run(&arguments, context).await,
        Command::Down(arguments) => down::run(&arguments, context).await,
        Command::Ps(arguments) => ps::run(&arguments, context).await,
        Command::Logs(arguments) => logs::run(&arguments, context).await,
        Command::Status(arguments) => status::run(&arguments, context).await,
        Command::Top(arguments) => top::run(&arguments, context).await,
        Command::Data(command) => data::run(command, context).await,
        Command::Validate(arguments) => validate::run(&arguments, context),
        Command::Config(arguments) => config::run(&arguments, context),
        Command::Explain(arguments) => explain::run(&arguments, context),
        Command::Version(arguments) => version::run(&arguments, context).await,
        Command::Completions(arguments) => completions::run(&arguments, context),
        Command::Process(process) => process.run(),
    }
}
