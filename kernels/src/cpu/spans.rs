//! Minimum and maximum id of each span of slots, by which a selection among ties skips most ids.
//!
//! A selection fills a span when it reads the ids; a write to one of its slots clears it. Spans therefore cost writers nothing, and take no
//! memory before the first selection.

use crate::{Order, Slot, TILE};
use engram_memory::MemoryId;

/// Slots of one span.
pub(super) const SPAN: usize = 64;

/// Bounds of the ids of some slots: none is below the least or above the highest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct IdSpan {
    least: u64,
    most: u64,
}

impl IdSpan {
    /// Bounds that hold for any ids.
    pub(super) const UNKNOWN: Self = Self { least: 0, most: u64::MAX };

    /// Computes the bounds of these ids.
    #[inline(always)]
    pub(super) fn of(ids: &[MemoryId]) -> Self {
        let (mut least, mut most) = (u64::MAX, 0);
        for id in ids {
            least = if id.0 < least { id.0 } else { least };
            most = if id.0 > most { id.0 } else { most };
        }
        Self { least, most }
    }

    /// Returns a tie-break key that none of the ids precedes: see [`Candidate::tie`](super::top::Candidate::tie).
    #[inline(always)]
    pub(super) fn first_tie(self, order: Order) -> u64 {
        match order {
            Order::HeaviestFirst => self.least,
            Order::LightestFirst => !self.most,
        }
    }
}

/// The spans of a tile.
pub(super) type TileSpans = [IdSpan; TILE / SPAN];

/// The spans of all tiles.
#[derive(Debug, Default)]
pub(super) struct IdSpans(Vec<TileSpans>);

impl IdSpans {
    /// Clears the span of a slot whose id may have changed.
    pub(super) fn forget(&mut self, slot: Slot) {
        if let Some(tile) = self.0.get_mut(slot as usize / TILE) {
            tile[slot as usize % TILE / SPAN] = IdSpan::UNKNOWN;
        }
    }

    /// Clears all spans of a tile.
    pub(super) fn forget_tile(&mut self, tile: usize) {
        if let Some(tile) = self.0.get_mut(tile) {
            *tile = [IdSpan::UNKNOWN; TILE / SPAN];
        }
    }

    /// Returns these tiles (ascending) with their spans.
    pub(super) fn of_tiles(&mut self, tiles: &[usize]) -> Vec<(usize, &mut TileSpans)> {
        let needed = tiles.last().map_or(0, |last| last + 1);
        if self.0.len() < needed {
            self.0.resize(needed, [IdSpan::UNKNOWN; TILE / SPAN]);
        }
        let mut requested = tiles.iter().copied().peekable();
        let is_requested = |(tile, _): &(usize, &mut TileSpans)| requested.next_if_eq(tile).is_some();
        self.0.iter_mut().enumerate().filter(is_requested).collect()
    }
}
