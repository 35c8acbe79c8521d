//! Parsing of Kubernetes objects into views. An invalid object is an error, never a default: a map with a missing partition must not look
//! like an empty cluster.

use std::collections::BTreeMap;

use engram_api::Size;
use serde_json::Value;

use crate::cluster::observe::observation::{
    ClaimView, MapView, PartitionView, PodView, SetView, StartFailure, StartFailureCause, WorkerExit,
};
use crate::names::{CLUSTER_ID_LABEL, WORKER};

/// Why an object cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{object}: {field} is {found}; expected {expected}")]
pub struct InvalidObject {
    object: String,
    field: String,
    found: String,
    expected: &'static str,
}

fn invalid_object(object: &Value, field: &str, found: Option<&Value>, expected: &'static str) -> InvalidObject {
    let text = |path: &str| object.pointer(path).and_then(Value::as_str).unwrap_or("?").to_owned();
    InvalidObject {
        object: format!("{} {}", text("/kind"), text("/metadata/name")),
        field: field.to_owned(),
        found: found.map_or_else(|| "absent".into(), Value::to_string),
        expected,
    }
}

impl SetView {
    /// Parses a StatefulSet. Its newest revision is empty until its controller has observed the newest template.
    ///
    /// # Errors
    ///
    /// Fails if it has no number of replicas.
    pub fn read(object: &Value) -> Result<Self, InvalidObject> {
        let is_current = object.pointer("/status/observedGeneration") == object.pointer("/metadata/generation");
        let revision = object.pointer("/status/updateRevision").and_then(Value::as_str).filter(|_| is_current);
        Ok(Self {
            replicas: natural(object, "/spec/replicas")?,
            update_revision: revision.unwrap_or_default().to_owned(),
            created: text(object, "/metadata/creationTimestamp"),
        })
    }
}

impl PodView {
    /// Parses a pod. `lost_nodes` has the milliseconds for which nodes have been not ready or missing.
    ///
    /// # Errors
    ///
    /// Fails if its name has no ordinal.
    pub fn read(object: &Value, lost_nodes: &BTreeMap<String, u64>) -> Result<Self, InvalidObject> {
        let node = text(object, "/spec/nodeName");
        let conditions = object.pointer("/status/conditions").and_then(Value::as_array);
        let is_ready = |condition: &Value| condition["type"] == "Ready" && condition["status"] == "True";
        Ok(Self {
            ordinal: ordinal(object)?,
            uid: text(object, "/metadata/uid").unwrap_or_default(),
            revision: text(object, "/metadata/labels/controller-revision-hash").unwrap_or_default(),
            ready: conditions.is_some_and(|all| all.iter().any(is_ready)),
            terminating: object.pointer("/metadata/deletionTimestamp").is_some(),
            has_devices: has_devices(object),
            worker_exits: ended(object),
            start_failure: start_failure(object),
            node_lost_for_ms: node.as_ref().and_then(|node| lost_nodes.get(node).copied()),
            node,
        })
    }
}

/// Returns whether the worker container has resource claims or a limit of an extended resource (a name with a domain).
fn has_devices(pod: &Value) -> bool {
    let containers = pod.pointer("/spec/containers").and_then(Value::as_array).into_iter().flatten();
    let mut workers = containers.filter(|container| container["name"] == WORKER);
    workers.any(|container| {
        let (limits, claims) = (&container["resources"]["limits"], &container["resources"]["claims"]);
        let of_device = |limits: &serde_json::Map<String, Value>| limits.keys().any(|name| name.contains('/'));
        limits.as_object().is_some_and(of_device) || claims.as_array().is_some_and(|claims| !claims.is_empty())
    })
}

/// Returns the workers of terminated containers. A termination message without a worker, as of a container that the kubelet lost, proves
/// nothing.
fn ended(pod: &Value) -> Vec<WorkerExit> {
    let statuses = pod.pointer("/status/containerStatuses").and_then(Value::as_array).into_iter().flatten();
    let worker = statuses.filter(|container| container["name"] == WORKER);
    let states = worker.flat_map(|container| [(container, "lastState"), (container, "state")]);
    let of = |(container, state): (&Value, &str)| {
        let terminated = &container[state]["terminated"];
        let first = terminated["message"].as_str()?.lines().next()?;
        let member = first.strip_prefix("worker ")?.parse().ok()?;
        let field_of = |field: &str| terminated[field].as_str().unwrap_or("?").to_owned();
        let (code, restarts) = (&terminated["exitCode"], &container["restartCount"]);
        let exit = format!("{}, exit code {code}, {}, restart {restarts}", field_of("reason"), field_of("containerID"));
        Some(WorkerExit { member, exit })
    };
    states.filter_map(of).collect()
}

/// Maximum length of a report of the kubelet or the scheduler in a message, in characters: several fit into one event.
const MAX_REPORT_CHARS: usize = 300;

