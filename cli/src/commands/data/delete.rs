//! `engram delete`: removes the records of runs.

use super::job;
use crate::context::Context;
use crate::error::problem;
use crate::target::Target;
use engram_api::{Code, ExitCode};

/// Delete the records of runs
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Delete {
    /// Delete the record and the report of a run that has ended; what it has learned stays
    #[command(before_help = "Examples:
  engram delete run nightly
  engram list runs -o name | xargs engram delete run    all that have ended
  engram -n research delete run nightly                 delete the LearnerRun

A run that is submitted under the name later starts with its first epoch. A cluster keeps spec.maintenance.runHistoryLimit ended runs.")]
    Run {
        /// Names of the runs
        #[arg(required = true, value_name = "RUN")]
        names: Vec<String>,
    },
}

impl Delete {
    pub(crate) async fn run(self, context: &Context) -> anyhow::Result<ExitCode> {
        let Self::Run { names } = self;
        let target = Target::find(context).await?;
        if let Target::Kubernetes(cluster) = &target {
            for name in names {
                cluster.delete_run(&name).await?;
                context.output.note(format!("deleted LearnerRun {name}"));
            }
            return Ok(ExitCode::Ok);
        }
        let client = target.connect().await?;
        for name in names {
            if !job::delete(&target, &name)? && !client.remove_run(&name, "").await? {
                return Err(problem(Code::RunUnknown, format!("run {name} not found")));
            }
            context.output.note(format!("deleted the record of run {name}"));
        }
        Ok(ExitCode::Ok)
    }
}
