//! What can go wrong with files, as a caller branches on it.

use std::io::{self, Write as _};

use engram_memory::{ClusterId, Lsn, PartitionId, Shape, StoreId, Term};

/// A failure of the store's files. Paths are printed as the disk describes them.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A read, write or change of a folder failed.
    #[error("failed to {operation} {path}")]
    Io {
        /// What was tried, as a verb.
        operation: &'static str,
        /// On what.
        path: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// No space left. What was being written is not acknowledged and nothing of it is kept; it may be tried again.
    #[error("failed to {operation} {path}: no space left on the device; free some or give the store a larger volume")]
    DiskFull {
        /// What was tried, as a verb.
        operation: &'static str,
        /// On what.
        path: String,
    },
    /// An fsync failed: what it should have covered may be lost although a later fsync would succeed, so the process
    /// ends ([`crate::abort_on_sync_failure`]) and the next one reads what the disk really holds.
    #[error("failed to sync {path}: what was written since the last sync may be lost")]
    SyncFailed {
        /// What was synced.
        path: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The state directory cannot be written.
    #[error("state directory {path} cannot be written; check its owner, its permissions and its mount")]
    Unwritable {
        /// The directory.
        path: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Another process uses the state directory.
    #[error("state directory {path} is in use by process {}", .pid.map_or("(unknown)".into(), |pid| pid.to_string()))]
    Locked {
        /// The directory.
        path: String,
        /// The process that holds it, when it has said so.
        pid: Option<u32>,
    },
    /// The file is of another cluster.
    #[error("{path} belongs to cluster {found}, not to {expected}")]
    OtherCluster {
        /// The file.
        path: String,
        /// Cluster in the file.
        found: ClusterId,
        /// Cluster of this process.
        expected: ClusterId,
    },
    /// The file was written by another store: it was copied here, or the identity was.
    #[error("{path} belongs to store {found}, not to {expected}")]
    OtherStore {
        /// The file.
        path: String,
        /// Store in the file.
        found: StoreId,
        /// Store of this directory.
        expected: StoreId,
    },
    /// What is fixed when a cluster is created differs.
    #[error("{path} was made with {found:?}, this cluster is {expected:?}; a cluster's shape is fixed at creation")]
    OtherShape {
        /// The file.
        path: String,
        /// Shape in the file.
        found: Shape,
        /// Shape of this cluster.
        expected: Shape,
    },
    /// The file has a format version that this program does not know.
    #[error("{path} has format version {found}, this program knows up to {supported}; use a newer program")]
    UnknownFormat {
        /// The file.
        path: String,
        /// Version in the file.
        found: u32,
        /// Newest version that this program reads.
        supported: u32,
    },
    /// Log or snapshots are there, but no identity: this directory has lost a part of itself.
    #[error("{path} holds {file} but no identity; nothing is formatted over existing data")]
    IdentityMissing {
        /// The directory.
        path: String,
        /// One of the files found.
        file: String,
    },
    /// Bytes that a sync had covered are not what was written. Never cut away, never served.
    #[error("{path} is corrupt at byte {offset}: {what}")]
    Corrupt {
        /// The file.
        path: String,
        /// Where the damaged part begins.
        offset: u64,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A record over the limit. Checked before memory is taken.
    #[error("a log record of {bytes} bytes is above the limit of {limit}")]
    RecordTooLarge {
        /// Payload bytes.
        bytes: usize,
        /// Most.
        limit: usize,
    },
    /// The batch being gathered is full: seal it first.
    #[error("a batch of {bytes} bytes is above the limit of {limit}; seal it before appending more")]
    BatchFull {
        /// Bytes with the record.
        bytes: usize,
        /// Most.
        limit: usize,
    },
    /// A record does not continue its partition's log.
    #[error(
        "partition {partition} stands at lsn {last} of term {last_term}; lsn {found} of term {term} does not follow"
    )]
    NotDense {
        /// Partition.
        partition: PartitionId,
        /// Its last lsn.
        last: Lsn,
        /// Term of the last record.
        last_term: Term,
        /// The lsn that came.
        found: Lsn,
        /// Its term.
        term: Term,
    },
    /// A chunk of a snapshot over the limit.
    #[error("a snapshot chunk of {bytes} bytes is above the limit of {limit}")]
    ChunkTooLarge {
        /// Bytes of the chunk.
        bytes: usize,
        /// Most.
        limit: usize,
    },
    /// Snapshots are installed into an empty store only.
    #[error("{path} already holds {file}; restore into an empty state directory")]
    NotEmpty {
        /// The directory.
        path: String,
        /// One of the files found.
        file: String,
    },
    /// The store was stopped before it came to this.
    #[error("the store was stopped")]
    Stopped,
    /// The device failed or is full: what was being applied may be applied in part, so nothing is served any more.
    #[error("the device failed; the process must start again")]
    Device(#[from] engram_kernels::Error),
}

impl Error {
    /// The error of a failed write, creation or preallocation: a full disk has its own variant.
    pub(crate) fn write(operation: &'static str, path: String, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::DiskFull { operation, path },
            _ => Self::Io { operation, path, source },
        }
    }

    /// The error of a failed read.
    pub(crate) fn read(path: String, source: io::Error) -> Self {
        Self::Io { operation: "read", path, source }
    }
}

/// Ends the process when a sync failed, with a last line on stderr; passes everything else on.
///
/// Linux marks the pages of a failed fsync clean, so no retry can tell what reached the disk: the only sound answer is a
/// new process that recovers from what is really there. Production calls this around every write of the log and of a
/// snapshot; tests look at [`Error::SyncFailed`] instead.
///
/// # Errors
/// Every other error, unchanged.
pub fn abort_on_sync_failure<T>(result: Result<T, Error>) -> Result<T, Error> {
    if let Err(Error::SyncFailed { path, source }) = &result {
        // Not `eprintln`: it panics where stderr cannot be written, and that would keep this process alive.
        let _ = writeln!(
            io::stderr(),
            "fatal: failed to sync {path}: {source}; ending the process, the next start recovers from the disk"
        );
        std::process::abort();
    }
    result
}