/// Start of the line that the supervisor of a worker adds to the termination message.
const WORKER_EXITED: &str = "the worker exited: ";

/// Returns why a pod cannot start. A container that waits for a regular start is not a failure.
fn start_failure(pod: &Value) -> Option<StartFailure> {
    if pod.pointer("/status/phase").is_some_and(|phase| phase == "Failed") {
        let reason = text(pod, "/status/reason").unwrap_or_else(|| "Failed".into());
        let detail = report(&reason, &text(pod, "/status/message").unwrap_or_default());
        return Some(StartFailure { cause: StartFailureCause::Rejected, detail, since: None });
    }
    let conditions = pod.pointer("/status/conditions").and_then(Value::as_array).into_iter().flatten();
    let is_unschedulable = |condition: &&Value| condition["type"] == "PodScheduled" && condition["status"] == "False";
    if let Some(condition) = conditions.clone().find(is_unschedulable) {
        let field = |field: &str| condition[field].as_str().map(str::to_owned);
        let detail =
            report(&field("reason").unwrap_or_default(), &field("message").unwrap_or_else(|| "no node fits".into()));
        let since = field("lastTransitionTime");
        return Some(StartFailure { cause: StartFailureCause::Unschedulable, detail, since });
    }
    let of = |list: &str| pod.pointer(list).and_then(Value::as_array).into_iter().flatten();
    let mut containers = of("/status/initContainerStatuses").chain(of("/status/containerStatuses"));
    containers.find_map(container_failure)
}

