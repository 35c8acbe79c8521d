//! ServiceAccounts, Roles and access rights of workers and clients.

use engram_api::AccessList;
use engram_api::kubernetes_only::{Access, Right};
use serde_json::{Value, json};

use super::{Inputs, metadata, set};
use crate::cluster::validate::ValidatedCluster;

pub(super) fn service_account(cluster: &ValidatedCluster, inputs: &Inputs) -> Value {
    let mut account = json!({
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(cluster, &cluster.names.worker()),
        // Tokens are projected by an explicit volume.
        "automountServiceAccountToken": false,
    });
    // Not in the pod template, so that changed secrets restart no worker.
    let secrets: Vec<Value> = inputs.pull_secrets.iter().map(|name| json!({ "name": name })).collect();
    set(&mut account, "imagePullSecrets", Some(secrets.into()).filter(|_| !inputs.pull_secrets.is_empty()));
    account
}

/// Builds the Role of workers: access to the map of their own cluster only.
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

/// Builds the ServiceAccount of human users, who request its tokens. It has no permissions in Kubernetes.
pub(super) fn client_account(cluster: &ValidatedCluster) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(cluster, &cluster.names.client()),
        "automountServiceAccountToken": false,
    })
}

/// Returns the access rights of a cluster: those of the spec, and all for the account of human users. Overrides of the map are authorized by
/// Kubernetes instead.
pub(crate) fn access_list(cluster: &ValidatedCluster) -> AccessList {
    let people = Access { service_account: cluster.names.client(), namespace: None, rights: vec![Right::Admin] };
    let configured = cluster.spec.access.iter().flatten().cloned();
    AccessList::new(configured.chain([people]), &cluster.namespace)
}
