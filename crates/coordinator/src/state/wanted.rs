//! What should be done about what was heard: the map that should be written, with what workers asked for and what is decided.

use super::{Heard, State, gone};
use crate::Options;
use engram_cluster::{Change, Expected, Observed, PartitionMap, Plan, Seen, absent, decide};
use engram_memory::{Ordinal, PartitionId};
use std::collections::{BTreeMap, BTreeSet};

/// Copies that a worker takes, and gives, at a time.
const COPIES_AT_ONCE: u64 = 2;
/// Small partitions are copied more at a time, as long as they hold no more memories together than this: their copies are
/// bounded by the writes of the map, not by the link.
const MEMORIES_AT_ONCE: u64 = 256 << 10;
/// But never more than this.
const COPIES_MOST: u64 = 32;

/// A change of the map that a worker asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Proposal {
    pub(crate) partition: PartitionId,
    pub(crate) expected: Expected,
    pub(crate) change: Change,
}

/// The newest proposal of each worker for each partition: what an older one asked for is asked again if it still matters.
pub(crate) type Proposals = BTreeMap<(PartitionId, Ordinal), Proposal>;

/// A map that should be written.
#[derive(Debug)]
pub(crate) struct Wanted {
    /// Version that it replaces.
    pub(crate) expected: Option<u64>,
    pub(crate) map: PartitionMap,
    /// The proposals in it, to be looked at again if the write fails.
    pub(crate) proposals: Proposals,
    /// Somebody waits for it: a partition is not served, or takes no writes, until it is done.
    pub(crate) is_urgent: bool,
}

impl State {
    /// Takes proposals of a worker. One on an entry that is newer than the one known here waits until the map is read: another
    /// coordinator wrote it, and whoever proposed has heard of that first.
    pub(crate) fn propose(&mut self, proposer: Ordinal, proposals: Vec<Proposal>) {
        let entry = |partition: PartitionId| self.map.as_ref()?.partitions.get(partition.0 as usize);
        let is_newer = |it: &Proposal| entry(it.partition).is_some_and(|entry| entry.expected() < it.expected);
        self.is_overtaken |= proposals.iter().any(is_newer);
        self.proposals.extend(proposals.into_iter().map(|proposal| ((proposal.partition, proposer), proposal)));
    }

    /// Takes proposals back whose write failed; newer ones stay.
    pub(crate) fn propose_again(&mut self, proposals: Proposals) {
        for (place, proposal) in proposals {
            self.proposals.entry(place).or_insert(proposal);
        }
    }

    /// The map that should be written now: with all proposals that fit what is there, and with what is decided.
    pub(crate) fn wanted(&mut self, options: &Options, now_ms: u64) -> Option<Wanted> {
        if self.map.is_none() && self.seen_version > 0 && self.lost.is_none() {
            self.lose(gone(self.seen_version));
        }
        if let Some(lost) = &self.lost {
            self.conditions =
                vec![format!("{lost}; nothing is changed before it is back: engram partition rebuild-map")];
            self.hand_overs.clear();
            return None;
        }
        if self.is_behind() {
            return None;
        }
        let observed = self.observed(options, now_ms);
        let Some(current) = &self.map else {
            if self.surroundings.had_map {
                self.conditions = vec!["the partition map is gone, and no worker that answers has kept one".to_owned()];
                return None;
            }
            let plan = if options.bootstraps { self.bootstrap(options) } else { decide(None, &observed) };
            let first = self.take_plan(plan).first?;
            return Some(Wanted { expected: None, map: first, proposals: Proposals::new(), is_urgent: true });
        };
        let mut next = current.clone();
        let (mut changed, mut is_urgent) = (BTreeSet::new(), false);
        let mut taken = std::mem::take(&mut self.proposals);
        taken.retain(|(partition, proposer), proposal| {
            let Some(entry) = next.partitions.get_mut(partition.0 as usize) else { return false };
            let fits = entry.expected() == proposal.expected && !changed.contains(partition);
            let deposes = matches!(proposal.change, Change::Promote { .. }) && *proposer != entry.primary;
            // A promotion is decided here as long as there is somebody here to decide.
            let lives = || {
                let primary = entry.primary_member().map(|member| member.ordinal);
                let heard = primary.and_then(|ordinal| self.members.get(&ordinal));
                heard.is_some_and(|heard| heard.alive && entry.served_by(&heard.member))
            };
            if !fits || (deposes && lives()) {
                return false;
            }
            match entry.changed(&proposal.change) {
                Ok(after) => {
                    // A primary that asks to be followed by another takes no writes until then; one that adds a copy does.
                    is_urgent |= !matches!(proposal.change, Change::Add { .. } | Change::Learn(_));
                    *entry = after;
                    changed.insert(*partition);
                    true
                }
                Err(illegal) => {
                    tracing::debug!(%partition, worker = %proposer, %illegal, "a proposal does not fit");
                    false
                }
            }
        });
        let plan = if self.is_closing() { Plan::default() } else { decide(Some(&next), &observed) };
        for (partition, change) in &plan.changes {
            // The map store takes one step of an entry at a time.
            if changed.contains(partition) {
                continue;
            }
            let entry = &mut next.partitions[partition.0 as usize];
            match entry.changed(change) {
                Ok(after) => {
                    is_urgent |= matches!(change, Change::Promote { .. });
                    *entry = after;
                    changed.insert(*partition);
                }
                Err(illegal) => tracing::error!(%partition, ?change, %illegal, "an illegal change was decided"),
            }
        }
        let expected = Some(next.version);
        self.take_plan(plan);
        if !self.is_closing() {
            self.relieve(&next);
        }
        (!changed.is_empty()).then_some(Wanted { expected, map: next, proposals: taken, is_urgent })
    }

