//! Metrics of training members.

use engram_proto::v1;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use std::sync::atomic::AtomicU64;

/// What the training members on this worker did.
#[derive(Debug, Clone, Default)]
pub(crate) struct TrainingMetrics {
    pub(crate) members: Gauge,
    pub(crate) steps: Counter,
    pub(crate) samples: Counter,
    pub(crate) sent_bytes: Counter,
    pub(crate) compute_seconds: Counter<f64, AtomicU64>,
    pub(crate) reduce_seconds: Counter<f64, AtomicU64>,
    pub(crate) group_changes: Counter,
}

impl TrainingMetrics {
    /// Counts what a member did since its last progress message.
    pub(super) fn add_progress(&self, progress: &v1::TrainingProgress) {
        self.steps.inc_by(progress.steps);
        self.samples.inc_by(progress.own_samples);
        self.sent_bytes.inc_by(progress.reduced_bytes);
        self.compute_seconds.inc_by(progress.compute_seconds);
        self.reduce_seconds.inc_by(progress.reduce_seconds);
    }
}
