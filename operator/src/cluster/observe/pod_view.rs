//! Parsing of pods.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, ContainerState, ContainerStatus, Pod, PodCondition, PodStatus};

use crate::cluster::observe::object_views::ordinal;
use crate::cluster::observe::observation::{PodView, StartFailure, StartFailureCause, WorkerExit};
use crate::kube::api_object::{ApiObject, InvalidObject};
use crate::names::WORKER;

/// Maximum length of a report of the kubelet or the scheduler in a message, in characters: several fit into one event.
const MAX_REPORT_CHARS: usize = 300;

/// Start of the line that the supervisor of a worker adds to the termination message.
const WORKER_EXITED: &str = "the worker exited: ";

impl PodView {
    /// Parses a pod. How long its node has been lost is not known from it.
    ///
    /// # Errors
    ///
    /// Fails if it is no pod, or its name has no ordinal.
    pub fn read(object: &ApiObject) -> Result<Self, InvalidObject> {
        let Pod { metadata, spec, status } = object.read()?;
        let (spec, status) = (spec.unwrap_or_default(), status.unwrap_or_default());
        let mut labels = metadata.labels.unwrap_or_default();
        Ok(Self {
            ordinal: ordinal(object)?,
            uid: metadata.uid.unwrap_or_default(),
            revision: labels.remove("controller-revision-hash").unwrap_or_default(),
            ready: condition(&status, "Ready").is_some_and(|condition| condition.status == "True"),
            terminating: metadata.deletion_timestamp.is_some(),
            has_devices: has_devices(&spec.containers),
            worker_exits: worker_exits(&status),
            start_failure: start_failure(&status),
            node_lost_for_ms: None,
            node: spec.node_name,
        })
    }
}

impl PodView {
    /// Sets for how long its node has been lost: `lost` has the milliseconds for which nodes have been not ready or missing.
    pub(super) fn set_lost_node(&mut self, lost: &BTreeMap<String, u64>) {
        self.node_lost_for_ms = self.node.as_ref().and_then(|node| lost.get(node).copied());
    }
}

fn condition<'a>(status: &'a PodStatus, kind: &str) -> Option<&'a PodCondition> {
    status.conditions.iter().flatten().find(|condition| condition.type_ == kind)
}

/// Returns whether the worker container has resource claims or a limit of an extended resource (a name with a domain).
fn has_devices(containers: &[Container]) -> bool {
    let workers = containers.iter().filter(|container| container.name == WORKER);
    workers.filter_map(|container| container.resources.as_ref()).any(|resources| {
        let is_limited = resources.limits.iter().flatten().any(|(name, _)| name.contains('/'));
        is_limited || resources.claims.as_ref().is_some_and(|claims| !claims.is_empty())
    })
}

/// Returns the workers of terminated containers. A termination message without a worker, as of a container that the kubelet lost, proves
/// nothing.
fn worker_exits(status: &PodStatus) -> Vec<WorkerExit> {
    let workers = status.container_statuses.iter().flatten().filter(|container| container.name == WORKER);
    let states = workers.flat_map(|container| [(container, &container.last_state), (container, &container.state)]);
    states.filter_map(|(container, state)| worker_exit(container, state.as_ref()?)).collect()
}

fn worker_exit(container: &ContainerStatus, state: &ContainerState) -> Option<WorkerExit> {
    let terminated = state.terminated.as_ref()?;
    let member = terminated.message.as_ref()?.lines().next()?.strip_prefix("worker ")?.parse().ok()?;
    let known = |text: &Option<String>| text.clone().unwrap_or_else(|| "?".into());
    let (reason, id) = (known(&terminated.reason), known(&terminated.container_id));
    let exit = format!("{reason}, exit code {}, {id}, restart {}", terminated.exit_code, container.restart_count);
    Some(WorkerExit { member, exit })
}

