//! The settings of the workers: the part of the spec that a worker reads.

use serde_json::{Value, json};

use super::{Inputs, metadata};
use crate::validate::ValidatedCluster;

/// Name of the file in the ConfigMap.
pub(crate) const FILE: &str = "cluster.json";

pub(super) fn config_map(cluster: &ValidatedCluster, inputs: &Inputs) -> Value {
    let spec = &cluster.spec;
    let settings = json!({
        "clusterId": inputs.cluster_id,
        "coordinators": inputs.coordinators,
        "workers": spec.workers,
        "replicationFactor": spec.replication_factor,
        "partitions": spec.partitions,
        "capacity": spec.capacity,
        "learning": spec.learning,
        "features": spec.features,
        "durability": spec.durability,
        "soloPolicy": spec.solo_policy,
        "restartGrace": spec.restart_grace,
        "maintenance": spec.maintenance,
        "gpu": { "mode": spec.gpu.mode, "threshold": spec.gpu.threshold },
    });
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(cluster, &cluster.names.config()),
        "data": { FILE: format!("{settings:#}\n") },
    })
}
