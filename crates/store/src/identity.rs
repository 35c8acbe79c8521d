//! Identity of a store: cluster, store id, shape, incarnation, and how the previous process ended.
//!
//! One sector, replaced atomically (temporary file, sync, rename, directory sync). Invariants: a store id is drawn once and never
//! over existing data; before a new process does anything else, the incarnation is incremented and the clean mark of the previous
//! process is erased, durably; one process at a time locks the directory.

use std::sync::Arc;

use engram_cluster::injected;
use engram_memory::{ClusterId, Incarnation, Shape, StoreId};

use crate::disk::reserve;
use crate::disk::{Lock, LockError, TEMPORARY_SUFFIX};
use crate::format::{self, Bytes};
use crate::wal::Position;
use crate::{Disk, Error, FileHead, snapshot_file, wal};

/// Name of the identity file.
const FILE_NAME: &str = "identity";
const MAGIC: [u8; 8] = *b"ENGRIDN\0";
/// One sector, so that a write is not torn; it is also replaced by rename.
const FILE_BYTES: usize = 512;

/// Kernel boot and volume mount of a process. If both are equal for two processes, the page cache was never lost in between.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    /// Boot id of the kernel; 0 = unknown, equal to no other.
    pub boot: u128,
    /// Identifies the mount of the volume: the pod UID, or 0 outside Kubernetes.
    pub mount: u128,
}

impl Origin {
    /// Returns the origin of this process, with the pod UID if there is one.
    pub fn current(mount: u128) -> Self {
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let digits: String = text.trim().chars().filter(|&digit| digit != '-').collect();
        Self { boot: u128::from_str_radix(&digits, 16).unwrap_or(0), mount }
    }

    fn same_boot(self, other: Self) -> bool {
        self.boot != 0 && (self == other || injected!(BootIdIgnored))
    }
}

/// Content of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Content {
    head: FileHead,
    incarnation: Incarnation,
    /// Whether that incarnation stopped gracefully with the log ending at `durable_end`.
    is_clean: bool,
    /// End of the log at the last graceful stop. Remains valid after the mark is erased: the log never ends before it.
    durable_end: Position,
    origin: Origin,
    /// First incarnation since which no written data has been lost.
    lossless_since: Incarnation,
}

/// Identity and lock of a store directory, held for the life of a process.
#[derive(Debug)]
pub struct Identity {
    content: Content,
    previous: Option<Content>,
    _lock: Lock,
}

impl Identity {
    /// Opens the directory: locks it, creates the identity at first start, increments the incarnation and erases the clean mark,
    /// all durable when this returns. Removes unfinished files of a previous process.
    ///
    /// # Errors
    /// [`Error::Locked`], [`Error::Unwritable`], [`Error::OtherCluster`], [`Error::OtherShape`],
    /// [`Error::UnknownFormat`], [`Error::Corrupt`], [`Error::IdentityMissing`] and those of the disk. Nothing was changed then,
    /// except that a lock file may have been created.
    pub fn open(disk: &Arc<dyn Disk>, cluster: ClusterId, shape: Shape, origin: Origin) -> Result<Self, Error> {
        let folder = || disk.describe("");
        let lock = disk.lock().map_err(|error| match error {
            LockError::Held { pid } => Error::Locked { path: folder(), pid },
            LockError::Io(source) => Error::Unwritable { path: folder(), source },
        })?;
        // Also on a full disk this start has to be recorded.
        reserve::release(&**disk)?;
        let names = disk.list().map_err(|source| Error::Io { operation: "list", path: folder(), source })?;
        let previous = if names.iter().any(|name| name == FILE_NAME) {
            let previous = read(&**disk)?;
            FileHead { cluster, store: previous.head.store, shape }.check(&previous.head, &disk.describe(FILE_NAME))?;
            Some(previous)
        } else if let Some(file) = names.iter().find(|name| is_data(name)) {
            return Err(Error::IdentityMissing { path: folder(), file: file.clone() });
        } else {
            None
        };
        for name in names.iter().filter(|name| is_unfinished(name)) {
            let failed = |source| Error::Io { operation: "remove", path: disk.describe(name), source };
            disk.remove(name).map_err(failed)?;
        }
        let store = previous.map_or_else(|| StoreId(disk.random()), |previous| previous.head.store);
        let incarnation = Incarnation(previous.map_or(0, |previous| previous.incarnation.0) + 1);
        // Until it is known that nothing was lost. Under the same boot and mount nothing can be, even if starts fail.
        let same_boot = previous.filter(|previous| previous.origin.same_boot(origin));
        let lossless_since = same_boot.map_or(incarnation, |previous| previous.lossless_since);
        let content = Content {
            head: FileHead { cluster, store, shape },
            incarnation,
            is_clean: injected!(MarkNotErased) && previous.is_some_and(|previous| previous.is_clean),
            durable_end: previous.map_or_else(Position::default, |previous| previous.durable_end),
            origin,
            lossless_since,
        };
        write(&**disk, &content)?;
        Ok(Self { content, previous, _lock: lock })
    }

