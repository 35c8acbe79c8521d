//! One file per command. A command finds its cluster, asks, prints; what it prints goes through `output`.

mod chaos;
mod completions;
mod config;
mod copies;
pub(crate) mod data;
mod down;
mod explain;
mod goal;
mod logs;
pub(crate) mod manifest;
mod manifests;
mod orders;
mod partition;
mod process;
mod profile;
mod ps;
mod status;
mod top;
mod up;
pub(crate) mod upgrade_check;
mod validate;
mod version;
mod watch;

use crate::args::Context;
use crate::error::said;
use data::Data;
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
    Profile(profile::Arguments),
    Scale(goal::Scale),
    Drain(goal::Drain),
    #[command(subcommand)]
    Partition(partition::Partition),
    Chaos(chaos::Arguments),
    #[command(flatten)]
    Data(Data),
    Validate(validate::Arguments),
    Config(config::Arguments),
    Manifests(manifests::Arguments),
    Explain(explain::Arguments),
    Version(version::Arguments),
    UpgradeCheck(upgrade_check::Arguments),
    Completions(completions::Arguments),
    #[command(flatten)]
    Process(process::Process),
}

impl Command {
    /// The name of a command that can do nothing for a cluster in Kubernetes, and what does it there.
    const fn local_only(&self) -> Option<(&'static str, &'static str)> {
        Some(match self {
            Self::Up(_) => ("up", "kubectl apply -f FILE"),
            Self::Down(_) => {
                ("down", "kubectl delete learnercluster NAME; its volumes stay, unless its spec says otherwise")
            }
            Self::Ps(_) => ("ps", "kubectl get pods -l engram.dev/cluster=NAME"),
            Self::Logs(_) => ("logs", "kubectl logs -l engram.dev/cluster=NAME"),
            Self::Drain(_) => (
                "drain",
                "the operator empties workers; kubectl annotate learnercluster NAME engram.dev/replace=POD-UID has it empty and replace one",
            ),
            Self::Chaos(_) => ("chaos", "it starts and kills processes"),
            Self::Data(Data::Snapshot(_)) => ("snapshot", "this version makes snapshots of local clusters only"),
            _ => return None,
        })
    }
}

/// Runs a command on the runtime.
///
/// # Errors
/// As the command says.
pub(crate) async fn run(command: Command, context: &Context) -> anyhow::Result<ExitCode> {
    if context.kubernetes.is_some()
        && let Some((name, instead)) = command.local_only()
    {
        let message =
            format!("engram {name} is about a cluster on this machine, and not about one in Kubernetes: {instead}");
        return Err(said(ExitCode::Usage, message));
    }
    match command {
        Command::Up(arguments) => up::run(&arguments, context).await,
        Command::Down(arguments) => down::run(&arguments, context).await,
        Command::Ps(arguments) => ps::run(&arguments, context).await,
        Command::Logs(arguments) => logs::run(&arguments, context).await,
        Command::Status(arguments) => status::run(&arguments, context).await,
        Command::Top(arguments) => top::run(&arguments, context).await,
        Command::Profile(arguments) => profile::run(&arguments, context).await,
        Command::Scale(arguments) => goal::scale(&arguments, context).await,
        Command::Drain(arguments) => goal::drain(&arguments, context).await,
        Command::Partition(command) => partition::run(&command, context).await,
        Command::Chaos(arguments) => chaos::run(&arguments, context).await,
        Command::Data(command) => data::run(command, context).await,
        Command::Validate(arguments) => validate::run(&arguments, context),
        Command::Config(arguments) => config::run(&arguments, context),
        Command::Manifests(arguments) => manifests::run(&arguments, context),
        Command::Explain(arguments) => explain::run(&arguments, context),
        Command::Version(arguments) => version::run(&arguments, context).await,
        Command::UpgradeCheck(arguments) => upgrade_check::run(&arguments, context).await,
        Command::Completions(arguments) => completions::run(&arguments, context),
        Command::Process(process) => process.run(),
    }
}
