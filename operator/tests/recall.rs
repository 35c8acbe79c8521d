//! A cluster whose spec is refused is remembered by what was made for it.

use engram_api::status::WorkerRevision;
use engram_operator::build::{Inputs, objects};
use engram_operator::{MapView, Observed, PartitionView, PodView, ValidatedCluster, recall, steer_on, validate};
use serde_json::{Value, json};

const CLUSTER_ID: &str = "0f6c1d528a534a0a9d1e2f8f5f0f7a11";

fn object(spec: &Value) -> Value {
    json!({
        "apiVersion": "engram.dev/v1alpha1",
        "kind": "LearnerCluster",
        "metadata": {
            "name": "words", "namespace": "research", "uid": "0f6c1d52-8a53-4a0a-9d1e-2f8f5f0f7a11", "generation": 4,
        },
        "spec": spec,
    })
}

/// ConfigMap and StatefulSet of a cluster whose spec is good.
fn made(spec: &Value) -> (ValidatedCluster, Value, Value) {
    let cluster = validate(&object(spec)).unwrap_or_else(|refused| panic!("{refused}"));
    let inputs = Inputs {
        cluster_id: CLUSTER_ID.into(),
        worker: WorkerRevision { image: "registry.example.com/engram/worker:0.1.0".into(), template_revision: 1 },
        replicas: 3,
        max_unavailable: 1,
        gpus: 0,
        coordinators: vec!["engram-coordinator.engram-system.svc:7440".into()],
        pull_secrets: Vec::new(),
        published: [("ca.pem".to_owned(), "a certificate\n".to_owned())].into(),
        bootstrap_workers: 3,
    };
    let all = objects(&cluster, &inputs);
    let of = |kind: &str| all.iter().find(|object| object["kind"] == kind).expect("it is built").clone();
    (cluster, of("ConfigMap"), of("StatefulSet"))
}

#[test]
fn what_a_coordinator_needs_of_a_refused_cluster_is_in_what_was_made_for_it() {
    let sound = [
        json!({ "workers": 5, "replicationFactor": 3, "partitions": 64, "restartGrace": "7s",
            "durability": { "mode": "Replicated" }, "scheduling": { "topologySpread": "Zone" } }),
        json!({ "workers": 3, "replicationFactor": 2, "partitions": 16, "storage": { "ephemeral": true },
            "gpu": { "mode": "Disabled" }, "features": { "dimension": 8 } }),
        json!({ "workers": 1, "replicationFactor": 1, "storage": { "size": "50Gi" } }),
        json!({ "workers": 2, "tls": { "mode": "Auto", "certificateLifetime": "1h" } }),
        json!({ "workers": 2, "tls": { "mode": "Secret", "secretName": "words-tls" } }),
        json!({ "workers": 2, "tls": { "mode": "CertManager", "issuerRef": { "name": "ours" } } }),
        json!({ "workers": 2, "tls": { "mode": "Disabled" } }),
    ];
    for spec in sound {
        let (before, config, set) = made(&spec);
        // Whoever edited it wrote nonsense into many places.
        let broken = object(&json!({ "workers": 0, "replicationFactor": 9, "partitions": "many", "unknown": 1 }));
        assert!(validate(&broken).is_err());
        let after = recall(&broken, &config, &set).unwrap_or_else(|| panic!("{spec} is not recalled"));
        let known = |cluster: &ValidatedCluster| {
            let spec = &cluster.spec;
            json!([
                spec.workers,
                spec.replication_factor,
                spec.partitions,
                spec.restart_grace,
                spec.durability,
                cluster.certificates().map(|lifetime| lifetime.as_secs()),
                cluster.given_secret(),
                spec.learning,
                spec.features,
                cluster.is_ephemeral(),
                spec.scheduling.as_ref().and_then(|it| it.topology_spread)
                    == Some(engram_api::kubernetes_only::TopologySpread::Zone),
                cluster.uid,
                cluster.names.cluster,
                cluster.namespace,
            ])
        };
        assert_eq!(known(&after), known(&before));
    }
}

#[test]
fn a_refused_cluster_is_steered_as_it_was_unless_it_is_suspended_or_has_no_map() {
    let (cluster, ..) = made(&json!({ "workers": 3, "replicationFactor": 2 }));
    let partition = PartitionView { primary: 0, in_sync: vec![0, 1], learners: Vec::new(), activated: true };
    let map = MapView { cluster_id: CLUSTER_ID.into(), partitions: vec![partition], ..MapView::default() };
    let stopping = PodView { ordinal: 2, terminating: true, ..PodView::default() };
    let mut observed = Observed { map: Some(map), pods: vec![stopping], ..Observed::default() };
    let steering = steer_on(&cluster, &observed).expect("it is coordinated");
    assert_eq!((steering.workers, steering.emptied.len()), (3, 0));
    assert_eq!(steering.relieved.into_iter().collect::<Vec<_>>(), [2]);
    observed.map.as_mut().expect("it has one").suspended = true;
    assert_eq!(steer_on(&cluster, &observed), None);
    observed.map = None;
    assert_eq!(steer_on(&cluster, &observed), None);
}
