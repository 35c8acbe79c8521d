//! One device beside the CPU, and which of the host's tiles it holds.

use super::changes::{Changes, Wanted};
use crate::mirror::Mirror;
use crate::{Cpu, Error, Slot, TILE, Tile, TileId};

/// Tiles that are sent in one piece: 1 MiB of potentials.
const PIECE: usize = 64;
/// Bytes of a row that is sent: slot, potential, group.
const ROW_BYTES: u64 = 9;
/// Bytes of a memory in a tile that is sent: potential, group.
const SLOT_BYTES: u64 = 5;

pub(super) struct Beside<M> {
    /// `None` when it was given up.
    pub(super) device: Option<M>,
    /// The host's tile of each own tile; `None` = a free one.
    own: Vec<Option<TileId>>,
    free: Vec<TileId>,
    /// It had no memory for what it was to hold, when it held nothing else.
    pub(super) refused: Option<Error>,
}

impl<M: Mirror> Beside<M> {
    pub(super) const fn new(device: M) -> Self {
        Self { device: Some(device), own: Vec::new(), free: Vec::new(), refused: None }
    }

    /// A place for a copy of the host's tile.
    pub(super) fn take(&mut self, tile: TileId) -> TileId {
        let own = self.free.pop().unwrap_or_else(|| {
            self.own.push(None);
            self.own.len() as TileId - 1
        });
        self.own[own as usize] = Some(tile);
        own
    }

    /// The copy is not wanted any more.
    pub(super) fn give(&mut self, own: TileId) {
        self.own[own as usize] = None;
        self.free.push(own);
        if let Some(device) = self.device.as_mut().filter(|device| (own as usize) < device.tiles()) {
            device.hold(own, Tile::default(), own);
        }
    }

    /// Own tiles with those of the host that they are copies of.
    pub(super) fn tiles(&self) -> impl Iterator<Item = (TileId, TileId)> + '_ {
        (0..).zip(&self.own).filter_map(|(own, tile)| Some((own, (*tile)?)))
    }

    /// The host's slot of an own one.
    pub(super) fn origin(&self, slot: Slot) -> Slot {
        let tile = self.own[slot as usize / TILE].expect("a device names slots in use");
        tile * TILE as u32 + slot % TILE as u32
    }

    /// Tiles that it needs memory for.
    pub(super) fn wanted(&self) -> usize {
        self.own.len()
    }

    /// Gets memory for all that it is to hold.
    pub(super) fn reserve(&mut self) -> Result<(), Error> {
        let wanted = self.own.len();
        match &mut self.device {
            // With room for the next few, where there is: to grow, all columns move.
            Some(device) if wanted > device.tiles() => {
                device.reserve((wanted + wanted / 16) as u32).or_else(|error| match error {
                    Error::Full { .. } => device.reserve(wanted as u32),
                    Error::Failed { .. } => Err(error),
                })
            }
            _ => Ok(()),
        }
    }

    /// Gives back all memory; it holds nothing then.
    pub(super) fn clear(&mut self) {
        self.own.clear();
        self.free.clear();
        if let Some(device) = &mut self.device {
            device.clear();
        }
    }

    /// Brings up its tiles, and gives the bytes of that; after an error all of it is still to be sent.
    pub(super) fn bring_up(&mut self, host: &Cpu, tiles: &[Tile], changes: &Changes) -> Result<u64, Error> {
        let Some(device) = &mut self.device else { return Ok(0) };
        let (mut rows, mut slots, mut whole) = (Vec::new(), Vec::new(), Vec::new());
        for (own, tile) in (0..).zip(&self.own).filter_map(|(own, tile)| Some((own, (*tile)?))) {
            let (entry, changed) = (tiles[tile as usize], changes.of(tile));
            if changed.entry {
                device.hold(own, entry, tile);
            } else if changed.ids {
                device.touch(own);
            }
            match changes.wanted(tile, entry.count) {
                Wanted::None => {}
                Wanted::Slots(of_tile) => {
                    rows.extend(of_tile.iter().map(|&slot| host.row(slot)));
                    slots.extend(of_tile.iter().map(|slot| own * TILE as u32 + slot % TILE as u32));
                }
                Wanted::All => whole.push((own, tile)),
            }
        }
        if !slots.is_empty() {
            device.refresh(&slots, &rows)?;
        }
        let runs = whole.chunk_by(|(own, _), (next, _)| own + 1 == *next);
        for piece in runs.flat_map(|run| run.chunks(PIECE)) {
            let (mut potentials, mut groups) = (Vec::new(), Vec::new());
            for (place, &(_, tile)) in piece.iter().enumerate() {
                // All but the last are filled up to their end.
                potentials.resize(place * TILE, 0);
                groups.resize(place * TILE, 0);
                let (own_potentials, own_groups) = host.columns(tile);
                potentials.extend_from_slice(own_potentials);
                groups.extend_from_slice(own_groups);
            }
            device.replace(piece[0].0, &potentials, &groups)?;
        }
        Ok(slots.len() as u64 * ROW_BYTES + (whole.len() * TILE) as u64 * SLOT_BYTES)
    }
}
