//! The kinds of runs that are split into tasks.

use super::geodesic::Geodesic;
use super::{FisherTasks, TaskError, TaskRun, TropicalTasks};
use engram_api::{LearnerRunSpec, RunKind};

/// Returns what a run computes. `data` is the content of its data file, if the specification names one.
///
/// # Errors
/// The specification or the data cannot be used, or runs of this kind are not split into tasks.
pub fn task_run(spec: &LearnerRunSpec, data: Option<&[u8]>) -> Result<Box<dyn TaskRun>, TaskError> {
    let missing = |block: &str| TaskError::Invalid(format!("spec.{block} is missing"));
    match spec.kind {
        RunKind::Geodesic => {
            let run = spec.geodesic.as_ref().ok_or_else(|| missing("geodesic"))?;
            Ok(Box::new(Geodesic::new(run, data)?))
        }
        RunKind::Tropical => {
            let run = spec.tropical.as_ref().ok_or_else(|| missing("tropical"))?;
            Ok(Box::new(TropicalTasks::new(run, data)?))
        }
        RunKind::Fisher => {
            let run = spec.fisher.as_ref().ok_or_else(|| missing("fisher"))?;
            Ok(Box::new(FisherTasks::new(run, data)?))
        }
        kind => Err(TaskError::Invalid(format!("spec.kind is {kind}; allowed: Geodesic, Tropical, Fisher"))),
    }
}
