//! What a caller is told of its records and activations.

use crate::Error;
use engram_memory::{Lsn, PartitionId, Refusal, Reply, Term};

/// What a record that was applied is answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// Partition.
    pub partition: PartitionId,
    /// Term of the record; of a repeat, the term in which it was answered.
    pub term: Term,
    /// Its lsn; of a repeat, the last applied one.
    pub lsn: Lsn,
    /// Copies that hold it.
    pub replicas: u32,
    /// Whether a loss of power leaves it.
    pub durable: bool,
    /// What the partition answered.
    pub reply: Reply,
}

/// Why a record has no answer of its partition.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// This worker does not serve the partition.
    #[error("partition {partition} is not served here")]
    NotPrimary {
        /// Partition.
        partition: PartitionId,
        /// Highest term promised here; `None` without one.
        term: Option<Term>,
    },
    /// The data of the partition is damaged, and there is no other copy.
    #[error("the data of partition {partition} is corrupt ({what}); restore it from a snapshot")]
    Corrupt {
        /// Partition.
        partition: PartitionId,
        /// What was found.
        what: String,
    },
    /// The record would be malformed in the log; nothing was logged.
    #[error("record for partition {partition} refused: {refusal}")]
    Invalid {
        /// Partition.
        partition: PartitionId,
        /// Which field, and what is allowed.
        refusal: Refusal,
    },
    /// The partition is full and its policy is to refuse; nothing was logged.
    #[error("partition {partition} holds {memories} of at most {limit} memories, {wanted} more do not fit")]
    Capacity {
        /// Partition.
        partition: PartitionId,
        /// Most memories.
        limit: u64,
        /// Memories there, those of records under way included.
        memories: u64,
        /// Memories that the record would create.
        wanted: u64,
    },
    /// Too few copies are in sync for the cluster's policy; try again when they are.
    #[error("partition {partition} has {in_sync} copies in sync, fewer than writes need")]
    TooFewCopies {
        /// Partition.
        partition: PartitionId,
        /// Copies in sync.
        in_sync: u32,
    },
    /// The partition went to another worker while the record, which names no request, was under way: it may be applied there.
    #[error("partition {partition} went to another worker; whether the record is applied there is unknown")]
    Unknown {
        /// Partition.
        partition: PartitionId,
    },
    /// The log could not be written; whether the record is found after a crash before the next write is unknown.
    #[error("the log cannot be written: {reason}")]
    Failed {
        /// Why.
        reason: String,
    },
    /// The same, since the disk is full.
    #[error("the log cannot be written: {reason}")]
    DiskFull {
        /// What could not be written.
        reason: String,
    },
}

impl WriteError {
    /// The answer to whoever waits while the log, or the device, fails so.
    pub(crate) fn of_failure(error: &Error) -> Self {
        let reason = error.to_string();
        match error {
            Error::DiskFull { .. } => Self::DiskFull { reason },
            _ => Self::Failed { reason },
        }
    }

    /// What failed, without what that means for a write.
    pub(crate) fn reason(&self) -> String {
        match self {
            Self::DiskFull { reason } | Self::Failed { reason } => reason.clone(),
            other => other.to_string(),
        }
    }
}

/// Why a partition was not activated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ActivateError {
    /// The cluster has no such partition.
    #[error("partition {partition} is not one of the {partitions} of this cluster")]
    Unknown {
        /// Partition.
        partition: PartitionId,
        /// How many there are.
        partitions: u32,
    },
    /// A term at or below the highest promised one: another process, perhaps this one's predecessor, may have served it.
    #[error("partition {partition} has promised term {promised}; term {asked} is not above it")]
    Promised {
        /// Partition.
        partition: PartitionId,
        /// Highest promised term.
        promised: Term,
        /// The term asked for.
        asked: Term,
    },
    /// The data of the partition is damaged, and there is no other copy.
    #[error("the data of partition {partition} is corrupt ({what}); restore it from a snapshot")]
    Corrupt {
        /// Partition.
        partition: PartitionId,
        /// What was found.
        what: String,
    },
    /// The promise could not be made durable.
    #[error("the promise cannot be logged: {reason}")]
    Failed {
        /// Why.
        reason: String,
    },
}
