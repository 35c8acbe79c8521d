//! Compute devices that execute passes over millions of memories.
//!
//! A [`Device`] holds the columns that passes read (potential, group) for many partitions in one arena of [`TILE`]-slot tiles per column, and
//! executes a pass over all of them in one call. It makes no decisions: the caller maps tiles to segments and slots to ids, and decides when a
//! clock folds.
//!
//! Invariant: every implementation returns identical bits. There are three: [`Cpu`]; [`Gpu`] over a [`gpu::Driver`], whose kernels are the
//! `.cu` files of this package; and [`MirroredDevice`], a CPU that offloads large passes to any number of GPUs.

mod cpu;
pub mod gpu;
mod instructions;
mod logical_device;
mod mirror;
mod mirrored_device;
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
pub use logical_device::LogicalDevice;
pub use mirror::Mirror;
pub use mirrored_device::{AvailableDevice, DeviceStatus, MirrorStatus, MirroredDevice};
pub use tiles::{TILE, Tiles};

use engram_memory::{DecayClock, Digest, Group, Histogram, MemoryId, QualityVector};
use recall::{RecallMatch, RecallRequest};

/// Index of a slot in the arena: `tile * TILE + offset`.
pub type Slot = u32;
/// Index of a tile in the arena.
pub type TileId = u32;
/// Index of a segment, which is a partition as the device sees it.
pub type SegmentId = u32;

/// State of one segment during a pass; its index in the slice is its [`SegmentId`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Segment {
    /// The decay clock after this pass's decay and fold.
    pub clock: DecayClock,
    /// Units to subtract from every potential (saturating) before the rest of the pass; 0 = no fold. Must be 0 for passes that do not update.
    pub fold: u32,
    /// Excludes the segment from rankings and histograms over all segments: a replica whose primary is on another worker. Has no effect on
    /// passes that update or that return results per segment.
    pub hidden: bool,
}

/// Entry of the tile table: the segment that owns a tile and its used slots.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tile {
    /// Segment that owns the tile.
    pub segment: SegmentId,
    /// Used slots, from the first; 0 = a free tile, at most [`TILE`].
    pub count: u32,
}

/// One update, resolved to a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Update {
    /// Slot in the used part of a tile.
    pub slot: Slot,
    /// Change in signed units.
    pub delta: i32,
}

/// One update of every memory of a group in a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupUpdate {
    /// Segment to update.
    pub segment: SegmentId,
    /// Group to update.
    pub group: Group,
    /// Change in signed units.
    pub delta: i32,
}

/// Direction of a ranking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Heaviest first, ties by id ascending: the rank order.
    HeaviestFirst,
    /// The exact reverse: lightest first, ties by id descending. The order of eviction.
    LightestFirst,
}

/// Memories that a ranking considers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// All memories of every segment.
    All,
    /// All memories of one segment.
    Segment(SegmentId),
    /// One group of every segment.
    Group(Group),
}

impl Scope {
    /// Returns the group of a group scope.
    pub(crate) const fn group(self) -> Option<Group> {
        match self {
            Self::Group(group) => Some(group),
            Self::All | Self::Segment(_) => None,
        }
    }
}

/// Error of a device.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The arena cannot grow; nothing changed.
    #[error("device is full: {missing_bytes} more bytes are needed")]
    Full {
        /// Bytes that could not be allocated.
        missing_bytes: u64,
    },
    /// The device failed; its arena is lost.
    #[error("device failed in pass '{pass}' (code {code})")]
    Failed {
        /// Pass or driver call that failed.
        pass: &'static str,
        /// Error code of the driver.
        code: i32,
    },
    /// A payload that a read needs cannot be read from disk. The device is not affected.
    #[error("failed to read a payload: {0}")]
    Payload(String),
}

/// Description of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Info {
    /// `cpu` or `cuda`.
    pub kind: &'static str,
    /// Display name: the processor's vendor name and the vector instructions in use.
    pub name: String,
    /// Number of threads that passes use.
    pub threads: usize,
}

/// Executes O(N) passes over the columns of many partitions. Calls block and take effect in call order.
///
/// `Send`, not shared: one thread owns it. The caller guarantees that slots and segments are in range; an implementation may panic otherwise
/// but never accesses memory outside its arena.
pub trait Device: Send {
    /// Returns the description of this device.
    fn info(&self) -> &Info;

    /// Returns the status of the GPUs that mirror this device, if it has any.
    fn mirror_status(&self) -> Option<&MirrorStatus> {
        None
    }

    /// Grows every column to at least `tiles` tiles; new tiles are free.
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

    /// Reads potential and group of each slot into `out`, which is replaced.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn read(&mut self, slots: &[Slot], out: &mut Vec<(u32, Group)>) -> Result<(), Error>;

    /// Folds the segments whose `fold` is not 0, then applies `updates` in order, clamped after each.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn update(&mut self, segments: &[Segment], updates: &[Update]) -> Result<(), Error>;

    /// Like [`Device::update`], for whole groups; appends to `changed` the number of memories that each update addressed.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn update_groups(
        &mut self,
        segments: &[Segment],
        updates: &[GroupUpdate],
        changed: &mut Vec<u64>,
    ) -> Result<(), Error>;

    /// Runs [`Device::update`], then computes the quality of every segment, in the same pass where that is faster. `out` is replaced by one
    /// vector per segment.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn epoch(&mut self, segments: &[Segment], updates: &[Update], out: &mut Vec<QualityVector>) -> Result<(), Error>;

    /// Counts the weights of all segments, per group, in `2^bits` bins; `bits` is at most
    /// [`MAX_HISTOGRAM_BITS`](engram_memory::quality::MAX_HISTOGRAM_BITS).
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn histogram(&mut self, segments: &[Segment], bits: u32) -> Result<Histogram, Error>;

    /// Returns the first `limit` slots of `scope` in `order` (all if `None`) with their weights in units.
    ///
    /// `ids` is the host's id column by slot; ties are broken by id, which is unique. A device may cache ids: since the last call they may have
    /// changed only where a row was written or a tile was mapped. `out` is replaced.
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

    /// Returns the best matches of a query: by [score](recall::Query::score) descending, then id ascending; `ids` as for [`Device::rank`].
    /// `out` is replaced.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Failed`].
    fn recall(
        &mut self,
        segments: &[Segment],
        request: &RecallRequest<'_>,
        ids: &Tiles<MemoryId>,
        out: &mut Vec<RecallMatch>,
    ) -> Result<(), Error>;

    /// Computes the digest of every segment into `out`, which is replaced. `content` holds the content hash by slot; `None` = all are 0.
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

    /// Copies one tile's used potentials and groups for a snapshot; both vectors are replaced.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn export(&mut self, tile: TileId, potentials: &mut Vec<u32>, groups: &mut Vec<u8>) -> Result<(), Error>;

    /// Returns the size of the arena in bytes.
    fn bytes(&self) -> u64;
}
