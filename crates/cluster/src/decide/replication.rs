//! Replica placement: how many replicas each partition has, and on which workers.
//!
//! A replica moves by being created at its destination first: a learner is named, the primary adds it once it is caught
//! up, and only then is the surplus replica removed. So a move never reduces the number of replicas, and every decision
//! derives from the current map alone: an under-replicated partition gets a learner, one with surplus loses the replica
//! on the fullest worker.

use super::{ClusterView, LeadershipTransfer, MemberHealth, Plan, count, workers};
use crate::change::Change;
use crate::map::Entry;
use crate::placement::rendezvous_weight;
use engram_memory::{Member, Ordinal, PartitionId};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// How long a partition with more than one healthy replica waits for a lost worker to come back.
const LOST_GRACE_MS: u64 = 30_000;
/// How long a worker that announced its stop is waited for, until it has stopped and restarted: longer than the longest
/// drain.
const LEAVE_GRACE_MS: u64 = 60_000;
/// Concurrent leadership transfers away from a draining worker.
const MAX_DRAIN_TRANSFERS: usize = 16;

/// The replicas of one partition whose primary serves.
struct PartitionReplicas<'a> {
    partition: PartitionId,
    entry: &'a Entry,
    /// In sync, and not known to be lost.
    healthy: Vec<Ordinal>,
    /// Replicas being created that are still wanted.
    learners: Vec<Ordinal>,
    /// Replicas still to be created, in addition to `learners`.
    missing: usize,
}

/// The replicas of all partitions whose primary serves, and the state transfers in flight.
pub(super) struct ReplicationPlanner<'a> {
    view: &'a ClusterView<'a>,
    partitions: Vec<PartitionReplicas<'a>>,
    /// Replicas on each worker, learners included.
    load: BTreeMap<Ordinal, usize>,
    incoming: BTreeMap<Ordinal, usize>,
    outgoing: BTreeMap<Ordinal, usize>,
    /// Moves in flight, by source and destination.
    moves: BTreeMap<(Ordinal, Ordinal), usize>,
    /// Partitions that this plan already changes.
    changed: BTreeSet<PartitionId>,
}

impl<'a> ReplicationPlanner<'a> {
    pub(super) fn new(view: &'a ClusterView<'a>, settled: &[PartitionId]) -> Self {
        let mut planner = Self {
            view,
            partitions: Vec::with_capacity(settled.len()),
            load: BTreeMap::new(),
            incoming: BTreeMap::new(),
            outgoing: BTreeMap::new(),
            moves: BTreeMap::new(),
            changed: BTreeSet::new(),
        };
        for entry in &view.map.partitions {
            let members: BTreeSet<_> =
                entry.isr.iter().map(|member| member.ordinal).chain(entry.learners.clone()).collect();
            members.into_iter().for_each(|ordinal| *planner.load.entry(ordinal).or_default() += 1);
        }
        for &partition in settled {
            let entry = &view.map.partitions[partition.0 as usize];
            if entry.activated {
                let holding = PartitionReplicas::of(view, partition, entry);
                planner.partitions.push(holding);
            }
        }
        planner.count_moves();
        planner
    }

    /// Counts the transfers in flight, and takes replicas that will leave off the load of their workers.
    fn count_moves(&mut self) {
        for index in 0..self.partitions.len() {
            let holding = &self.partitions[index];
            let (primary, learners) = (holding.entry.primary, holding.learners.clone());
            let surplus = holding.staying(self.view).count() + learners.len() > self.replication_factor();
            for &learner in &learners {
                *self.incoming.entry(learner).or_default() += 1;
                *self.outgoing.entry(primary).or_default() += 1;
                if surplus && let Some(leaver) = self.choose_leaver(&self.partitions[index]) {
                    self.unload(leaver);
                    *self.moves.entry((leaver, learner)).or_default() += 1;
                }
            }
        }
    }

    fn replication_factor(&self) -> usize {
        self.view.observed.replicas as usize
    }

    fn load(&self, ordinal: Ordinal) -> usize {
        self.load.get(&ordinal).copied().unwrap_or(0)
    }

    fn unload(&mut self, ordinal: Ordinal) {
        self.load.entry(ordinal).and_modify(|load| *load = load.saturating_sub(1));
    }

    fn has_capacity(&self, from: Ordinal, to: Ordinal) -> bool {
        let busy = |moves: &BTreeMap<Ordinal, usize>, ordinal| moves.get(&ordinal).copied().unwrap_or(0);
        let limit = self.view.observed.max_transfers;
        busy(&self.incoming, to) < limit && busy(&self.outgoing, from) < limit
    }

