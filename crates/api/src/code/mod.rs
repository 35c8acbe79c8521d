//! Error codes with title, explanation and exit code: the table from which `engram explain`, the documentation and other
//! languages' exceptions are generated.
//!
//! A code is never reused and never changes its meaning. Its first two digits name the area: 01 manifest, 02 devices,
//! 03 runs and their sources, 04 local cluster, 05 store and disk, 06 calls to a cluster. The explanations are
//! in a file per area.

mod calls;
mod devices;
mod local_cluster;
mod manifest;
mod runs;
mod store;

use std::fmt;

use crate::exit::ExitCode;

/// Declares the codes: variant, code, exit code, title, explanation.
macro_rules! codes {
    ($($variant:ident = $id:literal, $exit:ident, $title:literal, $explanation:expr;)+) => {
        /// An error code.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Code {
            $(#[doc = concat!("`", $id, "`: ", $title, ".")] $variant,)+
        }

        impl Code {
            /// Every code, ascending.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// Returns the printed code: `ENG-0106`.
            pub const fn id(self) -> &'static str {
                match self { $(Self::$variant => $id,)+ }
            }

            /// Returns a short title.
            pub const fn title(self) -> &'static str {
                match self { $(Self::$variant => $title,)+ }
            }

            /// Returns the cause and possible remedies.
            pub const fn explanation(self) -> &'static str {
                match self { $(Self::$variant => $explanation,)+ }
            }

            /// Returns the exit code of a command that fails with it.
            pub const fn exit_code(self) -> ExitCode {
                match self { $(Self::$variant => ExitCode::$exit,)+ }
            }
        }
    };
}

