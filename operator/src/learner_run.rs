//! A learning run: what is handed to the workers, and its status from what they say.

use engram_api::status::{Condition, LearnerRunStatus, Progress, RunPhase, Truth, condition};
use engram_api::{LearnerRunSpec, Source, parse_object};
use engram_proto::v1;
use serde_json::Value;

use crate::report::turn;
use crate::validate::Refused;

/// The run has ended well.
const COMPLETE: &str = "Complete";
/// The run has ended otherwise.
const FAILED: &str = "Failed";

/// What is known of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum Told {
    /// Its spec is refused.
    Refused(String),
    /// It is not handed over yet.
    Waiting {
        /// Why, in one word.
        reason: &'static str,
        /// Why, in a sentence.
        message: String,
    },
    /// It is not handed over, since its spec says so.
    Suspended,
    /// The workers have it.
    Seen(Seen),
}

/// What the workers say of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    /// How it stands.
    pub phase: v1::RunPhase,
    /// Epochs that are done.
    pub epoch: u64,
    /// Epochs in all; 0 = not known yet.
    pub epochs: u64,
    /// Seconds to go; negative = not known.
    pub eta_seconds: f64,
    /// Pod of the worker that drives it.
    pub driver: Option<String>,
    /// Figures by name.
    pub metrics: Vec<(String, f64)>,
    /// Error, or what it is waiting for.
    pub message: String,
}

/// Checks `object`, a `LearnerRun` as JSON.
///
/// # Errors
/// What is wrong with it, and what is not supported on Kubernetes: sources that a pod cannot read.
pub fn validate_run(object: &Value) -> Result<LearnerRunSpec, Refused> {
    let manifest = parse_object(object).map_err(|problems| {
        let sentences: Vec<&str> = problems.iter().map(|problem| problem.message()).collect();
        Refused { message: sentences.join("; ") }
    })?;
    let run = manifest.runs.into_iter().next().ok_or_else(|| Refused { message: "kind is not LearnerRun".into() })?;
    // The definitions leave this one to a person's own machine; a pod has no such file.
    if let Some(Source::Events(_)) = run.spec.memory.as_ref().map(|memory| &memory.source) {
        let message = "spec.memory.source.events is not supported yet on Kubernetes: use example or synthetic";
        return Err(Refused { message: message.into() });
    }
    Ok(run.spec)
}

/// Whether the run has ended, well or not.
pub fn is_over(status: &LearnerRunStatus) -> bool {
    matches!(status.phase, Some(RunPhase::Complete | RunPhase::Failed)) && status.completion_time.is_some()
}

/// Makes the status of a run. `now` (RFC 3339) is the time of what changes.
pub fn run_status(old: &LearnerRunStatus, generation: i64, told: &Told, now: &str) -> LearnerRunStatus {
    let mut status = old.clone();
    status.observed_generation = Some(generation);
    let conditions = &mut status.conditions;
    let mut set = |kind: &str, truth: Truth, reason: &str, message: &str| {
        turn(
            conditions,
            Condition {
                kind: kind.to_owned(),
                status: truth,
                reason: reason.to_owned(),
                message: message.to_owned(),
                observed_generation: Some(generation),
                last_transition_time: now.to_owned(),
            },
        );
    };
    let (phase, reason, message) = match told {
        Told::Refused(message) => {
            set(condition::ACCEPTED, Truth::False, "Invalid", message);
            status.phase = Some(RunPhase::Pending);
            return status;
        }
        Told::Waiting { reason, message } => (RunPhase::Pending, *reason, message.clone()),
        Told::Suspended => (RunPhase::Suspended, "Suspended", "spec.suspend is true".into()),
        Told::Seen(seen) => match seen.phase {
            // Another run has the turn.
            v1::RunPhase::Unspecified | v1::RunPhase::Queued => (RunPhase::Pending, "Queued", seen.message.clone()),
            v1::RunPhase::Running => (RunPhase::Running, "Running", epochs(seen)),
            v1::RunPhase::Succeeded => (RunPhase::Complete, "Succeeded", epochs(seen)),
            v1::RunPhase::Failed => (RunPhase::Failed, "RunFailed", seen.message.clone()),
            v1::RunPhase::Cancelled => (RunPhase::Failed, "Cancelled", epochs(seen)),
        },
    };
    let is = |holds: bool| if holds { Truth::True } else { Truth::False };
    set(condition::ACCEPTED, Truth::True, "Valid", "");
    set(condition::SUSPENDED, is(phase == RunPhase::Suspended), reason, "");
    set(COMPLETE, is(phase == RunPhase::Complete), reason, &message);
    set(FAILED, is(phase == RunPhase::Failed), reason, if phase == RunPhase::Failed { &message } else { "" });
    status.phase = Some(phase);
    if let Told::Seen(seen) = told {
        let since = || Some(now.to_owned());
        status.start_time = status.start_time.or_else(since);
        if matches!(phase, RunPhase::Complete | RunPhase::Failed) {
            status.completion_time = status.completion_time.or_else(since);
        }
        status.queue_position = (phase != RunPhase::Pending).then_some(0);
        status.driver.clone_from(&seen.driver);
        let count = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let left = phase == RunPhase::Running && seen.eta_seconds >= 0.0;
        status.progress = Some(Progress {
            epoch: count(seen.epoch),
            total: Some(count(seen.epochs)).filter(|total| *total > 0),
            eta: left.then(|| engram_api::Duration::from_millis(seen.eta_seconds.round() as u64 * 1_000).to_string()),
            metrics: seen.metrics.iter().map(|(name, value)| (name.clone(), value.to_string())).collect(),
        });
    }
    status
}