    /// Returns the header of every file of this store.
    pub fn head(&self) -> FileHead {
        self.content.head
    }

    /// Returns the store id.
    pub fn store(&self) -> StoreId {
        self.content.head.store
    }

    /// Returns the incarnation of this process, from 1.
    pub fn incarnation(&self) -> Incarnation {
        self.content.incarnation
    }

    /// Returns the first incarnation since which no written data has been lost.
    pub const fn lossless_since(&self) -> Incarnation {
        self.content.lossless_since
    }

    /// Returns the end of the log if the previous process stopped gracefully.
    pub fn clean_end(&self) -> Option<Position> {
        self.previous.filter(|previous| previous.is_clean).map(|previous| previous.durable_end)
    }

    /// Returns the end of the log at the last graceful stop, however many starts ago, for [`wal::Options::sealed_at`]: a log that
    /// ends before it is damaged.
    pub fn durable_end(&self) -> Option<Position> {
        Some(self.content.durable_end).filter(|end| end.0 > 0 && !injected!(MarkBeforeFsync))
    }

    /// Whether no data written by the previous process can be lost: it stopped gracefully and the log ends there, or boot and mount
    /// are unchanged ([`wal::Wal::open`] has then synced the log).
    pub fn is_lossless(&self, recovered: &wal::Recovery) -> bool {
        let Some(previous) = self.previous else { return false };
        let is_unchecked = injected!(MarkNotErased) || injected!(MarkBeforeFsync);
        let is_clean_stop = self.clean_end().is_some_and(|end| end == recovered.end || is_unchecked);
        is_clean_stop || previous.origin.same_boot(self.content.origin)
    }

    /// Records durably whether the previous process lost no written data, and returns the first incarnation since which none has
    /// been lost.
    ///
    /// # Errors
    /// Those of the disk.
    pub(crate) fn record_lossless(&mut self, disk: &Arc<dyn Disk>, is_lossless: bool) -> Result<Incarnation, Error> {
        if let Some(previous) = self.previous.filter(|_| is_lossless) {
            self.content.lossless_since = previous.lossless_since;
            write(&**disk, &self.content)?;
        }
        Ok(self.content.lossless_since)
    }

    /// Writes the mark of a graceful stop after [`wal::Writer::close`] returned `end`, and unlocks the directory.
    ///
    /// # Errors
    /// Those of the disk: the next start then treats this stop as a crash, which loses no data.
    pub fn leave_clean_mark(mut self, disk: &Arc<dyn Disk>, end: Position) -> Result<(), Error> {
        (self.content.is_clean, self.content.durable_end) = (true, end);
        write(&**disk, &self.content)
    }
}

/// Whether a file contains data that a new identity would orphan.
fn is_data(name: &str) -> bool {
    !is_unfinished(name) && (wal::is_log_file(name) || snapshot_file::parse_name(name).is_some())
}

