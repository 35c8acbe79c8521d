//! `LearnerCluster`: a fleet of workers that holds one set of memories.
//!
//! The attributes are the one source of truth: the JSON Schema made from them is published, and is what checks a
//! manifest ([`crate::parse`]). A field that is absent has its default here, so a parsed spec holds effective values.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::kubernetes::{
    Access, FreeForm, GpuSelector, NetworkPolicy, Scheduling, Service, Storage, Telemetry, Tls, TlsMode,
    UpdateStrategy, Upgrade, Volume,
};
use crate::object::{Kind, Object};
use crate::quantity::{Duration, Rate};
use crate::snapshot::SnapshotPlace;
use crate::word::words;

/// A fleet of workers that holds one set of memories.
pub type LearnerCluster = Object<LearnerClusterSpec>;

impl Kind for LearnerClusterSpec {
    const KIND: &'static str = "LearnerCluster";
}

/// Settings above 0 start here, exclusive: weights are kept in units of 2^-30 and rounded to the nearest, so that
/// 2^-31 and anything smaller would silently become 0.
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

/// What a cluster shall be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LearnerClusterSpec {
    /// Number of worker processes, 1 to 100. More workers hold and serve more; partitions are spread over them. Locally
    /// they share the cores of the machine, so more workers than cores gain nothing but a rehearsal.
    #[schemars(range(min = 1, max = 100), example = 5)]
    pub workers: u32,

    /// Copies of each partition, 1 to 3, at most `workers`; absent means 2, or 1 with one worker. With one copy a lost disk
    /// loses its memories; with two, one worker at a time may be lost without anybody noticing for longer than a moment.
    #[serde(default = "default_replication_factor")]
    #[schemars(range(min = 1, max = 3))]
    pub replication_factor: u32,

    /// Number of partitions that the memories are hashed into, 1 to 1,024; fixed at creation. More partitions spread
    /// more evenly over many workers; fewer cost less per learning epoch.
    #[serde(default = "default_partitions")]
    #[schemars(range(min = 1, max = 1024))]
    pub partitions: u32,

    /// How much is kept.
    #[serde(default)]
    pub capacity: Capacity,

    /// The law by which weights change.
    #[serde(default)]
    pub learning: Learning,

    /// Feature vectors of the memories.
    #[serde(default)]
    pub features: Features,

    /// When a write counts as done.
    #[serde(default)]
    pub durability: Durability,

    /// Whether a lone copy may take writes; without effect with one copy.
    #[serde(default)]
    pub solo_policy: SoloPolicy,

    /// How long a partition that has lost a copy waits for the killed worker to come back with it, before it is copied to
    /// another worker, 0s to 60s; without effect with one copy. Longer copies less after a crash, and leaves a partition
    /// with a copy too few for longer.
    #[serde(default = "default_restart_grace")]
    #[schemars(extend("x-maximum" = "60s"))]
    pub restart_grace: Duration,

    /// Work of the workers beside requests.
    #[serde(default)]
    pub maintenance: Maintenance,

    /// Use of graphics processors.
    #[serde(default)]
    pub gpu: Gpu,

    /// Version of the worker; empty means what the operator brings.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub version: Option<String>,

    /// Whole reference of the worker's image, instead of `version`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub image: Option<String>,

    /// Whether a new version is taken by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub upgrade: Option<Upgrade>,

    /// How pods are replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub update_strategy: Option<UpdateStrategy>,

    /// Requests and limits of a worker's container. What is named in neither is requested: 250m of cpu, 256Mi of memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub resources: Option<FreeForm>,

    /// Disks of the workers. Locally `--state-dir` says where the state lies.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub storage: Option<Storage>,

    /// Claims that workers mount, to read only, and runs name as `input`. A change replaces the pods one by one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend(
        "x-kubernetes-only" = true, "x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]
    ))]
    pub inputs: Option<Vec<Volume>>,

    /// Claims that workers mount, to read and to write, and snapshots name as `volume`. A change replaces the pods one by one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend(
        "x-kubernetes-only" = true, "x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]
    ))]
    pub snapshot_volumes: Option<Vec<Volume>>,

    /// Who may do what with a token instead of a certificate; nobody by default, but for people by `engram -n`. Refused where `tls.mode` is `Disabled`. A change is
    /// taken without a restart, within about a minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub access: Option<Vec<Access>>,

    /// The Service that clients talk to.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub service: Option<Service>,

    /// Which pods may reach the workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub network_policy: Option<NetworkPolicy>,

    /// Certificates. A local cluster listens on loopback only; there `engram up --tls` decides.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub tls: Option<Tls>,

    /// Where pods run.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub scheduling: Option<Scheduling>,

    /// Traces and metrics.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub telemetry: Option<Telemetry>,

    /// What a new cluster begins with; absent means empty. Fixed at creation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bootstrap: Option<Bootstrap>,

    /// Stops changes to the cluster's Kubernetes objects, not its failover.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub paused: Option<bool>,

    /// Takes the pods away and keeps the disks.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub suspend: Option<bool>,

    /// Which controller looks after the object.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub managed_by: Option<String>,

    /// Metadata and spec of a pod, merged last.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub pod_template: Option<FreeForm>,
}

