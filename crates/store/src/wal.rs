//! The write-ahead log of one worker: every partition's records, in one sequence, under one sync.
//!
//! ```text
//!  engine:  Wal::append* -> Wal::seal -> Batch ──> Writer::write: header, checksums, pwrite, fdatasync ──> Position
//!  disk:    wal-<index>.log = head page (+ carried promises) | batch | batch | ... | preallocated zeros
//!  batch:   header { len, position, synced_through, prev_crc, commits, crc } | records | padding to a page
//! ```
//!
//! [`Wal`] gathers, on the engine's thread; [`Writer`] owns the files and may live on a thread of its own, so that the
//! next batch fills while this one is synced. In single-thread mode one caller uses both in turn.
//!
//! Invariants:
//! - All bytes of a batch, padding included, are under checksums that the segment's random uuid seeds: what another
//!   segment left on the medium never looks valid. `prev_crc` chains the batches of a segment.
//! - A batch begins on a page of its own: a torn write never reaches into what was acknowledged before.
//! - `synced_through` is what a sync had covered when the batch was written. Damage below the highest one found is
//!   corruption and refuses the start; damage above it ends the log there, in a segment whose successor says where it
//!   ended, and is reported. In mode `sync` that is the last batch at most.
//! - lsn is dense per partition, terms never fall; a divergent tail is dropped by a logged `Truncate`, never physically.
//! - Every segment begins with the newest promise and note of every partition, so deleting older segments forgets
//!   none. Whole segments are deleted only, the oldest first.

mod batch;
mod positions;
mod record;
mod recover;
mod segment;
#[cfg(test)]
mod tests;
mod writer;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use engram_memory::{Lsn, MAX_RECORD_BYTES, PartitionId, Term};

pub use batch::Batch;
pub use positions::Tail;
pub use recover::Recovery;
pub(crate) use segment::is_log_file;
pub use writer::{BACKGROUND_SYNC_MS, IDLE_SEAL_MS, Writer};

use crate::{Disk, Error, FileHead};
use positions::Positions;

/// Most bytes of records in one batch. Far above what a group commit gathers: a bound against faults, not a target.
pub const MAX_BATCH_BYTES: usize = 64 << 20;

/// What the log keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Partition.
    pub partition: PartitionId,
    /// Term of the primary that wrote it; of a promise, the promised term.
    pub term: Term,
    /// Place in the partition's log: of a command its own, otherwise as the body says.
    pub lsn: Lsn,
    /// The rest.
    pub body: Body<'a>,
}

/// Kinds of entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Body<'a> {
    /// An encoded record for the state machine; lsn is the last one plus 1.
    Command(&'a [u8]),
    /// Records above `lsn` of lower terms never were: replay does not show them.
    Truncate,
    /// The partition's replica here refuses terms below `term`; lsn is 0.
    Promise {
        /// Whether an entry of that term was accepted, not only a candidacy.
        seen: bool,
    },
    /// What is noted of the partition's copy here, in place of what was noted before; lsn is 0.
    Note(&'a [u8]),
    /// A snapshot at `lsn` took the place of the partition: replay shows nothing before, the log goes on after it.
    Installed,
}

/// When a write is acknowledged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Durability {
    /// After an fdatasync on every copy.
    #[default]
    Sync,
    /// In the page cache of every copy, synced within [`BACKGROUND_SYNC_MS`]; with one copy, as [`Self::Sync`].
    Replicated,
    /// In the page cache of the primary alone, synced within [`BACKGROUND_SYNC_MS`]. A loss of power may lose
    /// acknowledged writes.
    Async,
}

impl Durability {
    /// Whether a batch is synced before it counts as written, with `copies` copies of each partition.
    pub const fn syncs_first(self, copies: u32) -> bool {
        match self {
            Self::Sync => true,
            Self::Replicated => copies <= 1,
            Self::Async => false,
        }
    }
}

