//! State of a coordinator as plain values. Time comes in as milliseconds of the detector's clock.

mod bootstrap;
mod planning;

pub use bootstrap::BootstrapProgress;
pub(crate) use planning::{MapUpdate, Proposal, Proposals};

use crate::environment::Environment;
use crate::manual_recovery::MapStateReports;
use crate::{Options, wire};
use engram_cluster::detector::{Action, Event, Liveness, Timing};
use engram_cluster::{Detector, LeadershipTransfer, PartitionMap};
use engram_identity::RootId;
use engram_mapstore::{Goal, MapOverride};
use engram_memory::{Incarnation, Member, Ordinal, PartitionId, StoreId};
use engram_proto::v1;
use std::collections::{BTreeMap, BTreeSet};

/// Consecutive reads that find an older map before it counts as a replacement of the newest one: a single read may be
/// stale.
const MAX_OLDER_READS: u32 = 2;
/// Duration of a deletion, from the end of the map to that of the coordinator. The operator stops it within 5 s of the end of the
/// LearnerCluster, which a terminating namespace may delete after the map.
const DELETION_MS: u64 = 30_000;

/// A worker that has connected since this coordinator started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WorkerState {
    /// Its newest process.
    pub(crate) member: Member,
    /// Its addresses for clients, peers and metrics.
    pub(crate) addresses: Addresses,
    /// Whether the detector considers it alive.
    pub(crate) alive: bool,
    /// Whether it is proven dead.
    pub(crate) dead: bool,
    /// Whether it serves all its partitions.
    pub(crate) ready: bool,
    /// Since when it has been about to stop.
    leaving_since_ms: Option<u64>,
    disk_full: bool,
    connected_since_ms: u64,
    memories: u64,
    lossless_since: Incarnation,
    /// 0 = unknown.
    process_id: u32,
    suspects: BTreeSet<Ordinal>,
    /// Why it runs without a GPU that it should use.
    pub(crate) gpu_fault: Option<GpuFault>,
    /// Reads and writes of partitions served since its process started.
    pub(crate) operations: u64,
    /// Partitions whose primary it should be, but cannot.
    pub(crate) leaderless: BTreeSet<PartitionId>,
    /// Progress of loading the snapshot, in a cluster that starts from one.
    pub(crate) bootstrap: Option<v1::BootstrapStatus>,
    /// Its certificate and trusted roots.
    pub(crate) certificate: Option<WorkerCertificate>,
}

/// The certificate of a worker and the roots that it trusts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerCertificate {
    /// In the order in which they were published.
    pub trusted_roots: Vec<RootId>,
    /// The root that issued its certificate.
    pub root: RootId,
}

/// Why a worker runs without a GPU that it should use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuFault {
    /// It used a GPU, and has stopped using it until its next start; otherwise it found none at its start.
    pub was_in_use: bool,
    /// Reason as text.
    pub reason: String,
}

impl WorkerState {
    /// Whether it is about to stop.
    pub(crate) const fn is_leaving(&self) -> bool {
        self.leaving_since_ms.is_some()
    }
}

/// Listen addresses of a worker, each as `host:port`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Addresses {
    pub(crate) client: String,
    pub(crate) peer: String,
    pub(crate) http: String,
}

/// The first message of a worker's stream.
#[derive(Debug, Clone)]
pub(crate) struct Introduction {
    pub(crate) member: Member,
    pub(crate) lossless_since: Incarnation,
    pub(crate) process_id: u32,
    pub(crate) addresses: Addresses,
    /// Version of the newest map on its disk; 0 = none.
    pub(crate) seen_version: u64,
}

/// Contents of a heartbeat.
#[derive(Debug, Clone, Default)]
pub(crate) struct HeartbeatInfo {
    pub(crate) memories: u64,
    pub(crate) ready: bool,
    pub(crate) leaving: bool,
    pub(crate) disk_full: bool,
    pub(crate) suspects: BTreeSet<Ordinal>,
    pub(crate) queued: bool,
    pub(crate) turns: u64,
    /// Version of the newest map that it has read; 0 = none.
    pub(crate) map_version: u64,
    pub(crate) gpu_fault: Option<GpuFault>,
    pub(crate) operations: u64,
    pub(crate) leaderless: BTreeSet<PartitionId>,
    pub(crate) bootstrap: Option<v1::BootstrapStatus>,
    pub(crate) certificate: Option<WorkerCertificate>,
}

/// Outcome of a hello.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum HelloOutcome {
    Accepted,
    /// A newer process with the same store is connected.
    Superseded,
}

