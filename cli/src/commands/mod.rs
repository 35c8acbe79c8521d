//! One module per command. A command finds its cluster, sends requests and prints the result through `output`.

mod autoscale;
mod chaos;
mod completions;
mod config;
mod data;
mod down;
mod edge;
mod explain;
mod federated;
mod logs;
mod manifest;
mod manifests;
mod overview;
mod partition;
mod process;
mod profile;
mod proxy;
mod ps;
mod replication;
mod scale;
mod status;
mod top;
mod tune;
mod up;
mod upgrade_check;
mod validate;
mod version;

use crate::context::Context;
use crate::error::failure;
use data::Data;
use engram_api::ExitCode;

/// All commands, in the order of the help.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    Up(up::Up),
    Down(down::Down),
    Ps(ps::Ps),
    Logs(logs::Logs),
    Status(status::Status),
    Top(top::Top),
    Profile(profile::Profile),
    Scale(scale::Scale),
    Drain(scale::Drain),
    #[command(subcommand)]
    Partition(partition::Partition),
    Chaos(chaos::Chaos),
    #[command(subcommand)]
    Autoscale(autoscale::Autoscale),
    #[command(flatten)]
    Data(Data),
    #[command(subcommand)]
    Federated(federated::Federated),
    Edge(engram_edge::Edge),
    Tune(tune::Tune),
    Validate(validate::Validate),
    Config(config::Config),
    Manifests(manifests::Manifests),
    Explain(explain::Explain),
    Version(version::Version),
    UpgradeCheck(upgrade_check::UpgradeCheck),
    Completions(completions::Completions),
    #[command(flatten)]
    Process(process::Process),
    #[command(hide = true)]
    Proxy(proxy::Proxy),
}

impl Command {
    /// Returns the name of a command for local clusters only, and its alternative in Kubernetes.
    pub(crate) const fn local_only(&self) -> Option<(&'static str, &'static str)> {
        Some(match self {
            Self::Up(_) => ("up", "kubectl apply -f FILE"),
            Self::Down(_) => (
                "down",
                "kubectl delete learnercluster NAME; spec.storage.retainPolicy decides whether the volumes are kept",
            ),
            Self::Ps(_) => ("ps", "kubectl get pods -l engram.dev/cluster=NAME"),
            Self::Logs(_) => ("logs", "kubectl logs -l engram.dev/cluster=NAME"),
            Self::Drain(_) => (
                "drain",
                "to drain and replace one worker: kubectl annotate learnercluster NAME engram.dev/replace=POD-UID",
            ),
            Self::Chaos(_) => ("chaos", "it starts and kills local processes"),
            Self::Data(Data::Snapshot(_)) => ("snapshot", "use a LearnerRun of kind Snapshot"),
            _ => return None,
        })
    }
}

/// Runs the command. `grammar` returns the grammar of the command line, for completions.
pub(crate) async fn run(
    command: Command,
    context: &Context,
    grammar: fn() -> clap::Command,
) -> anyhow::Result<ExitCode> {
    if context.kubernetes.is_some()
        && let Some((name, instead)) = command.local_only()
    {
        let message = format!("engram {name} works on local clusters only; in Kubernetes: {instead}");
        return Err(failure(ExitCode::Usage, message));
    }
    match command {
        Command::Up(arguments) => up::run(&arguments, context).await,
        Command::Down(arguments) => down::run(&arguments, context).await,
        Command::Ps(arguments) => ps::run(&arguments, context).await,
        Command::Logs(arguments) => logs::run(&arguments, context).await,
        Command::Status(arguments) => status::run(&arguments, context).await,
        Command::Top(arguments) => top::run(&arguments, context).await,
        Command::Profile(arguments) => profile::run(&arguments, context).await,
        Command::Scale(arguments) => scale::scale(&arguments, context).await,
        Command::Drain(arguments) => scale::drain(&arguments, context).await,
        Command::Partition(command) => partition::run(&command, context).await,
        Command::Chaos(arguments) => chaos::run(&arguments, context).await,
        Command::Data(command) => data::run(command, context).await,
        Command::Autoscale(command) => autoscale::run(&command, context).await,
        Command::Federated(command) => federated::run(&command, context).await,
        Command::Edge(arguments) => edge::run(&arguments, context).await,
        Command::Tune(arguments) => tune::run(&arguments, context).await,
        Command::Validate(arguments) => validate::run(&arguments, context),
        Command::Config(arguments) => config::run(&arguments, context),
        Command::Manifests(arguments) => manifests::run(&arguments, context),
        Command::Explain(arguments) => explain::run(&arguments, context),
        Command::Version(arguments) => version::run(&arguments, context).await,
        Command::UpgradeCheck(arguments) => upgrade_check::run(&arguments, context).await,
        Command::Completions(arguments) => completions::run(&arguments, grammar(), context),
        Command::Process(process) => process.run(),
        Command::Proxy(arguments) => proxy::run(&arguments, context).await,
    }
}