/// Settings of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Size of a segment; larger ones are deleted later, smaller ones are made more often. A batch that needs more gets a
    /// segment of its own size.
    pub segment_bytes: u64,
    /// When a batch counts as written.
    pub durability: Durability,
    /// Copies of each partition, this one included.
    pub copies: u32,
    /// Where the last orderly stop sealed the log ([`crate::Identity::durable_end`]): with it even the last batch, and a
    /// newest segment that is missing, are known to have been there.
    pub sealed_at: Option<Position>,
}

impl Default for Options {
    fn default() -> Self {
        Self { segment_bytes: 64 << 20, durability: Durability::Sync, copies: 1, sealed_at: None }
    }
}

/// Sees an entry, and what the log says is committed.
pub type Visit<'a> = dyn FnMut(Entry<'_>, &BTreeMap<PartitionId, (Term, Lsn)>) -> Result<(), Error> + 'a;

/// A place in the log: bytes of batches since its beginning, deleted ones included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(pub u64);

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// What the gathering and the writing half both know.
#[derive(Debug)]
struct Shared {
    /// End of what a sync has covered.
    synced: AtomicU64,
    /// End of what was written.
    written: AtomicU64,
    /// All segments, the oldest first; the last is the one being written.
    segments: Mutex<Vec<Contents>>,
}

/// What deletion has to know of a segment.
#[derive(Debug)]
struct Contents {
    index: u64,
    starts_at: u64,
    highest: BTreeMap<PartitionId, Lsn>,
}

/// The gathering half of the log.
pub struct Wal {
    disk: Arc<dyn Disk>,
    shared: Arc<Shared>,
    positions: Positions,
    gathering: Batch,
    spare: Vec<Batch>,
}

