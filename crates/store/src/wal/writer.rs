//! Writer of the log: completes headers, writes, syncs, creates segments, seals.
//!
//! One header write, one body write and one fdatasync per batch. A failed write leaves the log unchanged, so the batch may be
//! retried or withdrawn; after a failed sync the log must not be used any more.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use engram_cluster::injected;

use super::batch::{Batch, CarryOver, Link};
use super::recovery::NextSegment;
use super::segment::{Head, Segment};
use super::{Options, Position, SegmentContents, Shared};
use crate::{Disk, Error, FileHead};

/// Milliseconds after which written data is synced in modes `replicated` and `async`.
pub const BACKGROUND_SYNC_MS: u64 = 50;
/// Milliseconds without a write after which an empty batch seals the last one, so that damage to it is distinguished from a torn
/// write.
pub const IDLE_SEAL_MS: u64 = 1_000;

/// Size of the first segment on a full disk: enough for what partitions log when they are served. Writes then fail until there is
/// space for the next segment.
const MIN_SEGMENT_BYTES: u64 = 256 << 10;

/// Writer of the log. Times are of [`crate::Clock::elapsed_ms`]. Its fields are the position in the open segment and what is due there: they
/// change together with each batch, therefore more than a dozen.
pub struct Writer {
    disk: Arc<dyn Disk>,
    file_head: FileHead,
    options: Options,
    shared: Arc<Shared>,
    segment: Segment,
    /// End of the written part.
    end: u64,
    /// End of the synced part.
    synced: u64,
    /// Checksum of the last header in the segment.
    chain: u32,
    carried: CarryOver,
    header: Vec<u8>,
    sealed: bool,
    last_write_ms: u64,
    unsynced_since_ms: Option<u64>,
    sync_failed: bool,
}

impl Writer {
    /// Creates a segment after the recovered log.
    pub(super) fn begin(
        disk: Arc<dyn Disk>,
        file_head: FileHead,
        options: Options,
        shared: Arc<Shared>,
        next: NextSegment,
    ) -> Result<Self, Error> {
        let head = Head { uuid: disk.random(), index: next.index, starts_at: next.starts_at, carried: 0 };
        // On a full disk the new segment needs the unused space of the old one.
        if let Some(before) = &next.before {
            trim(before, next.starts_at + next.dropped_bytes);
        }
        let create = |bytes| create_with_space(&*disk, &file_head, head, bytes, 0, &next.carried);
        let (segment, chain) = match create(options.segment_bytes) {
            Err(Error::DiskFull { .. }) => create(MIN_SEGMENT_BYTES.min(options.segment_bytes))?,
            created => created?,
        };
        if let Some(before) = next.before {
            trim(&before, next.starts_at);
        }
        let mut writer = Self {
            disk,
            file_head,
            options,
            shared,
            segment,
            end: next.starts_at,
            synced: next.starts_at,
            chain,
            carried: next.carried,
            header: Vec::new(),
            sealed: true,
            last_write_ms: 0,
            unsynced_since_ms: None,
            sync_failed: false,
        };
        writer.register_segment();
        Ok(writer)
    }

    /// Writes a batch, and syncs it if the mode requires; it may be acknowledged when this returns. Returns the end of the batch.
    ///
    /// # Errors
    /// [`Error::DiskFull`] or [`Error::Io`]: nothing is acknowledged and the log is unchanged: retry the batch, or
    /// [`super::Wal::withdraw`] it (until then recovery after a crash may find it complete). [`Error::SyncFailed`]: the process must
    /// abort, see [`crate::abort_on_sync_failure`]; every later call fails too.
    pub fn write(&mut self, batch: &Batch, now_ms: u64) -> Result<Position, Error> {
        self.check_sound()?;
        if !self.fits(batch) {
            self.roll(batch.len_bytes())?;
        }
        self.put(batch)?;
        self.sealed = false;
        self.last_write_ms = now_ms;
        self.unsynced_since_ms.get_or_insert(now_ms);
        self.carried.merge(batch.carried());
        self.note_contents(batch);
        if self.options.durability.syncs_first(self.options.replicas) {
            self.sync()?;
        }
        Ok(Position(self.end))
    }

