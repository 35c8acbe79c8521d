//! Reference implementation of a device: one memory at a time, with the functions of `engram_memory` only.

mod vectors;

use engram_kernels::recall::{RecallMatch, RecallRequest};
use engram_kernels::{
    Device, DigestRequest, Error, GroupUpdate, Info, Order, RankRequest, Scope, Segment, Slot, TILE, Tile, TileId,
    Update,
};
use engram_memory::clock::folded;
use engram_memory::law::rank_order;
use engram_memory::{DecayClock, Digest, Group, Histogram, QualityVector, Weight};

pub(crate) use vectors::Vectors;

/// A slow, obviously correct device.
pub(crate) struct ReferenceDevice {
    info: Info,
    tiles: Vec<Tile>,
    memories: Vec<(u32, Group)>,
}

impl ReferenceDevice {
    pub(crate) fn new() -> Self {
        let info = Info { kind: "naive", name: "naive".to_owned(), threads: 1 };
        Self { info, tiles: Vec::new(), memories: Vec::new() }
    }

    /// Returns the used slots.
    pub(crate) fn slots(&self) -> impl Iterator<Item = Slot> {
        let tiles = self.tiles.iter().enumerate();
        tiles.flat_map(|(index, tile)| (0..tile.count).map(move |offset| (index * TILE) as Slot + offset))
    }

    fn segment(&self, slot: Slot) -> u32 {
        self.tiles[slot as usize / TILE].segment
    }

    fn clock(&self, segments: &[Segment], slot: Slot) -> DecayClock {
        segments[self.segment(slot) as usize].clock
    }

    fn weight(&self, segments: &[Segment], slot: Slot) -> Weight {
        self.clock(segments, slot).weight(self.memories[slot as usize].0)
    }

    fn fold(&mut self, segments: &[Segment]) {
        for slot in self.slots().collect::<Vec<_>>() {
            let fold = segments[self.segment(slot) as usize].fold;
            self.memories[slot as usize].0 = folded(self.memories[slot as usize].0, fold);
        }
    }

    fn change(&mut self, segments: &[Segment], slot: Slot, delta: i32) {
        let clock = self.clock(segments, slot);
        self.memories[slot as usize].0 = clock.updated(self.memories[slot as usize].0, delta);
    }
}

impl Device for ReferenceDevice {
    fn info(&self) -> &Info {
        &self.info
    }

    fn reserve(&mut self, tiles: u32) -> Result<(), Error> {
        let tiles = self.tiles.len().max(tiles as usize);
        self.tiles.resize(tiles, Tile::default());
        self.memories.resize(tiles * TILE, (0, Group(0)));
        Ok(())
    }

    fn map_tile(&mut self, tile: TileId, entry: Tile) {
        self.tiles[tile as usize] = entry;
    }

    fn write(&mut self, rows: &[(Slot, u32, Group)]) -> Result<(), Error> {
        rows.iter().for_each(|&(slot, potential, group)| self.memories[slot as usize] = (potential, group));
        Ok(())
    }

    fn read(&mut self, slots: &[Slot], out: &mut Vec<(u32, Group)>) -> Result<(), Error> {
        *out = slots.iter().map(|&slot| self.memories[slot as usize]).collect();
        Ok(())
    }

