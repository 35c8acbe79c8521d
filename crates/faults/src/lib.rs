//! Faults for a cluster of real processes, and the ledger that tells what they cost.
//!
//! ```text
//! Load (clients that write a ledger into the weights) ──────────────┐
//! Campaign (draws faults, waits until the cluster is whole again) ──┼── a cluster of real processes
//! Network (a proxy per directed link between its members) ──────────┘
//! ```
//!
//! Decides which fault comes next, when a cluster counts as whole, and whether anything acknowledged was lost or applied twice.
//! It starts no process: whoever runs the campaign says where the processes are ([`campaign::Processes`]) and starts them again.
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
