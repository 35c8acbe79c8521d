//! What can go wrong, for programs that branch on it.

use crate::write::Written;
use engram_memory::{PartitionId, SessionId};
use engram_proto::v1::{Problem, ProblemKind};
use std::time::Duration;

/// Why a call failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The cluster said no, and a retry would not change that. [`Error::kind`] says why.
    #[error("{}", .0.message)]
    Refused(Box<Problem>),
    /// The deadline passed while a write was on its way: it may have been applied or not. `Session::fate` finds out.
    #[error("no answer in time: whether request {seq} of partition {partition} was applied is unknown; {last}")]
    Unknown {
        /// The session it was sent under.
        session: SessionId,
        /// Its partition.
        partition: PartitionId,
        /// Its number in the session.
        seq: u64,
        /// What the last attempt met.
        last: String,
    },
    /// The deadline passed, and nothing was changed.
    #[error("not done within {}: {}", seconds(.after), .last.message)]
    Deadline {
        /// The deadline.
        after: Duration,
        /// What the last attempt met.
        last: Box<Problem>,
    },
    /// Some parts of a batch were applied and others were not.
    #[error("{} of {} parts failed, the first: {}", .failures.len(), .failures.len() + .written.versions.len(), first(.failures))]
    Partial {
        /// What was applied.
        written: Box<Written>,
        /// What was not, or is not known.
        failures: Vec<PartFailure>,
    },
    /// No worker answered.
    #[error("no worker answers at {endpoints}: {last}")]
    Connect {
        /// Where it was tried.
        endpoints: String,
        /// What the last attempt met.
        last: String,
    },
    /// A worker broke the protocol: another version, or a fault of the program.
    #[error("unexpected answer: {0}")]
    Protocol(String),
}

/// One part of a batch that was not applied, or may not have been.
#[derive(Debug, Clone)]
pub struct PartFailure {
    /// Its partition.
    pub partition: PartitionId,
    /// Why.
    pub error: Error,
}

impl Error {
    /// Why the cluster refused, where it did; [`ProblemKind::Unspecified`] otherwise.
    pub fn kind(&self) -> ProblemKind {
        match self {
            Self::Refused(problem) | Self::Deadline { last: problem, .. } => problem.kind(),
            Self::Partial { failures, .. } => failures.first().map_or(ProblemKind::Unspecified, |it| it.error.kind()),
            Self::Connect { .. } => ProblemKind::Unavailable,
            Self::Unknown { .. } | Self::Protocol(_) => ProblemKind::Unspecified,
        }
    }

    /// The problem that the cluster gave, where there is one.
    pub fn problem(&self) -> Option<&Problem> {
        match self {
            Self::Refused(problem) | Self::Deadline { last: problem, .. } => Some(problem),
            Self::Partial { failures, .. } => failures.first().and_then(|failure| failure.error.problem()),
            _ => None,
        }
    }

    pub(crate) fn refused(problem: Problem) -> Self {
        Self::Refused(Box::new(problem))
    }

    pub(crate) fn invalid(invalid: engram_proto::columns::Invalid) -> Self {
        Self::refused(invalid.into())
    }
}

impl From<engram_proto::answers::Malformed> for Error {
    fn from(malformed: engram_proto::answers::Malformed) -> Self {
        Self::Protocol(malformed.to_string())
    }
}

fn seconds(duration: &Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}

fn first(failures: &[PartFailure]) -> String {
    failures.first().map_or_else(String::new, |failure| format!("partition {}: {}", failure.partition, failure.error))
}
