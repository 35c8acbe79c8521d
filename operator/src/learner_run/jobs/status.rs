//! State of the Job of a run of kind `Job`, from the Job and its pods.

use std::collections::BTreeMap;

use engram_api::RunKind;
use engram_api::status::{JobProcess, JobStatus, MAX_LOG_TAILS, ProcessPhase, log_tail};
use engram_proto::v1;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ContainerState, Pod};

use crate::learner_run::RunReport;
use crate::learner_run::jobs::object::{CONTAINER, INDEX_ANNOTATION, QUEUE_LABEL};

/// Returns the report of a run by its Job and the pods of the Job.
pub fn job_report(job: &Job, pods: &[Pod]) -> RunReport {
    let spec = job.spec.as_ref();
    let replicas = unsigned(spec.and_then(|spec| spec.completions));
    let counts = job.status.clone().unwrap_or_default();
    let status = JobStatus {
        active: counts.active.unwrap_or_default(),
        succeeded: counts.succeeded.unwrap_or_default(),
        failed: counts.failed.unwrap_or_default(),
        processes: processes(replicas, pods),
    };
    let (phase, message) = phase(job, &status);
    let metrics = [("active", status.active), ("failed", status.failed), ("succeeded", status.succeeded)];
    RunReport {
        phase,
        epoch: u64::from(unsigned(counts.succeeded)),
        epochs: u64::from(replicas),
        eta_seconds: -1.0,
        metrics: metrics.map(|(name, value)| (name.to_owned(), f64::from(value))).into(),
        message,
        kind: Some(RunKind::Job),
        job: Some(status),
        ..RunReport::default()
    }
}

fn unsigned(number: Option<i32>) -> u32 {
    number.and_then(|number| u32::try_from(number).ok()).unwrap_or_default()
}

/// Returns whether a Job is suspended.
pub(crate) fn is_suspended(job: &Job) -> bool {
    job.spec.as_ref().and_then(|spec| spec.suspend) == Some(true)
}

fn phase(job: &Job, status: &JobStatus) -> (v1::RunPhase, String) {
    let conditions = job.status.as_ref().and_then(|status| status.conditions.as_ref());
    let condition = |kind: &str| conditions?.iter().find(|it| it.type_ == kind && it.status == "True");
    if condition("Complete").is_some() {
        return (v1::RunPhase::Succeeded, String::new());
    }
    if let Some(failed) = condition("Failed") {
        let why = failed.message.as_deref().unwrap_or_default();
        let message = status.first_failure().map_or_else(|| why.to_owned(), |first| format!("{first} ({why})"));
        return (v1::RunPhase::Failed, message);
    }
    if is_suspended(job) {
        let queue = job.metadata.labels.as_ref().and_then(|labels| labels.get(QUEUE_LABEL));
        let message = queue.map_or_else(String::new, |queue| format!("waits for admission by queue {queue}"));
        return (v1::RunPhase::Suspended, message);
    }
    (v1::RunPhase::Running, format!("{} processes are active", status.active))
}

/// Returns the processes by index: the newest pod of each, and how many of its pods have failed before.
fn processes(replicas: u32, pods: &[Pod]) -> Vec<JobProcess> {
    let mut by_index: BTreeMap<u32, Vec<&Pod>> = BTreeMap::new();
    for pod in pods {
        let index = pod.metadata.annotations.as_ref().and_then(|annotations| annotations.get(INDEX_ANNOTATION));
        if let Some(index) = index.and_then(|index| index.parse::<u32>().ok())
            && index < replicas
        {
            by_index.entry(index).or_default().push(pod);
        }
    }
    let mut tails = 0;
    let mut processes = Vec::new();
    for (index, mut pods) in by_index {
        pods.sort_by_key(|pod| pod.metadata.creation_timestamp.as_ref().map(|time| time.0));
        let Some((newest, earlier)) = pods.split_last() else { continue };
        // A pod that waits does not hide why the previous one failed.
        let failed = pods.iter().rev().copied().find(|pod| pod_phase(pod) == Some("Failed"));
        let mut process = process(index, newest, failed);
        process.restarts = u32::try_from(earlier.len()).unwrap_or(u32::MAX);
        if process.log_tail.is_some() {
            tails += 1;
        }
        if tails > MAX_LOG_TAILS {
            process.log_tail = None;
        }
        processes.push(process);
    }
    processes
}

