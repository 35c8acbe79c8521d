//! Runs that are split into tasks: stage after stage of independent tasks, spread over the workers of a cluster.
//!
//! A [`TaskRun`] decides what is computed; who computes it does not matter. A task is a pure function of its input, so a task of
//! a dead worker is given to another one, and the result of a run is the same on any number of workers. The results of all tasks
//! are kept in the record of the run until it ends: a driver that takes over starts only what is missing.
//!
//! ```text
//! plan(stage 0) -> tasks on workers -> results -> plan(stage 1) -> ... -> no more stages -> finish -> findings, report page
//! ```

mod accelerated;
mod assignment;
mod federated;
mod fisher;
mod fit;
mod geodesic;
mod local;
mod page;
mod random;
mod record;
mod registry;
mod samples;
mod timeline;
mod training;
mod tropical;
mod wire;

pub use engram_devices::{ComputeDevice, DeviceUsage};

pub use assignment::{Assignment, AssignmentAction, AssignmentEvent, MAX_LOSSES, WorkerNumber};
pub use federated::federated_page;
pub use fisher::FisherTasks;
pub use local::run_locally;
pub use record::{CorruptRow, RecordedTasks, TaskReport, TaskSummary, page_row, result_row, timeline_row};
pub use registry::task_run;
pub use samples::digits_table;
pub use timeline::{SpanDevice, TimelineKind, TimelineRow, TimelineSpan, timeline_page};
pub use training::training_page;
pub use tropical::TropicalTasks;

use crate::source::StopFlag;
use std::collections::BTreeMap;

/// Longest result of a task, and longest report page, in bytes: each is one message and one row of the record.
pub const MAX_RESULT_BYTES: usize = 3 << 20;

/// Longest input of a task, in bytes: with the data file of the run it is one message between workers.
pub const MAX_INPUT_BYTES: usize = 12 << 20;

/// One task of a stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Task {
    /// Name for progress and logs, unique within the run: `fold 3, start 1`.
    pub name: String,
    /// Input, opaque to the driver; at most [`MAX_INPUT_BYTES`].
    pub input: Vec<u8>,
    /// Expected relative cost, at least 1: the driver starts the most expensive tasks first.
    pub cost: u64,
}

/// Results of the tasks of one stage, in the order of the tasks.
pub type StageResults = Vec<Vec<u8>>;

/// What a task may use while it runs.
pub trait TaskContext: Sync {
    /// Reports the completed fraction of the task, in [0, 1].
    fn progress(&self, fraction: f64);

    /// Set once the task must end early; the task then returns [`TaskError::Stopped`].
    fn stop(&self) -> &StopFlag;

    /// Number of threads that the task may use, at least 1. The result must not depend on it.
    fn threads(&self) -> usize;

    /// Returns the GPUs for a computation of this many additions or multiplications; none if it is not worth the transfers. The result
    /// must not depend on them, unless the specification of the run allows it.
    fn gpus(&self, _operations: u64) -> &[ComputeDevice] {
        &[]
    }

    /// Returns the last checkpoint of an earlier execution of the task, on a worker that was lost. The result must not depend on it.
    fn resumed_from(&self) -> Option<&[u8]> {
        None
    }

    /// Returns whether a [`checkpoint`](Self::checkpoint) is due. A task that can be continued asks after every step.
    fn checkpoint_due(&self) -> bool {
        false
    }

    /// Keeps a state from which another worker can continue, at most [`MAX_RESULT_BYTES`], with the completed fraction of the task.
    fn checkpoint(&self, _state: Vec<u8>, _fraction: f64) {}
}

/// Error of a plan or of a task.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// The task had to stop early.
    #[error("stopped")]
    Stopped,
    /// The specification or the data of the run cannot be used. The message names the field or the row, the value and what is
    /// allowed.
    #[error("{0}")]
    Invalid(String),
    /// The computation failed, for example because a matrix is singular.
    #[error("{0}")]
    Failed(String),
}

/// What a run found.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TaskFindings {
    /// Figures by name, for `status.progress`, metrics and the last lines of `engram run`.
    pub metrics: BTreeMap<String, f64>,
    /// Small strings for `status.outputs`: digests, addresses, verdicts.
    pub outputs: BTreeMap<String, String>,
    /// Lines of text for the terminal, one plain sentence or table row each.
    pub summary: Vec<String>,
    /// The report as a self-contained HTML page, without scripts from elsewhere.
    pub page: String,
}

/// What a run of a certain kind computes. Implementations are pure: they do no I/O and read no clock.
pub trait TaskRun: Send + Sync {
    /// Returns the tasks of stage `results.len()`, given the results of all earlier stages; none = the run is complete.
    ///
    /// The same results always give the same tasks.
    ///
    /// # Errors
    /// The specification or the data cannot be used.
    fn plan(&self, results: &[StageResults]) -> Result<Vec<Task>, TaskError>;

    /// Executes a task and returns its result, at most [`MAX_RESULT_BYTES`]. It runs on a thread where blocking is allowed.
    ///
    /// # Errors
    /// See [`TaskError`].
    fn execute(&self, task: &Task, context: &dyn TaskContext) -> Result<Vec<u8>, TaskError>;

    /// Summarizes the results of all stages.
    ///
    /// # Errors
    /// See [`TaskError`].
    fn finish(&self, results: &[StageResults]) -> Result<TaskFindings, TaskError>;
}
