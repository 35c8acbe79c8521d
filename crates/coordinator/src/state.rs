//! What a coordinator heard and what it was asked for, as values. Time comes in as milliseconds of the detector's clock.

use crate::last_resort::Told;
use crate::relief::Surroundings;
use crate::{Options, wire};
use engram_cluster::detector::{Action, Event, Standing, Timing};
use engram_cluster::{Change, Detector, Expected, HandOver, Observed, PartitionMap, Plan, Seen, decide};
use engram_mapstore::{Goal, Order};
use engram_memory::{Incarnation, Member, Ordinal, PartitionId, StoreId};
use engram_proto::v1;
use std::collections::{BTreeMap, BTreeSet};

/// A worker that the map names and that was never heard is given up after this: as long as a lost one is waited for.
const ABSENT_MS: u64 = 30_000;
/// Copies that a worker takes, and gives, at a time.
const COPIES_AT_ONCE: u64 = 2;
/// Small partitions are copied more at a time, as long as they hold no more memories together than this: their copies are
/// bounded by the writes of the map, not by the link.
const MEMORIES_AT_ONCE: u64 = 256 << 10;
/// But never more than this.
const COPIES_MOST: u64 = 32;
/// Reads one after the other that find less than was known before an older map is believed to be in the newest one's place: a
/// single read may be stale.
const LESS_FOUND: u32 = 2;

/// A worker that was heard since this coordinator started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Heard {
    /// Who it is.
    pub(crate) member: Member,
    /// Where clients, peers and the metrics page find it.
    pub(crate) addresses: Addresses,
    /// Whether it is thought to live.
    pub(crate) alive: bool,
    /// Whether it is dead by proof.
    pub(crate) dead: bool,
    /// Whether it serves all it should.
    pub(crate) ready: bool,
    /// Whether it is about to be stopped.
    pub(crate) leaving: bool,
    memories: u64,
    lossless_since: Incarnation,
    /// 0 = unknown.
    process_id: u32,
    suspects: BTreeSet<Ordinal>,
}

/// Where a worker listens, each as `host:port`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Addresses {
    pub(crate) client: String,
    pub(crate) peer: String,
    pub(crate) http: String,
}

/// What a worker says when it opens a stream.
#[derive(Debug, Clone)]
pub(crate) struct Introduction {
    pub(crate) member: Member,
    pub(crate) lossless_since: Incarnation,
    pub(crate) process_id: u32,
    pub(crate) addresses: Addresses,
    /// Version of the newest map that its disk has seen; 0 = none.
    pub(crate) seen_version: u64,
}

/// What a beat says.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pulse {
    pub(crate) memories: u64,
    pub(crate) ready: bool,
    pub(crate) leaving: bool,
    pub(crate) suspects: BTreeSet<Ordinal>,
    pub(crate) queued: bool,
    pub(crate) turns: u64,
}

/// What came of a hello.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Greeting {
    Welcome,
    /// A newer process of the same store was heard.
    Superseded,
}

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

#[derive(Debug)]
pub(crate) struct State {
    map: Option<PartitionMap>,
    goal: Goal,
    detector: Detector,
    members: BTreeMap<Ordinal, Heard>,
    proposals: Proposals,
    pub(crate) hand_overs: Vec<HandOver>,
    conditions: Vec<String>,
    failed_over_ms: Option<u64>,
    /// Why there is no map to go on with, though there was one.
    lost: Option<String>,
    /// Newest version that any worker's disk has seen.
    seen_version: u64,
    /// Reads of the map that found an older one than is known, one after the other.
    less_found: u32,
    orders: Vec<Order>,
    pub(crate) told: Told,
    pub(crate) surroundings: Surroundings,
}

