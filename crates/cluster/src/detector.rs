//! Failure detection as a state machine without a clock and without I/O.
//!
//! The coordinator runs one for its workers, a worker runs one for its peers. Time comes in as milliseconds of a
//! monotonic clock that includes suspends.
//!
//! ```text
//! hello, heartbeat, closed stream, exit status, own timer ──> Detector::step ──> Suspect | Trust | Dead
//! ```
//!
//! Invariants:
//! - *dead* applies to one incarnation, and only with proof: its supervisor's report, or a newer process of its store
//!   on the same machine. Everything else is suspicion, which a heartbeat ends;
//! - a worker that was never seen by this detector is never suspected, and none is in its first seconds;
//! - a detector that was stalled itself does not count its own pause as silence of others.

use crate::injected;
use engram_memory::{Incarnation, Member, Ordinal};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Lateness of the own timer up to this is normal on a busy machine.
const LATE_MS: u64 = 100;
/// How long a late tick reduces confidence in the own judgement.
const LATE_WINDOW_MS: u64 = 2_000;
/// Timeouts are stretched at most by this factor.
const MAX_STRETCH: u64 = 3;
/// A closed stream is conclusive without a witness when its process has not come back within this.
const CONFIRM_MS: u64 = 150;
/// Silence of this many timeouts is conclusive without a witness: a worker that reaches no coordinator for so long
/// cannot take part in any change.
const SILENT_TIMEOUTS: u64 = 4;
/// A worker that failed over twice within this time becomes primary of nothing for as long.
const DAMPING_MS: u64 = 5 * 60 * 1_000;
/// Failovers so close to each other count as one: the partitions of a worker may need several map writes.
const INCIDENT_MS: u64 = 10_000;

/// Timeouts of a detector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// How often [`Event::Tick`] is due.
    pub tick_ms: u64,
    /// Silence after which a worker is suspected. Six heartbeats of 200 ms by default: several times the lateness of a
    /// timer under heavy load.
    pub suspect_ms: u64,
    /// Work that waits this long without progress makes its process unhealthy although it sends heartbeats.
    pub stuck_ms: u64,
    /// Age below which a detector suspects no worker: a new one must not fail over every partition.
    pub warmup_ms: u64,
}

impl Default for Timing {
    fn default() -> Self {
        Self { tick_ms: 100, suspect_ms: 1_200, stuck_ms: 1_000, warmup_ms: 3_000 }
    }
}

/// An input of the detector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The own timer fired; due every [`Timing::tick_ms`].
    Tick,
    /// A process opened a stream.
    Connected {
        /// The process.
        member: Member,
        /// Failure domain: its machine.
        domain: String,
    },
    /// A process sent a heartbeat with the progress of its work.
    Heartbeat {
        /// The process.
        member: Member,
        /// Counter that increases with any progress.
        progress: u64,
        /// Work is queued.
        queued: bool,
    },
    /// Its stream was reset or closed, or a connection to it was refused.
    Closed(Member),
    /// Its supervisor saw it exit; `None`: the process seen last.
    Died(Ordinal, Option<Incarnation>),
    /// Its partitions were failed over because it was considered dead.
    FailedOver(Ordinal),
}

/// A change of liveness.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// A process is considered dead.
    Suspect(Member, Cause),
    /// It is alive after all, or a living process has replaced it.
    Trust(Member),
    /// Proof: this process will never act again.
    Dead(Member),
}

/// Why a process is suspected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// No heartbeat for too long.
    Silent,
    /// Hard evidence: its stream ended, or its port refuses connections.
    Closed,
    /// It sends heartbeats, but reports that its work makes no progress.
    Stuck,
}

/// Liveness of a process that was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Liveness {
    /// It is alive.
    Alive,
    /// It may be dead.
    Suspected {
        /// Cause of the suspicion.
        cause: Cause,
        /// Since when it is suspected.
        since_ms: u64,
    },
    /// It is dead, by proof.
    Dead {
        /// Since when that is known.
        since_ms: u64,
    },
}

