//! What this worker publishes of itself and knows of the others: heartbeats, the map, the members.

pub(crate) mod cluster_view;
pub(crate) mod coordinator_addresses;
mod coordinators;
pub(crate) mod failovers;
pub(crate) mod heartbeat;
pub(crate) mod map_state;

pub(crate) use coordinators::Coordinators;

use crate::engine::Engine;
use crate::setup::Setup;
use cluster_view::ClusterView;
use engram_client::Client;
use engram_cluster::PartitionMap;
use engram_memory::{Ordinal, PartitionId};
use engram_proto::v1;
use failovers::Failovers;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::watch;

/// Membership of this worker in its cluster: the newest map and members, which it passes to its store and its client.
pub(crate) struct Membership {
    setup: Arc<Setup>,
    engine: Engine,
    client: Client,
    view: watch::Sender<ClusterView>,
    coordinators: Coordinators,
    /// Version of the newest map that this disk had recorded when the process started; 0 = none.
    disk_map_version: AtomicU64,
    /// Number of the newest map state request of a coordinator; 0 = none.
    map_state_request: watch::Sender<u64>,
    /// Leadership transfers requested from the store.
    leadership_transfers: Mutex<LeadershipTransfers>,
    /// Leaving workers that the store was notified of.
    leavers: Mutex<BTreeSet<Ordinal>>,
    /// Set while the worker is drained before a stop.
    leaving: watch::Sender<bool>,
    /// Failovers that are traced here.
    failovers: Failovers,
}

/// Leadership transfers.
#[derive(Debug, Default)]
struct LeadershipTransfers {
    /// Transfers requested by each coordinator, by its address. Coordinators decide the same, but not at the same moment: a
    /// transfer that one does not list yet is not cancelled, otherwise a partition would be paused and resumed.
    by_coordinator: BTreeMap<String, BTreeMap<PartitionId, Ordinal>>,
    /// Transfers requested from the store.
    requested: BTreeMap<PartitionId, Ordinal>,
}

impl Membership {
    pub(crate) fn new(setup: Arc<Setup>, engine: Engine, client: Client, failovers: Failovers) -> Self {
        Self {
            engine,
            client,
            view: watch::Sender::new(ClusterView::default()),
            coordinators: Coordinators::new(&setup),
            disk_map_version: AtomicU64::new(0),
            map_state_request: watch::Sender::new(0),
            leadership_transfers: Mutex::default(),
            leavers: Mutex::default(),
            leaving: watch::Sender::new(false),
            failovers,
            setup,
        }
    }

