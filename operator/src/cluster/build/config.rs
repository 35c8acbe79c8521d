//! The settings of the workers: the part of the spec that a worker reads.

use std::collections::BTreeMap;

use engram_api::kubernetes_only::{Tls, TlsMode};
use k8s_openapi::api::core::v1::ConfigMap;
use serde::Deserialize;
use serde_json::json;

use super::access::access_list;
use super::{Inputs, metadata};
use crate::cluster::validate::ValidatedCluster;
use crate::kube::api_object::ApiObject;

/// Name of the file in the ConfigMap.
pub(crate) const FILE: &str = "cluster.json";
/// Name of the file with the rights of accounts.
const ACCESS_FILE: &str = "access.json";

/// Field with the number of workers that bootstrap the cluster.
const BOOTSTRAP_WORKERS: &str = "bootstrapWorkers";
/// Fields of the settings that are no part of the spec.
pub(crate) const OF_WORKERS: [&str; 3] = ["clusterId", "coordinators", BOOTSTRAP_WORKERS];

/// What the operator reads from published settings.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct PublishedSettings {
    /// Addresses of the coordinators.
    pub(crate) coordinators: Option<Vec<String>>,
    /// Number of workers that bootstrap the cluster.
    pub(crate) bootstrap_workers: Option<u32>,
}

impl PublishedSettings {
    /// Reads the settings among the objects of a cluster; `None` if they are not published.
    pub(crate) fn find(objects: &[ApiObject]) -> Option<Self> {
        let maps = objects.iter().filter_map(|object| object.read_kind::<ConfigMap>()?.data);
        let text = maps.into_iter().find_map(|mut data| data.remove(FILE))?;
        serde_json::from_str(&text).ok()
    }
}

pub(super) fn config_map(cluster: &ValidatedCluster, inputs: &Inputs) -> ConfigMap {
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
    let mut data: BTreeMap<String, String> = [(FILE.to_owned(), format!("{settings:#}\n"))].into();
    // A separate file, which workers reload at runtime.
    if cluster.certificates().is_some() {
        let access = json!(access_list(cluster).entries());
        data.insert(ACCESS_FILE.to_owned(), format!("{access:#}\n"));
    }
    ConfigMap { metadata: metadata(cluster, cluster.names.config()), data: Some(data), ..ConfigMap::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_from_the_configuration_of_the_workers() {
        let config = |text: &str| {
            let data = Some([(FILE.to_owned(), text.to_owned())].into());
            ApiObject::built(&ConfigMap { data, ..ConfigMap::default() })
        };
        let service = ApiObject::built(&k8s_openapi::api::core::v1::Service::default());
        let found = PublishedSettings::find(&[service, config(r#"{"coordinators":["a:7440","b:7440"],"workers":3}"#)]);
        let coordinators = Some(vec!["a:7440".into(), "b:7440".into()]);
        assert_eq!(found, Some(PublishedSettings { coordinators, bootstrap_workers: None }));
        assert_eq!(PublishedSettings::find(&[config("{")]), None);
        assert_eq!(PublishedSettings::find(&[]), None);
    }
}
