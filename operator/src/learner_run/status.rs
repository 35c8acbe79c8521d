//! The status of a run.

use engram_api::status::{Condition, LearnerRunStatus, Progress, RunPhase, Truth, condition};
use engram_proto::v1;

use crate::kube::conditions::set_condition;
use crate::learner_run::state::{RunReport, RunState, progress_text};

/// Other runs are ahead.
pub(super) const QUEUED: &str = "Queued";
/// The run has succeeded.
pub(super) const COMPLETE: &str = "Complete";
/// The run has failed.
pub(super) const FAILED: &str = "Failed";
/// Reason of a run that was cancelled.
pub(super) const CANCELLED: &str = "Cancelled";

/// Reason of a run that waits for its next retry.
const BACK_OFF: &str = "BackOff";

/// Returns whether the run waits for its next retry, or has not been submitted again yet.
pub fn is_backing_off(status: &LearnerRunStatus) -> bool {
    status.retry_time.is_some()
}

/// Returns the number of the retry that follows the failed attempt of `report`; `None` if the run has not failed, or has no retries left.
pub fn next_retry(old: &LearnerRunStatus, backoff_limit: u32, report: &RunReport) -> Option<u32> {
    let number = old.retries.unwrap_or_default() + 1;
    (report.phase == v1::RunPhase::Failed && number <= backoff_limit).then_some(number)
}

/// Returns the message of the condition `Failed`.
pub fn failure_message(status: &LearnerRunStatus) -> String {
    condition_of(status, FAILED).map_or_else(String::new, |failed| failed.message.clone())
}

/// Returns whether the run has ended, successfully or not.
pub fn is_over(status: &LearnerRunStatus) -> bool {
    matches!(status.phase, Some(RunPhase::Complete | RunPhase::Failed)) && status.completion_time.is_some()
}

pub(super) fn condition_of<'a>(status: &'a LearnerRunStatus, kind: &str) -> Option<&'a Condition> {
    status.conditions.iter().find(|condition| condition.kind == kind)
}