fn process(index: u32, newest: &Pod, failed: Option<&Pod>) -> JobProcess {
    let phase = match pod_phase(newest) {
        Some("Running") => ProcessPhase::Running,
        Some("Succeeded") => ProcessPhase::Succeeded,
        Some("Failed") => ProcessPhase::Failed,
        _ => ProcessPhase::Pending,
    };
    let ended = if phase == ProcessPhase::Succeeded { Some(newest) } else { failed };
    let terminated = ended.and_then(|pod| state(pod)?.terminated.as_ref());
    let text = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    // An evicted pod has no state of its container.
    let evicted = || ended?.status.as_ref()?.reason.clone();
    let reason = terminated.and_then(|it| text(&it.reason)).or_else(evicted).or_else(|| waiting(newest));
    JobProcess {
        index,
        phase,
        restarts: 0,
        exit_code: terminated.map(|it| it.exit_code),
        reason: reason.filter(|reason| *reason != "Completed"),
        log_tail: terminated.and_then(|it| text(&it.message)).map(|message| log_tail(&message)),
    }
}

fn pod_phase(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.phase.as_deref()
}

/// Returns the state of the container of a pod.
fn state(pod: &Pod) -> Option<&ContainerState> {
    let containers = pod.status.as_ref()?.container_statuses.as_ref()?;
    containers.iter().find(|it| it.name == CONTAINER)?.state.as_ref()
}

/// Returns why a pod has not started: `ImagePullBackOff`, `Unschedulable`, ...
fn waiting(pod: &Pod) -> Option<String> {
    let of_container = || state(pod)?.waiting.as_ref()?.reason.clone();
    let of_scheduler = || {
        let conditions = pod.status.as_ref()?.conditions.as_ref()?;
        conditions.iter().find(|it| it.type_ == "PodScheduled" && it.status == "False")?.reason.clone()
    };
    of_container().or_else(of_scheduler)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(index: u32, created: &str, phase: &str, state: &Value) -> Pod {
        let pod = json!({
            "metadata": { "creationTimestamp": created, "annotations": { INDEX_ANNOTATION: index.to_string() } },
            "status": { "phase": phase, "containerStatuses": [{
                "name": "main", "state": state, "image": "", "imageID": "", "ready": false, "restartCount": 0,
            }] },
        });
        serde_json::from_value(pod).expect("a pod")
    }

    fn job(status: &Value, suspend: bool) -> Job {
        let job = json!({
            "metadata": { "labels": { QUEUE_LABEL: "gpus" } },
            "spec": { "completions": 3, "suspend": suspend, "template": {} }, "status": status,
        });
        serde_json::from_value(job).expect("a Job")
    }

    #[test]
    fn exit_codes_and_last_lines_of_failed_processes_are_reported() {
        let exited = json!({ "terminated": { "exitCode": 3, "reason": "Error", "message": "first\nno data\n" } });
        let done = json!({ "terminated": { "exitCode": 0, "reason": "Completed" } });
        let pods = [
            pod(0, "2026-01-01T00:00:00Z", "Succeeded", &done),
            pod(1, "2026-01-01T00:00:09Z", "Running", &json!({ "running": {} })),
            pod(1, "2026-01-01T00:00:00Z", "Failed", &exited),
            pod(2, "2026-01-01T00:00:00Z", "Pending", &json!({ "waiting": { "reason": "ImagePullBackOff" } })),
        ];
        let running = job_report(&job(&json!({ "active": 2, "succeeded": 1, "failed": 1 }), false), &pods);
        assert_eq!((running.phase, running.epoch, running.epochs), (v1::RunPhase::Running, 1, 3));
        let processes = running.job.expect("a job").processes;
        let [first, second, third] = &processes[..] else { panic!("{processes:?}") };
        assert_eq!((first.phase, first.exit_code, first.reason.as_deref()), (ProcessPhase::Succeeded, Some(0), None));
        assert_eq!((second.phase, second.exit_code, second.restarts), (ProcessPhase::Running, Some(3), 1));
        assert_eq!(second.log_tail.as_deref(), Some("first\nno data"));
        assert_eq!((third.phase, third.reason.as_deref()), (ProcessPhase::Pending, Some("ImagePullBackOff")));

        let condition = json!([{ "type": "Failed", "status": "True", "message": "Job has reached its limit" }]);
        let failed = job_report(&job(&json!({ "failed": 2, "conditions": condition }), false), &pods[1..]);
        assert_eq!(failed.phase, v1::RunPhase::Failed);
        let expected = "process 1 exited with code 3: no data (Job has reached its limit)";
        assert_eq!(failed.message, expected);
    }

    #[test]
    fn a_queued_job_is_suspended_and_a_complete_one_has_succeeded() {
        let queued = job_report(&job(&json!({}), true), &[]);
        assert_eq!(
            (queued.phase, queued.message.as_str()),
            (v1::RunPhase::Suspended, "waits for admission by queue gpus")
        );
        let complete = json!({ "succeeded": 3, "conditions": [{ "type": "Complete", "status": "True" }] });
        assert_eq!(job_report(&job(&complete, false), &[]).phase, v1::RunPhase::Succeeded);
    }
}
