//! Names, labels, ports and periods of what the operator makes. They are a contract with workers, clients and people's
//! dashboards: they never change.

/// Clients: gRPC of applications, command line, Python.
pub const CLIENT_PORT: u16 = 7443;
/// Other workers of the cluster: replication, collectives.
pub const PEER_PORT: u16 = 7444;
/// The operator: drain, admin.
pub const ADMIN_PORT: u16 = 7445;
/// Kubelet and Prometheus, plain HTTP: `/startupz`, `/livez`, `/readyz`, `/metrics`.
pub const HTTP_PORT: u16 = 9090;

/// The label that selects the objects of one cluster.
pub const CLUSTER_LABEL: &str = "engram.dev/cluster";
/// The label that tells a cluster's pods apart.
pub const COMPONENT_LABEL: &str = "engram.dev/component";
/// Value of [`COMPONENT_LABEL`] for workers.
pub const WORKER: &str = "worker";
/// The label of a claim that says whose data it holds.
pub const CLUSTER_ID_LABEL: &str = "engram.dev/cluster-id";
/// Audience of the tokens with which pods ask for their certificates.
pub const CSR_AUDIENCE: &str = "engram-csr";
/// Key of the authority's certificates in its ConfigMap.
pub const ROOTS: &str = "ca.pem";
/// Keys of a Secret with a given certificate: as the type `kubernetes.io/tls` has them, and as cert-manager writes them.
pub const TLS_SECRET_KEYS: [&str; 3] = ["ca.crt", "tls.crt", "tls.key"];
/// Annotation of a `LearnerCluster`: UID of a pod that shall be replaced.
pub const REPLACE: &str = "engram.dev/replace";
/// Annotation of the authority's Secret: another authority shall follow it.
pub const RENEW: &str = "engram.dev/renew";
/// Annotation of the authority's Secret: how far that is.
pub const RENEWAL: &str = "engram.dev/renewal";
/// Annotation of the authority's Secret: since when it is so far, RFC 3339.
pub const RENEWAL_SINCE: &str = "engram.dev/renewal-since";
/// Annotation of a `LearnerCluster`: the template revision that may be taken.
pub const UPGRADE: &str = "engram.dev/upgrade";

/// User and group of the worker: nobody's on the node, and the same in every image.
pub const USER: i64 = 65532;
/// Seconds between the order to go and the kill: the drain's deadline of 45 s, and time to put everything on disk.
pub const GRACE_SECONDS: i64 = 60;

/// Names of a cluster's objects.
#[derive(Clone, Debug)]
pub struct Names {
    /// The cluster's name: also the client Service and the `PartitionMap`.
    pub cluster: String,
}

impl Names {
    /// Returns the name of StatefulSet, headless Service, disruption budget, service account, role.
    pub fn worker(&self) -> String {
        format!("{}-worker", self.cluster)
    }

    /// Returns the name of the service account whose tokens people get, by `engram -n`.
    pub fn client(&self) -> String {
        format!("{}-client", self.cluster)
    }

    /// Returns the name of the ConfigMap.
    pub fn config(&self) -> String {
        format!("{}-config", self.cluster)
    }

    /// Returns the name of the ConfigMap with what everybody may know of who is who: for clients, too.
    pub fn ca(&self) -> String {
        format!("{}-ca", self.cluster)
    }

    /// Returns the name of the Certificate that cert-manager is asked for, and of the Secret that it fills. Nobody may choose it: whoever makes
    /// clusters and no Certificates would have other Secrets overwritten.
    pub fn certificate(&self) -> String {
        format!("{}-worker-tls", self.cluster)
    }

    /// Returns the name of the pod with that ordinal.
    pub fn pod(&self, ordinal: u32) -> String {
        format!("{}-worker-{ordinal}", self.cluster)
    }

    /// Returns the name of that pod's claim.
    pub fn claim(&self, ordinal: u32) -> String {
        format!("data-{}", self.pod(ordinal))
    }

    /// Returns the label selector of the workers' pods.
    pub fn selector(&self) -> String {
        format!("{CLUSTER_LABEL}={},{COMPONENT_LABEL}={WORKER}", self.cluster)
    }
}
