//! The CPU as a device.

use crate::{
    Device, Error, Group, GroupUpdate, Info, Instructions, Order, Scope, Segment, Slot, TILE, Tile, TileId, Tiles,
    Update,
};
use engram_memory::clock::folded;
use engram_memory::{DecayClock, Digest, Histogram, MemoryId, QualityVector, Weight};
use std::cmp::Reverse;

/// The CPU: threads of its own and the widest vector instructions of the processor.
pub struct Cpu {
    info: Info,
    tiles: Vec<Tile>,
    potentials: Tiles<u32>,
    groups: Tiles<u8>,
}

impl Cpu {
    /// A device without tiles, whose passes use `threads` threads (at least 1, the caller's included).
    pub fn new(threads: usize) -> Self {
        Self::with(threads, Instructions::Widest)
    }

    /// As [`Cpu::new`], limited to `instructions`.
    pub fn with(threads: usize, _instructions: Instructions) -> Self {
        let info = Info { kind: "cpu", name: "cpu".to_owned(), threads: threads.max(1) };
        Self { info, tiles: Vec::new(), potentials: Tiles::new(), groups: Tiles::new() }
    }

    fn fold(&mut self, segments: &[Segment]) {
        for (index, tile) in self.tiles.iter().enumerate() {
            let subtract = if tile.count == 0 { 0 } else { segments[tile.segment as usize].fold };
            if subtract > 0 {
                let used = &mut self.potentials.tile_mut(index)[..tile.count as usize];
                used.iter_mut().for_each(|p| *p = folded(*p, subtract));
            }
        }
    }

    fn clock(&self, segments: &[Segment], slot: Slot) -> DecayClock {
        segments[self.tiles[slot as usize / TILE].segment as usize].clock
    }

    /// Every memory: slot, segment, weight, group.
    fn memories<'a>(&'a self, segments: &'a [Segment]) -> impl Iterator<Item = (Slot, u32, Weight, Group)> + 'a {
        self.tiles.iter().enumerate().flat_map(move |(index, tile)| {
            (0..tile.count).map(move |offset| {
                let slot = index as u32 * TILE as u32 + offset;
                let weight = segments[tile.segment as usize].clock.weight(self.potentials.get(slot));
                (slot, tile.segment, weight, Group(self.groups.get(slot)))
            })
        })
    }
}

impl Device for Cpu {
    fn info(&self) -> &Info {
        &self.info
    }

    fn reserve(&mut self, tiles: u32) -> Result<(), Error> {
        self.potentials.reserve(tiles as usize);
        self.groups.reserve(tiles as usize);
        self.tiles.resize(self.potentials.len(), Tile::default());
        Ok(())
    }

    fn map_tile(&mut self, tile: TileId, entry: Tile) {
        assert!(entry.count as usize <= TILE, "a tile has {TILE} slots, {} are too many", entry.count);
        self.tiles[tile as usize] = entry;
    }

    fn write(&mut self, rows: &[(Slot, u32, Group)]) -> Result<(), Error> {
        for &(slot, potential, group) in rows {
            self.potentials.set(slot, potential);
            self.groups.set(slot, group.0);
        }
        Ok(())
    }

    fn read(&mut self, slots: &[Slot], out: &mut Vec<(u32, Group)>) -> Result<(), Error> {
        out.clear();
        out.extend(slots.iter().map(|&slot| (self.potentials.get(slot), Group(self.groups.get(slot)))));
        Ok(())
    }

    fn update(&mut self, segments: &[Segment], updates: &[Update]) -> Result<(), Error> {
        self.fold(segments);
        for update in updates {
            let clock = self.clock(segments, update.slot);
            self.potentials.set(update.slot, clock.updated(self.potentials.get(update.slot), update.delta));
        }
        Ok(())
    }

    fn update_groups(
        &mut self,
        segments: &[Segment],
        updates: &[GroupUpdate],
        changed: &mut Vec<u64>,
    ) -> Result<(), Error> {
        self.fold(segments);
        for update in updates {
            let clock = segments[update.segment as usize].clock;
            let mut count = 0;
            for (index, tile) in self.tiles.iter().enumerate().filter(|(_, tile)| tile.segment == update.segment) {
                for slot in (index * TILE) as u32..(index * TILE) as u32 + tile.count {
                    if self.groups.get(slot) == update.group.0 {
                        self.potentials.set(slot, clock.updated(self.potentials.get(slot), update.delta));
                        count += 1;
                    }
                }
            }
            changed.push(count);
        }
        Ok(())
    }

    fn epoch(&mut self, segments: &[Segment], updates: &[Update], out: &mut Vec<QualityVector>) -> Result<(), Error> {
        self.update(segments, updates)?;
        out.clear();
        out.resize(segments.len(), QualityVector::default());
        for (_, segment, weight, group) in self.memories(segments) {
            out[segment as usize].add(group, weight);
        }
        Ok(())
    }

    fn histogram(&mut self, segments: &[Segment], bits: u32) -> Result<Histogram, Error> {
        let mut histogram = Histogram::new(bits).expect("bits are in range by contract");
        self.memories(segments).for_each(|(_, _, weight, group)| histogram.add(group, weight));
        Ok(histogram)
    }

    fn rank(
        &mut self,
        segments: &[Segment],
        scope: Scope,
        order: Order,
        limit: Option<usize>,
        ids: &Tiles<MemoryId>,
        out: &mut Vec<(Slot, u32)>,
    ) -> Result<(), Error> {
        let in_scope = |segment, group| match scope {
            Scope::All => true,
            Scope::Segment(only) => only == segment,
            Scope::Group(only) => only == group,
        };
        out.clear();
        let memories = self.memories(segments).filter(|&(_, segment, _, group)| in_scope(segment, group));
        out.extend(memories.map(|(slot, _, weight, _)| (slot, weight.units())));
        out.sort_by_key(|&(slot, weight)| (Reverse(weight), ids.get(slot)));
        if order == Order::LightestFirst {
            out.reverse();
        }
        out.truncate(limit.unwrap_or(usize::MAX));
        Ok(())
    }

    fn digest(
        &mut self,
        segments: &[Segment],
        ids: &Tiles<MemoryId>,
        content: Option<&Tiles<u128>>,
        out: &mut Vec<Digest>,
    ) -> Result<(), Error> {
        out.clear();
        out.resize(segments.len(), Digest::default());
        for (slot, segment, weight, group) in self.memories(segments) {
            out[segment as usize].add(ids.get(slot), weight, group, content.map_or(0, |column| column.get(slot)));
        }
        Ok(())
    }

    fn export(&mut self, tile: TileId, potentials: &mut Vec<u32>, groups: &mut Vec<u8>) -> Result<(), Error> {
        let used = self.tiles[tile as usize].count as usize;
        potentials.clear();
        potentials.extend_from_slice(&self.potentials.tile(tile as usize)[..used]);
        groups.clear();
        groups.extend_from_slice(&self.groups.tile(tile as usize)[..used]);
        Ok(())
    }

    fn bytes(&self) -> u64 {
        (self.potentials.len() * TILE * 5) as u64
    }
}
