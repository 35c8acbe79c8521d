//! Errors of the store's files.

use std::io::{self, Write as _};

use engram_memory::{ClusterId, Lsn, PartitionId, Shape, StoreId, Term};

/// Failure of the store's files. Paths are as described by the disk.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A read, write or directory operation failed.
    #[error("failed to {operation} {path}")]
    Io {
        /// Operation, as a verb.
        operation: &'static str,
        /// Path of the file or directory.
        path: String,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// No space left. The failed write is not acknowledged and nothing of it is kept; it may be retried.
    #[error("failed to {operation} {path}: no space left on device; free space or use a larger volume")]
    DiskFull {
        /// Operation, as a verb.
        operation: &'static str,
        /// Path of the file or directory.
        path: String,
    },
    /// An fsync failed: the data it should have covered may be lost although a later fsync would succeed, so the process
    /// aborts ([`crate::abort_on_sync_failure`]) and the next one recovers from the disk.
    #[error("failed to sync {path}: data written since the last sync may be lost")]
    SyncFailed {
        /// Path of the file or directory.
        path: String,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// The state directory is not writable.
    #[error("state directory {path} is not writable; check its owner, permissions and mount")]
    Unwritable {
        /// The directory.
        path: String,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// Another process uses the state directory.
    #[error("state directory {path} is in use by process {}", .pid.map_or("(unknown)".into(), |pid| pid.to_string()))]
    Locked {
        /// The directory.
        path: String,
        /// PID of the process, if known.
        pid: Option<u32>,
    },
    /// The file belongs to another cluster.
    #[error("{path} belongs to cluster {found}, not to {expected}")]
    OtherCluster {
        /// The file.
        path: String,
        /// Cluster in the file.
        found: ClusterId,
        /// Cluster of this process.
        expected: ClusterId,
    },
    /// The file was written by another store: the file or the identity was copied.
    #[error("{path} belongs to store {found}, not to {expected}")]
    OtherStore {
        /// The file.
        path: String,
        /// Store in the file.
        found: StoreId,
        /// Store of this directory.
        expected: StoreId,
    },
    /// The immutable shape of the cluster differs.
    #[error("{path} has shape {found:?}, this cluster has {expected:?}; the shape is immutable after creation")]
    OtherShape {
        /// The file.
        path: String,
        /// Shape in the file.
        found: Shape,
        /// Shape of this cluster.
        expected: Shape,
    },
    /// The file has an unsupported format version.
    #[error("{path} has format version {found}, this version supports up to {supported}; use a newer version")]
    UnknownFormat {
        /// The file.
        path: String,
        /// Version in the file.
        found: u32,
        /// Newest supported version.
        supported: u32,
    },
    /// The directory has log or snapshot files but no identity file.
    #[error("{path} contains {file} but no identity file; refusing to format over existing data")]
    IdentityMissing {
        /// The directory.
        path: String,
        /// One of these files.
        file: String,
    },
    /// Synced bytes differ from what was written. They are never truncated and never served.
    #[error("{path} is corrupt at byte {offset}: {what}")]
    Corrupt {
        /// The file.
        path: String,
        /// Offset of the damage.
        offset: u64,
        /// Description of the damage.
        what: &'static str,
    },
    /// A record above the limit; checked before allocation.
    #[error("log record of {bytes} bytes exceeds the limit of {limit}")]
    RecordTooLarge {
        /// Payload bytes.
        bytes: usize,
        /// Limit in bytes.
        limit: usize,
    },
    /// The current batch is full: seal it first.
    #[error("batch of {bytes} bytes exceeds the limit of {limit}; seal it before appending more")]
    BatchFull {
        /// Bytes including the record.
        bytes: usize,
        /// Limit in bytes.
        limit: usize,
    },
    /// A record does not continue its partition's log.
    #[error("partition {partition} is at lsn {last} of term {last_term}; lsn {found} of term {term} does not follow")]
    NotDense {
        /// Partition.
        partition: PartitionId,
        /// Its last lsn.
        last: Lsn,
        /// Term of the last record.
        last_term: Term,
        /// LSN of the record.
        found: Lsn,
        /// Term of the record.
        term: Term,
    },
    /// A snapshot chunk above the limit.
    #[error("snapshot chunk of {bytes} bytes exceeds the limit of {limit}")]
    ChunkTooLarge {
        /// Bytes of the chunk.
        bytes: usize,
        /// Limit in bytes.
        limit: usize,
    },
    /// Snapshots are only installed into an empty store.
    #[error("{path} already contains {file}; restore into an empty state directory")]
    NotEmpty {
        /// The directory.
        path: String,
        /// One of these files.
        file: String,
    },
    /// The store was stopped.
    #[error("the store was stopped")]
    Stopped,
    /// The device failed or is full: records may be partially applied, so nothing is served any more.
    #[error("device failed; the process must restart")]
    Device(#[from] engram_kernels::Error),
}

impl Error {
    /// Converts the error of a failed write, creation or preallocation; a full disk has its own variant.
    pub(crate) fn write(operation: &'static str, path: String, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::DiskFull { operation, path },
            _ => Self::Io { operation, path, source },
        }
    }

    /// Converts the error of a failed read.
    pub(crate) fn read(path: String, source: io::Error) -> Self {
        Self::Io { operation: "read", path, source }
    }
}

/// Aborts the process with a message on stderr if a sync failed; passes other results through.
///
/// Linux marks the pages of a failed fsync clean, so a retry cannot determine what reached the disk: only a new process that
/// recovers from the disk is safe. Production wraps every write of the log and of a snapshot; tests check for
/// [`Error::SyncFailed`] instead.
///
/// # Errors
/// Every other error, unchanged.
pub fn abort_on_sync_failure<T>(result: Result<T, Error>) -> Result<T, Error> {
    if let Err(Error::SyncFailed { path, source }) = &result {
        // Not `eprintln`: it panics if stderr is not writable, which would keep this process alive.
        let _ = writeln!(
            io::stderr(),
            "fatal: failed to sync {path}: {source}; aborting the process, the next start recovers from the disk"
        );
        std::process::abort();
    }
    result
}
