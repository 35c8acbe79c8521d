//! The arena of a device: tiles of slots, and the segments that own them.

use engram_memory::DecayClock;

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
    /// Used slots, from the first; 0 = a free tile, at most [`TILE`](crate::TILE).
    pub count: u32,
}
