//! Newtypes for identifiers and numbers that could be confused.

use std::fmt;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }

        impl From<$inner> for $name {
            fn from(value: $inner) -> Self {
                Self(value)
            }
        }
    };
}

macro_rules! identity {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u128);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:032x}", self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:032x})"), self.0)
            }
        }

        impl std::str::FromStr for $name {
            type Err = std::num::ParseIntError;

            /// Parses up to 32 hex digits, as printed by `Display`.
            fn from_str(text: &str) -> Result<Self, Self::Err> {
                u128::from_str_radix(text, 16).map(Self)
            }
        }
    };
}

number!(
    /// Id of a memory, given by the client or derived from its key by [`crate::key_id`].
    MemoryId(u64)
);
number!(
    /// Group of memories, for which quality is aggregated.
    Group(u8)
);
number!(
    /// One of the P virtual partitions, 0 to P - 1.
    PartitionId(u32)
);
number!(
    /// Number of a partition's configuration, raised at every change.
    Term(u64)
);
number!(
    /// Log sequence number of a record in its partition: dense, starting at 1; 0 is before all records.
    Lsn(u64)
);
number!(
    /// Number of an iteration of decay, reinforcement, aggregation and broadcast within a run, from 1.
    LearningEpoch(u64)
);
number!(
    /// Ordinal of a worker in its cluster, 0 to workers - 1.
    Ordinal(u32)
);
number!(
    /// Number of a worker process on its disk, incremented at every start.
    Incarnation(u64)
);
identity!(
    /// Random id of a cluster, drawn at creation; part of the header of every file and peer stream.
    ClusterId
);
identity!(
    /// Random id of a store, drawn when a disk is first used: a replaced disk is another store.
    StoreId
);
identity!(
    /// Id of a learning run.
    RunId
);

/// A worker process: its ordinal, disk and incarnation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Member {
    /// Ordinal in the cluster.
    pub ordinal: Ordinal,
    /// Disk.
    pub store: StoreId,
    /// Process start on that disk.
    pub incarnation: Incarnation,
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.ordinal, self.store, self.incarnation)
    }
}

/// Parses the printed form, such as `3/5b1c00009f3ac2d17be84450a1b2c3d4/7`.
impl std::str::FromStr for Member {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = text.splitn(3, '/');
        let mut next = || parts.next().unwrap_or_default();
        Ok(Self {
            ordinal: Ordinal(next().parse()?),
            store: next().parse()?,
            incarnation: Incarnation(next().parse()?),
        })
    }
}
