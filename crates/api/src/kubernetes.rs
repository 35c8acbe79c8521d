//! Settings that apply to Kubernetes only.
//!
//! They are validated in local mode as well, so that a manifest that runs on a laptop is valid on Kubernetes, and are then
//! reported as ignored. All are optional; the operator defines their defaults.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::manifest_enum::words;
use crate::quantity::{Duration, ResourceQuantity, Size};

/// A part of a Kubernetes object, passed through unchanged.
pub type FreeForm = Map<String, Value>;

/// Declares a struct whose fields are all optional.
macro_rules! optional {
    ($(#[$meta:meta])* pub struct $name:ident {
        $($(#[$field_meta:meta])* pub $field:ident: $type:ty,)+
    }) => {
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(rename_all = "camelCase", deny_unknown_fields)]
        $(#[$meta])*
        pub struct $name {
            $($(#[$field_meta])* #[serde(skip_serializing_if = "Option::is_none")] pub $field: Option<$type>,)+
        }
    };
}
pub(crate) use optional;

words! {
    /// Whether workers are upgraded automatically.
    pub enum Upgrade {
        /// On request only.
        Manual,
        /// Whenever the operator offers a new version.
        Auto,
    }
}

optional! {
    /// How pods are replaced when their template changes.
    pub struct UpdateStrategy {
        /// Which side deletes old pods.
        #[serde(rename = "type")]
        pub strategy: UpdateType,
    }
}

words! {
    /// Which side deletes old pods.
    pub enum UpdateType {
        /// The operator replaces pods one by one.
        Rolling,
        /// The user deletes pods; the operator only drains them.
        OnDelete,
    }
}

optional! {
    /// Resource requests and limits of the worker container.
    pub struct Resources {
        /// Requested amounts by resource: `cpu`, `memory`, `ephemeral-storage`, `hugepages-SIZE` or `DOMAIN/NAME`.
        pub requests: BTreeMap<String, ResourceQuantity>,
        /// Maximum amounts by resource.
        pub limits: BTreeMap<String, ResourceQuantity>,
        /// Claims of the pod (`podTemplate.spec.resourceClaims`) that the container uses.
        pub claims: Vec<FreeForm>,
    }
}

optional! {
    /// Disks of the workers.
    pub struct Storage {
        /// Size of each worker's disk; can only grow.
        pub size: Size,
        /// Storage class of the PersistentVolumeClaims.
        pub storage_class_name: String,
        /// Whether the PersistentVolumeClaims are kept when the cluster is deleted.
        pub retain_policy: RetainPolicy,
        /// Keeps the data in the pod (emptyDir): it is lost with the pod.
        pub ephemeral: bool,
        /// Handling of a lost node.
        pub on_node_loss: OnNodeLoss,
    }
}

words! {
    /// Whether the PersistentVolumeClaims are kept when the cluster is deleted.
    pub enum RetainPolicy {
        /// Keeps them.
        Retain,
        /// Deletes them.
        Delete,
    }
}

optional! {
    /// Handling of a lost node.
    pub struct OnNodeLoss {
        /// Action to take.
        pub action: NodeLossAction,
        /// How long to wait for the node before acting.
        pub after: Duration,
    }
}

words! {
    /// Action on a lost node.
    pub enum NodeLossAction {
        /// Recreates its worker on another node with an empty disk.
        Replace,
        /// Waits for the node to return.
        Wait,
    }
}

/// A PersistentVolumeClaim that every worker mounts. Its access mode must allow several nodes: `ReadOnlyMany` or
/// `ReadWriteMany` for inputs, `ReadWriteMany` for snapshots.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Volume {
    /// Name that runs and snapshots refer to.
    #[schemars(extend("format" = "engram-name"), example = &"corpus")]
    pub name: String,
    /// The PersistentVolumeClaim.
    #[schemars(example = serde_json::json!({ "claimName": "corpus" }))]
    pub persistent_volume_claim: Claim,
}

/// A PersistentVolumeClaim in the cluster's namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Claim {
    /// Name of the PersistentVolumeClaim.
    #[schemars(length(min = 1), example = &"corpus")]
    pub claim_name: String,
}

/// Rights of one ServiceAccount.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Access {
    /// Name of the ServiceAccount.
    #[schemars(length(min = 1), example = &"trainer")]
    pub service_account: String,
    /// Namespace of the ServiceAccount; absent means the cluster's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Rights that it has.
    #[schemars(example = serde_json::json!(["Read"]))]
    pub rights: Vec<Right>,
}

words! {
    /// Right of a ServiceAccount.
    pub enum Right {
        /// Get, rank, recall, quality; watch runs.
        Read,
        /// Insert, remove and change weights of single memories.
        Reinforce,
        /// Decay all memories; run learning epochs.
        Decay,
        /// Everything, including administration: stop, drain, snapshots.
        Admin,
    }
}

optional! {
    /// Service for clients.
    pub struct Service {
        /// Type of the Service.
        #[serde(rename = "type")]
        pub service_type: ServiceType,
        /// Annotations of the Service.
        pub annotations: BTreeMap<String, String>,
    }
}

words! {
    /// Type of a Service.
    pub enum ServiceType {
        /// Reachable inside the Kubernetes cluster.
        ClusterIP,
        /// Reachable at a port of every node.
        NodePort,
        /// Reachable through the provider's load balancer.
        LoadBalancer,
    }
}

optional! {
    /// Which pods may reach the workers.
    pub struct NetworkPolicy {
        /// Whether to create a NetworkPolicy.
        pub enabled: bool,
        /// Allowed clients, as in `from` of a NetworkPolicy; empty means the same namespace.
        pub clients: Vec<FreeForm>,
    }
}

optional! {
    /// TLS of a cluster.
    pub struct Tls {
        /// Source of the certificates; absent means `Auto`; immutable.
        pub mode: TlsMode,
        /// Lifetime of a certificate, at least 10m; absent means 24h. Certificates are renewed after two thirds of it. Shorter limits
        /// the use of a stolen certificate; longer tolerates a longer outage of the operator.
        #[schemars(extend("x-minimum" = "10m"))]
        pub certificate_lifetime: Duration,
        /// With mode `Secret`: a Secret in the cluster's namespace with `tls.crt`, `tls.key` and `ca.crt`, shared by all workers. Condition
        /// `CertificateValid` reports the name that the certificate must have. Changes of the Secret are picked up automatically.
        #[schemars(length(max = 253))]
        pub secret_name: String,
        /// With mode `CertManager`: issuer that signs the certificate.
        pub issuer_ref: IssuerRef,
        /// Trust domain of the certificates' SPIFFE IDs.
        pub trust_domain: String,
    }
}

optional! {
    /// A cert-manager issuer. It must publish its CA (`ca.crt` of the Secret), as issuers of type CA and Vault do.
    pub struct IssuerRef {
        /// Name of the issuer.
        #[schemars(length(max = 253))]
        pub name: String,
        /// Kind of the issuer: `Issuer` (default, in the cluster's namespace), `ClusterIssuer`, or a kind of another `group`.
        #[schemars(length(max = 63))]
        pub kind: String,
        /// API group of the issuer; absent means cert-manager's.
        #[schemars(length(max = 253))]
        pub group: String,
    }
}

words! {
    /// Source of the certificates.
    #[derive(Default)]
    pub enum TlsMode {
        /// The operator's own CA signs: mutual TLS on every connection.
        #[default]
        Auto,
        /// The cert-manager issuer `issuerRef` signs, into Secret `<cluster>-worker-tls`: mutual TLS on every connection.
        CertManager,
        /// The user provides Secret `secretName`: mutual TLS on every connection.
        Secret,
        /// No TLS. For tests, and for networks that encrypt traffic themselves, such as service meshes.
        Disabled,
    }
}

optional! {
    /// Scheduling of the pods.
    pub struct Scheduling {
        /// Priority class of the pods.
        pub priority_class_name: String,
        /// Scheduler of the pods.
        pub scheduler_name: String,
        /// Tolerations of the pods.
        pub tolerations: Vec<FreeForm>,
        /// Affinity of the pods.
        pub affinity: FreeForm,
        /// Topology that workers are spread over; also the failure domain of replicas.
        pub topology_spread: TopologySpread,
        /// Queue of the gang scheduler.
        pub queue_name: String,
    }
}

words! {
    /// Topology that workers are spread over.
    pub enum TopologySpread {
        /// Nodes.
        Node,
        /// Zones.
        Zone,
    }
}

optional! {
    /// Traces and metrics.
    pub struct Telemetry {
        /// OTLP endpoint for traces.
        pub otlp_endpoint: String,
        /// Fraction of requests that are traced.
        #[schemars(range(min = 0, max = 1))]
        pub sampler_ratio: f64,
        /// Whether to create a PodMonitor.
        pub pod_monitor: bool,
    }
}

optional! {
    /// Required properties of GPUs.
    pub struct GpuSelector {
        /// Accepted product names.
        pub products: Vec<String>,
        /// Minimum GPU memory.
        pub min_memory: Size,
        /// Minimum compute capability: `"8.0"`.
        pub min_compute_capability: String,
    }
}
