//! How many copies there are, and where.
//!
//! A copy moves by being made elsewhere first: a learner is named, its primary adds it when it holds everything, and only then
//! what is too many is removed. So a partition never has fewer copies because it moves, and everything can be worked out from the
//! map that is there: what is too few gets a learner, what is too many loses the copy on the fullest worker.

use super::{Fate, HandOver, Plan, Scene, count, workers};
use crate::change::Change;
use crate::map::Entry;
use crate::place::weight;
use engram_memory::{Member, Ordinal, PartitionId};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// How long a partition that is not alone waits for a worker that is lost: it may come back, with its copies.
const LOST_MS: u64 = 30_000;
/// How long a worker that said that it leaves is waited for until it does, and is started again: longer than the longest drain.
const LEAVES_MS: u64 = 60_000;
/// Partitions that a worker which is emptied gives up leading at a time.
const HAND_OVERS_AT_ONCE: usize = 16;

/// The copies of one partition whose primary serves.
struct Holding<'a> {
    partition: PartitionId,
    entry: &'a Entry,
    /// In sync, and not known to be lost.
    sound: Vec<Ordinal>,
    /// Copies being made that are still wanted.
    learners: Vec<Ordinal>,
    /// Copies that a lost worker took away: those wanted beside `learners`.
    lacking: usize,
}

/// The copies of all partitions whose primary serves, and who is busy with them.
pub(super) struct Copies<'a> {
    scene: &'a Scene<'a>,
    holdings: Vec<Holding<'a>>,
    /// Copies on each worker, those being made included.
    load: BTreeMap<Ordinal, usize>,
    incoming: BTreeMap<Ordinal, usize>,
    outgoing: BTreeMap<Ordinal, usize>,
    /// Moves under way, from and to.
    moves: BTreeMap<(Ordinal, Ordinal), usize>,
    /// Partitions that are changed already.
    changed: BTreeSet<PartitionId>,
}

impl<'a> Copies<'a> {
    pub(super) fn of(scene: &'a Scene<'a>, settled: &[PartitionId]) -> Self {
        let mut copies = Self {
            scene,
            holdings: Vec::with_capacity(settled.len()),
            load: BTreeMap::new(),
            incoming: BTreeMap::new(),
            outgoing: BTreeMap::new(),
            moves: BTreeMap::new(),
            changed: BTreeSet::new(),
        };
        for entry in &scene.map.partitions {
            let members: BTreeSet<_> =
                entry.isr.iter().map(|member| member.ordinal).chain(entry.learners.clone()).collect();
            members.into_iter().for_each(|ordinal| *copies.load.entry(ordinal).or_default() += 1);
        }
        for &partition in settled {
            let entry = &scene.map.partitions[partition.0 as usize];
            if entry.activated {
                let holding = Holding::of(scene, partition, entry);
                copies.holdings.push(holding);
            }
        }
        copies.count_moves();
        copies
    }

    /// Counts who takes and gives copies now, and takes what will leave from the load of those it leaves.
    fn count_moves(&mut self) {
        for index in 0..self.holdings.len() {
            let holding = &self.holdings[index];
            let (primary, learners) = (holding.entry.primary, holding.learners.clone());
            let surplus = holding.staying(self.scene).count() + learners.len() > self.wanted();
            for &learner in &learners {
                *self.incoming.entry(learner).or_default() += 1;
                *self.outgoing.entry(primary).or_default() += 1;
                if surplus && let Some(leaver) = self.leaver(&self.holdings[index]) {
                    self.unload(leaver);
                    *self.moves.entry((leaver, learner)).or_default() += 1;
                }
            }
        }
    }

    fn wanted(&self) -> usize {
        self.scene.observed.copies as usize
    }

    fn load(&self, ordinal: Ordinal) -> usize {
        self.load.get(&ordinal).copied().unwrap_or(0)
    }

    fn unload(&mut self, ordinal: Ordinal) {
        self.load.entry(ordinal).and_modify(|load| *load = load.saturating_sub(1));
    }

    fn has_room(&self, from: Ordinal, to: Ordinal) -> bool {
        let busy = |moves: &BTreeMap<Ordinal, usize>, ordinal| moves.get(&ordinal).copied().unwrap_or(0);
        let limit = self.scene.observed.copies_at_once;
        busy(&self.incoming, to) < limit && busy(&self.outgoing, from) < limit
    }