impl State {
    pub(crate) fn new(map: Option<PartitionMap>, goal: Goal, now_ms: u64) -> Self {
        Self {
            map,
            goal,
            detector: Detector::new(Timing::default(), now_ms),
            members: BTreeMap::new(),
            proposals: Proposals::new(),
            hand_overs: Vec::new(),
            conditions: Vec::new(),
            failed_over_ms: None,
            lost: None,
            seen_version: 0,
            less_found: 0,
            orders: Vec::new(),
            told: Told::default(),
            surroundings: Surroundings::default(),
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

    /// Why there is no map to go on with, though there was one.
    pub(crate) fn lost(&self) -> Option<&str> {
        self.lost.as_deref()
    }

    /// What people ordered against the rules of the map.
    pub(crate) fn orders(&self) -> &[Order] {
        &self.orders
    }

    pub(crate) fn set_orders(&mut self, orders: Vec<Order>) {
        self.orders = orders;
    }

    /// Takes the map for lost: nothing is written until it is found again, or made anew.
    pub(crate) fn lose(&mut self, why: String) {
        if self.lost.as_ref() != Some(&why) {
            tracing::error!(why, "the partition map is lost");
            self.lost = Some(why);
        }
    }

    /// Whether a worker has seen a newer map than is known here.
    pub(crate) fn is_behind(&self) -> bool {
        self.lost.is_none() && self.map.as_ref().is_some_and(|map| map.version < self.seen_version)
    }

    /// Takes a map that a person ordered.
    pub(crate) fn overruled(&mut self, map: PartitionMap, orders: Vec<Order>, now_ms: u64) {
        self.lost = None;
        self.orders = orders;
        self.set_map(Some(map), now_ms);
    }

    /// Takes what was found where the map is kept. It is never taken for one that is not there yet, nor an older one for the newest.
    pub(crate) fn found(&mut self, map: Option<PartitionMap>, now_ms: u64) {
        let known = self.map.as_ref().map_or(0, |map| map.version).max(self.seen_version);
        let found = map.as_ref().map_or(0, |map| map.version);
        if found >= known {
            (self.lost, self.less_found) = (None, 0);
            if map != self.map {
                self.set_map(map, now_ms);
            }
            return;
        }
        self.less_found += 1;
        match map {
            None => self.lose(gone(known)),
            Some(_) if self.less_found >= LESS_FOUND => {
                self.lose(format!(
                    "the partition map has version {found}, and version {known} was seen: an older one is in its place"
                ));
            }
            Some(_) => {}
        }
    }

    pub(crate) fn members(&self) -> impl Iterator<Item = &Heard> {
        self.members.values()
    }

    pub(crate) fn conditions(&self) -> &[String] {
        &self.conditions
    }

    /// Takes a hello.
    pub(crate) fn greet(&mut self, hello: Introduction, now_ms: u64) -> Greeting {
        let Introduction { member, lossless_since, process_id, addresses, seen_version } = hello;
        self.seen_version = self.seen_version.max(seen_version);
        let known = self.members.get(&member.ordinal);
        if known
            .is_some_and(|known| known.member.store == member.store && known.member.incarnation > member.incarnation)
        {
            return Greeting::Superseded;
        }
        let again = known.filter(|known| known.member == member);
        let (memories, ready, leaving) =
            again.map_or((0, false, false), |known| (known.memories, known.ready, known.leaving));
        let suspects = BTreeSet::new();
        let (alive, dead) = (true, false);
        let heard =
            Heard { member, addresses, alive, dead, ready, leaving, memories, lossless_since, process_id, suspects };
        self.members.insert(member.ordinal, heard);
        let domain = self.domain(member.ordinal);
        self.step(Event::Met { member, domain }, now_ms);
        Greeting::Welcome
    }

    /// Takes a beat; whether anything that others see changed.
    pub(crate) fn beat(&mut self, member: &Member, pulse: Pulse, now_ms: u64) -> bool {
        let Some(heard) = self.process_mut(member) else { return false };
        let changed = (heard.ready, heard.leaving) != (pulse.ready, pulse.leaving);
        (heard.ready, heard.leaving) = (pulse.ready, pulse.leaving);
        (heard.memories, heard.suspects) = (pulse.memories, pulse.suspects);
        self.step(Event::Beat { member: *member, turns: pulse.turns, queued: pulse.queued }, now_ms) || changed
    }

    /// The stream of this very process ended; whether that changed anything.
    pub(crate) fn closed(&mut self, member: &Member, now_ms: u64) -> bool {
        self.step(Event::Closed(*member), now_ms)
    }

    /// Takes a supervisor's word that a process of `ordinal` is dead: the one of that incarnation on that disk that was heard with that
    /// process id, as far as any of it is known. Whether that changed anything.
    pub(crate) fn died(
        &mut self,
        ordinal: Ordinal,
        store: Option<StoreId>,
        incarnation: u64,
        process_id: u32,
        now_ms: u64,
    ) -> bool {
        // The next process may have said hello before the word of the last one's death arrived, and on an empty disk it has the
        // same incarnation.
        let another = self.members.get(&ordinal).is_some_and(|heard| {
            let ids = [heard.process_id, process_id];
            store.is_some_and(|store| store != heard.member.store) || (!ids.contains(&0) && ids[0] != ids[1])
        });
        let named = (incarnation != 0).then_some(Incarnation(incarnation));
        !another && self.step(Event::Died(ordinal, named), now_ms)
    }

    /// Takes the word of somebody who knows that this very process has ended. Of one that was never heard it says nothing: what ended may
    /// have ended long ago. Whether that changed anything.
    pub(crate) fn ended(&mut self, member: &Member, now_ms: u64) -> bool {
        self.process_mut(member).is_some() && self.step(Event::Died(member.ordinal, Some(member.incarnation)), now_ms)
    }

    /// The timer fired; whether anybody's standing changed.
    pub(crate) fn tick(&mut self, options: &Options, now_ms: u64) -> bool {
        let changed = self.step(Event::Tick, now_ms);
        let workers = self.members.len();
        self.forget_the_emptied(options);
        changed || self.members.len() != workers
    }

    /// Forgets workers that were emptied and then stopped: nobody waits for them.
    fn forget_the_emptied(&mut self, options: &Options) {
        if self.members.values().all(|heard| heard.alive) {
            return;
        }
        let entries = self.map.iter().flat_map(|map| &map.partitions);
        let holders: BTreeSet<_> = entries.flat_map(|entry| entry.candidates()).map(|member| member.ordinal).collect();
        let draining = self.draining(options);
        let detector = &mut self.detector;
        self.members.retain(|ordinal, heard| {
            let wanted = !draining.contains(ordinal);
            let stays = heard.alive || holders.contains(ordinal) || wanted;
            if !stays {
                tracing::info!(member = %heard.member, "an empty worker is gone");
                detector.forget(*ordinal);
            }
            stays
        });
    }

    fn step(&mut self, event: Event, now_ms: u64) -> bool {
        let actions = self.detector.step(event, now_ms);
        for action in &actions {
            match action {
                Action::Suspect(member, cause) => tracing::warn!(%member, ?cause, "worker suspected"),
                Action::Trust(member) => tracing::info!(%member, "worker trusted again"),
                Action::Dead(member) => tracing::warn!(%member, "worker is dead, by proof"),
            }
        }
        let mut changed = !actions.is_empty();
        for (ordinal, heard) in &mut self.members {
            let standing = self.detector.standing(*ordinal);
            let alive = standing.is_some_and(Standing::is_alive);
            heard.dead = matches!(standing, Some(Standing::Dead { .. }));
            changed |= std::mem::replace(&mut heard.alive, alive) != alive;
        }
        changed
    }

    /// Takes proposals of a worker.
    pub(crate) fn propose(&mut self, proposer: Ordinal, proposals: Vec<Proposal>) {
        self.proposals.extend(proposals.into_iter().map(|proposal| ((proposal.partition, proposer), proposal)));
    }

    /// Takes proposals back whose write failed; newer ones stay.
    pub(crate) fn propose_again(&mut self, proposals: Proposals) {
        for (place, proposal) in proposals {
            self.proposals.entry(place).or_insert(proposal);
        }
    }

    /// Takes the map that the store has now.
    pub(crate) fn set_map(&mut self, map: Option<PartitionMap>, now_ms: u64) {
        if let (Some(old), Some(new)) = (&self.map, &map) {
            // A hand-over keeps both in sync.
            let failed: BTreeSet<_> = (old.partitions.iter().zip(&new.partitions))
                .filter(|(old, new)| old.primary != new.primary && new.in_sync(old.primary).is_none())
                .map(|(old, _)| old.primary)
                .collect();
            for ordinal in failed {
                self.step(Event::FailedOver(ordinal), now_ms);
                self.failed_over_ms = Some(now_ms);
            }
        }
        self.map = map;
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
            let plan = decide(None, &observed);
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
                    // A primary that asks to be followed by another goes on until then.
                    is_urgent |= deposes || matches!(proposal.change, Change::Activate | Change::Remove { .. });
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
        let plan = decide(Some(&next), &observed);
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
        self.relieve(&next);
        (!changed.is_empty()).then_some(Wanted { expected, map: next, proposals: taken, is_urgent })
    }

    fn take_plan(&mut self, mut plan: Plan) -> Plan {
        self.conditions = std::mem::take(&mut plan.conditions);
        self.hand_overs = std::mem::take(&mut plan.hand_overs);
        plan
    }

    pub(crate) fn observed(&self, options: &Options, now_ms: u64) -> Observed {
        let age_ms = self.detector.age_ms(now_ms);
        let opinion_ms = self.detector.timing().opinion_ms;
        let named = self.map.iter().flat_map(|map| &map.partitions);
        let named = named.flat_map(|entry| entry.candidates()).map(|member| member.ordinal);
        let given_up = |ordinal: &Ordinal| {
            !self.members.contains_key(ordinal)
                && (age_ms >= ABSENT_MS || (age_ms >= opinion_ms && self.detector.died_unheard(*ordinal)))
        };
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
                damped: heard.leaving
                    || self.surroundings.relieved.contains(&ordinal)
                    || self.detector.is_damped(ordinal, now_ms),
                suspects: heard.suspects.clone(),
            }
        };
        Observed {
            cluster: options.cluster,
            partitions: options.partitions,
            workers: self.goal.workers(options.workers),
            copies: options.replication_factor,
            keeps_all: options.keeps_all,
            now_ms,
            age_ms,
            timing: *self.detector.timing(),
            restart_grace_ms: options.restart_grace.as_millis() as u64,
            copies_at_once: self.copies_at_once(),
            members: self.members.values().map(seen).collect(),
            absent: named.filter(given_up).collect(),
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

    /// What workers are told.
    pub(crate) fn view(&self) -> v1::BeatReply {
        let order = |order: &HandOver| v1::HandOver { partition: order.partition.0, to: order.to.0 };
        v1::BeatReply {
            map: self.map.as_ref().map(wire::map_to_proto),
            members: self.members.values().map(wire::member_to_proto).collect(),
            hand_overs: self.hand_overs.iter().map(order).collect(),
            testify: self.told.asked(),
        }
    }

    fn process_mut(&mut self, member: &Member) -> Option<&mut Heard> {
        self.members.get_mut(&member.ordinal).filter(|heard| heard.member == *member)
    }
}

fn gone(version: u64) -> String {
    format!("the partition map is gone, and workers have seen version {version} of it")
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_cluster::Entry;
    use engram_memory::{ClusterId, StoreId, Term};

    const LATER: u64 = 10_000;

    fn member(ordinal: u32, incarnation: u64) -> Member {
        let store = StoreId(u128::from(ordinal) + 5);
        Member { ordinal: Ordinal(ordinal), store, incarnation: Incarnation(incarnation) }
    }

    fn hello(ordinal: u32, incarnation: u64, process_id: u32) -> Introduction {
        Introduction {
            member: member(ordinal, incarnation),
            lossless_since: Incarnation(1),
            process_id,
            addresses: Addresses::default(),
            seen_version: 0,
        }
    }

    fn options(workers: u32) -> Options {
        Options { replication_factor: 2, ..Options::new(ClusterId(7), "test", 8, workers) }
    }

    /// A cluster of two workers that has its map.
    fn formed() -> State {
        let mut state = State::new(None, Goal::default(), 0);
        for ordinal in 0..2 {
            assert_eq!(state.greet(hello(ordinal, 1, 100 + ordinal), 0), Greeting::Welcome);
        }
        let first = state.wanted(&options(2), 0).expect("both are here").map;
        state.set_map(Some(first), 0);
        assert!(state.wanted(&options(2), 0).is_none());
        state
    }

    fn beats(state: &mut State, now_ms: u64) {
        for ordinal in 0..2 {
            state.beat(&member(ordinal, 1), Pulse::default(), now_ms);
        }
        state.tick(&options(2), now_ms);
    }

    fn entry(state: &State, partition: usize) -> &Entry {
        &state.map().unwrap().partitions[partition]
    }

    #[test]
    fn an_older_process_neither_replaces_nor_ends_the_newer_one() {
        let mut state = State::new(None, Goal::default(), 0);
        assert_eq!(state.greet(hello(1, 4, 40), 0), Greeting::Welcome);
        assert_eq!(state.greet(hello(1, 3, 30), 0), Greeting::Superseded);
        assert!(!state.beat(&member(1, 3), Pulse { ready: true, ..Pulse::default() }, LATER));
        assert!(!state.closed(&member(1, 3), LATER), "the end of an older stream says nothing of the living process");
        assert!(!state.died(Ordinal(1), None, 3, 0, LATER), "nor does a proof that names it");
        assert!(!state.died(Ordinal(1), None, 0, 30, LATER), "nor the word of another process's end");
        let (here, elsewhere) = (member(1, 4).store, StoreId(4_711));
        assert!(
            !state.died(Ordinal(1), Some(elsewhere), 4, 0, LATER),
            "nor of one that had that number on another disk"
        );
        assert!(
            !state.ended(&Member { store: elsewhere, ..member(1, 4) }, LATER) && !state.ended(&member(1, 3), LATER)
        );
        assert!(!state.ended(&member(0, 1), LATER), "nor of one that was never heard");
        assert!(!state.died(Ordinal(1), Some(here), 3, 0, LATER));
        let mut proven = State::new(None, Goal::default(), 0);
        assert_eq!(proven.greet(hello(1, 4, 40), 0), Greeting::Welcome);
        assert!(proven.ended(&member(1, 4), LATER) && !proven.ended(&member(1, 4), LATER), "said once");
        assert!(state.died(Ordinal(1), None, 0, 40, LATER));
    }

    #[test]
    fn a_proposal_is_checked_against_the_entry_that_is_there_when_it_is_written() {
        let mut state = formed();
        beats(&mut state, LATER);
        let led = |state: &State, ordinal| {
            (0..8).find(|&partition| entry(state, partition).primary == Ordinal(ordinal)).unwrap()
        };
        let (mine, other) = (led(&state, 0), led(&state, 1));
        let remove = |state: &State, partition: usize, term| Proposal {
            partition: PartitionId(partition as u32),
            expected: Expected { term: Term(term), ..entry(state, partition).expected() },
            change: Change::Remove { primary: member(0, 1), leaver: Ordinal(1) },
        };
        state.propose(Ordinal(0), vec![remove(&state, mine, 7)]);
        assert!(state.wanted(&options(2), LATER).is_none(), "an entry that is not there any more, or not yet");
        state.propose(Ordinal(0), vec![remove(&state, other, 1)]);
        assert!(state.wanted(&options(2), LATER).is_none(), "a primary changes its own partitions alone");
        let promote = Proposal {
            change: Change::Promote { primary: member(1, 1), isr: vec![Ordinal(1)] },
            ..remove(&state, mine, 1)
        };
        state.propose(Ordinal(1), vec![promote.clone()]);
        assert!(state.wanted(&options(2), LATER).is_none(), "nobody is deposed that is heard here");

        // Two for one partition: the first one changes what the second expects.
        state.propose(Ordinal(0), vec![remove(&state, mine, 1)]);
        state.propose(Ordinal(1), vec![promote]);
        let wanted = state.wanted(&options(2), LATER).unwrap();
        assert_eq!((wanted.expected, wanted.proposals.len()), (Some(1), 1));
        assert_eq!(wanted.map.partitions[mine].isr, [member(0, 1)]);
        // The write fails: what was in it is looked at again, against what is there then.
        state.propose_again(wanted.proposals);
        let mut moved = state.map().unwrap().clone();
        moved.partitions[mine].term = Term(2);
        state.set_map(Some(moved), LATER);
        assert!(state.wanted(&options(2), LATER).is_none());
    }

    #[test]
    fn a_death_moves_all_partitions_in_one_write_and_is_remembered() {
        let mut state = formed();
        beats(&mut state, LATER);
        assert!(state.died(Ordinal(1), None, 1, 0, LATER));
        let wanted = state.wanted(&options(2), LATER).unwrap();
        assert!(wanted.map.partitions.iter().all(|entry| entry.primary == Ordinal(0)));
        state.set_map(Some(wanted.map), LATER);
        assert_eq!(state.failed_over_ms, Some(LATER));
        let map = state.map().cloned();
        state.set_map(map, 2 * LATER);
        assert_eq!(state.failed_over_ms, Some(LATER), "the same map again is no failover");
    }

    #[test]
    fn who_was_not_heard_is_given_up_late_or_on_its_supervisors_word() {
        let map = formed().map().cloned();
        let mut state = State::new(map, Goal::default(), 0);
        state.greet(hello(0, 1, 100), 0);
        let promoted = |state: &mut State, now_ms| {
            state.beat(&member(0, 1), Pulse::default(), now_ms);
            state.tick(&options(2), now_ms);
            state.wanted(&options(2), now_ms).is_some()
        };
        assert!(!promoted(&mut state, LATER), "a coordinator that just started has no opinion");
        assert!(state.conditions().iter().any(|why| why.contains("worker 1 has not been heard")));
        assert!(promoted(&mut state, ABSENT_MS));
        state.died(Ordinal(1), None, 0, 9, LATER);
        assert!(promoted(&mut state, LATER), "it cannot be started");
    }

    #[test]
    fn an_emptied_worker_that_stops_is_forgotten_and_one_that_holds_copies_is_not() {
        let mut state = formed();
        state.greet(hello(2, 1, 102), 0);
        beats(&mut state, LATER);
        assert!(state.closed(&member(2, 1), LATER) && state.closed(&member(1, 1), LATER));
        assert!(state.tick(&options(1), LATER));
        assert_eq!(state.members().map(|heard| heard.member.ordinal.0).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(state.greet(hello(2, 2, 102), LATER), Greeting::Welcome, "and may come back");
    }

    #[test]
    fn a_map_that_is_gone_is_not_formed_again_and_an_older_one_is_not_gone_on_with() {
        let mut state = State::new(None, Goal::default(), 0);
        state.greet(hello(0, 2, 100), 0);
        state.greet(Introduction { seen_version: 7, ..hello(1, 2, 101) }, 0);
        assert!(state.wanted(&options(2), 0).is_none(), "all are here, and one has seen a map");
        assert!(state.conditions()[0].contains("rebuild-map"), "{:?}", state.conditions());

        let mut state = formed();
        beats(&mut state, LATER);
        state.died(Ordinal(1), None, 1, 0, LATER);
        let map = PartitionMap { version: 5, ..state.map().unwrap().clone() };
        let older = PartitionMap { version: 4, ..map.clone() };
        state.found(Some(map.clone()), LATER);
        state.found(Some(older.clone()), LATER);
        assert!(state.wanted(&options(2), LATER).is_some(), "one read may be stale");
        state.found(Some(older), LATER);
        assert!(state.wanted(&options(2), LATER).is_none());
        state.found(Some(map.clone()), LATER);
        assert!(state.wanted(&options(2), LATER).is_some(), "it is back");
        state.found(None, LATER);
        assert!(state.wanted(&options(2), LATER).is_none() && state.lost().is_some());
        assert_eq!(state.map(), Some(&map), "who serves goes on under what is known");
        state.overruled(PartitionMap { version: 50, ..map }, Vec::new(), LATER);
        assert!(state.wanted(&options(2), LATER).is_some());
    }

    #[test]
    fn more_workers_than_the_manifest_says_may_come_while_they_hold_copies() {
        let state = formed();
        assert_eq!(state.places(&options(1)), 2);
        assert_eq!(state.draining(&options(1)), [Ordinal(1)].into());
        assert_eq!(state.places(&options(4)), 4);
    }
}
