//! Test memories: pseudo-random weights and two groups, in tiles of many segments in turn.

use anyhow::Result;
use engram_kernels::gpu::Driver;
use engram_kernels::{Device, Gpu, Segment, TILE, Tile, Tiles};
use engram_memory::{DecayClock, MemoryId, ONE, mix64};

/// Default number of partitions of a cluster.
const SEGMENTS: u32 = 256;
/// Decay clock of the segments.
const CLOCK: u32 = 10_737_418;

/// Memories and segments of a pass.
pub(super) struct Arena {
    pub(super) segments: Vec<Segment>,
    pub(super) ids: Tiles<MemoryId>,
    pub(super) memories: u32,
}

impl Arena {
    pub(super) fn new(memories: u32) -> Self {
        let clock = DecayClock::from_units(CLOCK).expect("the clock is below the fold");
        let mut ids = Tiles::new();
        ids.reserve((memories as usize).div_ceil(TILE));
        for (tile, ids) in ids.iter_mut().enumerate() {
            ids.iter_mut().enumerate().for_each(|(at, id)| *id = MemoryId(mix64((tile * TILE + at) as u64)));
        }
        Self { segments: vec![Segment { clock, ..Segment::default() }; SEGMENTS as usize], ids, memories }
    }

    /// Returns tiles with their entry, potentials and groups.
    pub(super) fn tiles(&self) -> impl Iterator<Item = (u32, Tile, Vec<u32>, Vec<u8>)> {
        let memories = self.memories as usize;
        (0..memories.div_ceil(TILE)).map(move |tile| {
            let count = TILE.min(memories - tile * TILE);
            let slots = (tile * TILE) as u64..(tile * TILE + count) as u64;
            let potentials = slots.clone().map(potential).collect();
            let groups = slots.map(|slot| (slot & 1) as u8).collect();
            (tile as u32, Tile { segment: tile as u32 % SEGMENTS, count: count as u32 }, potentials, groups)
        })
    }

    /// Fills an empty device.
    ///
    /// # Errors
    /// As the device.
    pub(super) fn fill<D: Driver>(&self, gpu: &mut Gpu<D>) -> Result<()> {
        gpu.reserve(self.memories.div_ceil(TILE as u32))?;
        for (tile, entry, potentials, groups) in self.tiles() {
            gpu.map_tile(tile, entry);
            gpu.replace(tile, &potentials, &groups)?;
        }
        Ok(())
    }

    /// Fills any device, row by row.
    ///
    /// # Errors
    /// As the device.
    pub(super) fn write(&self, device: &mut dyn Device) -> Result<()> {
        device.reserve(self.memories.div_ceil(TILE as u32))?;
        for (tile, entry, potentials, groups) in self.tiles() {
            device.map_tile(tile, entry);
            let slots = tile * TILE as u32..;
            let rows = potentials.into_iter().zip(groups).zip(slots);
            let rows: Vec<_> =
                rows.map(|((potential, group), slot)| (slot, potential, engram_memory::Group(group))).collect();
            device.write(&rows)?;
        }
        Ok(())
    }
}

/// Returns the potential for a weight in [0, 1).
fn potential(slot: u64) -> u32 {
    CLOCK + (mix64(slot ^ 0x5eed) % u64::from(ONE)) as u32
}
