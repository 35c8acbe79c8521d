//! Metrics of Federated runs, by name of the run.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use std::sync::atomic::AtomicU64;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct RunLabels {
    run: String,
}

/// What the drivers on this worker did for their clients.
#[derive(Debug, Default)]
pub(crate) struct FederatedMetrics {
    pub(crate) rounds: Family<RunLabels, Counter>,
    pub(crate) aborted: Family<RunLabels, Counter>,
    pub(crate) updates: Family<RunLabels, Counter>,
    /// Tasks that ended without an update.
    pub(crate) missing: Family<RunLabels, Counter>,
    /// Updates that arrived after their lease or round had ended.
    pub(crate) late: Family<RunLabels, Counter>,
    pub(crate) clients: Family<RunLabels, Gauge<f64, AtomicU64>>,
    pub(crate) received_bytes: Family<RunLabels, Counter>,
    pub(crate) sent_bytes: Family<RunLabels, Counter>,
    pub(crate) epsilon: Family<RunLabels, Gauge<f64, AtomicU64>>,
    pub(crate) aggregation_seconds: Family<RunLabels, Counter<f64, AtomicU64>>,
}

fn labels(run: &str) -> RunLabels {
    RunLabels { run: run.to_owned() }
}

impl FederatedMetrics {
    /// Creates the series of a run that this worker drives from now on, since a rate needs the value before the first count. `epsilon` is
    /// what the run has spent, with privacy.
    pub(super) fn begin(&self, run: &str, epsilon: Option<f64>) {
        let counters = [
            &self.rounds,
            &self.aborted,
            &self.updates,
            &self.missing,
            &self.late,
            &self.received_bytes,
            &self.sent_bytes,
        ];
        counters.into_iter().for_each(|counter| drop(counter.get_or_create(&labels(run))));
        drop(self.aggregation_seconds.get_or_create(&labels(run)));
        if let Some(epsilon) = epsilon {
            self.epsilon.get_or_create(&labels(run)).set(epsilon);
        }
    }

    /// Counts a new version of a model.
    pub(super) fn aggregated(&self, run: &str, updates: usize, seconds: f64, epsilon: Option<f64>) {
        self.rounds.get_or_create(&labels(run)).inc();
        self.updates.get_or_create(&labels(run)).inc_by(updates as u64);
        self.aggregation_seconds.get_or_create(&labels(run)).inc_by(seconds);
        if let Some(epsilon) = epsilon {
            self.epsilon.get_or_create(&labels(run)).set(epsilon);
        }
    }

    pub(super) fn round_aborted(&self, run: &str) {
        self.aborted.get_or_create(&labels(run)).inc();
    }

    pub(super) fn task_missed(&self, run: &str) {
        self.missing.get_or_create(&labels(run)).inc();
    }

    pub(super) fn update_late(&self, run: &str) {
        self.late.get_or_create(&labels(run)).inc();
    }

    pub(super) fn set_clients(&self, run: &str, enrolled: usize) {
        self.clients.get_or_create(&labels(run)).set(enrolled as f64);
    }

    pub(super) fn received(&self, run: &str, bytes: usize) {
        self.received_bytes.get_or_create(&labels(run)).inc_by(bytes as u64);
    }

    pub(super) fn sent(&self, run: &str, bytes: usize) {
        self.sent_bytes.get_or_create(&labels(run)).inc_by(bytes as u64);
    }

    /// Removes the gauges of a run that this worker does not drive any more; its counters remain.
    pub(super) fn remove_gauges(&self, run: &str) {
        self.clients.remove(&labels(run));
        self.epsilon.remove(&labels(run));
    }
}
