//! Exit statuses: the cause of a process failure, which reaches the parent process even if no log can be written.
//!
//! The numbers are internal to processes of one binary; users see the error code that each stands for.

use engram_api::Code;
use std::io;
use std::process::ExitStatus;

/// Exit status of each cause. Avoids a plain failure (1), a panic (101) and the statuses of shells (from 126).
const STATUSES: [(i32, Code); 13] = [
    (70, Code::Immutable),
    (71, Code::StateDirectoryInUse),
    (72, Code::PortInUse),
    (73, Code::OtherCluster),
    (74, Code::NewerFormat),
    (75, Code::StateDirectoryUnusable),
    (76, Code::DiskFull),
    (77, Code::StorageFailed),
    (78, Code::Corrupt),
    (79, Code::GpuRequired),
    (80, Code::SnapshotUnusable),
    (81, Code::StorageUnusable),
    (82, Code::CapacityExceeded),
];

/// Exit status of a worker that asks to be restarted at once, after it has loaded a snapshot.
pub const RESTART: i32 = 90;

/// Returns the exit status for `error`; 1 if only the log has the cause.
pub fn status(error: &anyhow::Error) -> i32 {
    of(error).map_or(1, of_code)
}

/// Returns the exit status for a cause; 1 if it has none.
pub fn of_code(code: Code) -> i32 {
    STATUSES.into_iter().find(|(_, candidate)| *candidate == code).map_or(1, |(status, _)| status)
}

/// Returns the cause that an exit status stands for.
pub fn cause(status: ExitStatus) -> Option<Code> {
    STATUSES.into_iter().find(|(candidate, _)| status.code() == Some(*candidate)).map(|(_, code)| code)
}

/// Describes how a process ended.
pub fn description(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt as _;
    if let Some(cause) = cause(status) {
        return format!("{}, {cause}", cause.title());
    }
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}

/// Returns whether a restart would fail with the same cause. A process that is just ending may hold the folder or the port.
pub const fn is_permanent(cause: Code) -> bool {
    !matches!(cause, Code::StateDirectoryInUse | Code::PortInUse)
}

/// Returns the error code of an error, if it has one.
pub fn of(error: &anyhow::Error) -> Option<Code> {
    error.chain().find_map(|cause| {
        if let Some(error) = cause.downcast_ref::<crate::Error>() {
            return worker(error);
        }
        if let Some(error) = cause.downcast_ref::<engram_mapstore::Error>() {
            return map_store(error);
        }
        cause.downcast_ref::<io::Error>().and_then(file)
    })
}

fn worker(error: &crate::Error) -> Option<Code> {
    match error {
        crate::Error::Store(error) => store(error),
        crate::Error::Bootstrap(problem) => Some(problem.code()),
        crate::Error::NoGpu { .. } => Some(Code::GpuRequired),
        crate::Error::Bind { source, .. } if source.kind() == io::ErrorKind::AddrInUse => Some(Code::PortInUse),
        _ => None,
    }
}

fn store(error: &engram_store::Error) -> Option<Code> {
    use engram_store::Error;
    match error {
        Error::OtherShape { .. } => Some(Code::Immutable),
        Error::Locked { .. } => Some(Code::StateDirectoryInUse),
        Error::OtherCluster { .. } | Error::OtherStore { .. } => Some(Code::OtherCluster),
        Error::UnknownFormat { .. } => Some(Code::NewerFormat),
        Error::Unwritable { .. } => Some(Code::StateDirectoryUnusable),
        Error::DiskFull { .. } => Some(Code::DiskFull),
        Error::Io { source, .. } => Some(file(source).unwrap_or(Code::StorageFailed)),
        Error::SyncFailed { .. } => Some(Code::StorageFailed),
        Error::Corrupt { .. } | Error::IdentityMissing { .. } => Some(Code::Corrupt),
        _ => None,
    }
}

fn map_store(error: &engram_mapstore::Error) -> Option<Code> {
    use engram_mapstore::Error;
    match error {
        Error::Locked { .. } => Some(Code::StateDirectoryInUse),
        Error::OtherCluster { .. } => Some(Code::OtherCluster),
        Error::NewerFormat { .. } => Some(Code::NewerFormat),
        Error::Damaged { .. } => Some(Code::Corrupt),
        Error::Io { source, .. } => Some(file(source).unwrap_or(Code::StorageFailed)),
        _ => None,
    }
}

fn file(error: &io::Error) -> Option<Code> {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Some(Code::DiskFull),
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Some(Code::StateDirectoryUnusable),
        io::ErrorKind::AddrInUse => Some(Code::PortInUse),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt as _;

    #[test]
    fn a_cause_is_recovered_from_the_status_of_a_wrapped_error() {
        let full = || engram_store::Error::DiskFull { operation: "write", path: "wal".into() };
        let damaged = || engram_store::Error::Corrupt { path: "wal".into(), offset: 7, what: "its checksum is wrong" };
        let no_gpu = crate::Error::NoGpu { why: "there is no driver".to_owned() };
        let cases: [(anyhow::Error, Option<Code>); 6] = [
            (no_gpu.into(), Some(Code::GpuRequired)),
            (crate::Error::from(full()).into(), Some(Code::DiskFull)),
            (anyhow::Error::new(crate::Error::from(damaged())).context("failed to start"), Some(Code::Corrupt)),
            (io::Error::from(io::ErrorKind::AddrInUse).into(), Some(Code::PortInUse)),
            (io::Error::from(io::ErrorKind::TimedOut).into(), None),
            (anyhow::anyhow!("an error without a code"), None),
        ];
        for (error, code) in cases {
            // The raw status of a process that exited.
            let ended = ExitStatus::from_raw(status(&error) << 8);
            assert_eq!((of(&error), cause(ended)), (code, code), "{error:#}");
        }
        assert_eq!(cause(ExitStatus::from_raw(9)), None, "a signal has no cause");
    }
}
