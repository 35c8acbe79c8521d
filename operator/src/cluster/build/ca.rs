//! The ConfigMap with a cluster's trust bundle and token issuer.

use k8s_openapi::api::core::v1::ConfigMap;

use super::{Inputs, metadata};
use crate::cluster::validate::ValidatedCluster;

/// Builds the ConfigMap, which contains no secrets.
pub(super) fn config_map(cluster: &ValidatedCluster, inputs: &Inputs) -> ConfigMap {
    ConfigMap {
        metadata: metadata(cluster, cluster.names.ca()),
        data: Some(inputs.published.clone()),
        ..ConfigMap::default()
    }
}