codes! {
    UnknownField = "ENG-0101", Usage, "unknown field", manifest::UNKNOWN_FIELD;
    WrongType = "ENG-0102", Usage, "wrong type", manifest::WRONG_TYPE;
    OutOfRange = "ENG-0103", Usage, "out of range", manifest::OUT_OF_RANGE;
    NotOneOf = "ENG-0104", Usage, "not one of the allowed values", manifest::NOT_ONE_OF;
    Missing = "ENG-0105", Usage, "required field missing", manifest::MISSING;
    Conflicting = "ENG-0106", Usage, "conflicting fields", manifest::CONFLICTING;
    NotSupported = "ENG-0107", Usage, "not supported by this version", manifest::NOT_SUPPORTED;
    Immutable = "ENG-0108", Conflict, "immutable field changed", manifest::IMMUTABLE;
    NotAManifest = "ENG-0109", Usage, "not a manifest", manifest::NOT_A_MANIFEST;

    GpuRequired = "ENG-0201", Conflict, "required GPU missing", devices::GPU_REQUIRED;

    ClusterNotFound = "ENG-0301", NotFound, "cluster not found", runs::CLUSTER_NOT_FOUND;
    SourceUnreadable = "ENG-0302", NotFound, "source cannot be read", runs::SOURCE_UNREADABLE;
    ColumnNotFound = "ENG-0303", Usage, "column not usable", runs::COLUMN_NOT_FOUND;
    BadEvent = "ENG-0304", Failed, "bad event", runs::BAD_EVENT;
    RevisionNotFound = "ENG-0305", NotFound, "revision not found", runs::REVISION_NOT_FOUND;
    GroupsInUse = "ENG-0306", Conflict, "groups hold other memories", runs::GROUPS_IN_USE;
    RunUnknown = "ENG-0307", NotFound, "run not found", runs::RUN_UNKNOWN;
    RunFailed = "ENG-0308", Failed, "run failed", runs::RUN_FAILED;

    StateDirectoryInUse = "ENG-0401", Conflict, "state directory in use", local_cluster::STATE_DIRECTORY_IN_USE;
    PortInUse = "ENG-0402", Conflict, "port in use", local_cluster::PORT_IN_USE;
    OtherCluster = "ENG-0403", Conflict, "state directory of another cluster", local_cluster::OTHER_CLUSTER;
    NewerFormat = "ENG-0404", Incompatible, "state of a newer version", local_cluster::NEWER_FORMAT;
    StateDirectoryUnusable = "ENG-0405", Failed, "state directory cannot be used", local_cluster::STATE_DIRECTORY_UNUSABLE;
    WorkerFailedToStart = "ENG-0406", Failed, "worker failed to start", local_cluster::WORKER_FAILED_TO_START;
    StartTimedOut = "ENG-0407", NotReady, "cluster not ready in time", local_cluster::START_TIMED_OUT;
    NoLocalCluster = "ENG-0408", NotFound, "no local cluster is running", local_cluster::NO_LOCAL_CLUSTER;
    MapLost = "ENG-0409", NotReady, "partition map lost", local_cluster::MAP_LOST;
    LossNotAccepted = "ENG-0410", Conflict, "operation would lose data", local_cluster::LOSS_NOT_ACCEPTED;
    OrderNotNeeded = "ENG-0411", Conflict, "operation not needed", local_cluster::ORDER_NOT_NEEDED;

    DiskFull = "ENG-0501", Failed, "disk full", store::DISK_FULL;
    StorageFailed = "ENG-0502", Failed, "storage failed", store::STORAGE_FAILED;
    Corrupt = "ENG-0503", Failed, "stored data is damaged", store::CORRUPT;
    CapacityExceeded = "ENG-0504", Failed, "capacity exceeded", store::CAPACITY_EXCEEDED;
    KeyCollision = "ENG-0505", Conflict, "two keys with one id", store::KEY_COLLISION;
    WrongDimension = "ENG-0506", Usage, "features of the wrong dimension", store::WRONG_DIMENSION;
    InvalidValue = "ENG-0507", Usage, "invalid value in a request", store::INVALID_VALUE;
    MemoryNotFound = "ENG-0508", NotFound, "memory not found", store::MEMORY_NOT_FOUND;
    SnapshotUnusable = "ENG-0509", Failed, "snapshot cannot be restored", store::SNAPSHOT_UNUSABLE;
    StorageUnusable = "ENG-0510", Failed, "storage not usable", store::STORAGE_UNUSABLE;

    Unreachable = "ENG-0601", Unreachable, "cluster unreachable", calls::UNREACHABLE;
    DeadlineExceeded = "ENG-0602", NotReady, "deadline exceeded", calls::DEADLINE_EXCEEDED;
    MessageTooLarge = "ENG-0603", Usage, "message too large", calls::MESSAGE_TOO_LARGE;
    SessionExpired = "ENG-0604", Failed, "session expired", calls::SESSION_EXPIRED;
    WrongCluster = "ENG-0605", Conflict, "another cluster answers", calls::WRONG_CLUSTER;
    Incompatible = "ENG-0606", Incompatible, "incompatible version", calls::INCOMPATIBLE;
    Denied = "ENG-0607", Denied, "permission denied", calls::DENIED;
    Busy = "ENG-0608", NotReady, "cluster is overloaded", calls::BUSY;
}

impl Code {
    /// Parses a code as `ENG-0106`, `eng-0106` or `0106`.
    pub fn find(text: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|code| {
            code.id().eq_ignore_ascii_case(text) || code.id().strip_prefix("ENG-").is_some_and(|digits| digits == text)
        })
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.id())
    }
}

/// Returns the explanation of a code as `engram explain` prints it; `None` for an unknown code.
pub fn explain(text: &str) -> Option<String> {
    let code = Code::find(text)?;
    let exit = code.exit_code();
    Some(format!(
        "{code}: {}\n\n{}\n\nexit code {}: {}\n",
        code.title(),
        code.explanation(),
        exit.number(),
        exit.meaning()
    ))
}

#[cfg(test)]
mod tests {
    use super::{Code, explain};

    #[test]
    fn codes_are_distinct_and_ascending() {
        assert!(Code::ALL.windows(2).all(|pair| pair[0].id() < pair[1].id()));
        for code in Code::ALL {
            assert_eq!(Code::find(code.id()), Some(*code));
            assert!(code.explanation().len() > 80, "{code} needs an explanation");
        }
    }

    #[test]
    fn codes_are_found_with_and_without_prefix() {
        for text in ["ENG-0106", "eng-0106", "0106"] {
            let text = explain(text).expect("ENG-0106 exists");
            assert!(text.starts_with("ENG-0106: conflicting fields\n\n"));
            assert!(text.ends_with("exit code 2: invalid usage or manifest\n"));
        }
        assert_eq!(explain("ENG-9999"), None);
    }
}
