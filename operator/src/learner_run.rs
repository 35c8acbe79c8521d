//! A learning run: what is handed to the workers, and its status from what they say.

use engram_api::status::{Condition, LearnerRunStatus, Progress, RunPhase, SnapshotResult, Truth, condition};
use engram_api::{LearnerRunSpec, parse_object};
use engram_proto::v1;
use serde_json::Value;

use crate::queue::Wait;
use crate::report::turn;
use crate::validate::Refused;

/// Others have the turn.
const QUEUED: &str = "Queued";
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
    /// Other runs are before it.
    Queued(Wait),
    /// It is not handed over, since its spec says so.
    Suspended,
    /// It will never be handed over.
    Failed {
        /// Why, in one word.
        reason: &'static str,
        /// Why, in a sentence.
        message: String,
    },
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
    /// Whether it is a snapshot.
    pub is_snapshot: bool,
    /// What a snapshot has written.
    pub written: Option<SnapshotResult>,
}

/// Checks `object`, a `LearnerRun` as JSON.
///
/// # Errors
/// What is wrong with it, and what is not supported in Kubernetes: sources that a pod cannot read.
pub fn validate_run(object: &Value) -> Result<LearnerRunSpec, Refused> {
    let manifest = parse_object(object).map_err(|problems| {
        let sentences: Vec<&str> = problems.iter().map(|problem| problem.message()).collect();
        Refused { message: sentences.join("; ") }
    })?;
    let run = manifest.runs.into_iter().next().ok_or_else(|| Refused { message: "kind is not LearnerRun".into() })?;
    Ok(run.spec)
}

/// Whether the run has ended, well or not.
pub fn is_over(status: &LearnerRunStatus) -> bool {
    matches!(status.phase, Some(RunPhase::Complete | RunPhase::Failed)) && status.completion_time.is_some()
}

