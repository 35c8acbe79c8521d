//! Content of a partition in a snapshot: columns in slot order, split into chunks, with clock and ledger.
//!
//! A chunk continues its column where the previous one ended; unused columns are absent. Numbers are little-endian; a byte string is
//! its length (u32) and its bytes. Slot order is part of the state, the index is not.
//!
//! Payloads of items are columns of their own: in a snapshot on the store's own disk, references to payload segments; elsewhere,
//! their lengths and their bytes.

use crate::arena::Arena;
use crate::columns::slot_at;
use crate::partition::{Partition, Row};
use crate::partitions::Partitions;
use crate::payloads::{LOST, PayloadStream, REFERENCE_BYTES, Reference, Source, StoredPayload};
use crate::snapshot_file::MAX_CHUNK_BYTES;
use engram_kernels::{Error, Slot};
use engram_memory::codec::{DecodeError, decode_ledger, encode_ledger};
use engram_memory::{
    DecayClock, Digest, Group, MAX_ITEM_PAYLOAD_BYTES, MAX_KEY_BYTES, MAX_PAYLOAD_BYTES, MemoryId, ONE, PartitionId,
    partition_of,
};
use std::collections::BTreeMap;

/// Bytes at which a chunk is closed: one more row of any kind still fits the chunk limit of files.
const CHUNK_BYTES: usize = MAX_CHUNK_BYTES - MAX_PAYLOAD_BYTES - size_of::<u32>();

/// A column of a snapshot, with its number in files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Column {
    /// Ids, u64.
    Ids = 1,
    /// Potentials, u32.
    Potentials = 2,
    /// Groups, u8.
    Groups = 3,
    /// Keys, byte strings.
    Keys = 4,
    /// Feature bits, one vector of the cluster's shape per memory.
    Features = 5,
    /// Payloads, byte strings.
    Payloads = 6,
    /// Update counts, u16.
    Updates = 7,
    /// References to payloads in segments of the same store, 52 bytes each: length u32 (0 = none), segment u32, offset u32, xxh3-64
    /// u64, version u64, trajectory u64, content hash u128.
    References = 8,
    /// Lengths of payloads of items, u32; 0 = none.
    Lengths = 9,
    /// Bytes of these payloads in slot order; a chunk may end anywhere.
    Bytes = 10,
    /// Segments that the references need: number u32, bytes u32.
    Segments = 11,
}

impl Column {
    /// Columns with one value per memory.
    pub(crate) const ALL: [Self; 9] = [
        Self::Ids,
        Self::Potentials,
        Self::Groups,
        Self::Keys,
        Self::Features,
        Self::Payloads,
        Self::Updates,
        Self::References,
        Self::Lengths,
    ];

    /// Returns the column of a number in a file; `None` if unknown.
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().chain([Self::Bytes, Self::Segments]).find(|column| column.code() == code)
    }

    /// Returns its number in files.
    pub const fn code(self) -> u32 {
        self as u32
    }
}

/// A part of a column.
type ColumnChunk = (Column, Vec<u8>);

/// Encoded state of a partition between two records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Content {
    /// The partition.
    pub partition: PartitionId,
    /// Number of memories.
    pub memories: u64,
    /// Decay clock.
    pub clock: DecayClock,
    /// Encoded ledger.
    pub ledger: Vec<u8>,
    /// Replica digest.
    pub digest: Digest,
    /// Columns in chunks of about 1 MiB, without payloads of items.
    pub chunks: Vec<(Column, Vec<u8>)>,
    /// Payloads of items, in slot order.
    pub payloads: Vec<StoredPayload>,
}

impl Content {
    /// Returns the digest of the memories alone.
    ///
    /// # Panics
    /// When the ledger cannot be decoded: exports always can.
    pub fn memories_digest(&self) -> Digest {
        let ledger = decode_ledger(&self.ledger).expect("an export encodes it");
        Digest(self.digest.0.wrapping_sub(ledger.digest(self.clock)))
    }
}