#[derive(Debug)]
pub(crate) struct State {
    map: Option<PartitionMap>,
    goal: Goal,
    detector: Detector,
    members: BTreeMap<Ordinal, WorkerState>,
    proposals: Proposals,
    pub(crate) transfers: Vec<LeadershipTransfer>,
    conditions: Vec<String>,
    last_failover_ms: Option<u64>,
    /// Why the map is lost, if it is.
    lost: Option<String>,
    /// Since when the map has been missing; `None` once this was logged as an error.
    missing_since_ms: Option<u64>,
    /// Newest map version on any worker's disk.
    seen_version: u64,
    /// Newest map version reported in heartbeats.
    reported_version: u64,
    /// Another writer has changed the map since it was read here.
    is_overtaken: bool,
    /// It is shutting down: it accepts no proposals and decides nothing.
    is_closing: bool,
    /// Consecutive reads that found an older map than the known one.
    older_reads: u32,
    orders: Vec<MapOverride>,
    /// Another writer has changed the map since the orders were read.
    reads_orders: bool,
    pub(crate) map_state_reports: MapStateReports,
    pub(crate) environment: Environment,
}

impl State {
    pub(crate) fn new(map: Option<PartitionMap>, goal: Goal, now_ms: u64) -> Self {
        Self {
            map,
            goal,
            detector: Detector::new(Timing::default(), now_ms),
            members: BTreeMap::new(),
            proposals: Proposals::new(),
            transfers: Vec::new(),
            conditions: Vec::new(),
            last_failover_ms: None,
            lost: None,
            missing_since_ms: None,
            seen_version: 0,
            reported_version: 0,
            is_overtaken: false,
            is_closing: false,
            older_reads: 0,
            orders: Vec::new(),
            reads_orders: false,
            map_state_reports: MapStateReports::default(),
            environment: Environment::default(),
        }
    }

    pub(crate) const fn map(&self) -> Option<&PartitionMap> {
        self.map.as_ref()
    }

    pub(crate) const fn goal(&self) -> &Goal {
        &self.goal
    }

    pub(crate) fn set_goal(&mut self, goal: Goal) {
        self.goal = goal;
    }

    /// Returns why the map is lost, if it is.
    pub(crate) fn lost(&self) -> Option<&str> {
        self.lost.as_deref()
    }

    /// Returns the orders that overrode the map.
    pub(crate) fn orders(&self) -> &[MapOverride] {
        &self.orders
    }

    pub(crate) fn set_orders(&mut self, orders: Vec<MapOverride>) {
        (self.orders, self.reads_orders) = (orders, false);
    }

    /// Whether an order may have been written since the orders were read.
    pub(crate) const fn reads_orders(&self) -> bool {
        self.reads_orders
    }

    /// Marks the map as lost: nothing is written until it is found again or rebuilt.
    pub(crate) fn lose(&mut self, why: String) {
        if self.lost.as_ref() != Some(&why) {
            tracing::error!(why, "partition map lost");
            self.lost = Some(why);
        }
    }

    /// Marks the map as lost because it is missing. It is an error only if the cluster is still coordinated after [`DELETION_MS`]: the map
    /// of a deleted cluster or namespace is often gone before its coordinator stops.
    fn lose_missing(&mut self, version: u64, now_ms: u64) {
        let why = map_gone_text(version);
        if self.lost.as_ref() != Some(&why) {
            tracing::info!(why, "partition map missing; normal while the cluster or its namespace is deleted");
            self.lost = Some(why);
            self.missing_since_ms = Some(now_ms);
        }
    }

    /// Returns why the map is lost if it has been missing for longer than a deletion takes, once.
    fn take_overdue_loss(&mut self, now_ms: u64) -> Option<&str> {
        self.missing_since_ms.take_if(|since_ms| now_ms >= *since_ms + DELETION_MS)?;
        self.lost.as_deref()
    }

    /// Finishes pending proposals and starts nothing new.
    pub(crate) fn close(&mut self) {
        self.is_closing = true;
    }

    pub(crate) const fn is_closing(&self) -> bool {
        self.is_closing
    }

    pub(crate) fn has_proposals(&self) -> bool {
        !self.proposals.is_empty()
    }

    /// Whether a worker has seen a newer map than this coordinator.
    pub(crate) fn is_behind(&self) -> bool {
        let older = |map: &PartitionMap| self.is_overtaken || map.version < self.seen_version;
        self.lost.is_none() && self.map.as_ref().is_some_and(older)
    }

    /// Applies a map written by an order.
    pub(crate) fn map_overridden(&mut self, map: PartitionMap, orders: Vec<MapOverride>, now_ms: u64) {
        self.lost = None;
        self.orders = orders;
        self.set_map(Some(map), now_ms);
    }

