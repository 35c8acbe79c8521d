//! The end of a run for metrics, and the events of its phases.

use engram_api::status::{LearnerRunStatus, RunPhase};

use crate::kube::stored_object::StoredObject as _;
use crate::learner_run::object::RunObject;
use crate::learner_run::status::{CANCELLED, COMPLETE, FAILED, condition_of, is_backing_off};

/// Result of a run that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunResult {
    /// It is complete.
    Succeeded,
    /// It failed.
    Failed,
    /// It was cancelled.
    Cancelled,
}

impl RunResult {
    /// All results.
    pub const ALL: [Self; 3] = [Self::Succeeded, Self::Failed, Self::Cancelled];

    /// Returns the value of the label `result` of metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// A run that has ended, for metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndedRun {
    /// Name of its cluster.
    pub cluster: String,
    /// `spec.kind`.
    pub kind: String,
    /// Result.
    pub result: RunResult,
    /// When it ended, RFC 3339.
    pub ended: String,
}

impl EndedRun {
    /// Returns the ended run of an object with `status`; `None` if it has not ended.
    pub fn of(run: &RunObject, status: &LearnerRunStatus) -> Option<Self> {
        let result = match status.phase? {
            RunPhase::Complete => RunResult::Succeeded,
            RunPhase::Failed if condition_of(status, FAILED).is_some_and(|failed| failed.reason == CANCELLED) => {
                RunResult::Cancelled
            }
            RunPhase::Failed => RunResult::Failed,
            RunPhase::Pending | RunPhase::Running | RunPhase::Suspended => return None,
        };
        let ended = status.completion_time.clone()?;
        Some(Self { cluster: run.cluster().to_owned(), kind: run.head().kind.clone(), result, ended })
    }
}

/// A Kubernetes event about a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunEvent {
    /// Whether it is a warning.
    pub is_warning: bool,
    /// Machine-readable reason.
    pub reason: &'static str,
    /// Human-readable explanation.
    pub note: String,
}

/// Returns the event of a change of the phase; `None` if the phase has not changed, or nothing has happened that a user acts on.
pub fn run_event(old: &LearnerRunStatus, new: &LearnerRunStatus) -> Option<RunEvent> {
    if old.phase == new.phase {
        return None;
    }
    let message = |kind: &str| condition_of(new, kind).map_or_else(String::new, |condition| condition.message.clone());
    let event = |is_warning, reason, note: String| Some(RunEvent { is_warning, reason, note });
    match new.phase? {
        RunPhase::Pending if is_backing_off(new) => event(true, "Retrying", message(COMPLETE)),
        RunPhase::Pending => None,
        RunPhase::Running => {
            let pod = new.driver.as_ref().map_or_else(String::new, |pod| format!(", driven by pod {pod}"));
            let is_resumed = old.phase == Some(RunPhase::Suspended) && old.start_time.is_some();
            let (reason, verb) = if is_resumed { ("Resumed", "resumed") } else { ("Started", "started") };
            event(false, reason, format!("{verb}{pod}"))
        }
        RunPhase::Suspended => event(false, "Suspended", message(COMPLETE)),
        RunPhase::Complete => {
            let digest = new.outputs.get("digest").map_or_else(String::new, |digest| format!("; digest {digest}"));
            event(false, "Completed", format!("{}{digest}", message(COMPLETE)))
        }
        RunPhase::Failed => {
            let reason = if condition_of(new, FAILED).is_some_and(|failed| failed.reason == CANCELLED) {
                CANCELLED
            } else {
                FAILED
            };
            event(true, reason, message(FAILED))
        }
    }
}