    /// Returns what is known of the cluster now. The guard must not be held over an await.
    pub(crate) fn view(&self) -> watch::Ref<'_, ClusterView> {
        self.view.borrow()
    }

    /// Returns a receiver of changes of the map and the members.
    pub(crate) fn subscribe(&self) -> watch::Receiver<ClusterView> {
        self.view.subscribe()
    }

    /// Changes the view without notifying the store; returns what `change` returns.
    #[cfg(test)]
    pub(crate) fn modify_view<T>(&self, change: impl FnOnce(&mut ClusterView) -> T) -> T {
        let mut changed = None;
        self.view.send_modify(|view| changed = Some(change(view)));
        changed.expect("the watch calls the function at once")
    }

    pub(crate) const fn coordinators(&self) -> &Coordinators {
        &self.coordinators
    }

    pub(crate) const fn failovers(&self) -> &Failovers {
        &self.failovers
    }

    /// Returns a receiver of the number of the newest map state request of a coordinator; 0 = none.
    pub(crate) fn map_state_requests(&self) -> watch::Receiver<u64> {
        self.map_state_request.subscribe()
    }

    /// Returns whether the worker is being drained and must not become primary.
    pub(crate) fn is_leaving(&self) -> bool {
        *self.leaving.borrow()
    }

    pub(crate) fn set_leaving(&self, leaving: bool) {
        self.leaving.send_replace(leaving);
    }

    /// Returns a receiver of changes of [`Self::is_leaving`].
    pub(crate) fn leaving_changes(&self) -> watch::Receiver<bool> {
        self.leaving.subscribe()
    }

    /// Records the version of the newest map found on the disk; 0 = none.
    pub(crate) fn set_disk_map_version(&self, version: u64) {
        self.disk_map_version.store(version, Ordering::Release);
    }

    /// Returns the version of the newest map that this disk has recorded; 0 = none.
    pub(crate) fn seen_version(&self) -> u64 {
        self.view.borrow().version().max(self.disk_map_version.load(Ordering::Acquire))
    }

    /// Applies a coordinator's response; returns whether map or members changed.
    pub(crate) fn receive(&self, coordinator: &str, mut reply: v1::HeartbeatResponse) -> bool {
        let Setup { options, shape, .. } = &*self.setup;
        for member in &mut reply.members {
            if let Some(detour) = options.peer_detours.get(&member.ordinal) {
                member.peer_address.clone_from(detour);
            }
        }
        let changed = self.view.send_if_modified(|view| view.update(&reply, options.cluster, shape.partitions));
        if changed {
            self.publish_map();
        }
        self.transfer_leadership(coordinator, &reply.leadership_transfers);
        self.map_state_request.send_if_modified(|last_request| {
            std::mem::replace(last_request, reply.map_state_request) != reply.map_state_request
        });
        changed
    }

    /// Applies a map that was read from the map store.
    pub(crate) fn read_map(&self, map: PartitionMap) {
        let Setup { options, shape, .. } = &*self.setup;
        if self.view.send_if_modified(|view| view.update_map(map, options.cluster, shape.partitions)) {
            self.publish_map();
        }
    }

    /// Applies the leadership transfers that a coordinator requests now; transfers that no coordinator lists any more are
    /// cancelled. A disconnected coordinator requests none.
    pub(crate) fn transfer_leadership(&self, coordinator: &str, requested: &[v1::LeadershipTransfer]) {
        let mut transfers = self.leadership_transfers.lock();
        if requested.is_empty() {
            transfers.by_coordinator.remove(coordinator);
        } else {
            let requested =
                requested.iter().map(|transfer| (PartitionId(transfer.partition), Ordinal(transfer.to))).collect();
            transfers.by_coordinator.insert(coordinator.to_owned(), requested);
        }
        // If two coordinators differ, the first one counts.
        let all: BTreeMap<PartitionId, Ordinal> =
            transfers.by_coordinator.values().rev().flatten().map(|(partition, to)| (*partition, *to)).collect();
        for partition in transfers.requested.keys().filter(|partition| !all.contains_key(partition)) {
            // A transfer to this worker cancels the previous one.
            self.engine.transfer_leadership(*partition, self.setup.ordinal());
        }
        for (partition, to) in &all {
            self.engine.transfer_leadership(*partition, *to);
        }
        transfers.requested = all;
    }

    /// Notifies the store of changes of the leaving workers. A worker that is leaving itself drops no replicas, so that workers
    /// that are stopped at once keep each other's.
    pub(crate) fn update_leavers(&self) {
        let leavers = if self.is_leaving() { BTreeSet::new() } else { self.view.borrow().leavers() };
        let mut notified = self.leavers.lock();
        if *notified != leavers {
            self.engine.leaving(leavers.clone());
            *notified = leavers;
        }
    }

    /// Passes the map to the store and the client of the other workers.
    fn publish_map(&self) {
        self.update_leavers();
        let view = self.view.borrow();
        if let Some(map) = &view.map {
            self.engine.update_map(Arc::clone(map));
        }
        let Setup { options, shape, .. } = &*self.setup;
        if let Some(map) = view.client_map(&options.cluster_name, shape.features.dimension) {
            self.client.set_map(map);
        }
    }
}
