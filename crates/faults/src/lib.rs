//! Fault injection for a cluster of real processes, and a ledger that measures the effects.
//!
//! ```text
//! Load (clients that write a ledger into the weights) ──────────────┐
//! Campaign (draws faults, waits until the cluster is healthy) ───────┼── a cluster of real processes
//! Network (a proxy per directed link between its members) ──────────┘
//! ```
//!
//! Decides which fault comes next, when a cluster is healthy, and whether an acknowledged operation was lost or applied
//! twice. Campaigns on processes, of trainings and on Kubernetes share the [ledger](ledger::Tally), the [runner](runner::SeedRunner) and
//! the [outcome](outcome::Outcome). It starts no processes: the caller locates and restarts them ([`campaign::Processes`]).
#![forbid(unsafe_code)]

pub mod campaign;
mod faults;
pub mod health;
pub mod ledger;
pub mod load;
pub mod network;
pub mod outages;
pub mod outcome;
pub mod proxy;
pub mod runner;
