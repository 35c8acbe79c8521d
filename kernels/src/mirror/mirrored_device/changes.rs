//! Changes of the host's columns that mirrors have not received.

use crate::{Slot, TILE, TileId};

/// Words of a tile's change bits, one bit per slot.
const WORDS: usize = TILE / u64::BITS as usize;
/// From this many changed rows on, the whole tile is transferred: rows are scattered, a tile is contiguous.
const FULL_TILE_ROWS: u32 = TILE as u32 / 4;

/// Changes by host tile since the last synchronization of its mirror.
#[derive(Debug, Default)]
pub(super) struct Changes {
    tiles: Vec<TileChange>,
    /// Slots whose potential or group changed: one bit per memory, kept from pass to pass.
    marks: Vec<[u64; WORDS]>,
}

/// Kinds of changes in a tile.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct TileChange {
    /// Its tile table entry changed.
    pub(super) entry: bool,
    /// Ids may have changed.
    pub(super) ids: bool,
    /// Some change bits are set.
    marked: bool,
    /// Any slot may have changed.
    all: bool,
}

/// A tile without a mirror.
const NEVER_SYNCED: TileChange = TileChange { entry: true, ids: true, marked: false, all: true };

/// Rows of a tile to transfer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RowSelection {
    /// No rows.
    None,
    /// These slots, ascending.
    Slots(Vec<Slot>),
    /// The whole tile.
    All,
}

impl Changes {
    /// Grows to `tiles` tiles; new ones have no mirror.
    pub(super) fn reserve(&mut self, tiles: usize) {
        self.tiles.resize(tiles.max(self.tiles.len()), NEVER_SYNCED);
        self.marks.resize(self.tiles.len(), [0; WORDS]);
    }

    /// Resets a tile for a new mirror that has none of its content.
    pub(super) fn reset(&mut self, tile: TileId) {
        self.mark_clean(tile);
        self.tiles[tile as usize] = NEVER_SYNCED;
    }

    /// Returns whether the tile's entry changed.
    pub(super) fn is_mapped(&self, tile: TileId) -> bool {
        self.tiles[tile as usize].entry
    }

    /// Records a change of the tile's entry.
    pub(super) fn mark_mapped(&mut self, tile: TileId) {
        self.tiles[tile as usize].entry = true;
    }

    /// Records a write to a slot, whose id may have changed.
    pub(super) fn mark_written(&mut self, slot: Slot) {
        self.mark_updated(slot);
        self.tiles[slot as usize / TILE].ids = true;
    }

    /// Records a change of the potential at a slot.
    pub(super) fn mark_updated(&mut self, slot: Slot) {
        let (tile, offset) = (slot as usize / TILE, slot % TILE as u32);
        self.tiles[tile].marked = true;
        self.marks[tile][(offset / u64::BITS) as usize] |= 1 << (offset % u64::BITS);
    }

    /// Records that any potential of the tile may have changed.
    pub(super) fn mark_all_updated(&mut self, tile: TileId) {
        self.tiles[tile as usize].all = true;
    }

    /// Returns the changes of a tile.
    pub(super) fn of(&self, tile: TileId) -> TileChange {
        self.tiles[tile as usize]
    }

    /// Returns the rows to transfer of a tile with `count` memories.
    pub(super) fn pending_rows(&self, tile: TileId, count: u32) -> RowSelection {
        let TileChange { marked, all, .. } = self.tiles[tile as usize];
        if count == 0 || !(marked || all) {
            return RowSelection::None;
        }
        let marks = &self.marks[tile as usize];
        if all || marks.iter().map(|word| word.count_ones()).sum::<u32>() >= FULL_TILE_ROWS {
            return RowSelection::All;
        }
        let offsets = (0..).step_by(u64::BITS as usize).zip(marks).flat_map(|(first, &word)| {
            let bits = std::iter::successors(Some(word), |rest| Some(rest & rest.wrapping_sub(1)));
            bits.take_while(|&rest| rest != 0).map(move |rest| first + rest.trailing_zeros())
        });
        // Slots beyond the count are unused and possibly uninitialized.
        RowSelection::Slots(offsets.take_while(|&offset| offset < count).map(|it| tile * TILE as u32 + it).collect())
    }

    /// Records that the mirror of the tile is current.
    pub(super) fn mark_clean(&mut self, tile: TileId) {
        let tile = tile as usize;
        if self.tiles[tile].marked {
            self.marks[tile] = [0; WORDS];
        }
        self.tiles[tile] = TileChange::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clean(tiles: usize) -> Changes {
        let mut changes = Changes::default();
        changes.reserve(tiles);
        (0..tiles as TileId).for_each(|tile| changes.mark_clean(tile));
        changes
    }

    #[test]
    fn new_tile_is_transferred_whole_and_clean_tile_not_at_all() {
        let mut changes = clean(1);
        changes.reserve(2);
        assert_eq!([changes.of(0), changes.of(1)], [TileChange::default(), NEVER_SYNCED]);
        assert_eq!([changes.pending_rows(0, 5), changes.pending_rows(1, 5)], [RowSelection::None, RowSelection::All]);
        changes.mark_clean(1);
        assert_eq!((changes.of(1), changes.pending_rows(1, 5)), (TileChange::default(), RowSelection::None));
        // Changes recorded for one mirror do not apply to the next.
        changes.mark_updated(7);
        changes.reset(0);
        changes.mark_clean(0);
        changes.mark_updated(8);
        assert_eq!(changes.pending_rows(0, 9), RowSelection::Slots(vec![8]));
    }

    #[test]
    fn each_used_slot_is_transferred_once() {
        let mut changes = clean(2);
        let first = TILE as u32;
        for slot in [first + 64, first + 3, first + 64, first + 4_095] {
            changes.mark_updated(slot);
        }
        assert_eq!(changes.of(0), TileChange::default());
        assert!(!changes.is_mapped(1) && !changes.of(1).ids);
        assert_eq!(changes.pending_rows(1, 4_095), RowSelection::Slots(vec![first + 3, first + 64]));
        assert_eq!(changes.pending_rows(1, 0), RowSelection::None);
        changes.mark_written(first);
        assert!(changes.of(1).ids);
        changes.mark_mapped(1);
        assert!(changes.is_mapped(1));
    }

    #[test]
    fn many_changed_rows_transfer_the_whole_tile() {
        let mut changes = clean(1);
        (0..FULL_TILE_ROWS - 1).for_each(|slot| changes.mark_updated(slot));
        assert_eq!(changes.pending_rows(0, FULL_TILE_ROWS), RowSelection::Slots((0..FULL_TILE_ROWS - 1).collect()));
        changes.mark_updated(FULL_TILE_ROWS - 1);
        assert_eq!(changes.pending_rows(0, FULL_TILE_ROWS), RowSelection::All);
        changes.mark_clean(0);
        changes.mark_updated(7);
        assert_eq!(changes.pending_rows(0, FULL_TILE_ROWS), RowSelection::Slots(vec![7]));
        changes.mark_all_updated(0);
        assert_eq!(changes.pending_rows(0, FULL_TILE_ROWS), RowSelection::All);
    }
}
