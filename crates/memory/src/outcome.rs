//! Replies of a partition.

use crate::hash::Digest;
use crate::ids::{LearningEpoch, MemoryId};
use crate::quality::QualityVector;

/// Most rejected ids listed in an outcome; the rest is counted.
pub const MAX_REJECTIONS: usize = 64;

/// Reply to a record: stored with the session, so it is bounded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// Executed.
    Applied(Outcome),
    /// Not executed, with the reason. The state is unchanged.
    Refused(Refusal),
}

impl Reply {
    /// Converts the reply into the outcome, or the refusal as an error.
    ///
    /// # Errors
    /// The refusal.
    pub fn into_result(self) -> Result<Outcome, Refusal> {
        match self {
            Self::Applied(outcome) => Ok(outcome),
            Self::Refused(refusal) => Err(refusal),
        }
    }
}

/// Approximate bytes of a kept reply without its columns, tables around it included.
const KEPT_BASE_BYTES: u64 = 160;

impl Reply {
    /// Returns approximately how many bytes it takes to keep it. Depends on the reply only, so that bounds are the same everywhere.
    pub(crate) fn kept_bytes(&self) -> u64 {
        match self {
            Self::Applied(outcome) => {
                let groups = outcome.quality.as_ref().map_or(0, |quality| quality.groups().len());
                KEPT_BASE_BYTES + 16 * outcome.rejections.len() as u64 + 40 * groups as u64
            }
            Self::Refused(_) => KEPT_BASE_BYTES,
        }
    }
}

/// Effects of an executed record.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Rows or updates applied; for a group update, memories addressed.
    pub applied: u64,
    /// Memories created.
    pub created: u64,
    /// Memories evicted or removed.
    pub evicted: u64,
    /// Rows or updates rejected; at most [`MAX_REJECTIONS`] of them are listed.
    pub rejected: u64,
    /// The first rejected ids, in record order.
    pub rejections: Vec<Rejection>,
    /// Quality after the record, if it closes a learning epoch.
    pub quality: Option<QualityVector>,
    /// Replica digest, if the record is a marker.
    pub digest: Option<Digest>,
    /// Handle of the first item, if the record appended items: see [`crate::buffer::handles`].
    pub first: Option<MemoryId>,
}

impl Outcome {
    /// Counts a rejected row, and lists it up to the limit.
    pub fn reject(&mut self, id: MemoryId, reason: RejectionReason) {
        self.rejected += 1;
        if self.rejections.len() < MAX_REJECTIONS {
            self.rejections.push(Rejection { id, reason });
        }
    }

    /// Merges the outcome of another partition; quality vectors are merged, digests added. Handles are per partition and not merged.
    pub fn merge(&mut self, other: &Self) {
        self.applied += other.applied;
        self.created += other.created;
        self.evicted += other.evicted;
        self.rejected += other.rejected;
        let capacity = MAX_REJECTIONS.saturating_sub(self.rejections.len());
        self.rejections.extend(other.rejections.iter().take(capacity).copied());
        if let Some(quality) = &other.quality {
            self.quality.get_or_insert_default().merge(quality);
        }
        if let Some(digest) = other.digest {
            self.digest.get_or_insert_default().merge(digest);
        }
    }
}

/// One rejected row or update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rejection {
    /// Its id.
    pub id: MemoryId,
    /// Why.
    pub reason: RejectionReason,
}

/// Why a row or an update was rejected while the rest of its record was applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RejectionReason {
    /// No memory has this id.
    Unknown,
    /// Another key has this id, or the id was inserted without one.
    KeyCollision,
    /// The key does not hash to the id.
    KeyMismatch,
}

impl RejectionReason {
    /// Returns its number in files and on the wire.
    pub const fn code(self) -> u8 {
        match self {
            Self::Unknown => 1,
            Self::KeyCollision => 2,
            Self::KeyMismatch => 3,
        }
    }

    /// Returns the reason of `code`.
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Unknown),
            2 => Some(Self::KeyCollision),
            3 => Some(Self::KeyMismatch),
            _ => None,
        }
    }
}

/// Why a record was not executed. The state is unchanged by it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The session expired or was opened before the partition's watermark.
    #[error("the session has expired: open a new one; whether an unanswered request was applied is unknown")]
    SessionExpired,
    /// The request was closed or is older than the window.
    #[error("the request is closed: it is not executed, now or later")]
    AlreadyClosed,
    /// The request is ahead of the window; when closing, also older than the window.
    #[error("the sequence number is more than {window} away from the highest seen")]
    OutOfWindow {
        /// Width of the window.
        window: u64,
    },
    /// A learning epoch or a part of it is missing before this one.
    #[error("learning epoch {found}.{found_part} does not follow: expected {expected}.{expected_part}")]
    EpochGap {
        /// Epoch that would be accepted.
        expected: LearningEpoch,
        /// Part that would be accepted; 0 = the beginning.
        expected_part: u32,
        /// Received epoch.
        found: LearningEpoch,
        /// Received part.
        found_part: u32,
    },
    /// The epoch was applied, and its result is no longer kept.
    #[error("learning epoch {n} was applied, and its result is no longer kept")]
    EpochForgotten {
        /// The epoch.
        n: LearningEpoch,
    },
    /// Another driver wrote the run's record in between.
    #[error("run record has version {found}, expected {expected}")]
    RunConflict {
        /// Expected version.
        expected: u64,
        /// Actual version.
        found: u64,
    },
    /// The run has no record here.
    #[error("no such run")]
    RunUnknown,
    /// The run's history is full.
    #[error("the history of the run is full ({bytes} bytes)")]
    RunFull {
        /// The limit.
        bytes: u64,
    },
    /// The buffer does not exist, or has another definition than the one that the command was prepared for.
    #[error("no such buffer")]
    BufferUnknown,
    /// The buffer exists with another definition.
    #[error("the buffer exists with another definition")]
    BufferConflict,
    /// The buffer is full and removes nothing.
    #[error("buffer is full: {items} items of {capacity} in this partition, and {needed} more do not fit")]
    BufferFull {
        /// Items in the partition.
        items: u64,
        /// Capacity of the partition.
        capacity: u64,
        /// Items to append.
        needed: u64,
    },
    /// A number of buffers or consumers.
    #[error("too many {what}: allowed are {most}")]
    BufferLimit {
        /// What is limited.
        what: &'static str,
        /// The limit.
        most: u64,
    },
    /// A command with invalid content. Never logged, so the text is not part of any format.
    #[error("malformed command: {what}")]
    Malformed {
        /// Field and allowed values.
        what: &'static str,
    },
}
