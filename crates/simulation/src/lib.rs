//! A cluster of real stores in one thread, everything from a seed: disks, clocks, network, map, clients, faults.
//!
//! ```text
//! clients ──requests, repeats──> stores (the real ones, each over SimDisk and ManualClock)
//!                                  │ envelopes            │ proposals
//!                                  v                      v
//!                        network: late, lost,     map authority: late, lost, twice
//!                        twice, out of order      (Entry::changed) ──pushes──> stores
//! ```
//!
//! Decides what happens next and what must hold; how a replica, a log or a partition works is decided by the code under test. A
//! run has two parts: faults, then calm, in which everything has to become whole again. Checked at every step: one process
//! serves a term; what is applied at an lsn is equal on all copies; who may read has all that was acknowledged. Checked in the
//! end: everybody answers, all copies are in sync and equal, the ledger in the weights shows every operation as often as its client
//! was told and every step of the learning run once, and what clients read of each id fits one order of its operations.
//!
//! Half the seeds bend their weather towards one part of the protocol ([`Season`]). In mode async what a process acknowledged in its
//! last moments may be lost, and the ledger says of everything else that it is there.
//!
//! Invariant: a seed decides everything; two runs of it, in any two processes, leave the same trace.
#![forbid(unsafe_code)]

#[cfg(feature = "defects")]
mod aims;
mod checks;
mod client;
mod coordinator;
mod draw;
mod epochs;
mod faults;
mod inject;
mod leaving;
mod linear;
mod map;
mod network;
mod node;
mod season;
mod senses;
mod trace;
mod weather;
mod world;

#[cfg(feature = "defects")]
pub use aims::{aim, first_seed, is_in_model, unseen};
pub use engram_store::Durability;
pub use faults::{Counters, Fault};
pub use season::Season;

use std::panic::{AssertUnwindSafe, catch_unwind};

/// What all runs of a campaign share.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// When a write is acknowledged.
    pub durability: Durability,
    /// What the run is about; `None` = its seed decides.
    pub season: Option<Season>,
    /// Prints what happens.
    pub prints: bool,
    /// A defect that every process has; one at a time in the process that simulates.
    #[cfg(feature = "defects")]
    pub defect: Option<engram_cluster::replica::Defect>,
}

impl Options {
    /// Options of a mode, without a defect.
    pub const fn new(durability: Durability) -> Self {
        Self {
            durability,
            season: None,
            prints: false,
            #[cfg(feature = "defects")]
            defect: None,
        }
    }
}

/// What became of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Equal for two runs of a seed.
    pub trace_hash: u64,
    /// Events handled.
    pub steps: u64,
    /// Simulated microseconds.
    pub simulated_us: u64,
    /// Operations that were acknowledged.
    pub acked: u64,
    /// Operations whose fate the client never learned.
    pub unknown: u64,
    /// Operations that were closed before they were executed.
    pub never: u64,
    /// Acknowledged in mode async, and lost as it says.
    pub lost: u64,
    /// Promotions that were written to the map.
    pub promotions: u64,
    /// Promotions that took primaryship from a process which was taken for dead.
    pub failovers: u64,
    /// Those of a process that ran: it was paused or cut off, or a fault said so.
    pub unnecessary: u64,
    /// Moments at which a node might have answered a linearizable read.
    pub reads: u64,
    /// Operations, reads among them, whose histories were searched for an order that explains them.
    pub searched: u64,
    /// Copies of a state that were installed.
    pub copies: u64,
    /// The only copy of a partition that was whole was damaged before another one was made: a person's to order.
    pub forsaken: bool,
    /// Faults by kind.
    pub faults: Counters,
    /// What did not hold; `None` = everything did.
    pub failure: Option<String>,
}

/// Runs a seed. A panic of the code under test is a failure like any other.
pub fn run(seed: u64, options: &Options) -> Outcome {
    #[cfg(feature = "defects")]
    engram_cluster::replica::plant(options.defect);
    let mut world = world::World::new(seed, options);
    let ended = catch_unwind(AssertUnwindSafe(|| world.run()));
    let mut outcome = world.outcome();
    if let Err(panic) = ended {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        outcome.failure = Some(format!("panic: {}", text.unwrap_or_else(|| "without words".to_owned())));
    }
    outcome
}
