//! Liveness: heartbeats in flight, and what each process concludes from them.
//!
//! Coordinator and nodes use the real [`Detector`]. Its inputs are those of real streams: heartbeats, closed streams,
//! supervisor reports. A heartbeat is late or lost like any other message; a paused process sends none.

use crate::faults::Fault;
use crate::world::{Event, World};
use engram_cluster::LeadershipTransfer;
use engram_cluster::detector::{self, Action, Detector, Liveness, Timing};
use engram_memory::{Incarnation, Member, Ordinal, PartitionId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Detector clocks start here: they are past their warm-up.
const START_MS: u64 = 10_000;
/// This many missed heartbeats are suspicious.
const HEARTBEATS: u64 = 6;

/// Heartbeat of a process.
#[derive(Debug, Clone)]
pub(crate) struct Heartbeat {
    pub(crate) member: Member,
    /// Number of the process in the whole run.
    pub(crate) number: u64,
    pub(crate) lossless_since: Incarnation,
    pub(crate) suspects: BTreeSet<Ordinal>,
    pub(crate) leaving: bool,
    pub(crate) turns: u64,
    /// Its wall clock, and the highest session watermark it knows.
    pub(crate) wall_ms: u64,
    pub(crate) session_watermark_ms: u64,
}

/// View sent by a coordinator: for each member whether it is alive and whether it is proven dead; and the leadership
/// transfers.
#[derive(Debug, Clone)]
pub(crate) struct View {
    pub(crate) members: Arc<Vec<(Member, bool, bool)>>,
    pub(crate) transfers: Arc<Vec<LeadershipTransfer>>,
    pub(crate) leaving: Arc<BTreeSet<Ordinal>>,
}

/// What one process knows about the others.
#[derive(Debug)]
pub(crate) struct LivenessTracker {
    pub(crate) detector: Detector,
    connected: BTreeMap<Ordinal, Member>,
    /// Liveness of the others as reported by a coordinator.
    reported: BTreeMap<Ordinal, (Member, bool)>,
    /// When a coordinator last reported.
    reported_ms: u64,
    /// Ordinals that the store currently suspects.
    suspected: BTreeSet<Ordinal>,
    /// Leaving workers passed to the store.
    pub(crate) leaving: BTreeSet<Ordinal>,
    /// Leadership transfers passed to the store.
    requested: BTreeMap<PartitionId, Ordinal>,
    turns: u64,
}

impl LivenessTracker {
    pub(crate) fn new(timing: Timing, now_us: u64) -> Self {
        let started_ms = if now_us == 0 { 0 } else { detector_ms(now_us) };
        Self {
            detector: Detector::new(timing, started_ms),
            connected: BTreeMap::new(),
            reported: BTreeMap::new(),
            reported_ms: started_ms,
            suspected: BTreeSet::new(),
            leaving: BTreeSet::new(),
            requested: BTreeMap::new(),
            turns: 0,
        }
    }

    /// Updates the suspicions passed to the store: they need two witnesses, proof, or duration.
    fn update_suspicions(&mut self, false_suspicion: Option<Ordinal>, now_ms: u64) -> Vec<(Ordinal, bool)> {
        let timing = *self.detector.timing();
        // As in a worker, in the proportions of its timing.
        let (unreported_ms, unconfirmed_ms, lasting_ms) =
            (timing.suspect_ms * 11 / 6, timing.suspect_ms * 5 / 6, timing.suspect_ms * 13 / 12);
        let braked = self.detector.is_braked();
        let mut changes = Vec::new();
        for (ordinal, member) in &self.connected {
            let Some(liveness) = self.detector.liveness(*ordinal) else { continue };
            let lasted_ms = liveness.since_ms().map_or(0, |since_ms| now_ms.saturating_sub(since_ms));
            let reported = self.reported.get(ordinal).is_some_and(|report| *report == (*member, false));
            let unconfirmed = now_ms.saturating_sub(self.reported_ms) >= unreported_ms && lasted_ms >= unconfirmed_ms;
            let proven = matches!(liveness, Liveness::Dead { .. });
            let counts = proven || reported || unconfirmed || (lasted_ms >= lasting_ms && !braked);
            let silent = (!liveness.is_alive() && (counts || self.suspected.contains(ordinal)))
                || false_suspicion == Some(*ordinal);
            if silent != self.suspected.contains(ordinal) {
                changes.push((*ordinal, silent));
            }
        }
        for (ordinal, silent) in &changes {
            if *silent {
                self.suspected.insert(*ordinal)
            } else {
                self.suspected.remove(ordinal)
            };
        }
        changes
    }
}

/// Returns the time of detector clocks.
pub(crate) const fn detector_ms(now_us: u64) -> u64 {
    START_MS + now_us / 1_000
}

/// Handles a heartbeat: the first one of a process connects it, which a dead process can no longer do.
pub(crate) fn observe_heartbeat(
    detector: &mut Detector,
    current: Option<Member>,
    heartbeat: &Heartbeat,
    is_running: bool,
    now_ms: u64,
) -> Option<Vec<Action>> {
    let mut actions = Vec::new();
    let member = heartbeat.member;
    if current != Some(member) {
        let superseded =
            current.is_some_and(|current| current.store == member.store && current.incarnation > member.incarnation);
        if !is_running || superseded {
            return None;
        }
        let domain = format!("node-{}", member.ordinal);
        actions.extend(detector.step(detector::Event::Connected { member, domain }, now_ms));
    }
    actions
        .extend(detector.step(detector::Event::Heartbeat { member, progress: heartbeat.turns, queued: false }, now_ms));
    Some(actions)
}

impl World {
    /// Sends the heartbeats of a node, when due.
    pub(crate) fn send_heartbeats(&mut self, node: usize, tick_us: u64) {
        let every = (self.plan.timing.suspect_ms * 1_000 / HEARTBEATS / tick_us).max(1);
        let false_suspicion = self.false_suspicion(node);
        let Some(process) = &mut self.nodes[node].process else { return };
        process.liveness.turns += 1;
        if process.liveness.turns % every != 0 {
            return;
        }
        let heartbeat = Heartbeat {
            member: process.member,
            number: process.number,
            lossless_since: process.lossless_since,
            suspects: process.liveness.detector.suspects().chain(false_suspicion).collect(),
            leaving: process.leaves_until_us.is_some(),
            turns: process.liveness.turns,
            wall_ms: process.store.session_clock().wall_ms(),
            session_watermark_ms: process.store.session_clock().watermark_ms(),
        };
        for to in (0..=self.map_index()).filter(|to| *to != node) {
            self.send_heartbeat(node, to, heartbeat.clone());
        }
    }

    fn send_heartbeat(&mut self, node: usize, to: usize, heartbeat: Heartbeat) {
        if self.network.is_cut(node, to) {
            return;
        }
        if self.draw.chance(self.plan.loss) {
            self.count(Fault::Loss);
            return;
        }
        let wait_us = self.delay_us();
        self.at(wait_us, Event::Heartbeat { to, heartbeat });
    }

    /// Returns the target of a current false suspicion.
    fn false_suspicion(&self, node: usize) -> Option<Ordinal> {
        self.nodes[node].false_suspicion.filter(|(_, until_us)| *until_us > self.now_us).map(|(target, _)| target)
    }

    fn is_running(&self, member: &Member) -> bool {
        let process = self.nodes[member.ordinal.0 as usize].process.as_ref();
        process.is_some_and(|process| process.member == *member)
    }

    pub(crate) fn receive_heartbeat(&mut self, to: usize, heartbeat: &Heartbeat) {
        let is_running = self.is_running(&heartbeat.member);
        if to == self.map_index() {
            self.coordinator_receives(heartbeat, is_running);
            return;
        }
        let now_ms = detector_ms(self.now_us);
        self.nodes[to].set_time(self.now_us);
        let Some(process) = &mut self.nodes[to].process else { return };
        let session_clock = process.store.session_clock();
        session_clock.observe(heartbeat.member.ordinal, heartbeat.wall_ms, heartbeat.session_watermark_ms);
        let liveness = &mut process.liveness;
        let current = liveness.connected.get(&heartbeat.member.ordinal).copied();
        if let Some(actions) = observe_heartbeat(&mut liveness.detector, current, heartbeat, is_running, now_ms) {
            liveness.connected.insert(heartbeat.member.ordinal, heartbeat.member);
            self.apply_actions(to, actions);
        }
    }

    /// A heartbeat stream ended.
    pub(crate) fn stream_closed(&mut self, to: usize, member: Member) {
        let now_ms = detector_ms(self.now_us);
        if to == self.map_index() {
            self.coordinator_step(detector::Event::Closed(member));
        } else if let Some(process) = &mut self.nodes[to].process {
            let actions = process.liveness.detector.step(detector::Event::Closed(member), now_ms);
            self.apply_actions(to, actions);
        }
    }

    /// A view of the coordinator arrives.
    pub(crate) fn receive_view(&mut self, node: usize, view: &View) {
        let now_ms = detector_ms(self.now_us);
        let Some(process) = &mut self.nodes[node].process else { return };
        let liveness = &mut process.liveness;
        let is_current =
            |(member, _, _): &&(Member, bool, bool)| liveness.connected.get(&member.ordinal) == Some(member);
        let members: Vec<(Member, bool, bool)> = view.members.iter().filter(is_current).copied().collect();
        liveness.reported_ms = now_ms;
        liveness.reported = members.iter().map(|(member, alive, _)| (member.ordinal, (*member, *alive))).collect();
        let mut actions = Vec::new();
        for (member, _, _) in members.iter().filter(|(_, _, dead)| *dead) {
            let died = detector::Event::Died(member.ordinal, Some(member.incarnation));
            actions.extend(liveness.detector.step(died, now_ms));
        }
        let own = process.member.ordinal;
        let requested: BTreeMap<PartitionId, Ordinal> =
            view.transfers.iter().map(|order| (order.partition, order.to)).collect();
        let before = std::mem::replace(&mut liveness.requested, requested.clone());
        let ended =
            before.keys().filter(|partition| !requested.contains_key(partition)).map(|partition| (*partition, own));
        let started = requested.iter().filter(|(partition, to)| before.get(partition) != Some(to));
        let orders: Vec<(PartitionId, Ordinal)> =
            ended.chain(started.map(|(partition, to)| (*partition, *to))).collect();
        self.apply_actions(node, actions);
        self.set_leaving(node, BTreeSet::clone(&view.leaving));
        if !orders.is_empty() {
            self.with(node, |store| {
                orders.into_iter().for_each(|(partition, to)| store.transfer_leadership(partition, to));
                Ok(())
            });
        }
    }

    /// The timer of a node's detector fires.
    pub(crate) fn tick_detector(&mut self, node: usize) {
        let now_ms = detector_ms(self.now_us);
        let Some(process) = &mut self.nodes[node].process else { return };
        let actions = process.liveness.detector.step(detector::Event::Tick, now_ms);
        self.apply_actions(node, actions);
    }

    /// Passes new suspicions to a store.
    fn apply_actions(&mut self, node: usize, actions: Vec<Action>) {
        self.check_proofs(&actions);
        let (false_suspicion, now_us) = (self.false_suspicion(node), self.now_us);
        let Some(process) = &mut self.nodes[node].process else { return };
        let mut changes = process.liveness.update_suspicions(false_suspicion, detector_ms(now_us));
        for action in &actions {
            // Another process has connected: trusted at once.
            if let Action::Trust(member) = action
                && process.liveness.suspected.remove(&member.ordinal)
            {
                changes.push((member.ordinal, false));
            }
        }
        for (ordinal, silent) in changes {
            self.trace.note(now_us, &[5, node as u64, u64::from(ordinal.0), u64::from(silent)], || {
                format!("{node} {} {ordinal}", if silent { "suspects" } else { "trusts" })
            });
            self.with(node, |store| {
                if silent {
                    store.suspect(ordinal);
                } else {
                    store.trust(ordinal);
                }
                Ok(())
            });
        }
        for action in actions {
            if let Action::Dead(dead) = action {
                self.with(node, |store| {
                    store.confirm_dead(dead);
                    Ok(())
                });
            }
        }
    }

    /// Checks that a proven dead process does not run.
    pub(crate) fn check_proofs(&mut self, actions: &[Action]) {
        for action in actions {
            if let Action::Dead(dead) = action
                && self.is_running(dead)
            {
                self.fail(format!("{dead} is proven dead, but runs"));
            }
        }
    }

    /// Announces the end of a process to its peers: its streams end, unless its machine went with it.
    pub(crate) fn announce_end(&mut self, member: Member, number: u64, silently: bool) {
        for to in (0..=self.map_index()).filter(|to| *to != member.ordinal.0 as usize) {
            if !silently && !self.network.is_cut(member.ordinal.0 as usize, to) && self.draw.chance(800) {
                let wait_us = self.delay_us();
                self.at(wait_us, Event::Closed { to, member });
            }
        }
        if self.draw.chance(self.plan.proof) {
            let wait_us = self.draw.within(1_000, self.plan.proof_late_us);
            self.at(wait_us, Event::Died { member, number });
        }
    }
}
