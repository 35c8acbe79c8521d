//! What of the host's columns a mirror lacks.

use crate::{Slot, TILE, TileId};

/// Words of the marks of a tile, a bit for each slot.
const WORDS: usize = TILE / u64::BITS as usize;
/// From so many rows of a tile on, all of it is taken: rows go to scattered places, a tile goes in one piece.
const MANY: u32 = TILE as u32 / 4;

/// Changes since the mirror was brought up last, by tile.
#[derive(Debug, Default)]
pub(super) struct Changes {
    tiles: Vec<Changed>,
    /// Slots whose potential or group changed. Kept from pass to pass: it is an eighth of a byte a memory.
    marks: Vec<[u64; WORDS]>,
}

/// What changed of a tile.
#[derive(Debug, Default, Clone, Copy)]
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
    /// Makes room for `tiles` tiles, of which a mirror has none yet.
    pub(super) fn reserve(&mut self, tiles: usize) {
        let unknown = Changed { entry: true, ids: true, marked: false, all: true };
        self.tiles.resize(tiles.max(self.tiles.len()), unknown);
        self.marks.resize(self.tiles.len(), [0; WORDS]);
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

    /// The tiles that changed.
    pub(super) fn iter(&self) -> impl Iterator<Item = (TileId, Changed)> {
        let changed = (0..).zip(self.tiles.iter().copied());
        changed.filter(|(_, changed)| changed.entry || changed.ids || changed.marked || changed.all)
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

    /// The mirror is as the host is.
    pub(super) fn clear(&mut self) {
        for (changed, marks) in self.tiles.iter_mut().zip(&mut self.marks) {
            if changed.marked {
                *marks = [0; WORDS];
            }
            *changed = Changed::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clean(tiles: usize) -> Changes {
        let mut changes = Changes::default();
        changes.reserve(tiles);
        changes.clear();
        changes
    }

    #[test]
    fn a_new_tile_is_taken_as_a_whole_and_what_is_clear_not_at_all() {
        let mut changes = clean(1);
        changes.reserve(2);
        let found: Vec<_> =
            changes.iter().map(|(tile, it)| (tile, it.entry, it.ids, changes.wanted(tile, 5))).collect();
        assert_eq!(found, [(1, true, true, Wanted::All)]);
        changes.clear();
        assert_eq!(changes.iter().count(), 0);
    }

    #[test]
    fn each_slot_is_taken_once_and_only_where_there_is_a_memory() {
        let mut changes = clean(2);
        let first = TILE as u32;
        for slot in [first + 64, first + 3, first + 64, first + 4_095] {
            changes.updated(slot);
        }
        let (tile, changed) = changes.iter().next().unwrap();
        assert_eq!((tile, changed.entry, changed.ids), (1, false, false));
        assert_eq!(changes.wanted(tile, 4_095), Wanted::Slots(vec![first + 3, first + 64]));
        assert_eq!(changes.wanted(tile, 0), Wanted::None);
        changes.written(first);
        assert!(changes.iter().next().unwrap().1.ids);
    }

    #[test]
    fn many_rows_are_a_tile() {
        let mut changes = clean(1);
        (0..MANY - 1).for_each(|slot| changes.updated(slot));
        assert_eq!(changes.wanted(0, MANY), Wanted::Slots((0..MANY - 1).collect()));
        changes.updated(MANY - 1);
        assert_eq!(changes.wanted(0, MANY), Wanted::All);
        changes.clear();
        changes.updated(7);
        assert_eq!(changes.wanted(0, MANY), Wanted::Slots(vec![7]));
        changes.all_updated(0);
        assert_eq!(changes.wanted(0, MANY), Wanted::All);
    }
}
