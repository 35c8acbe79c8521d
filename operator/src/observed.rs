//! What was found: the objects of a cluster, its pods, claims, nodes and map, as values.

use std::collections::BTreeMap;

use engram_api::status::LearnerClusterStatus;
use engram_coordinator::{Bootstrapping, GpuTrouble};
use engram_memory::Member;
use serde_json::Value;

/// Everything that a plan looks at beside the spec.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// Objects with the cluster's labels of the kinds that [`crate::build`] makes, as the API server has them.
    pub objects: Vec<Value>,
    /// The StatefulSet, if there is one.
    pub set: Option<SetView>,
    /// The workers' pods.
    pub pods: Vec<PodView>,
    /// The workers' claims.
    pub claims: Vec<Claim>,
    /// The `PartitionMap`, if there is one.
    pub map: Option<MapView>,
    /// Whether some node offers the resource that the spec names; `None` where nodes cannot be read.
    pub gpu_offered: Option<bool>,
    /// Workers that do without a GPU that they would use, as they tell.
    pub gpu_troubles: BTreeMap<u32, GpuTrouble>,
    /// How far the workers are of a cluster that begins from a snapshot, as long as it has no map.
    pub bootstrapping: Option<Bootstrapping>,
    /// The status that was written last.
    pub status: LearnerClusterStatus,
}

/// A StatefulSet.
#[derive(Clone, Debug, Default)]
pub struct SetView {
    /// Pods that it shall have.
    pub replicas: u32,
    /// Revision of its newest template; empty until its controller has seen it.
    pub update_revision: String,
}

/// A pod.
#[derive(Clone, Debug, Default)]
pub struct PodView {
    /// Place in the StatefulSet.
    pub ordinal: u32,
    /// UID of the object.
    pub uid: String,
    /// Revision of the template that it was made from.
    pub revision: String,
    /// Whether its readiness probe holds.
    pub ready: bool,
    /// Whether somebody has ordered it to go.
    pub terminating: bool,
    /// Its node.
    pub node: Option<String>,
    /// For how many milliseconds its node has been not ready or gone.
    pub node_lost_for_ms: Option<u64>,
    /// Whether it was given devices: it claims some, or asks for more than what every node has.
    pub has_devices: bool,
    /// Workers that ran in containers of it which have ended: the kubelet's word, and proof.
    pub ended: Vec<Ended>,
}

/// A worker whose container has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The process, as it said itself before anybody heard of it.
    pub member: Member,
    /// How it ended, and in which container.
    pub exit: String,
}

/// A claim.
#[derive(Clone, Debug, Default)]
pub struct Claim {
    /// Place in the StatefulSet.
    pub ordinal: u32,
    /// UID of the object.
    pub uid: String,
    /// Size that is asked for, in bytes.
    pub size_bytes: u64,
    /// Whose data it holds, where it says.
    pub cluster_id: Option<String>,
}

/// The map.
#[derive(Clone, Debug, Default)]
pub struct MapView {
    /// What a change of the map is compared with.
    pub resource_version: String,
    /// Whose map it is.
    pub cluster_id: String,
    /// Whether it is marked as suspended.
    pub suspended: bool,
    /// Number of the disk that each ordinal has now.
    pub stores: BTreeMap<u32, u32>,
    /// The partitions, by id.
    pub partitions: Vec<PartitionView>,
}

/// One partition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartitionView {
    /// Ordinal of the worker that serves it; one that no worker has where its disk is gone.
    pub primary: u32,
    /// Ordinals of the workers with a copy in sync, the primary among them.
    pub in_sync: Vec<u32>,
    /// Ordinals of the workers that are catching up.
    pub learners: Vec<u32>,
    /// Whether the primary has taken it up.
    pub activated: bool,
}

impl MapView {
    /// Returns how many partitions the worker serves.
    pub fn primaries(&self, ordinal: u32) -> usize {
        self.partitions.iter().filter(|partition| partition.primary == ordinal).count()
    }

    /// Returns how many copies the worker has, those that catch up included.
    pub fn copies(&self, ordinal: u32) -> usize {
        let holds =
            |partition: &&PartitionView| partition.in_sync.contains(&ordinal) || partition.learners.contains(&ordinal);
        self.partitions.iter().filter(holds).count()
    }

    /// Returns the highest ordinal that has a copy.
    pub fn highest_holder(&self) -> Option<u32> {
        self.partitions.iter().flat_map(|partition| partition.in_sync.iter().chain(&partition.learners)).copied().max()
    }

    /// Whether every partition is served and has `copies` copies in sync.
    pub fn is_full(&self, copies: u32) -> bool {
        self.partitions.iter().all(|partition| partition.activated && partition.in_sync.len() >= copies as usize)
    }

    /// Whether every partition has `copies` copies in sync that are not on the worker.
    pub fn is_full_without(&self, ordinal: u32, copies: u32) -> bool {
        self.partitions
            .iter()
            .all(|partition| partition.in_sync.iter().filter(|member| **member != ordinal).count() >= copies as usize)
    }
}
