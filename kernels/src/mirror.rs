//! A device that holds copies of some tiles of a host.

use crate::{Device, Error, Slot, Tile, TileId};
use engram_memory::Group;

/// A device with memory of its own, each of whose tiles is a copy of one of the host's under a number of the device's own.
///
/// Its passes speak of its own tiles and slots; the columns that a call lends ([`Device::rank`], [`Device::recall`], [`Device::digest`]) are
/// the host's, by the host's tiles. What was not said here to have changed is as it was at the last pass.
pub trait Mirror: Device {
    /// Tiles that there is memory for.
    fn tiles(&self) -> usize;

    /// A tile is a copy of the host's tile `origin` from here on, with this entry. Before anything else is said a tile is a copy of the host's of the same
    /// number.
    fn hold(&mut self, tile: TileId, entry: Tile, origin: TileId);

    /// A slot of the tile may have another memory than before.
    fn touch(&mut self, tile: TileId);

    /// Writes potential and group of each slot, of which none comes twice. Its memory stays the one that it was.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Failed`]; what goes wrong may show in a later call.
    fn refresh(&mut self, slots: &[Slot], rows: &[(u32, Group)]) -> Result<(), Error>;

    /// Replaces potentials and groups from the first slot of `tile` on, as many as are given. The memories stay those that they were.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn replace(&mut self, tile: TileId, potentials: &[u32], groups: &[u8]) -> Result<(), Error>;

    /// Gives back all memory: there is no tile any more.
    fn clear(&mut self);
}
