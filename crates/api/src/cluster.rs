//! `LearnerCluster`: a set of workers that holds one set of memories.
//!
//! The attributes are the single source of truth: the JSON Schema generated from them is published and validates
//! manifests ([`crate::parse`]). An absent field takes its default here, so a parsed spec holds effective values.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::autoscaling::Autoscaling;
use crate::buffers::{DeclaredBuffer, MAX_BUFFERS};
use crate::kubernetes::{
    Access, FreeForm, GpuSelector, NetworkPolicy, Resources, Scheduling, Service, Storage, Telemetry, Tls, TlsMode,
    UpdateStrategy, Upgrade, Volume,
};
use crate::manifest_enum::words;
use crate::object::{Kind, Object};
use crate::quantity::{Duration, Rate};
use crate::snapshot::SnapshotLocation;

/// A set of workers that holds one set of memories.
pub type LearnerCluster = Object<LearnerClusterSpec>;

impl Kind for LearnerClusterSpec {
    const KIND: &'static str = "LearnerCluster";
}

/// Exclusive lower bound of a positive weight, rate or decay: weights are stored in units of 2^-30 and rounded to nearest,
/// so 2^-31 and below would silently become 0.
pub const SMALLEST_SETTING: f64 = 1.0 / (1_u64 << 31) as f64;

/// Schema of a weight or decay: 0, or above [`SMALLEST_SETTING`] and at most 1.
pub(crate) fn setting(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "number",
        "minimum": 0,
        "maximum": 1,
        "not": { "exclusiveMinimum": 0, "maximum": SMALLEST_SETTING },
    })
}

/// Schema of a list of endpoints of object storage.
fn endpoints(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 16,
        "items": { "type": "string", "minLength": 1, "maxLength": 1024, "format": "engram-endpoint" },
    })
}

/// Desired state of a cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LearnerClusterSpec {
    /// Number of worker processes, 1 to 100. More workers hold and serve more; partitions are spread over them. In local mode
    /// they share the cores of one machine, so more workers than cores add no throughput.
    #[schemars(range(min = 1, max = 100), example = 5)]
    pub workers: u32,

    /// Replicas of each partition, 1 to 3, at most `workers`; absent means 2, or 1 with one worker. With one replica a lost
    /// disk loses its memories; with two, the cluster tolerates the loss of one worker at a time.
    #[serde(default = "default_replication_factor")]
    #[schemars(range(min = 1, max = 3))]
    pub replication_factor: u32,

    /// Number of partitions that memories are hashed into, 1 to 1,024; immutable. More partitions spread more evenly over
    /// many workers; fewer cost less per learning epoch.
    #[serde(default = "default_partitions")]
    #[schemars(range(min = 1, max = 1024))]
    pub partitions: u32,

    /// Maximum number of memories.
    #[serde(default)]
    pub capacity: Capacity,

    /// How weights change.
    #[serde(default)]
    pub learning: Learning,

    /// Feature vectors of the memories.
    #[serde(default)]
    pub features: Features,

    /// When a write is acknowledged.
    #[serde(default)]
    pub durability: Durability,

    /// Whether a partition's only in-sync replica accepts writes; without effect with a `replicationFactor` of 1.
    #[serde(default)]
    pub solo_policy: SoloPolicy,

    /// How long an under-replicated partition waits for a failed worker to return before it is re-replicated to another worker,
    /// 0s to 60s; without effect with a `replicationFactor` of 1. Longer copies less data after a crash but leaves the
    /// partition under-replicated for longer.
    #[serde(default = "default_restart_grace")]
    #[schemars(extend("x-maximum" = "60s"))]
    pub restart_grace: Duration,

    /// Background work of the workers.
    #[serde(default)]
    pub maintenance: Maintenance,

    /// Use of GPUs.
    #[serde(default)]
    pub gpu: Gpu,

    /// Version of the worker; empty means the operator's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub version: Option<String>,

    /// Full reference of the worker's image, instead of `version`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub image: Option<String>,

    /// Whether workers are upgraded automatically when the operator offers a new version.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub upgrade: Option<Upgrade>,

    /// How pods are replaced when their template changes.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub update_strategy: Option<UpdateStrategy>,

    /// Resource requests and limits of the worker container. Defaults where neither is set: requests of 250m cpu and 256Mi
    /// memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub resources: Option<Resources>,

    /// Disks of the workers. In local mode `--state-dir` sets the location.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub storage: Option<Storage>,

    /// PersistentVolumeClaims that workers mount read-only and runs refer to as `input`. A change replaces the pods one by one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend(
        "x-kubernetes-only" = true, "x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]
    ))]
    pub inputs: Option<Vec<Volume>>,

    /// PersistentVolumeClaims that workers mount read-write and snapshots refer to as `volume`. A change replaces the pods one by
    /// one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend(
        "x-kubernetes-only" = true, "x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]
    ))]
    pub snapshot_volumes: Option<Vec<Volume>>,

    /// Rights of ServiceAccounts that authenticate with a token instead of a certificate; by default only the account of
    /// `engram -n`. Rejected where `tls.mode` is `Disabled`. A change takes effect without a restart, within about a minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub access: Option<Vec<Access>>,

    /// Service for clients.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub service: Option<Service>,

    /// Which pods may reach the workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub network_policy: Option<NetworkPolicy>,

    /// TLS. A local cluster listens on loopback only; there `engram up --tls` applies.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub tls: Option<Tls>,

    /// Scheduling of the pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub scheduling: Option<Scheduling>,

    /// Traces and metrics.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub telemetry: Option<Telemetry>,

    /// Endpoints of object storage that runs may name although they are loopback, link-local or metadata addresses, at most 16. Other
    /// endpoints need no entry.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "endpoints", example = serde_json::json!(["http://127.0.0.1:9000"]))]
    pub storage_endpoints: Vec<String>,

    /// Replay buffers that the workers create, at most 64. A buffer in the list cannot change; one that is removed from it remains with its
    /// items.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = MAX_BUFFERS),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"])
    )]
    pub buffers: Vec<DeclaredBuffer>,

    /// Initial content of a new cluster; absent means empty. Immutable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bootstrap: Option<Bootstrap>,

    /// How the number of workers follows the load; absent means that it does not.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub autoscaling: Option<Autoscaling>,

    /// Pauses changes to the cluster's Kubernetes objects; failover continues.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub paused: Option<bool>,

    /// Removes the pods and keeps the disks.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub suspend: Option<bool>,

    /// Controller that reconciles the object.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub managed_by: Option<String>,

    /// Pod template (metadata and spec) that is merged over the generated one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub pod_template: Option<FreeForm>,
}