    fn begin(&mut self, from: Ordinal, to: Ordinal) {
        *self.incoming.entry(to).or_default() += 1;
        *self.outgoing.entry(from).or_default() += 1;
        *self.load.entry(to).or_default() += 1;
    }

    /// Whether copies are being moved from worker to worker.
    pub(super) fn moves(&self) -> bool {
        !self.moves.is_empty()
    }

    /// Whether any partition has too few copies.
    pub(super) fn lacks(&self) -> bool {
        self.holdings.iter().any(|holding| holding.lacking > 0 || holding.sound.len() < self.wanted())
    }

    /// Names learners where copies are lacking, lone partitions first, and drops those that are dead.
    pub(super) fn heal(&mut self, plan: &mut Plan) {
        let mut order: Vec<_> = (0..self.holdings.len()).collect();
        order.sort_by_key(|&index| (self.holdings[index].sound.len(), index));
        let hands_over = self.hands_over();
        for index in order {
            let holding = &self.holdings[index];
            let mut learners = holding.learners.clone();
            for _ in 0..holding.lacking {
                let Some(to) = self.target(&self.holdings[index], &learners) else { break };
                let from = self.holdings[index].entry.primary;
                if !self.may_copy(&self.holdings[index], hands_over) || !self.has_room(from, to) {
                    break;
                }
                self.begin(from, to);
                learners.push(to);
            }
            let holding = &self.holdings[index];
            if learners != holding.entry.learners {
                self.changed.insert(holding.partition);
                plan.changes.push((holding.partition, Change::Learn(learners)));
            }
        }
    }

    /// Whether it is time to copy a partition elsewhere; `hands_over`: partitions that somebody shall give up leading come first.
    fn may_copy(&self, holding: &Holding<'_>, hands_over: bool) -> bool {
        let observed = self.scene.observed;
        if observed.braked {
            return false;
        }
        if holding.sound.len() >= self.wanted() {
            // Nothing is lost: somebody shall be emptied. What it leads pauses for each change of its copies, so that goes first.
            return !hands_over;
        }
        let alone = holding.sound.len() == 1;
        let grace_ms = if alone { observed.restart_grace_ms } else { LOST_MS };
        let comes_back = observed.members.iter().any(|seen| {
            let proven = matches!(seen.standing, crate::detector::Standing::Dead { .. }) && seen.supervised;
            let waited_for = seen.standing.since_ms().is_some_and(|at_ms| observed.now_ms < at_ms + grace_ms);
            let leaves = seen.leaving_since_ms.is_some_and(|at_ms| observed.now_ms < at_ms + LEAVES_MS);
            let gone = waited_for && (proven || !alone);
            (gone || (leaves && seen.standing.is_alive())) && !holding.sound.contains(&seen.member.ordinal)
        });
        // Who starts now has not heard everybody yet.
        !comes_back && observed.age_ms >= observed.restart_grace_ms
    }

