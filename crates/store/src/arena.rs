//! The arena shared by all partitions of a worker: the device, the host's columns, and tile allocation.

use crate::columns::Columns;
use engram_kernels::{Device, Error, Segment, Slot, TILE, Tile, TileId};
use engram_memory::{FeatureShape, Group, MemoryId, mix64};
use std::hash::{BuildHasher, RandomState};

/// Device, columns and free tiles.
pub(crate) struct Arena {
    pub(crate) device: Box<dyn Device>,
    pub(crate) columns: Columns,
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
    pub(crate) fn new(device: Box<dyn Device>, features: FeatureShape, partitions: u32) -> Self {
        Self {
            device,
            columns: Columns::new(features),
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

    /// Bytes of device and columns.
    pub(crate) fn bytes(&self) -> u64 {
        self.device.bytes() + self.columns.bytes()
    }
}

/// Tiles that `memories` memories of one partition need.
pub(crate) const fn tiles_of(memories: u32) -> usize {
    (memories as usize).div_ceil(TILE)
}
