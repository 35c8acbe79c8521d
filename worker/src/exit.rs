//! Why a process of a cluster ended, as its exit status: that reaches whoever started it also where no log can be written.
//!
//! The numbers are between processes of one binary; people see the code that each stands for.

use engram_api::Code;
use std::io;
use std::process::ExitStatus;

/// The status of each cause: clear of a plain failure (1), of a panic (101) and of what shells use (from 126).
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

/// The status of a worker that has done what is done without the others, and is to be started again at once.
pub const AGAIN: i32 = 90;

/// The status that a process ends with that fails with `error`; 1 where the log alone tells why.
pub fn status(error: &anyhow::Error) -> i32 {
    let code = of(error);
    STATUSES.into_iter().find(|(_, known)| Some(*known) == code).map_or(1, |(status, _)| status)
}

/// The cause that a process told with its status.
pub fn told(status: ExitStatus) -> Option<Code> {
    STATUSES.into_iter().find(|(known, _)| status.code() == Some(*known)).map(|(_, code)| code)
}

/// How a process ended, in words.
pub fn described(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt as _;
    if let Some(cause) = told(status) {
        return format!("{}, {cause}", cause.title());
    }
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}

/// Whether another start would meet the same. What holds a folder or a port may be a process that is just ending.
pub const fn is_lasting(cause: Code) -> bool {
    !matches!(cause, Code::StateDirectoryInUse | Code::PortInUse)
}

/// The code under which an error is explained, if it has one of its own.
pub fn of(error: &anyhow::Error) -> Option<Code> {
    error.chain().find_map(|cause| {
        if let Some(error) = cause.downcast_ref::<crate::Error>() {
            return worker(error);
        }
        if let Some(error) = cause.downcast_ref::<engram_coordinator::Error>() {
            return coordinator(error);
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

fn coordinator(error: &engram_coordinator::Error) -> Option<Code> {
    match error {
        engram_coordinator::Error::MapStore(error) => map_store(error),
        engram_coordinator::Error::Fixed { .. } => Some(Code::Immutable),
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
    fn a_cause_survives_its_status_under_whatever_it_is_wrapped() {
        let full = || engram_store::Error::DiskFull { operation: "write", path: "wal".into() };
        let damaged = || engram_store::Error::Corrupt { path: "wal".into(), offset: 7, what: "its checksum is wrong" };
        let no_gpu = crate::Error::NoGpu { why: "there is no driver".to_owned() };
        let cases: [(anyhow::Error, Option<Code>); 6] = [
            (no_gpu.into(), Some(Code::GpuRequired)),
            (crate::Error::from(full()).into(), Some(Code::DiskFull)),
            (anyhow::Error::new(crate::Error::from(damaged())).context("failed to start"), Some(Code::Corrupt)),
            (io::Error::from(io::ErrorKind::AddrInUse).into(), Some(Code::PortInUse)),
            (io::Error::from(io::ErrorKind::TimedOut).into(), None),
            (anyhow::anyhow!("it is what it is"), None),
        ];
        for (error, code) in cases {
            // What the system gives for a process that ended by itself.
            let ended = ExitStatus::from_raw(status(&error) << 8);
            assert_eq!((of(&error), told(ended)), (code, code), "{error:#}");
        }
        assert_eq!(told(ExitStatus::from_raw(9)), None, "a signal tells no cause");
    }
}
