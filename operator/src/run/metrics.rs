//! What the operator counts, in the format of Prometheus. Series of a cluster go with the cluster.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use engram_api::status::LearnerClusterStatus;
use engram_identity::{Reason, Refusals};
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use super::Key;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Result_ {
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Category {
    category: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reasoned {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfCluster {
    namespace: String,
    learner_cluster: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InState {
    namespace: String,
    learner_cluster: String,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Turned {
    namespace: String,
    learner_cluster: String,
    r#type: String,
    status: String,
}

/// Counters of the process, and the last status of each cluster.
pub(super) struct Metrics {
    reconciles: Family<Result_, Counter>,
    errors: Family<Category, Counter>,
    duration: Histogram,
    leads: Gauge,
    asked: Family<Result_, Counter>,
    refused: Family<Reasoned, Counter>,
    refusals: Arc<Refusals>,
    registry: Registry,
    /// Until when this operator's own certificates are good.
    certified: Mutex<BTreeMap<Key, SystemTime>>,
    clusters: Mutex<BTreeMap<Key, LearnerClusterStatus>>,
}

impl Metrics {
    /// `refusals` counts who was not let in.
    pub(super) fn new(refusals: Arc<Refusals>) -> Self {
        let mut registry = Registry::default();
        let reconciles = Family::<Result_, Counter>::default();
        let errors = Family::<Category, Counter>::default();
        // 1 ms to about 16 s.
        let duration = Histogram::new(exponential_buckets(0.001, 4.0, 8));
        let leads = Gauge::default();
        registry.register("engram_operator_reconcile", "Looks at a cluster, by how they ended", reconciles.clone());
        registry.register("engram_operator_reconcile_errors", "Looks that failed, by why", errors.clone());
        registry.register(
            "engram_operator_reconcile_duration_seconds",
            "Time of one look at a cluster",
            duration.clone(),
        );
        registry.register("leader_election_master_status", "1 while this replica writes objects", leads.clone());
        let (asked, refused) = (Family::<Result_, Counter>::default(), Family::<Reasoned, Counter>::default());
        let help = "Requests of pods for certificates, by what became of them";
        registry.register("engram_operator_certificate_requests", help, asked.clone());
        let help = "Connections and calls of workers that were refused for their certificate, by reason";
        registry.register("engram_tls_refused", help, refused.clone());
        let (certified, clusters) = (Mutex::default(), Mutex::default());
        Self { reconciles, errors, duration, leads, asked, refused, refusals, registry, certified, clusters }
    }

    /// Counts a request for a certificate.
    pub(super) fn asked(&self, result: &'static str) {
        self.asked.get_or_create(&Result_ { result }).inc();
    }

    /// Takes until when this operator's own certificates are good.
    pub(super) fn certified(&self, until: BTreeMap<Key, SystemTime>) {
        *self.certified.lock().unwrap_or_else(PoisonError::into_inner) = until;
    }

    fn clusters(&self) -> MutexGuard<'_, BTreeMap<Key, LearnerClusterStatus>> {
        self.clusters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one look; `failed` is the category of its error.
    pub(super) fn looked(&self, took: Duration, failed: Option<&'static str>) {
        let result = if failed.is_some() { "error" } else { "success" };
        self.reconciles.get_or_create(&Result_ { result }).inc();
        self.duration.observe(took.as_secs_f64());
        if let Some(category) = failed {
            self.errors.get_or_create(&Category { category }).inc();
        }
    }

    /// Takes the newest status of a cluster.
    pub(super) fn saw(&self, key: &Key, status: &LearnerClusterStatus) {
        self.clusters().insert(key.clone(), status.clone());
    }

    /// Forgets the clusters of a scope that are not in `present`.
    pub(super) fn keep_only(&self, scope: Option<&str>, present: impl Fn(&Key) -> bool) {
        self.clusters().retain(|key, _| key.stays(scope, &present));
    }

    /// The page of Prometheus.
    pub(super) fn page(&self, leads: bool) -> String {
        self.leads.set(leads.into());
        for reason in Reason::ALL {
            let counter = self.refused.get_or_create(&Reasoned { reason: reason.word() });
            counter.inner().store(self.refusals.of(reason), Ordering::Relaxed);
        }
        let mut page = String::new();
        if text::encode_registry(&mut page, &self.registry).is_err()
            || text::encode_registry(&mut page, &self.of_clusters()).is_err()
        {
            page.clear();
        }
        let _ = writeln!(page, "# EOF");
        page
    }

    fn of_clusters(&self) -> Registry {
        let (partitions, workers) = (Family::<InState, Gauge>::default(), Family::<InState, Gauge>::default());
        let (info, conditions) = (Family::<OfCluster, Gauge>::default(), Family::<Turned, Gauge>::default());
        for (key, status) in self.clusters().iter() {
            let (namespace, learner_cluster) = (key.namespace.clone(), key.name.clone());
            info.get_or_create(&OfCluster { namespace: namespace.clone(), learner_cluster: learner_cluster.clone() })
                .set(1);
            let in_state =
                |state| InState { namespace: namespace.clone(), learner_cluster: learner_cluster.clone(), state };
            if let Some(counts) = &status.partitions {
                for (state, count) in [
                    ("healthy", counts.healthy),
                    ("degraded", counts.degraded),
                    ("alone", counts.alone),
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
            for condition in &status.conditions {
                let (namespace, learner_cluster) = (namespace.clone(), learner_cluster.clone());
                let (r#type, status) = (condition.kind.clone(), condition.status.to_string());
                conditions.get_or_create(&Turned { namespace, learner_cluster, r#type, status }).set(1);
            }
        }
        let expiry = Family::<OfCluster, Gauge>::default();
        for (key, until) in self.certified.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let seconds = |left: Duration| i64::try_from(left.as_secs()).unwrap_or(i64::MAX);
            let left = until.duration_since(SystemTime::now());
            let left = left.map_or_else(|error| -seconds(error.duration()), seconds);
            let (namespace, learner_cluster) = (key.namespace.clone(), key.name.clone());
            expiry.get_or_create(&OfCluster { namespace, learner_cluster }).set(left);
        }
        let mut registry = Registry::default();
        let help = "Seconds until this operator's own certificate in a cluster is valid no more";
        registry.register("engram_operator_certificate_expiry_seconds", help, expiry);
        registry.register("engram_cluster_info", "A LearnerCluster that is looked after", info);
        registry.register("engram_cluster_status_condition", "1 for the status that each condition has", conditions);
        registry.register("engram_cluster_partitions", "Partitions by the state of their copies", partitions);
        registry.register("engram_cluster_workers", "Workers by state", workers);
        registry
    }
}
