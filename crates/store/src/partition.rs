//! One partition: which id is in which slot, and in which order the slots are.
//!
//! Slots are dense: memory `i` of `count` is at offset `i % TILE` of the partition's tile `i / TILE`, and a removal moves the last
//! memory into the hole. That order is a function of the log alone; which tiles of the arena hold it, and the index, are not
//! replicated and never show.

use crate::arena::{Arena, tiles_of};
use crate::columns::slot_at;
use crate::index::Index;
use engram_kernels::{Error, SegmentId, Slot, TILE, Tile, TileId};
use engram_memory::{DecayClock, Group, Ledger, MemoryId, Settings, Weight};
use std::collections::HashMap;

/// Slots, clock and ledger of one partition.
#[derive(Debug)]
pub(crate) struct Partition {
    pub(crate) segment: SegmentId,
    pub(crate) clock: DecayClock,
    pub(crate) ledger: Ledger,
    index: Index,
    tiles: Vec<TileId>,
    count: u32,
    /// The count that the device was told.
    mapped: u32,
}

/// Ids of [`Partition::find_many`]: enough cache misses side by side, and still in the first level.
pub(crate) const LOOKAHEAD: usize = 32;

/// In [`Partition::find_many`]: no slot.
pub(crate) const NOWHERE: Slot = Slot::MAX;

impl Partition {
    pub(crate) fn new(segment: SegmentId, settings: Settings) -> Self {
        let ledger = Ledger { settings, ..Ledger::default() };
        Self {
            segment,
            clock: DecayClock::default(),
            ledger,
            index: Index::default(),
            tiles: Vec::new(),
            count: 0,
            mapped: 0,
        }
    }

    /// Number of memories.
    pub(crate) const fn count(&self) -> u32 {
        self.count
    }

