//! The mirror on one device: which host tiles it holds.

use super::changes::{Changes, RowSelection};
use crate::mirror::Mirror;
use crate::{Cpu, Error, Slot, TILE, Tile, TileId};

/// Maximum tiles per transfer: 1 MiB of potentials.
const PIECE: usize = 64;
/// Bytes of a transferred row: slot, potential, group.
const ROW_BYTES: u64 = 9;
/// Bytes per memory of a transferred tile: potential, group.
const SLOT_BYTES: u64 = 5;

pub(super) struct DeviceMirror<M> {
    /// `None` after it was given up.
    pub(super) device: Option<M>,
    /// The host tile of each local tile; `None` = free.
    host_tiles: Vec<Option<TileId>>,
    free: Vec<TileId>,
    /// Allocation failure of an empty device, which has not enough memory for its tiles.
    pub(super) allocation_error: Option<Error>,
}

impl<M: Mirror> DeviceMirror<M> {
    pub(super) const fn new(device: M) -> Self {
        Self { device: Some(device), host_tiles: Vec::new(), free: Vec::new(), allocation_error: None }
    }

    /// Allocates a local tile for a host tile.
    pub(super) fn take(&mut self, tile: TileId) -> TileId {
        let local = self.free.pop().unwrap_or_else(|| {
            self.host_tiles.push(None);
            self.host_tiles.len() as TileId - 1
        });
        self.host_tiles[local as usize] = Some(tile);
        local
    }

    /// Releases a local tile.
    pub(super) fn release(&mut self, local: TileId) {
        self.host_tiles[local as usize] = None;
        self.free.push(local);
        if let Some(device) = self.device.as_mut().filter(|device| (local as usize) < device.tiles()) {
            device.hold(local, Tile::default(), local);
        }
    }

    /// Returns local tiles with their host tiles.
    pub(super) fn tiles(&self) -> impl Iterator<Item = (TileId, TileId)> + '_ {
        (0..).zip(&self.host_tiles).filter_map(|(local, tile)| Some((local, (*tile)?)))
    }

    /// Returns the host slot of a local slot.
    pub(super) fn origin(&self, slot: Slot) -> Slot {
        let tile = self.host_tiles[slot as usize / TILE].expect("a device returns used slots");
        tile * TILE as u32 + slot % TILE as u32
    }

    /// Returns the number of required tiles.
    pub(super) fn required_tiles(&self) -> usize {
        self.host_tiles.len()
    }

    /// Allocates memory for all assigned tiles.
    pub(super) fn reserve(&mut self) -> Result<(), Error> {
        let required = self.host_tiles.len();
        match &mut self.device {
            // With spare tiles if possible: growing copies all columns.
            Some(device) if required > device.tiles() => {
                device.reserve((required + required / 16) as u32).or_else(|error| match error {
                    Error::Full { .. } => device.reserve(required as u32),
                    Error::Failed { .. } | Error::Payload(_) => Err(error),
                })
            }
            _ => Ok(()),
        }
    }

    /// Frees all memory.
    pub(super) fn clear(&mut self) {
        self.host_tiles.clear();
        self.free.clear();
        if let Some(device) = &mut self.device {
            device.clear();
        }
    }

    /// Transfers changes of its tiles and returns the transferred bytes; after an error all of them are still pending.
    pub(super) fn sync(&mut self, host: &Cpu, tiles: &[Tile], changes: &Changes) -> Result<u64, Error> {
        let Some(device) = &mut self.device else { return Ok(0) };
        let (mut rows, mut slots, mut full_tiles) = (Vec::new(), Vec::new(), Vec::new());
        for (local, tile) in (0..).zip(&self.host_tiles).filter_map(|(local, tile)| Some((local, (*tile)?))) {
            let (entry, change) = (tiles[tile as usize], changes.of(tile));
            if change.entry {
                device.hold(local, entry, tile);
            } else if change.ids {
                device.touch(local);
            }
            match changes.pending_rows(tile, entry.count) {
                RowSelection::None => {}
                RowSelection::Slots(of_tile) => {
                    rows.extend(of_tile.iter().map(|&slot| host.row(slot)));
                    slots.extend(of_tile.iter().map(|slot| local * TILE as u32 + slot % TILE as u32));
                }
                RowSelection::All => full_tiles.push((local, tile)),
            }
        }
        if !slots.is_empty() {
            device.refresh(&slots, &rows)?;
        }
        let runs = full_tiles.chunk_by(|(local, _), (next, _)| local + 1 == *next);
        for piece in runs.flat_map(|run| run.chunks(PIECE)) {
            let (mut potentials, mut groups) = (Vec::new(), Vec::new());
            for (place, &(_, tile)) in piece.iter().enumerate() {
                // All tiles but the last are padded to their full length.
                potentials.resize(place * TILE, 0);
                groups.resize(place * TILE, 0);
                let (own_potentials, own_groups) = host.columns(tile);
                potentials.extend_from_slice(own_potentials);
                groups.extend_from_slice(own_groups);
            }
            device.replace(piece[0].0, &potentials, &groups)?;
        }
        Ok(slots.len() as u64 * ROW_BYTES + (full_tiles.len() * TILE) as u64 * SLOT_BYTES)
    }
}