/// Whether a file is an unfinished file of the store.
fn is_unfinished(name: &str) -> bool {
    let Some(finished) = name.strip_suffix(TEMPORARY_SUFFIX) else { return false };
    finished == FILE_NAME || wal::is_log_file(finished) || snapshot_file::parse_name(finished).is_some()
}

fn encode(content: &Content) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(FILE_BYTES);
    format::encode(&MAGIC, &content.head, &mut bytes);
    bytes.extend_from_slice(&content.incarnation.0.to_le_bytes());
    bytes.extend_from_slice(&u32::from(content.is_clean).to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&content.durable_end.0.to_le_bytes());
    bytes.extend_from_slice(&content.origin.boot.to_le_bytes());
    bytes.extend_from_slice(&content.origin.mount.to_le_bytes());
    // 0 = this incarnation, as in files that predate this field.
    let earlier = content.lossless_since.0 * u64::from(content.lossless_since != content.incarnation);
    bytes.extend_from_slice(&earlier.to_le_bytes());
    bytes.resize(FILE_BYTES - 4, 0);
    bytes.extend_from_slice(&crc32c::crc32c(&bytes).to_le_bytes());
    bytes
}

fn decode(bytes: &[u8], path: &str) -> Result<Content, Error> {
    let corrupt = |what| Error::Corrupt { path: path.into(), offset: 0, what };
    let is_intact = |bytes: &[u8]| bytes.len() == FILE_BYTES && format::has_valid_crc(bytes);
    format::check_version(bytes, &MAGIC, path, is_intact)?;
    let (covered, _) = bytes.split_last_chunk::<4>().ok_or(corrupt("file is too short"))?;
    if !is_intact(bytes) {
        return Err(corrupt("checksum mismatch"));
    }
    let mut rest = Bytes(covered);
    let head = format::decode(&mut rest, &MAGIC, path)?;
    let mut read = || {
        let incarnation = Incarnation(rest.u64()?);
        let is_clean = match rest.u32()? {
            0 => false,
            1 => true,
            _ => return None,
        };
        rest.u32()?;
        let durable_end = Position(rest.u64()?);
        let origin = Origin { boot: rest.u128()?, mount: rest.u128()? };
        let lossless_since = match rest.u64()? {
            0 => incarnation,
            earlier => Incarnation(earlier),
        };
        Some(Content { head, incarnation, is_clean, durable_end, origin, lossless_since })
    };
    read().ok_or(corrupt("invalid values"))
}

fn read(disk: &dyn Disk) -> Result<Content, Error> {
    let path = disk.describe(FILE_NAME);
    let take = || {
        let file = disk.open(FILE_NAME)?;
        // One extra byte is enough to detect a longer file.
        let mut bytes = vec![0; file.len()?.min(FILE_BYTES as u64 + 1) as usize];
        file.read_at(0, &mut bytes)?;
        Ok(bytes)
    };
    let bytes = take().map_err(|source| Error::read(path.clone(), source))?;
    decode(&bytes, &path)
}

fn write(disk: &dyn Disk, content: &Content) -> Result<(), Error> {
    let temporary = format!("{FILE_NAME}{TEMPORARY_SUFFIX}");
    let path = disk.describe(FILE_NAME);
    let failed = |source: std::io::Error| match source.kind() {
        std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem => {
            Error::Unwritable { path: disk.describe(""), source }
        }
        _ => Error::write("write", path.clone(), source),
    };
    let _ = disk.remove(&temporary);
    let file = disk.create(&temporary).map_err(failed)?;
    file.write_at(0, &encode(content)).map_err(failed)?;
    let sync_failed = |source| Error::SyncFailed { path: path.clone(), source };
    file.sync_data().map_err(sync_failed)?;
    disk.rename(&temporary, FILE_NAME).map_err(failed)?;
    disk.sync_dir().map_err(sync_failed)
}
