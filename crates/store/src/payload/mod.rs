//! Payloads of items: on disk in segments, in memory as references and a bounded cache.
//!
//! An applied append adds its payloads to the open segment of the partition. They are buffered and become durable with the next
//! snapshot of the partition, which refers to them; until then the log has them. A crash therefore loses only bytes that recovery
//! writes again. A write that fails (a full disk) keeps its bytes in memory and fails the next snapshot, not the record.
//!
//! Invariants: a payload is returned only if its checksum matches; a segment is removed only when neither the state nor a kept
//! snapshot refers to it, and no job reads it; the choice of segments is neither replicated nor visible.

mod cache;
mod compaction;
mod reference;
pub(crate) mod scrub;
pub(crate) mod segment;
mod stored;
#[cfg(test)]
mod tests;

use crate::{Disk, Error, FileHead, SimDisk};
use bytes::Bytes;
use cache::Cache;
pub(crate) use compaction::Compaction;
use engram_memory::{ClusterId, MAX_ITEM_PAYLOAD_BYTES, PartitionId, Shape, StoreId};
pub(crate) use reference::{REFERENCE_BYTES, Reference, References};
use segment::{HEAD_BYTES, SegmentFile};
use std::collections::BTreeMap;
use std::sync::Arc;
pub use stored::StoredPayload;
pub(crate) use stored::{LOST, PayloadStream, Source};

/// Bytes buffered before they are written to the open segment.
const FLUSH_BYTES: usize = 512 << 10;
/// Bytes after which a segment is closed.
pub(crate) const SEGMENT_BYTES: u32 = 128 << 20;
/// Damages kept until the store handles them.
const MAX_DAMAGES: usize = 64;

/// Where payloads are stored.
#[derive(Clone)]
pub(crate) struct PayloadOptions {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) head: FileHead,
    pub(crate) cache_bytes: u64,
    pub(crate) segment_bytes: u32,
}

impl PayloadOptions {
    /// Keeps payloads in memory: for partitions without a store.
    pub(crate) fn in_memory(shape: Shape) -> Self {
        let head = FileHead { cluster: ClusterId(0), store: StoreId(0), shape };
        Self { disk: Arc::new(SimDisk::new(0)), head, cache_bytes: 0, segment_bytes: SEGMENT_BYTES }
    }
}

/// Numbers for metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PayloadUsage {
    pub(crate) live_bytes: u64,
    pub(crate) disk_bytes: u64,
    pub(crate) cached_bytes: u64,
    pub(crate) buffered_bytes: u64,
    pub(crate) segments: u64,
    pub(crate) hits: u64,
    pub(crate) misses: u64,
    pub(crate) compacted_bytes: u64,
}

/// Payloads of all partitions of a store.
pub(crate) struct Payloads {
    options: PayloadOptions,
    tables: BTreeMap<u32, Table>,
    cache: Cache,
    damages: Vec<(PartitionId, String)>,
    /// Payloads that failed to be read, by place: whether they are lost, as no other replica has them.
    damaged: BTreeMap<Place, bool>,
    /// Of them, those that were not counted yet.
    found: u64,
    hits: u64,
    misses: u64,
    pub(crate) compacted_bytes: u64,
}

/// Partition, segment and offset of a payload.
type Place = (u32, u32, u32);

/// Segments of a partition.
#[derive(Debug, Default)]
struct Table {
    segments: BTreeMap<u32, Segment>,
    open: Option<Open>,
    next: u32,
}

#[derive(Debug)]
struct Segment {
    file: Arc<SegmentFile>,
    /// Length with the header and the bytes that are still buffered.
    bytes: u32,
    /// Bytes that the state refers to.
    live_bytes: u64,
    /// Whether its header is intact.
    is_valid: bool,
}