/// Computes the status of a run. `now` (RFC 3339) is the transition time of changes; `suspend` is that of the spec.
pub fn run_status(
    old: &LearnerRunStatus,
    (generation, suspend): (i64, bool),
    state: &RunState,
    now: &str,
) -> LearnerRunStatus {
    let mut status = old.clone();
    status.observed_generation = Some(generation);
    let conditions = &mut status.conditions;
    let mut set = |kind: &str, truth: Truth, reason: &str, message: &str| {
        set_condition(
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
    if let RunState::InvalidSpec(message) = state {
        set(condition::ACCEPTED, Truth::False, "Invalid", message);
        status.phase = Some(RunPhase::Pending);
        status.queue_position = None;
        return status;
    }
    let (phase, reason, message) = phase(state, suspend);
    let is = |holds: bool| if holds { Truth::True } else { Truth::False };
    set(condition::ACCEPTED, Truth::True, "Valid", "");
    set(condition::SUSPENDED, is(phase == RunPhase::Suspended), reason, "");
    set(COMPLETE, is(phase == RunPhase::Complete), reason, &message);
    set(FAILED, is(phase == RunPhase::Failed), reason, if phase == RunPhase::Failed { &message } else { "" });
    status.phase = Some(phase);
    status.queue_position = queue_position(state, phase);
    if phase != RunPhase::Running {
        status.driver = None;
    }
    match state {
        RunState::BackOff(retry) => {
            (status.retries, status.retry_time) = (Some(retry.number), Some(retry.time.clone()));
        }
        RunState::Failed { .. } => {
            status.retry_time = None;
            status.completion_time.get_or_insert_with(|| now.to_owned());
        }
        RunState::Submitted(report) => set_report(&mut status, report, phase, now),
        _ => {}
    }
    status
}

/// Returns the phase of a run with a valid spec, with reason and message of its conditions.
fn phase(state: &RunState, suspend: bool) -> (RunPhase, &'static str, String) {
    match state {
        RunState::InvalidSpec(message) => (RunPhase::Pending, "Invalid", message.clone()),
        RunState::Pending { reason, message } => (RunPhase::Pending, *reason, message.clone()),
        RunState::Queued(wait) => {
            let others = if wait.position > 1 { format!(" and {} more", wait.position - 1) } else { String::new() };
            (RunPhase::Pending, QUEUED, format!("queued behind run {}{others}", wait.first))
        }
        RunState::Failed { reason, message } => (RunPhase::Failed, *reason, message.clone()),
        RunState::Suspended => (RunPhase::Suspended, "Suspended", "spec.suspend is true".into()),
        RunState::BackOff(retry) => (RunPhase::Pending, BACK_OFF, retry.message.clone()),
        RunState::Submitted(report) => match report.phase {
            v1::RunPhase::Unspecified | v1::RunPhase::Queued if !report.queues() => {
                (RunPhase::Pending, "Starting", report.message.clone())
            }
            // Another run is in progress.
            v1::RunPhase::Unspecified | v1::RunPhase::Queued => (RunPhase::Pending, QUEUED, report.message.clone()),
            v1::RunPhase::Running if suspend => (RunPhase::Running, "Suspending", progress_text(report)),
            v1::RunPhase::Running => (RunPhase::Running, "Running", progress_text(report)),
            v1::RunPhase::Suspended => (RunPhase::Suspended, "Suspended", progress_text(report)),
            v1::RunPhase::Succeeded => (RunPhase::Complete, "Succeeded", progress_text(report)),
            v1::RunPhase::Failed => (RunPhase::Failed, "RunFailed", report.message.clone()),
            v1::RunPhase::Cancelled => (RunPhase::Failed, CANCELLED, progress_text(report)),
        },
    }
}

/// Returns the number of runs ahead; 0 for one that is running, `None` for one that does not queue.
fn queue_position(state: &RunState, phase: RunPhase) -> Option<u32> {
    match state {
        RunState::Queued(wait) => Some(wait.position),
        // Another run was submitted without this operator.
        RunState::Submitted(report) if phase == RunPhase::Pending && !report.message.is_empty() && report.queues() => {
            Some(1)
        }
        RunState::Submitted(_) if phase == RunPhase::Running => Some(0),
        _ => None,
    }
}

/// Takes over what the workers, or a Job, report of a submitted run.
fn set_report(status: &mut LearnerRunStatus, report: &RunReport, phase: RunPhase, now: &str) {
    status.retry_time = None;
    status.start_time.get_or_insert_with(|| now.to_owned());
    if matches!(phase, RunPhase::Complete | RunPhase::Failed) {
        status.completion_time.get_or_insert_with(|| now.to_owned());
    }
    status.driver.clone_from(&report.driver);
    status.outputs.clone_from(&report.outputs);
    status.snapshot.clone_from(&report.written);
    status.job.clone_from(&report.job);
    let count = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    let is_ended = phase != RunPhase::Running;
    // The workers may have no figures of a run that ended before its driver reported any.
    let kept = status.progress.take().filter(|_| is_ended && report.metrics.is_empty());
    let metrics = report.metrics.iter().map(|(name, value)| (name.clone(), value.to_string())).collect();
    let left = phase == RunPhase::Running && report.eta_seconds >= 0.0;
    status.progress = Some(Progress {
        epoch: count(report.epoch),
        total: Some(count(report.epochs)).filter(|total| *total > 0),
        eta: left.then(|| engram_api::Duration::from_millis(report.eta_seconds.round() as u64 * 1_000).to_string()),
        metrics: kept.map_or(metrics, |kept| kept.metrics),
    });
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use engram_api::RunKind;
    use engram_api::status::SnapshotResult;
    use serde_json::json;

    use super::*;
    use crate::learner_run::object::RunObject;
    use crate::learner_run::queue::Wait;
    use crate::learner_run::{EndedRun, Retry, RunEvent, RunResult, run_event};

    fn truth(status: &LearnerRunStatus, kind: &str) -> (Truth, String) {
        let entry = status.conditions.iter().find(|entry| entry.kind == kind).expect("condition");
        (entry.status, entry.last_transition_time.clone())
    }

    fn next_status(old: &LearnerRunStatus, state: &RunState, now: &str) -> LearnerRunStatus {
        run_status(old, (1, false), state, now)
    }

    #[test]
    fn a_failed_run_is_retried_up_to_its_limit() {
        let failed = RunReport { phase: v1::RunPhase::Failed, message: "no space".into(), ..RunReport::default() };
        let cancelled = RunReport { phase: v1::RunPhase::Cancelled, ..RunReport::default() };
        let old = LearnerRunStatus::default();
        assert_eq!((next_retry(&old, 2, &failed), next_retry(&old, 0, &failed)), (Some(1), None));
        assert_eq!(next_retry(&old, 2, &cancelled), None);
        let retry = Retry { number: 2, time: "t9".into(), message: "attempt 2 failed".into() };
        let waiting = next_status(&old, &RunState::BackOff(retry), "t0");
        assert_eq!((waiting.phase, waiting.retries), (Some(RunPhase::Pending), Some(2)));
        assert!(is_backing_off(&waiting) && waiting.completion_time.is_none());
        assert_eq!(
            run_event(&LearnerRunStatus { phase: Some(RunPhase::Running), ..old }, &waiting).unwrap().reason,
            "Retrying"
        );
        assert_eq!(next_retry(&waiting, 2, &failed), None);
        let ended = next_status(&waiting, &RunState::Submitted(failed), "t1");
        assert!(is_over(&ended) && !is_backing_off(&ended));
    }

    #[test]
    fn a_queued_run_names_the_run_ahead_and_a_suspended_run_keeps_its_progress() {
        let reason = |status: &LearnerRunStatus| {
            let entry = status.conditions.iter().find(|entry| entry.kind == COMPLETE).expect("condition");
            (entry.reason.clone(), entry.message.clone())
        };
        let wait = Wait { position: 3, first: "nightly".into() };
        let queued = next_status(&LearnerRunStatus::default(), &RunState::Queued(wait), "t0");
        assert_eq!((queued.phase, queued.queue_position), (Some(RunPhase::Pending), Some(3)));
        assert_eq!(reason(&queued), ("Queued".into(), "queued behind run nightly and 2 more".into()));
        let report = RunReport {
            phase: v1::RunPhase::Running,
            epoch: 3,
            epochs: 50,
            driver: Some("w-0".into()),
            ..RunReport::default()
        };
        let running = next_status(&queued, &RunState::Submitted(report.clone()), "t1");
        assert_eq!((running.queue_position, running.driver.as_deref()), (Some(0), Some("w-0")));
        let stopping = run_status(&running, (2, true), &RunState::Submitted(report.clone()), "t2");
        assert_eq!((stopping.phase, reason(&stopping).0), (Some(RunPhase::Running), "Suspending".into()));
        assert_eq!(truth(&stopping, condition::SUSPENDED).0, Truth::False);
        let report = RunReport { phase: v1::RunPhase::Suspended, driver: None, epoch: 4, ..report };
        let suspended = run_status(&stopping, (2, true), &RunState::Submitted(report), "t3");
        assert_eq!((suspended.phase, suspended.queue_position), (Some(RunPhase::Suspended), None));
        assert_eq!(truth(&suspended, condition::SUSPENDED), (Truth::True, "t3".into()));
        assert_eq!((suspended.driver, suspended.progress.map(|it| it.epoch)), (None, Some(4)));
        let gone = RunState::Failed { reason: "InputNotFound", message: "there is no ConfigMap sales".into() };
        let failed = next_status(&queued, &gone, "t4");
        assert!(is_over(&failed) && failed.start_time.is_none() && failed.queue_position.is_none());
        assert_eq!(truth(&failed, FAILED).0, Truth::True);
    }

    #[test]
    fn a_run_that_replaces_another_names_it_and_its_progress() {
        let report = RunReport { epoch: 3, epochs: 50, phase: v1::RunPhase::Running, ..RunReport::default() };
        let status = next_status(&LearnerRunStatus::default(), &RunState::replacing("sales", Some(&report)), "t0");
        let entry = status.conditions.iter().find(|entry| entry.kind == COMPLETE).expect("condition");
        let expected =
            "waits until the previous run sales, whose object was deleted, has been cancelled (epoch 3 of 50)";
        assert_eq!((entry.reason.as_str(), entry.message.as_str()), ("ReplacingRun", expected));
        assert_eq!((status.phase, status.start_time), (Some(RunPhase::Pending), None));
    }

    #[test]
    fn a_status_follows_the_run_and_keeps_its_times() {
        let waiting =
            RunState::Pending { reason: "ClusterNotFound", message: "there is no LearnerCluster words".into() };
        let first = next_status(&LearnerRunStatus::default(), &waiting, "t0");
        assert_eq!((first.phase, first.start_time.as_deref()), (Some(RunPhase::Pending), None));

        let report =
            RunReport { phase: v1::RunPhase::Running, epoch: 3, epochs: 50, eta_seconds: 40.6, ..RunReport::default() };
        let running = next_status(&first, &RunState::Submitted(report.clone()), "t1");
        let fetching = RunReport { message: "fetches s3://events/a.csv: 3 of 5 MiB".into(), ..report.clone() };
        let fetching = next_status(&first, &RunState::Submitted(fetching), "t1");
        let expected = "epoch 3 of 50; fetches s3://events/a.csv: 3 of 5 MiB";
        assert!(fetching.conditions.iter().any(|it| it.kind == COMPLETE && it.message == expected), "{fetching:?}");
        let progress = running.progress.clone().expect("it runs");
        assert_eq!((progress.epoch, progress.total, progress.eta.as_deref()), (3, Some(50), Some("41s")));
        assert!(!is_over(&running));
        let metrics = vec![("convergence".into(), 12.5)];
        let outputs = BTreeMap::from([("digest".to_owned(), "9f86".to_owned())]);
        let done =
            RunReport { phase: v1::RunPhase::Succeeded, epoch: 50, eta_seconds: 0.0, metrics, outputs, ..report };
        let complete = next_status(&running, &RunState::Submitted(done.clone()), "t2");
        let times = (complete.start_time.as_deref(), complete.completion_time.as_deref());
        assert_eq!((complete.phase, times), (Some(RunPhase::Complete), (Some("t1"), Some("t2"))));
        assert_eq!(complete.progress.as_ref().expect("it ran").metrics["convergence"], "12.5");
        assert_eq!(complete.outputs["digest"], "9f86");
        let silent = RunReport { metrics: Vec::new(), ..done.clone() };
        let silent = next_status(&complete, &RunState::Submitted(silent), "t2");
        assert_eq!(silent.progress, complete.progress, "figures of an ended run are kept");
        assert!(is_over(&complete));
        assert_eq!(next_status(&complete, &RunState::Submitted(done), "t3"), complete, "nothing new is no change");
        assert_eq!(truth(&complete, COMPLETE), (Truth::True, "t2".into()));
        assert_eq!(truth(&complete, FAILED), (Truth::False, "t0".into()));
        let snapshot = RunReport {
            kind: Some(RunKind::Snapshot),
            epoch: 3,
            epochs: 16,
            phase: v1::RunPhase::Queued,
            ..RunReport::default()
        };
        let waits =
            next_status(&first, &RunState::Submitted(RunReport { message: "waits".into(), ..snapshot.clone() }), "t1");
        assert_eq!((waits.phase, waits.queue_position), (Some(RunPhase::Pending), None), "a snapshot does not queue");
        let written = SnapshotResult { digest: "d".into(), partitions: 16, ..SnapshotResult::default() };
        let kept = RunReport { phase: v1::RunPhase::Succeeded, written: Some(written.clone()), ..snapshot };
        let kept = next_status(&waits, &RunState::Submitted(kept), "t2");
        assert_eq!((kept.snapshot.as_ref(), is_over(&kept)), (Some(&written), true));
        assert!(kept.conditions.iter().any(|it| it.message == "partition 3 of 16"));
        let failed = RunReport { phase: v1::RunPhase::Failed, message: "ENG-0601: no".into(), ..RunReport::default() };
        let failed = next_status(&running, &RunState::Submitted(failed), "t4");
        assert_eq!((truth(&failed, FAILED).0, is_over(&failed)), (Truth::True, true));
    }

    #[test]
    fn events_and_results_follow_the_phases() {
        let report = |phase, message: &str| {
            let outputs = BTreeMap::from([("digest".to_owned(), "9f86".to_owned())]);
            let driver = Some("words-worker-0".to_owned());
            let (epoch, epochs, message) = (2, 2, message.to_owned());
            RunState::Submitted(RunReport { phase, epoch, epochs, driver, message, outputs, ..RunReport::default() })
        };
        let spec = json!({ "clusterRef": { "name": "words" }, "kind": "Memory" });
        let object = serde_json::from_value::<RunObject>(json!({ "metadata": {}, "spec": spec })).expect("an object");
        let queued = next_status(&LearnerRunStatus::default(), &report(v1::RunPhase::Queued, "waits"), "t0");
        assert_eq!(run_event(&LearnerRunStatus::default(), &queued), None);
        let running = next_status(&queued, &report(v1::RunPhase::Running, ""), "t1");
        let suspended = next_status(&running, &report(v1::RunPhase::Suspended, ""), "t2");
        for (old, phase, message, expected, result) in [
            (&queued, v1::RunPhase::Running, "", (false, "Started", "started, driven by pod words-worker-0"), None),
            (&running, v1::RunPhase::Suspended, "", (false, "Suspended", "epoch 2 of 2"), None),
            (&suspended, v1::RunPhase::Running, "", (false, "Resumed", "resumed, driven by pod words-worker-0"), None),
            (
                &running,
                v1::RunPhase::Succeeded,
                "",
                (false, "Completed", "epoch 2 of 2; digest 9f86"),
                Some(RunResult::Succeeded),
            ),
            (
                &running,
                v1::RunPhase::Failed,
                "ENG-0304: line 3",
                (true, "Failed", "ENG-0304: line 3"),
                Some(RunResult::Failed),
            ),
            (&running, v1::RunPhase::Cancelled, "", (true, "Cancelled", "epoch 2 of 2"), Some(RunResult::Cancelled)),
        ] {
            let new = next_status(old, &report(phase, message), "t3");
            let (is_warning, reason, note) = expected;
            assert_eq!(run_event(old, &new), Some(RunEvent { is_warning, reason, note: note.to_owned() }));
            assert_eq!(run_event(&new, &new), None);
            let ended = EndedRun::of(&object, &new);
            assert_eq!(ended.as_ref().map(|ended| (ended.result, ended.ended.as_str())), result.map(|it| (it, "t3")));
            assert!(ended.is_none_or(|ended| (&*ended.cluster, &*ended.kind) == ("words", "Memory")));
        }
    }
}
