//! Observed state of a cluster: its objects, pods, claims, nodes and map, as values.

use std::collections::BTreeMap;

use engram_api::status::LearnerClusterStatus;
use engram_coordinator::{BootstrapProgress, GpuFault};
use engram_memory::Member;

use crate::kube::api_object::ApiObject;

/// Everything that a plan depends on, apart from the spec.
#[derive(Clone, Debug, Default)]
pub struct Observation {
    /// Objects of the kinds that [`crate::cluster::build`] makes, with the cluster's labels.
    pub objects: Vec<ApiObject>,
    /// The StatefulSet, if there is one.
    pub set: Option<SetView>,
    /// The workers' pods.
    pub pods: Vec<PodView>,
    /// The workers' claims.
    pub claims: Vec<ClaimView>,
    /// The `PartitionMap`, if there is one.
    pub map: Option<MapView>,
    /// Whether some node offers the GPU resource of the spec; `None` if nodes cannot be read.
    pub gpu_offered: Option<bool>,
    /// Workers that report an unusable GPU.
    pub gpu_problems: BTreeMap<u32, GpuFault>,
    /// Bootstrap progress of a cluster that starts from a snapshot, until it has a map.
    pub bootstrapping: Option<BootstrapProgress>,
    /// The last written status.
    pub status: LearnerClusterStatus,
}

/// A StatefulSet.
#[derive(Clone, Debug, Default)]
pub struct SetView {
    /// Desired number of pods.
    pub replicas: u32,
    /// Revision of its newest template; empty until its controller has observed it.
    pub update_revision: String,
    /// Creation time, RFC 3339, where known.
    pub created: Option<String>,
}

/// A pod.
#[derive(Clone, Debug, Default)]
pub struct PodView {
    /// Ordinal in the StatefulSet.
    pub ordinal: u32,
    /// UID of the object.
    pub uid: String,
    /// Revision of the template that it was made from.
    pub revision: String,
    /// Whether it is ready.
    pub ready: bool,
    /// Whether it is being deleted.
    pub terminating: bool,
    /// Its node.
    pub node: Option<String>,
    /// Milliseconds for which its node has been not ready or missing.
    pub node_lost_for_ms: Option<u64>,
    /// Whether it requests devices, by resource claims or extended resources.
    pub has_devices: bool,
    /// Workers of containers that have terminated, as reported by the kubelet: proof of death.
    pub worker_exits: Vec<WorkerExit>,
    /// Why it cannot start, as reported by the scheduler or the kubelet.
    pub start_failure: Option<StartFailure>,
}

/// Why a pod cannot start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartFailure {
    /// What fails.
    pub cause: StartFailureCause,
    /// Report of the scheduler or the kubelet, with container and image.
    pub detail: String,
    /// Start of the failure, RFC 3339, where reported.
    pub since: Option<String>,
}

/// What fails when a pod cannot start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartFailureCause {
    /// The scheduler finds no node.
    Unschedulable,
    /// The kubelet refused the pod.
    Rejected,
    /// An image cannot be pulled.
    ImagePull,
    /// A container cannot be created from its configuration.
    Configuration,
    /// A container terminates repeatedly.
    CrashLoop,
}

/// A worker whose container has terminated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerExit {
    /// The worker process, from its termination message.
    pub member: Member,
    /// Description of the termination and the container.
    pub exit: String,
}

/// A claim.
#[derive(Clone, Debug, Default)]
pub struct ClaimView {
    /// Ordinal in the StatefulSet.
    pub ordinal: u32,
    /// UID of the object.
    pub uid: String,
    /// Requested size, in bytes.
    pub size_bytes: u64,
    /// Cluster id of its data, from its label.
    pub cluster_id: Option<String>,
    /// Its storage class.
    pub storage_class: Option<String>,
    /// Whether it never had a volume: no data is on it.
    pub is_pending: bool,
}

/// The partition map.
#[derive(Clone, Debug, Default)]
pub struct MapView {
    /// UID of the object.
    pub uid: String,
    /// UID of the `LearnerCluster` that the object is deleted with, if any.
    pub owner: Option<String>,
    /// Resource version, for compare-and-swap.
    pub resource_version: String,
    /// Cluster id.
    pub cluster_id: String,
    /// Whether it is marked as suspended.
    pub suspended: bool,
    /// Current store number of each ordinal.
    pub stores: BTreeMap<u32, u32>,
    /// The partitions, by id.
    pub partitions: Vec<PartitionView>,
}

/// One partition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartitionView {
    /// Ordinal of the primary; `u32::MAX` if its store is gone.
    pub primary: u32,
    /// Ordinals of the in-sync replicas, including the primary.
    pub in_sync: Vec<u32>,
    /// Ordinals of the learners.
    pub learners: Vec<u32>,
    /// Whether the primary has activated it.
    pub activated: bool,
}

impl MapView {
    /// Returns the number of partitions whose primary is the worker.
    pub fn primaries(&self, ordinal: u32) -> usize {
        self.partitions.iter().filter(|partition| partition.primary == ordinal).count()
    }

    /// Returns the number of replicas on the worker, learners included.
    pub fn copies(&self, ordinal: u32) -> usize {
        let holds =
            |partition: &&PartitionView| partition.in_sync.contains(&ordinal) || partition.learners.contains(&ordinal);
        self.partitions.iter().filter(holds).count()
    }

    /// Returns whether every partition is served without the worker, which is in no in-sync set: its disk holds nothing that is needed.
    pub fn is_served_without(&self, ordinal: u32) -> bool {
        self.partitions.iter().all(|partition| partition.activated && !partition.in_sync.contains(&ordinal))
    }

    /// Returns the highest ordinal that has a replica.
    pub fn highest_replica_holder(&self) -> Option<u32> {
        self.partitions.iter().flat_map(|partition| partition.in_sync.iter().chain(&partition.learners)).copied().max()
    }

    /// Returns whether every partition is served and has `copies` in-sync replicas.
    pub fn is_full(&self, copies: u32) -> bool {
        self.partitions.iter().all(|partition| partition.activated && partition.in_sync.len() >= copies as usize)
    }

    /// Returns whether every partition has `copies` in-sync replicas on other workers.
    pub fn is_full_without(&self, ordinal: u32, copies: u32) -> bool {
        self.partitions
            .iter()
            .all(|partition| partition.in_sync.iter().filter(|member| **member != ordinal).count() >= copies as usize)
    }
}
