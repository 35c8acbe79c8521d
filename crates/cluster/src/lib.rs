//! The cluster protocol as pure functions: the partition map and what may change in it, placement, decisions.
//!
//! Decides who serves a partition. Takes what was observed as values and gives back changes as values; it never does I/O,
//! reads a clock, starts a thread or draws a random number, so that production, simulation and model checking run the
//! same code.
//!
//! Invariant: the map is the only authority, and every change of it passes [`Entry::check`].
#![forbid(unsafe_code)]

mod change;
mod decide;
pub mod detector;
mod map;
mod place;
pub mod rebuild;
pub mod replica;

pub use change::{Change, Expected};
pub use decide::{ABSENT_MS, HandOver, LEASES_END_MS, Observed, Plan, Seen, absent, decide, is_forsaken};
pub use detector::Detector;
pub use map::{Entry, Illegal, PartitionMap};
pub use place::{Candidate, PlaceError, loaders, place};
pub use replica::Replica;
