//! Who waits for the turn, in the order in which they get it.
//!
//! It is kept in memory by the primary of the partition that keeps the turn: each run asks several times a second, so that another primary
//! knows them all within a moment.

use engram_memory::RunId;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long a run that no longer asks keeps its place: ten questions.
const SILENCE: Duration = Duration::from_secs(2);

/// The runs that ask for the turn.
#[derive(Debug, Default)]
pub(crate) struct Waiting(BTreeMap<RunId, Waiter>);

#[derive(Debug)]
struct Waiter {
    /// When it was submitted, in milliseconds since 1970, and its name.
    place: (u64, String),
    asked: Instant,
}

impl Waiting {
    /// A run asks at `now`: how many came before it, and the name of the first of them.
    pub(super) fn ask(&mut self, run: RunId, place: (u64, String), now: Instant) -> (u32, Option<String>) {
        self.0.insert(run, Waiter { place, asked: now });
        self.0.retain(|_, waiter| now.saturating_duration_since(waiter.asked) < SILENCE);
        let own = &self.0[&run].place;
        let before = self.0.values().map(|waiter| &waiter.place).filter(|place| *place < own);
        let first = before.clone().min().map(|(_, name)| name.clone());
        (u32::try_from(before.count()).unwrap_or(u32::MAX), first)
    }

    /// It waits no longer.
    pub(super) fn leave(&mut self, run: RunId) {
        self.0.remove(&run);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_who_was_submitted_first_then_by_name_and_who_no_longer_asks_is_forgotten() {
        let mut waiting = Waiting::default();
        let began = Instant::now();
        let mut ask = |run: u128, submitted, name: &str, after_ms| {
            waiting.ask(RunId(run), (submitted, name.to_owned()), began + Duration::from_millis(after_ms))
        };
        assert_eq!(ask(1, 20, "late", 0), (0, None));
        assert_eq!(ask(2, 10, "b", 100), (0, None));
        assert_eq!(ask(3, 10, "a", 100), (0, None));
        assert_eq!(ask(2, 10, "b", 200), (1, Some("a".into())));
        assert_eq!(ask(1, 20, "late", 300), (2, Some("a".into())));
        assert_eq!(ask(1, 20, "late", 2_150), (1, Some("b".into())), "a was heard of last after 100 ms");
        waiting.leave(RunId(2));
        assert_eq!(waiting.ask(RunId(1), (20, "late".into()), began + Duration::from_millis(2_150)), (0, None));
    }
}
