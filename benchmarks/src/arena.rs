//! A device filled like that of a worker with 256 partitions: each memory in the partition of its id, two groups.

use engram_kernels::profiler::{ProfiledDevice, Recorder};
use engram_kernels::{Cpu, Device, Error, Segment, Slot, TILE, Tile, Tiles};
use engram_memory::hash::partition_of;
use engram_memory::{DecayClock, MemoryId, Weight, clock::Advance};

use crate::population::{self, PARTITIONS};

/// Rows written per call while filling.
const ROWS: usize = 1 << 16;

/// A filled device with the host's state for it.
pub(crate) struct Arena<D = Cpu> {
    pub(crate) device: D,
    pub(crate) segments: Vec<Segment>,
    pub(crate) ids: Tiles<MemoryId>,
    /// Slots of memory 0, 1, 2, ...
    pub(crate) slots: Vec<Slot>,
}

impl Arena {
    /// Fills a CPU device with `memories` memories; `weight` returns their weights.
    ///
    /// # Errors
    /// When the device is full.
    pub(crate) fn new(memories: u32, threads: usize, weight: impl Fn(MemoryId) -> Weight) -> Result<Self, Error> {
        Self::over(Cpu::new(threads), memories, weight)
    }

    /// Records every pass from here on.
    pub(crate) fn profiled(self, recorder: Recorder) -> Arena<ProfiledDevice<Cpu>> {
        let Self { device, segments, ids, slots } = self;
        Arena { device: ProfiledDevice::new(device, recorder), segments, ids, slots }
    }
}

impl<D: Device> Arena<D> {
    /// Fills a device without tiles with `memories` memories; `weight` returns their weights.
    ///
    /// # Errors
    /// When the device is full.
    pub(crate) fn over(mut device: D, memories: u32, weight: impl Fn(MemoryId) -> Weight) -> Result<Self, Error> {
        let mut counts = vec![0_usize; PARTITIONS as usize];
        for number in 0..memories {
            counts[partition_of(population::id(number), PARTITIONS).0 as usize] += 1;
        }

        let tiles: usize = counts.iter().map(|count| count.div_ceil(TILE)).sum();
        let mut ids = Tiles::new();
        device.reserve(tiles as u32)?;
        ids.reserve(tiles);
        // Next slot of each partition, whose tiles are adjacent here.
        let mut next = Vec::with_capacity(counts.len());
        let mut tile = 0;
        for (segment, count) in counts.iter().enumerate() {
            next.push((tile * TILE) as Slot);
            for start in (0..*count).step_by(TILE) {
                let used = (count - start).min(TILE) as u32;
                device.map_tile(tile as u32, Tile { segment: segment as u32, count: used });
                tile += 1;
            }
        }

        let mut slots = Vec::with_capacity(memories as usize);
        let mut rows = Vec::with_capacity(ROWS);
        let clock = DecayClock::default();
        for number in 0..memories {
            let id = population::id(number);
            let place = &mut next[partition_of(id, PARTITIONS).0 as usize];
            rows.push((*place, clock.potential(weight(id)), population::group(id)));
            ids.set(*place, id);
            slots.push(*place);
            *place += 1;
            if rows.len() == ROWS {
                device.write(&rows)?;
                rows.clear();
            }
        }
        device.write(&rows)?;
        let segments = vec![Segment { clock, ..Segment::default() }; counts.len()];
        Ok(Self { device, segments, ids, slots })
    }
}

impl<D> Arena<D> {
    /// Moves every clock by `amount` units; the next pass folds overflowing clocks. Returns whether there are any.
    pub(crate) fn decay(&mut self, amount: u32) -> bool {
        for segment in &mut self.segments {
            segment.fold = match segment.clock.advance(amount) {
                Advance::Moved => 0,
                Advance::Fold { subtract } => subtract,
            };
        }
        self.segments.iter().any(|segment| segment.fold > 0)
    }
}

/// Returns the same weight for all memories.
pub(crate) fn tied(_: MemoryId) -> Weight {
    Weight::HALF
}
