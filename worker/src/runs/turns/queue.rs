//! Queue of runs that wait for the turn.
//!
//! Kept in memory by the primary of the turn's partition: each run asks several times a second, so a new primary knows all of them
//! quickly.

use engram_memory::RunId;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Time after which a run that no longer asks loses its position: ten requests.
const SILENCE: Duration = Duration::from_secs(2);

/// Interval between checks whether the run that holds the turn is recorded: each is a call to the worker that has its record.
const HOLDER_CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Runs that wait for the turn.
#[derive(Debug, Default)]
pub(crate) struct TurnQueue {
    waiters: BTreeMap<RunId, Waiter>,
    last_holder_check: Option<Instant>,
}

#[derive(Debug)]
struct Waiter {
    /// Submission time in milliseconds since 1970, and name.
    position: (u64, String),
    last_asked: Instant,
}

impl TurnQueue {
    /// A run asks at `now`; returns how many are ahead of it, and the name of the first.
    pub(in crate::runs) fn enqueue(
        &mut self,
        run: RunId,
        position: (u64, String),
        now: Instant,
    ) -> (u32, Option<String>) {
        self.waiters.insert(run, Waiter { position, last_asked: now });
        self.waiters.retain(|_, waiter| now.saturating_duration_since(waiter.last_asked) < SILENCE);
        let own = &self.waiters[&run].position;
        let ahead = self.waiters.values().map(|waiter| &waiter.position).filter(|position| *position < own);
        let first = ahead.clone().min().map(|(_, name)| name.clone());
        (u32::try_from(ahead.count()).unwrap_or(u32::MAX), first)
    }

    /// Removes a run.
    pub(in crate::runs) fn remove(&mut self, run: RunId) {
        self.waiters.remove(&run);
    }

    /// Returns whether the holder of the turn must be checked at `now`.
    pub(in crate::runs) fn is_holder_check_due(&mut self, now: Instant) -> bool {
        let is_due =
            self.last_holder_check.is_none_or(|last| now.saturating_duration_since(last) >= HOLDER_CHECK_INTERVAL);
        if is_due {
            self.last_holder_check = Some(now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_is_checked_at_intervals() {
        let (mut queue, start) = (TurnQueue::default(), Instant::now());
        assert!(queue.is_holder_check_due(start));
        assert!(!queue.is_holder_check_due(start + HOLDER_CHECK_INTERVAL / 2));
        assert!(queue.is_holder_check_due(start + HOLDER_CHECK_INTERVAL));
    }

    #[test]
    fn runs_queue_by_submission_and_name_and_leave_when_they_stop_asking() {
        let mut waiting = TurnQueue::default();
        let start = Instant::now();
        let mut enqueue = |run: u128, submitted, name: &str, after_ms| {
            waiting.enqueue(RunId(run), (submitted, name.to_owned()), start + Duration::from_millis(after_ms))
        };
        assert_eq!(enqueue(1, 20, "late", 0), (0, None));
        assert_eq!(enqueue(2, 10, "b", 100), (0, None));
        assert_eq!(enqueue(3, 10, "a", 100), (0, None));
        assert_eq!(enqueue(2, 10, "b", 200), (1, Some("a".into())));
        assert_eq!(enqueue(1, 20, "late", 300), (2, Some("a".into())));
        assert_eq!(enqueue(1, 20, "late", 2_150), (1, Some("b".into())), "a asked last after 100 ms");
        waiting.remove(RunId(2));
        assert_eq!(waiting.enqueue(RunId(1), (20, "late".into()), start + Duration::from_millis(2_150)), (0, None));
    }
}
