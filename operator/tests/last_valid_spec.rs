//! Recovery of the last valid spec from generated objects.

use engram_api::status::WorkerRevision;
use engram_operator::build::{Inputs, objects};
use engram_operator::{
    ApiObject, ClusterObject, MapView, Observation, PartitionView, PodView, ValidatedCluster,
    coordinator_goal_of_invalid_spec, last_valid_spec, validate,
};
use serde_json::{Value, json};

const CLUSTER_ID: &str = "0f6c1d528a534a0a9d1e2f8f5f0f7a11";

fn object(spec: &Value) -> ClusterObject {
    serde_json::from_value::<ClusterObject>(json!({
        "apiVersion": "engram.dev/v1alpha1",
        "kind": "LearnerCluster",
        "metadata": {
            "name": "words", "namespace": "research", "uid": "0f6c1d52-8a53-4a0a-9d1e-2f8f5f0f7a11", "generation": 4,
        },
        "spec": spec,
    }))
    .expect("an object")
}

/// ConfigMap and StatefulSet of a cluster with a valid spec.
fn build(spec: &Value) -> (ValidatedCluster, ApiObject, ApiObject) {
    let cluster = validate(&object(spec)).unwrap_or_else(|refused| panic!("{refused}"));
    let inputs = Inputs {
        cluster_id: CLUSTER_ID.into(),
        worker: WorkerRevision { image: "registry.example.com/engram/worker:0.1.0".into(), template_revision: 1 },
        replicas: 3,
        max_unavailable: 1,
        gpus: 0,
        coordinators: vec!["engram-coordinator.engram-system.svc:7440".into()],
        pull_secrets: Vec::new(),
        traces: Vec::new(),
        published: [("ca.pem".to_owned(), "a certificate\n".to_owned())].into(),
        bootstrap_workers: 3,
    };
    let all = objects(&cluster, &inputs);
    let of = |kind: &str| all.iter().find(|object| object.kind().name() == kind).expect("it is built").clone();
    (cluster, of("ConfigMap"), of("StatefulSet"))
}

#[test]
fn the_coordinators_part_of_a_spec_is_recovered_from_generated_objects() {
    let valid = [
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
    for spec in valid {
        let (before, config, set) = build(&spec);
        // An edit with several errors.
        let broken = object(&json!({ "workers": 0, "replicationFactor": 9, "partitions": "many", "unknown": 1 }));
        assert!(validate(&broken).is_err());
        let after = last_valid_spec(&broken, &config, &set).unwrap_or_else(|| panic!("{spec} is not recovered"));
        let relevant = |cluster: &ValidatedCluster| {
            let spec = &cluster.spec;
            json!([
                spec.workers,
                spec.replication_factor,
                spec.partitions,
                spec.restart_grace,
                spec.durability,
                cluster.certificates().map(|lifetime| lifetime.as_secs()),
                cluster.provided_secret(),
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
        assert_eq!(relevant(&after), relevant(&before));
    }
}

#[test]
fn an_invalid_cluster_is_coordinated_unless_suspended_or_without_a_map() {
    let (cluster, ..) = build(&json!({ "workers": 3, "replicationFactor": 2 }));
    let partition = PartitionView { primary: 0, in_sync: vec![0, 1], learners: Vec::new(), activated: true };
    let map = MapView { cluster_id: CLUSTER_ID.into(), partitions: vec![partition], ..MapView::default() };
    let stopping = PodView { ordinal: 2, terminating: true, ..PodView::default() };
    let mut observed = Observation { map: Some(map), pods: vec![stopping], ..Observation::default() };
    let goal = coordinator_goal_of_invalid_spec(&cluster, &observed).expect("it is coordinated");
    assert_eq!((goal.workers, goal.evacuating.len()), (3, 0));
    assert_eq!(goal.without_primaries.into_iter().collect::<Vec<_>>(), [2]);
    observed.map.as_mut().expect("it has one").suspended = true;
    assert_eq!(coordinator_goal_of_invalid_spec(&cluster, &observed), None);
    observed.map = None;
    assert_eq!(coordinator_goal_of_invalid_spec(&cluster, &observed), None);
}
