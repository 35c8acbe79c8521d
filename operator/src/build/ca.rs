//! Whom a cluster's processes and clients believe.

use serde_json::{Value, json};

use super::{Inputs, metadata};
use crate::validate::ValidatedCluster;

/// Nothing in it is secret: whoever may read it knows how to tell the cluster from others.
pub(super) fn config_map(cluster: &ValidatedCluster, inputs: &Inputs) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(cluster, &cluster.names.ca()),
        "data": inputs.published,
    })
}
