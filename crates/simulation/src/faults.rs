//! Kinds of faults, and how often each happened.

use crate::weather::ASYNC;
use engram_store::Durability;
use std::fmt;

macro_rules! faults {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// What can go wrong in a simulated cluster.
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
    /// A process ends at once; what it wrote is in the page cache.
    Kill = "kill",
    /// A process ends in the middle of its disk writes.
    KillMidway = "kill_midway",
    /// A machine loses power: what no sync covered survives in part.
    PowerLoss = "power_loss",
    /// A process ends in order.
    OrderlyStop = "orderly_stop",
    /// A process ends in order, then its machine loses power.
    OrderlyPowerOff = "orderly_power_off",
    /// A process is drained, and ends in order.
    PlannedStop = "planned_stop",
    /// A process comes back under its name with an empty disk.
    EmptyDisk = "empty_disk",
    /// No space is left on a disk for a while.
    DiskFull = "disk_full",
    /// Writes of a disk fail from some moment on.
    WriteError = "write_error",
    /// A sync fails, and forgets what it should have covered.
    SyncFailure = "sync_failure",
    /// Bits of stored files flip.
    BitFlip = "bit_flip",
    /// A process does nothing for a while.
    Pause = "pause",
    /// The wall clock of a machine steps.
    ClockStep = "clock_step",
    /// Both directions between two machines, or one and the map, are cut.
    Partition = "partition",
    /// One direction is.
    OneWayPartition = "one_way_partition",
    /// A stream between two processes breaks, and is opened again.
    LinkBreak = "link_break",
    /// A message is lost.
    Loss = "loss",
    /// A message arrives twice.
    Duplicate = "duplicate",
    /// A message is overtaken by later ones.
    Reorder = "reorder",
    /// A living process is taken for dead by another.
    FalseSuspicion = "false_suspicion",
    /// A partition gets another primary although the old one is well.
    FalsePromotion = "false_promotion",
    /// A promotion names a process that lost what it had acknowledged.
    BlindPromotion = "blind_promotion",
    /// A primary is asked to hand over.
    HandOver = "hand_over",
    /// The driver of a learning run ends; another one goes on.
    DriverDeath = "driver_death",
    /// The coordinator ends; another one starts and knows the map alone.
    CoordinatorRestart = "coordinator_restart",
    /// The coordinator does nothing for a while.
    CoordinatorPause = "coordinator_pause",
    /// A node is to be emptied, and after a while no longer.
    Drain = "drain",
    /// A copy more than wanted is asked for.
    ExtraLearner = "extra_learner",
    /// A proposal was made on an entry that is no longer there.
    MapConflict = "map_conflict",
    /// A proposal arrives late, perhaps after its proposer died.
    MapLate = "map_late",
    /// A proposal is lost.
    MapLost = "map_lost",
    /// A proposal arrives twice.
    MapDuplicate = "map_duplicate",
    /// A new map reaches a process late, after newer ones.
    MapStale = "map_stale",
    /// A client sends a request again although it was answered.
    RequestAgain = "request_again",
    /// A request is lost, or its answer.
    RequestLost = "request_lost",
    /// A client asks somebody who does not serve the partition.
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

    /// How often a kind happened.
    pub const fn get(&self, fault: Fault) -> u64 {
        self.0[fault as usize]
    }

    /// Adds those of another run.
    pub fn merge(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(count, more)| *count += more);
    }

    /// The kinds that can happen in a mode and never did.
    pub fn missing(&self, durability: Durability) -> Vec<&'static str> {
        // A disk that is synced at every write loses nothing that a promotion could be blind to.
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
