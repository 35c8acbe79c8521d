//! The StatefulSet of the workers: template revision 1.
//!
//! A later revision gets a separate file, so that a new operator builds unchanged objects for pinned clusters.

use engram_api::kubernetes_only::{RetainPolicy, TopologySpread};
use serde_json::{Value, json};

use super::{Inputs, free, merge, metadata, selector, set, text};
use crate::cluster::validate::ValidatedCluster;
use crate::names::{
    ADMIN_PORT, CLIENT_PORT, CLUSTER_ID_LABEL, CSR_AUDIENCE, GRACE_SECONDS, HTTP_PORT, PEER_PORT, USER, WORKER,
};

/// Default extended resource of GPUs.
pub(crate) const GPU_RESOURCE: &str = "nvidia.com/gpu";

/// Node label of the zone.
pub(crate) const ZONE_KEY: &str = "topology.kubernetes.io/zone";

pub(super) fn stateful_set(cluster: &ValidatedCluster, inputs: &Inputs) -> Value {
    let names = &cluster.names;
    let storage = cluster.spec.storage.as_ref();
    let mut spec = json!({
        "serviceName": names.worker(),
        "replicas": inputs.replicas,
        // Workers start independently of each other.
        "podManagementPolicy": "Parallel",
        // The operator deletes pods itself.
        "updateStrategy": { "type": "OnDelete" },
        "revisionHistoryLimit": 3,
        "selector": { "matchLabels": selector(cluster) },
        "template": template(cluster, inputs),
    });
    if !cluster.is_ephemeral() {
        let retained = storage.and_then(|storage| storage.retain_policy) != Some(RetainPolicy::Delete);
        let mut claim = json!({
            "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": storage.and_then(|storage| storage.size).map(|size| size.to_string()) } },
        });
        set(&mut claim, "storageClassName", text(storage.and_then(|storage| storage.storage_class_name.as_ref())));
        let mut labels = selector(cluster);
        set(&mut labels, CLUSTER_ID_LABEL, Some(inputs.cluster_id.as_str().into()));
        let template = json!({
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": { "name": "data", "labels": labels },
            "spec": claim,
        });
        set(&mut spec, "volumeClaimTemplates", Some(json!([template])));
        let kept = json!({ "whenDeleted": if retained { "Retain" } else { "Delete" }, "whenScaled": "Retain" });
        set(&mut spec, "persistentVolumeClaimRetentionPolicy", Some(kept));
    }
    json!({
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(cluster, &names.worker()),
        "spec": spec,
    })
}

fn template(cluster: &ValidatedCluster, inputs: &Inputs) -> Value {
    let scheduling = cluster.spec.scheduling.as_ref();
    let mut metadata = metadata(cluster, "");
    if let Some(metadata) = metadata.as_object_mut() {
        metadata.retain(|field, _| field == "labels");
    }
    let mut pod = json!({
        "serviceAccountName": cluster.names.worker(),
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": true,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": { "type": "RuntimeDefault" },
        },
        "containers": [container(cluster, inputs)],
        "volumes": volumes(cluster),
        "tolerations": tolerations(cluster, inputs),
        "topologySpreadConstraints": spread(cluster),
    });
    for (field, value) in [
        ("priorityClassName", text(scheduling.and_then(|it| it.priority_class_name.as_ref()))),
        ("schedulerName", text(scheduling.and_then(|it| it.scheduler_name.as_ref()))),
        ("affinity", free(scheduling.and_then(|it| it.affinity.as_ref()))),
        ("runtimeClassName", text(cluster.spec.gpu.runtime_class_name.as_ref())),
    ] {
        set(&mut pod, field, value);
    }
    if let Some(template) = text(cluster.spec.gpu.resource_claim_template_name.as_ref()) {
        set(&mut pod, "resourceClaims", Some(json!([{ "name": "gpu", "resourceClaimTemplateName": template }])));
    }
    let mut template = json!({ "metadata": metadata, "spec": pod });
    if let Some(over) = &cluster.spec.pod_template {
        merge(&mut template, &Value::Object(over.clone()));
    }
    template
}