/// The segment that is written.
#[derive(Debug)]
struct Open {
    number: u32,
    file: Arc<SegmentFile>,
    /// Bytes in the file.
    flushed: u32,
    /// Bytes after them.
    buffer: Vec<u8>,
    /// Length of the buffer at which it is written.
    flush_at: usize,
    failure: Option<std::io::ErrorKind>,
}

impl Payloads {
    pub(crate) fn new(options: PayloadOptions) -> Self {
        let cache = Cache::new(options.cache_bytes);
        Self {
            options,
            tables: BTreeMap::new(),
            cache,
            damages: Vec::new(),
            damaged: BTreeMap::new(),
            found: 0,
            hits: 0,
            misses: 0,
            compacted_bytes: 0,
        }
    }

    /// Finds the segments that earlier processes wrote.
    ///
    /// # Errors
    /// Those of the disk.
    pub(crate) fn open(options: PayloadOptions) -> Result<Self, Error> {
        let mut payloads = Self::new(options);
        let PayloadOptions { disk, head, .. } = &payloads.options;
        let failed = |source| Error::Io { operation: "list", path: disk.describe(""), source };
        for (partition, number) in disk.list().map_err(failed)?.iter().filter_map(|name| segment::parse_name(name)) {
            let (file, bytes) = SegmentFile::open(&**disk, head, partition, number)?;
            let (file, is_valid) = (Arc::new(file), bytes.is_some());
            let table = payloads.tables.entry(partition.0).or_default();
            let segment = Segment { file, bytes: bytes.unwrap_or_default(), live_bytes: 0, is_valid };
            table.segments.insert(number, segment);
            table.next = table.next.max(number + 1);
        }
        Ok(payloads)
    }

    /// Appends a payload to the open segment of a partition. Nothing refers to it until [`Payloads::retain`].
    pub(crate) fn write(&mut self, partition: PartitionId, bytes: &[u8]) -> (u32, u32) {
        let Self { options, tables, cache, .. } = self;
        let table = tables.entry(partition.0).or_default();
        table.make_room(options, partition, bytes.len());
        let Table { segments, open, .. } = table;
        let open = open.as_mut().expect("made room in it");
        let offset = open.end();
        open.buffer.extend_from_slice(bytes);
        if let Some(segment) = segments.get_mut(&open.number) {
            segment.bytes = open.end();
        }
        if open.buffer.len() >= open.flush_at {
            open.write_out(&*options.disk);
        }
        if cache.accepts(bytes.len()) {
            cache.insert((partition.0, open.number, offset), Bytes::copy_from_slice(bytes));
        }
        (open.number, offset)
    }

    /// Appends a received payload, to which the state may refer later.
    pub(crate) fn receive(&mut self, partition: PartitionId, row: u32, bytes: &[u8], content: u128) -> StoredPayload {
        let reference = Reference::of(bytes, self.write(partition, bytes));
        self.received(partition, row, reference, content)
    }

    /// Appends zeros in place of a payload that the sender has lost, with the reference that it sent. `None` if that is malformed.
    pub(crate) fn receive_lost(&mut self, partition: PartitionId, row: u32, sent: &[u8]) -> Option<StoredPayload> {
        let (reference, content) = Reference::decode(sent)?;
        let length = Some(reference.length as usize).filter(|length| (1..=MAX_ITEM_PAYLOAD_BYTES).contains(length))?;
        let (segment, offset) = self.write(partition, &vec![0; length]);
        let reference = Reference { segment, offset, ..reference };
        self.cache.remove(place(partition, &reference));
        self.found += u64::from(self.damaged.insert(place(partition, &reference), true).is_none());
        Some(self.received(partition, row, reference, content))
    }

    fn received(&self, partition: PartitionId, row: u32, reference: Reference, content: u128) -> StoredPayload {
        let file = |segment: &Segment| Source::File(Arc::clone(&segment.file));
        let segment = self.tables.get(&partition.0).and_then(|table| table.segments.get(&reference.segment));
        let source = segment.map(file).expect("it was appended to this segment");
        StoredPayload { row, reference, content, source, is_lost: self.is_lost(partition, &reference) }
    }