impl LearnerClusterSpec {
    /// Where certificates come from on Kubernetes.
    pub fn tls_mode(&self) -> TlsMode {
        self.tls.as_ref().and_then(|tls| tls.mode).unwrap_or_default()
    }

    /// Makes a spec of `workers` workers in which everything else has its default.
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
            bootstrap: None,
            paused: None,
            suspend: None,
            managed_by: None,
            pod_template: None,
        }
    }
}

/// Of two workers or more. A manifest with one worker that says nothing gets what that worker can hold.
const fn default_replication_factor() -> u32 {
    2
}

/// Several times what a worker takes to start.
const fn default_restart_grace() -> Duration {
    Duration::from_millis(3_000)
}

const fn default_partitions() -> u32 {
    256
}

/// What a new cluster begins with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Bootstrap {
    /// A snapshot, of whatever cluster: law and features must be those of this one; workers and partitions need not.
    pub snapshot: SnapshotPlace,
}

/// How much is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Capacity {
    /// Memories that the whole cluster holds, copies not counted, 1 to 1,000,000,000. A memory takes about 24 bytes of
    /// main memory beside its key, features and payload. May be lowered below what is held only with `policy: Evict`.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub memories: u64,

    /// What happens when a partition is over its limit.
    pub policy: CapacityPolicy,
}

impl Default for Capacity {
    fn default() -> Self {
        Self { memories: 1_000_000, policy: CapacityPolicy::default() }
    }
}

words! {
    /// What happens when a partition is over its limit.
    #[derive(Default)]
    pub enum CapacityPolicy {
        /// The weakest memories make room.
        #[default]
        Evict,
        /// New memories are refused.
        Refuse,
    }
}

/// The law by which weights change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Learning {
    /// The law of decay; fixed at creation.
    pub law: Law,

    /// Weight gained per unit of quality, above 2^-31 and at most 1. Higher learns and forgets an error faster, and
    /// lets a single event say more.
    #[schemars(range(max = 1), extend("exclusiveMinimum" = SMALLEST_SETTING))]
    pub rate: f64,

    /// Weight of a new memory, 0, or above 2^-31 and at most 1. 0 where a memory must earn its place.
    #[schemars(schema_with = "setting")]
    pub initial_weight: f64,

    /// Weight that every memory loses per epoch, for runs that do not say: 0, or above 2^-31 and at most 1. Higher
    /// forgets sooner; 0 never forgets.
    #[schemars(schema_with = "setting")]
    pub decay: f64,
}

impl Default for Learning {
    fn default() -> Self {
        Self { law: Law::default(), rate: 0.05, initial_weight: 0.5, decay: 0.01 }
    }
}

