//! Who a worker is, and the one object that it may open; who people are to the workers, and what accounts may do with a cluster.

use engram_api::AccessList;
use engram_api::kubernetes_only::{Access, Right};
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

/// Whoever may get a token of it is a user of the cluster. Nothing runs as it, and it may do nothing in Kubernetes.
pub(super) fn client_account(cluster: &ValidatedCluster) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(cluster, &cluster.names.client()),
        "automountServiceAccountToken": false,
    })
}

/// What each account may do with the cluster: as the spec says, and everything for people. What the rules of the map forbid is not in it:
/// that is a right of Kubernetes.
pub(crate) fn access_list(cluster: &ValidatedCluster) -> AccessList {
    let people = Access { service_account: cluster.names.client(), namespace: None, rights: vec![Right::Admin] };
    let configured = cluster.spec.access.iter().flatten().cloned();
    AccessList::new(configured.chain([people]), &cluster.namespace)
}
