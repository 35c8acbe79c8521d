//! The arena shared by all partitions of a worker: the device, the host's columns, and tile allocation.

use crate::payload::{Payloads, Reference};
use crate::state::columns::Columns;
use crate::state::partitions::PayloadPart;
use bytes::Bytes;
use engram_kernels::{Device, Error, Segment, SegmentId, Slot, TILE, Tile, TileId};
use engram_memory::{FeatureShape, Group, MemoryId, PartitionId, mix64};
use std::hash::{BuildHasher, RandomState};

/// Device, columns and free tiles.
pub(crate) struct Arena {
    pub(crate) device: Box<dyn Device>,
    pub(crate) columns: Columns,
    pub(crate) payloads: Payloads,
    /// Device parameters of each partition; the fold is 0 between passes.
    pub(crate) segments: Vec<Segment>,
    /// Random per process, so that clients cannot aim ids at one index bucket. Never part of any state.
    seed: u64,
    free: Vec<TileId>,
    /// Tiles reserved on device and in columns.
    tiles: u32,
    /// Reused by device reads.
    scratch: Vec<(u32, Group)>,
}

impl Arena {
    pub(crate) fn new(device: Box<dyn Device>, features: FeatureShape, partitions: u32, payloads: Payloads) -> Self {
        Self {
            device,
            columns: Columns::new(features),
            payloads,
            segments: vec![Segment::default(); partitions as usize],
            seed: RandomState::new().hash_one(0_u64),
            free: Vec::new(),
            tiles: 0,
            scratch: Vec::new(),
        }
    }

    /// Returns the index hash of `id`. Indices use its top bits: within a partition the low bits of the unseeded hash are
    /// constant.
    pub(crate) const fn hash(&self, id: MemoryId) -> u64 {
        mix64(id.0 ^ self.seed)
    }

    /// Allocates a tile.
    pub(crate) fn take_tile(&mut self) -> Result<TileId, Error> {
        if let Some(tile) = self.free.pop() {
            return Ok(tile);
        }
        self.device.reserve(self.tiles + 1)?;
        self.columns.reserve(self.tiles as usize + 1);
        self.tiles += 1;
        Ok(self.tiles - 1)
    }

    /// Frees a tile.
    pub(crate) fn free_tile(&mut self, tile: TileId) {
        self.device.map_tile(tile, Tile::default());
        self.free.push(tile);
    }

    /// Reads potentials and groups of `slots`, in order.
    pub(crate) fn read(&mut self, slots: &[Slot]) -> Result<&[(u32, Group)], Error> {
        self.device.read(slots, &mut self.scratch)?;
        Ok(&self.scratch)
    }

    /// Stores the payload of an item of a partition on disk, and hashes its content.
    pub(crate) fn store_payload(&mut self, segment: SegmentId, slot: Slot, payload: &[u8]) {
        self.release_payload(segment, slot);
        let partition = PartitionId(segment);
        let reference = Reference::of(payload, self.payloads.write(partition, payload));
        self.payloads.retain(partition, &reference);
        self.columns.set_reference(slot, reference);
        self.columns.hash_payload(slot, payload);
    }

    /// Drops the payload on disk of a slot of a partition, if it has one.
    pub(crate) fn release_payload(&mut self, segment: SegmentId, slot: Slot) {
        if let Some(reference) = self.columns.take_reference(slot) {
            self.payloads.release(PartitionId(segment), &reference);
        }
    }

    /// Replaces features and payload of a memory unless empty, and their hash.
    pub(crate) fn set_content(
        &mut self,
        segment: SegmentId,
        slot: Slot,
        features: &[u8],
        payload: &[u8],
    ) -> Result<(), Error> {
        if !payload.is_empty() {
            self.release_payload(segment, slot);
        }
        let needs_payload = !features.is_empty() && payload.is_empty();
        let read = if needs_payload { self.read_payload(segment, slot, PayloadPart::All) } else { Ok(None) };
        let stored = match read {
            // The checksum stands in for a damaged payload. The content hash then differs from that of an intact replica, from which this one is
            // rebuilt; where no replica is intact, it is the same on all.
            Err(Error::Payload(_)) => {
                self.columns.reference(slot).map(|reference| Bytes::copy_from_slice(&reference.hash.to_le_bytes()))
            }
            read => read?,
        };
        self.columns.set_content(slot, features, payload);
        if let Some(stored) = stored {
            self.columns.hash_payload(slot, &stored);
        }
        Ok(())
    }

    /// Reads the payload on disk of a slot of a partition; `None` if it has none.
    pub(crate) fn read_payload(
        &mut self,
        segment: SegmentId,
        slot: Slot,
        part: PayloadPart,
    ) -> Result<Option<Bytes>, Error> {
        let Some(&reference) = self.columns.reference(slot) else { return Ok(None) };
        let partition = PartitionId(segment);
        let read = match part {
            PayloadPart::None => Ok(Bytes::new()),
            PayloadPart::Start(bytes) => self.payloads.read_start(partition, &reference, bytes),
            PayloadPart::All => self.payloads.read(partition, &reference),
        };
        read.map(Some).map_err(|text| Error::Payload(format!("item {}: {text}", self.columns.id(slot))))
    }

    /// Bytes of device, columns and payloads in memory.
    pub(crate) fn bytes(&self) -> u64 {
        let usage = self.payloads.usage();
        self.device.bytes() + self.columns.bytes() + usage.cached_bytes + usage.buffered_bytes
    }
}

/// Tiles that `memories` memories of one partition need.
pub(crate) const fn tiles_of(memories: u32) -> usize {
    (memories as usize).div_ceil(TILE)
}
