//! Metrics of the operator in the Prometheus text format. The series of a cluster are removed with the cluster.

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

pub use engram_api::metrics::{MetricDescriptor, MetricType};
use engram_api::status::LearnerClusterStatus;
use engram_identity::{Reason, Refusals};
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Metric, Registry};

use crate::cluster::autoscaling::metrics::AutoscalingMetrics;
use crate::context::Key;
use crate::learner_run::metrics::RunMetrics;

/// Labels of the series of a cluster.
pub(crate) const CLUSTER_LABELS: [&str; 2] = ["namespace", "learner_cluster"];

/// Registers metrics and records their descriptors.
#[derive(Default)]
pub(crate) struct Registrar {
    registry: Registry,
    catalog: Vec<MetricDescriptor>,
}

impl Registrar {
    pub(crate) fn register(&mut self, name: &str, labels: &[&'static str], help: &str, metric: impl Metric) {
        let (metric_type, suffix) = match metric.metric_type() {
            prometheus_client::metrics::MetricType::Counter => (MetricType::Counter, "_total"),
            prometheus_client::metrics::MetricType::Histogram => (MetricType::Histogram, ""),
            _ => (MetricType::Gauge, ""),
        };
        let (name_in_queries, labels) = (format!("{name}{suffix}"), labels.to_vec());
        self.catalog.push(MetricDescriptor { name: name_in_queries, metric_type, help: help.to_owned(), labels });
        self.registry.register(name, help, metric);
    }
}

/// Returns the descriptors of all metrics that the operator exports, by name.
pub fn catalog() -> Vec<MetricDescriptor> {
    let metrics = Metrics::new(Arc::default(), Arc::default());
    let mut catalog = metrics.changing_registrar(true).catalog;
    catalog.extend(metrics.catalog);
    catalog.sort_by(|left, right| left.name.cmp(&right.name));
    catalog
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabels {
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ErrorLabels {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ClusterLabels {
    pub(crate) namespace: String,
    pub(crate) learner_cluster: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    namespace: String,
    learner_cluster: String,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ConditionLabels {
    namespace: String,
    learner_cluster: String,
    r#type: String,
    status: String,
}

/// Counters of the process, and the last status of each cluster. One field per series, therefore more than a dozen.
pub(crate) struct Metrics {
    reconciles: Family<ResultLabels, Counter>,
    errors: Family<ErrorLabels, Counter>,
    duration: Histogram,
    leads: Gauge,
    certificate_requests: Family<ResultLabels, Counter>,
    authentication_failures: Family<ReasonLabels, Counter>,
    refusals: Arc<Refusals>,
    refused_connections: (Counter, Arc<AtomicU64>),
    registry: Registry,
    catalog: Vec<MetricDescriptor>,
    /// When this operator's own certificates expire, by cluster.
    expiries: Mutex<BTreeMap<Key, SystemTime>>,
    clusters: Mutex<BTreeMap<Key, LearnerClusterStatus>>,
    runs: RunMetrics,
}

impl Metrics {
    /// `refusals` counts the connections and calls that the listener for workers refused because of who they are from, and
    /// `refused_connections` those that it had no file descriptor for.
    pub(crate) fn new(refusals: Arc<Refusals>, refused_connections: Arc<AtomicU64>) -> Self {
        let mut registrar = Registrar::default();
        let reconciles = Family::<ResultLabels, Counter>::default();
        let errors = Family::<ErrorLabels, Counter>::default();
        // 1 ms to about 16 s.
        let duration = Histogram::new(exponential_buckets(0.001, 4.0, 8));
        let leads = Gauge::default();
        let help = "Reconciliations of LearnerClusters";
        registrar.register("engram_operator_reconcile", &["result"], help, reconciles.clone());
        let help = "Failed reconciliations of LearnerClusters";
        registrar.register("engram_operator_reconcile_errors", &["reason"], help, errors.clone());
        let help = "Duration of one reconciliation of a LearnerCluster";
        registrar.register("engram_operator_reconcile_duration_seconds", &[], help, duration.clone());
        let help = "1 while this replica is the leader";
        registrar.register("leader_election_master_status", &[], help, leads.clone());
        let certificate_requests = Family::<ResultLabels, Counter>::default();
        let help = "Certificate requests of pods";
        registrar.register("engram_operator_certificate_requests", &["result"], help, certificate_requests.clone());
        let authentication_failures = Family::<ReasonLabels, Counter>::default();
        let help = "Connections and calls of workers refused for their certificate";
        registrar.register("engram_authentication_failures", &["reason"], help, authentication_failures.clone());
        let refused = Counter::default();
        let help = "Connections of workers refused because too few file descriptors were free";
        registrar.register("engram_operator_refused_connections", &[], help, refused.clone());
        let Registrar { registry, catalog } = registrar;
        let (expiries, clusters) = (Mutex::default(), Mutex::default());
        Self {
            reconciles,
            errors,
            duration,
            leads,
            certificate_requests,
            authentication_failures,
            refusals,
            refused_connections: (refused, refused_connections),
            registry,
            catalog,
            expiries,
            clusters,
            runs: RunMetrics::default(),
        }
    }

    /// Counts a request for a certificate.
    pub(crate) fn count_certificate_request(&self, result: &'static str) {
        self.certificate_requests.get_or_create(&ResultLabels { result }).inc();
    }

    /// Sets when this operator's own certificates expire, by cluster.
    pub(crate) fn set_certificate_expiries(&self, expiries: BTreeMap<Key, SystemTime>) {
        *self.expiries.lock() = expiries;
    }

    /// Returns the metrics of runs.
    pub(crate) const fn runs(&self) -> &RunMetrics {
        &self.runs
    }

    fn clusters(&self) -> MutexGuard<'_, BTreeMap<Key, LearnerClusterStatus>> {
        self.clusters.lock()
    }

    /// Counts one reconciliation; `error` is the reason label of its error.
    pub(crate) fn count_reconcile(&self, elapsed: Duration, error: Option<&'static str>) {
        let result = if error.is_some() { "error" } else { "success" };
        self.reconciles.get_or_create(&ResultLabels { result }).inc();
        self.duration.observe(elapsed.as_secs_f64());
        if let Some(reason) = error {
            self.errors.get_or_create(&ErrorLabels { reason }).inc();
        }
    }

    /// Sets the latest status of a cluster.
    pub(crate) fn set_cluster_status(&self, key: &Key, status: &LearnerClusterStatus) {
        self.clusters().insert(key.clone(), status.clone());
    }

    /// Removes the clusters of a scope that are not in `present`.
    pub(crate) fn keep_only(&self, scope: Option<&str>, present: impl Fn(&Key) -> bool) {
        self.clusters().retain(|key, _| key.stays(scope, &present));
        self.runs.keep_only(scope, present);
    }

    /// Renders the metrics in the Prometheus text format.
    pub(crate) fn page(&self, leads: bool) -> String {
        self.leads.set(leads.into());
        for reason in Reason::ALL {
            let counter = self.authentication_failures.get_or_create(&ReasonLabels { reason: reason.as_str() });
            counter.inner().store(self.refusals.of(reason), Ordering::Relaxed);
        }
        let (counter, refused) = &self.refused_connections;
        counter.inner().store(refused.load(Ordering::Relaxed), Ordering::Relaxed);
        let mut page = String::new();
        if text::encode_registry(&mut page, &self.registry).is_err()
            || text::encode_registry(&mut page, &self.changing_registrar(leads).registry).is_err()
        {
            page.clear();
        }
        let _ = writeln!(page, "# EOF");
        page
    }

    /// Returns the series whose labels come and go with objects.
    fn changing_registrar(&self, leads: bool) -> Registrar {
        let mut registrar = self.cluster_registrar();
        self.runs.register(&mut registrar, leads);
        registrar
    }

    fn cluster_registrar(&self) -> Registrar {
        let (partitions, workers) = (Family::<StateLabels, Gauge>::default(), Family::<StateLabels, Gauge>::default());
        let (info, conditions) =
            (Family::<ClusterLabels, Gauge>::default(), Family::<ConditionLabels, Gauge>::default());
        let autoscaling = AutoscalingMetrics::default();
        for (key, status) in self.clusters().iter() {
            let (namespace, learner_cluster) = (key.namespace.clone(), key.name.clone());
            info.get_or_create(&ClusterLabels {
                namespace: namespace.clone(),
                learner_cluster: learner_cluster.clone(),
            })
            .set(1);
            let in_state =
                |state| StateLabels { namespace: namespace.clone(), learner_cluster: learner_cluster.clone(), state };
            if let Some(counts) = &status.partitions {
                for (state, count) in [
                    ("healthy", counts.healthy),
                    ("under_replicated", counts.under_replicated),
                    ("single_replica", counts.single_replica),
                    ("unavailable", counts.unavailable),
                ] {
                    partitions.get_or_create(&in_state(state)).set(count.into());
                }
            }
            if let Some(counts) = &status.workers {
                for (state, count) in [
                    ("total", counts.total),
                    ("ready", counts.ready),
                    ("up_to_date", counts.up_to_date),
                    ("draining", counts.draining),
                ] {
                    workers.get_or_create(&in_state(state)).set(count.into());
                }
            }
            if let Some(decision) = &status.autoscaling {
                autoscaling.set(key, decision);
            }
            for condition in &status.conditions {
                let (namespace, learner_cluster) = (namespace.clone(), learner_cluster.clone());
                let (r#type, status) = (condition.kind.clone(), condition.status.to_string());
                conditions.get_or_create(&ConditionLabels { namespace, learner_cluster, r#type, status }).set(1);
            }
        }
        let expiries = Family::<ClusterLabels, Gauge>::default();
        for (key, expiry) in self.expiries.lock().iter() {
            let seconds = |left: Duration| i64::try_from(left.as_secs()).unwrap_or(i64::MAX);
            let left = expiry.duration_since(SystemTime::now());
            let left = left.map_or_else(|error| -seconds(error.duration()), seconds);
            let (namespace, learner_cluster) = (key.namespace.clone(), key.name.clone());
            expiries.get_or_create(&ClusterLabels { namespace, learner_cluster }).set(left);
        }
        let mut registrar = Registrar::default();
        let help = "Seconds until this operator's own certificate in a cluster expires, negative once it is expired";
        registrar.register("engram_operator_certificate_expiry_seconds", &CLUSTER_LABELS, help, expiries);
        let help = "Always 1; one series per LearnerCluster";
        registrar.register("engram_cluster_info", &CLUSTER_LABELS, help, info);
        let [namespace, learner_cluster] = CLUSTER_LABELS;
        let help = "1 for the current status of each condition";
        let labels = [namespace, learner_cluster, "type", "status"];
        registrar.register("engram_cluster_status_condition", &labels, help, conditions);
        let labels = [namespace, learner_cluster, "state"];
        registrar.register("engram_cluster_partitions", &labels, "Partitions by replication state", partitions);
        registrar.register("engram_cluster_workers", &labels, "Workers by state", workers);
        autoscaling.register(&mut registrar);
        registrar
    }
}
