//! Who is dead: failure detection as a state machine that neither keeps a clock nor talks to anybody.
//!
//! The coordinator runs one about the workers, a worker runs one about its partners. Time comes in as milliseconds of a
//! monotonic clock that counts suspends.
//!
//! ```text
//! hello, beat, closed stream, exit status, own timer ──> Detector::step ──> Suspect | Trust | Dead
//! ```
//!
//! Invariants:
//! - *dead* is said of one incarnation, and only with proof: its supervisor's word, or a newer process of its store on its
//!   machine. Everything else is suspicion, which a beat ends;
//! - there is no opinion of somebody who was not heard since this detector started, and none at all in its first seconds;
//! - a detector that was stalled itself does not count its own absence as the silence of others.

use crate::replica::{Defect, is_planted};
use engram_memory::{Incarnation, Member, Ordinal};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Own lateness up to this says nothing: timers of a busy machine are this late.
const LATE_MS: u64 = 100;
/// How long a late timer counts against this detector's own judgement.
const LATE_WINDOW_MS: u64 = 2_000;
/// Timeouts are stretched to this many times their length at most.
const STRETCH_MOST: u64 = 3;
/// A closed stream counts alone when its process has not come back within this.
const CONFIRM_MS: u64 = 150;
/// Silence of this many timeouts counts alone: who reaches no coordinator for so long cannot take part in any change.
const SILENT_ALONE: u64 = 4;
/// A worker that was failed over twice within this leads nothing for as long.
const DAMP_MS: u64 = 5 * 60 * 1_000;
/// Failovers so close to each other are one: the partitions of a worker may need several writes of the map.
const INCIDENT_MS: u64 = 10_000;

/// When a detector says something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// How often [`Event::Tick`] is due.
    pub tick_ms: u64,
    /// Silence after which somebody is suspected. Six beats of 200 ms by default: several times the worst lateness measured of a
    /// timer with 32 busy threads per core.
    pub suspect_ms: u64,
    /// Work that waits this long without any progress makes its process unhealthy though it beats.
    pub stuck_ms: u64,
    /// Age at which a detector has its first opinion: a fresh one must not fail everybody over.
    pub opinion_ms: u64,
}

impl Default for Timing {
    fn default() -> Self {
        Self { tick_ms: 100, suspect_ms: 1_200, stuck_ms: 1_000, opinion_ms: 3_000 }
    }
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The own timer fired; due every [`Timing::tick_ms`].
    Tick,
    /// A process opened a stream.
    Met {
        /// Who it is.
        member: Member,
        /// What fails together with it: its machine.
        domain: String,
    },
    /// A process said that it lives, and how its work goes.
    Beat {
        /// Who it is.
        member: Member,
        /// Rises with any progress.
        turns: u64,
        /// Work waits.
        queued: bool,
    },
    /// Its stream was reset or closed, or a connection to it refused.
    Closed(Member),
    /// Its supervisor saw it exit; `None`: the process that was heard last.
    Died(Ordinal, Option<Incarnation>),
    /// Its partitions were given to others because it was thought dead.
    FailedOver(Ordinal),
}

/// What is new.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// A process is thought dead.
    Suspect(Member, Cause),
    /// It is not, or a living process has taken its place.
    Trust(Member),
    /// Proof: this process will never act again.
    Dead(Member),
}

/// Why somebody is suspected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// No beat for too long.
    Silent,
    /// Hard evidence: its stream ended, or nobody listens where it did.
    Closed,
    /// It beats, but its work stands still: its own word.
    Stuck,
}

/// What is thought of a process that was heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It lives.
    Alive,
    /// It may be dead.
    Suspected {
        /// Why.
        cause: Cause,
        /// Since when.
        since_ms: u64,
    },
    /// It is dead, by proof.
    Dead {
        /// Since when that is known.
        since_ms: u64,
    },
}

impl Standing {
    /// Whether it lives, as far as anybody knows.
    pub const fn is_alive(self) -> bool {
        matches!(self, Self::Alive)
    }