/// Why a content cannot be imported. The partition is then not open.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The device failed or is full.
    #[error(transparent)]
    Device(#[from] Error),
    /// The ledger cannot be decoded.
    #[error("failed to decode the ledger of the snapshot")]
    Ledger(#[from] DecodeError),
    /// Inconsistent columns with valid checksums, or with payloads that are damaged or missing.
    #[error("inconsistent columns in the snapshot: {0}")]
    Invalid(&'static str),
}

impl Partitions {
    /// Exports the current state of a partition; `None` if it is not open.
    ///
    /// # Errors
    /// The device failed.
    pub fn export(&mut self, id: PartitionId) -> Result<Option<Content>, Error> {
        let Some(partition) = self.partitions.get(id.0 as usize).and_then(Option::as_ref) else { return Ok(None) };
        self.arena.payloads.write_buffered(id);
        let (arena, mut ledger) = (&mut self.arena, Vec::new());
        encode_ledger(&partition.ledger, &mut ledger);
        let mut chunks = Chunks::default();
        let (mut potentials, mut groups) = (Vec::new(), Vec::new());
        let slots = || (0..partition.count()).map(|local| partition.slot(local));
        for column in Column::ALL {
            match column {
                Column::Ids => slots().for_each(|slot| chunks.push(column, &arena.columns.id(slot).0.to_le_bytes())),
                Column::Potentials => {
                    for (tile, _) in partition.tiles() {
                        arena.device.export(tile, &mut potentials, &mut groups)?;
                        potentials.iter().for_each(|p| chunks.push(column, &p.to_le_bytes()));
                    }
                }
                Column::Groups => {
                    for (tile, _) in partition.tiles() {
                        arena.device.export(tile, &mut potentials, &mut groups)?;
                        chunks.push(column, &groups);
                    }
                }
                Column::Keys if arena.columns.has_keys() && slots().any(|slot| !arena.columns.key(slot).is_empty()) => {
                    slots().for_each(|slot| chunks.push_string(column, arena.columns.key(slot)));
                }
                Column::Features if self.shape.features.dimension > 0 => {
                    slots().for_each(|slot| chunks.push(column, arena.columns.features(slot)));
                }
                Column::Payloads
                    if arena.columns.has_payloads() && slots().any(|slot| !arena.columns.payload(slot).is_empty()) =>
                {
                    slots().for_each(|slot| chunks.push_string(column, arena.columns.payload(slot)));
                }
                Column::Updates if partition.ledger.settings.count_updates => {
                    slots().for_each(|slot| chunks.push(column, &arena.columns.updates(slot).to_le_bytes()));
                }
                _ => {}
            }
        }
        let (memories, clock) = (u64::from(partition.count()), partition.clock);
        let digest = replica_digest(partition, arena)?;
        let payloads = (0..partition.count()).filter_map(|row| stored_payload(id, row, partition.slot(row), arena));
        let payloads = payloads.collect::<Result<_, _>>()?;
        Ok(Some(Content { partition: id, memories, clock, ledger, digest, chunks: chunks.0, payloads }))
    }

    /// Imports the result of [`Partitions::export`], from any worker.
    ///
    /// # Errors
    /// [`ImportError`].
    ///
    /// # Panics
    /// When the partition is open.
    pub fn import(&mut self, content: &Content) -> Result<(), ImportError> {
        let ids = content.chunks.iter().filter(|(column, _)| *column == Column::Ids);
        let id_bytes = ids.map(|(_, bytes)| bytes.len() as u64).sum();
        let Content { partition, memories, clock, ref ledger, .. } = *content;
        let mut import = Import::begin(self, partition, memories, id_bytes, clock, ledger)?;
        content.chunks.iter().try_for_each(|(column, bytes)| import.chunk(*column, bytes))?;
        content.payloads.iter().try_for_each(|payload| import.payload(payload))?;
        import.finish(content.digest)
    }
}

/// Import of a partition, chunk by chunk. The partition is closed if dropped before [`Import::finish`].
pub(crate) struct Import<'a> {
    partitions: &'a mut Partitions,
    id: PartitionId,
    clock: DecayClock,
    /// Imported rows of each column.
    rows: [u32; Column::ALL.len()],
    potentials: Vec<u32>,
    groups: Vec<u8>,
    payloads: PayloadRows,
    done: bool,
}

impl<'a> Import<'a> {
    /// Allocates memory for `memories`, after checking that `id_bytes` of ids follow.
    pub(crate) fn begin(
        partitions: &'a mut Partitions,
        id: PartitionId,
        memories: u64,
        id_bytes: u64,
        clock: DecayClock,
        ledger: &[u8],
    ) -> Result<Self, ImportError> {
        let ledger = decode_ledger(ledger)?;
        let count = u32::try_from(memories).map_err(|_| ImportError::Invalid("more memories than slots"))?;
        if id_bytes != u64::from(count) * size_of::<u64>() as u64 {
            return Err(ImportError::Invalid("the number of ids differs from that of memories"));
        }
        partitions.open(id, ledger.settings);
        let import = Self {
            partitions,
            id,
            clock,
            rows: [0; Column::ALL.len()],
            potentials: Vec::new(),
            groups: Vec::new(),
            payloads: PayloadRows::default(),
            done: false,
        };
        let (partition, arena) = import.partitions.partition_mut(id);
        partition.ledger = ledger;
        partition.clock = clock;
        arena.segments[partition.segment as usize].clock = clock;
        partition.extend(arena, count)?;
        Ok(import)
    }

    pub(crate) fn chunk(&mut self, column: Column, mut bytes: &[u8]) -> Result<(), ImportError> {
        match column {
            // Only removal of segments needs them.
            Column::Segments => return Ok(()),
            Column::Bytes => return self.payload_bytes(bytes),
            _ => {}
        }
        let width = self.partitions.shape().features.bytes();
        let (partition, arena) = self.partitions.partition_mut(self.id);
        let segment = partition.segment;
        if column != Column::Ids && self.rows[Column::Ids as usize - 1] != partition.count() {
            return Err(ImportError::Invalid("a column precedes the ids"));
        }
        let row = &mut self.rows[column as usize - 1];
        while !bytes.is_empty() {
            let value = match column {
                Column::Ids => take(&mut bytes, 8)?,
                Column::Potentials => take(&mut bytes, 4)?,
                Column::Groups => take(&mut bytes, 1)?,
                Column::Features => take(&mut bytes, width.max(1))?,
                Column::Updates => take(&mut bytes, 2)?,
                Column::Keys => take_string(&mut bytes, MAX_KEY_BYTES)?,
                Column::Payloads => take_string(&mut bytes, MAX_PAYLOAD_BYTES)?,
                Column::References => take(&mut bytes, REFERENCE_BYTES)?,
                Column::Lengths => take(&mut bytes, 4)?,
                Column::Bytes | Column::Segments => &[],
            };
            if *row == partition.count() {
                return Err(ImportError::Invalid("a column is longer than the partition"));
            }
            let slot = partition.slot(*row);
            *row += 1;
            match column {
                Column::Ids => arena.columns.create(slot, MemoryId(u64::from_le_bytes(array(value))), &[]),
                Column::Potentials => self.potentials.push(u32::from_le_bytes(array(value))),
                Column::Groups => self.groups.push(value[0]),
                Column::Keys => arena.columns.set_key(slot, value),
                Column::Features => arena.set_content(segment, slot, value, &[])?,
                Column::Payloads => arena.set_content(segment, slot, &[], value)?,
                Column::References => adopt(arena, self.id, slot, value)?,
                Column::Lengths => self.payloads.lengths.push(u32::from_le_bytes(array(value))),
                Column::Bytes | Column::Segments => {}
                Column::Updates => arena.columns.set_updates(slot, u16::from_le_bytes(array(value))),
            }
        }
        Ok(())
    }

    /// Adds a piece of the bytes of payloads.
    fn payload_bytes(&mut self, bytes: &[u8]) -> Result<(), ImportError> {
        let (partition, arena) = self.partitions.partition_mut(self.id);
        self.payloads.add_piece(bytes, |row, payload, is_lost| {
            // A backup has all payloads.
            let in_range = row < partition.count() && !is_lost;
            if in_range {
                arena.store_payload(partition.segment, partition.slot(row), payload);
            }
            in_range
        })
    }

    /// Adds an exported payload: refers to it if it is in a segment here, or else copies it.
    fn payload(&mut self, payload: &StoredPayload) -> Result<(), ImportError> {
        let (partition, arena) = self.partitions.partition_mut(self.id);
        if payload.row >= partition.count() {
            return Err(ImportError::Invalid("a payload belongs to no memory"));
        }
        let slot = partition.slot(payload.row);
        match &payload.source {
            Source::File(file) if arena.payloads.owns(self.id, file) => {
                let mut row = Vec::with_capacity(REFERENCE_BYTES);
                payload.reference.encode(payload.content, &mut row);
                adopt(arena, self.id, slot, &row)
            }
            _ => {
                let bytes = payload.read().map_err(|_| ImportError::Invalid("a payload is damaged"))?;
                arena.store_payload(partition.segment, slot, &bytes);
                Ok(())
            }
        }
    }

    pub(crate) fn finish(mut self, digest: Digest) -> Result<(), ImportError> {
        if !self.payloads.is_complete() {
            return Err(ImportError::Invalid("payloads are shorter than their lengths"));
        }
        let shape = self.partitions.shape();
        let (partition, arena) = self.partitions.partition_mut(self.id);
        let count = partition.count();
        let is_complete = |column: Column| self.rows[column as usize - 1] == count;
        if Column::ALL[..3].iter().any(|column| !is_complete(*column))
            || (shape.features.dimension > 0 && !is_complete(Column::Features))
        {
            return Err(ImportError::Invalid("a column is missing or shorter than the partition"));
        }
        if Column::ALL.iter().any(|column| self.rows[*column as usize - 1] != 0 && !is_complete(*column)) {
            return Err(ImportError::Invalid("a column is shorter than the partition"));
        }
        if self.potentials.iter().any(|p| *p > self.clock.units() + ONE) {
            return Err(ImportError::Invalid("a weight is above 1"));
        }
        for local in 0..count {
            let id = arena.columns.id(partition.slot(local));
            if partition_of(id, shape.partitions) != self.id {
                return Err(ImportError::Invalid("a memory belongs to another partition"));
            }
        }
        if !partition.index_all(arena) {
            return Err(ImportError::Invalid("duplicate id"));
        }
        partition.remap(arena);
        let values = self.potentials.iter().zip(&self.groups);
        let rows: Vec<Row> =
            (0..count).zip(values).map(|(local, (&p, &group))| (partition.slot(local), p, Group(group))).collect();
        arena.device.write(&rows)?;
        if replica_digest(partition, arena)? != digest {
            return Err(ImportError::Invalid("digest mismatch"));
        }
        self.done = true;
        Ok(())
    }
}

impl Drop for Import<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.partitions.close(self.id);
        }
    }
}

