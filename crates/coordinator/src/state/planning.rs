//! Plans the next map: accepted proposals of workers, and the decisions of the coordinator.

use super::workers::{WorkerState, Workers};
use super::{State, known_map::KnownMap};
use crate::Options;
use crate::environment::plan_transfers;
use engram_cluster::{
    Change, ClusterObservation, ExpectedEntry, LeadershipTransfer, PartitionMap, Plan, WorkerObservation, decide,
    find_absent,
};
use engram_memory::{Member, Ordinal, PartitionId};
use std::collections::{BTreeMap, BTreeSet};

/// Concurrent incoming, and outgoing, transfers per worker.
const MIN_TRANSFERS: u64 = 2;
/// More small partitions are transferred at a time, as long as they hold at most so many memories together: such
/// transfers are limited by map writes, not by the network.
const MAX_MEMORIES_IN_TRANSFER: u64 = 256 << 10;
/// Upper limit of concurrent transfers.
const MAX_TRANSFERS: u64 = 32;

/// A map change proposed by a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Proposal {
    pub(crate) partition: PartitionId,
    pub(crate) expected: ExpectedEntry,
    pub(crate) change: Change,
}

/// The newest proposal of each worker for each partition: older ones are repeated if they still matter.
pub(crate) type Proposals = BTreeMap<(PartitionId, Ordinal), Proposal>;

/// A map to be written.
#[derive(Debug)]
pub(crate) struct MapUpdate {
    /// Version that it replaces.
    pub(crate) expected: Option<u64>,
    pub(crate) map: PartitionMap,
    /// The proposals in it, requeued if the write fails.
    pub(crate) proposals: Proposals,
    /// A partition is not served, or accepts no writes, until it is written.
    pub(crate) is_urgent: bool,
}

/// What is to be written next, and what workers and callers are to know about it.
#[derive(Debug, Default)]
pub(super) struct Decisions {
    proposals: Proposals,
    transfers: Vec<LeadershipTransfer>,
    conditions: Vec<String>,
    /// It is shutting down: it accepts no proposals and decides nothing.
    is_closing: bool,
}

impl Decisions {
    /// Returns the transfers of leadership that workers should make.
    pub(super) fn transfers(&self) -> &[LeadershipTransfer] {
        &self.transfers
    }

    /// Adopts what a plan reports besides changes of the map.
    fn adopt(&mut self, plan: &mut Plan) {
        self.conditions = std::mem::take(&mut plan.conditions);
        self.transfers = std::mem::take(&mut plan.transfers);
    }
}

/// The next map in the making. The map store accepts one change per entry at a time.
struct Draft {
    map: PartitionMap,
    changed: BTreeSet<PartitionId>,
    is_urgent: bool,
}

impl Draft {
    /// Applies the proposals that match the current entries, and returns them.
    fn accept(&mut self, mut proposals: Proposals, workers: &Workers) -> Proposals {
        proposals.retain(|(partition, proposer), proposal| {
            let Some(entry) = self.map.partitions.get_mut(partition.0 as usize) else { return false };
            let fits = entry.expectation() == proposal.expected && !self.changed.contains(partition);
            let deposes = matches!(proposal.change, Change::Promote { .. }) && *proposer != entry.primary;
            // The coordinator decides promotions as long as the current primary is alive here.
            let primary_alive = || {
                let primary = entry.primary_member().map(|member| member.ordinal);
                let worker = primary.and_then(|ordinal| workers.get(ordinal));
                worker.is_some_and(|worker| worker.alive && entry.served_by(&worker.member))
            };
            if !fits || (deposes && primary_alive()) {
                return false;
            }
            match entry.apply(&proposal.change) {
                Ok(after) => {
                    // A primary that proposes a successor accepts no writes until then; one that adds a replica does.
                    self.is_urgent |= !matches!(proposal.change, Change::Add { .. } | Change::Learn(_));
                    *entry = after;
                    self.changed.insert(*partition);
                    true
                }
                Err(illegal) => {
                    tracing::debug!(%partition, worker = %proposer, %illegal, "rejected stale proposal");
                    false
                }
            }
        });
        proposals
    }

