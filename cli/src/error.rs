//! Maps errors to messages and exit codes.

use crate::context::Context;
use engram_api::{Code, ExitCode, Problem, Problems, printable};
use engram_proto::v1::ProblemKind;
use std::fmt;
use std::io::{self, Write as _};

/// Exits with a code and without a message: it has been printed already.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Exit(pub(crate) ExitCode);

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.meaning())
    }
}

impl std::error::Error for Exit {}

/// An error without an error code.
#[derive(Debug)]
pub(crate) struct Message {
    text: String,
    exit: ExitCode,
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Message {}

/// Returns an error that exits with `exit` and has no error code.
pub(crate) fn failure(exit: ExitCode, text: impl Into<String>) -> anyhow::Error {
    Message { text: text.into(), exit }.into()
}

/// Returns an error with an error code: `return Err(problem(Code::PortInUse, "..."))`.
pub(crate) fn problem(code: Code, message: impl Into<String>) -> anyhow::Error {
    Problem::new(code, message).into()
}

/// Prints `error` to stderr and returns the exit code.
pub(crate) fn report(error: &anyhow::Error, context: &Context) -> std::process::ExitCode {
    let (text, code) = render(error, context.output.stderr_color);
    // A closed stderr is ignored: the exit code still reports the failure.
    let _ = io::stderr().lock().write_all(text.as_bytes());
    code.into()
}

/// Returns the exit code of a command that fails with `error`.
pub(crate) fn code(error: &anyhow::Error) -> ExitCode {
    render(error, false).1
}

/// Returns message and exit code of `error`.
fn render(error: &anyhow::Error, color: bool) -> (String, ExitCode) {
    for cause in error.chain() {
        if let Some(problems) = cause.downcast_ref::<Problems>() {
            return (problems.render(color), problems.exit_code());
        }
        if let Some(problem) = cause.downcast_ref::<Problem>() {
            return (problem.render(color), problem.code().exit_code());
        }
        if let Some(message) = cause.downcast_ref::<Message>() {
            return (plain(error, color), message.exit);
        }
        if let Some(Exit(code)) = cause.downcast_ref::<Exit>() {
            return (String::new(), *code);
        }
        if let Some(client) = cause.downcast_ref::<engram_client::Error>() {
            return match code_of(client) {
                Some(code) => (Problem::new(code, client.to_string()).render(color), code.exit_code()),
                None => (plain(error, color), ExitCode::Failed),
            };
        }
        match cause.downcast_ref::<io::Error>().map(io::Error::kind) {
            // `engram rank | head`: the reader has closed the pipe.
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
    let message = format!("{error:#}");
    format!("{} {}\n", crate::output::Style::Bad.paint("error:", color), printable(&message))
}

/// Returns the error code of an error of the client library.
pub(crate) fn code_of(error: &engram_client::Error) -> Option<Code> {
    use engram_client::Error;
    let by_kind = match error.kind() {
        ProblemKind::Overloaded => Some(Code::Busy),
        ProblemKind::SessionExpired | ProblemKind::AlreadyClosed | ProblemKind::OutOfWindow => {
            Some(Code::SessionExpired)
        }
        ProblemKind::Invalid | ProblemKind::WrongPartition => Some(Code::InvalidValue),
        ProblemKind::BufferUnknown => Some(Code::InvalidValue),
        ProblemKind::Capacity | ProblemKind::BufferFull => Some(Code::CapacityExceeded),
        ProblemKind::RunUnknown => Some(Code::RunUnknown),
        ProblemKind::RunConflict | ProblemKind::RunFull | ProblemKind::EpochGap | ProblemKind::EpochForgotten => {
            Some(Code::RunFailed)
        }
        ProblemKind::WrongCluster => Some(Code::WrongCluster),
        ProblemKind::DiskFull => Some(Code::DiskFull),
        ProblemKind::Denied | ProblemKind::Unauthenticated => Some(Code::Denied),
        ProblemKind::DataCorruption => Some(Code::Corrupt),
        ProblemKind::OutcomeUnknown | ProblemKind::BufferWait => Some(Code::DeadlineExceeded),
        ProblemKind::Unspecified
        | ProblemKind::NotPrimary
        | ProblemKind::Unavailable
        | ProblemKind::NotEnoughReplicas
        | ProblemKind::Stopping => None,
    };
    match error {
        Error::Connect { .. } => Some(Code::Unreachable),
        // An overloaded cluster is a more useful reason than an expired deadline.
        Error::OutcomeUnknown { .. } | Error::Deadline { .. } => {
            Some(by_kind.filter(|code| *code == Code::Busy).unwrap_or(Code::DeadlineExceeded))
        }
        Error::Protocol(_) => Some(Code::Incompatible),
        Error::Rejected(_) if matches!(error.kind(), ProblemKind::Unavailable | ProblemKind::Stopping) => {
            Some(Code::Unreachable)
        }
        Error::Rejected(_) | Error::Partial { .. } => by_kind,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context as _;

    #[test]
    fn error_code_survives_added_context() {
        let error = problem(Code::PortInUse, "port 7443 is in use");
        let error = Err::<(), _>(error).context("failed to start").unwrap_err();
        let (text, code) = render(&error, false);
        assert!(text.starts_with("error[ENG-0402]: port 7443 is in use"), "{text}");
        assert_eq!(code, ExitCode::Conflict);
    }

    #[test]
    fn control_characters_of_data_do_not_reach_the_terminal() {
        let data = "\u{1b}]0;title\u{7}";
        for error in [problem(Code::InvalidValue, data), failure(ExitCode::Usage, data), anyhow::anyhow!("{data}")] {
            let (text, _) = render(&error, false);
            assert!(text.contains("title") && !text.contains(['\u{1b}', '\u{7}']), "{text:?}");
        }
    }

    #[test]
    fn unreachable_and_slow_clusters_have_distinct_exit_codes() {
        let connect = engram_client::Error::Connect { endpoints: "127.0.0.1:1".into(), last: "refused".into() };
        assert_eq!(render(&connect.into(), false).1, ExitCode::Unreachable);
        let last = Box::new(engram_proto::v1::Problem::of(ProblemKind::NotPrimary, "moved"));
        let deadline = engram_client::Error::Deadline { after: std::time::Duration::from_secs(1), last };
        assert_eq!(render(&deadline.into(), false).1, ExitCode::NotReady);
    }
}