    /// Handles a read of the map. A missing map never counts as one not yet written, nor an older one as the newest.
    pub(crate) fn map_read(&mut self, map: Option<PartitionMap>, now_ms: u64) {
        self.is_overtaken = false;
        let newest = self.map.as_ref().map_or(0, |map| map.version).max(self.seen_version);
        let version = map.as_ref().map_or(0, |map| map.version);
        if version >= newest {
            (self.lost, self.older_reads) = (None, 0);
            if map != self.map {
                self.reads_orders = true;
                self.set_map(map, now_ms);
            }
            return;
        }
        self.older_reads += 1;
        match map {
            None => self.lose_missing(newest, now_ms),
            Some(_) if self.older_reads >= MAX_OLDER_READS => {
                self.lose(format!(
                    "the partition map has version {version}, but version {newest} was seen: it was replaced by an older one"
                ));
            }
            Some(_) => {}
        }
    }

    pub(crate) fn members(&self) -> impl Iterator<Item = &WorkerState> {
        self.members.values()
    }

    pub(crate) fn conditions(&self) -> &[String] {
        &self.conditions
    }

    /// Handles a hello.
    pub(crate) fn accept_hello(&mut self, hello: Introduction, now_ms: u64) -> HelloOutcome {
        let Introduction { member, lossless_since, process_id, addresses, seen_version } = hello;
        self.seen_version = self.seen_version.max(seen_version);
        let previous = self.members.get(&member.ordinal);
        if previous.is_some_and(|previous| {
            previous.member.store == member.store && previous.member.incarnation > member.incarnation
        }) {
            return HelloOutcome::Superseded;
        }
        let reconnected = previous.filter(|previous| previous.member == member);
        let disk_full = reconnected.is_some_and(|previous| previous.disk_full);
        let (memories, ready, leaving_since_ms, connected_since_ms) = reconnected
            .map_or((0, false, None, now_ms), |previous| {
                (previous.memories, previous.ready, previous.leaving_since_ms, previous.connected_since_ms)
            });
        let (suspects, gpu_fault) = (BTreeSet::new(), None);
        let (alive, dead) = (true, false);
        let worker = WorkerState {
            member,
            addresses,
            alive,
            dead,
            ready,
            leaving_since_ms,
            disk_full,
            connected_since_ms,
            memories,
            lossless_since,
            process_id,
            suspects,
            gpu_fault,
            operations: 0,
            leaderless: BTreeSet::new(),
            bootstrap: None,
            certificate: None,
        };
        self.members.insert(member.ordinal, worker);
        let domain = self.domain(member.ordinal);
        self.step(Event::Connected { member, domain }, now_ms);
        HelloOutcome::Accepted
    }

    /// Handles a heartbeat; returns whether anything visible to others changed.
    pub(crate) fn heartbeat(&mut self, member: &Member, info: HeartbeatInfo, now_ms: u64) -> bool {
        let Some(worker) = self.process_mut(member) else { return false };
        let changed = (worker.ready, worker.is_leaving(), worker.disk_full)
            != (info.ready, info.leaving, info.disk_full)
            || worker.bootstrap != info.bootstrap;
        worker.bootstrap = info.bootstrap;
        (worker.ready, worker.disk_full) = (info.ready, info.disk_full);
        worker.leaving_since_ms = info.leaving.then(|| worker.leaving_since_ms.unwrap_or(now_ms));
        (worker.memories, worker.suspects, worker.gpu_fault) = (info.memories, info.suspects, info.gpu_fault);
        worker.operations = info.operations;
        worker.leaderless = info.leaderless;
        worker.certificate = info.certificate;
        let overtakes = self.is_overtaken_by(info.map_version);
        self.step(Event::Heartbeat { member: *member, progress: info.turns, queued: info.queued }, now_ms)
            || changed
            || overtakes
    }

    /// Whether a worker knows a newer map than any reported before.
    fn is_overtaken_by(&mut self, version: u64) -> bool {
        let newest = self.map.as_ref().map_or(0, |map| map.version).max(self.reported_version);
        let overtakes = version > newest;
        if overtakes {
            (self.reported_version, self.is_overtaken) = (version, true);
        }
        overtakes
    }

    /// Handles the end of this exact process's stream; returns whether anything changed.
    pub(crate) fn closed(&mut self, member: &Member, now_ms: u64) -> bool {
        self.step(Event::Closed(*member), now_ms)
    }

