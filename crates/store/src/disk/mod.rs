//! File access of the store: one flat directory of named files.
//!
//! [`FileDisk`] is a local directory. [`SimDisk`] is an in-memory one that loses power, tears writes, flips bits and fills up
//! according to a seed, so that a simulator runs the real log, snapshots and recovery on one thread. Both guarantee only that
//! file content is durable after [`File::sync_data`], and names after [`Disk::sync_dir`].

mod file;
pub(crate) mod reserve;
mod sim;

use std::any::Any;
use std::io;

pub use file::FileDisk;
pub use sim::SimDisk;

/// Suffix of files being written; files with this suffix are removed after a crash.
pub const TEMPORARY_SUFFIX: &str = ".tmp";

/// A directory of files.
pub trait Disk: Send + Sync {
    /// Creates a new, empty file. Fails if the name exists.
    fn create(&self, name: &str) -> io::Result<Box<dyn File>>;

    /// Opens a file for reading and writing.
    fn open(&self, name: &str) -> io::Result<Box<dyn File>>;

    /// Lists the names of all files, sorted.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Renames a file, replacing an existing one.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Makes creations, renames and removals durable.
    fn sync_dir(&self) -> io::Result<()>;

    /// Locks the directory for this process until the lock is dropped.
    fn lock(&self) -> Result<Lock, LockError>;

    /// Returns a random number for store and segment ids; a simulated disk derives it from its seed.
    fn random(&self) -> u128;

    /// Returns the path of a file for messages.
    fn describe(&self, name: &str) -> String;
}

/// An open file.
pub trait File: Send + Sync {
    /// Returns the length in bytes.
    fn len(&self) -> io::Result<u64>;

    /// Whether the file is empty.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Fills `bytes` from `offset`; fails if the file is too short.
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;

    /// Writes all of `bytes` at `offset`.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Reserves `bytes` of disk space, so that later writes below it do not fail for lack of space. Reserved bytes read as zero
    /// (or, on a faulty device, as anything: nothing may depend on it).
    fn preallocate(&self, bytes: u64) -> io::Result<()>;

    /// Truncates the file to `bytes`.
    fn truncate(&self, bytes: u64) -> io::Result<()>;

    /// Makes content and length durable.
    fn sync_data(&self) -> io::Result<()>;
}

/// Lock of a directory; released on drop.
pub struct Lock(#[allow(dead_code, reason = "held for its drop")] Box<dyn Any + Send + Sync>);

impl std::fmt::Debug for Lock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Lock")
    }
}

/// Why a directory was not locked.
#[derive(Debug)]
pub enum LockError {
    /// Another process holds the lock.
    Held {
        /// PID of that process, if known.
        pid: Option<u32>,
    },
    /// The lock file cannot be created.
    Io(io::Error),
}