/// Payloads of rows that arrive in pieces.
#[derive(Debug, Default)]
pub(crate) struct PayloadRows {
    pub(crate) lengths: Vec<u32>,
    /// The next row.
    row: usize,
    /// The first bytes of its payload.
    partial: Vec<u8>,
}

impl PayloadRows {
    /// Takes a piece; calls `each` with the row of each complete payload and whether it is the reference of a lost one; `each` returns whether the
    /// row exists.
    pub(crate) fn add_piece(
        &mut self,
        mut bytes: &[u8],
        mut each: impl FnMut(u32, &[u8], bool) -> bool,
    ) -> Result<(), ImportError> {
        while !bytes.is_empty() {
            self.skip_empty();
            let Some(&length) = self.lengths.get(self.row) else {
                return Err(ImportError::Invalid("payloads are longer than their lengths"));
            };
            let (length, is_lost) = (length & !LOST, length & LOST != 0);
            if length as usize > MAX_ITEM_PAYLOAD_BYTES || (is_lost && length as usize != REFERENCE_BYTES) {
                return Err(ImportError::Invalid("a payload is too long"));
            }
            let (head, rest) = bytes.split_at(bytes.len().min(length as usize - self.partial.len()));
            bytes = rest;
            let is_whole = head.len() == length as usize;
            if !is_whole {
                self.partial.extend_from_slice(head);
            }
            if is_whole || self.partial.len() == length as usize {
                let payload = if is_whole { head } else { &self.partial };
                if !each(self.row as u32, payload, is_lost) {
                    return Err(ImportError::Invalid("a payload belongs to no memory"));
                }
                self.partial.clear();
                self.row += 1;
            }
        }
        Ok(())
    }