    /// Whether a worker that shall be emptied leads something that another one can lead.
    fn hands_over(&self) -> bool {
        let moves = |holding: &Holding<'_>| {
            let to = |ordinal: Ordinal| self.scene.seen(ordinal).is_some_and(|seen| seen.standing.is_alive());
            self.scene.is_draining(holding.entry.primary) && holding.staying(self.scene).any(to)
        };
        self.holdings.iter().any(moves)
    }

    /// Where the next copy of a partition goes: by preference of the partition among the workers that have room, in another
    /// failure domain where there is one.
    fn target(&self, holding: &Holding<'_>, learners: &[Ordinal]) -> Option<Ordinal> {
        let holders = self.scene.holders().count().max(1);
        let bound = (self.scene.map.partitions.len() * self.wanted()).div_ceil(holders);
        let taken = |ordinal: &Ordinal| {
            holding.sound.contains(ordinal) || learners.contains(ordinal) || self.scene.is_leaving(*ordinal)
        };
        self.scene.holders().map(|seen| seen.member.ordinal).filter(|ordinal| !taken(ordinal)).min_by_key(|&ordinal| {
            let others = holding.sound.iter().chain(learners).copied();
            let rank = Reverse(weight(holding.partition.0, ordinal));
            let full = self.load(ordinal) >= bound;
            (self.scene.shares_domain(ordinal, others), full, rank)
        })
    }

    /// Removes a copy where there are too many, and one from a worker that shall be emptied. A primary hands over first.
    pub(super) fn release(&mut self, primaries: &BTreeMap<Ordinal, usize>, plan: &mut Plan) {
        let mut leading: BTreeMap<Ordinal, usize> = BTreeMap::new();
        for index in 0..self.holdings.len() {
            let holding = &self.holdings[index];
            if self.changed.contains(&holding.partition) {
                continue;
            }
            let staying: Vec<_> = holding.staying(self.scene).collect();
            let leads_draining = self.scene.is_draining(holding.entry.primary) && !staying.is_empty();
            let surplus = holding.sound.len() > self.wanted() && staying.len() >= self.wanted();
            if !surplus && !leads_draining {
                continue;
            }
            let leaver = if leads_draining { Some(holding.entry.primary) } else { self.leaver(holding) };
            let Some(leaver) = leaver else { continue };
            let alive =
                |ordinal: Ordinal| self.scene.seen(ordinal).is_some_and(|seen| seen.standing.is_alive() && seen.fresh);
            let able = |ordinal: Ordinal| alive(ordinal) && self.scene.serves_at_once(ordinal);
            let stays = |ordinal: Ordinal| alive(ordinal) && !self.scene.is_leaving(ordinal);
            let kept = staying.iter().filter(|ordinal| **ordinal != leaver && stays(**ordinal)).count();
            if leaver != holding.entry.primary && kept < self.wanted() {
                continue;
            }
            let (partition, entry) = (holding.partition, holding.entry);
            if leaver == entry.primary {
                let to = staying.iter().copied().filter(|ordinal| *ordinal != leaver && able(*ordinal)).min_by_key(
                    |ordinal| {
                        let damped = self.scene.seen(*ordinal).is_none_or(|seen| seen.damped);
                        (damped, primaries.get(ordinal).copied().unwrap_or(0), *ordinal)
                    },
                );
                let under_way = leading.entry(leaver).or_default();
                if let Some(to) = to
                    && *under_way < HAND_OVERS_AT_ONCE
                {
                    *under_way += 1;
                    plan.hand_overs.push(HandOver { partition, to });
                }
            } else {
                self.changed.insert(partition);
                plan.changes.push((partition, remove(entry, leaver)));
            }
            self.unload(leaver);
        }
    }

    /// Which copy is one too many: one that shall go, one that leaves, one that shares a failure domain, one on the fullest worker.
    fn leaver(&self, holding: &Holding<'_>) -> Option<Ordinal> {
        holding.sound.iter().copied().max_by_key(|&ordinal| {
            let shares = self.scene.shares_domain(ordinal, holding.sound.iter().copied());
            let leads = ordinal == holding.entry.primary;
            let leaves = self.scene.is_leaving(ordinal);
            (self.scene.is_draining(ordinal), leaves, shares, self.load(ordinal), !leads, Reverse(ordinal))
        })
    }

    /// Moves copies from the fullest workers to the emptiest, few per pair at a time.
    pub(super) fn spread(&mut self, plan: &mut Plan) {
        let mut holders: Vec<_> = self.scene.holders().map(|seen| seen.member.ordinal).collect();
        // It comes back with what it leaves.
        if holders.iter().any(|&ordinal| self.scene.is_leaving(ordinal)) {
            return;
        }
        holders.sort_by_key(|&ordinal| (self.load(ordinal), ordinal));
        let limit = (self.scene.observed.copies_at_once / 2).max(1);
        // Less than this is not worth a copy, and a first placement is no more even.
        let share = self.scene.map.partitions.len() * self.wanted() / holders.len().max(1);
        let slack = self.wanted() + share / 32;
        let pairs = || holders.iter().flat_map(|to| holders.iter().rev().map(move |from| (*from, *to)));
        // Round after round, so that no pair gets ahead of the others.
        for _ in 0..limit {
            for (from, to) in pairs() {
                let under_way = self.moves.get(&(from, to)).copied().unwrap_or(0);
                if self.load(from) <= self.load(to) + slack || under_way >= limit {
                    continue;
                }
                let movable = |holding: &&Holding<'_>| {
                    let rest = holding.sound.iter().copied().filter(|other| *other != from);
                    holding.sound.contains(&from)
                        && !holding.sound.contains(&to)
                        && holding.sound.len() == self.wanted()
                        && holding.entry.learners.is_empty()
                        && !self.changed.contains(&holding.partition)
                        && self.has_room(holding.entry.primary, to)
                        && (!self.scene.shares_domain(to, rest.clone()) || self.scene.shares_domain(from, rest))
                };
                let preferred = |holding: &&Holding<'_>| weight(holding.partition.0, to);
                let Some(holding) = self.holdings.iter().filter(movable).max_by_key(preferred) else { continue };
                let (partition, primary) = (holding.partition, holding.entry.primary);
                plan.changes.push((partition, Change::Learn(vec![to])));
                self.changed.insert(partition);
                *self.moves.entry((from, to)).or_default() += 1;
                self.begin(primary, to);
                self.unload(from);
            }
        }
    }

    /// Says which copies are lacking, and who is being emptied.
    pub(super) fn report(&self, plan: &mut Plan) {
        let wanted = self.wanted();
        let short: Vec<_> = self.holdings.iter().filter(|holding| holding.sound.len() < wanted).collect();
        let holders = self.scene.holders().count();
        if !short.is_empty() {
            let alone = short.iter().filter(|holding| holding.sound.len() == 1).count();
            let to: BTreeSet<_> = short.iter().flat_map(|holding| &holding.learners).copied().collect();
            let copying = match () {
                () if holders < wanted => format!("there are {} for them", count(holders, "worker")),
                () if to.is_empty() => "nothing is being copied yet".to_owned(),
                () => format!("copying to {}", workers(to)),
            };
            plan.conditions.push(format!(
                "{} of {} with fewer than {wanted} copies in sync, {alone} with one: {copying}",
                short.len(),
                count(self.scene.map.partitions.len(), "partition"),
            ));
        }
        let leaving = self.load.iter().filter(|(ordinal, _)| self.scene.is_draining(**ordinal));
        for (ordinal, _) in leaving {
            let holds = |entry: &&Entry| entry.isr.iter().any(|member| member.ordinal == *ordinal);
            let held = self.scene.map.partitions.iter().filter(holds).count();
            if held > 0 {
                let stuck = if holders < wanted { ", and too few workers to take them" } else { "" };
                let copies = if held == 1 { "copy" } else { "copies" };
                plan.conditions.push(format!("{} is being emptied: {held} {copies} left{stuck}", workers([*ordinal])));
            }
        }
    }
}

