//! Random histories: the CPU device and another one have equal digests after every batch of updates.
#![allow(clippy::unwrap_used)] // Test helpers.

use crate::random_numbers::RandomNumbers;
use engram_kernels::gpu::Driver;
use engram_kernels::{
    Cpu, Device, DigestRequest, Gpu, Order, RankRequest, Scope, Segment, Slot, TILE, Tile, Tiles, Update,
};
use engram_memory::clock::Advance;
use engram_memory::{DecayClock, Digest, Group, MemoryId, ONE};

const SEGMENTS: usize = 16;
/// Each segment starts with one full tile and one partial tile.
const TILES: usize = 2 * SEGMENTS;

/// Operations of a history, so that an empty history does not pass.
#[derive(Debug, Default)]
pub(crate) struct HistoryCounts {
    pub(crate) updates: usize,
    pub(crate) batches: usize,
    pub(crate) folds: usize,
    pub(crate) upserts: usize,
    pub(crate) evictions: usize,
}

impl HistoryCounts {
    /// Returns whether every kind of operation occurred: almost certain after some 40 batches.
    pub(crate) fn is_complete(&self) -> bool {
        self.folds > 0 && self.upserts > 0 && self.evictions > 0
    }
}

/// A history of the same memories on both devices.
pub(crate) struct History<D: Driver> {
    numbers: RandomNumbers,
    cpu: Cpu,
    gpu: Gpu<D>,
    segments: Vec<Segment>,
    tiles: Vec<Tile>,
    ids: Tiles<MemoryId>,
    done: HistoryCounts,
}

impl<D: Driver> History<D> {
    pub(crate) fn new(driver: D, seed: u64) -> Self {
        let mut numbers = RandomNumbers(seed);
        let segments: Vec<_> = (0..SEGMENTS)
            .map(|_| DecayClock::from_units(numbers.below(1 << 31) as u32).unwrap())
            .map(|clock| Segment { clock, ..Segment::default() })
            .collect();
        let mut history = Self {
            numbers,
            cpu: Cpu::new(2),
            gpu: Gpu::new(driver, "kernels on the CPU".to_owned()),
            segments,
            tiles: vec![Tile::default(); TILES],
            ids: Tiles::new(),
            done: HistoryCounts::default(),
        };
        history.ids.reserve(TILES);
        history.for_each(|device| device.reserve(TILES as u32).unwrap());
        let mut rows = Vec::new();
        for tile in 0..TILES {
            let count = if tile < SEGMENTS { TILE as u32 } else { history.numbers.below(600) as u32 };
            history.map(tile, Tile { segment: (tile % SEGMENTS) as u32, count });
            for slot in (tile * TILE) as Slot..(tile * TILE) as Slot + count {
                rows.push(history.row(slot, (tile % SEGMENTS) as u32));
            }
        }
        history.for_each(|device| device.write(&rows).unwrap());
        history
    }

    fn for_each(&mut self, mut call: impl FnMut(&mut dyn Device)) {
        call(&mut self.cpu);
        call(&mut self.gpu);
    }

    fn map(&mut self, tile: usize, entry: Tile) {
        self.tiles[tile] = entry;
        self.for_each(|device| device.map_tile(tile as u32, entry));
    }

    /// Creates a new memory at a slot.
    fn row(&mut self, slot: Slot, segment: u32) -> (Slot, u32, Group) {
        self.ids.set(slot, MemoryId(self.numbers.next()));
        let weight = self.numbers.below(u64::from(ONE) + 1) as u32;
        let group = if self.numbers.below(16) == 0 { self.numbers.below(256) } else { self.numbers.below(2) };
        (slot, self.segments[segment as usize].clock.units() + weight, Group(group as u8))
    }

    fn digest(&mut self) {
        let of = |device: &mut dyn Device| {
            let mut out: Vec<Digest> = Vec::new();
            device
                .digest(&DigestRequest { segments: &self.segments, ids: &self.ids, content: None }, &mut out)
                .unwrap();
            out
        };
        assert!(of(&mut self.cpu) == of(&mut self.gpu), "digests differ after {:?}", self.done);
    }

