//! Status of a run.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Phase of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// Waiting for its turn.
    #[default]
    Queued,
    /// Learning.
    Running,
    /// Completed.
    Succeeded,
    /// Failed, with a reason.
    Failed,
    /// Cancelled by request.
    Cancelled,
    /// Suspended after an epoch. A record holds the phase to resume from and a separate flag.
    Suspended,
}

/// Order to a driver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Order {
    /// Continue.
    #[default]
    Continue,
    /// Stop after the epoch in progress, so that the run can be resumed.
    Suspend,
    /// Stop after the epoch in progress permanently.
    Cancel,
}

impl Phase {
    /// Returns whether the phase is final.
    pub const fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Cancelled)
    }
}

/// Status of a run for users and monitoring. Rates are over the time of this driver.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Status {
    /// Phase.
    pub phase: Phase,
    /// Epochs done.
    pub epoch: u64,
    /// Total epochs; `None` if the source does not know.
    pub epochs: Option<u64>,
    /// Updates applied.
    pub updates: u64,
    /// Seconds of learning, over all drivers.
    pub elapsed_s: f64,
    /// Epochs per second.
    pub epochs_per_s: f64,
    /// Updates per second.
    pub updates_per_s: f64,
    /// Label of the last epoch.
    pub label: String,
    /// What it waits for, or why it ended.
    pub message: String,
    /// Error code; empty without an error.
    pub code: String,
    /// Named metrics: separation, convergence, hit_rate_500, ...
    pub metrics: BTreeMap<String, f64>,
    /// Small strings that the run produced, by name: digest, url, ...
    pub outputs: BTreeMap<String, String>,
    /// Whether it waits for credentials to be supplied.
    pub needs_credentials: bool,
    /// The written snapshot, for snapshot runs.
    pub snapshot: Option<super::SnapshotResult>,
    /// Tasks in execution, by worker.
    pub tasks: Vec<RunningTask>,
}

/// A task in execution.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunningTask {
    /// Number of the task, from 1 on over all stages.
    pub number: u64,
    /// Its name.
    pub name: String,
    /// Ordinal of the worker that executes it.
    pub worker: u32,
    /// Completed share, 0 to 1.
    pub fraction: f64,
    /// Workers that were lost while they executed it.
    pub losses: u32,
    /// Share from which another worker would continue, 0 to 1; 0 without a checkpoint.
    pub checkpoint: f64,
}

impl Status {
    /// Returns the remaining seconds at the current rate, if both are known.
    pub fn eta_s(&self) -> Option<f64> {
        let left = self.epochs?.checked_sub(self.epoch)?;
        (self.epochs_per_s > 0.0).then(|| left as f64 / self.epochs_per_s)
    }
}
