//! Write-ahead log of a worker: the records of all partitions in one sequence, with one sync per batch.
//!
//! ```text
//!  engine:  Wal::append* -> Wal::seal -> Batch ──> Writer::write: header, checksums, pwrite, fdatasync ──> Position
//!  disk:    wal-<index>.log = head page (+ carried promises) | batch | batch | ... | preallocated zeros
//!  batch:   header { len, position, synced_through, prev_crc, commits, crc } | records | padding to a page
//! ```
//!
//! [`Wal`] fills batches on the engine thread; [`Writer`] owns the files and may run on its own thread, so that the next batch fills
//! while the current one is synced. In single-thread mode one caller uses both in turn.
//!
//! Invariants:
//! - All bytes of a batch, including padding, are covered by checksums seeded with the segment's random uuid: stale data of another
//!   segment never looks valid. `prev_crc` chains the batches of a segment.
//! - A batch begins on its own page: a torn write never affects acknowledged data.
//! - `synced_through` is the synced position at the time the batch was written. Damage below the highest one found is corruption
//!   and fails the start; damage above it ends the log there and is reported. In mode `sync` that is at most the last batch.
//! - LSNs are dense per partition, terms never fall; a divergent tail is removed by a logged `Truncate`, never physically.
//! - Every segment begins with the newest promise and note of every partition, so deleting older segments loses none. Only whole
//!   segments are deleted, oldest first.

mod batch;
mod positions;
mod record;
mod recovery;
mod segment;
#[cfg(test)]
mod tests;
mod writer;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use engram_memory::{Lsn, MAX_RECORD_BYTES, PartitionId, Term};
use parking_lot::Mutex;

pub use batch::Batch;
pub use positions::Tail;
pub use recovery::Recovery;
pub(crate) use segment::is_log_file;
pub use writer::{BACKGROUND_SYNC_MS, IDLE_SEAL_MS, Writer};

use crate::{Disk, Error, FileHead};
use positions::Positions;

/// Most bytes of records in one batch. Far above a usual group commit: a bound against faults, not a target.
pub const MAX_BATCH_BYTES: usize = 64 << 20;

/// Entry of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Partition.
    pub partition: PartitionId,
    /// Term of the primary that wrote it; for a promise, the promised term.
    pub term: Term,
    /// LSN of a command; otherwise as defined by the body.
    pub lsn: Lsn,
    /// Kind and payload.
    pub body: Body<'a>,
}

/// Kinds of entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Body<'a> {
    /// An encoded record for the state machine; its LSN is the last one plus 1.
    Command(&'a [u8]),
    /// Removes records above `lsn` of lower terms: replay skips them.
    Truncate,
    /// The partition's replica here rejects terms below `term`; LSN is 0.
    Promise {
        /// Whether a map entry of that term was accepted, not only a candidacy.
        accepted: bool,
    },
    /// Damage note of the partition's replica here, replacing the previous one; LSN is 0.
    Note(&'a [u8]),
    /// A snapshot at `lsn` replaced the partition: replay skips everything before, and the log continues after it.
    Installed,
}

/// When a write is acknowledged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Durability {
    /// After an fdatasync on every in-sync replica.
    #[default]
    Sync,
    /// In the page cache of every in-sync replica, synced within [`BACKGROUND_SYNC_MS`]; with one replica, as [`Self::Sync`].
    Replicated,
    /// In the page cache of the primary only, synced within [`BACKGROUND_SYNC_MS`]. A power loss may lose acknowledged writes.
    Async,
}

impl Durability {
    /// Whether a batch is synced before it counts as written, with `replicas` replicas of each partition.
    pub const fn syncs_first(self, replicas: u32) -> bool {
        match self {
            Self::Sync => true,
            Self::Replicated => replicas <= 1,
            Self::Async => false,
        }
    }
}

/// Options of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Size of a segment; larger ones delay deletion, smaller ones are created more often. A larger batch gets a segment of its own
    /// size.
    pub segment_bytes: u64,
    /// When a batch counts as written.
    pub durability: Durability,
    /// Replicas of each partition, including this one.
    pub replicas: u32,
    /// End of the log at the last graceful stop ([`crate::Identity::durable_end`]): allows to detect a lost last batch and a missing
    /// newest segment.
    pub sealed_at: Option<Position>,
}

