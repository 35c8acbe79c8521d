//! The Indexed Job of a run of kind `Job`.

use std::collections::BTreeMap;

use engram_api::{JobRun, LearnerRunSpec};
use serde_json::{Value, json};

use super::{free, merge, set};
use crate::names::{CLIENT_PORT, Names, ROOTS};

/// Label with the name of the run of a Job and its pods.
pub const RUN_LABEL: &str = "engram.dev/run";
/// Annotation of a Job that the operator has suspended as `spec.suspend` of the run says: it alone resumes such a Job.
pub const SUSPENDED_BY_RUN: &str = "engram.dev/suspended-by-run";
/// Label that names the queue of Kueue.
pub const QUEUE_LABEL: &str = "kueue.x-k8s.io/queue-name";
/// Prefix of labels and annotations that are passed on from the run to its Job.
const QUEUE_PREFIX: &str = "kueue.x-k8s.io/";
/// Annotation of a pod with its index.
pub(crate) const INDEX_ANNOTATION: &str = "batch.kubernetes.io/job-completion-index";
/// Name of the container of the program.
pub(crate) const CONTAINER: &str = "main";
/// Mount path of the token and the trust bundle.
const CREDENTIALS: &str = "/var/run/engram";

/// A `LearnerRun` of kind `Job`.
#[derive(Clone, Debug)]
pub struct JobOwner {
    /// Name of the run, which is that of its Job.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its UID.
    pub uid: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its annotations.
    pub annotations: BTreeMap<String, String>,
}

impl JobOwner {
    /// Returns the owner of an object; `None` if it has no UID.
    pub fn of(object: &Value) -> Option<Self> {
        let metadata = &object["metadata"];
        let texts = |field: &str| serde_json::from_value(metadata[field].clone()).unwrap_or_default();
        Some(Self {
            name: metadata["name"].as_str()?.to_owned(),
            namespace: metadata["namespace"].as_str()?.to_owned(),
            uid: metadata["uid"].as_str()?.to_owned(),
            labels: texts("labels"),
            annotations: texts("annotations"),
        })
    }

    /// Returns the queue of Kueue that admits the Job.
    pub fn queue(&self) -> Option<&str> {
        self.labels.get(QUEUE_LABEL).map(String::as_str)
    }
}

/// Builds the Job of a run. `cluster_id` is that of a cluster with TLS, whose tokens the pods present. With a queue the Job is created
/// suspended, and the queue starts it.
pub fn job(owner: &JobOwner, spec: &LearnerRunSpec, run: &JobRun, cluster_id: Option<&str>) -> Value {
    let mut template = json!({ "metadata": { "labels": labels(owner) }, "spec": pod(owner, spec, run, cluster_id) });
    if let Some(over) = free(run.pod_template.as_ref()) {
        merge(&mut template, &over);
    }
    let mut body = json!({
        "completionMode": "Indexed",
        "completions": run.replicas,
        "parallelism": run.replicas,
        "backoffLimit": spec.backoff_limit,
        "suspend": owner.queue().is_some(),
        // A failed pod is replaced once it has ended, and one that a drain or a preemption ended is no failure of the program.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [{ "action": "Ignore", "onPodConditions": [{ "type": "DisruptionTarget", "status": "True" }] }],
        },
        "template": template,
    });
    set(&mut body, "activeDeadlineSeconds", run.active_deadline_seconds.map(Value::from));
    json!({ "apiVersion": "batch/v1", "kind": "Job", "metadata": metadata(owner), "spec": body })
}

fn labels(owner: &JobOwner) -> Value {
    json!({
        RUN_LABEL: owner.name,
        "app.kubernetes.io/name": "engram",
        "app.kubernetes.io/instance": owner.name,
        "app.kubernetes.io/component": "job",
        "app.kubernetes.io/managed-by": "engram-operator",
    })
}

fn metadata(owner: &JobOwner) -> Value {
    let passed_on = |all: &BTreeMap<String, String>| {
        let of_queue = all.iter().filter(|(name, _)| name.starts_with(QUEUE_PREFIX));
        json!(of_queue.collect::<BTreeMap<_, _>>())
    };
    let mut labels = labels(owner);
    merge(&mut labels, &passed_on(&owner.labels));
    json!({
        "name": owner.name,
        "namespace": owner.namespace,
        "labels": labels,
        "annotations": passed_on(&owner.annotations),
        "ownerReferences": [{
            "apiVersion": engram_api::API_VERSION,
            "kind": "LearnerRun",
            "name": owner.name,
            "uid": owner.uid,
            "controller": true,
        }],
    })
}

fn pod(owner: &JobOwner, spec: &LearnerRunSpec, run: &JobRun, cluster_id: Option<&str>) -> Value {
    let mut pod = json!({
        "restartPolicy": "Never",
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "terminationGracePeriodSeconds": run.grace_period_seconds,
        "securityContext": { "seccompProfile": { "type": "RuntimeDefault" } },
        "containers": [container(owner, spec, run, cluster_id.is_some())],
    });
    if let Some(id) = cluster_id {
        let names = Names { cluster: spec.cluster_ref.name.clone() };
        let token = json!({ "path": "token", "audience": format!("engram/{id}"), "expirationSeconds": 3600 });
        let roots = json!({ "name": names.ca(), "items": [{ "key": ROOTS, "path": ROOTS }] });
        let sources = json!([{ "serviceAccountToken": token }, { "configMap": roots }]);
        set(&mut pod, "volumes", Some(json!([{ "name": "engram", "projected": { "sources": sources } }])));
    }
    pod
}

fn container(owner: &JobOwner, spec: &LearnerRunSpec, run: &JobRun, has_tls: bool) -> Value {
    let index = json!({ "fieldRef": { "fieldPath": format!("metadata.annotations['{INDEX_ANNOTATION}']") } });
    let address = format!("{}.{}.svc:{CLIENT_PORT}", spec.cluster_ref.name, owner.namespace);
    let mut variables = vec![
        json!({ "name": "ENGRAM_ADDRESS", "value": address }),
        json!({ "name": "ENGRAM_RUN", "value": owner.name }),
        json!({ "name": "ENGRAM_GROUP", "value": run.group(&owner.name) }),
        json!({ "name": "ENGRAM_RANK", "valueFrom": index }),
        json!({ "name": "ENGRAM_WORLD_SIZE", "value": run.replicas.to_string() }),
    ];
    if has_tls {
        variables.extend([
            json!({ "name": "ENGRAM_CERTIFICATE_AUTHORITY", "value": format!("{CREDENTIALS}/{ROOTS}") }),
            json!({ "name": "ENGRAM_TOKEN_FILE", "value": format!("{CREDENTIALS}/token") }),
        ]);
    }
    variables.extend(run.env.iter().map(|variable| json!(variable)));
    let mut container = json!({
        "name": CONTAINER,
        "image": run.image,
        "command": run.command,
        "env": variables,
        // Exit code and last lines of a failed process are in the status of its pod, which the operator reads.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": { "allowPrivilegeEscalation": false },
    });
    for (field, value) in [
        ("args", (!run.args.is_empty()).then(|| json!(run.args))),
        ("workingDir", run.working_dir.as_ref().map(|folder| json!(folder))),
        ("resources", run.resources.as_ref().map(|resources| json!(resources))),
    ] {
        set(&mut container, field, value);
    }
    if has_tls {
        let mount = json!({ "name": "engram", "mountPath": CREDENTIALS, "readOnly": true });
        set(&mut container, "volumeMounts", Some(json!([mount])));
    }
    container
}