    /// Applies planned changes of entries that no proposal has changed.
    fn apply(&mut self, changes: &[(PartitionId, Change)]) {
        for (partition, change) in changes {
            if self.changed.contains(partition) {
                continue;
            }
            let entry = &mut self.map.partitions[partition.0 as usize];
            match entry.apply(change) {
                Ok(after) => {
                    self.is_urgent |= matches!(change, Change::Promote { .. });
                    *entry = after;
                    self.changed.insert(*partition);
                }
                Err(illegal) => tracing::error!(%partition, ?change, %illegal, "planned an illegal map change"),
            }
        }
    }
}

/// Whether a proposal is based on an entry newer than the known one.
fn is_newer(known: &KnownMap, proposal: &Proposal) -> bool {
    let entry = known.entries().get(proposal.partition.0 as usize);
    entry.is_some_and(|entry| entry.expectation() < proposal.expected)
}

impl State {
    /// Returns what keeps the cluster from serving everything with all its replicas.
    pub(crate) fn conditions(&self) -> &[String] {
        &self.decisions.conditions
    }

    /// Finishes pending proposals and starts nothing new.
    pub(crate) const fn close(&mut self) {
        self.decisions.is_closing = true;
    }

    pub(crate) const fn is_closing(&self) -> bool {
        self.decisions.is_closing
    }

    pub(crate) fn has_proposals(&self) -> bool {
        !self.decisions.proposals.is_empty()
    }

    /// Queues proposals of a worker. One based on an entry newer than the known one waits until the map is read:
    /// another coordinator wrote it.
    pub(crate) fn propose(&mut self, proposer: Ordinal, proposals: Vec<Proposal>) {
        if proposals.iter().any(|proposal| is_newer(&self.known, proposal)) {
            self.known.note_overtaken();
        }
        let keyed = proposals.into_iter().map(|proposal| ((proposal.partition, proposer), proposal));
        self.decisions.proposals.extend(keyed);
    }

    /// Requeues proposals whose write failed; newer ones stay.
    pub(crate) fn requeue(&mut self, proposals: Proposals) {
        for (key, proposal) in proposals {
            self.decisions.proposals.entry(key).or_insert(proposal);
        }
    }

    /// Returns the map to write now: all proposals that match the current entries, plus decisions.
    pub(crate) fn next_map(&mut self, options: &Options, now_ms: u64) -> Option<MapUpdate> {
        if let Some(lost) = self.known.check_loss(now_ms) {
            self.decisions.conditions =
                vec![format!("{lost}; no changes until it is restored: engram partition rebuild-map")];
            self.decisions.transfers.clear();
            return None;
        }
        if self.is_behind() {
            return None;
        }
        let observation = self.observed(options, now_ms);
        let Some(current) = self.map() else { return self.first_map(options, &observation) };
        let expected = Some(current.version);
        let mut draft = Draft { map: current.clone(), changed: BTreeSet::new(), is_urgent: false };
        let proposals = draft.accept(std::mem::take(&mut self.decisions.proposals), &self.workers);
        let mut plan = if self.is_closing() { Plan::default() } else { decide(Some(&draft.map), &observation) };
        draft.apply(&plan.changes);
        self.decisions.adopt(&mut plan);
        if !self.is_closing() {
            self.transfer_from_cordoned(&draft.map);
        }
        let Draft { map, changed, is_urgent } = draft;
        (!changed.is_empty()).then_some(MapUpdate { expected, map, proposals, is_urgent })
    }

    /// Returns the first map of a cluster, once its workers are there.
    fn first_map(&mut self, options: &Options, observation: &ClusterObservation) -> Option<MapUpdate> {
        if self.environment.had_map {
            self.decisions.conditions =
                vec!["the partition map is missing, and no connected worker has stored one".to_owned()];
            return None;
        }
        let mut plan = if options.bootstraps { self.bootstrap(options) } else { decide(None, observation) };
        self.decisions.adopt(&mut plan);
        let map = plan.initial_map?;
        Some(MapUpdate { expected: None, map, proposals: Proposals::new(), is_urgent: true })
    }

