//! `engram suspend` and `engram resume`: a run stops after its epoch and keeps its place, or goes on from there.

use crate::args::Context;
use crate::target::Target;
use engram_api::ExitCode;
use engram_proto::v1::RunPhase;

/// Stop a run after its epoch; it keeps its place, and others have the turn
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram suspend nightly                  returns when no epoch of it is under way
  engram -n research suspend nightly      sets spec.suspend of the LearnerRun")]
pub(crate) struct Suspend {
    /// Name of the run
    #[arg(value_name = "RUN")]
    run: String,
}

/// Let a suspended run go on with its next epoch
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram resume nightly                   it waits for its turn, as any run
  engram -n research resume nightly       sets spec.suspend of the LearnerRun")]
pub(crate) struct Resume {
    /// Name of the run
    #[arg(value_name = "RUN")]
    run: String,
}

pub(crate) async fn suspend(arguments: &Suspend, context: &Context) -> anyhow::Result<ExitCode> {
    run(&arguments.run, true, context).await
}

pub(crate) async fn resume(arguments: &Resume, context: &Context) -> anyhow::Result<ExitCode> {
    run(&arguments.run, false, context).await
}

async fn run(name: &str, suspend: bool, context: &Context) -> anyhow::Result<ExitCode> {
    let target = Target::find(context).await?;
    if let Target::Kubernetes(cluster) = &target {
        // The operator has it done: it would undo what was done behind its back.
        cluster.suspend_run(name, suspend).await?;
        context.output.note(format!("set spec.suspend of LearnerRun {name} to {suspend}"));
        return Ok(ExitCode::Ok);
    }
    let client = target.connect().await?;
    let status = super::run::suspend(&client, name, suspend).await?;
    context.output.note(match status.phase() {
        RunPhase::Suspended => {
            format!("run {name} is suspended after {} epochs; to go on: engram resume {name}", status.epoch)
        }
        RunPhase::Succeeded | RunPhase::Failed | RunPhase::Cancelled => format!("run {name} has ended already"),
        _ => format!("run {name} goes on after {} epochs; to follow it: engram describe run {name}", status.epoch),
    });
    Ok(ExitCode::Ok)
}
