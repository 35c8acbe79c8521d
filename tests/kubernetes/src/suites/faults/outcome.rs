//! What came of a fault, and whether that is what was promised.

use super::clients::{Closed, Longest};
use engram_faults::outcome::FaultReport;
use serde_json::{Value, json};
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

/// Returns the report of a fault that is over.
pub(super) fn report(fault: &'static str, closed: &Closed, budget: Duration, over: Over) -> FaultReport {
    let target = match closed.longest {
        Some(Longest { partition, after, machine }) => format!(
            "{}; the longest gap was of partition {partition}, {:.1} s on: processors idle for {:.2} s, taken away for {:.2} s",
            over.note,
            after.as_secs_f64(),
            machine.idle.as_secs_f64(),
            machine.stolen.as_secs_f64(),
        ),
        None => over.note,
    };
    FaultReport {
        kind: fault,
        target,
        restored: over.whole,
        outages: vec![closed.gap],
        budget: Some(budget),
        acknowledged: closed.acknowledged,
        ledger: closed.tally,
        ..FaultReport::default()
    }
}

/// Describes a fault in one line.
pub(super) fn describe(fault: &FaultReport) -> String {
    let FaultReport { acknowledged, ledger, restored, target, .. } = fault;
    format!(
        "{acknowledged} acknowledged, {} lost, {} doubled; write gap {:.2} s ({} {:.2} s); copies whole after {:.1} s; {target}",
        ledger.lost,
        ledger.doubled,
        fault.longest().as_secs_f64(),
        if fault.exceeds_budget() { "MISSED" } else { "of" },
        fault.budget.unwrap_or_default().as_secs_f64(),
        restored.as_secs_f64(),
    )
}

/// Returns a fault as the file of a campaign has it.
pub(super) fn to_json(fault: &FaultReport) -> Value {
    let ms = |time: Duration| time.as_millis() as u64;
    json!({
        "fault": fault.kind,
        "acknowledged": fault.acknowledged,
        "lost": fault.ledger.lost,
        "doubled": fault.ledger.doubled,
        "conjured": fault.ledger.conjured,
        "gapMs": ms(fault.longest()),
        "budgetMs": ms(fault.budget.unwrap_or_default()),
        "wholeMs": ms(fault.restored),
        "note": fault.target,
    })
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
