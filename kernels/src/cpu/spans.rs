//! The least and the highest id of every few slots, by which a selection among ties leaves most ids unread.
//!
//! A span is learned when a selection reads the ids, and forgotten when one of them may have changed. So spans take nothing from
//! those who write, and no memory before the first selection.

use crate::{Order, Slot, TILE};
use engram_memory::MemoryId;

/// Slots of one span.
pub(super) const SPAN: usize = 64;

/// What is known of the ids of some slots: none is below the least or above the highest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    least: u64,
    most: u64,
}

impl Span {
    /// True of any ids.
    pub(super) const UNKNOWN: Self = Self { least: 0, most: u64::MAX };

    /// The span of these.
    #[inline(always)]
    pub(super) fn of(ids: &[MemoryId]) -> Self {
        let (mut least, mut most) = (u64::MAX, 0);
        for id in ids {
            least = if id.0 < least { id.0 } else { least };
            most = if id.0 > most { id.0 } else { most };
        }
        Self { least, most }
    }

    /// A tie that none of the ids comes before: see [`Candidate::tie`](super::top::Candidate::tie).
    #[inline(always)]
    pub(super) fn first_tie(self, order: Order) -> u64 {
        match order {
            Order::HeaviestFirst => self.least,
            Order::LightestFirst => !self.most,
        }
    }
}

/// The spans of a tile.
pub(super) type SpansOfTile = [Span; TILE / SPAN];

/// The spans of all tiles.
#[derive(Debug, Default)]
pub(super) struct Spans(Vec<SpansOfTile>);

impl Spans {
    /// The slot may have another memory than before.
    pub(super) fn forget(&mut self, slot: Slot) {
        if let Some(tile) = self.0.get_mut(slot as usize / TILE) {
            tile[slot as usize % TILE / SPAN] = Span::UNKNOWN;
        }
    }

    /// Any slot of the tile may have.
    pub(super) fn forget_tile(&mut self, tile: usize) {
        if let Some(tile) = self.0.get_mut(tile) {
            *tile = [Span::UNKNOWN; TILE / SPAN];
        }
    }

    /// These tiles, which ascend, with what is known of each.
    pub(super) fn of_tiles(&mut self, tiles: &[usize]) -> Vec<(usize, &mut SpansOfTile)> {
        let needed = tiles.last().map_or(0, |last| last + 1);
        if self.0.len() < needed {
            self.0.resize(needed, [Span::UNKNOWN; TILE / SPAN]);
        }
        let mut wanted = tiles.iter().copied().peekable();
        let is_wanted = |(tile, _): &(usize, &mut SpansOfTile)| wanted.next_if_eq(tile).is_some();
        self.0.iter_mut().enumerate().filter(is_wanted).collect()
    }
}
