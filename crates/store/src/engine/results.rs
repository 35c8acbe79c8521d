//! Results of writes and activations.

use crate::Error;
use engram_memory::{Lsn, PartitionId, Refusal, Reply, Term};

/// Result of an applied record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommittedWrite {
    /// Partition.
    pub partition: PartitionId,
    /// Term of the record; for a repeat, the term in which it was answered.
    pub term: Term,
    /// LSN of the record; for a repeat, the last applied one.
    pub lsn: Lsn,
    /// Replicas that hold the record.
    pub replicas: u32,
    /// Whether the record survives a power loss.
    pub durable: bool,
    /// Reply of the partition.
    pub reply: Reply,
}

/// Why a record was not applied.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// This worker does not serve the partition.
    #[error("partition {partition} is not served by this worker")]
    NotPrimary {
        /// Partition.
        partition: PartitionId,
        /// Highest term promised here, if any.
        term: Option<Term>,
    },
    /// The partition's data is corrupt and there is no other replica.
    #[error("data of partition {partition} is corrupt ({what}); restore it from a snapshot")]
    Corrupt {
        /// Partition.
        partition: PartitionId,
        /// Description of the damage.
        what: String,
    },
    /// The record is malformed; nothing was logged.
    #[error("record for partition {partition} rejected: {refusal}")]
    Invalid {
        /// Partition.
        partition: PartitionId,
        /// Field and allowed values.
        refusal: Refusal,
    },
    /// The partition is full and its capacity policy is `Refuse`; nothing was logged.
    #[error("partition {partition} holds {memories} of at most {limit} memories; {wanted} more do not fit")]
    Capacity {
        /// Partition.
        partition: PartitionId,
        /// Most memories.
        limit: u64,
        /// Memories, including those of records in flight.
        memories: u64,
        /// Memories that the record would create.
        wanted: u64,
    },
    /// Fewer replicas are in sync than the cluster's policy requires; retry later.
    #[error("partition {partition} has {in_sync} replicas in sync, fewer than writes require")]
    NotEnoughReplicas {
        /// Partition.
        partition: PartitionId,
        /// Replicas in sync.
        in_sync: u32,
    },
    /// The primary changed while the record, which has no request ID, was in flight: it may be applied there.
    #[error("primary of partition {partition} changed; whether the record was applied is unknown")]
    Unknown {
        /// Partition.
        partition: PartitionId,
    },
    /// The log write failed; after a crash before the next write the record may or may not be found.
    #[error("failed to write the log: {reason}")]
    Failed {
        /// Cause.
        reason: String,
    },
    /// The log write failed because the disk is full.
    #[error("failed to write the log: {reason}")]
    DiskFull {
        /// Cause.
        reason: String,
    },
}

impl WriteError {
    /// Error for waiting callers when the log or the device fails.
    pub(crate) fn of_failure(error: &Error) -> Self {
        let reason = error.to_string();
        match error {
            Error::DiskFull { .. } => Self::DiskFull { reason },
            _ => Self::Failed { reason },
        }
    }

    /// Cause of the failure, without its consequence for the write.
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
    /// The cluster does not have this partition.
    #[error("partition {partition} does not exist: the cluster has {partitions}")]
    Unknown {
        /// Partition.
        partition: PartitionId,
        /// Number of partitions.
        partitions: u32,
    },
    /// The term is at or below the highest promised one: another process may have served it.
    #[error("partition {partition} has promised term {promised}; term {requested} must be higher")]
    TermPromised {
        /// Partition.
        partition: PartitionId,
        /// Highest promised term.
        promised: Term,
        /// Requested term.
        requested: Term,
    },
    /// The partition's data is corrupt and there is no other replica.
    #[error("data of partition {partition} is corrupt ({what}); restore it from a snapshot")]
    Corrupt {
        /// Partition.
        partition: PartitionId,
        /// Description of the damage.
        what: String,
    },
    /// The promise could not be made durable.
    #[error("failed to log the promise: {reason}")]
    Failed {
        /// Cause.
        reason: String,
    },
}