impl Liveness {
    /// Whether it is alive, as far as known.
    pub const fn is_alive(self) -> bool {
        matches!(self, Self::Alive)
    }

    /// Since when it is not alive.
    pub const fn since_ms(self) -> Option<u64> {
        match self {
            Self::Alive => None,
            Self::Suspected { since_ms, .. } | Self::Dead { since_ms } => Some(since_ms),
        }
    }

    /// Whether its partitions may be failed over. Proof and its own report are sufficient; everything else needs a
    /// second witness, or must last, which is not sufficient while the brake acts.
    pub const fn is_confirmed(self, witness: bool, braked: bool, now_ms: u64, timing: &Timing) -> bool {
        match self {
            Self::Alive => false,
            Self::Dead { .. } | Self::Suspected { cause: Cause::Stuck, .. } => true,
            Self::Suspected { cause, since_ms } => {
                let conclusive_ms = match cause {
                    Cause::Silent => (SILENT_TIMEOUTS - 1) * timing.suspect_ms,
                    _ => CONFIRM_MS,
                };
                witness || (!braked && now_ms.saturating_sub(since_ms) >= conclusive_ms)
            }
        }
    }
}

/// The failure detector.
#[derive(Debug, Clone)]
pub struct Detector {
    timing: Timing,
    started_ms: u64,
    ticked_ms: u64,
    /// Own late ticks of the last two seconds: time and lateness.
    late_ticks: VecDeque<(u64, u64)>,
    workers: BTreeMap<Ordinal, TrackedWorker>,
    /// Reported dead before they were seen.
    died_unseen: BTreeSet<Ordinal>,
    /// Last two failovers of each worker.
    failovers: BTreeMap<Ordinal, VecDeque<u64>>,
}

#[derive(Debug, Clone)]
struct TrackedWorker {
    member: Member,
    domain: String,
    heard_ms: u64,
    /// As `heard_ms`, without credit for pauses of the detector itself.
    heartbeat_ms: u64,
    closed_ms: Option<u64>,
    turns: u64,
    /// Since when work waits without progress.
    stalled_since_ms: Option<u64>,
    liveness: Liveness,
}

impl Detector {
    /// Creates a detector that starts now.
    pub const fn new(timing: Timing, now_ms: u64) -> Self {
        Self {
            timing,
            started_ms: now_ms,
            ticked_ms: now_ms,
            late_ticks: VecDeque::new(),
            workers: BTreeMap::new(),
            died_unseen: BTreeSet::new(),
            failovers: BTreeMap::new(),
        }
    }

    /// Returns the timing.
    pub const fn timing(&self) -> &Timing {
        &self.timing
    }

    /// Returns how long it has been running.
    pub const fn age_ms(&self, now_ms: u64) -> u64 {
        now_ms.saturating_sub(self.started_ms)
    }

    /// Returns the liveness of a worker; `None` if it was never seen.
    pub fn liveness(&self, ordinal: Ordinal) -> Option<Liveness> {
        self.workers.get(&ordinal).map(|place| place.liveness)
    }

    /// Workers that are not considered alive: reported in heartbeats.
    pub fn suspects(&self) -> impl Iterator<Item = Ordinal> {
        self.workers.iter().filter(|(_, place)| !place.liveness.is_alive()).map(|(ordinal, _)| *ordinal)
    }

    /// Whether a worker sent a heartbeat recently. One that is not suspected may not have: a detector that was stalled
    /// suspects no worker for it, but knows nothing of that time.
    pub fn is_fresh(&self, ordinal: Ordinal, now_ms: u64) -> bool {
        let place = self.workers.get(&ordinal);
        place.is_some_and(|place| now_ms.saturating_sub(place.heartbeat_ms) <= self.timing.suspect_ms)
    }

    /// Whether a supervisor reported the death of a process that was never seen here.
    pub fn died_unseen(&self, ordinal: Ordinal) -> bool {
        self.died_unseen.contains(&ordinal)
    }

