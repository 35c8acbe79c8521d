//! The workers of a cluster: which processes have connected, what they report, and which of them are alive.

use engram_cluster::Detector;
use engram_cluster::detector::{Action, Event, Liveness, Timing};
use engram_identity::RootId;
use engram_memory::{Incarnation, Member, Ordinal, PartitionId, StoreId};
use engram_proto::v1;
use std::collections::{BTreeMap, BTreeSet};

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
    /// Since when it has been about to stop.
    pub(super) leaving_since_ms: Option<u64>,
    pub(super) connected_since_ms: u64,
    pub(super) lossless_since: Incarnation,
    /// 0 = unknown.
    process_id: u32,
    /// Its last report.
    pub(crate) report: WorkerReport,
}

impl WorkerState {
    /// Whether it is about to stop.
    pub(crate) const fn is_leaving(&self) -> bool {
        self.leaving_since_ms.is_some()
    }
}

/// What a worker reports about itself with every heartbeat.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct WorkerReport {
    pub(crate) memories: u64,
    /// Whether it serves all its partitions.
    pub(crate) ready: bool,
    pub(crate) disk_full: bool,
    /// Workers that it has not heard of for too long.
    pub(crate) suspects: BTreeSet<Ordinal>,
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
    pub(crate) leaving: bool,
    pub(crate) queued: bool,
    pub(crate) turns: u64,
    /// Version of the newest map that it has read; 0 = none.
    pub(crate) map_version: u64,
    pub(crate) report: WorkerReport,
}

/// Outcome of a hello.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum HelloOutcome {
    Accepted,
    /// A newer process with the same store is connected.
    Superseded,
}

/// The workers that have connected, and the failure detector over them.
#[derive(Debug)]
pub(super) struct Workers {
    detector: Detector,
    members: BTreeMap<Ordinal, WorkerState>,
}

impl Workers {
    pub(super) fn new(now_ms: u64) -> Self {
        Self { detector: Detector::new(Timing::default(), now_ms), members: BTreeMap::new() }
    }

    pub(super) const fn detector(&self) -> &Detector {
        &self.detector
    }

    pub(super) fn get(&self, ordinal: Ordinal) -> Option<&WorkerState> {
        self.members.get(&ordinal)
    }

    /// Returns all workers by ordinal.
    pub(super) fn iter(&self) -> impl Iterator<Item = &WorkerState> {
        self.members.values()
    }

    /// Handles a hello of a worker in this failure domain.
    pub(super) fn accept_hello(&mut self, hello: Introduction, domain: String, now_ms: u64) -> HelloOutcome {
        let Introduction { member, lossless_since, process_id, addresses, .. } = hello;
        let previous = self.members.get(&member.ordinal);
        if previous.is_some_and(|previous| {
            previous.member.store == member.store && previous.member.incarnation > member.incarnation
        }) {
            return HelloOutcome::Superseded;
        }
        let reconnected = previous.filter(|previous| previous.member == member);
        let report = reconnected.map_or_else(WorkerReport::default, |WorkerState { report, .. }| WorkerReport {
            memories: report.memories,
            ready: report.ready,
            disk_full: report.disk_full,
            ..WorkerReport::default()
        });
        let worker = WorkerState {
            member,
            addresses,
            alive: true,
            dead: false,
            leaving_since_ms: reconnected.and_then(|previous| previous.leaving_since_ms),
            connected_since_ms: reconnected.map_or(now_ms, |previous| previous.connected_since_ms),
            lossless_since,
            process_id,
            report,
        };
        self.members.insert(member.ordinal, worker);
        self.step(Event::Connected { member, domain }, now_ms);
        HelloOutcome::Accepted
    }

    /// Handles a heartbeat of this exact process; returns whether anything visible to others changed.
    pub(super) fn heartbeat(&mut self, member: &Member, info: HeartbeatInfo, now_ms: u64) -> bool {
        let HeartbeatInfo { leaving, queued, turns, report, .. } = info;
        let Some(worker) = self.process_mut(member) else { return false };
        let before = &worker.report;
        let changed = (before.ready, worker.is_leaving(), before.disk_full)
            != (report.ready, leaving, report.disk_full)
            || before.bootstrap != report.bootstrap;
        worker.leaving_since_ms = leaving.then(|| worker.leaving_since_ms.unwrap_or(now_ms));
        worker.report = report;
        self.step(Event::Heartbeat { member: *member, progress: turns, queued }, now_ms) || changed
    }

    /// Whether this exact process is the newest of its worker.
    pub(super) fn knows(&self, member: &Member) -> bool {
        self.get(member.ordinal).is_some_and(|worker| worker.member == *member)
    }

    /// Handles the end of this exact process's stream; returns whether anything changed.
    pub(super) fn closed(&mut self, member: &Member, now_ms: u64) -> bool {
        self.step(Event::Closed(*member), now_ms)
    }

    /// Handles a supervisor's report that a process of `ordinal` is dead: the one with that incarnation, disk and
    /// process id, as far as given. Returns whether anything changed.
    pub(super) fn died(
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
    pub(super) fn ended(&mut self, member: &Member, now_ms: u64) -> bool {
        self.knows(member) && self.step(Event::Died(member.ordinal, Some(member.incarnation)), now_ms)
    }

    /// Handles a timer tick; returns whether anything changed.
    pub(super) fn tick(&mut self, now_ms: u64) -> bool {
        self.step(Event::Tick, now_ms)
    }

    /// Notes that the partitions of these workers were failed over.
    pub(super) fn failed_over(&mut self, failed: BTreeSet<Ordinal>, now_ms: u64) {
        for ordinal in failed {
            self.step(Event::FailedOver(ordinal), now_ms);
        }
    }

    /// Whether any worker is not alive.
    pub(super) fn any_silent(&self) -> bool {
        !self.members.values().all(|worker| worker.alive)
    }

    /// Removes workers that are not alive and not `kept`; returns whether there were any.
    pub(super) fn forget_drained(&mut self, kept: impl Fn(Ordinal) -> bool) -> bool {
        let before = self.members.len();
        let detector = &mut self.detector;
        self.members.retain(|ordinal, worker| {
            let keep = worker.alive || kept(*ordinal);
            if !keep {
                tracing::info!(member = %worker.member, "drained worker removed");
                detector.forget(*ordinal);
            }
            keep
        });
        self.members.len() != before
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

    fn process_mut(&mut self, member: &Member) -> Option<&mut WorkerState> {
        self.members.get_mut(&member.ordinal).filter(|worker| worker.member == *member)
    }
}