    /// Adds transfers away from cordoned workers, and drops transfers to them.
    fn transfer_from_cordoned(&mut self, map: &PartitionMap) {
        let cordoned = &self.environment.relieved;
        if cordoned.is_empty() {
            return;
        }
        let alive: BTreeMap<Ordinal, Member> =
            self.living().map(|worker| (worker.member.ordinal, worker.member)).collect();
        self.decisions.transfers = plan_transfers(map, cordoned, &alive, &self.decisions.transfers);
    }

    pub(crate) fn observed(&self, options: &Options, now_ms: u64) -> ClusterObservation {
        let detector = self.workers.detector();
        let observe = |worker: &WorkerState| {
            let ordinal = worker.member.ordinal;
            WorkerObservation {
                member: worker.member,
                lossless_since: worker.lossless_since,
                domain: self.environment.domain(ordinal),
                liveness: detector.liveness(ordinal).expect("every known worker is tracked by the detector"),
                fresh: detector.is_fresh(ordinal, now_ms),
                // Supervised by the process that started them, or by their pod.
                supervised: true,
                // A worker that is about to stop gets no new partitions.
                damped: worker.is_leaving()
                    || self.environment.relieved.contains(&ordinal)
                    || detector.is_damped(ordinal, now_ms),
                leaving_since_ms: worker.leaving_since_ms,
                disk_full: worker.report.disk_full,
                seen_since_ms: worker.connected_since_ms,
                suspects: worker.report.suspects.clone(),
            }
        };
        let members: Vec<_> = self.members().map(observe).collect();
        ClusterObservation {
            cluster: options.cluster,
            partitions: options.partitions,
            workers: self.goal.workers(options.workers),
            replicas: options.replication_factor,
            keeps_all: options.keeps_all,
            now_ms,
            age_ms: detector.age_ms(now_ms),
            timing: *detector.timing(),
            restart_grace_ms: options.restart_grace.as_millis() as u64,
            max_transfers: self.max_transfers(),
            absent: find_absent(self.known.entries(), &members, detector, now_ms),
            workers_seen: members,
            draining: self.goal.draining.clone(),
            braked: detector.is_braked(),
            last_failover_ms: self.known.last_failover_ms(),
        }
    }

    fn max_transfers(&self) -> usize {
        let memories: u64 = self.members().map(|worker| worker.report.memories).sum();
        let replicas: u64 = self.known.entries().iter().map(|entry| entry.isr.len() as u64).sum();
        let memories_per_replica = (memories / replicas.max(1)).max(1);
        (MAX_MEMORIES_IN_TRANSFER / memories_per_replica).clamp(MIN_TRANSFERS, MAX_TRANSFERS) as usize
    }

    /// Returns the workers to drain: ordered ones, and those above the number of workers.
    pub(crate) fn draining(&self, options: &Options) -> BTreeSet<Ordinal> {
        let workers = self.goal.workers(options.workers);
        let in_sync = self.known.entries().iter().flat_map(|entry| &entry.isr);
        let ordinals = in_sync.map(|member| member.ordinal).chain(self.members().map(|worker| worker.member.ordinal));
        ordinals.filter(|ordinal| ordinal.0 >= workers).chain(self.goal.draining.iter().copied()).collect()
    }

    /// Number of ordinals that workers may have: desired ones, and those that still hold replicas.
    pub(crate) fn max_workers(&self, options: &Options) -> u32 {
        let held = self.known.entries().iter().flat_map(|entry| &entry.isr);
        let held = held.map(|member| member.ordinal.0 + 1).max().unwrap_or(0);
        held.max(self.goal.workers(options.workers)).max(options.workers)
    }
}