fn container(cluster: &ValidatedCluster, inputs: &Inputs) -> Value {
    let probe = |path: &str, period: u32, failures: u32| {
        json!({
            "httpGet": { "path": path, "port": "http" },
            "periodSeconds": period, "timeoutSeconds": 2, "failureThreshold": failures,
        })
    };
    let field = |name: &str, path: &str| json!({ "name": name, "valueFrom": { "fieldRef": { "fieldPath": path } } });
    let mut environment = vec![
        field("POD_NAME", "metadata.name"),
        field("POD_NAMESPACE", "metadata.namespace"),
        field("POD_UID", "metadata.uid"),
        field("POD_IP", "status.podIP"),
        field("NODE_NAME", "spec.nodeName"),
        json!({ "name": "ENGRAM_CLUSTER", "value": cluster.names.cluster }),
    ];
    environment.extend(inputs.traces.iter().map(|(name, value)| json!({ "name": name, "value": value })));
    json!({
        "name": WORKER,
        "image": inputs.worker.image,
        "ports": [
            { "name": "client", "containerPort": CLIENT_PORT, "protocol": "TCP" },
            { "name": "peer", "containerPort": PEER_PORT, "protocol": "TCP" },
            { "name": "admin", "containerPort": ADMIN_PORT, "protocol": "TCP" },
            { "name": "http", "containerPort": HTTP_PORT, "protocol": "TCP" },
        ],
        "env": environment,
        "resources": resources(cluster, inputs),
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "readOnlyRootFilesystem": true,
            "capabilities": { "drop": ["ALL"] },
        },
        // Recovery precedes serving and may take up to ten minutes.
        "startupProbe": probe("/startupz", 2, 300),
        "readinessProbe": probe("/readyz", 2, 2),
        // Liveness depends on the process's event loops only, not on peers, map or GPUs.
        "livenessProbe": probe("/livez", 5, 6),
        "lifecycle": { "preStop": { "exec": { "command": ["/engram-worker", "drain", "--deadline=45s"] } } },
        "volumeMounts": mounts(cluster),
    })
}

/// Mount path of the volumes for runs.
const RUN_INPUTS: &str = "/inputs";
/// Mount path of the volumes for snapshots.
const SNAPSHOTS: &str = "/snapshots";