    /// Whether more workers are silent than one fault explains: more than one failure domain and more than a third of
    /// the workers. The fault is then assumed to be the observer's own.
    pub fn is_braked(&self) -> bool {
        let silent = || {
            let cut_off = |place: &&TrackedWorker| {
                matches!(place.liveness, Liveness::Suspected { cause: Cause::Silent | Cause::Closed, .. })
            };
            self.workers.values().filter(cut_off)
        };
        let domains: BTreeSet<_> = silent().map(|place| &place.domain).collect();
        domains.len() > 1 && 3 * silent().count() > self.workers.len()
    }

    /// Whether a worker failed over so often that it should not become primary for a while.
    pub fn is_damped(&self, ordinal: Ordinal, now_ms: u64) -> bool {
        self.failovers.get(&ordinal).is_some_and(|times| {
            let (first, last) = (times[0], times[times.len() - 1]);
            times.len() == 2 && last - first <= DAMPING_MS && now_ms.saturating_sub(last) < DAMPING_MS
        })
    }

    /// Removes a worker that left the cluster: its silence says nothing about the others.
    pub fn forget(&mut self, ordinal: Ordinal) {
        self.workers.remove(&ordinal);
        self.died_unseen.remove(&ordinal);
    }

    /// Handles an event.
    pub fn step(&mut self, event: Event, now_ms: u64) -> Vec<Action> {
        let mut actions = Vec::new();
        // Only the timer detects stalls: it knows whether this process was stalled itself.
        let timed = event == Event::Tick;
        match event {
            Event::Tick => self.tick(now_ms),
            Event::Connected { member, domain } => self.connected(member, domain, now_ms, &mut actions),
            Event::Heartbeat { member, progress: turns, queued } => self.heartbeat(&member, turns, queued, now_ms),
            Event::Closed(member) if injected!(ProofWithoutDeath) => {
                self.died(member.ordinal, Some(member.incarnation), now_ms, &mut actions);
            }
            Event::Closed(member) => {
                if let Some(place) = self.worker_mut(&member) {
                    place.closed_ms.get_or_insert(now_ms);
                }
            }
            Event::Died(ordinal, incarnation) => self.died(ordinal, incarnation, now_ms, &mut actions),
            Event::FailedOver(ordinal) => {
                let times = self.failovers.entry(ordinal).or_default();
                if times.back().is_some_and(|last_ms| now_ms.saturating_sub(*last_ms) < INCIDENT_MS) {
                    return actions;
                }
                times.push_back(now_ms);
                if times.len() > 2 {
                    times.pop_front();
                }
            }
        }
        self.update_liveness(timed, now_ms, &mut actions);
        actions
    }

    fn tick(&mut self, now_ms: u64) {
        let late_ms = now_ms.saturating_sub(self.ticked_ms).saturating_sub(self.timing.tick_ms);
        self.ticked_ms = now_ms;
        self.late_ticks.retain(|(at_ms, _)| now_ms.saturating_sub(*at_ms) <= LATE_WINDOW_MS);
        if late_ms > LATE_MS {
            self.late_ticks.push_back((now_ms, late_ms));
        }
        if late_ms > self.timing.suspect_ms / 2 {
            // This process did not run: heartbeats that arrived meanwhile still wait to be read.
            for place in self.workers.values_mut() {
                place.heard_ms = (place.heard_ms + late_ms).min(now_ms);
                place.stalled_since_ms = place.stalled_since_ms.map(|since_ms| (since_ms + late_ms).min(now_ms));
            }
        }
    }