    /// Records a payload that cannot be read; returns whether it is lost.
    pub(crate) fn mark_damaged(&mut self, partition: PartitionId, reference: &Reference) -> bool {
        let Self { damaged, found, .. } = self;
        *damaged.entry(place(partition, reference)).or_insert_with(|| {
            *found += 1;
            false
        })
    }

    /// Declares the damaged payloads of a partition lost: this is the only replica that has its state.
    pub(crate) fn declare_lost(&mut self, partition: PartitionId) {
        self.damaged
            .range_mut((partition.0, 0, 0)..=(partition.0, u32::MAX, u32::MAX))
            .for_each(|(_, lost)| *lost = true);
    }

    /// Whether no replica has a payload intact.
    pub(crate) fn is_lost(&self, partition: PartitionId, reference: &Reference) -> bool {
        self.damaged.get(&place(partition, reference)).is_some_and(|lost| *lost)
    }

    /// Whether a partition has damaged payloads that another replica may have.
    pub(crate) fn is_repairable(&self, partition: PartitionId) -> bool {
        let mut damaged = self.damaged.range((partition.0, 0, 0)..=(partition.0, u32::MAX, u32::MAX));
        damaged.any(|(_, lost)| !lost)
    }

    /// Returns the number of damaged payloads found since the last call.
    pub(crate) fn take_found(&mut self) -> u64 {
        std::mem::take(&mut self.found)
    }

    /// Counts a payload that the state refers to; `false` if it is not in a segment here.
    pub(crate) fn retain(&mut self, partition: PartitionId, reference: &Reference) -> bool {
        let table = self.tables.get_mut(&partition.0);
        let Some(segment) = table.and_then(|table| table.segments.get_mut(&reference.segment)) else { return false };
        let end = reference.offset.checked_add(reference.length);
        let fits = reference.offset as usize >= HEAD_BYTES && end.is_some_and(|end| end <= segment.bytes);
        if segment.is_valid && fits {
            segment.live_bytes += u64::from(reference.length);
        }
        segment.is_valid && fits
    }

    /// Ends a reference of the state.
    pub(crate) fn release(&mut self, partition: PartitionId, reference: &Reference) {
        self.cache.remove(place(partition, reference));
        self.damaged.remove(&place(partition, reference));
        let table = self.tables.get_mut(&partition.0);
        if let Some(segment) = table.and_then(|table| table.segments.get_mut(&reference.segment)) {
            segment.live_bytes = segment.live_bytes.saturating_sub(u64::from(reference.length));
        }
    }

    /// Whether a file is a segment here.
    pub(crate) fn owns(&self, partition: PartitionId, file: &Arc<SegmentFile>) -> bool {
        let segment = self.tables.get(&partition.0).and_then(|table| table.segments.get(&file.number));
        segment.is_some_and(|segment| Arc::ptr_eq(&segment.file, file))
    }

    /// Reads and verifies a payload. Damage is also recorded for [`Payloads::take_damages`].
    ///
    /// # Errors
    /// A description of the failure.
    pub(crate) fn read(&mut self, partition: PartitionId, reference: &Reference) -> Result<Bytes, String> {
        let key = place(partition, reference);
        if let Some(bytes) = self.cache.get(key) {
            self.hits += 1;
            return Ok(bytes);
        }
        self.misses += 1;
        let bytes = match self.source(partition, reference) {
            Some(Source::Memory(bytes, _)) => bytes,
            Some(Source::File(file)) => match file.read_payload(reference.offset, reference.length, reference.hash) {
                Ok(bytes) => bytes,
                Err(error) => {
                    let text = describe(&error);
                    if !self.mark_damaged(partition, reference) {
                        self.report_damage(partition, text.clone());
                    }
                    return Err(text);
                }
            },
            None => return Err(format!("payload segment {} of partition {partition} is missing", reference.segment)),
        };
        self.cache.insert(key, bytes.clone());
        Ok(bytes)
    }

