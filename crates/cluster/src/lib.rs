//! The cluster protocol as pure functions: the partition map and its legal changes, placement, decisions.
//!
//! Decides which worker serves a partition. Takes observations as values and returns changes as values; it never does
//! I/O, reads a clock, starts a thread or draws a random number, so that production, simulation and model checking run
//! the same code.
//!
//! Invariant: the map is the only source of truth, and every change of it passes [`Entry::check`].
#![forbid(unsafe_code)]

mod change;
mod decide;
pub mod detector;
pub mod injected;
mod map;
mod placement;
pub mod rebuild;
pub mod replica;

pub use change::{Change, ExpectedEntry};
pub use decide::{
    ABSENT_MS, ClusterObservation, LEASE_WAIT_MS, LeadershipTransfer, Plan, WorkerObservation, check_force_promotable,
    decide, find_absent,
};
pub use detector::Detector;
pub use map::{Entry, IllegalChange, PartitionMap};
pub use placement::{Candidate, PlacementError, assign_loaders, place_replicas};
pub use replica::Replica;