/// Returns why a pod cannot start. A container that waits for a regular start is not a failure.
fn start_failure(status: &PodStatus) -> Option<StartFailure> {
    if status.phase.as_deref() == Some("Failed") {
        let detail =
            report(status.reason.as_deref().unwrap_or("Failed"), status.message.as_deref().unwrap_or_default());
        return Some(StartFailure { cause: StartFailureCause::Rejected, detail, since: None });
    }
    if let Some(condition) = condition(status, "PodScheduled").filter(|condition| condition.status == "False") {
        let message = condition.message.as_deref().unwrap_or("no node fits");
        let detail = report(condition.reason.as_deref().unwrap_or_default(), message);
        let since = condition.last_transition_time.as_ref().map(|time| time.0.to_string());
        return Some(StartFailure { cause: StartFailureCause::Unschedulable, detail, since });
    }
    let mut containers = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    containers.find_map(container_failure)
}

/// Returns why a container cannot start.
fn container_failure(container: &ContainerStatus) -> Option<StartFailure> {
    let waiting = container.state.as_ref()?.waiting.as_ref()?;
    let reason = waiting.reason.as_deref()?;
    let cause = match reason {
        "ErrImagePull"
        | "ImagePullBackOff"
        | "InvalidImageName"
        | "ErrImageNeverPull"
        | "ImageInspectError"
        | "RegistryUnavailable"
        | "SignatureValidationFailed" => StartFailureCause::ImagePull,
        "CreateContainerConfigError"
        | "CreateContainerError"
        | "PreCreateHookError"
        | "PreStartHookError"
        | "RunContainerError" => StartFailureCause::Configuration,
        "CrashLoopBackOff" => StartFailureCause::CrashLoop,
        _ => return None,
    };
    // The kubelet reports only its back-off; the termination says more.
    let terminated = container.last_state.as_ref().and_then(|state| state.terminated.as_ref());
    let message = match (cause, terminated) {
        (StartFailureCause::CrashLoop, Some(terminated)) => {
            let cause = terminated.message.as_deref().and_then(cause_of_exit);
            let text = cause.or(terminated.reason.as_deref()).unwrap_or_default();
            format!("exit code {}: {text}", terminated.exit_code)
        }
        _ => waiting.message.clone().unwrap_or_default(),
    };
    let detail = format!("container {}, image {}: {}", container.name, container.image, report(reason, &message));
    Some(StartFailure { cause, detail, since: None })
}

/// Returns the line of a termination message that has the cause: the last one but for the supervisor's, which repeats the exit code.
fn cause_of_exit(message: &str) -> Option<&str> {
    let lines = || message.trim().lines().filter(|line| !line.is_empty());
    lines().rfind(|line| !line.starts_with("worker ") && !line.starts_with(WORKER_EXITED)).or(lines().next_back())
}