    /// Reads the first bytes of a payload, unverified unless they are all or cached. Of a damaged one they are a head with what its reference has, so
    /// that its item can be listed.
    ///
    /// # Errors
    /// A description of the failure.
    pub(crate) fn read_start(
        &mut self,
        partition: PartitionId,
        reference: &Reference,
        bytes: u32,
    ) -> Result<Bytes, String> {
        let is_damaged = |payloads: &Self| payloads.damaged.contains_key(&place(partition, reference));
        let read = if is_damaged(self) { Err(String::new()) } else { self.read_head(partition, reference, bytes) };
        read.or_else(|text| if is_damaged(self) { Ok(reference.head()) } else { Err(text) })
    }

    fn read_head(&mut self, partition: PartitionId, reference: &Reference, bytes: u32) -> Result<Bytes, String> {
        let key = place(partition, reference);
        if reference.length <= bytes || self.cache.contains(key) {
            return self.read(partition, reference);
        }
        match self.source(partition, reference) {
            Some(Source::Memory(all, _)) => Ok(all.slice(..bytes as usize)),
            Some(Source::File(file)) => file.read(reference.offset, bytes).map(Bytes::from).map_err(|error| {
                let text = format!("failed to read {}: {error}", file.path());
                if !self.mark_damaged(partition, reference) {
                    self.report_damage(partition, text.clone());
                }
                text
            }),
            None => self.read(partition, reference),
        }
    }

    /// Returns where a payload can be read from by any thread: its file, or its bytes if they are still buffered.
    pub(crate) fn source(&self, partition: PartitionId, reference: &Reference) -> Option<Source> {
        let table = self.tables.get(&partition.0)?;
        if let Some(open) = table.open.as_ref().filter(|open| open.number == reference.segment)
            && let Some(start) = reference.offset.checked_sub(open.flushed)
        {
            let bytes = open.buffer.get(start as usize..start as usize + reference.length as usize)?;
            let failure = open.failure.unwrap_or(std::io::ErrorKind::Other);
            return Some(Source::Memory(Bytes::copy_from_slice(bytes), failure));
        }
        table.segments.get(&reference.segment).map(|segment| Source::File(Arc::clone(&segment.file)))
    }

    /// Writes what is buffered of a partition.
    pub(crate) fn write_buffered(&mut self, partition: PartitionId) {
        let open = self.tables.get_mut(&partition.0).and_then(|table| table.open.as_mut());
        if let Some(open) = open.filter(|open| !open.buffer.is_empty()) {
            open.write_out(&*self.options.disk);
        }
    }

    /// Records damage for [`Payloads::take_damages`].
    pub(crate) fn report_damage(&mut self, partition: PartitionId, what: String) {
        if self.damages.len() < MAX_DAMAGES && self.damages.iter().all(|(other, _)| *other != partition) {
            self.damages.push((partition, what));
        }
    }

    /// Returns the damage found since the last call: at most one per partition.
    pub(crate) fn take_damages(&mut self) -> Vec<(PartitionId, String)> {
        std::mem::take(&mut self.damages)
    }

    /// Returns the closed segments that neither the state nor a job uses: they may be removed when no snapshot refers to them.
    pub(crate) fn unused(&self, partition: PartitionId) -> Vec<Arc<SegmentFile>> {
        let Some(table) = self.tables.get(&partition.0) else { return Vec::new() };
        let open = table.open.as_ref().map(|open| open.number);
        let is_unused = |segment: &&Segment| {
            segment.live_bytes == 0 && Some(segment.file.number) != open && Arc::strong_count(&segment.file) == 1
        };
        table.segments.values().filter(is_unused).map(|segment| Arc::clone(&segment.file)).collect()
    }

    /// Forgets segments whose files were removed.
    pub(crate) fn removed(&mut self, partition: PartitionId, numbers: &[u32]) {
        if let Some(table) = self.tables.get_mut(&partition.0) {
            numbers.iter().for_each(|number| {
                table.segments.remove(number);
            });
        }
    }

