//! References to payloads, and their column.

use crate::format::Bytes;
use engram_kernels::{Slot, TILE};
use engram_replay::item::Head;
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of a row in a snapshot: a reference and the content hash of its item.
pub(crate) const REFERENCE_BYTES: usize = 52;

/// Where a payload is, and what sampling needs of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Reference {
    pub(crate) segment: u32,
    pub(crate) offset: u32,
    /// Bytes; 0 = no payload.
    pub(crate) length: u32,
    /// xxh3-64 of the payload.
    pub(crate) hash: u64,
    pub(crate) version: u64,
    pub(crate) trajectory: u64,
}

impl Reference {
    /// Returns the reference to a payload at a place.
    pub(crate) fn of(payload: &[u8], (segment, offset): (u32, u32)) -> Self {
        let (head, _) = Head::decode(payload).unwrap_or_default();
        let (length, hash) = (payload.len() as u32, xxh3_64(payload));
        Self { segment, offset, length, hash, version: head.version, trajectory: head.trajectory }
    }

    /// Returns a head of the item without its tag.
    pub(crate) fn head(&self) -> bytes::Bytes {
        let mut head = Vec::new();
        Head { version: self.version, trajectory: self.trajectory, tag: b"" }.encode(&mut head);
        head.into()
    }

    /// Encodes a row of a snapshot.
    pub(crate) fn encode(&self, content: u128, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.length.to_le_bytes());
        out.extend_from_slice(&self.segment.to_le_bytes());
        out.extend_from_slice(&self.offset.to_le_bytes());
        out.extend_from_slice(&self.hash.to_le_bytes());
        out.extend_from_slice(&self.version.to_le_bytes());
        out.extend_from_slice(&self.trajectory.to_le_bytes());
        out.extend_from_slice(&content.to_le_bytes());
    }

    /// Decodes a row of a snapshot; `None` if it is too short.
    pub(crate) fn decode(row: &[u8]) -> Option<(Self, u128)> {
        let mut row = Bytes(row);
        let (length, segment, offset) = (row.u32()?, row.u32()?, row.u32()?);
        let (hash, version, trajectory) = (row.u64()?, row.u64()?, row.u64()?);
        Some((Self { segment, offset, length, hash, version, trajectory }, row.u128()?))
    }
}

/// A sparse column of references.
#[derive(Debug, Default)]
pub(crate) struct References {
    tiles: Vec<Option<Box<[Reference]>>>,
}

impl References {
    pub(crate) fn get(&self, slot: Slot) -> Option<&Reference> {
        let tile = self.tiles.get(slot as usize / TILE)?.as_ref()?;
        Some(&tile[slot as usize % TILE]).filter(|reference| reference.length > 0)
    }

    pub(crate) fn set(&mut self, slot: Slot, reference: Reference) {
        let tile = slot as usize / TILE;
        if self.tiles.len() <= tile {
            self.tiles.resize_with(tile + 1, || None);
        }
        let values = self.tiles[tile].get_or_insert_with(|| vec![Reference::default(); TILE].into_boxed_slice());
        values[slot as usize % TILE] = reference;
    }

    /// Removes and returns the reference of a slot.
    pub(crate) fn remove(&mut self, slot: Slot) -> Option<Reference> {
        let tile = self.tiles.get_mut(slot as usize / TILE)?.as_mut()?;
        let taken = std::mem::take(&mut tile[slot as usize % TILE]);
        Some(taken).filter(|reference| reference.length > 0)
    }

    pub(crate) fn bytes(&self) -> u64 {
        (self.tiles.iter().flatten().count() * TILE * size_of::<Reference>()) as u64
    }
}
