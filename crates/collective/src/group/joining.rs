//! Processes that want to join a group, and when the group stops for one.
//!
//! A group stops for a join until the joiner has its state. So a joiner fetches the state once while the group trains, which shows how long that
//! takes, and the group stops for it only if the stop is short, or rare: at most the detection time at once, otherwise at most a tenth of the time.
//! For one that takes longer than a change may wait the group does not stop.

use std::collections::BTreeMap;

use super::{MemberId, Position, Report, Timing};

/// A joiner waits this many times as long as its fetch takes, if that is longer than the detection time.
const PATIENCE: u64 = 10;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
struct Joiner {
    /// When it was requested to fetch the state, and from which step on that is done.
    requested: Option<(u64, u64)>,
    /// How long its last fetch took, unless the group would not wait for as long.
    took_ms: Option<u64>,
    /// Since when that is known.
    since_ms: Option<u64>,
    /// Until when it fetches no state again, after a fetch that took too long.
    until_ms: u64,
}

/// The joiners of a group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Joiners {
    timing: Timing,
    known: BTreeMap<MemberId, Joiner>,
}

impl Joiners {
    pub(super) const fn new(timing: Timing) -> Self {
        Self { timing, known: BTreeMap::new() }
    }

    /// Forgets the joiners that do not fulfil a condition.
    pub(super) fn retain(&mut self, keep: impl Fn(MemberId) -> bool) {
        self.known.retain(|member, _| keep(*member));
    }

    /// Notes the report of a joiner; returns whether it should fetch the state at `newest`. `is_ready` says whether it has a recent state.
    pub(super) fn report(&mut self, report: &Report, is_ready: bool, newest: Position, now_ms: u64) -> bool {
        let timing = self.timing;
        let joiner = self.known.entry(report.member).or_default();
        if let Some((since_ms, step)) = joiner.requested
            && is_ready
            && report.position.step >= step
        {
            joiner.requested = None;
            let took_ms = now_ms.saturating_sub(since_ms);
            if took_ms < timing.change_ms() {
                joiner.took_ms = Some(took_ms);
                joiner.since_ms.get_or_insert(now_ms);
            } else {
                *joiner = Joiner::excluded(timing, now_ms);
            }
        }
        let is_due = joiner.requested.is_some() || (joiner.took_ms.is_none() && now_ms >= joiner.until_ms);
        let fetches = !is_ready || (is_due && report.position != newest);
        if fetches {
            joiner.requested.get_or_insert((now_ms, newest.step));
        }
        fetches
    }

    /// Whether the group stops for a joiner that has a recent state.
    pub(super) fn is_admitted(&self, report: &Report, newest: Position, now_ms: u64) -> bool {
        if report.position == newest {
            return true;
        }
        let Some(Joiner { requested: None, took_ms: Some(took_ms), since_ms: Some(since_ms), until_ms }) =
            self.known.get(&report.member).copied()
        else {
            return false;
        };
        let is_rare = now_ms.saturating_sub(since_ms) >= PATIENCE * took_ms;
        now_ms >= until_ms && (took_ms <= self.timing.progress_ms() || is_rare)
    }

    /// Notes that a change went on without a joiner, which had not fetched the state in time.
    pub(super) fn missed(&mut self, member: MemberId, now_ms: u64) {
        self.known.insert(member, Joiner::excluded(self.timing, now_ms));
    }
}

impl Joiner {
    /// A joiner for which the group does not stop before it has fetched the state again, later and faster.
    const fn excluded(timing: Timing, now_ms: u64) -> Self {
        Self { requested: None, took_ms: None, since_ms: None, until_ms: now_ms + timing.abort_ms() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Stage;
    use super::*;

    const JOINER: MemberId = MemberId(7);

    fn report(position: Position) -> Report {
        let (generation, stage, fence) = (0, Stage::Outside, (0, 0));
        let (skipped, prepared, suspicion, leaving) = (false, None, None, false);
        Report { member: JOINER, generation, stage, fence, position, skipped, prepared, suspicion, leaving }
    }

    /// Lets a joiner of a group with a detection time of 100 ms and steps of 10 ms fetch a state; returns when the group stops for it, in a minute.
    fn admitted_ms(fetch_ms: u64) -> Option<u64> {
        let mut joiners = Joiners::new(Timing::new(100));
        let position = |now_ms: u64| Position { step: now_ms / 10, digest: now_ms / 10 };
        let (mut own, mut fetched) = (Position::default(), None);
        (1_000..61_000).step_by(20).find(|&now_ms| {
            if let Some((_, state)) = fetched.filter(|(at_ms, _)| now_ms >= *at_ms) {
                (own, fetched) = (state, None);
            }
            // States of the last 2 seconds are known.
            let is_ready = own.step + 200 > position(now_ms).step;
            if joiners.report(&report(own), is_ready, position(now_ms), now_ms) && fetched.is_none() {
                fetched = Some((now_ms + fetch_ms, position(now_ms)));
            }
            is_ready && joiners.is_admitted(&report(own), position(now_ms), now_ms)
        })
    }

    #[test]
    fn group_stops_at_once_or_after_ten_fetches_or_not_at_all() {
        assert_eq!(admitted_ms(60), Some(1_060));
        // By then its first state is too old, and it has another one.
        assert_eq!(admitted_ms(300), Some(4_300));
        assert_eq!(admitted_ms(600), None, "longer than the group waits");
    }

    #[test]
    fn joiner_that_missed_a_change_fetches_again_before_the_next_one() {
        let mut joiners = Joiners::new(Timing::new(100));
        let at = |step: u64| Position { step, digest: step };
        joiners.missed(JOINER, 1_000);
        assert!(!joiners.report(&report(at(8)), true, at(9), 2_900));
        assert!(!joiners.is_admitted(&report(at(8)), at(9), 2_900));
        assert!(joiners.report(&report(at(8)), true, at(9), 3_000), "twenty detection times later");
        assert!(!joiners.is_admitted(&report(at(8)), at(9), 3_010));
        assert!(!joiners.report(&report(at(9)), true, at(10), 3_050));
        assert!(joiners.is_admitted(&report(at(9)), at(10), 3_050));
    }
}
