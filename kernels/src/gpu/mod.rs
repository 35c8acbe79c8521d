//! GPU implementation of [`Device`](crate::Device): which kernels a pass launches, on which buffers, in which order.
//!
//! [`Gpu`] holds the columns in memory of a [`Driver`]. Kernels accumulate integers, so the order of threads and blocks does not matter, and the
//! one floating-point pass (recall) has a fixed order of additions. Results are identical to those of [`crate::Cpu`], bit for bit.
//!
//! A pass allocates all memory before it changes anything: [`Error::Full`] leaves the columns as they were.
//!
//! Invariants: every slot and length of a launch is checked here, since kernels check none. Temporary memory of a pass is freed afterwards; a
//! driver pools it.

mod algebra;
pub mod cuda;
mod driver;
mod geodesic;
mod mirror;
pub mod nccl;
mod passes;
mod plain;
mod training;

pub use algebra::ProductShape;
pub use driver::{Argument, Driver, Step, THREADS, run_steps};
pub use geodesic::{GeodesicKernels, MAX_INPUTS, NetworkBatch, NetworkGradient, PathAdjoint, PathBatch, PathFeatures};
pub use passes::{PrioritySums, Share};
pub use training::{
    Activation, Layer, Operation, TrainedNetwork, TrainingBatch, TrainingGradient, TrainingKernels, TrainingLoss,
};

use crate::{Error, Info, Segment, Slot, TILE, Tile, TileId, Tiles};
use engram_memory::MemoryId;
use passes::epoch_sequence::EpochSequences;
use passes::index::Index;
use passes::rank::SlotLists;
use passes::recall::Features;
use plain::{Plain, bytes, bytes_mut};
use training::TrainedParameters;

/// Maximum number of tiles in an arena: look-back words count slots in 30 bits.
const MAX_TILES: u32 = (1 << 30) / TILE as u32 - 1;
/// A potential, a group and an id.
const BYTES_PER_SLOT: u64 = 13;

/// A device whose passes run on a GPU.
///
/// Ids are mirrored: the ids by slot that a call passes may have changed since the last call only where a row was written or a tile was mapped.
pub struct Gpu<D: Driver> {
    info: Info,
    memory: Memory<D>,
    tiles: Vec<Tile>,
    /// The host tile that each tile mirrors.
    origins: Vec<TileId>,
    /// Columns, `None` before the first tile.
    columns: Option<Columns<D::Buffer>>,
    /// No memory has a higher group; determines the width of tables by group. Never decreases.
    highest_group: u8,
    /// Tiles whose ids differ from the id column on the device.
    stale_ids: Vec<bool>,
    /// Cached slot lists for rankings, valid until tiles or ids change.
    listed: SlotLists<D::Buffer>,
    index: Option<Index<D::Buffer>>,
    features: Option<Features<D::Buffer>>,
    /// Epoch sequences over the current columns.
    sequences: EpochSequences<D>,
    /// Parameters of the network that was trained last.
    trained: Option<TrainedParameters<D::Buffer>>,
}

/// The columns by slot, and the device's tile table.
struct Columns<B> {
    potentials: B,
    groups: B,
    ids: B,
    tiles: B,
    /// Whether `tiles` is older than the host's table.
    tiles_stale: bool,
}

impl<B> Columns<B> {
    /// Returns the kernel arguments for weights, in this order: `potential`, `segments`, `tiles`.
    fn weights<'a>(&'a self, segments: &'a B) -> [Argument<'a, B>; 3] {
        [Argument::Buffer(&self.potentials), Argument::Buffer(segments), Argument::Buffer(&self.tiles)]
    }

    /// Returns the kernel arguments for weights and groups: `potential`, `group`, `segments`, `tiles`.
    fn weights_and_groups<'a>(&'a self, segments: &'a B) -> [Argument<'a, B>; 4] {
        let [potentials, segments, tiles] = self.weights(segments);
        [potentials, Argument::Buffer(&self.groups), segments, tiles]
    }
}

impl<D: Driver> Gpu<D> {
    /// Creates a device without tiles; `name` is its display name.
    pub fn new(driver: D, name: String) -> Self {
        Self {
            info: Info { kind: "cuda", name, threads: 1 },
            memory: Memory(driver),
            tiles: Vec::new(),
            origins: Vec::new(),
            columns: None,
            highest_group: 0,
            stale_ids: Vec::new(),
            listed: SlotLists::default(),
            index: None,
            features: None,
            sequences: EpochSequences::default(),
            trained: None,
        }
    }

    /// Returns the driver.
    pub fn driver_mut(&mut self) -> &mut D {
        &mut self.memory.0
    }

    /// Frees all memory and returns the driver.
    pub fn into_driver(self) -> D {
        self.memory.0
    }

    fn grow(&mut self, tiles: u32) -> Result<(), Error> {
        let (own, required) = (self.tiles.len(), tiles as usize);
        if required <= own {
            return Ok(());
        }
        if tiles > MAX_TILES {
            return Err(Error::Full { missing_bytes: u64::from(tiles - MAX_TILES) * TILE as u64 * BYTES_PER_SLOT });
        }
        let slots = required * TILE;
        // They use the old columns; dropping them frees memory for the new ones.
        self.sequences = EpochSequences::default();
        let memory = &mut self.memory;
        // All allocations come first: an error leaves the device as it was.
        let columns = Columns {
            potentials: memory.undefined::<u32>(slots)?,
            groups: memory.undefined::<u8>(slots)?,
            ids: memory.undefined::<u64>(slots)?,
            tiles: memory.undefined::<[u32; 2]>(required)?,
            tiles_stale: true,
        };
        let features = self.features.as_ref().map(|features| features.grown(memory, own, required)).transpose()?;
        if let Some(former) = &self.columns {
            memory.0.copy(&former.potentials, &columns.potentials, own * TILE * size_of::<u32>())?;
            memory.0.copy(&former.groups, &columns.groups, own * TILE)?;
            memory.0.copy(&former.ids, &columns.ids, own * TILE * size_of::<u64>())?;
        }
        self.columns = Some(columns);
        self.features = features;
        self.tiles.resize(required, Tile::default());
        self.origins.extend(own as TileId..tiles);
        self.stale_ids.resize(required, true);
        Ok(())
    }