    /// Whether items of a partition have payloads.
    pub(crate) fn has_live(&self, partition: PartitionId) -> bool {
        let table = self.tables.get(&partition.0);
        table.is_some_and(|table| table.segments.values().any(|segment| segment.live_bytes > 0))
    }

    /// Returns the partitions that have segments.
    pub(crate) fn partitions(&self) -> Vec<PartitionId> {
        self.tables.keys().copied().map(PartitionId).collect()
    }

    pub(crate) fn usage(&self) -> PayloadUsage {
        let Self { cache, hits, misses, compacted_bytes, .. } = self;
        let mut usage = PayloadUsage {
            cached_bytes: cache.bytes(),
            hits: *hits,
            misses: *misses,
            compacted_bytes: *compacted_bytes,
            ..PayloadUsage::default()
        };
        for table in self.tables.values() {
            usage.segments += table.segments.len() as u64;
            usage.live_bytes += table.segments.values().map(|segment| segment.live_bytes).sum::<u64>();
            usage.disk_bytes += table.segments.values().map(|segment| u64::from(segment.bytes)).sum::<u64>();
            usage.buffered_bytes += table.open.as_ref().map_or(0, |open| open.buffer.len() as u64);
        }
        usage
    }
}

impl Table {
    /// Opens a segment that has room for a payload.
    fn make_room(&mut self, options: &PayloadOptions, partition: PartitionId, bytes: usize) {
        let fits = |end: u32| end as usize <= HEAD_BYTES || end as usize + bytes <= options.segment_bytes as usize;
        if let Some(open) = &mut self.open {
            // Bytes that cannot be written keep their segment open.
            let must_stay = |open: &mut Open| !open.buffer.is_empty() && !open.write_out(&*options.disk);
            if fits(open.end()) || must_stay(open) {
                return;
            }
            self.open = None;
        } else if let Some((&number, last)) = self.segments.last_key_value()
            && last.is_valid
            && fits(last.bytes)
        {
            // A process continues the last segment of the previous one.
            self.open = Some(Open::new(number, Arc::clone(&last.file), last.bytes, Vec::new()));
            return;
        }
        let number = self.next;
        self.next += 1;
        let head = segment::encode_head(&options.head, partition, number);
        let file = Arc::new(SegmentFile::new(&*options.disk, partition, number));
        let segment = Segment { file: Arc::clone(&file), bytes: head.len() as u32, live_bytes: 0, is_valid: true };
        self.segments.insert(number, segment);
        self.open = Some(Open::new(number, file, 0, head));
    }
}

impl Open {
    const fn new(number: u32, file: Arc<SegmentFile>, flushed: u32, buffer: Vec<u8>) -> Self {
        Self { number, file, flushed, buffer, flush_at: FLUSH_BYTES, failure: None }
    }

    const fn end(&self) -> u32 {
        self.flushed + self.buffer.len() as u32
    }

    /// Writes the buffer; it stays if that fails.
    fn write_out(&mut self, disk: &dyn Disk) -> bool {
        match self.file.write(disk, self.flushed, &self.buffer) {
            Ok(()) => {
                self.flushed += self.buffer.len() as u32;
                self.buffer = Vec::new();
                (self.flush_at, self.failure) = (FLUSH_BYTES, None);
            }
            Err(error) => {
                self.flush_at = self.buffer.len() + FLUSH_BYTES;
                self.failure = Some(error.kind());
            }
        }
        self.failure.is_none()
    }
}

const fn place(partition: PartitionId, reference: &Reference) -> Place {
    (partition.0, reference.segment, reference.offset)
}

/// Describes an error with its cause.
pub(crate) fn describe(error: &Error) -> String {
    use std::error::Error as _;
    error.source().map_or_else(|| error.to_string(), |source| format!("{error}: {source}"))
}
