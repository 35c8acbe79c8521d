//! Metrics of buffers, by name.

use crate::observability::metrics::Registrar;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct BufferLabels {
    buffer: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct WaitLabels {
    buffer: String,
    reason: &'static str,
}

/// What calls of this worker did with buffers.
#[derive(Debug, Default)]
pub(crate) struct BufferMetrics {
    pub(crate) items: Family<BufferLabels, Gauge<u64, AtomicU64>>,
    pub(crate) inserted: Family<BufferLabels, Counter>,
    pub(crate) sampled: Family<BufferLabels, Counter>,
    pub(crate) wait_seconds: Family<WaitLabels, Counter<f64, AtomicU64>>,
    /// Calls that wait now.
    pub(crate) waiting: Family<WaitLabels, Gauge>,
    pub(crate) declaration_problems: Gauge,
}

impl BufferMetrics {
    /// Creates the metrics, and registers them.
    pub(crate) fn new(registrar: &mut Registrar) -> Self {
        let buffers = Self::default();
        let labels = &["buffer"];
        let help = "Items of a replay buffer in the partitions served here";
        registrar.register("buffer_items", labels, help, buffers.items.clone());
        let help = "Items appended to a replay buffer through this worker";
        registrar.register("buffer_inserted", labels, help, buffers.inserted.clone());
        let help = "Items of a replay buffer drawn from the partitions served here";
        registrar.register("buffer_sampled", labels, help, buffers.sampled.clone());
        let help = "Time that calls waited for a replay buffer, by what they waited for";
        registrar.register("buffer_wait_seconds", &["buffer", "reason"], help, buffers.wait_seconds.clone());
        let help = "Calls that wait for a replay buffer now, by what they wait for";
        registrar.register("buffer_waiting", &["buffer", "reason"], help, buffers.waiting.clone());
        let help = "Buffers of spec.buffers that do not exist as declared, on the worker that creates them";
        registrar.register("buffer_declaration_problems", &[], help, buffers.declaration_problems.clone());
        buffers
    }

    /// Sets the items in partitions served here, by buffer. Buffers that are gone disappear.
    pub(crate) fn set_items(&self, items: Vec<(String, u64)>) {
        self.items.clear();
        for (buffer, items) in items {
            self.items.get_or_create(&BufferLabels { buffer }).inc_by(items);
        }
    }

    pub(crate) fn inserted(&self, buffer: &str, items: u64) {
        self.inserted.get_or_create(&BufferLabels { buffer: buffer.to_owned() }).inc_by(items);
    }

    pub(crate) fn sampled(&self, buffer: &str, items: u64) {
        self.sampled.get_or_create(&BufferLabels { buffer: buffer.to_owned() }).inc_by(items);
    }

    /// Moves a call from what it waited for to what it waits for.
    pub(crate) fn waits(&self, buffer: &str, before: Option<&'static str>, now: Option<&'static str>) {
        if before == now {
            return;
        }
        let gauge = |reason| self.waiting.get_or_create(&WaitLabels { buffer: buffer.to_owned(), reason }).clone();
        if let Some(gauge) = before.map(gauge) {
            gauge.dec();
        }
        if let Some(gauge) = now.map(gauge) {
            gauge.inc();
        }
    }

    pub(crate) fn waited(&self, buffer: &str, reason: &'static str, time: Duration) {
        let labels = WaitLabels { buffer: buffer.to_owned(), reason };
        self.wait_seconds.get_or_create(&labels).inc_by(time.as_secs_f64());
    }
}
