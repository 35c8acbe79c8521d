//! Devices: what executes the passes over millions of memories.
//!
//! A [`Device`] holds the columns that passes read (potential, group) for many partitions at once, in one arena of
//! [`TILE`]-slot tiles per column, and executes a pass over all of them in one call. It decides nothing: which tile
//! belongs to which segment, which slot holds which id, when a clock folds, all come from the caller. Every
//! implementation gives the same bits: [`Cpu`]; [`Gpu`] over a [`gpu::Driver`], whose kernels are the `.cu` files of this package; and
//! [`Mirrored`], the first with any number of the second beside it for large passes.

mod cpu;
pub mod gpu;
mod instructions;
mod logical;
mod mirror;
mod mirrored;
pub mod partitioner;
mod pool;
pub mod priority;
pub mod profiler;
pub mod recall;
pub mod threshold;
mod tiles;

pub use cpu::Cpu;
pub use gpu::Gpu;
pub use instructions::Instructions;
pub use logical::Logical;
pub use mirror::Mirror;
pub use mirrored::{Given, Held, Mirrored, Standing};
pub use tiles::{TILE, Tiles};

use engram_memory::{DecayClock, Digest, Group, Histogram, MemoryId, QualityVector};
use recall::{Alike, Recall};

/// A place in the arena: `tile * TILE + offset`.
pub type Slot = u32;
/// Index of a tile in the arena.
pub type TileId = u32;
/// Index of a segment, the device's word for one partition.
pub type SegmentId = u32;

/// What a device knows of one segment during a pass; the index in the slice is its [`SegmentId`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Segment {
    /// The decay clock after this pass's decay and fold.
    pub clock: DecayClock,
    /// Units to subtract from every potential (saturating) before anything else of the pass; 0 = no fold. Only the passes
    /// that update fold: to the others it must be 0.
    pub fold: u32,
    /// Left out of rankings and histograms over all segments: the copy of a partition that another worker serves. Passes that
    /// update, and those that answer per segment, make no difference.
    pub hidden: bool,
}

/// To whom a tile belongs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tile {
    /// Segment.
    pub segment: SegmentId,
    /// Slots in use, from the first; 0 = a free tile, at most [`TILE`].
    pub count: u32,
}

/// One update, resolved to a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Update {
    /// Slot, in a used part of a tile.
    pub slot: Slot,
    /// Signed units.
    pub delta: i32,
}

/// One update of a whole group of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupUpdate {
    /// Segment.
    pub segment: SegmentId,
    /// Group.
    pub group: Group,
    /// Signed units.
    pub delta: i32,
}

/// Which end of the rank order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Heaviest first, ties by id ascending: the rank order.
    HeaviestFirst,
    /// The exact reverse: lightest first, ties by id descending. What eviction takes.
    LightestFirst,
}

/// Which memories a ranking considers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// All of every segment.
    All,
    /// One segment.
    Segment(SegmentId),
    /// One group of every segment.
    Group(Group),
}

impl Scope {
    /// The group, when it is one.
    pub(crate) const fn group(self) -> Option<Group> {
        match self {
            Self::Group(group) => Some(group),
            Self::All | Self::Segment(_) => None,
        }
    }
}

/// Why a device could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The arena cannot grow; nothing changed.
    #[error("the device is full: {missing_bytes} bytes more are needed")]
    Full {
        /// Bytes that could not be had.
        missing_bytes: u64,
    },
    /// The device failed; its arena is lost.
    #[error("the device failed in pass '{pass}' (code {code})")]
    Failed {
        /// What it was doing.
        pass: &'static str,
        /// The driver's code.
        code: i32,
    },
}

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Info {
    /// `cpu` or `cuda`.
    pub kind: &'static str,
    /// Name for people: vendor's name of the processor, and the vector instructions in use.
    pub name: String,
    /// Threads that passes use.
    pub threads: usize,
}

