//! One partition: its index from ids to slots, and the order of its slots.
//!
//! Slots are dense: memory `i` of `count` is at offset `i % TILE` of the partition's tile `i / TILE`, and a removal moves the last
//! memory into the hole. The order is a function of the log alone; the choice of arena tiles and the index are neither replicated
//! nor visible.

use crate::state::arena::{Arena, tiles_of};
use crate::state::columns::slot_at;
use crate::state::index::Index;
use crate::state::items::Items;
use engram_kernels::{Error, SegmentId, Slot, TILE, Tile, TileId};
use engram_memory::{DecayClock, Group, Ledger, MemoryId, Settings, Weight};
use std::collections::HashMap;

/// Slots, clock and ledger of one partition.
#[derive(Debug)]
pub(crate) struct Partition {
    pub(crate) segment: SegmentId,
    pub(crate) clock: DecayClock,
    pub(crate) ledger: Ledger,
    /// Derived from the columns.
    pub(crate) items: Items,
    index: Index,
    tiles: Vec<TileId>,
    count: u32,
    /// Count known to the device.
    mapped: u32,
}

/// Ids per [`Partition::find_many`]: enough parallel cache misses, and still within the L1 cache.
pub(crate) const LOOKAHEAD: usize = 32;

/// No slot, in [`Partition::find_many`].
pub(crate) const NOWHERE: Slot = Slot::MAX;

impl Partition {
    pub(crate) fn new(segment: SegmentId, settings: Settings) -> Self {
        let ledger = Ledger { settings, ..Ledger::default() };
        Self {
            segment,
            clock: DecayClock::default(),
            ledger,
            items: Items::default(),
            index: Index::default(),
            tiles: Vec::new(),
            count: 0,
            mapped: 0,
        }
    }

    /// Returns the number of memories.
    pub(crate) const fn count(&self) -> u32 {
        self.count
    }

    /// Returns the tiles with the number of used slots of each.
    pub(crate) fn tiles(&self) -> impl Iterator<Item = (TileId, u32)> + '_ {
        let used = |index: usize| (self.count - (index * TILE) as u32).min(TILE as u32);
        self.tiles.iter().enumerate().map(move |(index, tile)| (*tile, used(index)))
    }

    /// Returns the slot of memory `local` in slot order.
    pub(crate) fn slot(&self, local: u32) -> Slot {
        slot(&self.tiles, local)
    }

    /// Finds the slot of `id`.
    pub(crate) fn find(&self, arena: &Arena, id: MemoryId) -> Option<Slot> {
        let local = self.index.find(arena.hash(id), |local| arena.columns.id(self.slot(local)) == id);
        local.map(|local| self.slot(local))
    }

    /// Finds the slots of up to [`LOOKAHEAD`] ids with overlapping cache misses. [`NOWHERE`] means probably absent: the caller has to
    /// check such ids one by one.
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

    /// Appends a new memory; its potential and group are still to be written.
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

    /// Allocates slots for `count` memories in an empty partition; their columns are still to be written.
    pub(crate) fn extend(&mut self, arena: &mut Arena, count: u32) -> Result<(), Error> {
        while self.tiles.len() < tiles_of(count) {
            self.tiles.push(arena.take_tile()?);
        }
        self.count = count;
        Ok(())
    }

    /// Indexes the ids of a partition after [`Partition::extend`]; `false` if one is duplicate.
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

    /// Removes memories in order, moving the last one into the hole each time; calls `unknown` for missing ids. Returns the number
    /// removed.
    pub(crate) fn remove(
        &mut self,
        arena: &mut Arena,
        ids: &[MemoryId],
        mut unknown: impl FnMut(MemoryId),
    ) -> Result<u64, Error> {
        let before = self.count;
        // Source slot of each slot's potential and group: the device moves them once at the end.
        let mut origins: HashMap<Slot, Slot> = HashMap::new();
        for &id in ids {
            let local = self.index.find(arena.hash(id), |local| arena.columns.id(self.slot(local)) == id);
            let Some(local) = local else {
                unknown(id);
                continue;
            };
            let hash_of = |local| arena.hash(arena.columns.id(slot(&self.tiles, local)));
            self.index.remove(arena.hash(id), local, hash_of);
            self.count -= 1;
            let (hole, last) = (self.slot(local), self.slot(self.count));
            let origin = origins.remove(&last).unwrap_or(last);
            arena.release_payload(self.segment, hole);
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

    /// Sends the number of used slots per tile to the device, and frees empty tiles.
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

    /// Frees every tile.
    pub(crate) fn clear(&mut self, arena: &mut Arena) {
        for local in 0..self.count {
            let slot = self.slot(local);
            arena.release_payload(self.segment, slot);
            arena.columns.release(slot);
        }
        self.index = Index::default();
        self.count = 0;
        self.remap(arena);
    }

    /// Returns the potential of `weight` before the fold of the current record, which subtracts `fold`: a row written then is folded
    /// with the others. It fits: fold < 2^31 + 2^30.
    pub(crate) const fn potential(&self, fold: u32, weight: Weight) -> u32 {
        if fold > 0 { fold + weight.units() } else { self.clock.potential(weight) }
    }

    fn rebuild_index(&mut self, arena: &Arena, capacity: usize) {
        let pairs = (0..self.count).map(|local| (arena.hash(arena.columns.id(slot(&self.tiles, local))), local));
        self.index.rebuild(capacity, pairs);
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