    fn begin(&mut self, from: Ordinal, to: Ordinal) {
        *self.incoming.entry(to).or_default() += 1;
        *self.outgoing.entry(from).or_default() += 1;
        *self.load.entry(to).or_default() += 1;
    }

    /// Whether replicas are moving between workers.
    pub(super) fn is_moving(&self) -> bool {
        !self.moves.is_empty()
    }

    /// Whether any partition is under-replicated.
    pub(super) fn is_under_replicated(&self) -> bool {
        self.partitions.iter().any(|holding| holding.missing > 0 || holding.healthy.len() < self.replication_factor())
    }

    /// Names learners for under-replicated partitions, those with a single replica first, and drops learners that are
    /// dead or have no space.
    pub(super) fn re_replicate(&mut self, plan: &mut Plan) {
        let mut order: Vec<_> = (0..self.partitions.len()).collect();
        order.sort_by_key(|&index| (self.partitions[index].healthy.len(), index));
        let transfers_pending = self.has_transferable_primaries();
        for index in order {
            let holding = &self.partitions[index];
            let mut learners = holding.learners.clone();
            for _ in 0..holding.missing {
                let Some(to) = self.choose_target(&self.partitions[index], &learners) else { break };
                let from = self.partitions[index].entry.primary;
                if !self.may_re_replicate(&self.partitions[index], transfers_pending) || !self.has_capacity(from, to) {
                    break;
                }
                self.begin(from, to);
                learners.push(to);
            }
            let holding = &self.partitions[index];
            if learners != holding.entry.learners {
                self.changed.insert(holding.partition);
                plan.changes.push((holding.partition, Change::Learn(learners)));
            }
        }
    }

    /// Whether to re-replicate a partition now. With `transfers_pending`, leadership transfers away from draining
    /// workers come first.
    fn may_re_replicate(&self, holding: &PartitionReplicas<'_>, transfers_pending: bool) -> bool {
        let observed = self.view.observed;
        if observed.braked {
            return false;
        }
        if holding.healthy.len() >= self.replication_factor() {
            // No replica is lost: a worker is draining. Each change of its partitions' replicas pauses them, so
            // leadership moves first.
            return !transfers_pending;
        }
        let alone = holding.healthy.len() == 1;
        let grace_ms = if alone { observed.restart_grace_ms } else { LOST_GRACE_MS };
        let may_return = observed.workers_seen.iter().any(|worker| {
            let proven = matches!(worker.liveness, crate::detector::Liveness::Dead { .. }) && worker.supervised;
            let in_grace = worker.liveness.since_ms().is_some_and(|at_ms| observed.now_ms < at_ms + grace_ms);
            let leaving = worker.leaving_since_ms.is_some_and(|at_ms| observed.now_ms < at_ms + LEAVE_GRACE_MS);
            let gone = in_grace && (proven || !alone);
            (gone || (leaving && worker.liveness.is_alive())) && !holding.healthy.contains(&worker.member.ordinal)
        });
        // A coordinator that just started has not received every worker's report.
        !may_return && observed.age_ms >= observed.restart_grace_ms
    }