/// Executes O(N) passes over the columns of many partitions. Calls block and take effect in call order.
///
/// `Send`, not shared: one thread owns it. Slots and segments that the caller names are in range by contract; an
/// implementation may panic on others but never reads or writes outside its arena.
pub trait Device: Send {
    /// What this device is.
    fn info(&self) -> &Info;

    /// How the GPUs beside it stand, where there are any.
    fn standing(&self) -> Option<&Standing> {
        None
    }

    /// Grows every column to at least `tiles` tiles; new ones are free.
    ///
    /// # Errors
    /// [`Error::Full`].
    fn reserve(&mut self, tiles: u32) -> Result<(), Error>;

    /// Replaces one entry of the tile table. Slots beyond the former count are undefined until written.
    fn map_tile(&mut self, tile: TileId, entry: Tile);

    /// Writes (slot, potential, group) rows in order: inserts, upserts, and moves after removals.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn write(&mut self, rows: &[(Slot, u32, Group)]) -> Result<(), Error>;

    /// Reads potential and group of each slot; `out` is replaced.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn read(&mut self, slots: &[Slot], out: &mut Vec<(u32, Group)>) -> Result<(), Error>;

    /// Folds the segments that ask for it, then applies `updates` in order, clamped after each.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn update(&mut self, segments: &[Segment], updates: &[Update]) -> Result<(), Error>;

    /// As [`Device::update`], with updates of whole groups, in order; appends to `changed` how many memories each one
    /// addressed.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn update_groups(
        &mut self,
        segments: &[Segment],
        updates: &[GroupUpdate],
        changed: &mut Vec<u64>,
    ) -> Result<(), Error>;

    /// [`Device::update`], then the quality of every segment, in the same pass where that is faster. `out` is replaced by
    /// one vector per segment.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn epoch(&mut self, segments: &[Segment], updates: &[Update], out: &mut Vec<QualityVector>) -> Result<(), Error>;

    /// Counts of the weights of all segments together, per group, in `2^bits` bins; `bits` is at most
    /// [`MAX_HISTOGRAM_BITS`](engram_memory::quality::MAX_HISTOGRAM_BITS).
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn histogram(&mut self, segments: &[Segment], bits: u32) -> Result<Histogram, Error>;

    /// The first `limit` slots of `scope` in `order`, all when `limit` is `None`, with their weights in units.
    ///
    /// `ids` is the host's id column by slot: ties are broken by id, which no two memories share. A device may remember ids: since the
    /// last call they may have changed only where a row was written or a tile mapped. `out` is replaced.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn rank(
        &mut self,
        segments: &[Segment],
        scope: Scope,
        order: Order,
        limit: Option<usize>,
        ids: &Tiles<MemoryId>,
        out: &mut Vec<(Slot, u32)>,
    ) -> Result<(), Error>;

    /// The memories most alike a query: by [score](recall::Query::score) descending, then id ascending; `ids` as for [`Device::rank`].
    /// `out` is replaced.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Failed`].
    fn recall(
        &mut self,
        segments: &[Segment],
        asked: &Recall<'_>,
        ids: &Tiles<MemoryId>,
        out: &mut Vec<Alike>,
    ) -> Result<(), Error>;

    /// The digest of every segment; `out` is replaced by one per segment. `content` gives the content hash by slot; `None` = all are 0.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn digest(
        &mut self,
        segments: &[Segment],
        ids: &Tiles<MemoryId>,
        content: Option<&Tiles<u128>>,
        out: &mut Vec<Digest>,
    ) -> Result<(), Error>;

    /// Copies one tile's used potentials and groups, as of this call, for a snapshot; both vectors are replaced.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn export(&mut self, tile: TileId, potentials: &mut Vec<u32>, groups: &mut Vec<u8>) -> Result<(), Error>;

    /// Bytes of the arena.
    fn bytes(&self) -> u64;
}
