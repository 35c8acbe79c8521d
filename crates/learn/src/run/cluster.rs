//! What a driver needs of a cluster, and of the place where it keeps its cursor.

use super::driver::KnownKeys;
use crate::report::Known;
use crate::source::{Content, Population};
use engram_memory::{Digest, Group, Histogram, LearningEpoch, MemoryId, OnMissing, QualityVector, RunId, run::Entry};
use std::future::Future;

/// A cluster could not do what a run asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    /// It may work later: a worker is away, a deadline passed.
    #[error("{0}")]
    Temporary(String),
    /// It will not work: refused, malformed, full.
    #[error("{message}")]
    Permanent {
        /// Number under which it is explained.
        code: &'static str,
        /// What is wrong.
        message: String,
    },
}

/// The record of a run could not be written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LogError {
    /// Another driver has written since: this one must stop.
    #[error("another driver has taken over")]
    Superseded,
    /// The cluster.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
}

/// What does not change during a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
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

/// Whether a run may change the cluster now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Turn {
    /// It may, until it gives the turn back.
    Granted,
    /// Another run has the turn.
    Held {
        /// Its name.
        by: String,
        /// Runs that wait and came before this one.
        before: u32,
    },
}

/// What a learning epoch did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Learned {
    /// Updates applied; of a group, its memories.
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

/// The cluster that a run learns on. Every call has a deadline of its own; a call that failed may be repeated.
pub trait Cluster: Send + Sync {
    /// What does not change during a run.
    fn facts(&self) -> Facts;

    /// Asks for the turn: one run at a time changes a cluster. Of those that wait the one submitted first has the next.
    fn take_turn(
        &self,
        run: RunId,
        name: &str,
        submitted_ms: u64,
    ) -> impl Future<Output = Result<Turn, ClusterError>> + Send;

    /// Gives the turn back.
    fn return_turn(&self, run: RunId) -> impl Future<Output = Result<(), ClusterError>> + Send;

    /// Whether memories count the updates that address them.
    fn count_updates(&self, enabled: bool) -> impl Future<Output = Result<(), ClusterError>> + Send;

    /// Inserts the memories of the synthetic experiment, or sets them back to their start.
    fn populate(&self, population: &Population) -> impl Future<Output = Result<(), ClusterError>> + Send;

    /// One learning epoch on all partitions; a repeat is answered and not applied. `known` are the keys that the cluster
    /// has been told.
    fn learn(
        &self,
        run: RunId,
        n: LearningEpoch,
        decay: f64,
        content: &Content,
        on_missing: OnMissing,
        known: &KnownKeys,
    ) -> impl Future<Output = Result<Learned, ClusterError>> + Send;

    /// Tells every worker the global quality of an epoch.
    fn broadcast(
        &self,
        run: RunId,
        n: LearningEpoch,
        quality: &QualityVector,
    ) -> impl Future<Output = Result<(), ClusterError>> + Send;

    /// The first `limit` memories by rank.
    fn top(&self, limit: usize) -> impl Future<Output = Result<Vec<Known>, ClusterError>> + Send;

    /// Those of `ids` that are there, in that order.
    fn get(&self, ids: &[MemoryId]) -> impl Future<Output = Result<Vec<Known>, ClusterError>> + Send;

    /// All memories of two groups in rank order, as (weight in units, whether of the first).
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
    /// Reads it; `None` when the run is not known.
    fn load(&self, run: RunId) -> impl Future<Output = Result<Option<Entry>, LogError>> + Send;

    /// Replaces its state and adds a row, if nobody else did since version `expected`.
    fn record(
        &self,
        run: RunId,
        expected: u64,
        state: Vec<u8>,
        row: Option<Vec<u8>>,
    ) -> impl Future<Output = Result<(), LogError>> + Send;
}