impl Wal {
    /// Opens the log of `disk`: checks all of it, shows its entries to `visit` in order, and begins a new segment behind
    /// it. A log that is not there is begun.
    ///
    /// `visit` sees [`Body::Truncate`] and [`Body::Installed`] too, but never what they undo. The caller holds the lock of
    /// the folder ([`crate::Identity::open`]).
    ///
    /// # Errors
    /// [`Error::Corrupt`] when bytes below the last known sync are damaged or missing: nothing was visited then. Errors
    /// of the head ([`Error::OtherCluster`], ...), of the disk, and of `visit`.
    pub fn open(
        disk: Arc<dyn Disk>,
        head: FileHead,
        options: Options,
        visit: &mut dyn FnMut(Entry<'_>) -> Result<(), Error>,
    ) -> Result<(Self, Writer, Recovery), Error> {
        Self::open_with(disk, head, options, &mut |entry, _| visit(entry))
    }

    /// [`Self::open`], telling `visit` beside each entry what all of the log says is committed ([`Recovery::commits`]).
    ///
    /// # Errors
    /// As there.
    pub fn open_with(
        disk: Arc<dyn Disk>,
        head: FileHead,
        options: Options,
        visit: &mut Visit<'_>,
    ) -> Result<(Self, Writer, Recovery), Error> {
        let recovered = recover::recover(&*disk, &head, options.sealed_at, visit)?;
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

    /// Adds an entry to the batch being gathered. Nothing is written yet.
    ///
    /// # Errors
    /// [`Error::RecordTooLarge`] above [`MAX_RECORD_BYTES`]; [`Error::BatchFull`] above [`MAX_BATCH_BYTES`]: seal, then
    /// append again; [`Error::NotDense`] when it does not continue its partition's log. Nothing is changed then.
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

    /// Bytes of records gathered since the last seal.
    pub fn gathered_bytes(&self) -> usize {
        self.gathering.record_bytes()
    }

    /// Ends the batch being gathered, with what is known to be committed; `None` when nothing was appended.
    pub fn seal(&mut self, commits: &[(PartitionId, Term, Lsn)]) -> Option<Batch> {
        if self.gathering.is_empty() {
            return None;
        }
        let next = self.spare.pop().unwrap_or_default();
        let mut batch = std::mem::replace(&mut self.gathering, next);
        batch.seal(commits);
        Some(batch)
    }

    /// Takes a written batch back, to use its memory again.
    pub fn recycle(&mut self, mut batch: Batch) {
        // Two are in flight at most: one is gathered while one is written.
        const KEPT: usize = 2;
        // A rare giant does not stay.
        const KEPT_BYTES: usize = 4 << 20;
        if self.spare.len() < KEPT && batch.capacity() <= KEPT_BYTES {
            batch.clear();
            self.spare.push(batch);
        }
    }

    /// Takes back a batch that could not be written ([`Error::DiskFull`], [`Error::Io`]), and what is being gathered:
    /// the partitions stand where they stood before it. Of several such batches the last one goes first.
    pub fn withdraw(&mut self, batch: Batch) {
        let mut gathering = std::mem::take(&mut self.gathering);
        gathering.restore(&mut self.positions);
        batch.restore(&mut self.positions);
        gathering.clear();
        self.gathering = gathering;
        self.recycle(batch);
    }

    /// Where a partition's log stands with everything appended; `None` when the log holds nothing of it.
    pub fn tail(&self, partition: PartitionId) -> Option<Tail> {
        self.positions.get(partition)
    }

    /// Lets a partition whose records the log no longer holds go on behind `tail`: it was recovered from a snapshot.
    /// No effect on a partition that the log knows.
    pub fn continue_after(&mut self, partition: PartitionId, tail: Tail) {
        self.positions.continue_after(partition, tail);
    }

    /// End of what was written.
    pub fn written(&self) -> Position {
        Position(self.shared.written.load(Ordering::Acquire))
    }

    /// End of what a sync has covered.
    pub fn synced(&self) -> Position {
        Position(self.shared.synced.load(Ordering::Acquire))
    }

    /// Whether everything before `position` would survive a loss of power.
    pub fn durable(&self, position: Position) -> bool {
        position <= self.synced()
    }

    /// Bytes of batches that the log holds.
    pub fn bytes(&self) -> u64 {
        let segments = self.shared.segments.lock().expect("no panic while the lock is held");
        self.written().0 - segments.first().map_or(0, |oldest| oldest.starts_at)
    }

    /// Deletes the oldest segments that hold no command above `covered` (per partition the lsn that the *older* of its
    /// two snapshots holds). A partition that is not named keeps everything. Returns the bytes of batches deleted.
    ///
    /// # Errors
    /// Of the disk; what was deleted stays deleted.
    pub fn delete_below(&self, covered: &BTreeMap<PartitionId, Lsn>) -> Result<u64, Error> {
        let mut deleted = 0;
        while let Some((index, bytes)) = self.oldest_if_below(covered) {
            let name = segment::name(index);
            let failed = |source| Error::Io { operation: "remove", path: self.disk.describe(&name), source };
            self.disk.remove(&name).map_err(failed)?;
            // One by one: a removal that overtook an older one would look like a segment that is missing.
            self.disk.sync_dir().map_err(failed)?;
            self.shared.segments.lock().expect("no panic while the lock is held").remove(0);
            deleted += bytes;
        }
        Ok(deleted)
    }

    /// Index and bytes of the oldest segment when it may be deleted. The newest never is. The lock is not held while a
    /// file is removed: the writer takes it at every batch.
    fn oldest_if_below(&self, covered: &BTreeMap<PartitionId, Lsn>) -> Option<(u64, u64)> {
        let segments = self.shared.segments.lock().expect("no panic while the lock is held");
        let [oldest, next, ..] = &segments[..] else { return None };
        let is_covered =
            |(partition, lsn): (&PartitionId, &Lsn)| covered.get(partition).is_some_and(|held| held >= lsn);
        oldest.highest.iter().all(is_covered).then_some((oldest.index, next.starts_at - oldest.starts_at))
    }
}
