//! Plans the next map: accepted proposals of workers, and the decisions of the coordinator.

use super::{State, WorkerState};
use crate::Options;
use engram_cluster::{
    Change, ClusterObservation, ExpectedEntry, PartitionMap, Plan, WorkerObservation, decide, find_absent,
};
use engram_memory::{Ordinal, PartitionId};
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

impl State {
    /// Queues proposals of a worker. One based on an entry newer than the known one waits until the map is read:
    /// another coordinator wrote it.
    pub(crate) fn propose(&mut self, proposer: Ordinal, proposals: Vec<Proposal>) {
        let entry = |partition: PartitionId| self.map.as_ref()?.partitions.get(partition.0 as usize);
        let is_newer = |it: &Proposal| entry(it.partition).is_some_and(|entry| entry.expectation() < it.expected);
        self.is_overtaken |= proposals.iter().any(is_newer);
        self.proposals.extend(proposals.into_iter().map(|proposal| ((proposal.partition, proposer), proposal)));
    }

    /// Requeues proposals whose write failed; newer ones stay.
    pub(crate) fn requeue(&mut self, proposals: Proposals) {
        for (key, proposal) in proposals {
            self.proposals.entry(key).or_insert(proposal);
        }
    }

    /// Returns the map to write now: all proposals that match the current entries, plus decisions.
    pub(crate) fn next_map(&mut self, options: &Options, now_ms: u64) -> Option<MapUpdate> {
        if self.map.is_none() && self.seen_version > 0 && self.lost.is_none() {
            self.lose_missing(self.seen_version, now_ms);
        }
        if let Some(why) = self.take_overdue_loss(now_ms) {
            tracing::error!(why, "partition map lost");
        }
        if let Some(lost) = &self.lost {
            self.conditions = vec![format!("{lost}; no changes until it is restored: engram partition rebuild-map")];
            self.transfers.clear();
            return None;
        }
        if self.is_behind() {
            return None;
        }
        let observation = self.observed(options, now_ms);
        let Some(current) = &self.map else {
            if self.environment.had_map {
                self.conditions =
                    vec!["the partition map is missing, and no connected worker has stored one".to_owned()];
                return None;
            }
            let plan = if options.bootstraps { self.bootstrap(options) } else { decide(None, &observation) };
            let first = self.take_plan(plan).initial_map?;
            return Some(MapUpdate { expected: None, map: first, proposals: Proposals::new(), is_urgent: true });
        };
        let mut next = current.clone();
        let (mut changed, mut is_urgent) = (BTreeSet::new(), false);
        let mut accepted = std::mem::take(&mut self.proposals);
        accepted.retain(|(partition, proposer), proposal| {
            let Some(entry) = next.partitions.get_mut(partition.0 as usize) else { return false };
            let fits = entry.expectation() == proposal.expected && !changed.contains(partition);
            let deposes = matches!(proposal.change, Change::Promote { .. }) && *proposer != entry.primary;
            // The coordinator decides promotions as long as the current primary is alive here.
            let primary_alive = || {
                let primary = entry.primary_member().map(|member| member.ordinal);
                let worker = primary.and_then(|ordinal| self.members.get(&ordinal));
                worker.is_some_and(|worker| worker.alive && entry.served_by(&worker.member))
            };
            if !fits || (deposes && primary_alive()) {
                return false;
            }
            match entry.apply(&proposal.change) {
                Ok(after) => {
                    // A primary that proposes a successor accepts no writes until then; one that adds a replica does.
                    is_urgent |= !matches!(proposal.change, Change::Add { .. } | Change::Learn(_));
                    *entry = after;
                    changed.insert(*partition);
                    true
                }
                Err(illegal) => {
                    tracing::debug!(%partition, worker = %proposer, %illegal, "rejected stale proposal");
                    false
                }
            }
        });
        let plan = if self.is_closing() { Plan::default() } else { decide(Some(&next), &observation) };
        for (partition, change) in &plan.changes {
            // The map store accepts one change per entry at a time.
            if changed.contains(partition) {
                continue;
            }
            let entry = &mut next.partitions[partition.0 as usize];
            match entry.apply(change) {
                Ok(after) => {
                    is_urgent |= matches!(change, Change::Promote { .. });
                    *entry = after;
                    changed.insert(*partition);
                }
                Err(illegal) => tracing::error!(%partition, ?change, %illegal, "planned an illegal map change"),
            }
        }
        let expected = Some(next.version);
        self.take_plan(plan);
        if !self.is_closing() {
            self.transfer_from_cordoned(&next);
        }
        (!changed.is_empty()).then_some(MapUpdate { expected, map: next, proposals: accepted, is_urgent })
    }

