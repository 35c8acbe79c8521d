//! Who is thought to live: beats on their way, and what each process makes of those that arrive.
//!
//! Coordinator and nodes judge with the real [`Detector`]. It is told what real streams tell it: a beat now and then, a stream
//! that ended, a supervisor's word. A beat is late or lost like any other message; a process that pauses sends none.

use crate::faults::Fault;
use crate::world::{Event, World};
use engram_cluster::HandOver;
use engram_cluster::detector::{self, Action, Detector, Standing, Timing};
use engram_memory::{Incarnation, Member, Ordinal, PartitionId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Clocks of detectors show this when a run begins: they are old enough for an opinion.
const BEGAN_MS: u64 = 10_000;
/// A silence of this many beats is suspect.
const BEATS: u64 = 6;

/// What a process says of itself, again and again.
#[derive(Debug, Clone)]
pub(crate) struct Beat {
    pub(crate) member: Member,
    /// Which process of the whole run it is.
    pub(crate) number: u64,
    pub(crate) lossless_since: Incarnation,
    pub(crate) suspects: BTreeSet<Ordinal>,
    pub(crate) leaving: bool,
    pub(crate) turns: u64,
}

/// What a coordinator tells the nodes: of everybody, whether it lives and whether it is proven dead; and what to hand over.
#[derive(Debug, Clone)]
pub(crate) struct View {
    pub(crate) members: Arc<Vec<(Member, bool, bool)>>,
    pub(crate) hand_overs: Arc<Vec<HandOver>>,
    pub(crate) leaving: Arc<BTreeSet<Ordinal>>,
}

/// What one process knows of the others.
#[derive(Debug)]
pub(crate) struct Senses {
    pub(crate) detector: Detector,
    met: BTreeMap<Ordinal, Member>,
    /// Those of them that a coordinator has heard, and whether it thinks that they live.
    told: BTreeMap<Ordinal, (Member, bool)>,
    /// When a coordinator was heard last.
    told_ms: u64,
    /// Whom the store was told to take for dead.
    suspected: BTreeSet<Ordinal>,
    /// Who leaves, as far as the store was told.
    pub(crate) leavers: BTreeSet<Ordinal>,
    /// What the coordinator wants handed over, as far as the store was told.
    asked: BTreeMap<PartitionId, Ordinal>,
    turns: u64,
}

impl Senses {
    pub(crate) fn new(timing: Timing, now_us: u64) -> Self {
        let started_ms = if now_us == 0 { 0 } else { clock_ms(now_us) };
        Self {
            detector: Detector::new(timing, started_ms),
            met: BTreeMap::new(),
            told: BTreeMap::new(),
            told_ms: started_ms,
            suspected: BTreeSet::new(),
            leavers: BTreeSet::new(),
            asked: BTreeMap::new(),
            turns: 0,
        }
    }

    /// Whom the store shall take for dead from now on, and whom no longer: two witnesses, proof, or that it lasts.
    fn verdicts(&mut self, misled: Option<Ordinal>, now_ms: u64) -> Vec<(Ordinal, bool)> {
        let timing = *self.detector.timing();
        // As a worker does, in the proportions of its timing.
        let (unheard_ms, unwitnessed_ms, lasting_ms) =
            (timing.suspect_ms * 11 / 6, timing.suspect_ms * 5 / 6, timing.suspect_ms * 13 / 12);
        let braked = self.detector.is_braked();
        let mut verdicts = Vec::new();
        for (ordinal, member) in &self.met {
            let Some(standing) = self.detector.standing(*ordinal) else { continue };
            let lasted_ms = standing.since_ms().map_or(0, |since_ms| now_ms.saturating_sub(since_ms));
            let reported = self.told.get(ordinal).is_some_and(|told| *told == (*member, false));
            let unwitnessed = now_ms.saturating_sub(self.told_ms) >= unheard_ms && lasted_ms >= unwitnessed_ms;
            let proven = matches!(standing, Standing::Dead { .. });
            let counts = proven || reported || unwitnessed || (lasted_ms >= lasting_ms && !braked);
            let silent =
                (!standing.is_alive() && (counts || self.suspected.contains(ordinal))) || misled == Some(*ordinal);
            if silent != self.suspected.contains(ordinal) {
                verdicts.push((*ordinal, silent));
            }
        }
        for (ordinal, silent) in &verdicts {
            if *silent {
                self.suspected.insert(*ordinal)
            } else {
                self.suspected.remove(ordinal)
            };
        }
        verdicts
    }
}

/// What a detector's clock shows.
pub(crate) const fn clock_ms(now_us: u64) -> u64 {
    BEGAN_MS + now_us / 1_000
}

/// Takes a beat: the first of a process is its hello, which it cannot say any more when it has ended.
pub(crate) fn hear(
    detector: &mut Detector,
    known: Option<Member>,
    beat: &Beat,
    lives: bool,
    now_ms: u64,
) -> Option<Vec<Action>> {
    let mut actions = Vec::new();
    let member = beat.member;
    if known != Some(member) {
        let superseded =
            known.is_some_and(|known| known.store == member.store && known.incarnation > member.incarnation);
        if !lives || superseded {
            return None;
        }
        let domain = format!("node-{}", member.ordinal);
        actions.extend(detector.step(detector::Event::Met { member, domain }, now_ms));
    }
    actions.extend(detector.step(detector::Event::Beat { member, turns: beat.turns, queued: false }, now_ms));
    Some(actions)
}

impl World {
    /// A node says that it lives, when that is due.
    pub(crate) fn beat(&mut self, node: usize, tick_us: u64) {
        let every = (self.weather.timing.suspect_ms * 1_000 / BEATS / tick_us).max(1);
        let misled = self.misled(node);
        let Some(process) = &mut self.nodes[node].process else { return };
        process.senses.turns += 1;
        if process.senses.turns % every != 0 {
            return;
        }
        let beat = Beat {
            member: process.member,
            number: process.number,
            lossless_since: process.lossless_since,
            suspects: process.senses.detector.suspects().chain(misled).collect(),
            leaving: process.leaves_until_us.is_some(),
            turns: process.senses.turns,
        };
        for to in (0..=self.map_place()).filter(|to| *to != node) {
            self.send_beat(node, to, beat.clone());
        }
    }

    fn send_beat(&mut self, node: usize, to: usize, beat: Beat) {
        if self.network.is_cut(node, to) {
            return;
        }
        if self.draw.chance(self.weather.loss) {
            self.count(Fault::Loss);
            return;
        }
        let wait_us = self.delay_us();
        self.at(wait_us, Event::Beat { to, beat });
    }

    /// Somebody who was misled for a while.
    fn misled(&self, node: usize) -> Option<Ordinal> {
        self.nodes[node].misled.filter(|(_, until_us)| *until_us > self.now_us).map(|(whom, _)| whom)
    }

    fn is_running(&self, member: &Member) -> bool {
        let process = self.nodes[member.ordinal.0 as usize].process.as_ref();
        process.is_some_and(|process| process.member == *member)
    }

    pub(crate) fn hear_beat(&mut self, to: usize, beat: &Beat) {
        let lives = self.is_running(&beat.member);
        if to == self.map_place() {
            self.coordinator_hears(beat, lives);
            return;
        }
        let now_ms = clock_ms(self.now_us);
        let Some(process) = &mut self.nodes[to].process else { return };
        let senses = &mut process.senses;
        let known = senses.met.get(&beat.member.ordinal).copied();
        if let Some(actions) = hear(&mut senses.detector, known, beat, lives, now_ms) {
            senses.met.insert(beat.member.ordinal, beat.member);
            self.sensed(to, actions);
        }
    }

    /// A stream of beats ended.
    pub(crate) fn stream_closed(&mut self, to: usize, member: Member) {
        let now_ms = clock_ms(self.now_us);
        if to == self.map_place() {
            self.coordinator_senses(detector::Event::Closed(member));
        } else if let Some(process) = &mut self.nodes[to].process {
            let actions = process.senses.detector.step(detector::Event::Closed(member), now_ms);
            self.sensed(to, actions);
        }
    }

    /// What a coordinator says arrives.
    pub(crate) fn told(&mut self, node: usize, view: &View) {
        let now_ms = clock_ms(self.now_us);
        let Some(process) = &mut self.nodes[node].process else { return };
        let senses = &mut process.senses;
        let known = |(member, _, _): &&(Member, bool, bool)| senses.met.get(&member.ordinal) == Some(member);
        let members: Vec<(Member, bool, bool)> = view.members.iter().filter(known).copied().collect();
        senses.told_ms = now_ms;
        senses.told = members.iter().map(|(member, alive, _)| (member.ordinal, (*member, *alive))).collect();
        let mut actions = Vec::new();
        for (member, _, _) in members.iter().filter(|(_, _, dead)| *dead) {
            let died = detector::Event::Died(member.ordinal, Some(member.incarnation));
            actions.extend(senses.detector.step(died, now_ms));
        }
        let own = process.member.ordinal;
        let wanted: BTreeMap<PartitionId, Ordinal> =
            view.hand_overs.iter().map(|order| (order.partition, order.to)).collect();
        let before = std::mem::replace(&mut senses.asked, wanted.clone());
        let ended =
            before.keys().filter(|partition| !wanted.contains_key(partition)).map(|partition| (*partition, own));
        let begun = wanted.iter().filter(|(partition, to)| before.get(partition) != Some(to));
        let orders: Vec<(PartitionId, Ordinal)> = ended.chain(begun.map(|(partition, to)| (*partition, *to))).collect();
        self.sensed(node, actions);
        self.tell_leavers(node, BTreeSet::clone(&view.leaving));
        if !orders.is_empty() {
            self.with(node, |store| {
                orders.into_iter().for_each(|(partition, to)| store.hand_over(partition, to));
                Ok(())
            });
        }
    }

    /// The timer of a node's detector fires.
    pub(crate) fn look(&mut self, node: usize) {
        let now_ms = clock_ms(self.now_us);
        let Some(process) = &mut self.nodes[node].process else { return };
        let actions = process.senses.detector.step(detector::Event::Tick, now_ms);
        self.sensed(node, actions);
    }

    /// Tells a store what follows from what was sensed.
    fn sensed(&mut self, node: usize, actions: Vec<Action>) {
        self.check_proofs(&actions);
        let (misled, now_us) = (self.misled(node), self.now_us);
        let Some(process) = &mut self.nodes[node].process else { return };
        let mut verdicts = process.senses.verdicts(misled, clock_ms(now_us));
        for action in &actions {
            // Another process is there: trusted at once.
            if let Action::Trust(member) = action
                && process.senses.suspected.remove(&member.ordinal)
            {
                verdicts.push((member.ordinal, false));
            }
        }
        for (ordinal, silent) in verdicts {
            self.trace.note(now_us, &[5, node as u64, u64::from(ordinal.0), u64::from(silent)], || {
                format!("{node} {} {ordinal}", if silent { "suspects" } else { "trusts" })
            });
            self.with(node, |store| {
                if silent {
                    store.suspected(ordinal);
                } else {
                    store.trusted(ordinal);
                }
                Ok(())
            });
        }
        for action in actions {
            if let Action::Dead(dead) = action {
                self.with(node, |store| {
                    store.proven_dead(dead);
                    Ok(())
                });
            }
        }
    }

    /// Proof is of a process that will never act again.
    pub(crate) fn check_proofs(&mut self, actions: &[Action]) {
        for action in actions {
            if let Action::Dead(dead) = action
                && self.is_running(dead)
            {
                self.fail(format!("{dead} is dead by proof, and runs"));
            }
        }
    }

    /// What the end of a process tells those that listened to it: its streams end, unless its machine went with it.
    pub(crate) fn tell_of_end(&mut self, member: Member, number: u64, silently: bool) {
        for to in (0..=self.map_place()).filter(|to| *to != member.ordinal.0 as usize) {
            if !silently && !self.network.is_cut(member.ordinal.0 as usize, to) && self.draw.chance(800) {
                let wait_us = self.delay_us();
                self.at(wait_us, Event::Closed { to, member });
            }
        }
        if self.draw.chance(self.weather.proof) {
            let wait_us = self.draw.within(1_000, self.weather.proof_late_us);
            self.at(wait_us, Event::Died { member, number });
        }
    }
}
