//! Metrics of training members.

use crate::observability::metrics::Registrar;
use engram_proto::v1;
use engram_train::CompressionLevel;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

/// Figure of automatic compression.
pub(crate) const COMPRESSION_LEVEL: &str = "compression_level";
/// Names of its levels.
pub(crate) const LEVELS: [&str; 3] = ["None", "Bf16", "PowerSgd"];

/// Figures of the Replay runs that this worker drives: name in their status, name and help of the gauge.
const FIGURES: [(&str, &str, &str); 8] = [
    (
        "efficiency",
        "training_efficiency",
        "Samples per second of the group of a Replay run, divided by the sum of what its members compute without communication",
    ),
    ("samples_per_second", "training_samples_per_second", "Samples per second of the group of a Replay run"),
    ("step_seconds", "training_step_seconds", "Time of a step of a Replay run, over two seconds"),
    (
        "reduce_seconds",
        "training_step_reduce_seconds",
        "Part of the step of a Replay run spent in reduction and commit",
    ),
    (
        COMPRESSION_LEVEL,
        "training_compression_level",
        "Level of automatic compression of a Replay run: 0 whole sums, 1 Bf16, 2 PowerSgd",
    ),
    ("members", "training_group_members", "Workers that train a Replay run"),
    ("failed_members", "training_failed_members", "How often a worker left the group of a Replay run by a failure"),
    ("fallback", "training_fallback", "1 while a single worker of several trains a Replay run, otherwise 0"),
];

/// What the training members on this worker did. One field per series, therefore more than a dozen.
#[derive(Debug, Clone, Default)]
pub(crate) struct TrainingMetrics {
    pub(crate) members: Gauge,
    pub(crate) steps: Counter,
    pub(crate) samples: Counter,
    pub(crate) sent_bytes: Counter,
    pub(crate) compute_seconds: Counter<f64, AtomicU64>,
    pub(crate) reduce_seconds: Counter<f64, AtomicU64>,
    hidden_seconds: Counter<f64, AtomicU64>,
    draw_seconds: Counter<f64, AtomicU64>,
    drawn_ahead: Counter,
    pub(crate) group_changes: Counter,
    link_latency_seconds: Gauge<f64, AtomicU64>,
    link_bytes_per_second: Gauge<f64, AtomicU64>,
    algorithms: Family<AlgorithmLabels, Counter>,
    pub(crate) runs: RunFigures,
}

/// Gauges of the Replay runs that this worker drives.
#[derive(Debug, Clone, Default)]
pub(crate) struct RunFigures([Family<RunLabels, Gauge<f64, AtomicU64>>; FIGURES.len()]);

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RunLabels {
    run: String,
}

impl RunFigures {
    /// Shows the figures of a run that are measured; the others have no series.
    pub(crate) fn set(&self, run: &str, figures: &BTreeMap<String, f64>) {
        let labels = RunLabels { run: run.to_owned() };
        for ((figure, ..), gauge) in FIGURES.iter().zip(&self.0) {
            match figures.get(*figure) {
                Some(value) => drop(gauge.get_or_create(&labels).set(*value)),
                None => drop(gauge.remove(&labels)),
            }
        }
    }

    /// Removes the series of a run that this worker does not drive any more.
    pub(crate) fn remove(&self, run: &str) {
        self.set(run, &BTreeMap::new());
    }
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
        let help = "Time that the training members on this worker spent in reductions during the backward pass";
        registrar.register("training_hidden_reduce_seconds", &[], help, training.hidden_seconds.clone());
        let help = "Time that the steps of the training members on this worker waited for items of a buffer";
        registrar.register("training_draw_seconds", &[], help, training.draw_seconds.clone());
        let help =
            "Training steps of the members on this worker whose items of a buffer had been drawn before the step began";
        registrar.register("training_steps_drawn_ahead", &[], help, training.drawn_ahead.clone());
        let help = "Changes of training groups of the runs that this worker drives";
        registrar.register("training_group_changes", &[], help, training.group_changes.clone());
        let help = "Latency of the slowest link of the newest training group on this worker, measured when the group was formed";
        registrar.register("training_link_latency_seconds", &[], help, training.link_latency_seconds.clone());
        let help = "Bytes per second of the slowest link of the newest training group on this worker, measured when the group was formed";
        registrar.register("training_link_bytes_per_second", &[], help, training.link_bytes_per_second.clone());
        let help = "Training steps of the members on this worker, by the algorithm that reduced the gradients";
        registrar.register("training_reduced_steps", &["algorithm"], help, training.algorithms.clone());
        for ((_, name, help), gauge) in FIGURES.iter().zip(&training.runs.0) {
            registrar.register(name, &["run"], help, gauge.clone());
        }
        training
    }

    /// Counts what a member did since its last progress message.
    pub(in crate::training) fn add_progress(&self, progress: &v1::TrainingProgress) {
        self.steps.inc_by(progress.steps);
        self.samples.inc_by(progress.own_samples);
        self.sent_bytes.inc_by(progress.reduced_bytes);
        self.compute_seconds.inc_by(progress.compute_seconds);
        self.reduce_seconds.inc_by(progress.reduce_seconds);
        self.hidden_seconds.inc_by(progress.hidden_seconds);
        self.draw_seconds.inc_by(progress.draw_seconds);
        self.drawn_ahead.inc_by(progress.drawn_ahead);
        if progress.link_latency_seconds > 0.0 {
            self.link_latency_seconds.set(progress.link_latency_seconds);
            self.link_bytes_per_second.set(progress.link_bytes_per_second);
        }
        if let Some(algorithm) = algorithm_name(progress.algorithm()) {
            self.algorithms.get_or_create(&AlgorithmLabels { algorithm }).inc_by(progress.steps);
        }
    }
}

/// Returns the level of automatic compression in messages.
pub(crate) const fn wire_level(level: Option<CompressionLevel>) -> v1::CompressionLevel {
    match level {
        None => v1::CompressionLevel::Unspecified,
        Some(CompressionLevel::None) => v1::CompressionLevel::None,
        Some(CompressionLevel::Bf16) => v1::CompressionLevel::Bf16,
        Some(CompressionLevel::PowerSgd) => v1::CompressionLevel::PowerSgd,
    }
}

/// Returns the place of a level of automatic compression in [`LEVELS`]; `None` without one.
pub(crate) const fn level_number(level: v1::CompressionLevel) -> Option<usize> {
    match level {
        v1::CompressionLevel::Unspecified => None,
        v1::CompressionLevel::None => Some(0),
        v1::CompressionLevel::Bf16 => Some(1),
        v1::CompressionLevel::PowerSgd => Some(2),
    }
}

/// Returns the name of an algorithm; `None` without a reduction.
pub(crate) const fn algorithm_name(algorithm: v1::ReduceAlgorithm) -> Option<&'static str> {
    use engram_collective::cost::Algorithm;
    Some(match algorithm {
        v1::ReduceAlgorithm::Unspecified => return None,
        v1::ReduceAlgorithm::OneShot => Algorithm::OneShot.name(),
        v1::ReduceAlgorithm::RecursiveDoubling => Algorithm::RecursiveDoubling.name(),
        v1::ReduceAlgorithm::HalvingDoubling => Algorithm::HalvingDoubling.name(),
        v1::ReduceAlgorithm::Direct => Algorithm::Direct.name(),
        v1::ReduceAlgorithm::Ring => Algorithm::Ring.name(),
        v1::ReduceAlgorithm::GatherBroadcast => Algorithm::GatherBroadcast.name(),
        v1::ReduceAlgorithm::Nccl => "Nccl",
    })
}
