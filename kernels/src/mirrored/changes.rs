//! What of the host's columns its mirrors lack.

use crate::{Slot, TILE, TileId};

/// Words of the marks of a tile, a bit for each slot.
const WORDS: usize = TILE / u64::BITS as usize;
/// From so many rows of a tile on, all of it is taken: rows go to scattered places, a tile goes in one piece.
const MANY: u32 = TILE as u32 / 4;

/// Changes since the mirror that holds a copy of a tile was brought up last, by tile of the host.
#[derive(Debug, Default)]
pub(super) struct Changes {
    tiles: Vec<Changed>,
    /// Slots whose potential or group changed. Kept from pass to pass: it is an eighth of a byte a memory.
    marks: Vec<[u64; WORDS]>,
}

/// What changed of a tile.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Changed {
    /// Its entry in the tile table.
    pub(super) entry: bool,
    /// A slot may have another memory.
    pub(super) ids: bool,
    /// Slots are marked.
    marked: bool,
    /// Any slot may have changed.
    all: bool,
}

/// Of a tile that a mirror has not.
const UNKNOWN: Changed = Changed { entry: true, ids: true, marked: false, all: true };

/// The rows of a tile that are to be taken.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// None of them.
    None,
    /// These, ascending.
    Slots(Vec<Slot>),
    /// All of them.
    All,
}

impl Changes {
    /// Makes room for `tiles` tiles, of which no mirror has any yet.
    pub(super) fn reserve(&mut self, tiles: usize) {
        self.tiles.resize(tiles.max(self.tiles.len()), UNKNOWN);
        self.marks.resize(self.tiles.len(), [0; WORDS]);
    }

    /// Another mirror is to hold the tile, which knows nothing of it.
    pub(super) fn unknown(&mut self, tile: TileId) {
        self.cleared(tile);
        self.tiles[tile as usize] = UNKNOWN;
    }

    /// Whether the tile's entry changed.
    pub(super) fn is_mapped(&self, tile: TileId) -> bool {
        self.tiles[tile as usize].entry
    }

    /// The tile's entry changed.
    pub(super) fn mapped(&mut self, tile: TileId) {
        self.tiles[tile as usize].entry = true;
    }

    /// A slot was written: its memory may be another one.
    pub(super) fn written(&mut self, slot: Slot) {
        self.updated(slot);
        self.tiles[slot as usize / TILE].ids = true;
    }

    /// The potential at a slot changed.
    pub(super) fn updated(&mut self, slot: Slot) {
        let (tile, offset) = (slot as usize / TILE, slot % TILE as u32);
        self.tiles[tile].marked = true;
        self.marks[tile][(offset / u64::BITS) as usize] |= 1 << (offset % u64::BITS);
    }

    /// Any potential of the tile may have changed.
    pub(super) fn all_updated(&mut self, tile: TileId) {
        self.tiles[tile as usize].all = true;
    }

    /// What changed of a tile.
    pub(super) fn of(&self, tile: TileId) -> Changed {
        self.tiles[tile as usize]
    }

    /// The rows to take of a tile, which has `count` memories.
    pub(super) fn wanted(&self, tile: TileId, count: u32) -> Wanted {
        let Changed { marked, all, .. } = self.tiles[tile as usize];
        if count == 0 || !(marked || all) {
            return Wanted::None;
        }
        let marks = &self.marks[tile as usize];
        if all || marks.iter().map(|word| word.count_ones()).sum::<u32>() >= MANY {
            return Wanted::All;
        }
        let offsets = (0..).step_by(u64::BITS as usize).zip(marks).flat_map(|(first, &word)| {
            let bits = std::iter::successors(Some(word), |rest| Some(rest & rest.wrapping_sub(1)));
            bits.take_while(|&rest| rest != 0).map(move |rest| first + rest.trailing_zeros())
        });
        // What lies beyond is nobody's, and may never have been written.
        Wanted::Slots(offsets.take_while(|&offset| offset < count).map(|it| tile * TILE as u32 + it).collect())
    }

    /// The mirror of the tile is as the host is.
    pub(super) fn cleared(&mut self, tile: TileId) {
        let tile = tile as usize;
        if self.tiles[tile].marked {
            self.marks[tile] = [0; WORDS];
        }
        self.tiles[tile] = Changed::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clean(tiles: usize) -> Changes {
        let mut changes = Changes::default();
        changes.reserve(tiles);
        (0..tiles as TileId).for_each(|tile| changes.cleared(tile));
        changes
    }

    #[test]
    fn a_new_tile_is_taken_as_a_whole_and_what_is_clear_not_at_all() {
        let mut changes = clean(1);
        changes.reserve(2);
        assert_eq!([changes.of(0), changes.of(1)], [Changed::default(), UNKNOWN]);
        assert_eq!([changes.wanted(0, 5), changes.wanted(1, 5)], [Wanted::None, Wanted::All]);
        changes.cleared(1);
        assert_eq!((changes.of(1), changes.wanted(1, 5)), (Changed::default(), Wanted::None));
        // What was noted for one mirror means nothing to the next.
        changes.updated(7);
        changes.unknown(0);
        changes.cleared(0);
        changes.updated(8);
        assert_eq!(changes.wanted(0, 9), Wanted::Slots(vec![8]));
    }

    #[test]
    fn each_slot_is_taken_once_and_only_where_there_is_a_memory() {
        let mut changes = clean(2);
        let first = TILE as u32;
        for slot in [first + 64, first + 3, first + 64, first + 4_095] {
            changes.updated(slot);
        }
        assert_eq!(changes.of(0), Changed::default());
        assert!(!changes.is_mapped(1) && !changes.of(1).ids);
        assert_eq!(changes.wanted(1, 4_095), Wanted::Slots(vec![first + 3, first + 64]));
        assert_eq!(changes.wanted(1, 0), Wanted::None);
        changes.written(first);
        assert!(changes.of(1).ids);
        changes.mapped(1);
        assert!(changes.is_mapped(1));
    }

    #[test]
    fn many_rows_are_a_tile() {
        let mut changes = clean(1);
        (0..MANY - 1).for_each(|slot| changes.updated(slot));
        assert_eq!(changes.wanted(0, MANY), Wanted::Slots((0..MANY - 1).collect()));
        changes.updated(MANY - 1);
        assert_eq!(changes.wanted(0, MANY), Wanted::All);
        changes.cleared(0);
        changes.updated(7);
        assert_eq!(changes.wanted(0, MANY), Wanted::Slots(vec![7]));
        changes.all_updated(0);
        assert_eq!(changes.wanted(0, MANY), Wanted::All);
    }
}
