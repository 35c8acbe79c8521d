//! Resource kinds that the operator reads and writes.

use kube::api::{ApiResource, DynamicObject, TypeMeta};
use kube::{Api, Client};

/// A resource kind with its API path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    group: &'static str,
    version: &'static str,
    pub(crate) name: &'static str,
    plural: &'static str,
}

const fn kind(group: &'static str, version: &'static str, name: &'static str, plural: &'static str) -> Kind {
    Kind { group, version, name, plural }
}

pub(crate) const CLUSTER: Kind = kind("engram.dev", "v1alpha1", "LearnerCluster", "learnerclusters");
pub(crate) const RUN: Kind = kind("engram.dev", "v1alpha1", "LearnerRun", "learnerruns");
pub(crate) const MAP: Kind = kind("engram.dev", "v1alpha1", "PartitionMap", "partitionmaps");
pub(crate) const POD: Kind = kind("", "v1", "Pod", "pods");
pub(crate) const CLAIM: Kind = kind("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims");
pub(crate) const SET: Kind = kind("apps", "v1", "StatefulSet", "statefulsets");
/// cert-manager's Certificate, which not every API server serves.
pub(crate) const CERTIFICATE: Kind = kind("cert-manager.io", "v1", "Certificate", "certificates");

/// Kinds that [`crate::cluster::build::objects`] makes.
pub(crate) const BUILT: [Kind; 8] = [
    kind("", "v1", "ServiceAccount", "serviceaccounts"),
    kind("rbac.authorization.k8s.io", "v1", "Role", "roles"),
    kind("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings"),
    kind("", "v1", "ConfigMap", "configmaps"),
    kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies"),
    kind("", "v1", "Service", "services"),
    kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    SET,
];

/// Returns the kind of [`BUILT`] with this name.
pub(crate) fn built(name: &str) -> Kind {
    *BUILT.iter().find(|kind| kind.name == name).expect("the builder makes these kinds and no others")
}

impl Kind {
    /// Returns the name of the kind.
    pub const fn name(self) -> &'static str {
        self.name
    }

    /// Returns the kind of [`BUILT`] with this name.
    pub fn built(name: &str) -> Self {
        built(name)
    }

    pub(crate) fn resource(self) -> ApiResource {
        let api_version =
            if self.group.is_empty() { self.version.to_owned() } else { format!("{}/{}", self.group, self.version) };
        ApiResource {
            group: self.group.to_owned(),
            version: self.version.to_owned(),
            api_version,
            kind: self.name.to_owned(),
            plural: self.plural.to_owned(),
        }
    }

    pub(crate) fn types(self) -> TypeMeta {
        let ApiResource { api_version, kind, .. } = self.resource();
        TypeMeta { api_version, kind }
    }

    pub(crate) fn of(self, client: &Client, namespace: &str) -> Api<DynamicObject> {
        Api::namespaced_with(client.clone(), namespace, &self.resource())
    }

    /// Returns the API for one namespace, or for all.
    pub(crate) fn within(self, client: &Client, namespace: Option<&str>) -> Api<DynamicObject> {
        match namespace {
            Some(namespace) => self.of(client, namespace),
            None => Api::all_with(client.clone(), &self.resource()),
        }
    }
}
