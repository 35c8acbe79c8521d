//! The `status` of the kinds, and the types of its conditions.
//!
//! Conditions follow kstatus: `Ready`, `Reconciling`, `Stalled`, each with the observed generation. `phase` is a summary
//! for people; programs read conditions.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::autoscaling::AutoscalingStatus;
use crate::manifest_enum::words;

mod job;

pub use job::{JobProcess, JobStatus, MAX_LOG_TAILS, ProcessPhase, log_tail};

/// Condition types, in the order in which they are listed.
pub mod condition {
    /// Every partition is served and the cluster matches its spec.
    pub const READY: &str = "Ready";
    /// The operator is changing the cluster towards its spec.
    pub const RECONCILING: &str = "Reconciling";
    /// The cluster requires manual intervention.
    pub const STALLED: &str = "Stalled";
    /// The spec is valid and supported.
    pub const ACCEPTED: &str = "Accepted";
    /// Every partition has all its replicas in sync.
    pub const REPLICATED: &str = "Replicated";
    /// The workers' certificate is valid: of clusters with `tls.mode: Secret` or `CertManager`.
    pub const CERTIFICATE_VALID: &str = "CertificateValid";
    /// GPUs are requested and some node offers them.
    pub const GPU_AVAILABLE: &str = "GpuAvailable";
    /// The operator offers a newer worker than the pinned one.
    pub const UPDATE_AVAILABLE: &str = "UpdateAvailable";
    /// The cluster has no pods and keeps its disks.
    pub const SUSPENDED: &str = "Suspended";
}

/// One condition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Type of the condition.
    #[serde(rename = "type")]
    #[schemars(length(max = 316))]
    pub kind: String,
    /// Status of the condition: True, False or Unknown.
    pub status: Truth,
    /// Machine-readable reason for the last transition, in CamelCase.
    #[schemars(length(max = 1024))]
    pub reason: String,
    /// Human-readable explanation.
    #[schemars(length(max = 32768))]
    pub message: String,
    /// Generation of the object that the condition was computed for.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub observed_generation: Option<i64>,
    /// When `status` last changed, RFC 3339.
    #[schemars(extend("x-kubernetes-format" = "date-time"))]
    pub last_transition_time: String,
}

words! {
    /// Status of a condition.
    pub enum Truth {
        /// The condition holds.
        True,
        /// The condition does not hold.
        False,
        /// The operator cannot determine whether the condition holds.
        Unknown,
    }
}

words! {
    /// Summary of a cluster's state, for people.
    pub enum ClusterPhase {
        /// The spec is invalid.
        Invalid,
        /// Objects are created and workers start.
        Starting,
        /// The cluster matches its spec.
        Ready,
        /// All partitions are served, some are under-replicated.
        Degraded,
        /// Some partitions are not served.
        Unavailable,
        /// Objects are changed or workers are replaced one by one.
        Updating,
        /// Workers are added or drained.
        Scaling,
        /// Pods are being removed.
        Suspending,
        /// No pods run; the disks are kept.
        Suspended,
        /// The cluster requires manual intervention.
        Stalled,
    }
}

/// Status of a `LearnerCluster`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct LearnerClusterStatus {
    /// Generation of the object that this status was computed for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Identity of the cluster's data, 32 hexadecimal digits: on every disk and in the partition map.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,
    /// Summary of the state, for people; programs read conditions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<ClusterPhase>,
    /// Label selector of the workers' pods, for the scale subresource.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// Revision that the workers run; it changes only with the spec or by `spec.upgrade: Auto`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker: Option<WorkerRevision>,
    /// Worker counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workers: Option<WorkerCounts>,
    /// Partition counts by replication state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub partitions: Option<PartitionCounts>,
    /// Completed learning epochs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epoch: Option<i64>,
    /// Last decision of the autoscaler.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub autoscaling: Option<AutoscalingStatus>,
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

/// Revision of the workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkerRevision {
    /// The image.
    pub image: String,
    /// Revision of the pod template.
    pub template_revision: u32,
}

/// Worker counts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct WorkerCounts {
    /// Pods that exist.
    pub total: i32,
    /// Ready pods.
    pub ready: i32,
    /// Pods of the newest template.
    pub up_to_date: i32,
    /// Pods that are being drained.
    pub draining: i32,
}

/// Partition counts by replication state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PartitionCounts {
    /// Served, with all replicas in sync.
    pub healthy: i32,
    /// Served, with fewer in-sync replicas than configured.
    pub under_replicated: i32,
    /// Served by a single replica where more are configured.
    pub single_replica: i32,
    /// Without an active primary: neither reads nor writes are served.
    pub unavailable: i32,
}

/// One worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Member {
    /// Name of its pod.
    pub name: String,
    /// Number of its store in the partition map.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store: Option<u32>,
    /// Node that it runs on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Partitions of which it is the primary.
    pub primaries: u32,
    /// Partitions of which it is an in-sync backup.
    pub backups: u32,
}

words! {
    /// Summary of a run's state, for people.
    pub enum RunPhase {
        /// The run is queued or waits for its cluster.
        Pending,
        /// The run is in progress.
        Running,
        /// The run is stopped and can be resumed.
        Suspended,
        /// The run has succeeded.
        Complete,
        /// The run has failed or was cancelled.
        Failed,
    }
}

/// Status of a `LearnerRun`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct LearnerRunStatus {
    /// Generation of the object that this status was computed for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Summary of the state, for people; programs read conditions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<RunPhase>,
    /// When the run was submitted to a worker, RFC 3339. Its spec is immutable from then on.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-format" = "date-time"))]
    pub start_time: Option<String>,
    /// When the run ended, RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-format" = "date-time"))]
    pub completion_time: Option<String>,
    /// Number of retries after failures, up to `spec.backoffLimit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retries: Option<u32>,
    /// When the next retry starts, RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-format" = "date-time"))]
    pub retry_time: Option<String>,
    /// Position in the cluster's queue: number of runs ahead of this one, the running one included; 0 while it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_position: Option<u32>,
    /// Pod of the worker that drives the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Progress of the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// Results of the run as small texts by name, once it has ended: `digest` of the memories, of a snapshot its `url`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub outputs: BTreeMap<String, String>,
    /// Result of a run of kind Snapshot, once it is complete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotResult>,
    /// Processes of a run of kind Job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<JobStatus>,
    /// Conditions, one of each type.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// Result of a run of kind Snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct SnapshotResult {
    /// Location: `s3://BUCKET/PREFIX` or `volume://VOLUME/PATH`.
    pub url: String,
    /// Digest of all memories.
    pub digest: String,
    /// Number of memories.
    pub memories: i64,
    /// Total size of its files, in bytes.
    pub bytes: i64,
    /// Number of partitions.
    pub partitions: i32,
}

/// Progress of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Progress {
    /// Completed epochs; of a snapshot, partitions.
    pub epoch: i64,
    /// Total number of epochs, where known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total: Option<i64>,
    /// Estimated time to completion: `41s`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eta: Option<String>,
    /// Most recent metrics of the run, as decimal text.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, String>,
}
