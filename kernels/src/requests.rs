//! What passes are asked for: updates, rankings, digests. [`RecallRequest`](crate::recall::RecallRequest) is with its score.

use crate::arena::{Segment, SegmentId, Slot};
use crate::tiles::Tiles;
use engram_memory::{Group, MemoryId};

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

/// Request of a ranking.
#[derive(Clone, Copy)]
pub struct RankRequest<'a> {
    /// Segments by [`SegmentId`].
    pub segments: &'a [Segment],
    /// The host's id column by slot; ties are broken by id, which is unique. A device may cache ids: since the last pass they may have changed
    /// only where a row was written or a tile was mapped.
    pub ids: &'a Tiles<MemoryId>,
    /// Memories to consider.
    pub scope: Scope,
    /// Direction of the ranking.
    pub order: Order,
    /// Maximum number of entries; all if `None`.
    pub limit: Option<usize>,
}

/// Request of the digests of all segments.
#[derive(Clone, Copy)]
pub struct DigestRequest<'a> {
    /// Segments by [`SegmentId`].
    pub segments: &'a [Segment],
    /// The host's id column by slot, as in [`RankRequest::ids`].
    pub ids: &'a Tiles<MemoryId>,
    /// Content hash by slot; `None` = all are 0.
    pub content: Option<&'a Tiles<u128>>,
}
