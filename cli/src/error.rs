//! From whatever went wrong to what the user reads and the code that the process ends with.

use crate::args::Context;
use engram_api::{Code, ExitCode, Problem, Problems};
use engram_proto::v1::ProblemKind;
use std::fmt;
use std::io::{self, Write as _};

/// Ends the command with a code and no further words: they were said already.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ended(pub(crate) ExitCode);

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.meaning())
    }
}

impl std::error::Error for Ended {}

/// Something said plainly that has no code of its own to explain it.
#[derive(Debug)]
pub(crate) struct Said {
    message: String,
    exit: ExitCode,
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Said {}

/// An error that ends with `exit` and needs no long text.
pub(crate) fn said(exit: ExitCode, message: impl Into<String>) -> anyhow::Error {
    Said { message: message.into(), exit }.into()
}

/// A problem as an error: `return Err(problem(Code::PortInUse, "..."))`.
pub(crate) fn problem(code: Code, message: impl Into<String>) -> anyhow::Error {
    Problem::new(code, message).into()
}

/// Prints `error` and returns how the process ends.
pub(crate) fn report(error: &anyhow::Error, context: &Context) -> std::process::ExitCode {
    let (text, code) = told(error, context.output.stderr_color);
    // Nobody listens on a closed stderr, and the exit code still tells.
    let _ = io::stderr().lock().write_all(text.as_bytes());
    code.into()
}

/// The code that a command ends with that fails with `error`.
pub(crate) fn code(error: &anyhow::Error) -> ExitCode {
    told(error, false).1
}

/// The words and the code for `error`.
fn told(error: &anyhow::Error, color: bool) -> (String, ExitCode) {
    for cause in error.chain() {
        if let Some(problems) = cause.downcast_ref::<Problems>() {
            return (problems.render(color), problems.exit_code());
        }
        if let Some(problem) = cause.downcast_ref::<Problem>() {
            return (problem.render(color), problem.code().exit_code());
        }
        if let Some(said) = cause.downcast_ref::<Said>() {
            return (plain(error, color), said.exit);
        }
        if let Some(Ended(code)) = cause.downcast_ref::<Ended>() {
            return (String::new(), *code);
        }
        if let Some(client) = cause.downcast_ref::<engram_client::Error>() {
            return match code_of(client) {
                Some(code) => (Problem::new(code, client.to_string()).render(color), code.exit_code()),
                None => (plain(error, color), ExitCode::Failed),
            };
        }
        match cause.downcast_ref::<io::Error>().map(io::Error::kind) {
            // `engram rank | head`: whoever read has enough.
            Some(io::ErrorKind::BrokenPipe) => return (String::new(), ExitCode::Ok),
            Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {
                return (Problem::new(Code::DiskFull, format!("{error:#}")).render(color), Code::DiskFull.exit_code());
            }
            _ => {}
        }
    }
    (plain(error, color), ExitCode::Failed)
}

fn plain(error: &anyhow::Error, color: bool) -> String {
    format!("{} {error:#}\n", crate::output::Style::Bad.paint("error:", color))
}

/// The code under which an error of the client library is explained.
pub(crate) fn code_of(error: &engram_client::Error) -> Option<Code> {
    use engram_client::Error;
    let by_kind = match error.kind() {
        ProblemKind::Overloaded => Some(Code::Busy),
        ProblemKind::SessionExpired | ProblemKind::AlreadyClosed | ProblemKind::OutOfWindow => {
            Some(Code::SessionExpired)
        }
        ProblemKind::Invalid | ProblemKind::WrongPartition => Some(Code::InvalidValue),
        ProblemKind::Capacity => Some(Code::CapacityExceeded),
        ProblemKind::RunUnknown => Some(Code::RunUnknown),
        ProblemKind::RunConflict | ProblemKind::RunFull | ProblemKind::EpochGap | ProblemKind::EpochForgotten => {
            Some(Code::RunFailed)
        }
        ProblemKind::WrongCluster => Some(Code::WrongCluster),
        ProblemKind::DiskFull => Some(Code::DiskFull),
        ProblemKind::Denied | ProblemKind::Unauthenticated => Some(Code::Denied),
        ProblemKind::DataCorruption => Some(Code::Corrupt),
        ProblemKind::OutcomeUnknown => Some(Code::DeadlineExceeded),
        ProblemKind::Unspecified
        | ProblemKind::NotPrimary
        | ProblemKind::Unavailable
        | ProblemKind::TooFewCopies
        | ProblemKind::Stopping => None,
    };
    match error {
        Error::Connect { .. } => Some(Code::Unreachable),
        // What the last attempt met says more than that time ran out, if it is more than "try again".
        Error::Unknown { .. } | Error::Deadline { .. } => {
            Some(by_kind.filter(|code| *code == Code::Busy).unwrap_or(Code::DeadlineExceeded))
        }
        Error::Protocol(_) => Some(Code::Incompatible),
        Error::Refused(_) if matches!(error.kind(), ProblemKind::Unavailable | ProblemKind::Stopping) => {
            Some(Code::Unreachable)
        }
        Error::Refused(_) | Error::Partial { .. } => by_kind,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context as _;

    #[test]
    fn an_error_keeps_its_code_under_any_context() {
        let error = problem(Code::PortInUse, "port 7443 is in use");
        let error = Err::<(), _>(error).context("failed to start").unwrap_err();
        let (text, code) = told(&error, false);
        assert!(text.starts_with("error[ENG-0402]: port 7443 is in use"), "{text}");
        assert_eq!(code, ExitCode::Conflict);
    }

    #[test]
    fn an_unreachable_cluster_is_told_apart_from_a_slow_one() {
        let connect = engram_client::Error::Connect { endpoints: "127.0.0.1:1".into(), last: "refused".into() };
        assert_eq!(told(&connect.into(), false).1, ExitCode::Unreachable);
        let last = Box::new(engram_proto::v1::Problem::of(ProblemKind::NotPrimary, "moved"));
        let deadline = engram_client::Error::Deadline { after: std::time::Duration::from_secs(1), last };
        assert_eq!(told(&deadline.into(), false).1, ExitCode::NotReady);
    }
}
