//! Metrics of Federated runs, by name of the run.

use crate::observability::metrics::Registrar;
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
    /// Creates the metrics, and registers them.
    pub(crate) fn new(registrar: &mut Registrar) -> Self {
        let federated = Self::default();
        let run = &["run"];
        let help = "Versions of the model of a Federated run that this worker aggregated";
        registrar.register("federated_rounds", run, help, federated.rounds.clone());
        let help = "Rounds of a Federated run that ended without enough updates";
        registrar.register("federated_rounds_aborted", run, help, federated.aborted.clone());
        let help = "Updates of clients that this worker aggregated";
        registrar.register("federated_updates", run, help, federated.updates.clone());
        let help = "Tasks of clients that ended without an update: dropped, or too late";
        registrar.register("federated_tasks_missed", run, help, federated.missing.clone());
        let help = "Updates of clients that arrived after their lease or round had ended, and were not counted";
        registrar.register("federated_updates_late", run, help, federated.late.clone());
        let help = "Clients that are enrolled in a Federated run driven by this worker";
        registrar.register("federated_clients", run, help, federated.clients.clone());
        let help = "Bytes of updates received from clients";
        registrar.register("federated_received_bytes", run, help, federated.received_bytes.clone());
        let help = "Bytes of models sent to clients";
        registrar.register("federated_sent_bytes", run, help, federated.sent_bytes.clone());
        let help = "Epsilon that a Federated run has spent, at the delta of its specification";
        registrar.register("federated_epsilon_spent", run, help, federated.epsilon.clone());
        let help =
            "Time that this worker spent in aggregations of Federated runs, with the noise and the write of the model";
        registrar.register("federated_aggregation_seconds", run, help, federated.aggregation_seconds.clone());
        federated
    }

    /// Creates the series of a run that this worker drives from now on, since a rate needs the value before the first count.
    pub(in crate::runs::federated) fn begin(&self, run: &str) {
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
    }

    /// Counts a new version of a model.
    pub(in crate::runs::federated) fn aggregated(&self, run: &str, updates: usize, seconds: f64) {
        self.rounds.get_or_create(&labels(run)).inc();
        self.updates.get_or_create(&labels(run)).inc_by(updates as u64);
        self.aggregation_seconds.get_or_create(&labels(run)).inc_by(seconds);
    }

    pub(in crate::runs::federated) fn round_aborted(&self, run: &str) {
        self.aborted.get_or_create(&labels(run)).inc();
    }

    pub(in crate::runs::federated) fn task_missed(&self, run: &str) {
        self.missing.get_or_create(&labels(run)).inc();
    }

    pub(in crate::runs::federated) fn update_late(&self, run: &str) {
        self.late.get_or_create(&labels(run)).inc();
    }

    /// Sets the gauges of a run; `epsilon` is what it has spent, with privacy.
    pub(in crate::runs::federated) fn show(&self, run: &str, enrolled: usize, epsilon: Option<f64>) {
        self.clients.get_or_create(&labels(run)).set(enrolled as f64);
        if let Some(epsilon) = epsilon {
            self.epsilon.get_or_create(&labels(run)).set(epsilon);
        }
    }

    pub(in crate::runs::federated) fn received(&self, run: &str, bytes: usize) {
        self.received_bytes.get_or_create(&labels(run)).inc_by(bytes as u64);
    }

    pub(in crate::runs::federated) fn sent(&self, run: &str, bytes: usize) {
        self.sent_bytes.get_or_create(&labels(run)).inc_by(bytes as u64);
    }

    /// Removes the gauges of a run that this worker does not drive any more; its counters remain.
    pub(in crate::runs::federated) fn remove_gauges(&self, run: &str) {
        self.clients.remove(&labels(run));
        self.epsilon.remove(&labels(run));
    }
}
