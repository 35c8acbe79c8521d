//! Import of a partition from the chunks of a snapshot, a backup or a state transfer.

use super::arena::Arena;
use super::content::{Column, ImportError, replica_digest};
use super::partition::Row;
use super::partitions::Partitions;
use crate::payload::{LOST, REFERENCE_BYTES, Reference, Source, StoredPayload};
use engram_kernels::Slot;
use engram_memory::codec::decode_ledger;
use engram_memory::hash::content_hash;
use engram_memory::{
    DecayClock, Digest, Group, MAX_ITEM_PAYLOAD_BYTES, MAX_KEY_BYTES, MAX_PAYLOAD_BYTES, MemoryId, ONE, PartitionId,
    partition_of,
};

/// Payloads of a state transfer that arrive before the state is imported.
impl Partitions {
    /// Appends a payload to the segments of a partition.
    pub(crate) fn receive_payload(
        &mut self,
        partition: PartitionId,
        row: u32,
        features: &[u8],
        payload: &[u8],
    ) -> StoredPayload {
        let content = content_hash(Some((self.features().dtype, features)), payload);
        self.arena.payloads.receive(partition, row, payload, content)
    }

    /// Appends zeros in place of a payload that the sender has lost, with the reference that it sent. `None` if that is malformed.
    pub(crate) fn receive_lost_payload(
        &mut self,
        partition: PartitionId,
        row: u32,
        reference: &[u8],
    ) -> Option<StoredPayload> {
        self.arena.payloads.receive_lost(partition, row, reference)
    }

    /// Writes what is buffered of a partition, and sets where each payload can be read from; `false` if one is missing.
    pub(crate) fn finish_received_payloads(&mut self, partition: PartitionId, received: &mut [StoredPayload]) -> bool {
        self.arena.payloads.write_buffered(partition);
        let mut sources = received.iter_mut().map(|payload| {
            let source = self.arena.payloads.source(partition, &payload.reference);
            source.map(|source| payload.source = source).is_some()
        });
        sources.all(|found| found)
    }

    /// Whether a partition has damaged payloads that another replica may have.
    pub(crate) fn has_repairable_payloads(&self, partition: PartitionId) -> bool {
        self.arena.payloads.is_repairable(partition)
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
    pub(super) fn payload(&mut self, payload: &StoredPayload) -> Result<(), ImportError> {
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
