//! Memory runs: epoch after epoch of decay, reinforcement, aggregation and broadcast, driven to the end whatever dies.
//!
//! A [`Driver`] takes its epochs from a source, applies them through a [`Cluster`] and keeps its cursor in a [`RunLog`],
//! which is the replicated record of the run. It may stop at any await and another may go on: before the first part of
//! epoch n goes out, the log says that n is next and holds what the ranking predicted of it, and a cluster answers a
//! repeated epoch instead of applying it. So a run ends with the same digest and the same hits however often its driver was
//! killed.
//!
//! ```text
//! source -> prediction (ranking before the epoch) -> record -> learn -> broadcast -> status
//!                                                      ^                               |
//!                                                      +------- next epoch ------------+
//! ```

mod cluster;
mod connected;
mod driver;
mod fetch;
mod finish;
mod job;
mod pin;
mod state;
mod status;
#[cfg(test)]
mod tests;

pub use cluster::{Cluster, ClusterError, Facts, Learned, LogError, RunLog, Turn};
pub use connected::Connected;
pub use driver::{Driver, KnownKeys};
pub use fetch::{Fetch, Unfetched};
pub use finish::report;
pub use job::{Conditions, Job};
pub use state::{Damaged, RunState, SnapshotResult, SnapshotState};
pub use status::{Order, Phase, Status};
