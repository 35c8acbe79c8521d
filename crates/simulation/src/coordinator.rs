//! The coordinator: hears beats, judges with the real detector, decides with the real [`decide`], and now and then proposes
//! against all reason.
//!
//! Safety rests on the replicas and on the map, so while there are faults a seed may let it be wrong as it likes. In the calm it is
//! what brings a cluster back, and it does so by its own rules alone. It dies and starts anew, knowing nothing but the map.

use crate::faults::Fault;
use crate::node::CLUSTER;
use crate::senses::{Beat, View, clock_ms, hear};
use crate::weather::Weather;
use crate::world::{Event, World};
use engram_cluster::detector::{self, Action, Detector, Standing};
use engram_cluster::{Change, Entry, HandOver, Observed, Seen, absent, decide};
use engram_memory::{Incarnation, Member, Ordinal, PartitionId};
use engram_store::Durability;
use engram_store::peer::Proposal;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const EVERY_US: u64 = 100_000;
const _: () = assert!(engram_store::leases::GRANT_MS < engram_cluster::LEASES_END_MS);
/// Against all reason, a node is taken for dead when it was not heard for so long.
const SILENCE_US: u64 = 600_000;

/// A process that was heard.
#[derive(Debug, Clone)]
struct Heard {
    member: Member,
    number: u64,
    lossless_since: Incarnation,
    suspects: BTreeSet<Ordinal>,
    leaving_since_ms: Option<u64>,
    since_ms: u64,
    heard_us: u64,
}

/// What is known of the nodes.
pub(crate) struct Coordinator {
    detector: Detector,
    members: BTreeMap<Ordinal, Heard>,
    hand_overs: Vec<HandOver>,
    failed_over_ms: Option<u64>,
    /// Whom somebody wants emptied. It is part of what a cluster shall be, and outlives who carries it out.
    pub(crate) draining: BTreeSet<Ordinal>,
    /// Nothing is heard or done until then, and nothing is known after.
    pub(crate) down_until_us: Option<u64>,
    /// Nothing is heard or done until then.
    pub(crate) paused_until_us: u64,
    /// Until when nothing more is proposed for a partition.
    rests_until_us: Vec<u64>,
}

impl Coordinator {
    pub(crate) fn new(weather: &Weather) -> Self {
        Self {
            detector: Detector::new(weather.timing, 0),
            members: BTreeMap::new(),
            hand_overs: Vec::new(),
            failed_over_ms: None,
            draining: BTreeSet::new(),
            down_until_us: None,
            paused_until_us: 0,
            rests_until_us: vec![0; weather.partitions as usize],
        }
    }

    /// Another one takes its place, who was told nothing.
    fn start_anew(&mut self, weather: &Weather, now_us: u64) {
        let draining = std::mem::take(&mut self.draining);
        *self = Self { draining, detector: Detector::new(weather.timing, clock_ms(now_us)), ..Self::new(weather) };
    }

    /// The process at a place, if it was heard just now, and since when it lost nothing.
    fn living(&self, ordinal: Ordinal, now_us: u64) -> Option<(Member, Incarnation)> {
        let heard = self.members.get(&ordinal)?;
        (now_us - heard.heard_us <= SILENCE_US).then_some((heard.member, heard.lossless_since))
    }

    /// The partitions of a process were given to others.
    pub(crate) fn failed_over(&mut self, ordinal: Ordinal, now_ms: u64) {
        self.detector.step(detector::Event::FailedOver(ordinal), now_ms);
        self.failed_over_ms = Some(now_ms);
    }

    fn view(&self) -> View {
        let standing = |member: &Heard| self.detector.standing(member.member.ordinal);
        let members = self.members.values().map(|heard| {
            let standing = standing(heard);
            let alive = standing.is_some_and(Standing::is_alive);
            (heard.member, alive, matches!(standing, Some(Standing::Dead { .. })))
        });
        let lives = |heard: &&Heard| standing(heard).is_some_and(Standing::is_alive);
        let leaving = self.members.values().filter(|heard| heard.leaving_since_ms.is_some()).filter(lives);
        View {
            leaving: Arc::new(leaving.map(|heard| heard.member.ordinal).collect()),
            members: Arc::new(members.collect()),
            hand_overs: Arc::new(self.hand_overs.clone()),
        }
    }