    /// Syncs and seals what is due by `now_ms`. Call it after [`Self::wait_ms`] without a batch.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn tick(&mut self, now_ms: u64) -> Result<(), Error> {
        self.check_sound()?;
        if self.unsynced_since_ms.is_some_and(|since| now_ms.saturating_sub(since) >= BACKGROUND_SYNC_MS) {
            self.sync()?;
        }
        if !self.sealed && now_ms.saturating_sub(self.last_write_ms) >= IDLE_SEAL_MS {
            self.seal()?;
        }
        Ok(())
    }

    /// Returns the milliseconds until [`Self::tick`] is due; `None` = not before the next write.
    pub fn wait_ms(&self, now_ms: u64) -> Option<u64> {
        let sync_at = self.unsynced_since_ms.map(|since| since + BACKGROUND_SYNC_MS);
        let seal_at = (!self.sealed).then_some(self.last_write_ms + IDLE_SEAL_MS);
        let due_at = sync_at.into_iter().chain(seal_at).min()?;
        Some(due_at.saturating_sub(now_ms))
    }

    /// Makes everything written durable.
    ///
    /// # Errors
    /// [`Error::SyncFailed`].
    pub fn sync(&mut self) -> Result<Position, Error> {
        self.check_sound()?;
        if self.unsynced_since_ms.is_some() {
            let again = |error| if injected!(ForgiveSyncFailure) { self.segment.file.sync_data() } else { Err(error) };
            self.segment.file.sync_data().or_else(again).map_err(|source| {
                self.sync_failed = true;
                Error::SyncFailed { path: self.segment.path.clone(), source }
            })?;
            self.unsynced_since_ms = None;
            self.synced = self.end;
            self.shared.synced.store(self.synced, Ordering::Release);
        }
        Ok(Position(self.synced))
    }

    /// Closes the log: makes everything durable and sealed, and frees the unused rest of the segment. Returns the end, for
    /// [`crate::Identity::leave_clean_mark`].
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn close(mut self) -> Result<Position, Error> {
        if injected!(MarkBeforeFsync) {
            return Ok(Position(self.end));
        }
        self.seal()?;
        trim(&self.segment, self.end);
        Ok(Position(self.end))
    }

    /// Writes an empty batch that records everything before it as synced, unless already sealed.
    fn seal(&mut self) -> Result<(), Error> {
        self.sync()?;
        if self.sealed {
            return Ok(());
        }
        let batch = Batch::empty();
        if self.fits(&batch) {
            self.put(&batch)?;
            self.unsynced_since_ms = Some(self.last_write_ms);
            self.sync()?;
        } else {
            // The header of a new segment seals too.
            self.roll(0)?;
        }
        self.sealed = true;
        Ok(())
    }

    fn fits(&self, batch: &Batch) -> bool {
        self.segment.offset(self.end) + batch.len_bytes() <= self.segment.file_bytes
    }

    /// Writes a batch at the end; the log advances only if all of it is written.
    fn put(&mut self, batch: &Batch) -> Result<(), Error> {
        let link = Link { seed: self.segment.seed, position: self.end, prev_crc: self.chain };
        let chain = batch.header(link, self.synced, &mut self.header);
        let offset = self.segment.offset(self.end);
        let written = self
            .segment
            .file
            .write_at(offset, &self.header)
            .and_then(|()| self.segment.file.write_at(offset + self.header.len() as u64, batch.body()));
        written.map_err(|source| Error::write("write", self.segment.path.clone(), source))?;
        self.chain = chain;
        self.end += batch.len_bytes();
        self.shared.written.store(self.end, Ordering::Release);
        Ok(())
    }

    /// Starts a new segment with space for `bytes`, after making the old one durable.
    fn roll(&mut self, bytes: u64) -> Result<(), Error> {
        self.sync()?;
        let head =
            Head { uuid: self.disk.random(), index: self.segment.head.index + 1, starts_at: self.end, carried: 0 };
        let created =
            create_with_space(&*self.disk, &self.file_head, head, self.options.segment_bytes, bytes, &self.carried);
        self.sync_failed |= matches!(created, Err(Error::SyncFailed { .. }));
        let (segment, chain) = created?;
        trim(&self.segment, self.end);
        (self.segment, self.chain) = (segment, chain);
        self.sealed = true;
        self.register_segment();
        Ok(())
    }

    /// Registers a new segment, whose carried batch is durable and part of the log.
    fn register_segment(&mut self) {
        let head = self.segment.head;
        self.end = head.starts_at + head.carried;
        self.synced = self.end;
        let contents = SegmentContents { index: head.index, starts_at: head.starts_at, highest: Default::default() };
        self.shared.segments.lock().push(contents);
        self.shared.written.store(self.end, Ordering::Release);
        self.shared.synced.store(self.synced, Ordering::Release);
    }

    fn note_contents(&self, batch: &Batch) {
        let mut segments = self.shared.segments.lock();
        let newest = segments.last_mut().expect("the segment being written is registered");
        for (partition, lsn) in batch.highest() {
            let highest = newest.highest.entry(partition).or_default();
            *highest = (*highest).max(lsn);
        }
    }

    fn check_sound(&self) -> Result<(), Error> {
        if self.sync_failed {
            let source = io::Error::other("an earlier sync failed");
            return Err(Error::SyncFailed { path: self.segment.path.clone(), source });
        }
        Ok(())
    }
}

/// Creates a segment with the carried entries and space for `space` more bytes.
fn create_with_space(
    disk: &dyn Disk,
    file_head: &FileHead,
    mut head: Head,
    segment_bytes: u64,
    space: u64,
    carried: &CarryOver,
) -> Result<(Segment, u32), Error> {
    let batch = carried.batch();
    head.carried = batch.as_ref().map_or(0, Batch::len_bytes);
    let needed = super::batch::PAGE as u64 + head.carried + space;
    Segment::create(disk, file_head, head, segment_bytes.max(needed), batch.as_ref())
}

/// Frees the unused rest of a segment. Failure only wastes space until the segment is deleted.
fn trim(segment: &Segment, end: u64) {
    let _ = segment.file.truncate(segment.offset(end));
}