    fn connected(&mut self, member: Member, domain: String, now_ms: u64, actions: &mut Vec<Action>) {
        self.died_unseen.remove(&member.ordinal);
        let mut standing = Liveness::Alive;
        if let Some(previous) = self.workers.get(&member.ordinal) {
            let same_store = previous.member.store == member.store;
            if same_store && previous.member.incarnation > member.incarnation {
                return;
            }
            if previous.member == member {
                // A dead process does not come back under its name; other judgements are made again.
                standing = previous.liveness;
            } else {
                let dead = matches!(previous.liveness, Liveness::Dead { .. });
                // The lock of the data folder was free, or the machine was restarted.
                if same_store && previous.domain == domain && !dead {
                    actions.push(Action::Dead(previous.member));
                }
                if !previous.liveness.is_alive() || actions.contains(&Action::Dead(previous.member)) {
                    actions.push(Action::Trust(member));
                }
            }
        }
        let (heard_ms, heartbeat_ms) = (now_ms, now_ms);
        let place = TrackedWorker {
            member,
            domain,
            heard_ms,
            heartbeat_ms,
            closed_ms: None,
            turns: 0,
            stalled_since_ms: None,
            liveness: standing,
        };
        self.workers.insert(member.ordinal, place);
    }

    fn heartbeat(&mut self, member: &Member, turns: u64, queued: bool, now_ms: u64) {
        let Some(place) = self.worker_mut(member) else { return };
        (place.heard_ms, place.heartbeat_ms, place.closed_ms) = (now_ms, now_ms, None);
        let moved = std::mem::replace(&mut place.turns, turns) != turns;
        place.stalled_since_ms = if queued && !moved { place.stalled_since_ms.or(Some(now_ms)) } else { None };
    }

    fn died(&mut self, ordinal: Ordinal, incarnation: Option<Incarnation>, now_ms: u64, actions: &mut Vec<Action>) {
        let Some(place) = self.workers.get_mut(&ordinal) else {
            self.died_unseen.insert(ordinal);
            return;
        };
        let named = incarnation.is_none_or(|incarnation| incarnation == place.member.incarnation);
        if named && !matches!(place.liveness, Liveness::Dead { .. }) {
            place.liveness = Liveness::Dead { since_ms: now_ms };
            actions.push(Action::Dead(place.member));
        }
    }

    /// Updates the liveness of every worker.
    fn update_liveness(&mut self, timed: bool, now_ms: u64, actions: &mut Vec<Action>) {
        let stretch = self.stretch_permille();
        let warmed_up = self.age_ms(now_ms) >= self.timing.warmup_ms;
        let exceeds = |since_ms: u64, limit_ms: u64| now_ms.saturating_sub(since_ms) * 1_000 >= limit_ms * stretch;
        for place in self.workers.values_mut() {
            let cause = if place.closed_ms.is_some() {
                Some(Cause::Closed)
            } else if exceeds(place.heard_ms, self.timing.suspect_ms) {
                Some(Cause::Silent)
            } else if place.stalled_since_ms.is_some_and(|since_ms| exceeds(since_ms, self.timing.stuck_ms)) {
                Some(Cause::Stuck)
            } else {
                None
            };
            match (place.liveness, cause) {
                (Liveness::Alive, Some(cause)) if warmed_up && (timed || cause == Cause::Closed) => {
                    place.liveness = Liveness::Suspected { cause, since_ms: now_ms };
                    actions.push(Action::Suspect(place.member, cause));
                }
                (Liveness::Suspected { .. }, None) => {
                    place.liveness = Liveness::Alive;
                    actions.push(Action::Trust(place.member));
                }
                // A harder cause replaces a softer one; the start stays.
                (Liveness::Suspected { since_ms, .. }, Some(cause)) => {
                    place.liveness = Liveness::Suspected { cause, since_ms };
                }
                _ => {}
            }
        }
    }

    /// By how much timeouts are stretched because this process itself runs late, in thousandths.
    fn stretch_permille(&self) -> u64 {
        let worst_ms = self.late_ticks.iter().map(|(_, late_ms)| *late_ms).max().unwrap_or(0);
        (worst_ms * 1_000 / LATE_MS).clamp(1_000, MAX_STRETCH * 1_000)
    }