    /// The tiles, with how many slots of each are used.
    pub(crate) fn tiles(&self) -> impl Iterator<Item = (TileId, u32)> + '_ {
        let used = |index: usize| (self.count - (index * TILE) as u32).min(TILE as u32);
        self.tiles.iter().enumerate().map(move |(index, tile)| (*tile, used(index)))
    }

    /// The slot of memory `local` in slot order.
    pub(crate) fn slot(&self, local: u32) -> Slot {
        slot(&self.tiles, local)
    }

    /// Where `id` is.
    pub(crate) fn find(&self, arena: &Arena, id: MemoryId) -> Option<Slot> {
        let found = self.index.find(arena.hash(id), |local| arena.columns.id(self.slot(local)) == id);
        found.map(|local| self.slot(local))
    }

    /// Where each of up to [`LOOKAHEAD`] ids is, [`NOWHERE`] if it most likely is not there. No loop waits for an answer of memory
    /// before it asks the next question; what is not found is to be sought again one by one.
    pub(crate) fn find_many(&self, arena: &Arena, ids: &[MemoryId], out: &mut [Slot; LOOKAHEAD]) {
        let (mut hashes, mut peeked) = ([0; LOOKAHEAD], [0; LOOKAHEAD]);
        for ((id, hash), peeked) in ids.iter().zip(&mut hashes).zip(&mut peeked) {
            *hash = arena.hash(*id);
            *peeked = self.index.peek(*hash);
        }
        for ((hash, peeked), slot) in hashes.iter().zip(peeked).zip(&mut *out).take(ids.len()) {
            *slot = self.index.candidate(*hash, peeked).map_or(NOWHERE, |local| self.slot(local));
        }
        for (id, slot) in ids.iter().zip(out) {
            if *slot != NOWHERE && arena.columns.id(*slot) != *id {
                *slot = NOWHERE;
            }
        }
    }

    /// Appends a memory that is not there yet; its potential and group are still to be written.
    pub(crate) fn create(&mut self, arena: &mut Arena, id: MemoryId, key: &[u8]) -> Result<Slot, Error> {
        if (self.count as usize).is_multiple_of(TILE) {
            self.tiles.push(arena.take_tile()?);
        }
        let slot = self.slot(self.count);
        arena.columns.create(slot, id, key);
        if self.index.is_full() {
            self.rebuild_index(arena, self.index.len() + 1);
        }
        self.index.insert(arena.hash(id), self.count);
        self.count += 1;
        Ok(slot)
    }

    /// Appends room for `count` memories to an empty partition; their columns are still to be written.
    pub(crate) fn extend(&mut self, arena: &mut Arena, count: u32) -> Result<(), Error> {
        while self.tiles.len() < tiles_of(count) {
            self.tiles.push(arena.take_tile()?);
        }
        self.count = count;
        Ok(())
    }

    /// Indexes the ids in the column of a partition that was [`Partition::extend`]ed; `false` when one comes twice.
    pub(crate) fn index_all(&mut self, arena: &Arena) -> bool {
        self.index.rebuild(self.count as usize, std::iter::empty());
        (0..self.count).all(|local| {
            let id = arena.columns.id(self.slot(local));
            let is_new = self.find(arena, id).is_none();
            if is_new {
                self.index.insert(arena.hash(id), local);
            }
            is_new
        })
    }

    /// Removes memories in order, the last moving into the hole each time; calls `unknown` for ids that are not there.
    /// Returns how many were removed.
    pub(crate) fn remove(
        &mut self,
        arena: &mut Arena,
        ids: &[MemoryId],
        mut unknown: impl FnMut(MemoryId),
    ) -> Result<u64, Error> {
        let before = self.count;
        // Which slot's potential and group belong into a slot now: the device moves once, when all is known.
        let mut origins: HashMap<Slot, Slot> = HashMap::new();
        for &id in ids {
            let found = self.index.find(arena.hash(id), |local| arena.columns.id(self.slot(local)) == id);
            let Some(local) = found else {
                unknown(id);
                continue;
            };
            let hash_of = |local| arena.hash(arena.columns.id(slot(&self.tiles, local)));
            self.index.remove(arena.hash(id), local, hash_of);
            self.count -= 1;
            let (hole, last) = (self.slot(local), self.slot(self.count));
            let origin = origins.remove(&last).unwrap_or(last);
            if hole != last {
                self.index.replace(arena.hash(arena.columns.id(last)), self.count, local);
                arena.columns.relocate(last, hole);
                origins.insert(hole, origin);
            }
            arena.columns.release(last);
        }
        let (to, from): (Vec<Slot>, Vec<Slot>) = origins.into_iter().unzip();
        let rows: Vec<Row> = arena.read(&from)?.iter().zip(to).map(|(&(p, group), to)| (to, p, group)).collect();
        arena.device.write(&rows)?;
        self.remap(arena);
        Ok(u64::from(before - self.count))
    }

    /// Tells the device how many slots of each tile are used, and gives back tiles that hold nothing.
    pub(crate) fn remap(&mut self, arena: &mut Arena) {
        let (low, high) = (self.count.min(self.mapped), self.count.max(self.mapped));
        for index in low as usize / TILE..tiles_of(high) {
            let count = (self.count.saturating_sub((index * TILE) as u32)).min(TILE as u32);
            if count > 0 {
                arena.device.map_tile(self.tiles[index], Tile { segment: self.segment, count });
            }
        }
        for tile in self.tiles.drain(tiles_of(self.count)..) {
            arena.free_tile(tile);
        }
        self.mapped = self.count;
    }

    /// Gives every tile back.
    pub(crate) fn clear(&mut self, arena: &mut Arena) {
        for local in 0..self.count {
            arena.columns.release(self.slot(local));
        }
        self.index = Index::default();
        self.count = 0;
        self.remap(arena);
    }

    /// The potential that stands for `weight` before the fold of the record under way, which subtracts `fold`: a row written then
    /// is folded with the others. It fits: fold < 2^31 + 2^30.
    pub(crate) const fn potential(&self, fold: u32, weight: Weight) -> u32 {
        if fold > 0 { fold + weight.units() } else { self.clock.potential(weight) }
    }

    fn rebuild_index(&mut self, arena: &Arena, room: usize) {
        let pairs = (0..self.count).map(|local| (arena.hash(arena.columns.id(slot(&self.tiles, local))), local));
        self.index.rebuild(room, pairs);
    }

    /// Bytes of the index.
    pub(crate) fn index_bytes(&self) -> u64 {
        self.index.bytes()
    }
}

fn slot(tiles: &[TileId], local: u32) -> Slot {
    slot_at(tiles[local as usize / TILE], local % TILE as u32)
}

/// A row for the device: slot, potential, group.
pub(crate) type Row = (Slot, u32, Group);
