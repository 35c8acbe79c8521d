//! What a run says of itself while it goes on.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Where a run stands in its life.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// Waits for its turn.
    #[default]
    Queued,
    /// Learns.
    Running,
    /// Done.
    Succeeded,
    /// Given up, with a reason.
    Failed,
    /// Stopped because somebody asked.
    Cancelled,
    /// Stopped after an epoch, and can go on. A record holds the phase to go on from, and says apart that it is suspended.
    Suspended,
}

/// What is asked of a driver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Order {
    /// Go on.
    #[default]
    GoOn,
    /// Stop after the epoch in progress, in such a way that the run can go on.
    Suspend,
    /// Stop after the epoch in progress, for good.
    Cancel,
}

impl Phase {
    /// Whether it will never change again.
    pub const fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Cancelled)
    }
}

/// The state of a run for people and monitors. Rates are over the time this driver has worked.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Status {
    /// Phase.
    pub phase: Phase,
    /// Epochs done.
    pub epoch: u64,
    /// Epochs there will be; `None` when the source does not say.
    pub epochs: Option<u64>,
    /// Updates applied.
    pub updates: u64,
    /// Seconds it has been learning, all drivers together.
    pub elapsed_s: f64,
    /// Epochs per second.
    pub epochs_per_s: f64,
    /// Updates per second.
    pub updates_per_s: f64,
    /// Label of the last epoch.
    pub label: String,
    /// What it waits for, or why it ended.
    pub message: String,
    /// Number under which the error is explained; empty when there is none.
    pub code: String,
    /// Short named figures: separation, convergence, hit_rate_500, ...
    pub metrics: BTreeMap<String, f64>,
    /// It waits for credentials that somebody has to hand over.
    pub needs_credentials: bool,
    /// The snapshot that was written, of a run of that kind.
    pub snapshot: Option<super::SnapshotResult>,
}

impl Status {
    /// Seconds to go at the present rate, where both are known.
    pub fn eta_s(&self) -> Option<f64> {
        let left = self.epochs?.checked_sub(self.epoch)?;
        (self.epochs_per_s > 0.0).then(|| left as f64 / self.epochs_per_s)
    }
}
