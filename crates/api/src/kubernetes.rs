//! Settings that mean something in Kubernetes only.
//!
//! They are checked wherever the manifest is read, so that the file that runs on a laptop is a correct one for a
//! cluster too, and are then listed as ignored. All are optional and have no defaults here: what an absent one means is
//! for the operator to say.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::quantity::{Duration, Size};
use crate::word::words;

/// A part of a Kubernetes object, kept as written.
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
    /// Whether a new version is taken by itself.
    pub enum Upgrade {
        /// When asked.
        Manual,
        /// When the operator brings one.
        Auto,
    }
}

optional! {
    /// How pods are replaced.
    pub struct UpdateStrategy {
        /// Who deletes the old pods.
        #[serde(rename = "type")]
        pub strategy: UpdateType,
    }
}

words! {
    /// Who deletes the old pods.
    pub enum UpdateType {
        /// The operator, one after another.
        Rolling,
        /// You; the operator only drains.
        OnDelete,
    }
}

optional! {
    /// Disks of the workers.
    pub struct Storage {
        /// Size of each worker's disk; it only grows.
        pub size: Size,
        /// Storage class of the claims.
        pub storage_class_name: String,
        /// What becomes of the claims when the cluster is deleted.
        pub retain_policy: RetainPolicy,
        /// Keeps the state in the pod: lost with it.
        pub ephemeral: bool,
        /// What happens when a node is lost.
        pub on_node_loss: OnNodeLoss,
    }
}

words! {
    /// What becomes of the claims when the cluster is deleted.
    pub enum RetainPolicy {
        /// They stay.
        Retain,
        /// They go.
        Delete,
    }
}

optional! {
    /// What happens when a node is lost.
    pub struct OnNodeLoss {
        /// What is done.
        pub action: NodeLossAction,
        /// How long the node is waited for.
        pub after: Duration,
    }
}

words! {
    /// What is done about a lost node.
    pub enum NodeLossAction {
        /// Its worker starts elsewhere with an empty disk.
        Replace,
        /// Nothing.
        Wait,
    }
}

/// A claim that every worker mounts, so that it must let several nodes do so: `ReadOnlyMany` or `ReadWriteMany` to read, `ReadWriteMany` to write.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Volume {
    /// Name, by which it is meant elsewhere.
    #[schemars(extend("format" = "engram-name"), example = &"corpus")]
    pub name: String,
    /// The claim.
    #[schemars(example = serde_json::json!({ "claimName": "corpus" }))]
    pub persistent_volume_claim: Claim,
}

/// A claim of the cluster's namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Claim {
    /// Its name.
    #[schemars(length(min = 1), example = &"corpus")]
    pub claim_name: String,
}

/// Rights of one service account.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Access {
    /// Name of the service account.
    #[schemars(length(min = 1), example = &"trainer")]
    pub service_account: String,
    /// Its namespace; absent means the cluster's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// What it may do.
    #[schemars(example = serde_json::json!(["Read"]))]
    pub rights: Vec<Right>,
}

words! {
    /// What a service account may do.
    pub enum Right {
        /// Get, rank, recall, quality; watch runs.
        Read,
        /// Change weights of single memories, insert and remove.
        Reinforce,
        /// Let all memories decay; run epochs, whatever they change.
        Decay,
        /// Everything, also what administrators order: stop, drain, snapshots.
        Admin,
    }
}

optional! {
    /// The Service that clients talk to.
    pub struct Service {
        /// Its type.
        #[serde(rename = "type")]
        pub service_type: ServiceType,
        /// Its annotations.
        pub annotations: BTreeMap<String, String>,
    }
}

words! {
    /// Type of a Service.
    pub enum ServiceType {
        /// Reachable inside the cluster.
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
        /// Whether there is a policy.
        pub enabled: bool,
        /// Peers as in `from` of a NetworkPolicy; empty means the same namespace.
        pub clients: Vec<FreeForm>,
    }
}

optional! {
    /// Certificates.
    pub struct Tls {
        /// Where they come from; absent means `Auto`; fixed at creation.
        pub mode: TlsMode,
        /// How long one is valid, at least 10m; absent means 24h. It is replaced after two thirds of that. Shorter ends a stolen one sooner;
        /// longer survives an operator that is away for longer.
        #[schemars(extend("x-minimum" = "10m"))]
        pub certificate_lifetime: Duration,
        /// With mode `Secret`: a Secret of the cluster's namespace with `tls.crt`, `tls.key` and `ca.crt`, which all workers share. What the
        /// certificate must say, condition `Certified` tells. It is read again when it changes.
        #[schemars(length(max = 253))]
        pub secret_name: String,
        /// With mode `CertManager`: who signs.
        pub issuer_ref: IssuerRef,
        /// Trust domain of the names in certificates.
        pub trust_domain: String,
    }
}

optional! {
    /// An issuer of cert-manager. It has to say who it is (`ca.crt` of the Secret), as those of kinds CA and Vault do.
    pub struct IssuerRef {
        /// Its name.
        #[schemars(length(max = 253))]
        pub name: String,
        /// Its kind: `Issuer`, of the cluster's namespace, which is meant where none is named, or `ClusterIssuer`; other groups have their own.
        #[schemars(length(max = 63))]
        pub kind: String,
        /// Its API group; absent means cert-manager's own.
        #[schemars(length(max = 253))]
        pub group: String,
    }
}

words! {
    /// Where certificates come from.
    #[derive(Default)]
    pub enum TlsMode {
        /// The operator's own authority: every connection shows a certificate.
        #[default]
        Auto,
        /// The issuer `issuerRef` of cert-manager, which the operator has fill Secret `<cluster>-worker-tls`: every connection shows a certificate.
        CertManager,
        /// The Secret `secretName`, which somebody else fills: every connection shows a certificate.
        Secret,
        /// Nowhere: no TLS. For tests, and for networks that encrypt by themselves, as service meshes do.
        Disabled,
    }
}

optional! {
    /// Where pods run.
    pub struct Scheduling {
        /// Priority class of the pods.
        pub priority_class_name: String,
        /// Scheduler of the pods.
        pub scheduler_name: String,
        /// Tolerations of the pods.
        pub tolerations: Vec<FreeForm>,
        /// Affinity of the pods.
        pub affinity: FreeForm,
        /// What the workers are spread over; also the failure domain.
        pub topology_spread: TopologySpread,
        /// Queue of the gang scheduler.
        pub queue_name: String,
    }
}

words! {
    /// What the workers are spread over.
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
        /// Where traces are sent.
        pub otlp_endpoint: String,
        /// Share of requests that are traced.
        #[schemars(range(min = 0, max = 1))]
        pub sampler_ratio: f64,
        /// Whether a PodMonitor is made.
        pub pod_monitor: bool,
    }
}

optional! {
    /// Which devices will do.
    pub struct GpuSelector {
        /// Product names, any of them.
        pub products: Vec<String>,
        /// Least device memory.
        pub min_memory: Size,
        /// Least compute capability: `"8.0"`.
        pub min_compute_capability: String,
    }
}
