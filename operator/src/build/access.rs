//! Who a worker is, and the one object that it may open.

use serde_json::{Value, json};

use super::{Inputs, metadata, set};
use crate::validate::ValidatedCluster;

pub(super) fn service_account(cluster: &ValidatedCluster, inputs: &Inputs) -> Value {
    let mut account = json!({
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(cluster, &cluster.names.worker()),
        // A worker gets the tokens that it needs by a volume of its own.
        "automountServiceAccountToken": false,
    });
    // Here and not in the pods' template: an operator that is told of another secret restarts nobody.
    let secrets: Vec<Value> = inputs.pull_secrets.iter().map(|name| json!({ "name": name })).collect();
    set(&mut account, "imagePullSecrets", Some(secrets.into()).filter(|_| !inputs.pull_secrets.is_empty()));
    account
}

/// A worker reads and changes the map of its own cluster and nothing else.
pub(super) fn role(cluster: &ValidatedCluster) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": metadata(cluster, &cluster.names.worker()),
        "rules": [{
            "apiGroups": [engram_api::crd::GROUP],
            "resources": ["partitionmaps"],
            "resourceNames": [cluster.names.cluster],
            "verbs": ["get", "watch", "patch"],
        }],
    })
}

pub(super) fn role_binding(cluster: &ValidatedCluster) -> Value {
    let name = cluster.names.worker();
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": metadata(cluster, &name),
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name },
        "subjects": [{ "kind": "ServiceAccount", "name": name, "namespace": cluster.namespace }],
    })
}