    /// Handles a supervisor's report that a process of `ordinal` is dead: the one with that incarnation, disk and
    /// process id, as far as given. Returns whether anything changed.
    pub(crate) fn died(
        &mut self,
        ordinal: Ordinal,
        store: Option<StoreId>,
        incarnation: u64,
        process_id: u32,
        now_ms: u64,
    ) -> bool {
        // The next process may have connected before the report arrived, and on an empty disk it has the same
        // incarnation.
        let another = self.members.get(&ordinal).is_some_and(|worker| {
            let ids = [worker.process_id, process_id];
            store.is_some_and(|store| store != worker.member.store) || (!ids.contains(&0) && ids[0] != ids[1])
        });
        let incarnation = (incarnation != 0).then_some(Incarnation(incarnation));
        !another && self.step(Event::Died(ordinal, incarnation), now_ms)
    }

    /// Handles a report that this exact process has exited. For a process that never connected it has no effect: it may
    /// have exited long ago. Returns whether anything changed.
    pub(crate) fn ended(&mut self, member: &Member, now_ms: u64) -> bool {
        self.process_mut(member).is_some() && self.step(Event::Died(member.ordinal, Some(member.incarnation)), now_ms)
    }

    /// Handles a timer tick; returns whether anything changed.
    pub(crate) fn tick(&mut self, options: &Options, now_ms: u64) -> bool {
        let changed = self.step(Event::Tick, now_ms);
        let workers = self.members.len();
        self.forget_drained(options);
        changed || self.members.len() != workers
    }

    /// Removes drained workers that have stopped.
    fn forget_drained(&mut self, options: &Options) {
        if self.members.values().all(|worker| worker.alive) {
            return;
        }
        let entries = self.map.iter().flat_map(|map| &map.partitions);
        let holders: BTreeSet<_> = entries.flat_map(|entry| entry.candidates()).map(|member| member.ordinal).collect();
        let draining = self.draining(options);
        let detector = &mut self.detector;
        self.members.retain(|ordinal, worker| {
            let wanted = !draining.contains(ordinal);
            let keep = worker.alive || holders.contains(ordinal) || wanted;
            if !keep {
                tracing::info!(member = %worker.member, "drained worker removed");
                detector.forget(*ordinal);
            }
            keep
        });
    }

    fn step(&mut self, event: Event, now_ms: u64) -> bool {
        let actions = self.detector.step(event, now_ms);
        for action in &actions {
            match action {
                Action::Suspect(member, cause) => tracing::warn!(%member, ?cause, "worker suspected dead"),
                Action::Trust(member) => tracing::info!(%member, "worker trusted again"),
                Action::Dead(member) => tracing::warn!(%member, "worker confirmed dead"),
            }
        }
        let mut changed = !actions.is_empty();
        for (ordinal, worker) in &mut self.members {
            let liveness = self.detector.liveness(*ordinal);
            let alive = liveness.is_some_and(Liveness::is_alive);
            worker.dead = matches!(liveness, Some(Liveness::Dead { .. }));
            changed |= std::mem::replace(&mut worker.alive, alive) != alive;
        }
        changed
    }

    /// Applies the current map of the store.
    pub(crate) fn set_map(&mut self, map: Option<PartitionMap>, now_ms: u64) {
        if let (Some(old), Some(new)) = (&self.map, &map) {
            // A leadership transfer keeps both in sync.
            let failed: BTreeSet<_> = (old.partitions.iter().zip(&new.partitions))
                .filter(|(old, new)| old.primary != new.primary && new.in_sync(old.primary).is_none())
                .map(|(old, _)| old.primary)
                .collect();
            for ordinal in failed {
                self.step(Event::FailedOver(ordinal), now_ms);
                self.last_failover_ms = Some(now_ms);
            }
        }
        self.map = map;
    }

    /// Returns the view for workers.
    pub(crate) fn view(&self) -> v1::HeartbeatResponse {
        let order =
            |order: &LeadershipTransfer| v1::LeadershipTransfer { partition: order.partition.0, to: order.to.0 };
        v1::HeartbeatResponse {
            map: self.map.as_ref().map(engram_wire::map_to_proto),
            members: self.members.values().map(wire::member_to_proto).collect(),
            leadership_transfers: self.transfers.iter().map(order).collect(),
            map_state_request: self.map_state_reports.request_number(),
        }
    }

    fn process_mut(&mut self, member: &Member) -> Option<&mut WorkerState> {
        self.members.get_mut(&member.ordinal).filter(|worker| worker.member == *member)
    }
}

fn map_gone_text(version: u64) -> String {
    format!("the partition map is missing, but workers have seen version {version}")
}

#[cfg(test)]
mod tests;
