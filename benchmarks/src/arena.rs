//! A device filled as a worker of 256 partitions fills it: each memory in the partition of its id, two groups.

use engram_kernels::{Cpu, Device, Error, Segment, Slot, TILE, Tile, Tiles};
use engram_memory::hash::{mix64, partition_of};
use engram_memory::{DecayClock, Group, MemoryId, Weight, clock::Advance};

/// Partitions of a cluster, unless its manifest says otherwise.
const PARTITIONS: u32 = 256;

/// Rows written per call while filling.
const ROWS: usize = 1 << 16;

/// A filled device with what the host knows beside it.
pub(crate) struct Arena {
    pub(crate) device: Cpu,
    pub(crate) segments: Vec<Segment>,
    pub(crate) ids: Tiles<MemoryId>,
    /// The slot of memory 0, 1, 2, ...
    pub(crate) slots: Vec<Slot>,
}

impl Arena {
    /// `memories` memories with the weights that `weight` gives; groups 0 and 1 by a hash of the id.
    ///
    /// # Errors
    /// When the device is full.
    pub(crate) fn new(memories: u32, threads: usize, weight: impl Fn(MemoryId) -> Weight) -> Result<Self, Error> {
        let id_of = |number: u32| MemoryId(mix64(u64::from(number)));
        let mut counts = vec![0_usize; PARTITIONS as usize];
        for number in 0..memories {
            counts[partition_of(id_of(number), PARTITIONS).0 as usize] += 1;
        }

        let tiles: usize = counts.iter().map(|count| count.div_ceil(TILE)).sum();
        let mut device = Cpu::new(threads);
        let mut ids = Tiles::new();
        device.reserve(tiles as u32)?;
        ids.reserve(tiles);
        // Where the next memory of each partition goes: a partition's tiles stand side by side here.
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
            let id = id_of(number);
            let place = &mut next[partition_of(id, PARTITIONS).0 as usize];
            let group = Group((mix64(id.0) >> 63) as u8);
            rows.push((*place, clock.potential(weight(id)), group));
            ids.set(*place, id);
            slots.push(*place);
            *place += 1;
            if rows.len() == ROWS {
                device.write(&rows)?;
                rows.clear();
            }
        }
        device.write(&rows)?;
        let segments = vec![Segment { clock, fold: 0 }; counts.len()];
        Ok(Self { device, segments, ids, slots })
    }

    /// Moves every clock by `amount` units; the next pass folds where a clock has run full. Returns whether it will.
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

/// A weight in [0, 1), uniform over ids.
pub(crate) fn uniform(id: MemoryId) -> Weight {
    Weight::from_units((mix64(id.0 ^ 0x5eed) >> 34) as u32).expect("30 bits are below one")
}

/// The same weight for all.
pub(crate) fn tied(_: MemoryId) -> Weight {
    Weight::HALF
}