    /// Whether all payloads arrived.
    pub(crate) fn is_complete(&mut self) -> bool {
        self.skip_empty();
        self.row == self.lengths.len()
    }

    fn skip_empty(&mut self) {
        while self.lengths.get(self.row) == Some(&0) {
            self.row += 1;
        }
    }
}

/// Refers to a payload in a segment here.
fn adopt(arena: &mut Arena, partition: PartitionId, slot: Slot, row: &[u8]) -> Result<(), ImportError> {
    let decoded = Reference::decode(row).ok_or(ImportError::Invalid("a chunk ends inside a row"))?;
    let (reference, content) = decoded;
    if reference.length == 0 {
        return Ok(());
    }
    arena.release_payload(partition.0, slot);
    if !arena.payloads.retain(partition, &reference) {
        return Err(ImportError::Invalid("a payload segment is missing or too short"));
    }
    arena.columns.set_reference(slot, reference);
    arena.columns.set_hash(slot, content);
    Ok(())
}

/// Returns the payload on disk of a slot, for an export.
fn stored_payload(id: PartitionId, row: u32, slot: Slot, arena: &Arena) -> Option<Result<StoredPayload, Error>> {
    let reference = *arena.columns.reference(slot)?;
    let content = arena.columns.content().map_or(0, |content| content.get(slot));
    let missing = || Error::Payload(format!("payload segment {} of partition {id} is missing", reference.segment));
    let source = arena.payloads.source(id, &reference).ok_or_else(missing);
    let is_lost = arena.payloads.is_lost(id, &reference);
    Some(source.map(|source| StoredPayload { row, reference, content, source, is_lost }))
}

