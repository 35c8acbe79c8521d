//! State that all reconciles share.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use engram_api::status::{LearnerClusterStatus, LearnerRunStatus};
use kube::{Client, Resource};
use parking_lot::{Mutex, MutexGuard};

use crate::Offer;
use crate::cluster::coordination::coordinators::Coordinators;
use crate::cluster::observe::nodes::Nodes;
use crate::cluster::state::ClusterStates;
use crate::kube::leader::Leadership;
use crate::kube::written_statuses::WrittenStatuses;
use crate::pki::certificates::Certificates;
use crate::pki::token_issuer::Issuers;
use crate::telemetry::events::Events;
use crate::telemetry::metrics::Metrics;

/// Namespace and name of an object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) namespace: String,
    pub(crate) name: String,
}

impl Key {
    /// Returns the key of an object.
    pub(crate) fn of(object: &impl Resource) -> Self {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        Self { namespace: text(&object.meta().namespace), name: text(&object.meta().name) }
    }

    /// Returns whether cached state of this object is kept: it is in `present`, or outside the swept namespace (`None` means all).
    pub(crate) fn stays(&self, scope: Option<&str>, present: impl Fn(&Self) -> bool) -> bool {
        scope.is_some_and(|scope| self.namespace != scope) || present(self)
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Shared state of all reconciles: one handle per subject, of which none decides anything, therefore more than a dozen.
pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) offer: Offer,
    pub(crate) certificates: Arc<Certificates>,
    pub(crate) issuers: Arc<Issuers>,
    pub(crate) leadership: Arc<Leadership>,
    pub(crate) coordinators: Coordinators,
    pub(crate) nodes: Arc<Nodes>,
    pub(crate) events: Events,
    pub(crate) clusters: ClusterStates,
    pub(crate) written_clusters: WrittenStatuses<LearnerClusterStatus>,
    pub(crate) written_runs: WrittenStatuses<LearnerRunStatus>,
    pub(crate) metrics: Arc<Metrics>,
    /// Number of watched namespaces whose LearnerClusters were never listed.
    pub(crate) unlisted: Arc<AtomicUsize>,
    /// Start of this process.
    pub(crate) started: Instant,
    /// Submitted runs; a run whose object is deleted is cancelled.
    pub(crate) handed: Mutex<BTreeMap<Key, SubmittedRun>>,
    /// Runs that succeeded, and whose records the workers keep; that of a run whose object is deleted is removed.
    pub(crate) succeeded: Mutex<BTreeMap<Key, SubmittedRun>>,
}

/// A run that was submitted to workers.
#[derive(Clone, Debug)]
pub(crate) struct SubmittedRun {
    /// Cluster of the run.
    pub(crate) cluster: Key,
    /// UID of its object, followed by `-` and the number of a retry; empty if it was submitted by an earlier version.
    pub(crate) uid: String,
    /// Whether it occupies the cluster; `false` while it is suspended.
    pub(crate) has_turn: bool,
}

impl SubmittedRun {
    /// Returns whether it was submitted for the object with this UID.
    pub(crate) fn is_of(&self, uid: &str) -> bool {
        let is_retry = |number: &str| number.starts_with('-') && !uid.is_empty();
        self.uid.is_empty() || self.uid == uid || self.uid.strip_prefix(uid).is_some_and(is_retry)
    }
}

impl Context {
    pub(crate) fn submitted(&self) -> MutexGuard<'_, BTreeMap<Key, SubmittedRun>> {
        self.handed.lock()
    }

    pub(crate) fn succeeded(&self) -> MutexGuard<'_, BTreeMap<Key, SubmittedRun>> {
        self.succeeded.lock()
    }
}
