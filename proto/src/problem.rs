//! Problems on the wire: the machine-readable cause of a failed call, next to the status text for people.

use crate::PROBLEM_KEY;
use crate::columns::Invalid;
use crate::v1::{Problem, ProblemKind};
use engram_memory::{PartitionId, Refusal};
use prost::Message;
use tonic::metadata::MetadataValue;
use tonic::{Code, Status};

impl Problem {
    /// Creates a problem of `kind` with a message for people.
    pub fn of(kind: ProblemKind, message: impl Into<String>) -> Self {
        Self { kind: kind as i32, message: message.into(), ..Self::default() }
    }

    /// Sets the partition.
    #[must_use]
    pub fn at(mut self, partition: PartitionId) -> Self {
        self.partition = Some(partition.0);
        self
    }

    /// Sets the time after which a retry makes sense, in milliseconds.
    #[must_use]
    pub fn retry_after(mut self, ms: u64) -> Self {
        self.retry_after_ms = ms;
        self
    }

    /// Returns the gRPC code of the kind.
    pub fn code(&self) -> Code {
        match self.kind() {
            ProblemKind::NotPrimary
            | ProblemKind::EpochGap
            | ProblemKind::EpochForgotten
            | ProblemKind::AlreadyClosed
            | ProblemKind::WrongCluster => Code::FailedPrecondition,
            ProblemKind::BufferWait => Code::DeadlineExceeded,
            ProblemKind::Unavailable | ProblemKind::Stopping | ProblemKind::NotEnoughReplicas => Code::Unavailable,
            // Clients do not retry this code automatically.
            ProblemKind::OutcomeUnknown => Code::Aborted,
            ProblemKind::Overloaded
            | ProblemKind::Capacity
            | ProblemKind::DiskFull
            | ProblemKind::RunFull
            | ProblemKind::BufferFull => Code::ResourceExhausted,
            ProblemKind::SessionExpired | ProblemKind::RunConflict => Code::Aborted,
            ProblemKind::OutOfWindow => Code::OutOfRange,
            ProblemKind::Invalid | ProblemKind::WrongPartition => Code::InvalidArgument,
            ProblemKind::RunUnknown | ProblemKind::BufferUnknown => Code::NotFound,
            ProblemKind::Denied => Code::PermissionDenied,
            ProblemKind::Unauthenticated => Code::Unauthenticated,
            ProblemKind::DataCorruption => Code::DataLoss,
            ProblemKind::Unspecified => Code::Unknown,
        }
    }

    /// Converts into the status of a failed call: the message as status text, the whole problem in the trailer.
    pub fn into_status(self) -> Status {
        let trailer = MetadataValue::from_bytes(&self.encode_to_vec());
        let mut status = Status::new(self.code(), self.message);
        status.metadata_mut().insert_bin(PROBLEM_KEY, trailer);
        status
    }

    /// Returns the problem in the status trailer; `None` if the status comes from a proxy or the transport.
    pub fn from_status(status: &Status) -> Option<Self> {
        let bytes = status.metadata().get_bin(PROBLEM_KEY)?.to_bytes().ok()?;
        Self::decode(bytes).ok()
    }
}

impl From<Invalid> for Problem {
    fn from(invalid: Invalid) -> Self {
        Self::of(ProblemKind::Invalid, invalid.to_string())
    }
}

impl From<&Refusal> for Problem {
    fn from(refusal: &Refusal) -> Self {
        let kind = match refusal {
            Refusal::SessionExpired => ProblemKind::SessionExpired,
            Refusal::AlreadyClosed => ProblemKind::AlreadyClosed,
            Refusal::OutOfWindow { .. } => ProblemKind::OutOfWindow,
            Refusal::EpochGap { .. } => ProblemKind::EpochGap,
            Refusal::EpochForgotten { .. } => ProblemKind::EpochForgotten,
            Refusal::RunConflict { .. } => ProblemKind::RunConflict,
            Refusal::RunUnknown => ProblemKind::RunUnknown,
            Refusal::RunFull { .. } => ProblemKind::RunFull,
            Refusal::BufferUnknown => ProblemKind::BufferUnknown,
            Refusal::BufferFull { .. } => ProblemKind::BufferFull,
            Refusal::BufferConflict | Refusal::BufferLimit { .. } | Refusal::Malformed { .. } => ProblemKind::Invalid,
        };
        let mut problem = Self::of(kind, refusal.to_string());
        match refusal {
            Refusal::EpochGap { expected, expected_part, .. } => {
                problem.expected_epoch = expected.0;
                problem.expected_part = *expected_part;
            }
            Refusal::RunConflict { found, .. } => problem.found_version = *found,
            _ => {}
        }
        problem
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_survives_its_status() {
        for kind in (1..=25).map(|kind| ProblemKind::try_from(kind).expect("kinds are dense")) {
            let mut problem = Problem::of(kind, "ids[7]: 12 is not of partition 3").at(PartitionId(0)).retry_after(20);
            problem.primary = Some(0);
            let status = problem.clone().into_status();
            assert_ne!(status.code(), Code::Unknown, "{kind:?} has a code");
            assert_eq!(status.message(), problem.message);
            assert_eq!(Problem::from_status(&status), Some(problem));
        }
        assert_eq!(Problem::from_status(&Status::unavailable("from a proxy")), None);
    }
}
