//! A cluster of real workers, a real coordinator and real clients in one thread, over a simulated network, everything from a seed.
//!
//! ```text
//! clients, a learning driver ──gRPC──> workers ──links, beats──> workers      hosts of turmoil: one thread, one clock,
//!                                        │ beats, proposals                   messages late, held, cut off, one way too
//!                                        v
//!                                    coordinator ──> map store in memory
//! ```
//!
//! Decides what happens next and what must hold; everything else is the code under test: tonic and HTTP/2, heartbeats, links,
//! detectors, leases, forwarding, sessions, retries, epochs, and below them the store with its log and recovery on a
//! `SimDisk`. A run has two parts: faults, then calm, in which every client gets answers and every partition its copies
//! again. Checked: no acknowledged delta is lost or doubled, none that was refused shows; a read shows what was acknowledged
//! before; a learning run whose drivers die ends with the digest of one that nothing disturbed.
//!
//! Not simulated: threads (the engine's, the log's, that of the beats), the administration port and the HTTP page, the map written by
//! workers while no coordinator answers, the supervisor's word of a death, TLS. Network: TCP breaks, stalls and loses a direction, but
//! never reorders; single messages, clocks of different speed and torn disks are the other simulator's.
//!
//! Invariant: a seed decides everything in a process that runs nothing before it.

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

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing passes between two hosts.
    Cut,
    /// Nothing passes in one direction.
    OneWay,
    /// What is sent between two hosts waits.
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

/// How often each kind of fault happened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters([u64; Fault::ALL.len()]);

impl Counters {
    /// Of one kind.
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

/// What became of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Equal for two runs of a seed, each in a process of its own.
    pub trace_hash: u64,
    /// What the trace is made of.
    pub steps: u64,
    /// Simulated milliseconds.
    pub simulated_ms: u64,
    /// Writes that were acknowledged as a whole.
    pub acked: u64,
    /// Requests whose fate a client did not learn with its answer.
    pub unknown: u64,
    /// Those whose fate it was told later.
    pub resolved: u64,
    /// Reads that were compared with the ledger.
    pub reads: u64,
    /// Answers to epochs, repeats included.
    pub epochs: u64,
    /// Drivers that died in the middle of an epoch.
    pub drivers_died: u64,
    /// Writes of the map.
    pub map_versions: u64,
    /// Faults by kind.
    pub faults: Counters,
    /// What did not hold; `None` = everything did.
    pub failure: Option<String>,
}

/// Runs a seed. To be called once in a process, before anything else: what ran before shows in the order of hash tables.
pub fn run(seed: u64, prints: bool) -> Outcome {
    entropy::seed(seed);
    let trace = Trace::new(prints);
    let ended = catch_unwind(AssertUnwindSafe(|| world::run(seed, &trace)));
    ended.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        let failure = Some(format!("panic: {}", text.unwrap_or_else(|| "without words".to_owned())));
        Outcome { trace_hash: trace.hash(), steps: trace.steps(), failure, ..Outcome::default() }
    })
}
