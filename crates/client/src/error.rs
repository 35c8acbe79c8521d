//! Errors of the client.

use crate::write::WriteResult;
use engram_memory::{PartitionId, SessionId};
use engram_proto::v1::{Problem, ProblemKind};
use std::time::Duration;

/// Why a call failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The cluster rejected the request, and a retry would not change that. [`Error::kind`] gives the reason.
    #[error("{}", .0.message)]
    Rejected(Box<Problem>),
    /// The deadline passed while a write was in flight: it may have been applied or not. `Session::write_outcome` finds
    /// out.
    #[error("deadline exceeded: outcome of request {seq} of partition {partition} is unknown; {last}")]
    OutcomeUnknown {
        /// Session of the request.
        session: SessionId,
        /// Partition of the request.
        partition: PartitionId,
        /// Sequence number in the session.
        seq: u64,
        /// Failure of the last attempt.
        last: String,
    },
    /// The deadline passed, and nothing was changed.
    #[error("deadline of {} exceeded: {}", seconds(.after), .last.message)]
    Deadline {
        /// The deadline.
        after: Duration,
        /// Failure of the last attempt.
        last: Box<Problem>,
    },
    /// Some parts of a batch were applied and others were not.
    #[error("{} of {} parts failed, the first: {}", .failures.len(), .failures.len() + .written.versions.len(), first(.failures))]
    Partial {
        /// The applied parts.
        written: Box<WriteResult>,
        /// The parts that were not applied, or may not have been.
        failures: Vec<PartFailure>,
    },
    /// No worker responded.
    #[error("no worker responds at {endpoints}: {last}")]
    Connect {
        /// The endpoints tried.
        endpoints: String,
        /// Failure of the last attempt.
        last: String,
    },
    /// A worker violated the protocol: another version, or a bug.
    #[error("unexpected response: {0}")]
    Protocol(String),
}

/// A part of a batch that was not applied, or may not have been.
#[derive(Debug, Clone)]
pub struct PartFailure {
    /// Its partition.
    pub partition: PartitionId,
    /// Its error.
    pub error: Error,
}

impl Error {
    /// Returns the reason given by the cluster, if any; [`ProblemKind::Unspecified`] otherwise.
    pub fn kind(&self) -> ProblemKind {
        match self {
            Self::Rejected(problem) | Self::Deadline { last: problem, .. } => problem.kind(),
            Self::Partial { failures, .. } => {
                failures.first().map_or(ProblemKind::Unspecified, |failure| failure.error.kind())
            }
            Self::Connect { .. } => ProblemKind::Unavailable,
            Self::OutcomeUnknown { .. } | Self::Protocol(_) => ProblemKind::Unspecified,
        }
    }

    /// Returns the problem returned by the cluster, if any.
    pub fn problem(&self) -> Option<&Problem> {
        match self {
            Self::Rejected(problem) | Self::Deadline { last: problem, .. } => Some(problem),
            Self::Partial { failures, .. } => failures.first().and_then(|failure| failure.error.problem()),
            _ => None,
        }
    }

    pub(crate) fn rejected(problem: Problem) -> Self {
        Self::Rejected(Box::new(problem))
    }

    pub(crate) fn invalid(invalid: engram_proto::columns::Invalid) -> Self {
        Self::rejected(invalid.into())
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
