//! The seam to files: one flat folder of named files, and nothing that decides.
//!
//! [`FileDisk`] is a folder of the machine. [`SimDisk`] is one in memory that loses power, tears writes, flips bits and
//! fills up as a seed says, so that a simulator runs the real log, snapshots and recovery on one thread. Both keep the
//! same promise and no more: bytes of a file are durable after [`File::sync_data`], names after [`Disk::sync_dir`].

mod file;
mod sim;

use std::any::Any;
use std::io;

pub use file::FileDisk;
pub use sim::SimDisk;

/// Names of files that are being written end so; whatever still has such a name after a crash is removed.
pub const TEMPORARY_SUFFIX: &str = ".tmp";

/// A folder of files.
pub trait Disk: Send + Sync {
    /// Makes a new, empty file. Fails when the name exists.
    fn create(&self, name: &str) -> io::Result<Box<dyn File>>;

    /// Opens a file for reading and writing.
    fn open(&self, name: &str) -> io::Result<Box<dyn File>>;

    /// Names of all files, sorted.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Gives a file a new name, in place of the file that had it.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Makes creations, renames and removals durable.
    fn sync_dir(&self) -> io::Result<()>;

    /// Takes the folder for this process, until the lock is dropped.
    fn lock(&self) -> Result<Lock, LockError>;

    /// A random number, for identities of stores and segments; a simulated disk draws it from its seed.
    fn random(&self) -> u128;

    /// The path that a person would look for.
    fn describe(&self, name: &str) -> String;
}

/// An open file.
pub trait File: Send + Sync {
    /// Length in bytes.
    fn len(&self) -> io::Result<u64>;

    /// Whether it has no bytes.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Fills `bytes` from `offset`; fails when the file ends before.
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;

    /// Writes all of `bytes` at `offset`.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Takes the space of `bytes` from the device, so that later writes below it do not find it full; they read as zero
    /// (or, on a device that lies, as anything: nothing may depend on it).
    fn preallocate(&self, bytes: u64) -> io::Result<()>;

    /// Cuts the file to `bytes`.
    fn truncate(&self, bytes: u64) -> io::Result<()>;

    /// Makes everything written so far durable, and the length with it.
    fn sync_data(&self) -> io::Result<()>;
}

/// Holds a folder for this process while it lives.
pub struct Lock(#[allow(dead_code, reason = "held for its drop")] Box<dyn Any + Send + Sync>);

impl std::fmt::Debug for Lock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Lock")
    }
}

/// Why a folder was not locked.
#[derive(Debug)]
pub enum LockError {
    /// A process has it.
    Held {
        /// Which, when it has said so.
        pid: Option<u32>,
    },
    /// The lock file cannot be made.
    Io(io::Error),
}
