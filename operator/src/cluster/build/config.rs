//! The settings of the workers: the part of the spec that a worker reads.

use engram_api::kubernetes_only::{Tls, TlsMode};
use serde_json::{Value, json};

use super::access::access_list;
use super::{Inputs, metadata};
use crate::cluster::validate::ValidatedCluster;

/// Name of the file in the ConfigMap.
pub(crate) const FILE: &str = "cluster.json";
/// Name of the file with the rights of accounts.
const ACCESS_FILE: &str = "access.json";

/// Field with the number of workers that bootstrap the cluster.
pub(crate) const BOOTSTRAP_WORKERS: &str = "bootstrapWorkers";

pub(super) fn config_map(cluster: &ValidatedCluster, inputs: &Inputs) -> Value {
    let spec = &cluster.spec;
    let mut settings = json!({
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
    // Absent without TLS, so that the settings of such clusters do not change.
    if cluster.certificates().is_some() {
        let tls = Tls { mode: Some(spec.tls_mode()), ..spec.tls.clone().unwrap_or_default() };
        // Workers do not distinguish who provides the Secret.
        settings["tls"] = json!(match cluster.provided_secret() {
            Some(secret) => Tls { mode: Some(TlsMode::Secret), secret_name: Some(secret), issuer_ref: None, ..tls },
            None => tls,
        });
    }
    // Set only if configured, since older workers reject unknown fields.
    if let Some(partitioner) = spec.gpu.partitioner {
        settings["gpu"]["partitioner"] = json!(partitioner);
    }
    if !spec.buffers.is_empty() {
        settings["buffers"] = json!(spec.buffers);
    }
    if let Some(bootstrap) = &spec.bootstrap {
        settings["bootstrap"] = json!(bootstrap);
        settings[BOOTSTRAP_WORKERS] = inputs.bootstrap_workers.into();
    }
    let mut data = json!({ FILE: format!("{settings:#}\n") });
    // A separate file, which workers reload at runtime.
    if cluster.certificates().is_some() {
        let access = json!(access_list(cluster).entries());
        data[ACCESS_FILE] = format!("{access:#}\n").into();
    }
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(cluster, &cluster.names.config()),
        "data": data,
    })
}
