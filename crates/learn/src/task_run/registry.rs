//! The kinds of runs that are split into tasks.

use super::{TaskError, TaskRun};
use engram_api::{LearnerRunSpec, RunKind};

/// Returns what a run computes. `data` is the content of its data file, if the specification names one.
///
/// # Errors
/// The specification or the data cannot be used, or runs of this kind are not split into tasks.
pub fn task_run(spec: &LearnerRunSpec, _data: Option<&[u8]>) -> Result<Box<dyn TaskRun>, TaskError> {
    let missing = |block: &str| TaskError::Invalid(format!("spec.{block} is missing"));
    match spec.kind {
        RunKind::Geodesic => Err(missing("geodesic")),
        RunKind::Tropical => Err(missing("tropical")),
        RunKind::Fisher => Err(missing("fisher")),
        kind => Err(TaskError::Invalid(format!("spec.kind is {kind}; allowed: Geodesic, Tropical, Fisher"))),
    }
}
