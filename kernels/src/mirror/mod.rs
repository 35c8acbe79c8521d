//! Devices that mirror tiles of a host, and the host that offloads passes to them.

mod logical_device;
mod mirrored_device;

pub use logical_device::LogicalDevice;
pub use mirrored_device::{AvailableDevice, DeviceStatus, MirrorStatus, MirroredDevice};

use crate::{Device, Error, Slot, Tile, TileId};
use engram_memory::Group;

/// A device with its own memory whose tiles mirror tiles of a host under its own numbering.
///
/// Passes use the device's own tiles and slots; the columns that a call passes ([`Device::rank`], [`Device::recall`], [`Device::digest`]) are
/// the host's, by host tile. Everything not reported here as changed is as at the last pass.
pub trait Mirror: Device {
    /// Returns the number of allocated tiles.
    fn tiles(&self) -> usize;

    /// Maps a tile to the host's tile `origin` with this entry. Initially a tile mirrors the host's tile of the same number.
    fn hold(&mut self, tile: TileId, entry: Tile, origin: TileId);

    /// Marks ids of the tile as possibly changed.
    fn touch(&mut self, tile: TileId);

    /// Writes potential and group of distinct slots, whose ids stay the same.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Failed`]; a failure may surface in a later call.
    fn refresh(&mut self, slots: &[Slot], rows: &[(u32, Group)]) -> Result<(), Error>;

    /// Replaces potentials and groups from the first slot of `tile` on; the ids stay the same.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn replace(&mut self, tile: TileId, potentials: &[u32], groups: &[u8]) -> Result<(), Error>;

    /// Frees all memory; no tile remains.
    fn clear(&mut self);
}
