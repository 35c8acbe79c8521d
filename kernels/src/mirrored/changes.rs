//! What of the host's columns a mirror lacks.

use crate::{Slot, TILE, TileId};

/// Slots that one word marks.
const BITS: usize = u64::BITS as usize;
/// From so many rows of a tile on, all of it is taken: rows go to scattered places, a tile goes in one piece.
const MANY: u32 = TILE as u32 / 4;

/// Changes since the mirror was brought up last, by tile.
#[derive(Debug, Default)]
pub(super) struct Changes {
    tiles: Vec<Changed>,
}

/// What changed of a tile.
#[derive(Debug, Default, Clone)]
pub(super) struct Changed {
    /// Its entry in the tile table.
    pub(super) entry: bool,
    /// A slot may have another memory.
    pub(super) ids: bool,
    rows: Rows,
}

/// Slots whose potential or group changed.
#[derive(Debug, Default, Clone)]
enum Rows {
    #[default]
    None,
    Some(Box<[u64; TILE / BITS]>),
    All,
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
        let unknown = Changed { entry: true, ids: true, rows: Rows::All };
        self.tiles.resize(tiles.max(self.tiles.len()), unknown);
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
        let rows = &mut self.tiles[slot as usize / TILE].rows;
        if let Rows::None = rows {
            *rows = Rows::Some(Box::new([0; TILE / BITS]));
        }
        if let Rows::Some(marks) = rows {
            let offset = slot as usize % TILE;
            marks[offset / BITS] |= 1 << (offset % BITS);
        }
    }

    /// Any potential of the tile may have changed.
    pub(super) fn all_updated(&mut self, tile: TileId) {
        self.tiles[tile as usize].rows = Rows::All;
    }

    /// The tiles that changed.
    pub(super) fn iter(&self) -> impl Iterator<Item = (TileId, &Changed)> {
        let changed =
            self.tiles.iter().enumerate().filter(|(_, it)| it.entry || it.ids || !matches!(it.rows, Rows::None));
        changed.map(|(tile, changed)| (tile as TileId, changed))
    }

    /// The mirror is as the host is.
    pub(super) fn clear(&mut self) {
        self.tiles.fill(Changed::default());
    }
}

impl Changed {
    /// The rows to take of this tile, which has `count` memories.
    pub(super) fn wanted(&self, tile: TileId, count: u32) -> Wanted {
        match &self.rows {
            Rows::None => Wanted::None,
            _ if count == 0 => Wanted::None,
            Rows::All => Wanted::All,
            Rows::Some(marks) => {
                let changed: u32 = marks.iter().map(|word| word.count_ones()).sum();
                if changed >= MANY {
                    return Wanted::All;
                }
                let offsets = marks.iter().enumerate().flat_map(|(word, &marks)| {
                    let set = (0..BITS).filter(move |bit| marks >> bit & 1 == 1);
                    set.map(move |bit| (word * BITS + bit) as u32)
                });
                // What lies beyond is nobody's, and may never have been written.
                Wanted::Slots(offsets.take_while(|&offset| offset < count).map(|it| tile * TILE as u32 + it).collect())
            }
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
        let found: Vec<_> = changes.iter().map(|(tile, it)| (tile, it.entry, it.ids, it.wanted(tile, 5))).collect();
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
        assert_eq!(changed.wanted(tile, 4_095), Wanted::Slots(vec![first + 3, first + 64]));
        assert_eq!(changed.wanted(tile, 0), Wanted::None);
        changes.written(first);
        assert!(changes.iter().next().unwrap().1.ids);
    }

    #[test]
    fn many_rows_are_a_tile() {
        let mut changes = clean(1);
        (0..MANY - 1).for_each(|slot| changes.updated(slot));
        assert!(
            matches!(changes.iter().next().unwrap().1.wanted(0, MANY), Wanted::Slots(slots) if slots.len() == 1_023)
        );
        changes.updated(MANY - 1);
        assert_eq!(changes.iter().next().unwrap().1.wanted(0, MANY), Wanted::All);
        // What is all stays all.
        changes.updated(7);
        assert_eq!(changes.iter().next().unwrap().1.wanted(0, MANY), Wanted::All);
    }
}