    /// Since when it does not.
    pub const fn since_ms(self) -> Option<u64> {
        match self {
            Self::Alive => None,
            Self::Suspected { since_ms, .. } | Self::Dead { since_ms } => Some(since_ms),
        }
    }

    /// Whether its partitions may be given to others. Proof and its own word are enough; everything else needs a second
    /// witness, or that it lasts, which while the brake acts is not enough.
    pub const fn is_confirmed(self, witness: bool, braked: bool, now_ms: u64, timing: &Timing) -> bool {
        match self {
            Self::Alive => false,
            Self::Dead { .. } | Self::Suspected { cause: Cause::Stuck, .. } => true,
            Self::Suspected { cause, since_ms } => {
                let alone_ms = match cause {
                    Cause::Silent => (SILENT_ALONE - 1) * timing.suspect_ms,
                    _ => CONFIRM_MS,
                };
                witness || (!braked && now_ms.saturating_sub(since_ms) >= alone_ms)
            }
        }
    }
}

/// The detector.
#[derive(Debug, Clone)]
pub struct Detector {
    timing: Timing,
    started_ms: u64,
    ticked_ms: u64,
    /// Own late ticks of the last two seconds: when, and how late.
    late: VecDeque<(u64, u64)>,
    places: BTreeMap<Ordinal, Place>,
    /// Reported dead before they were heard.
    unheard: BTreeSet<Ordinal>,
    /// The last two failovers of each place.
    failovers: BTreeMap<Ordinal, VecDeque<u64>>,
}

#[derive(Debug, Clone)]
struct Place {
    member: Member,
    domain: String,
    heard_ms: u64,
    /// The same, with what the detector itself missed.
    beat_ms: u64,
    closed_ms: Option<u64>,
    turns: u64,
    /// Since when work waits without progress.
    still_ms: Option<u64>,
    standing: Standing,
}

impl Detector {
    /// A detector that starts now.
    pub const fn new(timing: Timing, now_ms: u64) -> Self {
        Self {
            timing,
            started_ms: now_ms,
            ticked_ms: now_ms,
            late: VecDeque::new(),
            places: BTreeMap::new(),
            unheard: BTreeSet::new(),
            failovers: BTreeMap::new(),
        }
    }

    /// Its timing.
    pub const fn timing(&self) -> &Timing {
        &self.timing
    }

    /// How long it has been running.
    pub const fn age_ms(&self, now_ms: u64) -> u64 {
        now_ms.saturating_sub(self.started_ms)
    }

    /// What is thought of a place; `None`: nobody was heard there.
    pub fn standing(&self, ordinal: Ordinal) -> Option<Standing> {
        self.places.get(&ordinal).map(|place| place.standing)
    }

    /// The places whose process is not thought to live: what a worker says in its beats.
    pub fn suspects(&self) -> impl Iterator<Item = Ordinal> {
        self.places.iter().filter(|(_, place)| !place.standing.is_alive()).map(|(ordinal, _)| *ordinal)
    }

    /// Whether the process at a place was heard a moment ago. One that is not suspected may not have been: a detector that was
    /// stalled suspects nobody for it, and yet knows nothing of that time.
    pub fn is_fresh(&self, ordinal: Ordinal, now_ms: u64) -> bool {
        let place = self.places.get(&ordinal);
        place.is_some_and(|place| now_ms.saturating_sub(place.beat_ms) <= self.timing.suspect_ms)
    }

    /// Whether a supervisor reported the death of a process that was never heard here.
    pub fn died_unheard(&self, ordinal: Ordinal) -> bool {
        self.unheard.contains(&ordinal)
    }

    /// Whether more is silent than one fault explains: more than one failure domain and more than a third of the workers. The
    /// fault is then taken for one's own.
    pub fn is_braked(&self) -> bool {
        let silent = || {
            let cut_off = |place: &&Place| {
                matches!(place.standing, Standing::Suspected { cause: Cause::Silent | Cause::Closed, .. })
            };
            self.places.values().filter(cut_off)
        };
        let domains: BTreeSet<_> = silent().map(|place| &place.domain).collect();
        domains.len() > 1 && 3 * silent().count() > self.places.len()
    }