    fn update(&mut self, segments: &[Segment], updates: &[Update]) -> Result<(), Error> {
        self.fold(segments);
        updates.iter().for_each(|update| self.change(segments, update.slot, update.delta));
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
            let addressed =
                |&slot: &Slot| self.segment(slot) == update.segment && self.memories[slot as usize].1 == update.group;
            let slots: Vec<_> = self.slots().filter(addressed).collect();
            changed.push(slots.len() as u64);
            slots.into_iter().for_each(|slot| self.change(segments, slot, update.delta));
        }
        Ok(())
    }

    fn epoch(&mut self, segments: &[Segment], updates: &[Update], out: &mut Vec<QualityVector>) -> Result<(), Error> {
        self.update(segments, updates)?;
        *out = vec![QualityVector::default(); segments.len()];
        for slot in self.slots() {
            out[self.segment(slot) as usize].add(self.memories[slot as usize].1, self.weight(segments, slot));
        }
        Ok(())
    }

    fn histogram(&mut self, segments: &[Segment], bits: u32) -> Result<Histogram, Error> {
        let mut histogram = Histogram::new(bits).unwrap();
        let shown = |slot: &Slot| !segments[self.segment(*slot) as usize].hidden;
        let slots = self.slots().filter(shown);
        slots.for_each(|slot| histogram.add(self.memories[slot as usize].1, self.weight(segments, slot)));
        Ok(histogram)
    }

    fn rank(&mut self, request: &RankRequest<'_>, out: &mut Vec<(Slot, u32)>) -> Result<(), Error> {
        let RankRequest { segments, ids, scope, order, limit } = *request;
        let shown = |slot: Slot| !segments[self.segment(slot) as usize].hidden;
        let in_scope = |&slot: &Slot| match scope {
            Scope::All => shown(slot),
            Scope::Segment(segment) => segment == self.segment(slot),
            Scope::Group(group) => shown(slot) && group == self.memories[slot as usize].1,
        };
        let mut slots: Vec<_> = self.slots().filter(in_scope).collect();
        let key = |slot: Slot| (self.weight(segments, slot), ids.get(slot));
        slots.sort_by(|&a, &b| rank_order(key(a), key(b)));
        if order == Order::LightestFirst {
            slots.reverse();
        }
        slots.truncate(limit.unwrap_or(slots.len()));
        *out = slots.into_iter().map(|slot| (slot, self.weight(segments, slot).units())).collect();
        Ok(())
    }

    fn recall(&mut self, request: &RecallRequest<'_>, out: &mut Vec<RecallMatch>) -> Result<(), Error> {
        let RecallRequest { segments, ids, .. } = *request;
        let width = 2 * request.features.dimension;
        let alike = |slot: Slot| {
            let (tile, offset) = (slot as usize / TILE, slot as usize % TILE);
            let row = &request.features.bits[tile][offset * width..][..width];
            let bits: Vec<u16> = row.chunks(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
            let weight = self.weight(segments, slot).units();
            RecallMatch {
                slot,
                weight,
                score: request.query.score(&bits, request.features.inverse_norms.get(slot), weight),
            }
        };
        let in_scope = |slot: &Slot| {
            let segment = self.segment(*slot);
            match request.scope {
                Scope::Segment(only) => segment == only,
                Scope::All => !segments[segment as usize].hidden,
                Scope::Group(group) => !segments[segment as usize].hidden && self.memories[*slot as usize].1 == group,
            }
        };
        *out = self.slots().filter(in_scope).map(alike).collect();
        out.sort_by(|a, b| b.score.total_cmp(&a.score).then(ids.get(a.slot).cmp(&ids.get(b.slot))));
        out.truncate(request.limit);
        Ok(())
    }

    fn digest(&mut self, request: &DigestRequest<'_>, out: &mut Vec<Digest>) -> Result<(), Error> {
        let DigestRequest { segments, ids, content } = *request;
        *out = vec![Digest::default(); segments.len()];
        for slot in self.slots() {
            let content = content.map_or(0, |content| content.get(slot));
            let (weight, group) = (self.weight(segments, slot), self.memories[slot as usize].1);
            out[self.segment(slot) as usize].add(ids.get(slot), weight, group, content);
        }
        Ok(())
    }

    fn export(&mut self, tile: TileId, potentials: &mut Vec<u32>, groups: &mut Vec<u8>) -> Result<(), Error> {
        let first = tile as usize * TILE;
        let used = &self.memories[first..first + self.tiles[tile as usize].count as usize];
        *potentials = used.iter().map(|memory| memory.0).collect();
        *groups = used.iter().map(|memory| memory.1.0).collect();
        Ok(())
    }

    fn bytes(&self) -> u64 {
        (self.tiles.len() * TILE * 5) as u64
    }
}