impl LearnerClusterSpec {
    /// Returns where certificates come from on Kubernetes.
    pub fn tls_mode(&self) -> TlsMode {
        self.tls.as_ref().and_then(|tls| tls.mode).unwrap_or_default()
    }

    /// Returns a spec of `workers` workers with defaults for everything else.
    pub fn with_workers(workers: u32) -> Self {
        Self {
            workers,
            replication_factor: default_replication_factor().min(workers),
            partitions: default_partitions(),
            capacity: Capacity::default(),
            learning: Learning::default(),
            features: Features::default(),
            durability: Durability::default(),
            solo_policy: SoloPolicy::default(),
            restart_grace: default_restart_grace(),
            maintenance: Maintenance::default(),
            gpu: Gpu::default(),
            version: None,
            image: None,
            upgrade: None,
            update_strategy: None,
            resources: None,
            storage: None,
            inputs: None,
            snapshot_volumes: None,
            access: None,
            service: None,
            network_policy: None,
            tls: None,
            scheduling: None,
            telemetry: None,
            storage_endpoints: Vec::new(),
            buffers: Vec::new(),
            bootstrap: None,
            autoscaling: None,
            paused: None,
            suspend: None,
            managed_by: None,
            pod_template: None,
        }
    }
}

/// Default with two workers or more; parsing lowers it to 1 with one worker.
const fn default_replication_factor() -> u32 {
    2
}

/// Several times the start time of a worker.
const fn default_restart_grace() -> Duration {
    Duration::from_millis(3_000)
}

const fn default_partitions() -> u32 {
    256
}

/// Initial content of a new cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Bootstrap {
    /// A snapshot of any cluster with the same law and features; its workers and partitions may differ.
    pub snapshot: SnapshotLocation,
}

/// Maximum number of memories.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Capacity {
    /// Maximum number of memories in the whole cluster, replicas not counted, 1 to 1,000,000,000. A memory takes about 24 bytes
    /// of main memory, in addition to its key, features and payload. Can be lowered below the current number only with
    /// `policy: Evict`.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub memories: u64,

    /// What happens when a partition reaches its limit.
    pub policy: CapacityPolicy,

    /// Memory of each worker for payloads of items of replay buffers, which are on disk; absent = 128Mi. Higher saves disk reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub payload_cache: Option<crate::quantity::Size>,
}

impl Default for Capacity {
    fn default() -> Self {
        Self { memories: 1_000_000, policy: CapacityPolicy::default(), payload_cache: None }
    }
}

words! {
    /// What happens when a partition reaches its limit.
    #[derive(Default)]
    pub enum CapacityPolicy {
        /// Evicts the memories with the lowest weights.
        #[default]
        Evict,
        /// Rejects new memories.
        Refuse,
    }
}

/// How weights change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Learning {
    /// Decay law; immutable.
    pub law: Law,

    /// Learning rate: weight gained per unit of quality, above 2^-31 and at most 1. Higher learns and corrects errors faster,
    /// and gives a single event more influence.
    #[schemars(range(max = 1), extend("exclusiveMinimum" = SMALLEST_SETTING))]
    pub rate: f64,

    /// Weight of a new memory: 0, or above 2^-31 and at most 1.
    #[schemars(schema_with = "setting")]
    pub initial_weight: f64,

    /// Default weight loss per epoch, for runs without `decay`: 0, or above 2^-31 and at most 1. Higher forgets sooner; 0 never
    /// forgets.
    #[schemars(schema_with = "setting")]
    pub decay: f64,
}