    /// Whether a draining worker is primary of a partition that a living replica could take.
    fn has_transferable_primaries(&self) -> bool {
        let transferable = |holding: &PartitionReplicas<'_>| {
            let to = |ordinal: Ordinal| self.view.worker(ordinal).is_some_and(|worker| worker.liveness.is_alive());
            self.view.is_draining(holding.entry.primary) && holding.staying(self.view).any(to)
        };
        self.partitions.iter().any(transferable)
    }

    /// Chooses the worker for the next replica of a partition: in another failure domain where there is one, with load
    /// below the bound, by rendezvous order.
    fn choose_target(&self, holding: &PartitionReplicas<'_>, learners: &[Ordinal]) -> Option<Ordinal> {
        let holders = self.view.holders().count().max(1);
        let bound = (self.view.map.partitions.len() * self.replication_factor()).div_ceil(holders);
        let taken = |ordinal: &Ordinal| {
            holding.healthy.contains(ordinal) || learners.contains(ordinal) || !self.view.takes_replicas(*ordinal)
        };
        self.view.holders().map(|worker| worker.member.ordinal).filter(|ordinal| !taken(ordinal)).min_by_key(
            |&ordinal| {
                let others = holding.healthy.iter().chain(learners).copied();
                let rank = Reverse(rendezvous_weight(holding.partition.0, ordinal));
                let full = self.load(ordinal) >= bound;
                (self.view.shares_domain(ordinal, others), full, rank)
            },
        )
    }

    /// Removes surplus replicas, and replicas on draining workers. A primary transfers its leadership first.
    pub(super) fn remove_surplus(&mut self, primaries: &BTreeMap<Ordinal, usize>, plan: &mut Plan) {
        let mut in_flight: BTreeMap<Ordinal, usize> = BTreeMap::new();
        for index in 0..self.partitions.len() {
            let holding = &self.partitions[index];
            if self.changed.contains(&holding.partition) {
                continue;
            }
            let staying: Vec<_> = holding.staying(self.view).collect();
            let primary_drains = self.view.is_draining(holding.entry.primary) && !staying.is_empty();
            let surplus =
                holding.healthy.len() > self.replication_factor() && staying.len() >= self.replication_factor();
            if !surplus && !primary_drains {
                continue;
            }
            let leaver = if primary_drains { Some(holding.entry.primary) } else { self.choose_leaver(holding) };
            let Some(leaver) = leaver else { continue };
            let alive = |ordinal: Ordinal| {
                self.view.worker(ordinal).is_some_and(|worker| worker.liveness.is_alive() && worker.fresh)
            };
            let able = |ordinal: Ordinal| alive(ordinal) && self.view.serves_at_once(ordinal);
            let stays = |ordinal: Ordinal| alive(ordinal) && !self.view.is_leaving(ordinal);
            let kept = staying.iter().filter(|ordinal| **ordinal != leaver && stays(**ordinal)).count();
            if leaver != holding.entry.primary && kept < self.replication_factor() {
                continue;
            }
            let (partition, entry) = (holding.partition, holding.entry);
            if leaver == entry.primary {
                let to = staying.iter().copied().filter(|ordinal| *ordinal != leaver && able(*ordinal)).min_by_key(
                    |ordinal| {
                        let damped = self.view.worker(*ordinal).is_none_or(|worker| worker.damped);
                        (damped, primaries.get(ordinal).copied().unwrap_or(0), *ordinal)
                    },
                );
                let transfers = in_flight.entry(leaver).or_default();
                if let Some(to) = to
                    && *transfers < MAX_DRAIN_TRANSFERS
                {
                    *transfers += 1;
                    plan.transfers.push(LeadershipTransfer { partition, to });
                }
            } else {
                self.changed.insert(partition);
                plan.changes.push((partition, removal(entry, leaver)));
            }
            self.unload(leaver);
        }
    }

    /// Chooses the replica to remove: one on a draining worker, else one that is leaving, shares a failure domain, or
    /// is on the fullest worker.
    fn choose_leaver(&self, holding: &PartitionReplicas<'_>) -> Option<Ordinal> {
        holding.healthy.iter().copied().max_by_key(|&ordinal| {
            let shares = self.view.shares_domain(ordinal, holding.healthy.iter().copied());
            let is_primary = ordinal == holding.entry.primary;
            let leaves = self.view.is_leaving(ordinal);
            (self.view.is_draining(ordinal), leaves, shares, self.load(ordinal), !is_primary, Reverse(ordinal))
        })
    }

    /// Moves replicas from the fullest workers to the emptiest, few per pair at a time.
    pub(super) fn rebalance(&mut self, plan: &mut Plan) {
        let mut holders: Vec<_> = self.view.holders().map(|worker| worker.member.ordinal).collect();
        // A leaving worker returns with the replicas that it holds.
        if holders.iter().any(|&ordinal| self.view.is_leaving(ordinal)) {
            return;
        }
        holders.sort_by_key(|&ordinal| (self.load(ordinal), ordinal));
        let limit = (self.view.observed.max_transfers / 2).max(1);
        // A smaller difference is not worth a transfer; the initial placement is no more even.
        let share = self.view.map.partitions.len() * self.replication_factor() / holders.len().max(1);
        let slack = self.replication_factor() + share / 32;
        let takers = || holders.iter().filter(|to| self.view.takes_replicas(**to));
        let pairs = || takers().flat_map(|to| holders.iter().rev().map(move |from| (*from, *to)));
        // Round by round, so that no pair gets ahead of the others.
        for _ in 0..limit {
            for (from, to) in pairs() {
                let in_flight = self.moves.get(&(from, to)).copied().unwrap_or(0);
                if self.load(from) <= self.load(to) + slack || in_flight >= limit {
                    continue;
                }
                let movable = |holding: &&PartitionReplicas<'_>| {
                    let rest = holding.healthy.iter().copied().filter(|other| *other != from);
                    holding.healthy.contains(&from)
                        && !holding.healthy.contains(&to)
                        && holding.healthy.len() == self.replication_factor()
                        && holding.entry.learners.is_empty()
                        && !self.changed.contains(&holding.partition)
                        && self.has_capacity(holding.entry.primary, to)
                        && (!self.view.shares_domain(to, rest.clone()) || self.view.shares_domain(from, rest))
                };
                let preferred = |holding: &&PartitionReplicas<'_>| rendezvous_weight(holding.partition.0, to);
                let Some(holding) = self.partitions.iter().filter(movable).max_by_key(preferred) else { continue };
                let (partition, primary) = (holding.partition, holding.entry.primary);
                plan.changes.push((partition, Change::Learn(vec![to])));
                self.changed.insert(partition);
                *self.moves.entry((from, to)).or_default() += 1;
                self.begin(primary, to);
                self.unload(from);
            }
        }
    }

    /// Reports under-replicated partitions, full disks and draining workers as conditions.
    pub(super) fn report_conditions(&self, plan: &mut Plan) {
        let wanted = self.replication_factor();
        let under_replicated: Vec<_> =
            self.partitions.iter().filter(|holding| holding.healthy.len() < wanted).collect();
        let holders = self.view.holders().count();
        if !under_replicated.is_empty() {
            let single = under_replicated.iter().filter(|holding| holding.healthy.len() == 1).count();
            let to: BTreeSet<_> = under_replicated.iter().flat_map(|holding| &holding.learners).copied().collect();
            let progress = match () {
                () if holders < wanted => format!("only {} available", count(holders, "worker")),
                () if to.is_empty() => "re-replication has not started".to_owned(),
                () => format!("re-replicating to {}", workers(to)),
            };
            plan.conditions.push(format!(
                "{} of {} under-replicated (fewer than {wanted} in-sync replicas), {single} with a single replica: {progress}",
                under_replicated.len(),
                count(self.view.map.partitions.len(), "partition"),
            ));
        }
        let full: Vec<_> =
            self.view.holders().filter(|worker| worker.disk_full).map(|worker| worker.member.ordinal).collect();
        if !full.is_empty() {
            plan.conditions.push(format!("no free disk space on {}: no new replicas there", workers(full)));
        }
        let draining = self.load.iter().filter(|(ordinal, _)| self.view.is_draining(**ordinal));
        for (ordinal, _) in draining {
            let holds = |entry: &&Entry| entry.isr.iter().any(|member| member.ordinal == *ordinal);
            let held = self.view.map.partitions.iter().filter(holds).count();
            if held > 0 {
                let blocked = if holders < wanted { ", too few workers to take them" } else { "" };
                let noun = if held == 1 { "replica" } else { "replicas" };
                plan.conditions.push(format!("{} is draining: {held} {noun} left{blocked}", workers([*ordinal])));
            }
        }
    }
}