impl Default for Options {
    fn default() -> Self {
        Self { segment_bytes: 64 << 20, durability: Durability::Sync, replicas: 1, sealed_at: None }
    }
}

/// Visits an entry, with the commits recorded in the log.
pub type Visit<'a> = dyn FnMut(Entry<'_>, &BTreeMap<PartitionId, (Term, Lsn)>) -> Result<(), Error> + 'a;

/// Position in the log: bytes of batches since its beginning, including deleted ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(pub u64);

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// State shared by [`Wal`] and [`Writer`].
#[derive(Debug)]
struct Shared {
    /// End of the synced part.
    synced: AtomicU64,
    /// End of the written part.
    written: AtomicU64,
    /// All segments, oldest first; the last one is being written.
    segments: Mutex<Vec<SegmentContents>>,
}

/// Content of a segment, for deletion.
#[derive(Debug)]
struct SegmentContents {
    index: u64,
    starts_at: u64,
    highest: BTreeMap<PartitionId, Lsn>,
}

/// The log as seen by the engine: fills batches.
pub struct Wal {
    disk: Arc<dyn Disk>,
    shared: Arc<Shared>,
    positions: Positions,
    gathering: Batch,
    spare: Vec<Batch>,
}

impl Wal {
    /// Opens the log of `disk`: verifies it, passes its entries to `visit` in order, and starts a new segment after it. A missing log
    /// is created.
    ///
    /// `visit` also gets [`Body::Truncate`] and [`Body::Installed`], but not the entries that they undo. The caller holds the lock of
    /// the directory ([`crate::Identity::open`]).
    ///
    /// # Errors
    /// [`Error::Corrupt`] if bytes below the last known sync are damaged or missing: nothing was visited then. Errors of the header
    /// ([`Error::OtherCluster`], ...), of the disk, and of `visit`.
    pub fn open(
        disk: Arc<dyn Disk>,
        head: FileHead,
        options: Options,
        visit: &mut dyn FnMut(Entry<'_>) -> Result<(), Error>,
    ) -> Result<(Self, Writer, Recovery), Error> {
        Self::open_with(disk, head, options, &mut |entry, _| visit(entry))
    }

    /// As [`Self::open`], and passes to `visit` the commits recorded in the whole log ([`Recovery::commits`]).
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_with(
        disk: Arc<dyn Disk>,
        head: FileHead,
        options: Options,
        visit: &mut Visit<'_>,
    ) -> Result<(Self, Writer, Recovery), Error> {
        let recovered = recovery::recover(&*disk, &head, options.sealed_at, visit)?;
        let recovery = recovered.recovery;
        let shared = Arc::new(Shared {
            synced: AtomicU64::new(recovery.end.0),
            written: AtomicU64::new(recovery.end.0),
            segments: Mutex::new(recovered.segments),
        });
        let writer = Writer::begin(Arc::clone(&disk), head, options, Arc::clone(&shared), recovered.next)?;
        let wal = Self { disk, shared, positions: recovered.positions, gathering: Batch::default(), spare: Vec::new() };
        Ok((wal, writer, recovery))
    }

    /// Adds an entry to the current batch. Nothing is written yet.
    ///
    /// # Errors
    /// [`Error::RecordTooLarge`] above [`MAX_RECORD_BYTES`]; [`Error::BatchFull`] above [`MAX_BATCH_BYTES`]: seal, then append again;
    /// [`Error::NotDense`] if it does not continue its partition's log. Nothing is changed then.
    pub fn append(&mut self, entry: &Entry<'_>) -> Result<(), Error> {
        let payload = entry.body.payload().len();
        if payload > MAX_RECORD_BYTES {
            return Err(Error::RecordTooLarge { bytes: payload, limit: MAX_RECORD_BYTES });
        }
        let bytes = self.gathering.record_bytes() + record::HEADER_BYTES + payload;
        if bytes > MAX_BATCH_BYTES {
            return Err(Error::BatchFull { bytes, limit: MAX_BATCH_BYTES });
        }
        let before = self.positions.get(entry.partition);
        self.positions.admit(entry)?;
        self.gathering.push(entry, before);
        Ok(())
    }

    /// Seals the current batch with the known commits; `None` if it is empty.
    pub fn seal(&mut self, commits: &[(PartitionId, Term, Lsn)]) -> Option<Batch> {
        if self.gathering.is_empty() {
            return None;
        }
        let next = self.spare.pop().unwrap_or_default();
        let mut batch = std::mem::replace(&mut self.gathering, next);
        batch.seal(commits);
        Some(batch)
    }

    /// Takes back a written batch to reuse its memory.
    pub fn recycle(&mut self, mut batch: Batch) {
        // At most two are in use: one fills while one is written.
        const KEPT: usize = 2;
        // Large batches are rare and not kept.
        const KEPT_BYTES: usize = 4 << 20;
        if self.spare.len() < KEPT && batch.capacity() <= KEPT_BYTES {
            batch.clear();
            self.spare.push(batch);
        }
    }

    /// Withdraws a batch that failed to be written ([`Error::DiskFull`], [`Error::Io`]), and the current batch: the positions of the
    /// partitions are restored. Several such batches are withdrawn in reverse order.
    pub fn withdraw(&mut self, batch: Batch) {
        let mut gathering = std::mem::take(&mut self.gathering);
        gathering.restore(&mut self.positions);
        batch.restore(&mut self.positions);
        gathering.clear();
        self.gathering = gathering;
        self.recycle(batch);
    }

    /// Returns the end of a partition's log including appended entries; `None` if the log has none of it.
    pub fn tail(&self, partition: PartitionId) -> Option<Tail> {
        self.positions.get(partition)
    }

    /// Continues a partition after `tail`, if the log has no records of it: it was recovered from a snapshot.
    pub fn continue_after(&mut self, partition: PartitionId, tail: Tail) {
        self.positions.continue_after(partition, tail);
    }

    /// Returns the end of the written part.
    pub fn written(&self) -> Position {
        Position(self.shared.written.load(Ordering::Acquire))
    }

    /// Returns the end of the synced part.
    pub fn synced(&self) -> Position {
        Position(self.shared.synced.load(Ordering::Acquire))
    }

    /// Whether everything before `position` survives a power loss.
    pub fn durable(&self, position: Position) -> bool {
        position <= self.synced()
    }

    /// Returns the bytes of batches in the log.
    pub fn bytes(&self) -> u64 {
        let segments = self.shared.segments.lock();
        self.written().0 - segments.first().map_or(0, |oldest| oldest.starts_at)
    }

    /// Deletes the oldest segments without a command above `covered` (per partition the LSN of the *older* of its two snapshots). A
    /// partition without an entry keeps everything. Returns the bytes of batches deleted.
    ///
    /// # Errors
    /// Those of the disk; segments may have been deleted before.
    pub fn delete_below(&self, covered: &BTreeMap<PartitionId, Lsn>) -> Result<u64, Error> {
        let mut deleted = 0;
        while let Some((index, bytes)) = self.oldest_if_below(covered) {
            let name = segment::name(index);
            let failed = |source| Error::Io { operation: "remove", path: self.disk.describe(&name), source };
            self.disk.remove(&name).map_err(failed)?;
            // One by one: a reordered removal would look like a missing segment.
            self.disk.sync_dir().map_err(failed)?;
            self.shared.segments.lock().remove(0);
            deleted += bytes;
        }
        Ok(deleted)
    }

    /// Returns index and bytes of the oldest segment if it may be deleted; the newest never is. The lock is not held while a file is
    /// removed, since the writer takes it for every batch.
    fn oldest_if_below(&self, covered: &BTreeMap<PartitionId, Lsn>) -> Option<(u64, u64)> {
        let segments = self.shared.segments.lock();
        let [oldest, next, ..] = &segments[..] else { return None };
        let is_covered =
            |(partition, lsn): (&PartitionId, &Lsn)| covered.get(partition).is_some_and(|held| held >= lsn);
        oldest.highest.iter().all(is_covered).then_some((oldest.index, next.starts_at - oldest.starts_at))
    }
}
