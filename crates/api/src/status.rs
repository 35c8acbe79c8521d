//! What the operator reports: the `status` of the kinds, and the words of its conditions.
//!
//! Conditions have the shape that generic tools know (kstatus): `Ready`, `Reconciling`, `Stalled`, each with the
//! generation that it speaks about. People read `phase`, machines read conditions.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::word::words;

/// Types of conditions, in the order in which they are listed.
pub mod condition {
    /// Every partition is served, and what runs is what the spec asks for.
    pub const READY: &str = "Ready";
    /// The operator is changing something.
    pub const RECONCILING: &str = "Reconciling";
    /// Nothing goes on until a person acts.
    pub const STALLED: &str = "Stalled";
    /// The spec is understood and possible.
    pub const ACCEPTED: &str = "Accepted";
    /// Every partition has its full number of copies in sync.
    pub const REPLICATED: &str = "Replicated";
    /// The certificate that was given to the workers is good: of clusters with `tls.mode: Secret` or `CertManager`.
    pub const CERTIFIED: &str = "Certified";
    /// Devices were asked for and some node offers them.
    pub const GPU_AVAILABLE: &str = "GpuAvailable";
    /// The operator would build another worker than the pinned one.
    pub const UPDATE_AVAILABLE: &str = "UpdateAvailable";
    /// The pods are taken away and the disks kept.
    pub const SUSPENDED: &str = "Suspended";
}

/// One condition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// What the condition is about.
    #[serde(rename = "type")]
    #[schemars(length(max = 316))]
    pub kind: String,
    /// Whether it holds.
    pub status: Truth,
    /// Why, in one word.
    #[schemars(length(max = 1024))]
    pub reason: String,
    /// Why, in a sentence for people.
    #[schemars(length(max = 32768))]
    pub message: String,
    /// The generation of the object that the condition speaks about.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub observed_generation: Option<i64>,
    /// When `status` last changed, RFC 3339.
    #[schemars(extend("x-kubernetes-format" = "date-time"))]
    pub last_transition_time: String,
}

words! {
    /// Whether a condition holds.
    pub enum Truth {
        /// It does.
        True,
        /// It does not.
        False,
        /// Nobody can tell.
        Unknown,
    }
}

words! {
    /// State of a cluster, for people.
    pub enum ClusterPhase {
        /// The spec is refused.
        Invalid,
        /// Objects are made and workers start.
        Starting,
        /// Everything is as asked for.
        Ready,
        /// Served, with a copy too few somewhere.
        Degraded,
        /// Workers are replaced one by one.
        Updating,
        /// Workers are added or drained.
        Scaling,
        /// On the way to no pods.
        Suspending,
        /// No pods; the disks are kept.
        Suspended,
        /// Waiting for a person.
        Stalled,
    }
}

/// Status of a `LearnerCluster`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct LearnerClusterStatus {
    /// The generation that this status speaks about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Identity of the data, 32 hexadecimal digits: on every disk and in the map.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,
    /// State for people; machines read conditions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<ClusterPhase>,
    /// Label selector of the workers' pods, for the scale subresource.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// What runs; it changes only with the spec, or by `spec.upgrade: Auto`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker: Option<WorkerRevision>,
    /// Numbers of workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workers: Option<WorkerCounts>,
    /// Numbers of partitions by their copies in sync.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub partitions: Option<PartitionCounts>,
    /// Learning epochs that are done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epoch: Option<i64>,
    /// Version of the workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Conditions, one of each type.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// The workers, by ordinal.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub members: Vec<Member>,
}

/// What the workers run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkerRevision {
    /// The image.
    pub image: String,
    /// Revision of the pod template.
    pub template_revision: u32,
}

/// Numbers of workers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct WorkerCounts {
    /// Pods that exist.
    pub total: i32,
    /// Of these, ready.
    pub ready: i32,
    /// Of these, of the newest template.
    pub up_to_date: i32,
    /// Of these, being emptied.
    pub draining: i32,
}

/// Numbers of partitions by their copies in sync.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PartitionCounts {
    /// With all copies.
    pub healthy: i32,
    /// With a copy too few.
    pub degraded: i32,
    /// With one copy where more are asked for.
    pub alone: i32,
    /// With none that serves.
    pub unavailable: i32,
}

/// One worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Member {
    /// Name of its pod.
    pub name: String,
    /// Number of its disk in the map.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store: Option<u32>,
    /// The node that it runs on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Partitions of which it is primary.
    pub primaries: u32,
    /// Partitions of which it holds another copy in sync.
    pub backups: u32,
}

words! {
    /// State of a run, for people.
    pub enum RunPhase {
        /// It waits.
        Pending,
        /// It learns.
        Running,
        /// It was stopped and can go on.
        Suspended,
        /// It is done.
        Complete,
        /// It has failed.
        Failed,
    }
}

/// Status of a `LearnerRun`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct LearnerRunStatus {
    /// The generation that this status speaks about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// State for people; machines read conditions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<RunPhase>,
    /// When the run was handed to a worker, RFC 3339. From then on its spec is fixed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-format" = "date-time"))]
    pub start_time: Option<String>,
    /// When the run ended, RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-format" = "date-time"))]
    pub completion_time: Option<String>,
    /// Runs of the cluster before this one, the one that learns among them; 0 of one that learns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_position: Option<u32>,
    /// Pod of the worker that drives the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// How far it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// What a run of kind Snapshot has written, once it is complete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotResult>,
    /// Conditions, one of each type.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// A snapshot that was written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct SnapshotResult {
    /// Where it is: `s3://BUCKET/PREFIX`, or `volume://VOLUME/PATH`.
    pub url: String,
    /// Digest of all memories.
    pub digest: String,
    /// Memories in it.
    pub memories: i64,
    /// Bytes of its files.
    pub bytes: i64,
    /// Its partitions.
    pub partitions: i32,
}

/// How far a run is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Progress {
    /// Epochs that are done; of a snapshot, partitions.
    pub epoch: i64,
    /// Epochs in all, where known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total: Option<i64>,
    /// Time that is left, about: `41s`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eta: Option<String>,
    /// What was measured last, as decimal text.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, String>,
}
