//! Time of sessions: what the clocks of the cluster's members agree on.
//!
//! Sessions are opened, accepted and expired by wall clocks, and a wall clock may be wrong by days. A session must not expire because
//! of one wrong clock: expiry follows the lower median of the members' clocks, and the lowest one of the last day, so that a step
//! forward counts only after it lasted for as long as a session lives. A new session is opened at or above every known watermark.

use crate::Clock;
use engram_memory::Ordinal;
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Sessions are forgotten after a day: the client library renews them after hours.
pub(crate) const SESSION_MS: u64 = 24 * 60 * 60 * 1_000;
/// Largest accepted lead of a session's opening time: more than synchronized clocks differ.
const CLOCK_SKEW_MS: u64 = 60 * 60 * 1_000;
/// Resolution of the recent medians: bounds their number.
const SAMPLE_MS: u64 = 60 * 60 * 1_000;

/// Issues, checks and expires opening times of sessions. Shared by the store and its callers.
pub struct SessionClock {
    clock: Arc<dyn Clock>,
    /// The cluster has other members, whose clocks are needed for expiry.
    has_members: bool,
    /// Opening times up to here were accepted before.
    accepted_ms: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Offsets of other members.
    members: BTreeMap<Ordinal, Observation>,
    /// Medians of the last day, oldest first.
    recent: VecDeque<Sample>,
    /// Highest session watermark of the cluster's partitions, as far as known.
    watermark_ms: u64,
    /// Opening time of the newest session found in recovered or received state.
    newest_ms: u64,
}

/// Wall clock of another member relative to the monotonic clock of this one.
#[derive(Debug, Clone, Copy)]
struct Observation {
    offset_ms: i64,
    at_ms: u64,
}

/// Extremes of the medians within [`SAMPLE_MS`].
#[derive(Debug, Clone, Copy)]
struct Sample {
    at_ms: u64,
    low_ms: i64,
    high_ms: i64,
}

impl SessionClock {
    pub(crate) fn new(clock: Arc<dyn Clock>, has_members: bool) -> Self {
        let session_clock = Self { clock, has_members, accepted_ms: AtomicU64::new(0), state: Mutex::default() };
        session_clock.sample();
        session_clock
    }

    /// Returns the wall time of this member, in milliseconds since 1970.
    pub fn wall_ms(&self) -> u64 {
        self.clock.now_ms()
    }

    /// Records the wall clock of another member and the highest session watermark that it knows.
    pub fn observe(&self, ordinal: Ordinal, wall_ms: u64, watermark_ms: u64) {
        let at_ms = self.clock.elapsed_ms();
        let mut state = self.state.lock();
        state.members.insert(ordinal, Observation { offset_ms: offset(wall_ms, at_ms), at_ms });
        state.watermark_ms = state.watermark_ms.max(watermark_ms);
    }

    /// Records watermark and newest session of a partition's state.
    pub(crate) fn recovered(&self, watermark_ms: u64, newest_ms: u64) {
        let mut state = self.state.lock();
        state.watermark_ms = state.watermark_ms.max(watermark_ms);
        state.newest_ms = state.newest_ms.max(newest_ms);
    }

    /// Returns the highest known session watermark of the cluster.
    pub fn watermark_ms(&self) -> u64 {
        self.state.lock().watermark_ms
    }

    /// Returns the opening time of a new session: valid in every partition whose watermark is known here.
    pub fn opening_ms(&self) -> u64 {
        let (low_ms, _, _) = self.medians();
        at(low_ms, self.clock.elapsed_ms()).max(self.watermark_ms())
    }

    /// Returns the latest opening time that is accepted: a session from the future would outlive every watermark.
    pub fn latest_ms(&self) -> u64 {
        let (_, mut high_ms, _) = self.medians();
        let state = self.state.lock();
        high_ms = state.recent.iter().fold(high_ms, |high_ms, sample| high_ms.max(sample.high_ms));
        let now_ms = at(high_ms, self.clock.elapsed_ms());
        now_ms.max(state.watermark_ms).max(state.newest_ms).saturating_add(CLOCK_SKEW_MS)
    }

    /// Whether a session opened at this time is accepted.
    pub fn accepts(&self, opened_ms: u64) -> bool {
        if opened_ms <= self.accepted_ms.load(Ordering::Relaxed) {
            return true;
        }
        let latest_ms = self.latest_ms();
        self.accepted_ms.fetch_max(latest_ms, Ordering::Relaxed);
        opened_ms <= latest_ms
    }

    /// Returns the watermark to propose; `None` while the clocks of the other members are unknown.
    pub(crate) fn expire_before_ms(&self) -> Option<u64> {
        let low_ms = self.sample()?;
        Some(at(low_ms, self.clock.elapsed_ms()).saturating_sub(SESSION_MS))
    }

