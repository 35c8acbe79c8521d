//! Registration of metrics, with a descriptor of each.

pub use engram_api::metrics::{MetricDescriptor, MetricType};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Metric, Registry};
use std::sync::atomic::AtomicU64;

/// Labels of every series.
pub(super) const WORKER_LABELS: [&str; 2] = ["learner_cluster", "worker"];

/// Registers metrics and records their descriptors.
pub(crate) struct Registrar {
    pub(super) registry: Registry,
    pub(super) catalog: Vec<MetricDescriptor>,
}

impl Registrar {
    /// Registers `metric` as `engram_<name>`, whose series have `labels` in addition to those of the worker.
    pub(crate) fn register(&mut self, name: &str, labels: &[&'static str], help: &str, metric: impl Metric) {
        let (metric_type, suffix) = match metric.metric_type() {
            prometheus_client::metrics::MetricType::Counter => (MetricType::Counter, "_total"),
            prometheus_client::metrics::MetricType::Histogram => (MetricType::Histogram, ""),
            _ => (MetricType::Gauge, ""),
        };
        self.catalog.push(descriptor(&format!("{name}{suffix}"), metric_type, labels, help));
        self.registry.register(name, help, metric);
    }
}

pub(super) fn descriptor(name: &str, metric_type: MetricType, labels: &[&'static str], help: &str) -> MetricDescriptor {
    let labels = WORKER_LABELS.iter().chain(labels).copied().collect();
    MetricDescriptor { name: format!("engram_{name}"), metric_type, help: help.to_owned(), labels }
}

pub(super) fn counter(registrar: &mut Registrar, name: &str, help: &str) -> Counter {
    let counter = Counter::default();
    registrar.register(name, &[], help, counter.clone());
    counter
}

pub(super) fn gauge(registrar: &mut Registrar, name: &str, help: &str) -> Gauge<u64, AtomicU64> {
    let gauge = Gauge::default();
    registrar.register(name, &[], help, gauge.clone());
    gauge
}
