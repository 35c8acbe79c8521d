//! Interfaces of a driver: the cluster, and the log with its cursor.

use super::driver::SentKeys;
use crate::report::RankEntry;
use crate::source::{Content, Population};
use engram_memory::{Digest, Group, Histogram, LearningEpoch, MemoryId, OnMissing, QualityVector, RunId, run::Entry};
use std::future::Future;

/// A call of a run to its cluster failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    /// A retry may succeed: a worker is unreachable, a deadline passed.
    #[error("{0}")]
    Temporary(String),
    /// A retry will fail: rejected, malformed, full.
    #[error("{message}")]
    Permanent {
        /// Error code.
        code: &'static str,
        /// Message.
        message: String,
    },
}

/// The record of a run could not be written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LogError {
    /// Another driver has written meanwhile; this one must stop.
    #[error("another driver has taken over")]
    Superseded,
    /// The call to the cluster failed.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
}

/// Properties of the cluster that do not change during a run.
#[derive(Debug, Clone, PartialEq)]
pub struct ClusterFacts {
    /// Name of the cluster.
    pub name: String,
    /// Workers.
    pub workers: u32,
    /// Partitions.
    pub partitions: u32,
    /// Learning rate.
    pub rate: f64,
    /// Weight of a new memory.
    pub initial_weight: f64,
}

/// Response to a request for the turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Turn {
    /// The run may change the cluster until it releases the turn.
    Granted,
    /// Another run has the turn.
    Held {
        /// Its name.
        holder: String,
        /// Number of runs ahead in the queue.
        runs_ahead: u32,
    },
}

/// Result of a learning epoch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EpochOutcome {
    /// Updates applied; for a group, its memories.
    pub applied: u64,
    /// Memories created.
    pub created: u64,
    /// Memories evicted.
    pub evicted: u64,
    /// Updates rejected.
    pub rejected: u64,
    /// Quality after it, over all partitions.
    pub quality: QualityVector,
}

/// The cluster that a run learns on. Every call has its own deadline and may be repeated after a failure.
pub trait Cluster: Send + Sync {
    /// Returns the properties of the cluster.
    fn facts(&self) -> ClusterFacts;

    /// Requests the turn: one run at a time changes a cluster. Waiting runs are served in order of submission.
    fn acquire_turn(
        &self,
        run: RunId,
        name: &str,
        submitted_ms: u64,
    ) -> impl Future<Output = Result<Turn, ClusterError>> + Send;

    /// Releases the turn.
    fn release_turn(&self, run: RunId) -> impl Future<Output = Result<(), ClusterError>> + Send;

    /// Sets whether memories count the updates that address them.
    fn set_update_counting(&self, enabled: bool) -> impl Future<Output = Result<(), ClusterError>> + Send;

    /// Inserts the memories of the synthetic experiment, or sets them back to their start.
    fn populate(&self, population: &Population) -> impl Future<Output = Result<(), ClusterError>> + Send;

    /// Applies one learning epoch to all partitions; a repeated epoch is answered and not applied. `sent` are the ids whose keys
    /// the cluster has.
    fn learn(
        &self,
        run: RunId,
        n: LearningEpoch,
        decay: f64,
        content: &Content,
        on_missing: OnMissing,
        sent: &SentKeys,
    ) -> impl Future<Output = Result<EpochOutcome, ClusterError>> + Send;

    /// Broadcasts the global quality of an epoch to every worker.
    fn broadcast(
        &self,
        run: RunId,
        n: LearningEpoch,
        quality: &QualityVector,
    ) -> impl Future<Output = Result<(), ClusterError>> + Send;

    /// Returns the first `limit` memories by rank.
    fn top(&self, limit: usize) -> impl Future<Output = Result<Vec<RankEntry>, ClusterError>> + Send;

    /// Returns the existing memories of `ids`, in that order.
    fn get(&self, ids: &[MemoryId]) -> impl Future<Output = Result<Vec<RankEntry>, ClusterError>> + Send;

    /// Returns all memories of two groups in rank order, as (weight in units, whether of the first).
    fn ranked_pairs(
        &self,
        first: Group,
        second: Group,
    ) -> impl Future<Output = Result<Vec<(u32, bool)>, ClusterError>> + Send;

    /// Quality now.
    fn quality(&self) -> impl Future<Output = Result<QualityVector, ClusterError>> + Send;

    /// Histogram of `2^bits` bins.
    fn histogram(&self, bits: u32) -> impl Future<Output = Result<Histogram, ClusterError>> + Send;

    /// Per group: (memories with at least `updates` updates counted, memories).
    fn coverage(&self, updates: u16) -> impl Future<Output = Result<Vec<(Group, u64, u64)>, ClusterError>> + Send;

    /// Digest of all memories.
    fn digest(&self) -> impl Future<Output = Result<Digest, ClusterError>> + Send;
}

/// The replicated record of a run.
pub trait RunLog: Send + Sync {
    /// Reads it; `None` if the run does not exist.
    fn load(&self, run: RunId) -> impl Future<Output = Result<Option<Entry>, LogError>> + Send;

    /// Replaces its state and adds a row, if its version is `expected`.
    fn record(
        &self,
        run: RunId,
        expected: u64,
        state: Vec<u8>,
        row: Option<Vec<u8>>,
    ) -> impl Future<Output = Result<(), LogError>> + Send;
}