impl<'a> PartitionReplicas<'a> {
    fn of(view: &ClusterView<'_>, partition: PartitionId, entry: &'a Entry) -> Self {
        let is_present = |member: &&Member| !matches!(view.health(entry, member), MemberHealth::Lost { .. });
        let sound: Vec<_> = entry.isr.iter().filter(is_present).map(|member| member.ordinal).collect();
        let holds = |ordinal: &Ordinal| {
            view.holders().any(|worker| worker.member.ordinal == *ordinal) && view.takes_replicas(*ordinal)
        };
        let wanted = |ordinal: &Ordinal| holds(ordinal) && !sound.contains(ordinal);
        let learners: Vec<_> = entry.learners.iter().copied().filter(wanted).collect();
        let mut holding = Self { partition, entry, healthy: sound, learners, missing: 0 };
        let current = holding.staying(view).count() + holding.learners.len();
        holding.missing = (view.observed.replicas as usize).saturating_sub(current);
        holding
    }

    /// Replicas that stay where they are.
    fn staying<'b>(&'b self, view: &'b ClusterView<'_>) -> impl Iterator<Item = Ordinal> + 'b {
        self.healthy.iter().copied().filter(|ordinal| !view.is_draining(*ordinal))
    }
}

/// Returns the change that removes a member from the in-sync set.
fn removal(entry: &Entry, leaver: Ordinal) -> Change {
    let primary = *entry.primary_member().expect("the map store accepts only entries with a primary");
    let isr: Vec<_> = entry.isr.iter().map(|member| member.ordinal).filter(|ordinal| *ordinal != leaver).collect();
    // A primary that becomes the only replica may first have to make its log durable: it activates again.
    if isr.len() == 1 { Change::Promote { primary, isr } } else { Change::Remove { primary, leaver } }
}
