//! Real workers, a real coordinator and real clients in one thread, over a simulated network, everything determined by
//! a seed.
//!
//! ```text
//! clients, a learning driver ──gRPC──> workers ──links, heartbeats──> workers  hosts of turmoil: one thread, one clock,
//!                                        │ heartbeats, proposals                   messages late, held, cut off, one way too
//!                                        v
//!                                    coordinator ──> map store in memory
//! ```
//!
//! Decides what happens next and what must hold; everything else is the code under test: tonic and HTTP/2, heartbeats,
//! links, detectors, leases, forwarding, sessions, retries, epochs, and the store with its log and recovery on a
//! `SimDisk`. A run has two phases: faults, then calm, in which every client gets responses and every partition all its
//! replicas. Checked: no acknowledged delta is lost or applied twice, and no rejected one is applied; a read shows what
//! was acknowledged before; a learning run whose drivers die ends with the digest of one without faults.
//!
//! Not simulated: threads (of engine, log and heartbeats), the admin port and the HTTP page, map writes by workers
//! while no coordinator answers, death reports of supervisors, TLS. Network: TCP connections break, stall and lose a
//! direction, but never reorder; single messages, clock drift and torn disks belong to the other simulator.
//!
//! Invariant: a seed determines everything in a process that runs nothing before it.

mod draw;
mod entropy;
mod learning;
mod ledger;
mod node;
mod trace;
mod wire;
mod world;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use trace::Trace;

/// Kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing passes between two hosts.
    Cut,
    /// Nothing passes in one direction.
    OneWay,
    /// Messages between two hosts wait.
    Held,
    /// The process of a worker is killed.
    Killed,
    /// The machine of a worker loses power, and what it had not synced.
    PowerLost,
    /// A worker gets an empty disk.
    DiskLost,
    /// The coordinator is killed.
    CoordinatorKilled,
}

impl Fault {
    /// All kinds.
    pub const ALL: [Self; 7] =
        [Self::Cut, Self::OneWay, Self::Held, Self::Killed, Self::PowerLost, Self::DiskLost, Self::CoordinatorKilled];
}

/// Number of faults by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters([u64; Fault::ALL.len()]);

impl Counters {
    /// Returns the number of one kind.
    pub const fn of(&self, fault: Fault) -> u64 {
        self.0[fault as usize]
    }

    const fn count(&mut self, fault: Fault) {
        self.0[fault as usize] += 1;
    }
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Fault::ALL.iter().try_for_each(|fault| write!(f, "{fault:?}={} ", self.of(*fault)))
    }
}

/// Outcome of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Equal for two runs of a seed, each in its own process.
    pub trace_hash: u64,
    /// Number of trace entries.
    pub steps: u64,
    /// Simulated milliseconds.
    pub simulated_ms: u64,
    /// Writes that were fully acknowledged.
    pub acked: u64,
    /// Requests with unknown outcome.
    pub unknown: u64,
    /// Those whose outcome was later resolved.
    pub resolved: u64,
    /// Reads compared with the ledger.
    pub reads: u64,
    /// Acknowledged epochs, repeats included.
    pub epochs: u64,
    /// Drivers that died during an epoch.
    pub drivers_died: u64,
    /// Writes of the map.
    pub map_versions: u64,
    /// Faults by kind.
    pub faults: Counters,
    /// The first violation; `None` = everything held.
    pub failure: Option<String>,
}

/// Runs a seed. Call it once per process, before anything else: what ran before affects the order of hash tables.
pub fn run(seed: u64, prints: bool) -> Outcome {
    entropy::seed(seed);
    let trace = Trace::new(prints);
    let ended = catch_unwind(AssertUnwindSafe(|| world::run(seed, &trace)));
    ended.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        let failure = Some(format!("panic: {}", text.unwrap_or_else(|| "without a message".to_owned())));
        Outcome { trace_hash: trace.hash(), steps: trace.steps(), failure, ..Outcome::default() }
    })
}
