//! Metrics of training members.

use crate::metrics::Registrar;
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
    /// Creates the metrics, and registers them.
    pub(crate) fn new(registrar: &mut Registrar) -> Self {
        let training = Self::default();
        let help = "Members of training groups on this worker";
        registrar.register("training_members", &[], help, training.members.clone());
        let help = "Training steps that the members on this worker committed";
        registrar.register("training_steps", &[], help, training.steps.clone());
        let help = "Samples that the training members on this worker computed";
        registrar.register("training_samples", &[], help, training.samples.clone());
        let help = "Bytes that the training members on this worker sent for reductions";
        registrar.register("training_sent_bytes", &[], help, training.sent_bytes.clone());
        let help = "Time that the training members on this worker computed, without communication";
        registrar.register("training_compute_seconds", &[], help, training.compute_seconds.clone());
        let help = "Time that the training members on this worker spent in reductions and commits";
        registrar.register("training_reduce_seconds", &[], help, training.reduce_seconds.clone());
        let help = "Changes of training groups of the runs that this worker drives";
        registrar.register("training_group_changes", &[], help, training.group_changes.clone());
        training
    }

    /// Counts what a member did since its last progress message.
    pub(super) fn add_progress(&self, progress: &v1::TrainingProgress) {
        self.steps.inc_by(progress.steps);
        self.samples.inc_by(progress.own_samples);
        self.sent_bytes.inc_by(progress.reduced_bytes);
        self.compute_seconds.inc_by(progress.compute_seconds);
        self.reduce_seconds.inc_by(progress.reduce_seconds);
    }
}
