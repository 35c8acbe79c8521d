//! ServiceAccounts, Roles and access rights of workers and clients.

use engram_api::AccessList;
use engram_api::kubernetes_only::{Access, Right};
use k8s_openapi::api::core::v1::{LocalObjectReference, ServiceAccount};
use k8s_openapi::api::rbac::v1::{PolicyRule, Role, RoleBinding, RoleRef, Subject};

use super::{Inputs, metadata};
use crate::cluster::validate::ValidatedCluster;

pub(super) fn service_account(cluster: &ValidatedCluster, inputs: &Inputs) -> ServiceAccount {
    // Not in the pod template, so that changed secrets restart no worker.
    let secrets = inputs.pull_secrets.iter().map(|name| LocalObjectReference { name: name.clone() });
    ServiceAccount {
        metadata: metadata(cluster, cluster.names.worker()),
        // Tokens are projected by an explicit volume.
        automount_service_account_token: Some(false),
        image_pull_secrets: (!inputs.pull_secrets.is_empty()).then(|| secrets.collect()),
        ..ServiceAccount::default()
    }
}

/// Builds the Role of workers: access to the map of their own cluster only.
pub(super) fn role(cluster: &ValidatedCluster) -> Role {
    let rule = PolicyRule {
        api_groups: Some(vec![engram_api::crd::GROUP.to_owned()]),
        resources: Some(vec!["partitionmaps".to_owned()]),
        resource_names: Some(vec![cluster.names.cluster.clone()]),
        verbs: ["get", "watch", "patch"].map(str::to_owned).into(),
        ..PolicyRule::default()
    };
    Role { metadata: metadata(cluster, cluster.names.worker()), rules: Some(vec![rule]) }
}

pub(super) fn role_binding(cluster: &ValidatedCluster) -> RoleBinding {
    let name = cluster.names.worker();
    let subject = Subject {
        kind: "ServiceAccount".to_owned(),
        name: name.clone(),
        namespace: Some(cluster.namespace.clone()),
        ..Subject::default()
    };
    RoleBinding {
        metadata: metadata(cluster, name.clone()),
        role_ref: RoleRef { api_group: "rbac.authorization.k8s.io".to_owned(), kind: "Role".to_owned(), name },
        subjects: Some(vec![subject]),
    }
}

/// Builds the ServiceAccount of human users, who request its tokens. It has no permissions in Kubernetes.
pub(super) fn client_account(cluster: &ValidatedCluster) -> ServiceAccount {
    ServiceAccount {
        metadata: metadata(cluster, cluster.names.client()),
        automount_service_account_token: Some(false),
        ..ServiceAccount::default()
    }
}

/// Returns the access rights of a cluster: those of the spec, and all for the account of human users. Overrides of the map are authorized by
/// Kubernetes instead.
pub(crate) fn access_list(cluster: &ValidatedCluster) -> AccessList {
    let people = Access { service_account: cluster.names.client(), namespace: None, rights: vec![Right::Admin] };
    let configured = cluster.spec.access.iter().flatten().cloned();
    AccessList::new(configured.chain([people]), &cluster.namespace)
}