impl Default for Learning {
    fn default() -> Self {
        Self { law: Law::default(), rate: 0.05, initial_weight: 0.5, decay: 0.01 }
    }
}

words! {
    /// Decay law.
    #[derive(Default)]
    #[schemars(extend("x-later" = { "Exponential": "set law: Linear" }))]
    pub enum Law {
        /// Linear decay: every memory loses the same weight per epoch, down to 0.
        #[default]
        Linear,
    }
}

/// Feature vectors of the memories.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Features {
    /// Length of a memory's feature vector, 0 to 4,096; 0 means no features; immutable. Each element takes the size of `dtype`.
    #[schemars(range(min = 0, max = 4096))]
    pub dimension: u32,

    /// Element type; immutable.
    pub dtype: FeatureType,
}

words! {
    /// Element type of feature vectors.
    #[derive(Default)]
    pub enum FeatureType {
        /// 16-bit float: two bytes, about three decimal digits.
        #[default]
        F16,
        /// 32-bit float: four bytes, about seven decimal digits.
        F32,
    }
}

/// When a write is acknowledged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Durability {
    /// Condition for acknowledging a write.
    pub mode: DurabilityMode,
}

words! {
    /// Condition for acknowledging a write.
    #[derive(Default)]
    pub enum DurabilityMode {
        /// Every in-sync replica has it on disk: survives a power failure of all nodes.
        #[default]
        Sync,
        /// Every in-sync replica has it in main memory. With a single replica this means `Sync`.
        Replicated,
        /// The primary has it in main memory: fastest; a failed worker may lose the most recent writes.
        Async,
    }
}

words! {
    /// Whether a partition's only in-sync replica accepts writes.
    #[derive(Default)]
    pub enum SoloPolicy {
        /// Accepts writes, each written to disk before it is acknowledged.
        #[default]
        SoloDurable,
        /// Rejects writes until a second replica is in sync.
        MinIsr,
    }
}

/// Background work of the workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Maintenance {
    /// Interval within which a worker re-reads and verifies every snapshot on its disk, at least 1h. Shorter detects damage
    /// sooner and reads more.
    #[schemars(extend("x-minimum" = "1h"))]
    pub scrub_interval: Duration,
    /// Maximum rate at which a worker sends data for re-replication; 0Mi/s means no limit. The worker throttles itself further
    /// while re-replication slows writes. Higher restores replicas sooner and slows writes meanwhile; without effect with a
    /// `replicationFactor` of 1.
    pub copy_rate: Rate,
    /// Number of ended runs whose records are kept, 0 to 100,000; those that ended first are removed. Higher keeps reports for
    /// longer and takes more memory. A run that is submitted again after its record was removed starts from its first epoch.
    #[schemars(range(min = 0, max = 100_000))]
    pub run_history_limit: u32,
}

impl Default for Maintenance {
    fn default() -> Self {
        let scrub_interval = Duration::from_millis(24 * 60 * 60 * 1_000);
        Self { scrub_interval, copy_rate: Rate::from_mebibytes(64), run_history_limit: 1_000 }
    }
}

/// Use of GPUs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Gpu {
    /// Whether GPUs are used.
    pub mode: GpuMode,

    /// Minimum number of memories of a pass that runs on the GPU, 0 to 1,000,000,000; absent means measured at start. Lower
    /// gives the GPU smaller passes, whose transfers may cost more than they save.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub threshold: Option<u64>,

    /// How partitions are distributed over the GPUs of a worker; absent means `LatencyOptimized`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub partitioner: Option<GpuPartitioner>,

    /// GPUs per worker.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16), extend("x-kubernetes-only" = true))]
    pub count: Option<u32>,

    /// Name of the extended resource: `nvidia.com/gpu`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub resource_name: Option<String>,

    /// GPU memory that a worker may use.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub memory_limit: Option<crate::quantity::Size>,

    /// Required properties of GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub selector: Option<GpuSelector>,

    /// Name of the ResourceClaimTemplate (dynamic resource allocation).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub resource_claim_template_name: Option<String>,

    /// Runtime class of the pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub runtime_class_name: Option<String>,
}

words! {
    /// How partitions are distributed over the GPUs of a worker: the quantity that is minimized.
    pub enum GpuPartitioner {
        /// The largest number of memories on one GPU.
        Balanced,
        /// The longest compute time of one GPU, by its measured throughput.
        CapabilityAware,
        /// The largest used share of one GPU's free memory.
        MemoryAware,
        /// The latency of a pass, including the overhead of each GPU.
        LatencyOptimized,
    }
}

words! {
    /// Whether GPUs are used.
    #[derive(Default)]
    pub enum GpuMode {
        /// Uses GPUs where available.
        #[default]
        Auto,
        /// Requires a GPU; a worker without one does not start.
        Required,
        /// Never uses GPUs.
        Disabled,
    }
}
