//! `engram suspend` and `engram resume`: stop a run after its current epoch, and continue it.

use crate::context::Context;
use crate::target::Target;
use engram_api::ExitCode;
use engram_proto::v1::RunPhase;

/// Suspend a run after its current epoch; other queued runs can start
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram suspend nightly                  return when the current epoch is complete
  engram -n research suspend nightly      set spec.suspend of the LearnerRun")]
pub(crate) struct Suspend {
    /// Name of the run
    #[arg(value_name = "RUN")]
    run: String,
}

/// Resume a suspended run with its next epoch
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram resume nightly                   queue the run again
  engram -n research resume nightly       set spec.suspend of the LearnerRun")]
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
        // In Kubernetes the spec is authoritative: the operator would revert a direct request.
        cluster.suspend_run(name, suspend).await?;
        context.output.note(format!("set spec.suspend of LearnerRun {name} to {suspend}"));
        return Ok(ExitCode::Ok);
    }
    let client = target.connect().await?;
    let status = super::run::suspend(&client, name, suspend).await?;
    let (epoch, command) = (status.epoch, |name: &str| context.output.command_line(name));
    context.output.note(match status.phase() {
        RunPhase::Suspended => {
            format!("suspended run {name} after {epoch} epochs; to resume: {}", command(&format!("resume {name}")))
        }
        RunPhase::Failed | RunPhase::Cancelled => {
            format!("run {name} has ended after {epoch} epochs; submitted again (engram run FILE) it continues")
        }
        RunPhase::Succeeded => format!("run {name} is already finished"),
        _ => {
            let describe = command(&format!("describe run {name}"));
            format!("resumed run {name} after {epoch} epochs; show its progress: {describe}")
        }
    });
    Ok(ExitCode::Ok)
}
