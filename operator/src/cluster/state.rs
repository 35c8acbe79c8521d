//! What a replica of the operator remembers about each cluster between reconciles. All of it can be lost: a new replica starts without.

use std::collections::BTreeMap;
use std::time::Instant;

use parking_lot::Mutex;

use crate::cluster::autoscaling::autoscalers::AutoscalerState;
use crate::cluster::operator_conflict::OperatorConflict;
use crate::cluster::plan::lifecycle::Lifecycle;
use crate::cluster::status::epochs::CachedEpochs;
use crate::cluster::status::throttle::StatusThrottle;
use crate::context::Key;
use crate::kube::list_cache::ListCache;

/// State of one cluster.
#[derive(Default)]
pub(crate) struct ClusterState {
    pub(crate) lists: ListCache,
    pub(crate) epochs: CachedEpochs,
    pub(crate) throttle: StatusThrottle,
    pub(crate) conflict: OperatorConflict,
    /// Updates and changes of the number of workers in progress, for events.
    pub(crate) lifecycle: Lifecycle,
    pub(crate) autoscaler: AutoscalerState,
    /// Consecutive failed reconciles, for the back-off.
    pub(crate) failures: u32,
}

/// States of all clusters.
#[derive(Default)]
pub(crate) struct ClusterStates(Mutex<BTreeMap<Key, ClusterState>>);

impl ClusterStates {
    /// Calls `act` with the state of a cluster, which is created if necessary.
    pub(crate) fn with<R>(&self, key: &Key, act: impl FnOnce(&mut ClusterState) -> R) -> R {
        act(self.0.lock().entry(key.clone()).or_default())
    }

    /// Calls `act` with the state of a cluster, if any.
    pub(crate) fn find<R>(&self, key: &Key, act: impl FnOnce(&ClusterState) -> R) -> Option<R> {
        self.0.lock().get(key).map(act)
    }

    /// Removes clusters of a scope that are not in `present`, and the expired lists of all others.
    pub(crate) fn sweep(&self, scope: Option<&str>, present: impl Fn(&Key) -> bool, now: Instant) {
        let mut all = self.0.lock();
        all.retain(|key, _| key.stays(scope, &present));
        all.values_mut().for_each(|state| state.lists.drop_expired(now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_of_deleted_clusters_are_removed_within_their_scope() {
        let states = ClusterStates::default();
        let key = Key { namespace: "research".into(), name: "words".into() };
        assert!(states.find(&key, |_| ()).is_none(), "a lookup creates no state");
        states.with(&key, |state| state.failures = 2);
        let failures = || states.find(&key, |state| state.failures);
        states.sweep(Some("elsewhere"), |_| false, Instant::now());
        states.sweep(None, |_| true, Instant::now());
        assert_eq!(failures(), Some(2));
        states.sweep(Some("research"), |_| false, Instant::now());
        assert_eq!(failures(), None);
    }
}