    fn take_plan(&mut self, mut plan: Plan) -> Plan {
        self.conditions = std::mem::take(&mut plan.conditions);
        self.transfers = std::mem::take(&mut plan.transfers);
        plan
    }

    pub(crate) fn observed(&self, options: &Options, now_ms: u64) -> ClusterObservation {
        let observe = |worker: &WorkerState| {
            let ordinal = worker.member.ordinal;
            WorkerObservation {
                member: worker.member,
                lossless_since: worker.lossless_since,
                domain: self.domain(ordinal),
                liveness: self.detector.liveness(ordinal).expect("every known worker is tracked by the detector"),
                fresh: self.detector.is_fresh(ordinal, now_ms),
                // Supervised by the process that started them, or by their pod.
                supervised: true,
                // A worker that is about to stop gets no new partitions.
                damped: worker.is_leaving()
                    || self.environment.relieved.contains(&ordinal)
                    || self.detector.is_damped(ordinal, now_ms),
                leaving_since_ms: worker.leaving_since_ms,
                disk_full: worker.disk_full,
                seen_since_ms: worker.connected_since_ms,
                suspects: worker.suspects.clone(),
            }
        };
        let entries = self.map.as_ref().map_or(&[][..], |map| &map.partitions);
        let members: Vec<_> = self.members.values().map(observe).collect();
        ClusterObservation {
            cluster: options.cluster,
            partitions: options.partitions,
            workers: self.goal.workers(options.workers),
            replicas: options.replication_factor,
            keeps_all: options.keeps_all,
            now_ms,
            age_ms: self.detector.age_ms(now_ms),
            timing: *self.detector.timing(),
            restart_grace_ms: options.restart_grace.as_millis() as u64,
            max_transfers: self.max_transfers(),
            absent: find_absent(entries, &members, &self.detector, now_ms),
            workers_seen: members,
            draining: self.goal.draining.clone(),
            braked: self.detector.is_braked(),
            last_failover_ms: self.last_failover_ms,
        }
    }

    fn max_transfers(&self) -> usize {
        let memories: u64 = self.members.values().map(|worker| worker.memories).sum();
        let entries = self.map.iter().flat_map(|map| &map.partitions);
        let replicas: u64 = entries.map(|entry| entry.isr.len() as u64).sum();
        let memories_per_replica = (memories / replicas.max(1)).max(1);
        (MAX_MEMORIES_IN_TRANSFER / memories_per_replica).clamp(MIN_TRANSFERS, MAX_TRANSFERS) as usize
    }

    /// Returns the workers to drain: ordered ones, and those above the number of workers.
    pub(crate) fn draining(&self, options: &Options) -> BTreeSet<Ordinal> {
        let workers = self.goal.workers(options.workers);
        let in_sync = self.map.iter().flat_map(|map| &map.partitions).flat_map(|entry| &entry.isr);
        let ordinals = in_sync.map(|member| member.ordinal).chain(self.members.keys().copied());
        ordinals.filter(|ordinal| ordinal.0 >= workers).chain(self.goal.draining.iter().copied()).collect()
    }

    /// Number of ordinals that workers may have: desired ones, and those that still hold replicas.
    pub(crate) fn max_workers(&self, options: &Options) -> u32 {
        let held = self.map.iter().flat_map(|map| &map.partitions).flat_map(|entry| &entry.isr);
        let held = held.map(|member| member.ordinal.0 + 1).max().unwrap_or(0);
        held.max(self.goal.workers(options.workers)).max(options.workers)
    }
}