words! {
    /// The law of decay.
    #[derive(Default)]
    #[schemars(extend("x-later" = { "Exponential": "set law: Linear" }))]
    pub enum Law {
        /// Every memory loses the same weight per epoch, down to 0.
        #[default]
        Linear,
    }
}

/// Feature vectors of the memories.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Features {
    /// Numbers per memory, 0 to 4,096; 0 means no features; fixed at creation. Each costs the bytes of `dtype`.
    #[schemars(range(min = 0, max = 4096))]
    pub dimension: u32,

    /// How a number is stored; fixed at creation.
    pub dtype: FeatureType,
}

words! {
    /// How a number of a feature vector is stored.
    #[derive(Default)]
    pub enum FeatureType {
        /// Two bytes, about three decimal digits.
        #[default]
        F16,
        /// Four bytes, about seven decimal digits.
        F32,
    }
}

/// When a write counts as done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Durability {
    /// What must have happened before a write is acknowledged.
    pub mode: DurabilityMode,
}

words! {
    /// What must have happened before a write is acknowledged.
    #[derive(Default)]
    pub enum DurabilityMode {
        /// Every copy has it on disk: survives the loss of power everywhere.
        #[default]
        Sync,
        /// Every copy has it in main memory. With one copy this means `Sync`.
        Replicated,
        /// The primary has it in main memory: the fastest; a killed worker may lose the last moments.
        Async,
    }
}

words! {
    /// Whether a lone copy may take writes.
    #[derive(Default)]
    pub enum SoloPolicy {
        /// It may, and puts every write on disk before it acknowledges.
        #[default]
        SoloDurable,
        /// It may not: writes wait until a second copy is in sync.
        MinIsr,
    }
}

/// Work of the workers beside requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Maintenance {
    /// Time within which a worker reads every snapshot on its disk once again and checks it, 1h or more. Less finds damage
    /// sooner, and reads more.
    #[schemars(extend("x-minimum" = "1h"))]
    pub scrub_interval: Duration,
    /// Most that a worker sends per second while it copies partitions to others; 0Mi/s means no limit. It sends less by
    /// itself while that slows writes. More makes lost copies whole sooner, and writes meanwhile slower; without effect with
    /// one copy.
    pub copy_rate: Rate,
}

impl Default for Maintenance {
    fn default() -> Self {
        Self { scrub_interval: Duration::from_millis(24 * 60 * 60 * 1_000), copy_rate: Rate::from_mebibytes(64) }
    }
}

/// Use of graphics processors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Gpu {
    /// Whether a device is used.
    pub mode: GpuMode,

    /// Memories per pass from which a device is used, 0 to 1,000,000,000; absent means measured at start. Lower gives
    /// the device smaller passes, whose transfers may cost more than they save.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub threshold: Option<u64>,

    /// How the partitions of a worker with several devices are shared out between them; absent means `LatencyOptimized`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub partitioner: Option<GpuPartitioner>,

    /// Devices per worker.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16), extend("x-kubernetes-only" = true))]
    pub count: Option<u32>,

    /// Name of the extended resource: `nvidia.com/gpu`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub resource_name: Option<String>,

    /// Device memory that a worker may use.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub memory_limit: Option<crate::quantity::Size>,

    /// Which devices will do.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub selector: Option<GpuSelector>,

    /// Claim template of dynamic resource allocation.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub resource_claim_template_name: Option<String>,

    /// Runtime class of the pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub runtime_class_name: Option<String>,
}

words! {
    /// How partitions are shared out between the devices of a worker: what is to be as small as possible.
    pub enum GpuPartitioner {
        /// The most memories of a device.
        Balanced,
        /// The longest time that a device computes, by its measured throughput.
        CapabilityAware,
        /// The largest share of a device's free memory that is taken.
        MemoryAware,
        /// The time until the last device answers, with what each device adds to every pass.
        LatencyOptimized,
    }
}

words! {
    /// Whether a device is used.
    #[derive(Default)]
    pub enum GpuMode {
        /// Where there is one.
        #[default]
        Auto,
        /// Always: without one nothing starts.
        Required,
        /// Never.
        Disabled,
    }
}
