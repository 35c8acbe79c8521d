//! Kinds of faults, and counters.

pub(crate) mod inject;
pub(crate) mod plan;
pub(crate) mod scenario;
#[cfg(feature = "defects")]
pub(crate) mod targets;

use engram_store::Durability;
use plan::ASYNC;
use std::fmt;

macro_rules! faults {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// Fault of a simulated cluster.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Fault {
            $($(#[$doc])* $name,)*
        }

        impl Fault {
            /// All kinds, by name.
            pub const ALL: &[(Self, &'static str)] = &[$((Self::$name, $text),)*];
        }
    };
}

faults! {
    /// A process ends at once; its writes are in the page cache.
    Kill = "kill",
    /// A process ends in the middle of its disk writes.
    KillMidway = "kill_midway",
    /// A machine loses power: what was not synced survives in part.
    PowerLoss = "power_loss",
    /// A process stops in order.
    OrderlyStop = "orderly_stop",
    /// A process stops in order, then its machine loses power.
    OrderlyPowerOff = "orderly_power_off",
    /// A process is drained, and stops in order.
    PlannedStop = "planned_stop",
    /// A process comes back with an empty disk.
    EmptyDisk = "empty_disk",
    /// A disk is full for a while.
    DiskFull = "disk_full",
    /// Writes of a disk fail from some moment on.
    WriteError = "write_error",
    /// A sync fails, and forgets what it should have covered.
    SyncFailure = "sync_failure",
    /// Bits of stored files flip.
    BitFlip = "bit_flip",
    /// A process is paused.
    Pause = "pause",
    /// The wall clock of a machine steps.
    ClockStep = "clock_step",
    /// Both directions between two machines, or between one and the map, are cut.
    Partition = "partition",
    /// One direction is cut.
    OneWayPartition = "one_way_partition",
    /// A stream between two processes breaks, and is opened again.
    LinkBreak = "link_break",
    /// A message is lost.
    Loss = "loss",
    /// A message arrives twice.
    Duplicate = "duplicate",
    /// A message is overtaken by later ones.
    Reorder = "reorder",
    /// A living process is suspected by another.
    FalseSuspicion = "false_suspicion",
    /// A partition gets another primary although the old one is healthy.
    FalsePromotion = "false_promotion",
    /// A promotion names a process that lost acknowledged records.
    BlindPromotion = "blind_promotion",
    /// A primary is ordered to transfer its leadership.
    LeadershipTransfer = "leadership_transfer",
    /// The driver of a learning run ends; another one continues.
    DriverDeath = "driver_death",
    /// The coordinator ends; another one starts with only the map.
    CoordinatorRestart = "coordinator_restart",
    /// The coordinator is paused.
    CoordinatorPause = "coordinator_pause",
    /// A node is drained, and after a while no longer.
    Drain = "drain",
    /// A surplus replica is requested.
    ExtraLearner = "extra_learner",
    /// A proposal was based on an entry that is no longer current.
    MapConflict = "map_conflict",
    /// A proposal arrives late, perhaps after its proposer died.
    MapLate = "map_late",
    /// A proposal is lost.
    MapLost = "map_lost",
    /// A proposal arrives twice.
    MapDuplicate = "map_duplicate",
    /// A new map reaches a process late, after newer ones.
    MapStale = "map_stale",
    /// A client repeats a request although it was answered.
    RequestAgain = "request_again",
    /// A request or its answer is lost.
    RequestLost = "request_lost",
    /// A client sends a request to a node that is not the primary.
    RequestAstray = "request_astray",
}

/// How often each kind of fault happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counters([u64; Fault::ALL.len()]);

impl Default for Counters {
    fn default() -> Self {
        Self([0; Fault::ALL.len()])
    }
}

impl Counters {
    /// Counts one.
    pub const fn count(&mut self, fault: Fault) {
        self.0[fault as usize] += 1;
    }

    /// Returns how often a kind happened.
    pub const fn get(&self, fault: Fault) -> u64 {
        self.0[fault as usize]
    }

    /// Adds the counters of another run.
    pub fn merge(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(count, more)| *count += more);
    }

    /// Returns the kinds that can happen in a mode and never did.
    pub fn missing(&self, durability: Durability) -> Vec<&'static str> {
        // With a sync per write no promotion can be blind to losses.
        let can = |fault| match durability {
            Durability::Sync => fault != Fault::BlindPromotion,
            Durability::Replicated => true,
            Durability::Async => ASYNC.contains(&fault),
        };
        let missing = Fault::ALL.iter().filter(|(fault, _)| self.get(*fault) == 0 && can(*fault));
        missing.map(|(_, name)| *name).collect()
    }
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for (fault, name) in Fault::ALL {
            write!(f, "{separator}{name} {}", self.get(*fault))?;
            separator = ", ";
        }
        Ok(())
    }
}