fn mounts(cluster: &ValidatedCluster) -> Vec<Value> {
    let mut mounts = vec![
        json!({ "name": "data", "mountPath": "/var/lib/engram" }),
        json!({ "name": "config", "mountPath": "/etc/engram", "readOnly": true }),
        json!({ "name": "tmp", "mountPath": "/tmp" }),
        json!({ "name": "tokens", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": true }),
    ];
    if cluster.certificates().is_some() {
        mounts.push(json!({ "name": "ca", "mountPath": "/etc/engram-ca", "readOnly": true }));
        let mut identity = json!({ "name": "identity", "mountPath": "/run/engram" });
        set(&mut identity, "readOnly", cluster.provided_secret().map(|_| true.into()));
        mounts.push(identity);
    }
    let runs = cluster.spec.inputs.iter().flatten().map(|input| {
        let path = format!("{RUN_INPUTS}/{}", input.name);
        json!({ "name": format!("input-{}", input.name), "mountPath": path, "readOnly": true })
    });
    mounts.extend(runs);
    mounts.extend(cluster.spec.snapshot_volumes.iter().flatten().map(|volume| {
        let path = format!("{SNAPSHOTS}/{}", volume.name);
        json!({ "name": format!("snapshots-{}", volume.name), "mountPath": path })
    }));
    if bootstrap_secret(cluster).is_some() {
        mounts.push(json!({ "name": "bootstrap", "mountPath": "/bootstrap", "readOnly": true }));
    }
    mounts
}

/// Returns the Secret with the storage credentials for bootstrap, which workers read from a volume.
fn bootstrap_secret(cluster: &ValidatedCluster) -> Option<&str> {
    let place = &cluster.spec.bootstrap.as_ref()?.snapshot;
    place.secret_ref.as_ref().map(|secret| secret.name.as_str())
}

/// Default resource requests. Without a CPU request heartbeats are late on a busy node, and the worker is repeatedly declared dead. The memory
/// is several times that of an empty worker, and small enough for three workers on a laptop.
const REQUESTS: [(&str, &str); 2] = [("cpu", "250m"), ("memory", "256Mi")];

fn resources(cluster: &ValidatedCluster, inputs: &Inputs) -> Value {
    let mut resources = cluster.spec.resources.as_ref().map_or_else(|| json!({}), |resources| json!(resources));
    for (name, amount) in REQUESTS {
        // Kubernetes treats a limit without a request as a request.
        if ["requests", "limits"].iter().all(|kind| resources[kind].get(name).is_none()) {
            merge(&mut resources, &json!({ "requests": { name: amount } }));
        }
    }
    let gpu = &cluster.spec.gpu;
    if cluster.claims_gpu() {
        merge(&mut resources, &json!({ "claims": [{ "name": "gpu" }] }));
    } else if inputs.gpus > 0 {
        let name = gpu.resource_name.as_deref().unwrap_or(GPU_RESOURCE);
        merge(&mut resources, &json!({ "limits": { name: inputs.gpus.to_string() } }));
    }
    resources
}

fn volumes(cluster: &ValidatedCluster) -> Vec<Value> {
    let mut tokens = vec![json!({ "serviceAccountToken": { "path": "token", "expirationSeconds": 3600 } })];
    if cluster.certificates().is_some() && cluster.provided_secret().is_none() {
        // The shortest possible expiry: it is used at start and for renewals only.
        let token = json!({ "path": CSR_AUDIENCE, "audience": CSR_AUDIENCE, "expirationSeconds": 600 });
        tokens.push(json!({ "serviceAccountToken": token }));
    }
    tokens.extend([
        json!({ "configMap": { "name": "kube-root-ca.crt", "items": [{ "key": "ca.crt", "path": "ca.crt" }] } }),
        json!({ "downwardAPI": { "items": [{ "path": "namespace", "fieldRef": { "fieldPath": "metadata.namespace" } }] } }),
    ]);
    let mut volumes = vec![
        json!({ "name": "config", "configMap": { "name": cluster.names.config() } }),
        json!({ "name": "tmp", "emptyDir": { "medium": "Memory", "sizeLimit": "64Mi" } }),
        json!({ "name": "tokens", "projected": { "sources": tokens } }),
    ];
    if cluster.certificates().is_some() {
        volumes.push(json!({ "name": "ca", "configMap": { "name": cluster.names.ca() } }));
        volumes.push(match cluster.provided_secret() {
            // Not optional: a new pod waits for it, and deleting it by mistake does not affect running pods.
            Some(secret) => {
                let items = ["tls.crt", "tls.key"].map(|key| json!({ "key": key, "path": key }));
                let of_keys = json!({ "secretName": secret, "defaultMode": 0o440, "items": items });
                json!({ "name": "identity", "secret": of_keys })
            }
            // The pod generates its key, which is never on disk.
            None => json!({ "name": "identity", "emptyDir": { "medium": "Memory", "sizeLimit": "1Mi" } }),
        });
    }
    if cluster.is_ephemeral() {
        volumes.push(json!({ "name": "data", "emptyDir": {} }));
    }
    volumes.extend(cluster.spec.inputs.iter().flatten().map(|input| {
        let claim = json!({ "claimName": input.persistent_volume_claim.claim_name, "readOnly": true });
        json!({ "name": format!("input-{}", input.name), "persistentVolumeClaim": claim })
    }));
    volumes.extend(cluster.spec.snapshot_volumes.iter().flatten().map(|volume| {
        let claim = json!({ "claimName": volume.persistent_volume_claim.claim_name });
        json!({ "name": format!("snapshots-{}", volume.name), "persistentVolumeClaim": claim })
    }));
    if let Some(secret) = bootstrap_secret(cluster) {
        // Optional: it is not needed after bootstrap, and its absence before is reported by the worker.
        let of_keys = json!({ "secretName": secret, "optional": true, "defaultMode": 0o440 });
        volumes.push(json!({ "name": "bootstrap", "secret": of_keys }));
    }
    volumes
}

fn tolerations(cluster: &ValidatedCluster, inputs: &Inputs) -> Vec<Value> {
    // Without a time limit: an outage of the control plane taints all nodes and must not evict pods.
    let mut all: Vec<Value> = ["not-ready", "unreachable"]
        .map(|taint| json!({ "key": format!("node.kubernetes.io/{taint}"), "operator": "Exists", "effect": "NoExecute" }))
        .into();
    if inputs.gpus > 0 {
        let name = cluster.spec.gpu.resource_name.as_deref().unwrap_or(GPU_RESOURCE);
        all.push(json!({ "key": name, "operator": "Exists", "effect": "NoSchedule" }));
    }
    let configured = cluster.spec.scheduling.as_ref().and_then(|scheduling| scheduling.tolerations.as_ref());
    all.extend(configured.into_iter().flatten().map(|toleration| json!(toleration)));
    all
}

/// Spreads workers over nodes or zones.
fn spread(cluster: &ValidatedCluster) -> Value {
    let zones = cluster.spec.scheduling.as_ref().and_then(|scheduling| scheduling.topology_spread);
    let key = match zones {
        Some(TopologySpread::Zone) => ZONE_KEY,
        Some(TopologySpread::Node) | None => "kubernetes.io/hostname",
    };
    json!([{
        "maxSkew": 1,
        "topologyKey": key,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": { "matchLabels": selector(cluster) },
    }])
}