impl Content {
    /// Returns references to payloads in segments of the same store, and these segments with their needed lengths.
    pub(crate) fn references(&self) -> (Vec<ColumnChunk>, BTreeMap<u32, u32>) {
        let (mut chunks, mut segments) = (Chunks::default(), BTreeMap::new());
        let mut payloads = self.payloads.iter().peekable();
        let rows = if self.payloads.is_empty() { 0 } else { self.memories as u32 };
        let mut bytes = Vec::with_capacity(REFERENCE_BYTES);
        for row in 0..rows {
            bytes.clear();
            match payloads.next_if(|payload| payload.row == row) {
                Some(StoredPayload { reference, content, .. }) => {
                    reference.encode(*content, &mut bytes);
                    let end: &mut u32 = segments.entry(reference.segment).or_default();
                    *end = (*end).max(reference.offset + reference.length);
                }
                None => bytes.resize(REFERENCE_BYTES, 0),
            }
            chunks.push(Column::References, &bytes);
        }
        for (number, end) in &segments {
            chunks.push(Column::Segments, &[number.to_le_bytes(), end.to_le_bytes()].concat());
        }
        (chunks.0, segments)
    }

    /// Returns the lengths of payloads, which precede their bytes.
    pub(crate) fn lengths(&self) -> Vec<ColumnChunk> {
        let mut chunks = Chunks::default();
        let mut payloads = self.payloads.iter().peekable();
        let rows = if self.payloads.is_empty() { 0 } else { self.memories as u32 };
        for row in 0..rows {
            let length = payloads.next_if(|payload| payload.row == row).map_or(0, StoredPayload::sent_length);
            chunks.push(Column::Lengths, &length.to_le_bytes());
        }
        chunks.0
    }

    /// Returns the bytes of payloads in pieces of at most a chunk.
    pub(crate) fn payload_stream(&self) -> PayloadStream {
        PayloadStream::new(self.payloads.clone(), MAX_CHUNK_BYTES)
    }
}

/// Computes the replica digest of one partition on the host: the device's pass covers all partitions.
fn replica_digest(partition: &Partition, arena: &mut Arena) -> Result<Digest, Error> {
    let (mut potentials, mut groups) = (Vec::new(), Vec::new());
    let mut digest = Digest(partition.ledger.digest(partition.clock));
    for (tile, _) in partition.tiles() {
        arena.device.export(tile, &mut potentials, &mut groups)?;
        for (offset, (&potential, &group)) in potentials.iter().zip(&groups).enumerate() {
            let slot = slot_at(tile, offset as u32);
            let content = arena.columns.content().map_or(0, |content| content.get(slot));
            digest.add(arena.columns.id(slot), partition.clock.weight(potential), Group(group), content);
        }
    }
    Ok(digest)
}

/// Chunks under construction.
#[derive(Default)]
pub(crate) struct Chunks(Vec<(Column, Vec<u8>)>);

impl Chunks {
    pub(crate) fn push(&mut self, column: Column, row: &[u8]) {
        self.open(column).extend_from_slice(row);
    }

    pub(crate) fn push_string(&mut self, column: Column, row: &[u8]) {
        let chunk = self.open(column);
        chunk.extend_from_slice(&(row.len() as u32).to_le_bytes());
        chunk.extend_from_slice(row);
    }

    pub(crate) fn into_chunks(self) -> Vec<(Column, Vec<u8>)> {
        self.0
    }

    fn open(&mut self, column: Column) -> &mut Vec<u8> {
        let fits = self.0.last().is_some_and(|(last, bytes)| *last == column && bytes.len() < CHUNK_BYTES);
        if !fits {
            self.0.push((column, Vec::new()));
        }
        &mut self.0.last_mut().expect("one was pushed").1
    }
}

fn take<'a>(bytes: &mut &'a [u8], len: usize) -> Result<&'a [u8], ImportError> {
    let (head, tail) = bytes.split_at_checked(len).ok_or(ImportError::Invalid("a chunk ends inside a row"))?;
    *bytes = tail;
    Ok(head)
}

fn take_string<'a>(bytes: &mut &'a [u8], most: usize) -> Result<&'a [u8], ImportError> {
    let len = u32::from_le_bytes(array(take(bytes, 4)?)) as usize;
    if len > most { Err(ImportError::Invalid("a key or payload is too long")) } else { take(bytes, len) }
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("taken at this length")
}