    /// Whether a place failed over so often that it should lead nothing for a while.
    pub fn is_damped(&self, ordinal: Ordinal, now_ms: u64) -> bool {
        self.failovers.get(&ordinal).is_some_and(|times| {
            let (first, last) = (times[0], times[times.len() - 1]);
            times.len() == 2 && last - first <= DAMP_MS && now_ms.saturating_sub(last) < DAMP_MS
        })
    }

    /// Forgets who is no longer part of anything: its silence says nothing about the others.
    pub fn forget(&mut self, ordinal: Ordinal) {
        self.places.remove(&ordinal);
        self.unheard.remove(&ordinal);
    }

    /// Takes an event.
    pub fn step(&mut self, event: Event, now_ms: u64) -> Vec<Action> {
        let mut actions = Vec::new();
        // What has stood still is found by the timer alone, which knows whether this process stood still itself.
        let timed = event == Event::Tick;
        match event {
            Event::Tick => self.tick(now_ms),
            Event::Met { member, domain } => self.met(member, domain, now_ms, &mut actions),
            Event::Beat { member, turns, queued } => self.beat(&member, turns, queued, now_ms),
            Event::Closed(member) if is_planted(Defect::ProofWithoutDeath) => {
                self.died(member.ordinal, Some(member.incarnation), now_ms, &mut actions);
            }
            Event::Closed(member) => {
                if let Some(place) = self.process_mut(&member) {
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
        self.judge(timed, now_ms, &mut actions);
        actions
    }

    fn tick(&mut self, now_ms: u64) {
        let late_ms = now_ms.saturating_sub(self.ticked_ms).saturating_sub(self.timing.tick_ms);
        self.ticked_ms = now_ms;
        self.late.retain(|(at_ms, _)| now_ms.saturating_sub(*at_ms) <= LATE_WINDOW_MS);
        if late_ms > LATE_MS {
            self.late.push_back((now_ms, late_ms));
        }
        if late_ms > self.timing.suspect_ms / 2 {
            // This process did not run: what others said meanwhile still waits to be read.
            for place in self.places.values_mut() {
                place.heard_ms = (place.heard_ms + late_ms).min(now_ms);
                place.still_ms = place.still_ms.map(|since_ms| (since_ms + late_ms).min(now_ms));
            }
        }
    }

    fn met(&mut self, member: Member, domain: String, now_ms: u64, actions: &mut Vec<Action>) {
        self.unheard.remove(&member.ordinal);
        let mut standing = Standing::Alive;
        if let Some(known) = self.places.get(&member.ordinal) {
            let same_store = known.member.store == member.store;
            if same_store && known.member.incarnation > member.incarnation {
                return;
            }
            if known.member == member {
                // The dead do not come back under their name; the judgement of others is made again.
                standing = known.standing;
            } else {
                let dead = matches!(known.standing, Standing::Dead { .. });
                // The lock of the data folder was free, or the machine was started anew.
                if same_store && known.domain == domain && !dead {
                    actions.push(Action::Dead(known.member));
                }
                if !known.standing.is_alive() || actions.contains(&Action::Dead(known.member)) {
                    actions.push(Action::Trust(member));
                }
            }
        }
        let (heard_ms, beat_ms) = (now_ms, now_ms);
        let place = Place { member, domain, heard_ms, beat_ms, closed_ms: None, turns: 0, still_ms: None, standing };
        self.places.insert(member.ordinal, place);
    }

    fn beat(&mut self, member: &Member, turns: u64, queued: bool, now_ms: u64) {
        let Some(place) = self.process_mut(member) else { return };
        (place.heard_ms, place.beat_ms, place.closed_ms) = (now_ms, now_ms, None);
        let moved = std::mem::replace(&mut place.turns, turns) != turns;
        place.still_ms = if queued && !moved { place.still_ms.or(Some(now_ms)) } else { None };
    }

    fn died(&mut self, ordinal: Ordinal, incarnation: Option<Incarnation>, now_ms: u64, actions: &mut Vec<Action>) {
        let Some(place) = self.places.get_mut(&ordinal) else {
            self.unheard.insert(ordinal);
            return;
        };
        let named = incarnation.is_none_or(|incarnation| incarnation == place.member.incarnation);
        if named && !matches!(place.standing, Standing::Dead { .. }) {
            place.standing = Standing::Dead { since_ms: now_ms };
            actions.push(Action::Dead(place.member));
        }
    }

    /// Compares what is thought of everybody with what is known.
    fn judge(&mut self, timed: bool, now_ms: u64, actions: &mut Vec<Action>) {
        let stretch = self.stretch_permille();
        let has_opinion = self.age_ms(now_ms) >= self.timing.opinion_ms;
        let passed = |since_ms: u64, limit_ms: u64| now_ms.saturating_sub(since_ms) * 1_000 >= limit_ms * stretch;
        for place in self.places.values_mut() {
            let cause = if place.closed_ms.is_some() {
                Some(Cause::Closed)
            } else if passed(place.heard_ms, self.timing.suspect_ms) {
                Some(Cause::Silent)
            } else if place.still_ms.is_some_and(|since_ms| passed(since_ms, self.timing.stuck_ms)) {
                Some(Cause::Stuck)
            } else {
                None
            };
            match (place.standing, cause) {
                (Standing::Alive, Some(cause)) if has_opinion && (timed || cause == Cause::Closed) => {
                    place.standing = Standing::Suspected { cause, since_ms: now_ms };
                    actions.push(Action::Suspect(place.member, cause));
                }
                (Standing::Suspected { .. }, None) => {
                    place.standing = Standing::Alive;
                    actions.push(Action::Trust(place.member));
                }
                // What is harder replaces what is softer; since when stays.
                (Standing::Suspected { since_ms, .. }, Some(cause)) => {
                    place.standing = Standing::Suspected { cause, since_ms };
                }
                _ => {}
            }
        }
    }

    /// By how much timeouts are stretched because this process itself runs late, in thousandths.
    fn stretch_permille(&self) -> u64 {
        let worst_ms = self.late.iter().map(|(_, late_ms)| *late_ms).max().unwrap_or(0);
        (worst_ms * 1_000 / LATE_MS).clamp(1_000, STRETCH_MOST * 1_000)
    }

    fn process_mut(&mut self, member: &Member) -> Option<&mut Place> {
        self.places.get_mut(&member.ordinal).filter(|place| place.member == *member)
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

    /// A detector whose timer fires in time, and those that beat.
    struct Watch {
        detector: Detector,
        now_ms: u64,
        beating: BTreeMap<Ordinal, (Member, bool)>,
        turns: u64,
    }

    impl Watch {
        fn new(workers: u32) -> Self {
            let mut watch = Self {
                detector: Detector::new(Timing::default(), START),
                now_ms: START,
                beating: BTreeMap::new(),
                turns: 0,
            };
            (0..workers).for_each(|worker| assert_eq!(watch.meet(member(worker, 1)), []));
            watch
        }

        fn meet(&mut self, member: Member) -> Vec<Action> {
            self.beating.insert(member.ordinal, (member, true));
            self.step(Event::Met { member, domain: format!("machine-{}", member.ordinal) })
        }

        fn step(&mut self, event: Event) -> Vec<Action> {
            self.detector.step(event, self.now_ms)
        }

        /// Lets time pass in ticks, with beats of those that beat.
        fn pass(&mut self, ms: u64) -> Vec<Action> {
            let mut actions = Vec::new();
            for _ in 0..ms / 100 {
                self.now_ms += 100;
                self.turns += 1;
                for (member, moves) in self.beating.clone().into_values() {
                    let turns = if moves { self.turns } else { 0 };
                    actions.extend(self.step(Event::Beat { member, turns, queued: true }));
                }
                actions.extend(self.step(Event::Tick));
            }
            actions
        }

        fn fall_silent(&mut self, ordinal: u32) {
            self.beating.remove(&Ordinal(ordinal));
        }

        fn standing(&self, ordinal: u32) -> Standing {
            self.detector.standing(Ordinal(ordinal)).unwrap()
        }
    }

    #[test]
    fn six_beats_of_silence_are_suspicion_and_a_beat_ends_it() {
        let mut watch = Watch::new(3);
        assert_eq!(watch.pass(5_000), []);
        watch.fall_silent(1);
        assert_eq!(watch.pass(1_100), []);
        assert_eq!(watch.pass(100), [Action::Suspect(member(1, 1), Cause::Silent)]);
        assert_eq!(watch.detector.suspects().collect::<Vec<_>>(), [Ordinal(1)]);
        assert_eq!(watch.pass(5_000), [], "it is said once");
        let beat = Event::Beat { member: member(1, 1), turns: 1, queued: false };
        assert_eq!(watch.step(beat), [Action::Trust(member(1, 1))]);
        assert!(watch.standing(1).is_alive());
    }

    #[test]
    fn who_beats_without_progress_is_stuck_only_while_work_waits() {
        let mut watch = Watch::new(2);
        watch.pass(4_000);
        watch.beating.insert(Ordinal(0), (member(0, 1), false));
        assert_eq!(watch.pass(1_000), []);
        assert_eq!(watch.pass(200), [Action::Suspect(member(0, 1), Cause::Stuck)]);
        assert!(watch.standing(0).is_confirmed(false, true, watch.now_ms, watch.detector.timing()), "its own word");
        watch.beating.insert(Ordinal(0), (member(0, 1), true));
        assert_eq!(watch.pass(100), [Action::Trust(member(0, 1))]);
        for _ in 0..30 {
            watch.now_ms += 100;
            assert_eq!(
                watch.step(Event::Beat { member: member(0, 1), turns: 7, queued: false }),
                [],
                "idle is healthy"
            );
            watch.step(Event::Beat { member: member(1, 1), turns: watch.now_ms, queued: false });
            watch.step(Event::Tick);
        }
    }

    #[test]
    fn a_fresh_detector_has_no_opinion_and_never_one_of_somebody_it_has_not_heard() {
        let mut watch = Watch::new(2);
        watch.fall_silent(0);
        assert_eq!(watch.pass(2_900), [], "silent for longer than the timeout, but too early to say");
        assert_eq!(watch.step(Event::Closed(member(1, 1))), [], "hard evidence waits as well");
        watch.fall_silent(1);
        let said = watch.pass(100);
        assert!(said.contains(&Action::Suspect(member(0, 1), Cause::Silent)), "{said:?}");
        assert!(said.contains(&Action::Suspect(member(1, 1), Cause::Closed)), "{said:?}");
        watch.pass(600_000);
        assert_eq!(watch.detector.standing(Ordinal(7)), None);
        assert_eq!(watch.step(Event::Closed(member(7, 1))), []);
        assert_eq!(watch.step(Event::Died(Ordinal(7), None)), [], "nor is a name proof of anything");
        assert!(watch.detector.died_unheard(Ordinal(7)));
        watch.meet(member(7, 3));
        assert!(!watch.detector.died_unheard(Ordinal(7)));
    }

    #[test]
    fn only_proof_makes_dead_and_only_the_incarnation_it_names() {
        let mut watch = Watch::new(3);
        watch.pass(4_000);
        assert_eq!(watch.step(Event::Closed(member(0, 1))), [Action::Suspect(member(0, 1), Cause::Closed)]);
        assert!(matches!(watch.standing(0), Standing::Suspected { cause: Cause::Closed, .. }), "a reset is no proof");
        assert_eq!(watch.step(Event::Died(Ordinal(1), Some(Incarnation(2)))), [], "the proof of another process");
        assert_eq!(watch.step(Event::Died(Ordinal(1), Some(Incarnation(1)))), [Action::Dead(member(1, 1))]);
        assert_eq!(watch.step(Event::Died(Ordinal(1), None)), [], "said once");
        let late = Event::Beat { member: member(1, 1), turns: 9, queued: false };
        assert_eq!(watch.step(late), [], "a beat that was under way brings nobody back");
        assert!(matches!(watch.standing(1), Standing::Dead { .. }));
        // The next process, on the same machine: the place lives again. On the third's, it proves the death of the old one.
        assert_eq!(watch.meet(member(1, 2)), [Action::Trust(member(1, 2))]);
        assert_eq!(watch.meet(member(2, 2)), [Action::Dead(member(2, 1)), Action::Trust(member(2, 2))]);
        assert_eq!(watch.step(Event::Died(Ordinal(2), Some(Incarnation(1)))), [], "long known");
        assert!(watch.standing(2).is_alive());
        let elsewhere = Event::Met { member: member(2, 3), domain: "elsewhere".into() };
        assert_eq!(watch.step(elsewhere), [], "the same store on another machine proves nothing");
    }

    #[test]
    fn a_detector_that_runs_late_trusts_its_own_clock_less() {
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
        assert_eq!(watch.pass(200).len(), 2, "but not for ever");
    }

    #[test]
    fn a_detector_that_was_stalled_does_not_find_everybody_silent() {
        let mut watch = Watch::new(3);
        watch.pass(4_000);
        watch.now_ms += 60_000;
        // The first beat that was waiting is read before the timer fires.
        assert_eq!(watch.step(Event::Beat { member: member(1, 1), turns: 99, queued: false }), []);
        assert_eq!(watch.step(Event::Tick), []);
        assert_eq!(watch.pass(5_000), []);
    }

    #[test]
    fn suspicion_needs_a_second_witness_or_to_last() {
        let timing = Timing::default();
        let confirmed = |cause, age_ms, witness, braked| {
            Standing::Suspected { cause, since_ms: START }.is_confirmed(witness, braked, START + age_ms, &timing)
        };
        assert!(confirmed(Cause::Silent, 0, true, false));
        assert!(!confirmed(Cause::Silent, 3_500, false, false), "one broken link fails nobody over");
        assert!(confirmed(Cause::Silent, 3_600, false, false));
        assert!(!confirmed(Cause::Closed, 100, false, false), "it may be back at once");
        assert!(confirmed(Cause::Closed, 150, false, false));
        assert!(!confirmed(Cause::Closed, 60_000, false, true), "the brake acts: only the backup's word counts");
        assert!(confirmed(Cause::Closed, 0, true, true));
        assert!(Standing::Dead { since_ms: START }.is_confirmed(false, true, START, &timing));
        assert!(!Standing::Alive.is_confirmed(true, false, START, &timing), "who is heard is not dead");
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
        assert!(!watch.detector.is_braked(), "who is proven dead is no riddle");
        watch.fall_silent(2);
        watch.pass(2_000);
        assert!(watch.detector.is_braked());
        watch.detector.forget(Ordinal(2));
        assert!(!watch.detector.is_braked(), "who was sent away is not missed");
        let mut one_machine = Detector::new(Timing::default(), 0);
        for ordinal in 0..3 {
            one_machine.step(Event::Met { member: member(ordinal, 1), domain: "one".into() }, 0);
        }
        (1..60).for_each(|tick| drop(one_machine.step(Event::Tick, tick * 100)));
        assert_eq!(one_machine.suspects().count(), 3);
        assert!(!one_machine.is_braked(), "one failure domain is one fault");
    }

    #[test]
    fn who_failed_over_twice_leads_nothing_for_five_minutes() {
        let mut watch = Watch::new(1);
        let damped = |watch: &Watch| watch.detector.is_damped(Ordinal(0), watch.now_ms);
        watch.step(Event::FailedOver(Ordinal(0)));
        watch.now_ms += 1_000;
        watch.step(Event::FailedOver(Ordinal(0)));
        assert!(!damped(&watch), "once, in several writes, is no flapping");
        watch.now_ms += DAMP_MS + 1;
        watch.step(Event::FailedOver(Ordinal(0)));
        assert!(!damped(&watch), "nor is twice in a long time");
        watch.now_ms += 60_000;
        watch.step(Event::FailedOver(Ordinal(0)));
        assert!(damped(&watch));
        watch.now_ms += DAMP_MS;
        assert!(!damped(&watch), "it is over");
        assert!(watch.detector.standing(Ordinal(0)).is_some(), "membership is untouched");
    }
}
