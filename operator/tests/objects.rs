//! Golden files of the generated objects.
//!
//! Update the files with `UPDATE_GOLDEN=1 cargo test -p engram-operator` and review the diff: changing the pod template of an existing
//! revision restarts all workers.

#[path = "objects/job.rs"]
mod job;

use std::path::Path;

use engram_api::status::WorkerRevision;
use engram_identity::Name;
use engram_operator::build::{Inputs, certificate, objects};
use engram_operator::{ClusterObject, ValidatedCluster, validate};
use serde_json::{Value, json};

fn cluster(spec: &Value) -> ValidatedCluster {
    let object = json!({
        "apiVersion": "engram.dev/v1alpha1",
        "kind": "LearnerCluster",
        "metadata": {
            "name": "words", "namespace": "research", "uid": "0f6c1d52-8a53-4a0a-9d1e-2f8f5f0f7a11", "generation": 1,
        },
        "spec": spec,
    });
    validate(&serde_json::from_value::<ClusterObject>(object).expect("an object"))
        .unwrap_or_else(|refused| panic!("{refused}"))
}

fn inputs(gpus: u32) -> Inputs {
    Inputs {
        cluster_id: "0f6c1d528a534a0a9d1e2f8f5f0f7a11".into(),
        worker: WorkerRevision { image: "registry.example.com/engram/worker:0.1.0".into(), template_revision: 1 },
        replicas: 3,
        max_unavailable: 1,
        gpus,
        coordinators: vec!["engram-coordinator.engram-system.svc:7440".into()],
        pull_secrets: Vec::new(),
        traces: vec![("OTEL_EXPORTER_OTLP_ENDPOINT".into(), "http://jaeger.observability:4317".into())],
        published: [("ca.pem".to_owned(), "a certificate\n".to_owned())].into(),
        bootstrap_workers: 3,
    }
}

fn check(case: &str, cluster: &ValidatedCluster, inputs: &Inputs) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(case);
    let update = std::env::var_os("UPDATE_GOLDEN").is_some();
    std::fs::create_dir_all(&folder).expect("a folder");
    let mut names = Vec::new();
    let id = inputs.cluster_id.parse().expect("a cluster id");
    let certificate = certificate(cluster, &Name::shared_by_workers(&cluster.namespace, &cluster.names.cluster, id));
    for object in objects(cluster, inputs).into_iter().chain(certificate) {
        let (kind, name) = (object.kind().name(), object.name());
        let file = format!("{}-{name}.yaml", kind.to_lowercase());
        let yaml = serde_saphyr::to_string(object.content()).expect("YAML");
        if update {
            std::fs::write(folder.join(&file), &yaml).expect("the golden file can be written");
        }
        let golden = std::fs::read_to_string(folder.join(&file)).unwrap_or_default();
        assert!(golden == yaml, "{case}/{file} differs:\n{yaml}");
        names.push(file);
    }
    for entry in std::fs::read_dir(&folder).expect("a folder") {
        let file = entry.expect("an entry").file_name().to_string_lossy().into_owned();
        assert!(names.contains(&file), "{case}/{file} is obsolete: delete it");
    }
}

#[test]
fn generated_objects_match_golden_files() {
    check("plain", &cluster(&json!({ "workers": 3 })), &inputs(0));
    let everything = json!({
        "workers": 3,
        "gpu": { "mode": "Required", "count": 2, "runtimeClassName": "nvidia" },
        "storage": { "ephemeral": true },
        "tls": { "mode": "Disabled" },
        "service": { "type": "LoadBalancer", "annotations": { "team": "ml" } },
        "networkPolicy": { "clients": [{ "namespaceSelector": { "matchLabels": { "team": "ml" } } }] },
        "scheduling": {
            "priorityClassName": "high", "schedulerName": "other", "topologySpread": "Zone",
            "tolerations": [{ "key": "a", "operator": "Exists" }],
            "affinity": { "nodeAffinity": {} },
        },
        "resources": { "requests": { "cpu": "2", "memory": "4Gi" } },
        "inputs": [{ "name": "corpus", "persistentVolumeClaim": { "claimName": "corpus-2026" } }],
        "snapshotVolumes": [{ "name": "backups", "persistentVolumeClaim": { "claimName": "backups-nfs" } }],
        "podTemplate": {
            "metadata": { "annotations": { "a": "b" } },
            "spec": { "containers": [
                { "name": "worker", "env": [{ "name": "A", "value": "B" }] },
                { "name": "sidecar", "image": "s:1" },
            ] },
        },
    });
    check("everything", &cluster(&everything), &inputs(2));
    let kept = json!({
        "workers": 3,
        "storage": { "size": "5Gi", "storageClassName": "fast", "retainPolicy": "Delete" },
        "networkPolicy": { "enabled": false },
        "gpu": { "resourceClaimTemplateName": "whole-gpu" },
    });
    let secured = json!({ "workers": 3, "tls": { "mode": "Auto", "certificateLifetime": "1h" } });
    check("with-certificates", &cluster(&secured), &inputs(0));
    let given = json!({ "workers": 3, "tls": { "mode": "Secret", "secretName": "words-tls" } });
    check("with-provided-certificates", &cluster(&given), &inputs(0));
    let asked = json!({
        "workers": 3,
        "tls": { "mode": "CertManager", "issuerRef": { "name": "our-ca" }, "certificateLifetime": "90d" },
    });
    check("with-certificates-of-cert-manager", &cluster(&asked), &inputs(0));
    check("deleted-with-cluster", &cluster(&kept), &inputs(0));
}

#[test]
fn an_invalid_spec_is_rejected_with_all_problems() {
    let object = json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerCluster", "metadata": { "name": "words" },
        "spec": {
            "workers": 1, "replicationFactor": 2, "tls": { "mode": "Secret" },
            "podTemplate": { "spec": { "hostNetwork": true } },
        },
    });
    let refused = validate(&serde_json::from_value::<ClusterObject>(object).expect("an object"))
        .expect_err("three problems")
        .message;
    for part in ["spec.replicationFactor is 2", "spec.tls.mode is Secret", "spec.podTemplate.spec.hostNetwork"] {
        assert!(refused.contains(part), "{refused}");
    }
}
