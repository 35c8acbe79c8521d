//! Memory runs: epoch after epoch of decay, reinforcement, aggregation and broadcast, driven to the end whatever dies.
//!
//! A [`Driver`] takes epochs from a source, applies them through a [`Cluster`] and keeps its cursor in a [`RunLog`], the replicated
//! record of the run. It may stop at any await and another may resume: before the first part of epoch n is sent, the log contains n
//! as the next epoch and its predicted hits, and a cluster answers a repeated epoch instead of applying it. So a run ends with the
//! same digest and the same hits however often its driver was killed.
//!
//! ```text
//! source -> prediction (ranking before the epoch) -> record -> learn -> broadcast -> status
//!                                                      ^                               |
//!                                                      +------- next epoch ------------+
//! ```

mod client_cluster;
mod cluster;
mod driver;
mod federated;
mod fetch;
mod finish;
mod history;
mod job;
mod pin;
mod specification;
mod state;
mod status;
#[cfg(test)]
mod tests;
mod training;

pub use client_cluster::ClientCluster;
pub use cluster::{Cluster, ClusterError, ClusterFacts, EpochOutcome, LogError, RunLog, Turn};
pub use driver::{Driver, SentKeys};
pub use federated::{ClientRow, FederatedRow, FederatedState};
pub use fetch::{FetchError, Fetcher};
pub use finish::report;
pub use job::{Conditions, Job};
pub use specification::{comparable_spec, spec_fingerprint};
pub use state::{CorruptRecord, Input, RunState, SnapshotResult, SnapshotState};
pub use status::{Order, Phase, RunningTask, Status};
pub use training::{GroupMemberState, TrainingRow, TrainingState};
