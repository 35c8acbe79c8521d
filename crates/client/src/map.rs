//! The partition map of a client: the primary of each partition, and the workers' addresses.

use crate::error::Error;
use crate::options::Plane;
use engram_memory::{ClusterId, Incarnation, MAX_PARTITIONS, MemoryId, Ordinal, PartitionId, Term, partition_of};
use engram_proto::{answers, v1};
use std::collections::{BTreeMap, BTreeSet};

/// Primaries and addresses of a cluster at one version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Map {
    /// Id of the cluster.
    pub cluster: ClusterId,
    /// Name of the cluster.
    pub cluster_name: String,
    /// Incremented at every change.
    pub version: u64,
    /// Indexed by partition.
    pub partitions: Vec<Placement>,
    /// Workers with an in-sync replica, by partition, the primary included.
    pub in_sync: Vec<Vec<Ordinal>>,
    /// Workers by ordinal.
    pub workers: BTreeMap<Ordinal, Worker>,
    /// Elements of a feature vector; 0 = the cluster has no features.
    pub feature_dimension: u32,
}

/// The primary of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Number of the partition's configuration.
    pub term: Term,
    /// Ordinal of the primary.
    pub primary: Ordinal,
}

/// Addresses of a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Worker {
    /// Incarnation of its process.
    pub incarnation: Incarnation,
    /// `host:port` for clients.
    pub client_address: String,
    /// `host:port` for workers.
    pub peer_address: String,
    /// `host:port` of metrics and health.
    pub http_address: String,
    /// Whether the coordinator considers it alive.
    pub alive: bool,
}

impl Worker {
    pub(crate) fn address(&self, plane: Plane) -> &str {
        match plane {
            Plane::Client => &self.client_address,
            Plane::Peer => &self.peer_address,
        }
    }
}

impl Map {
    /// Returns the number of partitions, at least 1.
    pub fn partition_count(&self) -> u32 {
        u32::try_from(self.partitions.len()).expect("checked when the map was read")
    }

    /// Returns the partition of a memory.
    pub fn partition_of(&self, id: MemoryId) -> PartitionId {
        partition_of(id, self.partition_count())
    }

    /// Returns the primary of a partition; `None` for one that is not in the map.
    pub fn owner(&self, partition: PartitionId) -> Option<Ordinal> {
        self.partitions.get(partition.0 as usize).map(|placement| placement.primary)
    }

    /// Whether `newer` assigns a partition of `owner` to another worker.
    pub(crate) fn takes_from(&self, newer: &Self, owner: Ordinal) -> bool {
        let moved = |(old, new): (&Placement, &Placement)| old.primary == owner && new.primary != owner;
        newer.version > self.version && self.partitions.iter().zip(&newer.partitions).any(moved)
    }

    /// Returns every worker that is primary of a partition.
    pub fn owners(&self) -> BTreeSet<Ordinal> {
        self.partitions.iter().map(|placement| placement.primary).collect()
    }
}

impl TryFrom<v1::GetPartitionMapResponse> for Map {
    type Error = Error;

    fn try_from(from: v1::GetPartitionMapResponse) -> Result<Self, Error> {
        if from.partitions.is_empty() || from.partitions.len() > MAX_PARTITIONS as usize {
            return Err(Error::Protocol(format!("a map of {} partitions; allowed: 1 to 1,024", from.partitions.len())));
        }
        let worker = |member: v1::MemberEntry| {
            let worker = Worker {
                incarnation: Incarnation(member.incarnation),
                client_address: member.client_address,
                peer_address: member.peer_address,
                http_address: member.http_address,
                alive: member.alive,
            };
            (Ordinal(member.ordinal), worker)
        };
        let placement =
            |entry: &v1::PartitionEntry| Placement { term: Term(entry.term), primary: Ordinal(entry.primary) };
        Ok(Self {
            cluster: answers::cluster_id(&from.cluster)?,
            cluster_name: from.cluster_name,
            version: from.version,
            partitions: from.partitions.iter().map(placement).collect(),
            in_sync: from.partitions.iter().map(|entry| entry.in_sync.iter().copied().map(Ordinal).collect()).collect(),
            workers: from.members.into_iter().map(worker).collect(),
            feature_dimension: from.feature_dimension,
        })
    }
}