    /// Returns the number of blocks of a pass with one block per tile.
    fn tile_blocks(&self) -> u32 {
        self.tiles.len() as u32
    }

    /// Returns the number of memories in the arena.
    fn used(&self) -> usize {
        self.tiles.iter().map(|tile| tile.count as usize).sum()
    }

    fn check_slots(&self, slots: impl IntoIterator<Item = Slot>) {
        let end = self.tiles.len() * TILE;
        slots.into_iter().for_each(|slot| assert!((slot as usize) < end, "slot {slot} is outside of the arena"));
    }

    fn check_segments(&self, segments: usize) {
        let used = self.tiles.iter().filter(|tile| tile.count > 0);
        used.for_each(|tile| assert!((tile.segment as usize) < segments, "segment {} is missing", tile.segment));
    }

    /// Returns whether there are memories; if so, the tile table on the device is current and every tile's segment is below `segments`.
    fn has_memories(&mut self, segments: usize) -> Result<bool, Error> {
        let Some(columns) = self.columns.as_mut().filter(|_| self.tiles.iter().any(|tile| tile.count > 0)) else {
            return Ok(false);
        };
        if columns.tiles_stale {
            let rows: Vec<_> = self.tiles.iter().map(|tile| [tile.segment, tile.count]).collect();
            self.memory.0.upload(&columns.tiles, 0, bytes(&rows))?;
            columns.tiles_stale = false;
        }
        self.check_segments(segments);
        Ok(true)
    }

    /// Uploads the segments and returns a view of the columns; `None` if there are no memories.
    fn view(&mut self, segments: &[Segment]) -> Result<Option<View<'_, D>>, Error> {
        if !self.has_memories(segments.len())? {
            return Ok(None);
        }
        let rows: Vec<_> = segments.iter().map(|it| [it.clock.units(), it.fold, u32::from(it.hidden)]).collect();
        let segments = self.memory.uploaded(&rows)?;
        Ok(Some(View {
            columns: self.columns.as_ref().expect("an arena with memories has columns"),
            memory: &mut self.memory,
            segments,
            slots: self.tiles.len() * TILE,
        }))
    }

    /// Updates the id column from the host's.
    fn mirror(&mut self, ids: &Tiles<MemoryId>) -> Result<(), Error> {
        let Some(columns) = &mut self.columns else { return Ok(()) };
        for (tile, stale) in self.stale_ids.iter_mut().enumerate().filter(|(_, stale)| **stale) {
            let count = self.tiles[tile].count as usize;
            if count > 0 {
                let origin = self.origins[tile] as usize;
                let own: Vec<u64> = ids.tile(origin)[..count].iter().map(|id| id.0).collect();
                self.memory.0.upload(&columns.ids, tile * TILE * size_of::<u64>(), bytes(&own))?;
            }
            *stale = false;
        }
        Ok(())
    }

    /// Marks ids of a tile as possibly changed.
    pub(crate) fn touch(&mut self, tile: TileId) {
        self.stale_ids[tile as usize] = true;
        self.listed = SlotLists::default();
    }
}

/// Inputs and outputs of passes.
struct View<'a, D: Driver> {
    memory: &'a mut Memory<D>,
    columns: &'a Columns<D::Buffer>,
    segments: D::Buffer,
    /// Number of slots in the arena.
    slots: usize,
}

/// A driver with typed values instead of bytes.
struct Memory<D: Driver>(D);

impl<D: Driver> Memory<D> {
    fn undefined<T: Plain>(&mut self, count: usize) -> Result<D::Buffer, Error> {
        self.0.allocate((count * size_of::<T>()).max(1))
    }

    fn zeroed<T: Plain>(&mut self, count: usize) -> Result<D::Buffer, Error> {
        let buffer = self.undefined::<T>(count)?;
        self.0.fill(&buffer, 0..count * size_of::<T>(), 0)?;
        Ok(buffer)
    }

    fn uploaded<T: Plain>(&mut self, values: &[T]) -> Result<D::Buffer, Error> {
        let buffer = self.undefined::<T>(values.len())?;
        self.0.upload(&buffer, 0, bytes(values))?;
        Ok(buffer)
    }

    fn downloaded<T: Plain>(&mut self, buffer: &D::Buffer, count: usize) -> Result<Vec<T>, Error> {
        let mut values = vec![T::default(); count];
        self.0.download(buffer, 0, bytes_mut(&mut values))?;
        Ok(values)
    }

    /// Launches one block for every `per_block` of `count` items; none for 0.
    fn launch(
        &mut self,
        kernel: &'static str,
        count: usize,
        per_block: usize,
        arguments: &[Argument<'_, D::Buffer>],
    ) -> Result<(), Error> {
        match count.div_ceil(per_block) as u32 {
            0 => Ok(()),
            blocks => self.0.launch(kernel, blocks, arguments),
        }
    }
}

/// Returns the prefix sums of the lengths: the offset of each part, and the total as last entry.
fn firsts(lengths: impl Iterator<Item = u32>) -> Vec<u32> {
    let mut sum = 0;
    let mut firsts = vec![0];
    firsts.extend(lengths.map(|length| {
        sum += length;
        sum
    }));
    firsts
}