    fn observed(&self, weather: &Weather, entries: &[Entry], now_ms: u64) -> Observed {
        let seen = |heard: &Heard| Seen {
            member: heard.member,
            lossless_since: heard.lossless_since,
            domain: format!("node-{}", heard.member.ordinal),
            standing: self.detector.standing(heard.member.ordinal).expect("whoever is a member was met"),
            fresh: self.detector.is_fresh(heard.member.ordinal, now_ms),
            supervised: weather.proof > 0,
            damped: heard.leaving_since_ms.is_some() || self.detector.is_damped(heard.member.ordinal, now_ms),
            leaving_since_ms: heard.leaving_since_ms,
            heard_since_ms: heard.since_ms,
            suspects: heard.suspects.clone(),
        };
        let members: Vec<_> = self.members.values().map(seen).collect();
        Observed {
            cluster: CLUSTER,
            partitions: weather.partitions,
            workers: weather.nodes as u32,
            copies: weather.copies,
            keeps_all: weather.durability == Durability::Sync,
            now_ms,
            age_ms: self.detector.age_ms(now_ms),
            timing: *self.detector.timing(),
            restart_grace_ms: weather.restart_grace_ms,
            copies_at_once: weather.copies_at_once,
            absent: absent(entries, &members, &self.detector, now_ms),
            members,
            draining: self.draining.clone(),
            braked: self.detector.is_braked(),
            failed_over_ms: self.failed_over_ms,
        }
    }
}

impl World {
    pub(crate) fn coordinator_hears(&mut self, beat: &Beat, lives: bool) {
        let (now_us, now_ms) = (self.now_us, clock_ms(self.now_us));
        let coordinator = &mut self.coordinator;
        if coordinator.down_until_us.is_some() {
            return;
        }
        let ordinal = beat.member.ordinal;
        let known = coordinator.members.get(&ordinal).map(|heard| heard.member);
        let before = coordinator.members.get(&ordinal).filter(|heard| heard.member == beat.member);
        let leaving_since_ms =
            before.and_then(|heard| heard.leaving_since_ms).or(Some(now_ms)).filter(|_| beat.leaving);
        let since_ms = before.map_or(now_ms, |heard| heard.since_ms);
        let Some(actions) = hear(&mut coordinator.detector, known, beat, lives, now_ms) else { return };
        let heard = Heard {
            member: beat.member,
            number: beat.number,
            lossless_since: beat.lossless_since,
            suspects: beat.suspects.clone(),
            leaving_since_ms,
            since_ms,
            heard_us: now_us,
        };
        coordinator.members.insert(ordinal, heard);
        self.note_judged(&actions);
    }

    pub(crate) fn coordinator_senses(&mut self, event: detector::Event) {
        if self.coordinator.down_until_us.is_none() {
            let actions = self.coordinator.detector.step(event, clock_ms(self.now_us));
            self.note_judged(&actions);
        }
    }

    /// A supervisor reports the end of its process.
    pub(crate) fn reported_dead(&mut self, member: Member, number: u64) {
        // The next process may have said hello before, and on an empty disk it has the same incarnation.
        let known = self.coordinator.members.get(&member.ordinal).map(|heard| heard.number);
        if known.is_none_or(|known| known == number) {
            self.coordinator_senses(detector::Event::Died(member.ordinal, Some(member.incarnation)));
        }
    }

    fn note_judged(&mut self, actions: &[Action]) {
        self.check_proofs(actions);
        for action in actions {
            let (kind, member) = match action {
                Action::Suspect(member, _) => (1, member),
                Action::Trust(member) => (2, member),
                Action::Dead(member) => (3, member),
            };
            let numbers = [21, kind, u64::from(member.ordinal.0)];
            self.trace.note(self.now_us, &numbers, || format!("coordinator: {action:?}"));
        }
    }

    pub(crate) fn coordinate(&mut self) {
        let wait_us = EVERY_US + self.draw.below(20_000);
        self.at(wait_us, Event::Coordinate);
        match self.coordinator.down_until_us {
            Some(until_us) if until_us > self.now_us => return,
            Some(_) => self.coordinator.start_anew(&self.weather, self.now_us),
            None => {}
        }
        self.coordinator_senses(detector::Event::Tick);
        self.carry_out();
        if !self.is_calm {
            self.err();
        }
        let view = self.coordinator.view();
        for node in 0..self.nodes.len() {
            if !self.network.is_cut(self.map_place(), node) {
                let wait_us = self.delay_us();
                self.at(wait_us, Event::Told { node, view: view.clone() });
            }
        }
    }

