//! State of a run: what the operator knows of it, and what the workers report.

use std::collections::BTreeMap;

use engram_api::RunKind;
use engram_api::status::{JobStatus, SnapshotResult};
use engram_proto::v1;

use crate::learner_run::queue::Wait;

/// State of a run as known to the operator.
#[derive(Clone, Debug, PartialEq)]
pub enum RunState {
    /// The spec is invalid.
    InvalidSpec(String),
    /// The run is not submitted yet.
    Pending {
        /// Machine-readable reason.
        reason: &'static str,
        /// Human-readable explanation.
        message: String,
    },
    /// Other runs are ahead in the queue.
    Queued(Wait),
    /// The run is suspended by its spec before it was submitted.
    Suspended,
    /// The run failed before it was submitted.
    Failed {
        /// Machine-readable reason.
        reason: &'static str,
        /// Human-readable explanation.
        message: String,
    },
    /// The run was submitted to the workers.
    Submitted(RunReport),
    /// The run failed and is retried.
    BackOff(Retry),
}

/// A retry of a run that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retry {
    /// Number of the retry, from 1.
    pub number: u32,
    /// When it starts, RFC 3339.
    pub time: String,
    /// What failed, for users.
    pub message: String,
}

impl RunState {
    /// Returns the state of a run that waits until the run of a deleted object of its name has ended. `previous` is that run, if known.
    pub fn replacing(name: &str, previous: Option<&RunReport>) -> Self {
        let progress = previous.map_or_else(String::new, |report| format!(" ({})", progress_text(report)));
        let message =
            format!("waits until the previous run {name}, whose object was deleted, has been cancelled{progress}");
        Self::Pending { reason: "ReplacingRun", message }
    }
}

/// State of a run as reported by the workers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunReport {
    /// Phase.
    pub phase: v1::RunPhase,
    /// Completed epochs.
    pub epoch: u64,
    /// Total number of epochs; 0 = unknown.
    pub epochs: u64,
    /// Estimated seconds to completion; negative = unknown.
    pub eta_seconds: f64,
    /// Pod of the worker that drives it.
    pub driver: Option<String>,
    /// Metrics by name.
    pub metrics: Vec<(String, f64)>,
    /// Results as small texts by name.
    pub outputs: BTreeMap<String, String>,
    /// Error, or what the run is waiting for.
    pub message: String,
    /// Kind of the run; `None` for one of a newer version.
    pub kind: Option<RunKind>,
    /// Result of a snapshot.
    pub written: Option<SnapshotResult>,
    /// Processes of a run of kind Job.
    pub job: Option<JobStatus>,
}

impl RunReport {
    /// Returns whether the run waits for other runs: those that change no memories do not.
    pub(super) fn queues(&self) -> bool {
        self.kind.is_none_or(|kind| !matches!(kind, RunKind::Snapshot | RunKind::Job) && !kind.has_tasks())
    }
}

/// Describes the progress.
pub(super) fn progress_text(report: &RunReport) -> String {
    let (one, many) = match report.kind {
        Some(RunKind::Snapshot) => ("partition", "partitions"),
        Some(RunKind::Job) => ("process", "processes"),
        Some(kind) if kind.has_tasks() => ("task", "tasks"),
        _ => ("epoch", "epochs"),
    };
    let done = match report.epochs {
        0 => format!("{} {many} done", report.epoch),
        all => format!("{one} {} of {all}", report.epoch),
    };
    // The current step, or what the run waits for.
    let is_open = matches!(report.phase, v1::RunPhase::Running | v1::RunPhase::Suspended);
    let is_running = is_open && !report.message.is_empty();
    if is_running { format!("{done}; {}", report.message) } else { done }
}
