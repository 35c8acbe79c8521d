//! Who this disk is: cluster, store, shape, how often a process has started on it, and how the last one ended.
//!
//! One sector, replaced as a whole (temporary file, sync, rename, sync of the folder). Invariants: a store id is drawn
//! once and never over existing data; the incarnation rises, and the clean mark of the process before is erased, durably,
//! before a new process does anything; one process at a time holds the folder.

use std::sync::Arc;

use engram_cluster::replica::{Defect, is_planted};
use engram_memory::{ClusterId, Incarnation, Shape, StoreId};

use crate::disk::{Lock, LockError, TEMPORARY_SUFFIX};
use crate::format::{self, Bytes};
use crate::wal::Position;
use crate::{Disk, Error, FileHead, snapshot_file, wal};

/// Name of the file.
const FILE_NAME: &str = "identity";
const MAGIC: [u8; 8] = *b"ENGRIDN\0";
/// One sector: written whole or not at all, and replaced by rename besides.
const FILE_BYTES: usize = 512;

/// Which run of the machine, and which mount of the volume, a process lives in. Equal ones mean that the page cache never
/// went away in between.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    /// Boot id of the kernel; 0 = unknown, equal to nothing.
    pub boot: u128,
    /// What stays equal while the volume stays mounted: the UID of the pod, 0 outside Kubernetes.
    pub mount: u128,
}

impl Origin {
    /// The running kernel, with the pod's UID where there is one.
    pub fn current(mount: u128) -> Self {
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let digits: String = text.trim().chars().filter(|&digit| digit != '-').collect();
        Self { boot: u128::from_str_radix(&digits, 16).unwrap_or(0), mount }
    }

    fn same_boot(self, other: Self) -> bool {
        self.boot != 0 && (self == other || is_planted(Defect::BootIdIgnored))
    }
}

/// What the file holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Content {
    head: FileHead,
    incarnation: Incarnation,
    /// Whether that incarnation ended in order, and the log at `durable_end`.
    is_clean: bool,
    /// Where the last orderly stop ended the log. It stays true after the mark is erased: the log never shrinks below.
    durable_end: Position,
    origin: Origin,
    /// First incarnation from which on nothing that was written has been lost.
    lossless_since: Incarnation,
}

/// The identity of this disk, and its lock, for the life of a process.
#[derive(Debug)]
pub struct Identity {
    content: Content,
    before: Option<Content>,
    _lock: Lock,
}

impl Identity {
    /// Takes the folder for this process: locks it, makes the identity at the first start, raises the incarnation and
    /// erases the clean mark, all durable when this returns. Removes files that a process before left unfinished.
    ///
    /// # Errors
    /// [`Error::Locked`], [`Error::Unwritable`], [`Error::OtherCluster`], [`Error::OtherShape`],
    /// [`Error::UnknownFormat`], [`Error::Corrupt`], [`Error::IdentityMissing`] and those of the disk. Nothing was
    /// changed then, but that a lock file may have been made.
    pub fn open(disk: &Arc<dyn Disk>, cluster: ClusterId, shape: Shape, origin: Origin) -> Result<Self, Error> {
        let folder = || disk.describe("");
        let lock = disk.lock().map_err(|error| match error {
            LockError::Held { pid } => Error::Locked { path: folder(), pid },
            LockError::Io(source) => Error::Unwritable { path: folder(), source },
        })?;
        let listed = disk.list().map_err(|source| Error::Io { operation: "list", path: folder(), source })?;
        let before = if listed.iter().any(|name| name == FILE_NAME) {
            let before = read(&**disk)?;
            FileHead { cluster, store: before.head.store, shape }.check(&before.head, &disk.describe(FILE_NAME))?;
            Some(before)
        } else if let Some(file) = listed.iter().find(|name| is_data(name)) {
            return Err(Error::IdentityMissing { path: folder(), file: file.clone() });
        } else {
            None
        };
        for name in listed.iter().filter(|name| is_unfinished(name)) {
            let failed = |source| Error::Io { operation: "remove", path: disk.describe(name), source };
            disk.remove(name).map_err(failed)?;
        }
        let store = before.map_or_else(|| StoreId(disk.random()), |before| before.head.store);
        let incarnation = Incarnation(before.map_or(0, |before| before.incarnation.0) + 1);
        // Until it is known that nothing was lost. Under the same kernel and mount nothing can be, however often a start fails.
        let still = before.filter(|before| before.origin.same_boot(origin));
        let lossless_since = still.map_or(incarnation, |before| before.lossless_since);
        let content = Content {
            head: FileHead { cluster, store, shape },
            incarnation,
            is_clean: is_planted(Defect::MarkNotErased) && before.is_some_and(|before| before.is_clean),
            durable_end: before.map_or_else(Position::default, |before| before.durable_end),
            origin,
            lossless_since,
        };
        write(&**disk, &content)?;
        Ok(Self { content, before, _lock: lock })
    }

