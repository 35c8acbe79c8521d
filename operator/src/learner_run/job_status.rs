//! State of the Job of a run of kind `Job`, from the Job and its pods.

use std::collections::BTreeMap;

use engram_api::RunKind;
use engram_api::status::{JobProcess, JobStatus, MAX_LOG_TAILS, ProcessPhase, log_tail};
use engram_proto::v1;
use serde_json::Value;

use crate::cluster::build::{CONTAINER, INDEX_ANNOTATION, QUEUE_LABEL};
use crate::learner_run::RunReport;

/// Returns the report of a run by its Job, a Job as JSON, and the pods of the Job.
pub fn job_report(job: &Value, pods: &[Value]) -> RunReport {
    let count = |field: &str| job["status"][field].as_u64().unwrap_or_default();
    let replicas = job["spec"]["completions"].as_u64().unwrap_or_default();
    let processes = processes(replicas, pods);
    let status = JobStatus {
        active: signed(count("active")),
        succeeded: signed(count("succeeded")),
        failed: signed(count("failed")),
        processes,
    };
    let (phase, message) = phase(job, &status);
    let metrics = [("active", status.active), ("failed", status.failed), ("succeeded", status.succeeded)];
    RunReport {
        phase,
        epoch: count("succeeded"),
        epochs: replicas,
        eta_seconds: -1.0,
        metrics: metrics.map(|(name, value)| (name.to_owned(), f64::from(value))).into(),
        message,
        kind: Some(RunKind::Job),
        job: Some(status),
        ..RunReport::default()
    }
}

fn signed(number: u64) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

fn phase(job: &Value, status: &JobStatus) -> (v1::RunPhase, String) {
    let condition = |kind: &str| {
        let conditions = job["status"]["conditions"].as_array().into_iter().flatten();
        conditions.into_iter().find(|it| it["type"] == kind && it["status"] == "True")
    };
    if condition("Complete").is_some() {
        return (v1::RunPhase::Succeeded, String::new());
    }
    if let Some(failed) = condition("Failed") {
        let why = failed["message"].as_str().unwrap_or_default();
        let message = status.first_failure().map_or_else(|| why.to_owned(), |first| format!("{first} ({why})"));
        return (v1::RunPhase::Failed, message);
    }
    if job["spec"]["suspend"] == true {
        let queue = job["metadata"]["labels"][QUEUE_LABEL].as_str();
        let message = queue.map_or_else(String::new, |queue| format!("waits for admission by queue {queue}"));
        return (v1::RunPhase::Suspended, message);
    }
    (v1::RunPhase::Running, format!("{} processes are active", status.active))
}

/// Returns the processes by index: the newest pod of each, and how many of its pods have failed before.
fn processes(replicas: u64, pods: &[Value]) -> Vec<JobProcess> {
    let mut by_index: BTreeMap<u32, Vec<&Value>> = BTreeMap::new();
    for pod in pods {
        let index = pod["metadata"]["annotations"][INDEX_ANNOTATION].as_str();
        if let Some(index) = index.and_then(|index| index.parse::<u32>().ok())
            && u64::from(index) < replicas
        {
            by_index.entry(index).or_default().push(pod);
        }
    }
    let mut tails = 0;
    let mut processes = Vec::new();
    for (index, mut pods) in by_index {
        pods.sort_by_key(|pod| pod["metadata"]["creationTimestamp"].as_str().unwrap_or_default());
        let Some((newest, earlier)) = pods.split_last() else { continue };
        // A pod that waits does not hide why the previous one failed.
        let failed = pods.iter().rev().copied().find(|pod| pod["status"]["phase"] == "Failed");
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

fn process(index: u32, newest: &Value, failed: Option<&Value>) -> JobProcess {
    let phase = match newest["status"]["phase"].as_str() {
        Some("Running") => ProcessPhase::Running,
        Some("Succeeded") => ProcessPhase::Succeeded,
        Some("Failed") => ProcessPhase::Failed,
        _ => ProcessPhase::Pending,
    };
    let ended = if phase == ProcessPhase::Succeeded { Some(newest) } else { failed };
    let terminated = ended.and_then(terminated);
    let text = |field: &str| terminated.and_then(|it| it[field].as_str()).filter(|text| !text.is_empty());
    // An evicted pod has no state of its container.
    let reason = text("reason").or_else(|| ended?["status"]["reason"].as_str()).or_else(|| waiting(newest));
    JobProcess {
        index,
        phase,
        restarts: 0,
        exit_code: terminated.and_then(|it| it["exitCode"].as_i64()).and_then(|code| i32::try_from(code).ok()),
        reason: reason.filter(|reason| *reason != "Completed").map(str::to_owned),
        log_tail: text("message").map(log_tail),
    }
}

/// Returns the state of the container of a pod.
fn state(pod: &Value) -> Option<&Value> {
    let containers = pod["status"]["containerStatuses"].as_array()?;
    Some(&containers.iter().find(|it| it["name"] == CONTAINER)?["state"])
}

fn terminated(pod: &Value) -> Option<&Value> {
    state(pod)?.get("terminated")
}

/// Returns why a pod has not started: `ImagePullBackOff`, `Unschedulable`, ...
fn waiting(pod: &Value) -> Option<&str> {
    let of_container = || state(pod)?.get("waiting")?["reason"].as_str();
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    let scheduled = conditions.into_iter().find(|it| it["type"] == "PodScheduled" && it["status"] == "False");
    of_container().or_else(|| scheduled?["reason"].as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(index: u32, created: &str, phase: &str, state: &Value) -> Value {
        json!({
            "metadata": { "creationTimestamp": created, "annotations": { INDEX_ANNOTATION: index.to_string() } },
            "status": { "phase": phase, "containerStatuses": [{ "name": "main", "state": state }] },
        })
    }

    fn job(status: &Value, suspend: bool) -> Value {
        json!({
            "metadata": { "labels": { QUEUE_LABEL: "gpus" } },
            "spec": { "completions": 3, "suspend": suspend }, "status": status,
        })
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
