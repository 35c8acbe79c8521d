//! A cluster of real stores in one thread, everything determined by a seed: disks, clocks, network, map, clients,
//! faults.
//!
//! ```text
//! clients ──requests, repeats──> stores (the real ones, each over SimDisk and ManualClock)
//!                                  │ envelopes            │ proposals
//!                                  v                      v
//!                        network: late, lost,     map store:     late, lost, twice
//!                        twice, out of order      (Entry::apply)   ──pushes──> stores
//! ```
//!
//! Decides what happens next and what must hold; the behaviour of replicas, logs and partitions is the code under test.
//! A run has two phases: faults, then calm, in which everything must recover. Checked at every step: one process serves
//! a term; all replicas agree at every lsn; a process that may serve reads has everything acknowledged. Checked at the
//! end: every request gets a response, all replicas are in sync and equal, the ledger in the weights shows every
//! operation as often as its client's response says and every step of the learning run once, the history of each id is
//! linearizable, and every replica has the payloads of all acknowledged items on its disk.
//!
//! Half the seeds focus their fault plan on one part of the protocol ([`Scenario`]). In mode async a process may lose
//! its last acknowledgements, and the ledger requires everything else.
//!
//! Invariant: a seed determines everything; two runs of it, in any two processes, leave the same trace.
#![forbid(unsafe_code)]

mod checks;
mod cluster;
mod draw;
mod faults;
mod workload;
mod world;

pub use engram_store::Durability;
pub use faults::scenario::Scenario;
#[cfg(feature = "defects")]
pub use faults::targets::{first_seed, is_in_model, target, undetectable_reason};
pub use faults::{Counters, Fault};

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Options shared by all runs of a campaign.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Durability mode.
    pub durability: Durability,
    /// Scenario; `None` = drawn from the seed.
    pub scenario: Option<Scenario>,
    /// Adds a writer of items with payloads, in modes that lose nothing. Other runs of a seed are not changed by it.
    pub has_items: bool,
    /// Prints every step.
    pub prints: bool,
    /// A bug injected into every process; one at a time per simulating process.
    #[cfg(feature = "defects")]
    pub injected_bug: Option<engram_cluster::injected::Bug>,
}

impl Options {
    /// Returns the options of a mode, without an injected bug.
    pub const fn new(durability: Durability) -> Self {
        Self {
            durability,
            scenario: None,
            has_items: false,
            prints: false,
            #[cfg(feature = "defects")]
            injected_bug: None,
        }
    }
}

/// Outcome of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Equal for two runs of a seed.
    pub trace_hash: u64,
    /// Events handled.
    pub steps: u64,
    /// Simulated microseconds.
    pub simulated_us: u64,
    /// Acknowledged operations.
    pub acked: u64,
    /// Operations whose outcome is unknown to their client.
    pub unknown: u64,
    /// Operations that were closed before they were executed.
    pub never: u64,
    /// Operations that were acknowledged in mode async and legitimately lost.
    pub lost: u64,
    /// Promotions written to the map.
    pub promotions: u64,
    /// Promotions that replaced a primary considered dead.
    pub failovers: u64,
    /// Failovers of a running process: it was paused, cut off, or falsely suspected.
    pub unnecessary: u64,
    /// Moments at which a node could have served a linearizable read.
    pub reads: u64,
    /// Operations, reads included, whose histories were checked for linearizability.
    pub searched: u64,
    /// Installed snapshots.
    pub snapshots: u64,
    /// The last intact replica of a partition was damaged: only a forced promotion helps.
    pub unrecoverable: bool,
    /// Faults by kind.
    pub faults: Counters,
    /// What did not hold; `None` = everything held.
    pub failure: Option<String>,
}

/// Runs a seed. A panic of the code under test is a failure like any other.
pub fn run(seed: u64, options: &Options) -> Outcome {
    #[cfg(feature = "defects")]
    engram_cluster::injected::inject(options.injected_bug);
    let mut world = world::World::new(seed, options);
    let ended = catch_unwind(AssertUnwindSafe(|| world.run()));
    let mut outcome = world.outcome();
    if let Err(panic) = ended {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        outcome.failure = Some(format!("panic: {}", text.unwrap_or_else(|| "without a message".to_owned())));
    }
    outcome
}