/// Makes the status of a run. `now` (RFC 3339) is the time of what changes; `suspend` is what its spec says.
pub fn run_status(
    old: &LearnerRunStatus,
    (generation, suspend): (i64, bool),
    told: &Told,
    now: &str,
) -> LearnerRunStatus {
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
            status.queue_position = None;
            return status;
        }
        Told::Waiting { reason, message } => (RunPhase::Pending, *reason, message.clone()),
        Told::Queued(wait) => {
            let others =
                if wait.position > 1 { format!(", and {} before it", wait.position - 1) } else { String::new() };
            (RunPhase::Pending, QUEUED, format!("waits for run {} to end{others}", wait.first))
        }
        Told::Failed { reason, message } => (RunPhase::Failed, *reason, message.clone()),
        Told::Suspended => (RunPhase::Suspended, "Suspended", "spec.suspend is true".into()),
        Told::Seen(seen) => match seen.phase {
            // It waits for nobody else.
            v1::RunPhase::Unspecified | v1::RunPhase::Queued if seen.is_snapshot => {
                (RunPhase::Pending, "Starting", seen.message.clone())
            }
            // Another run has the turn.
            v1::RunPhase::Unspecified | v1::RunPhase::Queued => (RunPhase::Pending, QUEUED, seen.message.clone()),
            v1::RunPhase::Running if suspend => (RunPhase::Running, "Suspending", steps(seen)),
            v1::RunPhase::Running => (RunPhase::Running, "Running", steps(seen)),
            v1::RunPhase::Suspended => (RunPhase::Suspended, "Suspended", steps(seen)),
            v1::RunPhase::Succeeded => (RunPhase::Complete, "Succeeded", steps(seen)),
            v1::RunPhase::Failed => (RunPhase::Failed, "RunFailed", seen.message.clone()),
            v1::RunPhase::Cancelled => (RunPhase::Failed, "Cancelled", steps(seen)),
        },
    };
    let is = |holds: bool| if holds { Truth::True } else { Truth::False };
    set(condition::ACCEPTED, Truth::True, "Valid", "");
    set(condition::SUSPENDED, is(phase == RunPhase::Suspended), reason, "");
    set(COMPLETE, is(phase == RunPhase::Complete), reason, &message);
    set(FAILED, is(phase == RunPhase::Failed), reason, if phase == RunPhase::Failed { &message } else { "" });
    status.phase = Some(phase);
    let since = || Some(now.to_owned());
    status.queue_position = match told {
        Told::Queued(wait) => Some(wait.position),
        // Somebody submitted another one past this operator.
        Told::Seen(seen) if phase == RunPhase::Pending && !seen.message.is_empty() && !seen.is_snapshot => Some(1),
        Told::Seen(_) if phase == RunPhase::Running => Some(0),
        _ => None,
    };
    if phase != RunPhase::Running {
        status.driver = None;
    }
    if let Told::Failed { .. } = told {
        status.completion_time = status.completion_time.or_else(since);
    }
    if let Told::Seen(seen) = told {
        status.start_time = status.start_time.or_else(since);
        if matches!(phase, RunPhase::Complete | RunPhase::Failed) {
            status.completion_time = status.completion_time.or_else(since);
        }
        status.driver.clone_from(&seen.driver);
        status.snapshot.clone_from(&seen.written);
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

/// How far it is.
fn steps(seen: &Seen) -> String {
    let (one, many) = if seen.is_snapshot { ("partition", "partitions") } else { ("epoch", "epochs") };
    let done = match seen.epochs {
        0 => format!("{} {many} done", seen.epoch),
        all => format!("{one} {} of {all}", seen.epoch),
    };
    // What it does before the first one, or waits for.
    let is_running = seen.phase == v1::RunPhase::Running && !seen.message.is_empty();
    if is_running { format!("{done}; {}", seen.message) } else { done }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn truth(status: &LearnerRunStatus, kind: &str) -> (Truth, String) {
        let found = status.conditions.iter().find(|known| known.kind == kind).expect("it is there");
        (found.status, found.last_transition_time.clone())
    }

    fn told(old: &LearnerRunStatus, told: &Told, now: &str) -> LearnerRunStatus {
        run_status(old, (1, false), told, now)
    }

    #[test]
    fn a_run_that_waits_says_for_whom_and_one_that_is_suspended_keeps_its_place() {
        let reason = |status: &LearnerRunStatus| {
            let found = status.conditions.iter().find(|known| known.kind == COMPLETE).expect("it is there");
            (found.reason.clone(), found.message.clone())
        };
        let wait = Wait { position: 3, first: "nightly".into() };
        let queued = told(&LearnerRunStatus::default(), &Told::Queued(wait), "t0");
        assert_eq!((queued.phase, queued.queue_position), (Some(RunPhase::Pending), Some(3)));
        assert_eq!(reason(&queued), ("Queued".into(), "waits for run nightly to end, and 2 before it".into()));
        let seen =
            Seen { phase: v1::RunPhase::Running, epoch: 3, epochs: 50, driver: Some("w-0".into()), ..Seen::default() };
        let running = told(&queued, &Told::Seen(seen.clone()), "t1");
        assert_eq!((running.queue_position, running.driver.as_deref()), (Some(0), Some("w-0")));
        let stopping = run_status(&running, (2, true), &Told::Seen(seen.clone()), "t2");
        assert_eq!((stopping.phase, reason(&stopping).0), (Some(RunPhase::Running), "Suspending".into()));
        assert_eq!(truth(&stopping, condition::SUSPENDED).0, Truth::False);
        let seen = Seen { phase: v1::RunPhase::Suspended, driver: None, epoch: 4, ..seen };
        let suspended = run_status(&stopping, (2, true), &Told::Seen(seen), "t3");
        assert_eq!((suspended.phase, suspended.queue_position), (Some(RunPhase::Suspended), None));
        assert_eq!(truth(&suspended, condition::SUSPENDED), (Truth::True, "t3".into()));
        assert_eq!((suspended.driver, suspended.progress.map(|it| it.epoch)), (None, Some(4)));
        let gone = Told::Failed { reason: "InputNotFound", message: "there is no ConfigMap sales".into() };
        let failed = told(&queued, &gone, "t4");
        assert!(is_over(&failed) && failed.start_time.is_none() && failed.queue_position.is_none());
        assert_eq!(truth(&failed, FAILED).0, Truth::True);
    }

    #[test]
    fn a_run_is_told_from_its_wait_to_its_end_and_keeps_its_times() {
        let waiting = Told::Waiting { reason: "ClusterNotFound", message: "there is no LearnerCluster words".into() };
        let first = told(&LearnerRunStatus::default(), &waiting, "t0");
        assert_eq!((first.phase, first.start_time.as_deref()), (Some(RunPhase::Pending), None));

        let seen = Seen { phase: v1::RunPhase::Running, epoch: 3, epochs: 50, eta_seconds: 40.6, ..Seen::default() };
        let running = told(&first, &Told::Seen(seen.clone()), "t1");
        let fetching = Seen { message: "fetches s3://events/a.csv: 3 of 5 MiB".into(), ..seen.clone() };
        let fetching = told(&first, &Told::Seen(fetching), "t1");
        let said = "epoch 3 of 50; fetches s3://events/a.csv: 3 of 5 MiB";
        assert!(fetching.conditions.iter().any(|it| it.kind == COMPLETE && it.message == said), "{fetching:?}");
        let progress = running.progress.clone().expect("it runs");
        assert_eq!((progress.epoch, progress.total, progress.eta.as_deref()), (3, Some(50), Some("41s")));
        assert!(!is_over(&running));
        let metrics = vec![("convergence".into(), 12.5)];
        let done = Seen { phase: v1::RunPhase::Succeeded, epoch: 50, eta_seconds: 0.0, metrics, ..seen };
        let complete = told(&running, &Told::Seen(done.clone()), "t2");
        let times = (complete.start_time.as_deref(), complete.completion_time.as_deref());
        assert_eq!((complete.phase, times), (Some(RunPhase::Complete), (Some("t1"), Some("t2"))));
        assert_eq!(complete.progress.as_ref().expect("it ran").metrics["convergence"], "12.5");
        assert!(is_over(&complete));
        assert_eq!(told(&complete, &Told::Seen(done), "t3"), complete, "nothing new is no change");
        assert_eq!(truth(&complete, COMPLETE), (Truth::True, "t2".into()));
        assert_eq!(truth(&complete, FAILED), (Truth::False, "t0".into()));
        let snapshot = Seen { is_snapshot: true, epoch: 3, epochs: 16, phase: v1::RunPhase::Queued, ..Seen::default() };
        let waits = told(&first, &Told::Seen(Seen { message: "waits".into(), ..snapshot.clone() }), "t1");
        assert_eq!((waits.phase, waits.queue_position), (Some(RunPhase::Pending), None), "it is in nobody's queue");
        let written = SnapshotResult { digest: "d".into(), partitions: 16, ..SnapshotResult::default() };
        let kept = Seen { phase: v1::RunPhase::Succeeded, written: Some(written.clone()), ..snapshot };
        let kept = told(&waits, &Told::Seen(kept), "t2");
        assert_eq!((kept.snapshot.as_ref(), is_over(&kept)), (Some(&written), true));
        assert!(kept.conditions.iter().any(|it| it.message == "partition 3 of 16"));
        let failed = Seen { phase: v1::RunPhase::Failed, message: "ENG-0601: no".into(), ..Seen::default() };
        let failed = told(&running, &Told::Seen(failed), "t4");
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
        let file = json!({ "name": "sales", "key": "events.csv" });
        assert!(run(json!({ "events": { "configMap": file, "columns": columns } })).is_ok());
        let stored = json!({ "url": "s3://events/a.csv", "secretRef": { "name": "s3" } });
        assert!(run(json!({ "events": { "s3": stored, "columns": columns } })).is_ok());
        assert!(run(json!({ "events": { "input": "corpus", "path": "events.csv", "columns": columns } })).is_ok());
        for (source, settings, said) in [
            ("git", json!({ "path": "/src" }), "spec.memory.source.git is not supported yet"),
            ("events", json!({ "path": "/src/events.csv", "columns": columns }), "events.path without input is a file"),
            ("events", json!({ "input": "corpus", "path": "../a.csv", "columns": columns }), "inside of the volume"),
        ] {
            let refused = run(json!({ source: settings })).expect_err("pods cannot read it").message;
            assert!(refused.contains(said), "{refused}");
        }
    }
}