    fn take_plan(&mut self, mut plan: Plan) -> Plan {
        self.conditions = std::mem::take(&mut plan.conditions);
        self.hand_overs = std::mem::take(&mut plan.hand_overs);
        plan
    }

    pub(crate) fn observed(&self, options: &Options, now_ms: u64) -> Observed {
        let seen = |heard: &Heard| {
            let ordinal = heard.member.ordinal;
            Seen {
                member: heard.member,
                lossless_since: heard.lossless_since,
                domain: self.domain(ordinal),
                standing: self.detector.standing(ordinal).expect("whoever is a member was met"),
                fresh: self.detector.is_fresh(ordinal, now_ms),
                // By the process that started them, or by their pod.
                supervised: true,
                // Whoever is about to be stopped leads nothing new, either.
                damped: heard.is_leaving()
                    || self.surroundings.relieved.contains(&ordinal)
                    || self.detector.is_damped(ordinal, now_ms),
                leaving_since_ms: heard.leaving_since_ms,
                heard_since_ms: heard.heard_since_ms,
                suspects: heard.suspects.clone(),
            }
        };
        let entries = self.map.as_ref().map_or(&[][..], |map| &map.partitions);
        let members: Vec<_> = self.members.values().map(seen).collect();
        Observed {
            cluster: options.cluster,
            partitions: options.partitions,
            workers: self.goal.workers(options.workers),
            copies: options.replication_factor,
            keeps_all: options.keeps_all,
            now_ms,
            age_ms: self.detector.age_ms(now_ms),
            timing: *self.detector.timing(),
            restart_grace_ms: options.restart_grace.as_millis() as u64,
            copies_at_once: self.copies_at_once(),
            absent: absent(entries, &members, &self.detector, now_ms),
            members,
            draining: self.goal.draining.clone(),
            braked: self.detector.is_braked(),
            failed_over_ms: self.failed_over_ms,
        }
    }

    fn copies_at_once(&self) -> usize {
        let memories: u64 = self.members.values().map(|heard| heard.memories).sum();
        let entries = self.map.iter().flat_map(|map| &map.partitions);
        let copies: u64 = entries.map(|entry| entry.isr.len() as u64).sum();
        let each = (memories / copies.max(1)).max(1);
        (MEMORIES_AT_ONCE / each).clamp(COPIES_AT_ONCE, COPIES_MOST) as usize
    }

    /// The workers that are being emptied: those ordered, and those above the number of workers.
    pub(crate) fn draining(&self, options: &Options) -> BTreeSet<Ordinal> {
        let workers = self.goal.workers(options.workers);
        let named = self.map.iter().flat_map(|map| &map.partitions).flat_map(|entry| &entry.isr);
        let known = named.map(|member| member.ordinal).chain(self.members.keys().copied());
        known.filter(|ordinal| ordinal.0 >= workers).chain(self.goal.draining.iter().copied()).collect()
    }

    /// Places that workers may come from: those wanted, and those that hold copies still.
    pub(crate) fn places(&self, options: &Options) -> u32 {
        let held = self.map.iter().flat_map(|map| &map.partitions).flat_map(|entry| &entry.isr);
        let held = held.map(|member| member.ordinal.0 + 1).max().unwrap_or(0);
        held.max(self.goal.workers(options.workers)).max(options.workers)
    }
}
