//! Exceptions: the classes are Python's (`engram._errors`); here is decided which one, with which code.

use engram_api::Code;
use engram_client::Error;
use engram_proto::v1::ProblemKind;
use pyo3::prelude::*;

/// Creates the exception of a class of `engram._errors`, named without its suffix `Error`.
pub(crate) fn raise(py: Python<'_>, class: &str, text: &str, code: Option<Code>) -> PyErr {
    let create = || {
        let module = py.import("engram._errors")?;
        let (id, help) = code.map_or(("", ""), |code| (code.id(), code.title()));
        module.getattr("create")?.call1((class, text, id, help))
    };
    match create() {
        Ok(exception) => PyErr::from_value(exception),
        Err(failure) => failure,
    }
}

/// Converts an error of the client library.
pub(crate) fn of_client(py: Python<'_>, failure: &Error) -> PyErr {
    let (class, code) = classify(failure);
    raise(py, class, &failure.to_string(), code)
}

/// Returns the exception class and the code of an error.
fn classify(failure: &Error) -> (&'static str, Option<Code>) {
    match failure {
        Error::Connect { .. } => ("Unavailable", Some(Code::Unreachable)),
        Error::OutcomeUnknown { .. } | Error::Deadline { .. } if failure.kind() == ProblemKind::Overloaded => {
            ("Timeout", Some(Code::Busy))
        }
        Error::OutcomeUnknown { .. } | Error::Deadline { .. } => ("Timeout", Some(Code::DeadlineExceeded)),
        Error::Partial { failures, .. } if failures.iter().all(|it| is_late(&it.error)) => {
            ("Timeout", Some(Code::DeadlineExceeded))
        }
        Error::Protocol(_) => ("VersionMismatch", Some(Code::Incompatible)),
        Error::Rejected(_) | Error::Partial { .. } => by_kind(failure.kind()),
    }
}

const fn is_late(failure: &Error) -> bool {
    matches!(failure, Error::OutcomeUnknown { .. } | Error::Deadline { .. })
}

fn by_kind(kind: ProblemKind) -> (&'static str, Option<Code>) {
    match kind {
        ProblemKind::Invalid | ProblemKind::WrongPartition => ("InvalidValue", Some(Code::InvalidValue)),
        ProblemKind::Capacity | ProblemKind::BufferFull => ("Capacity", Some(Code::CapacityExceeded)),
        ProblemKind::BufferUnknown => ("NotFound", Some(Code::InvalidValue)),
        ProblemKind::RunUnknown => ("NotFound", Some(Code::RunUnknown)),
        ProblemKind::RunConflict | ProblemKind::RunFull | ProblemKind::EpochGap | ProblemKind::EpochForgotten => {
            ("Conflict", Some(Code::RunFailed))
        }
        ProblemKind::SessionExpired | ProblemKind::AlreadyClosed | ProblemKind::OutOfWindow => {
            ("Unavailable", Some(Code::SessionExpired))
        }
        ProblemKind::WrongCluster => ("Config", Some(Code::WrongCluster)),
        ProblemKind::DiskFull => ("Unavailable", Some(Code::DiskFull)),
        ProblemKind::Denied | ProblemKind::Unauthenticated => ("Denied", Some(Code::Denied)),
        ProblemKind::DataCorruption => ("Unavailable", Some(Code::Corrupt)),
        ProblemKind::Overloaded => ("Unavailable", Some(Code::Busy)),
        ProblemKind::OutcomeUnknown | ProblemKind::BufferWait => ("Timeout", Some(Code::DeadlineExceeded)),
        ProblemKind::Unavailable | ProblemKind::Stopping => ("Unavailable", Some(Code::Unreachable)),
        ProblemKind::Unspecified | ProblemKind::NotPrimary | ProblemKind::NotEnoughReplicas => ("Unavailable", None),
    }
}
