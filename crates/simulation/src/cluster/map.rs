//! The map store: the only source of truth, reached late, and read later.

use crate::cluster::liveness::detector_ms;
use crate::cluster::node::CLUSTER;
use crate::faults::Fault;
use crate::faults::plan::FaultPlan;
use crate::world::{Event, World};
use engram_cluster::{Candidate, Change, Entry, PartitionMap, place_replicas};
use engram_memory::{Member, PartitionId};
use engram_store::peer::Proposal;
use std::sync::Arc;

/// No living process is considered dead this long after the last fault.
const SETTLED_US: u64 = 8_000_000;

/// The current map.
pub(crate) struct MapStore {
    pub(crate) entries: Vec<Entry>,
    version: u64,
    /// When each entry last changed.
    pub(crate) changed_us: Vec<u64>,
    pub(crate) promotions: u64,
    /// Failovers, including erratic replacements.
    pub(crate) failovers: u64,
    /// Failovers of running processes.
    pub(crate) unnecessary: u64,
}

impl MapStore {
    pub(crate) fn new(plan: &FaultPlan, members: &[Member]) -> Self {
        let candidates: Vec<Candidate> = members
            .iter()
            .map(|member| Candidate { ordinal: member.ordinal, domain: format!("node-{}", member.ordinal) })
            .collect();
        let placed =
            place_replicas(plan.partitions, &candidates, plan.replicas as usize).expect("there are enough nodes");
        let entry = |chosen: &Vec<engram_memory::Ordinal>| {
            Entry::first(chosen.iter().map(|ordinal| members[ordinal.0 as usize]).collect())
        };
        let entries: Vec<Entry> = placed.iter().map(entry).collect();
        let changed_us = vec![0; entries.len()];
        Self { entries, version: 1, changed_us, promotions: 0, failovers: 0, unnecessary: 0 }
    }

    pub(crate) fn entry(&self, partition: PartitionId) -> &Entry {
        &self.entries[partition.0 as usize]
    }

    pub(crate) fn snapshot(&self) -> Arc<PartitionMap> {
        Arc::new(PartitionMap { cluster: CLUSTER, version: self.version, partitions: self.entries.clone() })
    }
}

impl World {
    /// A node or the coordinator proposes changes.
    pub(crate) fn submit(&mut self, from: usize, proposals: Vec<Proposal>) {
        self.trace
            .note(self.now_us, &[12, from as u64, proposals.len() as u64], || format!("{from} proposes {proposals:?}"));
        if from != self.map_index() && self.network.is_cut(from, self.map_index()) {
            return;
        }
        if self.draw.chance(self.plan.map_lost) {
            self.count(Fault::MapLost);
            return;
        }
        let mut wait_us = self.draw.within(500, 15_000);
        if self.draw.chance(self.plan.map_late) {
            self.count(Fault::MapLate);
            wait_us += self.draw.within(20_000, 3_000_000);
        }
        if self.draw.chance(self.plan.map_duplicate) {
            self.count(Fault::MapDuplicate);
            let again_us = wait_us + self.draw.within(1_000, 2_000_000);
            self.at(again_us, Event::Propose { proposals: proposals.clone() });
        }
        self.at(wait_us, Event::Propose { proposals });
    }

    /// Proposals arrive: each is applied if its entry is still the expected one.
    pub(crate) fn decide(&mut self, proposals: Vec<Proposal>) {
        let mut changed = false;
        for Proposal { partition, expected, change } in proposals {
            let index = partition.0 as usize;
            let entry = &self.map_store.entries[index];
            if !entry.matches_expectation(expected) {
                self.count(Fault::MapConflict);
                continue;
            }
            let Ok(next) = entry.apply(&change) else { continue };
            if next == *entry {
                continue;
            }
            self.trace.note(self.now_us, &[13, u64::from(partition.0), next.term.0, u64::from(next.activated)], || {
                format!("map p{partition}: {change:?} -> {next:?}")
            });
            if let Err(broken) = self.map_store.entries[index].check(&next) {
                self.fail(format!("the map went from {:?} to {next:?}: {broken}", self.map_store.entries[index]));
            }
            self.strike_changed(&change, &next);
            let (is_promotion, node) = (matches!(change, Change::Promote { .. }), next.primary.0 as usize);
            let is_alone = next.activated && next.isr.len() == 1;
            self.map_store.promotions += u64::from(is_promotion);
            self.note_failover(index, &next);
            let deposed = std::mem::replace(&mut self.map_store.entries[index], next).primary.0 as usize;
            self.map_store.changed_us[index] = self.now_us;
            changed = true;
            if is_promotion && self.draw.chance(self.plan.mute_promoted) {
                self.mute(node);
            }
            if is_promotion && deposed != node && self.draw.chance(self.plan.deafen_deposed) {
                self.deafen(deposed);
            }
            if is_alone && self.draw.chance(self.plan.strike_alone) {
                // Before it has read that it is the only replica, or soon after.
                let most_us = self.draw.pick(&[3_000, 10_000, 60_000]);
                let wait_us = self.draw.below(most_us);
                self.at(wait_us, Event::Strike(Fault::PowerLoss, node));
            }
        }
        if changed {
            self.map_store.version += 1;
            for node in 0..self.nodes.len() {
                let mut wait_us = 0;
                if self.draw.chance(self.plan.map_stale) {
                    self.count(Fault::MapStale);
                    wait_us = self.draw.within(50_000, 1_500_000);
                }
                self.push_map(node, wait_us);
            }
        }
    }

    /// A leadership transfer keeps both in sync; a primary that is removed was considered dead.
    fn note_failover(&mut self, index: usize, next: &Entry) {
        let entry = &self.map_store.entries[index];
        if entry.primary == next.primary || next.in_sync(entry.primary).is_some() {
            return;
        }
        let deposed = entry.primary;
        let node = &self.nodes[deposed.0 as usize];
        let process = node.process.as_ref().filter(|process| entry.served_by(&process.member));
        let runs = process.is_some();
        // A primary that cannot serve its replica passes it on.
        let partition = PartitionId(index as u32);
        let leads = process
            .is_some_and(|process| !node.lacks_replica(partition, &process.member) && !node.declines(partition, entry));
        self.map_store.failovers += 1;
        self.map_store.unnecessary += u64::from(runs);
        self.coordinator.failed_over(deposed, detector_ms(self.now_us));
        if leads && self.is_calm && self.now_us > self.plan.calm_us + SETTLED_US {
            self.fail(format!("node {deposed} is healthy, but was failed over: {next:?}"));
        }
    }

    /// Sends the current map to a node.
    pub(crate) fn push_map(&mut self, node: usize, after_us: u64) {
        if !self.network.is_cut(self.map_index(), node) {
            let wait_us = after_us + self.draw.within(300, 15_000);
            let map = self.map_store.snapshot();
            self.at(wait_us, Event::Push { node, map });
        }
    }
}
