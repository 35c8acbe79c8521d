//! The trait of a device: what it is, what it executes, how it fails.

use crate::arena::{Segment, Slot, Tile, TileId};
use crate::mirror::MirrorStatus;
use crate::recall::{RecallMatch, RecallRequest};
use crate::requests::{DigestRequest, GroupUpdate, RankRequest, Update};
use engram_memory::{Digest, Group, Histogram, QualityVector};

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

    /// Returns the first slots of a ranking with their weights in units. `out` is replaced.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn rank(&mut self, request: &RankRequest<'_>, out: &mut Vec<(Slot, u32)>) -> Result<(), Error>;

    /// Returns the best matches of a query: by [score](crate::recall::Query::score) descending, then id ascending. `out` is replaced.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Failed`].
    fn recall(&mut self, request: &RecallRequest<'_>, out: &mut Vec<RecallMatch>) -> Result<(), Error>;

    /// Computes the digest of every segment into `out`, which is replaced.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn digest(&mut self, request: &DigestRequest<'_>, out: &mut Vec<Digest>) -> Result<(), Error>;

    /// Copies one tile's used potentials and groups for a snapshot; both vectors are replaced.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn export(&mut self, tile: TileId, potentials: &mut Vec<u32>, groups: &mut Vec<u8>) -> Result<(), Error>;

    /// Returns the size of the arena in bytes.
    fn bytes(&self) -> u64;
}