    /// What heads every file of this store.
    pub fn head(&self) -> FileHead {
        self.content.head
    }

    /// The disk.
    pub fn store(&self) -> StoreId {
        self.content.head.store
    }

    /// This process start, from 1.
    pub fn incarnation(&self) -> Incarnation {
        self.content.incarnation
    }

    /// First incarnation from which on nothing that was written on this disk has been lost.
    pub const fn lossless_since(&self) -> Incarnation {
        self.content.lossless_since
    }

    /// Where the process before ended the log in order; `None` at the first start and after any other end.
    pub fn clean_end(&self) -> Option<Position> {
        self.before.filter(|before| before.is_clean).map(|before| before.durable_end)
    }

    /// Where the log ended at the last orderly stop, however many starts ago: a log that ends before is damaged. Give it
    /// to [`wal::Options::sealed_at`].
    pub fn durable_end(&self) -> Option<Position> {
        Some(self.content.durable_end).filter(|end| end.0 > 0 && !is_planted(Defect::MarkBeforeFsync))
    }

    /// Whether nothing that the process before had written can be lost: it ended in order and the log was found to end
    /// there, or the kernel and the mount are still the same ([`wal::Wal::open`] has synced the log then).
    pub fn lost_nothing(&self, recovered: &wal::Recovery) -> bool {
        let Some(before) = self.before else { return false };
        let unread = is_planted(Defect::MarkNotErased) || is_planted(Defect::MarkBeforeFsync);
        let clean = self.clean_end().is_some_and(|end| end == recovered.end || unread);
        clean || before.origin.same_boot(self.content.origin)
    }

    /// Says, durably, whether the process before lost nothing that it had written, and returns the first incarnation from which on
    /// nothing has been lost.
    ///
    /// # Errors
    /// Those of the disk.
    pub(crate) fn settle_lossless(&mut self, disk: &Arc<dyn Disk>, lost_nothing: bool) -> Result<Incarnation, Error> {
        if let Some(before) = self.before.filter(|_| lost_nothing) {
            self.content.lossless_since = before.lossless_since;
            write(&**disk, &self.content)?;
        }
        Ok(self.content.lossless_since)
    }

    /// Leaves the mark of an orderly stop, after [`wal::Writer::close`] returned `end`, and frees the folder.
    ///
    /// # Errors
    /// Those of the disk: the next start then treats this one as a crash, which costs time and no data.
    pub fn leave_clean_mark(mut self, disk: &Arc<dyn Disk>, end: Position) -> Result<(), Error> {
        (self.content.is_clean, self.content.durable_end) = (true, end);
        write(&**disk, &self.content)
    }
}

/// Whether a file would be orphaned by a new identity.
fn is_data(name: &str) -> bool {
    !is_unfinished(name) && (wal::is_log_file(name) || snapshot_file::parse_name(name).is_some())
}

/// Whether a file is one of ours that was being written.
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
    // 0 = this incarnation, as files say that were written before there was a number here.
    let earlier = content.lossless_since.0 * u64::from(content.lossless_since != content.incarnation);
    bytes.extend_from_slice(&earlier.to_le_bytes());
    bytes.resize(FILE_BYTES - 4, 0);
    bytes.extend_from_slice(&crc32c::crc32c(&bytes).to_le_bytes());
    bytes
}

fn decode(bytes: &[u8], path: &str) -> Result<Content, Error> {
    let corrupt = |what| Error::Corrupt { path: path.into(), offset: 0, what };
    format::check_version(bytes, &MAGIC, path)?;
    let (covered, crc) = bytes.split_last_chunk().ok_or(corrupt("it is too short"))?;
    if bytes.len() != FILE_BYTES || crc32c::crc32c(covered) != u32::from_le_bytes(*crc) {
        return Err(corrupt("its checksum is wrong"));
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
    read().ok_or(corrupt("its values are impossible"))
}

fn read(disk: &dyn Disk) -> Result<Content, Error> {
    let path = disk.describe(FILE_NAME);
    let take = || {
        let file = disk.open(FILE_NAME)?;
        // A longer file is wrong; one byte more is enough to see it.
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
