//! Content of a partition in a snapshot: columns in slot order, split into chunks, with clock and ledger.
//!
//! A chunk continues its column where the previous one ended; unused columns are absent. Numbers are little-endian; a byte string is
//! its length (u32) and its bytes. Slot order is part of the state, the index is not.
//!
//! Payloads of items are columns of their own: in a snapshot on the store's own disk, references to payload segments; elsewhere,
//! their lengths and their bytes.

use super::arena::Arena;
use super::columns::slot_at;
use super::import::Import;
use super::partition::Partition;
use super::partitions::Partitions;
use crate::payload::{PayloadStream, REFERENCE_BYTES, StoredPayload};
use crate::snapshot_file::MAX_CHUNK_BYTES;
use engram_kernels::{Error, Slot};
use engram_memory::codec::{DecodeError, decode_ledger, encode_ledger};
use engram_memory::{DecayClock, Digest, Group, MAX_PAYLOAD_BYTES, PartitionId};
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
pub(super) fn replica_digest(partition: &Partition, arena: &mut Arena) -> Result<Digest, Error> {
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