    fn batch(&mut self) {
        let amount = if self.numbers.below(20) == 0 { self.numbers.below(u64::from(ONE / 2)) } else { 10_737_418 };
        for segment in &mut self.segments {
            segment.fold = match segment.clock.advance(amount as u32) {
                Advance::Moved => 0,
                Advance::Fold { subtract } => subtract,
            };
            self.done.folds += usize::from(segment.fold > 0);
        }
        let slots: Vec<Slot> =
            (0..TILES).flat_map(|tile| ((tile * TILE) as Slot..).take(self.tiles[tile].count as usize)).collect();
        let count = 1 + self.numbers.below(10_000) as usize;
        // Uniform, a few memories, or one.
        let spread = self.numbers.one_of(&[slots.len() as u64, slots.len() as u64, 5, 1]);
        let first = self.numbers.below(slots.len() as u64);
        let updates: Vec<_> = (0..count)
            .map(|_| {
                let at = (first + self.numbers.below(spread)) % slots.len() as u64;
                Update { slot: slots[at as usize], delta: self.numbers.delta() }
            })
            .collect();
        let segments = self.segments.clone();
        self.segments.iter_mut().for_each(|segment| segment.fold = 0);
        if self.numbers.below(2) == 0 {
            self.for_each(|device| device.update(&segments, &updates).unwrap());
        } else {
            let (mut of_cpu, mut of_gpu) = (Vec::new(), Vec::new());
            self.cpu.epoch(&segments, &updates, &mut of_cpu).unwrap();
            self.gpu.epoch(&segments, &updates, &mut of_gpu).unwrap();
            assert!(of_cpu == of_gpu, "qualities differ after {:?}", self.done);
        }
        self.done.updates += count;
        self.done.batches += 1;
    }

    fn upsert(&mut self) {
        let segment = self.numbers.below(SEGMENTS as u64) as u32;
        let tile = SEGMENTS + segment as usize;
        let entry = self.tiles[tile];
        if (entry.count as usize) < TILE {
            let row = self.row((tile * TILE) as Slot + entry.count, segment);
            self.map(tile, Tile { count: entry.count + 1, ..entry });
            self.for_each(|device| device.write(&[row]).unwrap());
            self.done.upserts += 1;
        }
    }

    /// Evicts the lightest hundredth of a segment; the segment's last memory moves into each hole.
    fn evict(&mut self) {
        let segment = self.numbers.below(SEGMENTS as u64) as u32;
        let (segments, ids) = (self.segments.clone(), self.ids.clone());
        let (mut victims, mut of_gpu) = (Vec::new(), Vec::new());
        let (scope, order) = (Scope::Segment(segment), Order::LightestFirst);
        let request = RankRequest { segments: &segments, ids: &ids, scope, order, limit: Some(41) };
        self.cpu.rank(&request, &mut victims).unwrap();
        self.gpu.rank(&request, &mut of_gpu).unwrap();
        assert!(victims == of_gpu, "victims differ after {:?}", self.done);
        let mut slots: Vec<_> = victims.into_iter().map(|victim| victim.0).collect();
        slots.sort_unstable_by(|a, b| b.cmp(a));
        for hole in slots {
            let tile = SEGMENTS + segment as usize;
            let entry = self.tiles[tile];
            if entry.count == 0 {
                break;
            }
            let last = (tile * TILE) as Slot + entry.count - 1;
            let mut row = Vec::new();
            self.cpu.read(&[last], &mut row).unwrap();
            let id = self.ids.get(last);
            self.ids.set(hole, id);
            self.for_each(|device| device.write(&[(hole, row[0].0, row[0].1)]).unwrap());
            self.map(tile, Tile { count: entry.count - 1, ..entry });
            self.done.evictions += 1;
        }
    }

    /// Continues until both minimums are reached. `progress` is called after every batch.
    pub(crate) fn run(
        mut self,
        updates: usize,
        batches: usize,
        mut progress: impl FnMut(&HistoryCounts),
    ) -> HistoryCounts {
        while self.done.updates < updates || self.done.batches < batches {
            self.batch();
            for _ in 0..self.numbers.below(4) {
                self.upsert();
            }
            if self.numbers.below(16) == 0 {
                self.evict();
            }
            self.digest();
            progress(&self.done);
        }
        self.done
    }
}