/// Returns why a container cannot start.
fn container_failure(container: &Value) -> Option<StartFailure> {
    let waiting = &container["state"]["waiting"];
    let reason = waiting["reason"].as_str()?;
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
    let terminated = &container["lastState"]["terminated"];
    let message = match cause {
        StartFailureCause::CrashLoop if terminated.is_object() => {
            let cause = terminated["message"].as_str().and_then(cause_of_exit);
            let text = cause.or(terminated["reason"].as_str()).unwrap_or_default();
            format!("exit code {}: {text}", terminated["exitCode"])
        }
        _ => waiting["message"].as_str().unwrap_or_default().to_owned(),
    };
    let field = |field: &str| container[field].as_str().unwrap_or("?");
    let detail = format!("container {}, image {}: {}", field("name"), field("image"), report(reason, &message));
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

impl ClaimView {
    /// Parses a PersistentVolumeClaim.
    ///
    /// # Errors
    ///
    /// Fails if its name has no ordinal or its size is invalid.
    pub fn read(object: &Value) -> Result<Self, InvalidObject> {
        const SIZE: &str = "/spec/resources/requests/storage";
        let size = text(object, SIZE).and_then(|size| size.parse::<Size>().ok());
        let size = size.ok_or_else(|| invalid_object(object, SIZE, object.pointer(SIZE), "a size such as 50Gi"))?;
        let labels = object.pointer("/metadata/labels");
        let cluster_id = labels.and_then(|labels| labels.get(CLUSTER_ID_LABEL)).and_then(Value::as_str);
        Ok(Self {
            ordinal: ordinal(object)?,
            uid: text(object, "/metadata/uid").unwrap_or_default(),
            size_bytes: size.as_bytes(),
            cluster_id: cluster_id.map(str::to_owned),
            storage_class: text(object, "/spec/storageClassName"),
            is_pending: object.pointer("/status/phase").is_some_and(|phase| phase == "Pending")
                && object.pointer("/spec/volumeName").is_none(),
        })
    }
}

impl MapView {
    /// Parses a `PartitionMap`. Stores are resolved to workers: the newest store of each ordinal; replicas on older stores are dropped.
    ///
    /// # Errors
    ///
    /// Fails if a partition is missing or refers to an unknown store.
    pub fn read(object: &Value) -> Result<Self, InvalidObject> {
        const STORES: &str = "/spec/stores";
        let stores = object.pointer(STORES).and_then(Value::as_object);
        let stores = stores.ok_or_else(|| invalid_object(object, STORES, None, "store numbers"))?;
        let mut ordinals = BTreeMap::new();
        for (number, store) in stores {
            let number =
                number.parse::<u32>().ok().zip(store["ordinal"].as_u64().and_then(|ordinal| ordinal.try_into().ok()));
            let (number, ordinal) =
                number.ok_or_else(|| invalid_object(object, STORES, Some(store), "a number with an ordinal"))?;
            ordinals.insert(number, ordinal);
        }
        // Store numbers increase: the highest number of an ordinal is its current store.
        let newest: BTreeMap<u32, u32> = ordinals.iter().map(|(number, ordinal)| (*ordinal, *number)).collect();
        let stores: BTreeMap<u32, Option<u32>> =
            ordinals.into_iter().map(|(number, of)| (number, Some(of).filter(|of| newest[of] == number))).collect();
        let count = natural(object, "/spec/partitionCount")?;
        let partitions = (0..count).map(|id| partition(object, id, &stores)).collect::<Result<_, _>>()?;
        let owners = object.pointer("/metadata/ownerReferences").and_then(Value::as_array).into_iter().flatten();
        let mut owners = owners.filter(|owner| owner["kind"] == "LearnerCluster");
        Ok(Self {
            uid: text(object, "/metadata/uid").unwrap_or_default(),
            owner: owners.next().and_then(|owner| owner["uid"].as_str()).map(str::to_owned),
            resource_version: text(object, "/metadata/resourceVersion").unwrap_or_default(),
            cluster_id: text(object, "/spec/clusterId")
                .ok_or_else(|| invalid_object(object, "/spec/clusterId", None, "32 hexadecimal digits"))?,
            suspended: object.pointer("/spec/suspended") == Some(&Value::Bool(true)),
            stores: newest,
            partitions,
        })
    }
}

/// Parses one partition; `stores` maps store numbers to ordinals, `None` for replaced stores.
fn partition(object: &Value, id: u32, stores: &BTreeMap<u32, Option<u32>>) -> Result<PartitionView, InvalidObject> {
    let path = format!("/spec/partitions/{id}");
    let entry = object.pointer(&path).ok_or_else(|| invalid_object(object, &path, None, "an entry"))?;
    let bad = |value: &Value| invalid_object(object, &path, Some(value), "a number of spec.stores");
    let of_number = |value: &Value| {
        let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
        number.and_then(|number| stores.get(&number).copied()).ok_or_else(|| bad(value))
    };
    let of_member = |value: &Value| {
        let number = value.as_str().and_then(|member| member.split_once('/')?.0.parse().ok());
        number.and_then(|number: u32| stores.get(&number).copied()).ok_or_else(|| bad(value))
    };
    let list = |name: &str| entry[name].as_array().into_iter().flatten();
    let on_workers = |members: Result<Vec<Option<u32>>, InvalidObject>| Ok(members?.into_iter().flatten().collect());
    let primary = of_number(&entry["primary"])?;
    Ok(PartitionView {
        primary: primary.unwrap_or(u32::MAX),
        in_sync: on_workers(list("isr").map(of_member).collect())?,
        // Learners are ordinals, not stores.
        learners: list("learners").filter_map(|ordinal| ordinal.as_u64()?.try_into().ok()).collect(),
        // A replaced store does not serve.
        activated: entry["activated"] == true && primary.is_some(),
    })
}

/// Returns the number after the last dash of an object's name.
fn ordinal(object: &Value) -> Result<u32, InvalidObject> {
    const NAME: &str = "/metadata/name";
    let name = object.pointer(NAME);
    let number = name.and_then(Value::as_str).and_then(|name| name.rsplit_once('-')?.1.parse().ok());
    number.ok_or_else(|| invalid_object(object, NAME, name, "a name that ends with an ordinal"))
}

fn natural(object: &Value, path: &str) -> Result<u32, InvalidObject> {
    let number = object.pointer(path).and_then(Value::as_u64).and_then(|number| u32::try_from(number).ok());
    number.ok_or_else(|| invalid_object(object, path, object.pointer(path), "a whole number"))
}

fn text(object: &Value, path: &str) -> Option<String> {
    object.pointer(path).and_then(Value::as_str).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use crate::cluster::observe::observation::{ClaimView, MapView, PodView, SetView, StartFailureCause};

    #[test]
    fn map_view_resolves_stores_to_workers() {
        let mut map = json!({
            "kind": "PartitionMap",
            "metadata": { "name": "words", "resourceVersion": "7" },
            "spec": {
                "clusterId": "5b1c00009f3ac2d17be84450a1b2c3d4", "partitionCount": 2, "suspended": true,
                "stores": { "0": { "ordinal": 0 }, "1": { "ordinal": 1 }, "5": { "ordinal": 2 } },
                "partitions": {
                    "0": { "term": 12, "primary": 0, "isr": ["0/3", "5/1"], "activated": true },
                    "1": { "term": 4, "primary": 1, "isr": ["1/5"], "activated": false, "learners": [2] },
                },
            },
        });
        let view = MapView::read(&map).expect("a map");
        assert_eq!((view.resource_version.as_str(), view.suspended), ("7", true));
        assert_eq!((view.partitions[0].in_sync.as_slice(), view.partitions[0].activated), (&[0, 2][..], true));
        assert_eq!((view.partitions[1].primary, view.partitions[1].learners.as_slice()), (1, &[2][..]));
        assert_eq!((view.primaries(1), view.copies(2), view.is_full(1), view.is_full(2)), (1, 2, false, false));

        assert_eq!(view.stores, BTreeMap::from([(0, 0), (1, 1), (2, 5)]));

        map["spec"]["stores"]["7"] = json!({ "ordinal": 0 });
        let replaced = MapView::read(&map).expect("a map");
        assert_eq!((replaced.partitions[0].in_sync.as_slice(), replaced.partitions[0].activated), (&[2][..], false));

        map["spec"]["partitions"]["1"]["isr"] = json!(["9/1"]);
        let error = MapView::read(&map).expect_err("an unknown store").to_string();
        assert_eq!(error, "PartitionMap words: /spec/partitions/1 is \"9/1\"; expected a number of spec.stores");
        map["spec"]["partitions"] = json!({ "0": map["spec"]["partitions"]["0"].clone() });
        assert!(MapView::read(&map).is_err(), "a partition is missing");
    }

    #[test]
    fn pods_claims_and_sets_are_parsed() {
        let pod = json!({
            "kind": "Pod",
            "metadata": {
                "name": "words-worker-12", "uid": "u", "deletionTimestamp": "2026-11-21T09:00:00Z",
                "labels": { "controller-revision-hash": "r" },
            },
            "spec": { "nodeName": "n2" },
            "status": { "conditions": [{ "type": "Ready", "status": "True" }] },
        });
        let pod = PodView::read(&pod, &BTreeMap::from([("n2".into(), 9_000)])).expect("a pod");
        assert_eq!((pod.ordinal, pod.ready, pod.terminating, pod.node_lost_for_ms), (12, true, true, Some(9_000)));
        let dead = |message: &str| {
            let terminated =
                json!({ "exitCode": 137, "reason": "Error", "containerID": "containerd://c", "message": message });
            let worker = json!({ "name": "worker", "restartCount": 2, "state": { "running": {} }, "lastState": { "terminated": terminated } });
            let pod = json!({
                "kind": "Pod", "metadata": { "name": "words-worker-3" },
                "status": { "containerStatuses": [{ "name": "sidecar" }, worker] },
            });
            PodView::read(&pod, &BTreeMap::new()).expect("a pod").worker_exits
        };
        let member = "3/5b1c00009f3ac2d17be84450a1b2c3d4/7";
        let ended = dead(&format!("worker {member}\nthe worker ended: signal 9\n"));
        let exits: Vec<_> = ended.iter().map(|it| (it.member.to_string(), it.exit.as_str())).collect();
        assert_eq!(exits, [(member.to_owned(), "Error, exit code 137, containerd://c, restart 2")]);
        for nothing in ["", "the worker ended: signal 9", "worker 3/5b1c/x", "The container could not be located"] {
            assert_eq!(dead(nothing), [], "{nothing:?} names no worker");
        }
        let stuck = |status: serde_json::Value| {
            let pod = json!({ "kind": "Pod", "metadata": { "name": "words-worker-3" }, "status": status });
            PodView::read(&pod, &BTreeMap::new()).expect("a pod").start_failure
        };
        let of_message = |waiting: serde_json::Value, message: &str| {
            let worker = json!({ "name": "worker", "image": "a/b:9", "state": { "waiting": waiting },
                "lastState": { "terminated": { "exitCode": 101, "message": message } } });
            stuck(json!({ "containerStatuses": [worker] })).map(|it| (it.cause, it.detail))
        };
        let of = |waiting: serde_json::Value| {
            of_message(waiting, "worker 3/5b/7\nno disk\nthe worker exited: exit code 101\n")
        };
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
        let mut set = json!({
            "kind": "StatefulSet", "metadata": { "name": "words-worker", "generation": 2 }, "spec": { "replicas": 3 },
            "status": { "observedGeneration": 1, "updateRevision": "old" },
        });
        assert_eq!(
            SetView::read(&set).expect("a set").update_revision,
            "",
            "its controller has not observed the template"
        );
        set["status"]["observedGeneration"] = 2.into();
        assert_eq!(SetView::read(&set).expect("a set").update_revision, "old");
        let mut claim = json!({
            "kind": "PersistentVolumeClaim",
            "metadata": { "name": "data-words-worker-0", "labels": { "engram.dev/cluster-id": "00" } },
            "spec": { "resources": { "requests": { "storage": "50Gi" } }, "storageClassName": "fast" },
            "status": { "phase": "Pending" },
        });
        let view = ClaimView::read(&claim).expect("a claim");
        assert_eq!((view.ordinal, view.size_bytes, view.cluster_id.as_deref()), (0, 50 << 30, Some("00")));
        assert_eq!((view.storage_class.as_deref(), view.is_pending), (Some("fast"), true));
        claim["spec"]["volumeName"] = "pvc-1".into();
        assert!(!ClaimView::read(&claim).expect("a claim").is_pending, "its volume is being bound");
    }
}