/// Joins a reason and a message, shortened, without control characters.
fn report(reason: &str, message: &str) -> String {
    let message: String = message.trim().chars().filter(|char| !char.is_control()).collect();
    let shortened: String = message.chars().take(MAX_REPORT_CHARS).collect();
    let end = if shortened.len() < message.len() { "..." } else { "" };
    if shortened.is_empty() { reason.to_owned() } else { format!("{reason}: {shortened}{end}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::resource_kinds::POD;
    use serde_json::{Value, json};

    fn read(pod: Value) -> Result<PodView, InvalidObject> {
        PodView::read(&ApiObject::new(POD, pod))
    }

    /// Adds the required fields that a test does not set.
    fn of_status(mut container: Value) -> Value {
        for (field, value) in
            [("image", json!("")), ("imageID", json!("")), ("ready", json!(false)), ("restartCount", json!(0))]
        {
            container.as_object_mut().unwrap().entry(field).or_insert(value);
        }
        container
    }

    #[test]
    fn pods_are_parsed() {
        let pod = json!({
            "kind": "Pod",
            "metadata": {
                "name": "words-worker-12", "uid": "u", "deletionTimestamp": "2026-11-21T09:00:00Z",
                "labels": { "controller-revision-hash": "r" },
            },
            "spec": { "nodeName": "n2" },
            "status": { "conditions": [{ "type": "Ready", "status": "True" }] },
        });
        let mut pod = read(pod).expect("a pod");
        pod.set_lost_node(&BTreeMap::from([("n2".into(), 9_000)]));
        assert_eq!((pod.ordinal, pod.ready, pod.terminating, pod.node_lost_for_ms), (12, true, true, Some(9_000)));
        let dead = |message: &str| {
            let terminated =
                json!({ "exitCode": 137, "reason": "Error", "containerID": "containerd://c", "message": message });
            let worker = json!({ "name": "worker", "restartCount": 2, "state": { "running": {} }, "lastState": { "terminated": terminated } });
            let pod = json!({
                "kind": "Pod", "metadata": { "name": "words-worker-3" },
                "status": { "containerStatuses": [of_status(json!({ "name": "sidecar" })), of_status(worker)] },
            });
            read(pod).expect("a pod").worker_exits
        };
        let member = "3/5b1c00009f3ac2d17be84450a1b2c3d4/7";
        let ended = dead(&format!("worker {member}\nthe worker ended: signal 9\n"));
        let exits: Vec<_> = ended.iter().map(|it| (it.member.to_string(), it.exit.as_str())).collect();
        assert_eq!(exits, [(member.to_owned(), "Error, exit code 137, containerd://c, restart 2")]);
        for nothing in ["", "the worker ended: signal 9", "worker 3/5b1c/x", "The container could not be located"] {
            assert_eq!(dead(nothing), [], "{nothing:?} names no worker");
        }
        let stuck = |status: Value| {
            let pod = json!({ "kind": "Pod", "metadata": { "name": "words-worker-3" }, "status": status });
            read(pod).expect("a pod").start_failure
        };
        let of_message = |waiting: Value, message: &str| {
            let worker = json!({ "name": "worker", "image": "a/b:9", "state": { "waiting": waiting },
                "lastState": { "terminated": { "exitCode": 101, "message": message } } });
            stuck(json!({ "containerStatuses": [of_status(worker)] })).map(|it| (it.cause, it.detail))
        };
        let of = |waiting: Value| of_message(waiting, "worker 3/5b/7\nno disk\nthe worker exited: exit code 101\n");
        let pulled = of(json!({ "reason": "ErrImagePull", "message": "not found" })).expect("a failure");
        assert_eq!(pulled.0, StartFailureCause::ImagePull);
        assert_eq!(pulled.1, "container worker, image a/b:9: ErrImagePull: not found");
        let looping = of(json!({ "reason": "CrashLoopBackOff", "message": "back-off 10s" })).expect("a failure");
        assert_eq!(looping.1, "container worker, image a/b:9: CrashLoopBackOff: exit code 101: no disk");
        let killed =
            of_message(json!({ "reason": "CrashLoopBackOff" }), "worker 3/5b/7\nthe worker exited: signal 9\n");
        assert!(killed.expect("a failure").1.ends_with("exit code 101: the worker exited: signal 9"));
        assert_eq!(of(json!({ "reason": "ContainerCreating" })), None);
        let late =
            json!({ "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node" });
        let late = stuck(json!({ "conditions": [late] })).expect("a failure");
        assert_eq!((late.cause, late.detail.as_str()), (StartFailureCause::Unschedulable, "Unschedulable: no node"));
    }

    #[test]
    fn an_object_of_the_wrong_shape_is_an_error() {
        let pod = json!({ "kind": "Pod", "metadata": { "name": "words-worker-3" }, "status": { "phase": 7 } });
        let error = read(pod).expect_err("a number is no phase").to_string();
        assert!(error.starts_with("Pod words-worker-3: ") && error.contains("integer `7`"), "{error}");
    }
}
