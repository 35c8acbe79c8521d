//! What came of a fault, and whether that is what was promised.

use super::clients::{Closed, Longest};
use serde::Serialize;
use std::time::Duration;

/// How long a write may be held up by a failure: the budget of the design.
const FAILURE: Duration = Duration::from_millis(2_500);

/// What clients may notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Promise {
    /// Something broke.
    Failure,
    /// A planned change.
    Planned,
}

/// Result of a fault.
pub(super) struct Over {
    /// From its beginning until all copies were whole.
    pub(super) whole: Duration,
    /// Whom it hit, and the like.
    pub(super) note: String,
}

impl Over {
    /// Both, one after the other.
    pub(super) fn and(self, next: &Self) -> Self {
        Self { whole: self.whole.max(next.whole), note: format!("{}; {}", self.note, next.note) }
    }
}

/// A fault that is over.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Event {
    pub(super) fault: &'static str,
    pub(super) acknowledged: u64,
    pub(super) lost: u64,
    pub(super) doubled: u64,
    pub(super) conjured: u64,
    pub(super) gap_ms: u64,
    pub(super) budget_ms: u64,
    pub(super) whole_ms: u64,
    pub(super) note: String,
}

impl Event {
    pub(super) fn new(fault: &'static str, closed: &Closed, budget: Duration, over: Over) -> Self {
        let ms = |time: Duration| time.as_millis() as u64;
        Self {
            fault,
            acknowledged: closed.acknowledged,
            lost: closed.tally.lost,
            doubled: closed.tally.doubled,
            conjured: closed.tally.conjured,
            gap_ms: ms(closed.gap),
            budget_ms: ms(budget),
            whole_ms: ms(over.whole),
            note: match closed.longest {
                Some(Longest { partition, after, machine }) => format!(
                    "{}; the longest gap was of partition {partition}, {:.1} s on: processors idle for {:.2} s, taken away for {:.2} s",
                    over.note,
                    after.as_secs_f64(),
                    machine.idle.as_secs_f64(),
                    machine.stolen.as_secs_f64(),
                ),
                None => over.note,
            },
        }
    }

    /// Whether a write waited longer than it may.
    pub(super) const fn missed(&self) -> bool {
        self.gap_ms > self.budget_ms
    }
}

impl Promise {
    /// How long a write may wait, where a planned change has `planned`.
    pub(super) const fn budget(self, planned: Duration) -> Duration {
        match self {
            Self::Failure => FAILURE,
            Self::Planned => planned,
        }
    }
}

impl std::fmt::Display for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { acknowledged, lost, doubled, gap_ms, budget_ms, whole_ms, note, .. } = self;
        let second = |ms: u64| ms as f64 / 1_000.0;
        write!(
            f,
            "{acknowledged} acknowledged, {lost} lost, {doubled} doubled; write gap {:.2} s ({} {:.2} s); copies whole after {:.1} s; {note}",
            second(*gap_ms),
            if self.missed() { "MISSED" } else { "of" },
            second(*budget_ms),
            second(*whole_ms),
        )
    }
}