    fn worker_mut(&mut self, member: &Member) -> Option<&mut TrackedWorker> {
        self.workers.get_mut(&member.ordinal).filter(|place| place.member == *member)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_memory::StoreId;

    const START: u64 = 50_000;

    fn member(ordinal: u32, incarnation: u64) -> Member {
        let store = StoreId(u128::from(ordinal) + 100);
        Member { ordinal: Ordinal(ordinal), store, incarnation: Incarnation(incarnation) }
    }

    /// A detector whose timer fires in time, and the workers that send heartbeats.
    struct Watch {
        detector: Detector,
        now_ms: u64,
        alive: BTreeMap<Ordinal, (Member, bool)>,
        turns: u64,
    }

    impl Watch {
        fn new(workers: u32) -> Self {
            let mut watch = Self {
                detector: Detector::new(Timing::default(), START),
                now_ms: START,
                alive: BTreeMap::new(),
                turns: 0,
            };
            (0..workers).for_each(|worker| assert_eq!(watch.meet(member(worker, 1)), []));
            watch
        }

        fn meet(&mut self, member: Member) -> Vec<Action> {
            self.alive.insert(member.ordinal, (member, true));
            self.step(Event::Connected { member, domain: format!("machine-{}", member.ordinal) })
        }

        fn step(&mut self, event: Event) -> Vec<Action> {
            self.detector.step(event, self.now_ms)
        }

        /// Advances time in ticks, with heartbeats of the living workers.
        fn pass(&mut self, ms: u64) -> Vec<Action> {
            let mut actions = Vec::new();
            for _ in 0..ms / 100 {
                self.now_ms += 100;
                self.turns += 1;
                for (member, moves) in self.alive.clone().into_values() {
                    let turns = if moves { self.turns } else { 0 };
                    actions.extend(self.step(Event::Heartbeat { member, progress: turns, queued: true }));
                }
                actions.extend(self.step(Event::Tick));
            }
            actions
        }

        fn fall_silent(&mut self, ordinal: u32) {
            self.alive.remove(&Ordinal(ordinal));
        }

        fn standing(&self, ordinal: u32) -> Liveness {
            self.detector.liveness(Ordinal(ordinal)).unwrap()
        }
    }

    #[test]
    fn six_missed_heartbeats_are_suspicion_and_a_heartbeat_ends_it() {
        let mut watch = Watch::new(3);
        assert_eq!(watch.pass(5_000), []);
        watch.fall_silent(1);
        assert_eq!(watch.pass(1_100), []);
        assert_eq!(watch.pass(100), [Action::Suspect(member(1, 1), Cause::Silent)]);
        assert_eq!(watch.detector.suspects().collect::<Vec<_>>(), [Ordinal(1)]);
        assert_eq!(watch.pass(5_000), [], "reported once");
        let heartbeat = Event::Heartbeat { member: member(1, 1), progress: 1, queued: false };
        assert_eq!(watch.step(heartbeat), [Action::Trust(member(1, 1))]);
        assert!(watch.standing(1).is_alive());
    }

    #[test]
    fn worker_without_progress_is_stuck_only_while_work_waits() {
        let mut watch = Watch::new(2);
        watch.pass(4_000);
        watch.alive.insert(Ordinal(0), (member(0, 1), false));
        assert_eq!(watch.pass(1_000), []);
        assert_eq!(watch.pass(200), [Action::Suspect(member(0, 1), Cause::Stuck)]);
        assert!(watch.standing(0).is_confirmed(false, true, watch.now_ms, watch.detector.timing()), "its own report");
        watch.alive.insert(Ordinal(0), (member(0, 1), true));
        assert_eq!(watch.pass(100), [Action::Trust(member(0, 1))]);
        for _ in 0..30 {
            watch.now_ms += 100;
            assert_eq!(
                watch.step(Event::Heartbeat { member: member(0, 1), progress: 7, queued: false }),
                [],
                "idle is healthy"
            );
            watch.step(Event::Heartbeat { member: member(1, 1), progress: watch.now_ms, queued: false });
            watch.step(Event::Tick);
        }
    }

    #[test]
    fn new_detector_suspects_no_worker_before_its_first_heartbeat() {
        let mut watch = Watch::new(2);
        watch.fall_silent(0);
        assert_eq!(watch.pass(2_900), [], "silent for longer than the timeout, but still warming up");
        assert_eq!(watch.step(Event::Closed(member(1, 1))), [], "hard evidence waits as well");
        watch.fall_silent(1);
        let actions = watch.pass(100);
        assert!(actions.contains(&Action::Suspect(member(0, 1), Cause::Silent)), "{actions:?}");
        assert!(actions.contains(&Action::Suspect(member(1, 1), Cause::Closed)), "{actions:?}");
        watch.pass(600_000);
        assert_eq!(watch.detector.liveness(Ordinal(7)), None);
        assert_eq!(watch.step(Event::Closed(member(7, 1))), []);
        assert_eq!(watch.step(Event::Died(Ordinal(7), None)), [], "an ordinal alone is no proof");
        assert!(watch.detector.died_unseen(Ordinal(7)));
        watch.meet(member(7, 3));
        assert!(!watch.detector.died_unseen(Ordinal(7)));
    }

    #[test]
    fn only_proof_makes_dead_and_only_the_named_incarnation() {
        let mut watch = Watch::new(3);
        watch.pass(4_000);
        assert_eq!(watch.step(Event::Closed(member(0, 1))), [Action::Suspect(member(0, 1), Cause::Closed)]);
        assert!(matches!(watch.standing(0), Liveness::Suspected { cause: Cause::Closed, .. }), "a reset is no proof");
        assert_eq!(watch.step(Event::Died(Ordinal(1), Some(Incarnation(2)))), [], "the proof of another process");
        assert_eq!(watch.step(Event::Died(Ordinal(1), Some(Incarnation(1)))), [Action::Dead(member(1, 1))]);
        assert_eq!(watch.step(Event::Died(Ordinal(1), None)), [], "reported once");
        let late = Event::Heartbeat { member: member(1, 1), progress: 9, queued: false };
        assert_eq!(watch.step(late), [], "a heartbeat that was in flight revives nothing");
        assert!(matches!(watch.standing(1), Liveness::Dead { .. }));
        // The next process on the same machine: the worker is alive again. On the third worker's, it proves the death
        // of the old one.
        assert_eq!(watch.meet(member(1, 2)), [Action::Trust(member(1, 2))]);
        assert_eq!(watch.meet(member(2, 2)), [Action::Dead(member(2, 1)), Action::Trust(member(2, 2))]);
        assert_eq!(watch.step(Event::Died(Ordinal(2), Some(Incarnation(1)))), [], "already known");
        assert!(watch.standing(2).is_alive());
        let elsewhere = Event::Connected { member: member(2, 3), domain: "elsewhere".into() };
        assert_eq!(watch.step(elsewhere), [], "the same store on another machine proves nothing");
    }

    #[test]
    fn detector_that_runs_late_stretches_its_timeouts() {
        let mut watch = Watch::new(2);
        watch.pass(4_000);
        watch.fall_silent(0);
        watch.fall_silent(1);
        // Its own timer is 250 ms late: silence must last two and a half times as long.
        watch.now_ms += 350;
        assert_eq!(watch.step(Event::Tick), []);
        assert_eq!(watch.pass(1_500), []);
        watch.now_ms += 350;
        watch.step(Event::Tick);
        assert_eq!(watch.pass(700), []);
        assert_eq!(watch.pass(200).len(), 2, "but not without end");
    }

    #[test]
    fn a_worker_that_was_silent_for_a_day_is_not_fresh() {
        let mut watch = Watch::new(3);
        watch.pass(4_000);
        watch.fall_silent(1);
        watch.pass(2_000);
        // Half a second more than a day, which is shorter than any timeout.
        watch.now_ms += 86_400_500 - 2_000;
        assert!(!watch.detector.is_fresh(Ordinal(1), watch.now_ms));
        watch.pass(5_000);
        assert_eq!(watch.detector.suspects().collect::<Vec<_>>(), [Ordinal(1)]);
        assert!(watch.detector.is_fresh(Ordinal(0), watch.now_ms));
    }

    #[test]
    fn stalled_detector_does_not_suspect_everyone() {
        let mut watch = Watch::new(3);
        watch.pass(4_000);
        watch.now_ms += 60_000;
        // The first queued heartbeat is read before the timer fires.
        assert_eq!(watch.step(Event::Heartbeat { member: member(1, 1), progress: 99, queued: false }), []);
        assert_eq!(watch.step(Event::Tick), []);
        assert_eq!(watch.pass(5_000), []);
    }

    #[test]
    fn suspicion_needs_a_second_witness_or_to_last() {
        let timing = Timing::default();
        let confirmed = |cause, age_ms, witness, braked| {
            Liveness::Suspected { cause, since_ms: START }.is_confirmed(witness, braked, START + age_ms, &timing)
        };
        assert!(confirmed(Cause::Silent, 0, true, false));
        assert!(!confirmed(Cause::Silent, 3_500, false, false), "one broken link causes no failover");
        assert!(confirmed(Cause::Silent, 3_600, false, false));
        assert!(!confirmed(Cause::Closed, 100, false, false), "it may be back at once");
        assert!(confirmed(Cause::Closed, 150, false, false));
        assert!(!confirmed(Cause::Closed, 60_000, false, true), "the brake acts: only the backup's suspicion counts");
        assert!(confirmed(Cause::Closed, 0, true, true));
        assert!(Liveness::Dead { since_ms: START }.is_confirmed(false, true, START, &timing));
        assert!(!Liveness::Alive.is_confirmed(true, false, START, &timing), "a live worker is not dead");
    }

    #[test]
    fn the_brake_acts_when_more_is_silent_than_one_fault_explains() {
        let mut watch = Watch::new(5);
        watch.pass(4_000);
        watch.fall_silent(0);
        watch.pass(2_000);
        assert!(!watch.detector.is_braked(), "one worker");
        watch.fall_silent(1);
        watch.pass(2_000);
        assert!(watch.detector.is_braked(), "two of five, on two machines");
        watch.step(Event::Died(Ordinal(1), None));
        assert!(!watch.detector.is_braked(), "a proven death does not count as silence");
        watch.fall_silent(2);
        watch.pass(2_000);
        assert!(watch.detector.is_braked());
        watch.detector.forget(Ordinal(2));
        assert!(!watch.detector.is_braked(), "a removed worker does not count");
        let mut one_machine = Detector::new(Timing::default(), 0);
        for ordinal in 0..3 {
            one_machine.step(Event::Connected { member: member(ordinal, 1), domain: "one".into() }, 0);
        }
        (1..60).for_each(|tick| drop(one_machine.step(Event::Tick, tick * 100)));
        assert_eq!(one_machine.suspects().count(), 3);
        assert!(!one_machine.is_braked(), "one failure domain is one fault");
    }

    #[test]
    fn worker_that_failed_over_twice_is_damped_for_five_minutes() {
        let mut watch = Watch::new(1);
        let damped = |watch: &Watch| watch.detector.is_damped(Ordinal(0), watch.now_ms);
        watch.step(Event::FailedOver(Ordinal(0)));
        watch.now_ms += 1_000;
        watch.step(Event::FailedOver(Ordinal(0)));
        assert!(!damped(&watch), "several writes of one failover are not flapping");
        watch.now_ms += DAMPING_MS + 1;
        watch.step(Event::FailedOver(Ordinal(0)));
        assert!(!damped(&watch), "nor are two failovers far apart");
        watch.now_ms += 60_000;
        watch.step(Event::FailedOver(Ordinal(0)));
        assert!(damped(&watch));
        watch.now_ms += DAMPING_MS;
        assert!(!damped(&watch), "it is over");
        assert!(watch.detector.liveness(Ordinal(0)).is_some(), "membership is untouched");
    }
}
