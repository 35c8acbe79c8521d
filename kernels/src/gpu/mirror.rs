//! [`Mirror`] for a GPU.

use super::passes::epoch_sequence::EpochSequences;
use super::passes::rank::SlotLists;
use super::{Driver, Gpu};
use crate::mirror::Mirror;
use crate::{Device, Error, Slot, Tile, TileId};
use engram_memory::Group;

impl<D: Driver> Mirror for Gpu<D> {
    fn tiles(&self) -> usize {
        self.tiles.len()
    }

    fn hold(&mut self, tile: TileId, entry: Tile, origin: TileId) {
        if self.origins[tile as usize] != origin {
            self.origins[tile as usize] = origin;
            if let Some(features) = &mut self.features {
                features.forget(tile);
            }
        }
        self.map_tile(tile, entry);
    }

    fn touch(&mut self, tile: TileId) {
        Self::touch(self, tile);
    }

    fn refresh(&mut self, slots: &[Slot], rows: &[(u32, Group)]) -> Result<(), Error> {
        Self::refresh(self, slots, rows)
    }

    fn replace(&mut self, tile: TileId, potentials: &[u32], groups: &[u8]) -> Result<(), Error> {
        Self::replace(self, tile, potentials, groups)
    }

    fn clear(&mut self) {
        self.tiles.clear();
        self.origins.clear();
        self.stale_ids.clear();
        self.columns = None;
        self.sequences = EpochSequences::default();
        self.listed = SlotLists::default();
        self.index = None;
        self.features = None;
    }
}