    /// Adds the current medians to the recent ones; returns the lowest median of the last day.
    fn sample(&self) -> Option<i64> {
        let (low_ms, high_ms, clocks) = self.medians();
        if self.has_members && clocks < 2 {
            return None;
        }
        let at_ms = self.clock.elapsed_ms();
        let mut state = self.state.lock();
        while state.recent.front().is_some_and(|sample| sample.at_ms.saturating_add(SESSION_MS) < at_ms) {
            state.recent.pop_front();
        }
        match state.recent.back_mut().filter(|sample| at_ms.saturating_sub(sample.at_ms) < SAMPLE_MS) {
            Some(sample) => {
                (sample.low_ms, sample.high_ms) = (sample.low_ms.min(low_ms), sample.high_ms.max(high_ms));
            }
            None => state.recent.push_back(Sample { at_ms, low_ms, high_ms }),
        }
        state.recent.iter().map(|sample| sample.low_ms).min()
    }

    /// Returns the lower and the upper median of the known clocks, as offsets, and the number of these clocks. A member that was
    /// not observed for a day has left.
    fn medians(&self) -> (i64, i64, usize) {
        let at_ms = self.clock.elapsed_ms();
        let mut state = self.state.lock();
        state.members.retain(|_, member| member.at_ms.saturating_add(SESSION_MS) >= at_ms);
        let mut offsets: Vec<i64> = state.members.values().map(|member| member.offset_ms).collect();
        offsets.push(offset(self.clock.now_ms(), at_ms));
        offsets.sort_unstable();
        (offsets[(offsets.len() - 1) / 2], offsets[offsets.len() / 2], offsets.len())
    }
}

/// Returns a wall time as an offset from the monotonic clock.
fn offset(wall_ms: u64, elapsed_ms: u64) -> i64 {
    i64::try_from(wall_ms).unwrap_or(i64::MAX).saturating_sub_unsigned(elapsed_ms)
}

/// Returns the wall time of an offset.
fn at(offset_ms: i64, elapsed_ms: u64) -> u64 {
    elapsed_ms.saturating_add_signed(offset_ms)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ManualClock;

    const DAY_MS: u64 = SESSION_MS;
    const START_MS: u64 = 100 * DAY_MS;

    fn session_clock(has_members: bool) -> (Arc<ManualClock>, SessionClock) {
        let clock = Arc::new(ManualClock::new(START_MS));
        (Arc::clone(&clock), SessionClock::new(clock, has_members))
    }

    #[test]
    fn one_wrong_clock_of_three_expires_no_session() {
        for wrong_ms in [START_MS + 40 * DAY_MS, START_MS - 40 * DAY_MS] {
            let (_, session_clock) = session_clock(true);
            assert_eq!(session_clock.expire_before_ms(), None, "one clock alone is no median");
            session_clock.observe(Ordinal(1), wrong_ms, 0);
            assert!(session_clock.expire_before_ms().unwrap() <= START_MS - DAY_MS);
            session_clock.observe(Ordinal(2), START_MS + 5, 0);
            assert!(session_clock.expire_before_ms().unwrap() <= START_MS - DAY_MS);
            assert!((START_MS..=START_MS + 5).contains(&session_clock.opening_ms()));
            assert!(session_clock.latest_ms() >= START_MS + CLOCK_SKEW_MS);
        }
    }

    #[test]
    fn own_clock_that_is_wrong_does_not_count_against_the_others() {
        let (clock, session_clock) = session_clock(true);
        session_clock.observe(Ordinal(1), START_MS, 0);
        session_clock.observe(Ordinal(2), START_MS, 0);
        for wrong_ms in [START_MS + 40 * DAY_MS, 0] {
            clock.set_wall(wrong_ms);
            assert_eq!(session_clock.expire_before_ms(), Some(START_MS - DAY_MS));
            assert_eq!(session_clock.opening_ms(), START_MS);
            assert_eq!(session_clock.latest_ms(), START_MS + CLOCK_SKEW_MS);
        }
    }

    #[test]
    fn single_clock_is_accepted_after_a_day() {
        let (clock, session_clock) = session_clock(false);
        clock.set_wall(START_MS + 40 * DAY_MS);
        clock.advance(DAY_MS / 2);
        assert_eq!(session_clock.expire_before_ms(), Some(START_MS - DAY_MS / 2));
        for _ in 0..25 {
            clock.advance(SAMPLE_MS);
            session_clock.expire_before_ms();
        }
        assert_eq!(session_clock.expire_before_ms(), Some(clock.now_ms() - DAY_MS));
        assert!(session_clock.state.lock().recent.len() <= 25);
    }

    #[test]
    fn new_session_is_above_every_known_watermark_and_accepted() {
        let (clock, session_clock) = session_clock(true);
        session_clock.observe(Ordinal(1), START_MS, START_MS + 39 * DAY_MS);
        assert_eq!(session_clock.opening_ms(), START_MS + 39 * DAY_MS);
        assert!(session_clock.opening_ms() <= session_clock.latest_ms());
        session_clock.recovered(START_MS + 41 * DAY_MS, 0);
        clock.set_wall(0);
        assert_eq!(session_clock.opening_ms(), START_MS + 41 * DAY_MS);
        assert_eq!(session_clock.watermark_ms(), START_MS + 41 * DAY_MS);
    }

    #[test]
    fn recovered_sessions_are_accepted_by_a_clock_that_is_behind() {
        let (clock, session_clock) = session_clock(false);
        session_clock.recovered(0, START_MS + 5 * DAY_MS);
        clock.set_wall(0);
        assert_eq!(session_clock.latest_ms(), START_MS + 5 * DAY_MS + CLOCK_SKEW_MS);
    }
}