impl<'a> Holding<'a> {
    fn of(scene: &Scene<'_>, partition: PartitionId, entry: &'a Entry) -> Self {
        let found = |member: &&Member| !matches!(scene.fate(entry, member), Fate::Lost { .. });
        let sound: Vec<_> = entry.isr.iter().filter(found).map(|member| member.ordinal).collect();
        let holds = |ordinal: &Ordinal| {
            scene.holders().any(|seen| seen.member.ordinal == *ordinal) && !scene.is_leaving(*ordinal)
        };
        let wanted = |ordinal: &Ordinal| holds(ordinal) && !sound.contains(ordinal);
        let learners: Vec<_> = entry.learners.iter().copied().filter(wanted).collect();
        let mut holding = Self { partition, entry, sound, learners, lacking: 0 };
        let copies = holding.staying(scene).count() + holding.learners.len();
        holding.lacking = (scene.observed.copies as usize).saturating_sub(copies);
        holding
    }

    /// The copies that shall stay where they are.
    fn staying<'b>(&'b self, scene: &'b Scene<'_>) -> impl Iterator<Item = Ordinal> + 'b {
        self.sound.iter().copied().filter(|ordinal| !scene.is_draining(*ordinal))
    }
}

/// Takes a copy out of the in-sync set.
fn remove(entry: &Entry, leaver: Ordinal) -> Change {
    let primary = *entry.primary_member().expect("the map store lets in entries with a primary alone");
    let isr: Vec<_> = entry.isr.iter().map(|member| member.ordinal).filter(|ordinal| *ordinal != leaver).collect();
    // Who is left alone may have to make its log durable before it says so: it activates anew.
    if isr.len() == 1 { Change::Promote { primary, isr } } else { Change::Remove { primary, leaver } }
}
