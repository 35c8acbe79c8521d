//! Metrics of training members.

use crate::metrics::Registrar;
use engram_proto::v1;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
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
    link_latency_seconds: Gauge<f64, AtomicU64>,
    link_bytes_per_second: Gauge<f64, AtomicU64>,
    algorithms: Family<AlgorithmLabels, Counter>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AlgorithmLabels {
    algorithm: &'static str,
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
        let help = "Latency of the slowest link of the newest training group on this worker, measured when the group was formed";
        registrar.register("training_link_latency_seconds", &[], help, training.link_latency_seconds.clone());
        let help = "Bytes per second of the slowest link of the newest training group on this worker, measured when the group was formed";
        registrar.register("training_link_bytes_per_second", &[], help, training.link_bytes_per_second.clone());
        let help = "Training steps of the members on this worker, by the algorithm that reduced the gradients";
        registrar.register("training_reduced_steps", &["algorithm"], help, training.algorithms.clone());
        training
    }

    /// Counts what a member did since its last progress message.
    pub(super) fn add_progress(&self, progress: &v1::TrainingProgress) {
        self.steps.inc_by(progress.steps);
        self.samples.inc_by(progress.own_samples);
        self.sent_bytes.inc_by(progress.reduced_bytes);
        self.compute_seconds.inc_by(progress.compute_seconds);
        self.reduce_seconds.inc_by(progress.reduce_seconds);
        if progress.link_latency_seconds > 0.0 {
            self.link_latency_seconds.set(progress.link_latency_seconds);
            self.link_bytes_per_second.set(progress.link_bytes_per_second);
        }
        if let Some(algorithm) = algorithm_name(progress.algorithm()) {
            self.algorithms.get_or_create(&AlgorithmLabels { algorithm }).inc_by(progress.steps);
        }
    }
}

const fn algorithm_name(algorithm: v1::ReduceAlgorithm) -> Option<&'static str> {
    use engram_collective::cost::Algorithm;
    Some(match algorithm {
        v1::ReduceAlgorithm::Unspecified => return None,
        v1::ReduceAlgorithm::OneShot => Algorithm::OneShot.name(),
        v1::ReduceAlgorithm::RecursiveDoubling => Algorithm::RecursiveDoubling.name(),
        v1::ReduceAlgorithm::HalvingDoubling => Algorithm::HalvingDoubling.name(),
        v1::ReduceAlgorithm::Direct => Algorithm::Direct.name(),
        v1::ReduceAlgorithm::Ring => Algorithm::Ring.name(),
        v1::ReduceAlgorithm::GatherBroadcast => Algorithm::GatherBroadcast.name(),
    })
}
