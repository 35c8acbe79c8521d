//! What a partition answers.

use crate::hash::Digest;
use crate::ids::{LearningEpoch, MemoryId};
use crate::quality::QualityVector;

/// Most rejected ids that an outcome names; the rest is counted.
pub const MAX_REJECTIONS: usize = 64;

/// The answer to a record: stored with the session, so it is bounded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// Executed.
    Applied(Outcome),
    /// Not executed, and why. The state is unchanged.
    Refused(Refusal),
}

impl Reply {
    /// The outcome, or the refusal as an error.
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

/// What an executed record did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Rows or updates applied; for a group update, memories addressed.
    pub applied: u64,
    /// Memories created.
    pub created: u64,
    /// Memories evicted or removed.
    pub evicted: u64,
    /// Rows or updates rejected; at most [`MAX_REJECTIONS`] of them are named.
    pub rejected: u64,
    /// The first rejected ids, in order of the record.
    pub rejections: Vec<Rejection>,
    /// Quality after the record, where it closes a learning epoch.
    pub quality: Option<QualityVector>,
    /// Digest, where the record is a marker.
    pub digest: Option<Digest>,
}

impl Outcome {
    /// Counts a rejected row and names it while there is room.
    pub fn reject(&mut self, id: MemoryId, reason: RejectionReason) {
        self.rejected += 1;
        if self.rejections.len() < MAX_REJECTIONS {
            self.rejections.push(Rejection { id, reason });
        }
    }

    /// Adds what another partition did; quality vectors are merged, digests added.
    pub fn merge(&mut self, other: &Self) {
        self.applied += other.applied;
        self.created += other.created;
        self.evicted += other.evicted;
        self.rejected += other.rejected;
        let room = MAX_REJECTIONS.saturating_sub(self.rejections.len());
        self.rejections.extend(other.rejections.iter().take(room).copied());
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
    /// No memory of this id.
    Unknown,
    /// Another key has this id, or the id was inserted without one.
    KeyCollision,
    /// The key does not hash to the id.
    KeyMismatch,
}

impl RejectionReason {
    /// The number that stands for it in files and on the wire.
    pub const fn code(self) -> u8 {
        match self {
            Self::Unknown => 1,
            Self::KeyCollision => 2,
            Self::KeyMismatch => 3,
        }
    }

    /// The reason of `code`.
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
    /// The session expired, or was opened before the partition's watermark.
    #[error("the session has expired: open a new one; whether an unanswered request was applied stays unknown")]
    SessionExpired,
    /// The request was closed, or lies behind the window.
    #[error("the request is closed: it is not executed, now or later")]
    AlreadyClosed,
    /// The request lies ahead of the window; where one is to be closed, also behind it.
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
        /// Epoch that came.
        found: LearningEpoch,
        /// Part that came.
        found_part: u32,
    },
    /// The epoch is done, and so long ago that its result is no longer kept.
    #[error("learning epoch {n} was applied, and its result is no longer kept")]
    EpochForgotten {
        /// The epoch.
        n: LearningEpoch,
    },
    /// Another driver wrote this run's record in between.
    #[error("the run's record has version {found}, not {expected}")]
    RunConflict {
        /// Version that was expected.
        expected: u64,
        /// Version that is there.
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
    /// A command that its types admit and its contents do not. Never logged, so its text is not part of any format.
    #[error("malformed command: {what}")]
    Malformed {
        /// Which field, and what is allowed.
        what: &'static str,
    },
}
