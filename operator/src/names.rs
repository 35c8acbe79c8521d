//! Names, labels, ports and periods of generated objects. They are a contract with workers, clients and dashboards.

/// gRPC port for clients: applications, command line, Python.
pub const CLIENT_PORT: u16 = 7443;
/// Port for other workers: replication, collectives.
pub const PEER_PORT: u16 = 7444;
/// Port for the operator: drain, administration.
pub const ADMIN_PORT: u16 = 7445;
/// Plain HTTP port for the kubelet and Prometheus: `/startupz`, `/livez`, `/readyz`, `/metrics`.
pub const HTTP_PORT: u16 = 9090;

/// The label that selects the objects of one cluster.
pub const CLUSTER_LABEL: &str = "engram.dev/cluster";
/// The label with the component of a pod.
pub const COMPONENT_LABEL: &str = "engram.dev/component";
/// Value of [`COMPONENT_LABEL`] for workers.
pub const WORKER: &str = "worker";
/// The label of a claim with the id of the cluster whose data it holds.
pub const CLUSTER_ID_LABEL: &str = "engram.dev/cluster-id";
/// Audience of the tokens with which pods request certificates.
pub const CSR_AUDIENCE: &str = "engram-csr";
/// Key of the trust bundle in its ConfigMap.
pub const ROOTS: &str = "ca.pem";
/// Keys of a Secret with a provided certificate: those of type `kubernetes.io/tls`, as written by cert-manager.
pub const TLS_SECRET_KEYS: [&str; 3] = ["ca.crt", "tls.crt", "tls.key"];
/// Annotation of a `LearnerCluster`: UID of a pod to replace.
pub const REPLACE: &str = "engram.dev/replace";
/// Annotation of a generated object: hash of its content without this annotation, which also changes with a removed field.
pub const CONTENT_HASH: &str = "engram.dev/content-hash";
/// Annotation of the CA Secret that requests a rotation.
pub const RENEW: &str = "engram.dev/renew";
/// Annotation of the CA Secret: progress of a rotation.
pub const RENEWAL: &str = "engram.dev/renewal";
/// Annotation of the CA Secret: start of the current rotation step, RFC 3339.
pub const RENEWAL_SINCE: &str = "engram.dev/renewal-since";
/// Annotation of a `LearnerCluster`: the accepted template revision.
pub const UPGRADE: &str = "engram.dev/upgrade";

/// User and group of the worker: unused on nodes, and the same in every image.
pub const USER: i64 = 65532;
/// Termination grace period: the drain deadline of 45 s, plus time to flush to disk.
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

    /// Returns the name of the ServiceAccount whose tokens `engram -n` uses.
    pub fn client(&self) -> String {
        format!("{}-client", self.cluster)
    }

    /// Returns the name of the ConfigMap.
    pub fn config(&self) -> String {
        format!("{}-config", self.cluster)
    }

    /// Returns the name of the ConfigMap with the decisions of the autoscaler.
    pub fn autoscaling(&self) -> String {
        format!("{}-autoscaling", self.cluster)
    }

    /// Returns the name of the ConfigMap with the trust bundle and the token issuer, for workers and clients.
    pub fn ca(&self) -> String {
        format!("{}-ca", self.cluster)
    }

    /// Returns the name of the cert-manager Certificate and of its Secret. It is not configurable, since a user who may create clusters but not
    /// Certificates could otherwise overwrite other Secrets.
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