fn epochs(seen: &Seen) -> String {
    match seen.epochs {
        0 => format!("{} epochs done", seen.epoch),
        all => format!("epoch {} of {all}", seen.epoch),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn truth(status: &LearnerRunStatus, kind: &str) -> (Truth, String) {
        let found = status.conditions.iter().find(|known| known.kind == kind).expect("it is there");
        (found.status, found.last_transition_time.clone())
    }

    #[test]
    fn a_run_is_told_from_its_wait_to_its_end_and_keeps_its_times() {
        let waiting = Told::Waiting { reason: "ClusterNotFound", message: "there is no LearnerCluster words".into() };
        let first = run_status(&LearnerRunStatus::default(), 1, &waiting, "t0");
        assert_eq!((first.phase, first.start_time.as_deref()), (Some(RunPhase::Pending), None));

        let seen = Seen { phase: v1::RunPhase::Running, epoch: 3, epochs: 50, eta_seconds: 40.6, ..Seen::default() };
        let running = run_status(&first, 1, &Told::Seen(seen.clone()), "t1");
        let progress = running.progress.clone().expect("it runs");
        assert_eq!((progress.epoch, progress.total, progress.eta.as_deref()), (3, Some(50), Some("41s")));
        assert!(!is_over(&running));
        let metrics = vec![("convergence".into(), 12.5)];
        let done = Seen { phase: v1::RunPhase::Succeeded, epoch: 50, eta_seconds: 0.0, metrics, ..seen };
        let complete = run_status(&running, 1, &Told::Seen(done.clone()), "t2");
        let times = (complete.start_time.as_deref(), complete.completion_time.as_deref());
        assert_eq!((complete.phase, times), (Some(RunPhase::Complete), (Some("t1"), Some("t2"))));
        assert_eq!(complete.progress.as_ref().expect("it ran").metrics["convergence"], "12.5");
        assert!(is_over(&complete));
        assert_eq!(run_status(&complete, 1, &Told::Seen(done), "t3"), complete, "nothing new is no change");
        assert_eq!(truth(&complete, COMPLETE), (Truth::True, "t2".into()));
        assert_eq!(truth(&complete, FAILED), (Truth::False, "t0".into()));
        let failed = Seen { phase: v1::RunPhase::Failed, message: "ENG-0601: no".into(), ..Seen::default() };
        let failed = run_status(&running, 1, &Told::Seen(failed), "t4");
        assert_eq!((truth(&failed, FAILED).0, is_over(&failed)), (Truth::True, true));
    }

    #[test]
    fn what_workers_in_pods_cannot_read_is_refused_by_name() {
        let run = |source: Value| {
            validate_run(&json!({
                "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerRun", "metadata": { "name": "r", "namespace": "n" },
                "spec": { "clusterRef": { "name": "words" }, "kind": "Memory", "memory": { "source": source } },
            }))
        };
        assert!(run(json!({ "example": { "name": "StateOfTheUnion" } })).is_ok());
        let columns = json!({ "key": "word", "epoch": "address" });
        for (source, settings) in
            [("git", json!({ "path": "/src" })), ("events", json!({ "path": "/src/events.csv", "columns": columns }))]
        {
            let refused = run(json!({ source: settings })).expect_err("pods cannot read it").message;
            assert!(refused.contains(&format!("spec.memory.source.{source} is not supported yet")), "{refused}");
        }
    }
}
