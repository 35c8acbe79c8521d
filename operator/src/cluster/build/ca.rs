//! The ConfigMap with a cluster's trust bundle and token issuer.

use serde_json::{Value, json};

use super::{Inputs, metadata};
use crate::cluster::validate::ValidatedCluster;

/// Builds the ConfigMap, which contains no secrets.
pub(super) fn config_map(cluster: &ValidatedCluster, inputs: &Inputs) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(cluster, &cluster.names.ca()),
        "data": inputs.published,
    })
}
