//! Newtypes for everything that could be confused with its neighbour.

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

            /// Reads up to 32 hex digits, the form that `Display` prints.
            fn from_str(text: &str) -> Result<Self, Self::Err> {
                u128::from_str_radix(text, 16).map(Self)
            }
        }
    };
}

number!(
    /// Number of a memory. Given by the client, or derived from its key by [`crate::key_id`].
    MemoryId(u64)
);
number!(
    /// A cohort or tag of memories: quality is kept per group.
    Group(u8)
);
number!(
    /// One of the P virtual partitions, 0 to P - 1.
    PartitionId(u32)
);
number!(
    /// Number of a partition's configuration, raised at every change. Never called epoch.
    Term(u64)
);
number!(
    /// Place of a record in its partition's log: dense, the first record has lsn 1, 0 is "before all".
    Lsn(u64)
);
number!(
    /// Number of a turn of decay, reinforcement, aggregation and broadcast within a run. The first is 1.
    LearningEpoch(u64)
);
number!(
    /// A worker's place in its cluster, 0 to workers - 1.
    Ordinal(u32)
);
number!(
    /// Rises at every start of a worker process on its disk.
    Incarnation(u64)
);
identity!(
    /// Drawn once when a cluster is created; heads every file and every peer stream.
    ClusterId
);
identity!(
    /// Drawn once when a disk is first used: an empty disk under an old name is another store.
    StoreId
);
identity!(
    /// A learning run.
    RunId
);

/// A place in the cluster, the disk in it, and the process that runs on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Member {
    /// Place in the cluster.
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

/// As it is written: `3/5b1c00009f3ac2d17be84450a1b2c3d4/7`.
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