    /// Proposes what is decided.
    fn carry_out(&mut self) {
        let now_ms = clock_ms(self.now_us);
        let map = self.authority.snapshot();
        let observed = self.coordinator.observed(&self.weather, &map.partitions, now_ms);
        let plan = decide(Some(&map), &observed);
        self.coordinator.hand_overs = plan.hand_overs;
        for (partition, change) in plan.changes {
            let entry = self.authority.entry(partition).clone();
            let promotes = matches!(change, Change::Promote { .. });
            // Against all reason: another candidate, or another part of them.
            let errs = promotes && !self.is_calm && self.draw.chance(self.weather.erratic);
            let erring = errs.then(|| self.promotion(&entry)).flatten();
            self.ask_for(partition, &entry, erring.unwrap_or(change));
        }
    }

    fn ask_for(&mut self, partition: PartitionId, entry: &Entry, change: Change) {
        let rests_until_us = &mut self.coordinator.rests_until_us[partition.0 as usize];
        if *rests_until_us > self.now_us {
            return;
        }
        *rests_until_us = self.now_us + self.draw.within(100_000, 300_000);
        let proposal = Proposal { partition, expected: entry.expected(), change };
        self.submit(self.map_place(), vec![proposal]);
    }

    /// Proposes what nobody needs.
    fn err(&mut self) {
        for partition in (0..self.weather.partitions).map(PartitionId) {
            let entry = self.authority.entry(partition).clone();
            let led = self.coordinator.living(entry.primary, self.now_us).map(|(seen, _)| seen);
            let is_led = led.is_some_and(|seen| entry.served_by(&seen));
            let chance = if is_led {
                self.weather.false_promotion + self.weather.blind_promotion / 8
            } else {
                self.weather.erratic / 2
            };
            if self.draw.chance(chance) {
                if let Some(promotion) = self.promotion(&entry) {
                    if is_led {
                        self.count(Fault::FalsePromotion);
                    }
                    self.ask_for(partition, &entry, promotion);
                }
            } else if self.draw.chance(self.weather.extra_learner) {
                self.name_too_many(partition, &entry);
            }
        }
    }

    /// A candidate, with some of the others.
    fn promotion(&mut self, entry: &Entry) -> Option<Change> {
        let keeps_all = self.weather.durability == Durability::Sync;
        let blind = self.draw.chance(self.weather.blind_promotion);
        let mut known: Vec<Member> = Vec::new();
        for member in entry.candidates() {
            if !known.iter().any(|other| other.ordinal == member.ordinal) {
                known.push(*member);
            }
        }
        let same_disk = |member: &Member| {
            let (seen, lossless_since) = self.coordinator.living(member.ordinal, self.now_us)?;
            (seen.store == member.store).then_some((seen, lossless_since))
        };
        let holds = |(seen, lossless_since): &(Member, Incarnation)| entry.holds_all(seen, *lossless_since, keeps_all);
        let living: Vec<(Member, Incarnation)> = known.iter().filter_map(same_disk).collect();
        let eligible: Vec<Member> =
            living.iter().filter(|seen| blind || holds(seen)).map(|(member, _)| *member).collect();
        if eligible.is_empty() {
            return None;
        }
        let lossy: Vec<Member> = living.iter().filter(|seen| !holds(seen)).map(|(member, _)| *member).collect();
        let primary = self.draw.pick(if blind && !lossy.is_empty() { &lossy } else { &eligible });
        if lossy.contains(&primary) {
            self.count(Fault::BlindPromotion);
        }
        let others: Vec<Ordinal> = if self.draw.chance(600) {
            living.iter().map(|(member, _)| member.ordinal).collect()
        } else {
            known.iter().map(|member| member.ordinal).collect()
        };
        let takes_all = self.draw.chance(600);
        let mut isr = vec![primary.ordinal];
        for other in others {
            if other != primary.ordinal && (takes_all || self.draw.chance(500)) {
                isr.push(other);
            }
        }
        Some(Change::Promote { primary, isr })
    }

    /// One learner more than anybody needs.
    fn name_too_many(&mut self, partition: PartitionId, entry: &Entry) {
        let all = (0..self.nodes.len() as u32).map(Ordinal);
        let free = |ordinal: &Ordinal| entry.in_sync(*ordinal).is_none() && !entry.learners.contains(ordinal);
        let free: Vec<Ordinal> = all.filter(free).collect();
        if !free.is_empty() {
            self.count(Fault::ExtraLearner);
            let mut learners = entry.learners.clone();
            learners.push(self.draw.pick(&free));
            self.ask_for(partition, entry, Change::Learn(learners));
        }
    }
}
