//! Every pass of the CPU device equals the law, whatever the threads and the instructions.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests too.

mod naive;

use engram_kernels::{Cpu, Device, GroupUpdate, Instructions, Order, Scope, Segment, Slot, TILE, Tile, Tiles, Update};
use engram_memory::clock::{Advance, FOLD_AT};
use engram_memory::{DecayClock, Group, MemoryId, ONE, mix64};
use naive::Naive;
use proptest::prelude::*;

/// A fixed sequence of numbers, so that a failure is replayed by its seed.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix64(self.0)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }

    fn delta(&mut self) -> i32 {
        let any = self.below(2 * u64::from(ONE) + 1) as i64 - i64::from(ONE);
        self.one_of(&[any as i32, 42_949_673, -42_949_672, 0, 1, -1, ONE as i32, -(ONE as i32)])
    }
}

/// One arena in the naive device and in several CPU devices, which must always say the same.
struct Twins {
    numbers: Numbers,
    naive: Naive,
    devices: Vec<Cpu>,
    segments: Vec<Segment>,
    tiles: Vec<Tile>,
    ids: Tiles<MemoryId>,
    content: Tiles<u128>,
    groups: u64,
}

impl Twins {
    fn new(seed: u64, tiles: usize, devices: Vec<Cpu>) -> Self {
        let mut numbers = Numbers(seed);
        let segments = (0..1 + numbers.below(5))
            .map(|_| {
                let any = numbers.below(u64::from(FOLD_AT)) as u32;
                let clock = numbers.one_of(&[any, any % ONE, 0, FOLD_AT - 1]);
                Segment { clock: DecayClock::from_units(clock).unwrap(), ..Segment::default() }
            })
            .collect();
        let groups = numbers.one_of(&[1, 2, 3, 8, 9, 256]);
        let mut twins = Self {
            numbers,
            naive: Naive::new(),
            devices,
            segments,
            tiles: vec![Tile::default(); tiles],
            ids: Tiles::new(),
            content: Tiles::new(),
            groups,
        };
        twins.fill();
        twins
    }

    fn fill(&mut self) {
        let tiles = self.tiles.len();
        self.ids.reserve(tiles);
        self.content.reserve(tiles);
        self.each(|device| device.reserve(tiles as u32).unwrap());
        let mut rows = Vec::new();
        // Random ids, ids that ascend, or ids whose differences lie in the highest and the lowest bits.
        let ids: fn(u64) -> u64 =
            self.numbers.one_of(&[mix64 as fn(u64) -> u64, |n| n, |n| n << 13, |n| (n << 60) ^ (n >> 4), |n| !n]);
        let tie = self.numbers.one_of(&[0, 1, 4, 100]);
        for index in 0..tiles {
            let any = self.numbers.below(TILE as u64) as u32;
            let count = self.numbers.one_of(&[TILE as u32, TILE as u32, any, 1, 0]);
            let segment = self.numbers.below(self.segments.len() as u64) as u32;
            self.tiles[index] = Tile { segment, count };
            self.each(|device| device.map_tile(index as u32, Tile { segment, count }));
            let clock = self.segments[segment as usize].clock.units();
            for offset in 0..count {
                let slot = (index * TILE) as Slot + offset;
                let weight = self.numbers.below(u64::from(ONE) + 1) as u32;
                let near = self.numbers.below(5) as u32;
                let potential = match self.numbers.below(6 + 3 * tie) {
                    0 | 1 => clock + weight,
                    2 => clock + ONE - near,
                    3 => clock + near,
                    4 => clock.saturating_sub(near),
                    5 => clock.saturating_sub(weight),
                    _ => clock + ONE / 3,
                };
                let high = self.numbers.below(20) == 0;
                let group = if high { self.groups - 1 } else { self.numbers.below(self.groups) };
                rows.push((slot, potential, Group(group as u8)));
                self.ids.set(slot, MemoryId(ids(u64::from(slot))));
                let any = u128::from(self.numbers.next()) << 64;
                let content = self.numbers.one_of(&[0, any]);
                self.content.set(slot, content);
            }
        }
        // A repeated slot: the last row holds.
        let repeated = rows.first().map(|&(slot, potential, _)| (slot, potential, Group(0)));
        rows.extend(repeated);
        self.each(|device| device.write(&rows).unwrap());
    }

    fn each(&mut self, mut call: impl FnMut(&mut dyn Device)) {
        call(&mut self.naive);
        self.devices.iter_mut().for_each(|device| call(device));
    }

    /// Calls a pass everywhere and compares what it says.
    fn same<T: PartialEq + std::fmt::Debug>(&mut self, mut call: impl FnMut(&mut dyn Device) -> T) -> T {
        let expected = call(&mut self.naive);
        for device in &mut self.devices {
            let found = call(device);
            assert!(found == expected, "{:?}", device.info());
        }
        expected
    }

    /// Decays some segments, so that some fold.
    fn decay(&mut self) -> Vec<Segment> {
        for segment in &mut self.segments {
            let amount = self.numbers.one_of(&[0, 10_737_418, ONE / 2, ONE]);
            segment.fold = match segment.clock.advance(amount) {
                Advance::Moved => 0,
                Advance::Fold { subtract } => subtract,
            };
        }
        let segments = self.segments.clone();
        self.segments.iter_mut().for_each(|segment| segment.fold = 0);
        segments
    }

    fn updates(&mut self) -> Vec<Update> {
        let slots: Vec<_> = self.naive.slots().collect();
        if slots.is_empty() {
            return Vec::new();
        }
        let count = self.numbers.one_of(&[0, 1, 50, 3_000]);
        // Few slots: duplicates.
        let spread = self.numbers.one_of(&[slots.len() as u64, 3]);
        (0..count)
            .map(|_| {
                let at = self.numbers.below(spread.min(slots.len() as u64));
                Update { slot: slots[at as usize], delta: self.numbers.delta() }
            })
            .collect()
    }

    fn step(&mut self) {
        match self.numbers.below(7) {
            0 => {
                let (segments, updates) = (self.decay(), self.updates());
                self.each(|device| device.update(&segments, &updates).unwrap());
            }
            1 | 2 => {
                let (segments, updates) = (self.decay(), self.updates());
                self.same(|device| {
                    let mut out = Vec::new();
                    device.epoch(&segments, &updates, &mut out).unwrap();
                    out
                });
            }
            3 => {
                let segments = self.decay();
                let updates: Vec<_> = (0..self.numbers.below(6))
                    .map(|_| GroupUpdate {
                        segment: self.numbers.below(segments.len() as u64) as u32,
                        group: Group(self.numbers.below(self.groups) as u8),
                        delta: self.numbers.delta(),
                    })
                    .collect();
                self.same(|device| {
                    let mut changed = vec![7];
                    device.update_groups(&segments, &updates, &mut changed).unwrap();
                    changed
                });
            }
            4 => {
                let (segments, bits) = (self.segments.clone(), self.numbers.below(13) as u32);
                self.same(|device| device.histogram(&segments, bits).unwrap());
            }
            5 => self.rank(),
            _ => self.compare(),
        }
    }

    fn rank(&mut self) {
        let segments = self.segments.clone();
        let scope = match self.numbers.below(4) {
            0 => Scope::Segment(self.numbers.below(segments.len() as u64) as u32),
            1 => Scope::Group(Group(self.numbers.below(self.groups) as u8)),
            _ => Scope::All,
        };
        let order = self.numbers.one_of(&[Order::HeaviestFirst, Order::LightestFirst]);
        let limit = self.numbers.one_of(&[None, Some(0), Some(1), Some(10), Some(300), Some(2_000), Some(1 << 40)]);
        let ids = self.ids.clone();
        self.same(|device| {
            let mut out = vec![(1, 1); 10];
            device.rank(&segments, scope, order, limit, &ids, &mut out).unwrap();
            out
        });
    }

    /// Compares all that the devices hold.
    fn compare(&mut self) {
        let (segments, ids, content) = (self.segments.clone(), self.ids.clone(), self.content.clone());
        let slots: Vec<_> = self.naive.slots().collect();
        self.same(|device| {
            let mut rows = vec![(9, Group(9))];
            device.read(&slots, &mut rows).unwrap();
            rows
        });
        for content in [None, Some(&content)] {
            self.same(|device| {
                let mut out = Vec::new();
                device.digest(&segments, &ids, content, &mut out).unwrap();
                out
            });
        }
        for tile in 0..self.tiles.len() {
            self.same(|device| {
                let mut columns = (vec![1], vec![1]);
                device.export(tile as u32, &mut columns.0, &mut columns.1).unwrap();
                columns
            });
        }
        self.same(|device| device.bytes());
    }
}

/// All sets of instructions, and one, two and three threads.
fn devices() -> Vec<Cpu> {
    let sets = [(1, Instructions::Widest), (2, Instructions::Avx2), (3, Instructions::Portable)];
    let more = [(3, Instructions::Widest), (1, Instructions::Avx2), (2, Instructions::Portable)];
    sets.into_iter().chain(more).map(|(threads, instructions)| Cpu::with(threads, instructions)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn passes_equal_the_law_over_random_arenas(seed: u64, tiles in 0_usize..5) {
        let mut twins = Twins::new(seed, tiles, devices());
        for _ in 0..12 {
            twins.step();
        }
        twins.compare();
    }
}

#[test]
fn passes_equal_the_law_where_threads_and_splits_matter() {
    for seed in 0..6 {
        let devices = vec![Cpu::new(2), Cpu::with(3, Instructions::Avx2), Cpu::with(2, Instructions::Portable)];
        let mut twins = Twins::new(seed, 60, devices);
        for _ in 0..10 {
            twins.step();
            twins.rank();
        }
        twins.compare();
    }
}

#[test]
fn rank_is_by_weight_not_by_potential() {
    // (id, potential, clock) of three partitions, of the laws' table; by raw potential it would be 9, 7, 8, 3, 4, 2, 1.
    let rows = [(1, 5, 10), (2, 7, 10), (3, 25, 10), (4, 9, 10), (9, 130, 100), (8, 40, 0), (7, 40, 0)];
    let clocks = [10, 100, 0];
    let mut device = Cpu::new(2);
    device.reserve(3).unwrap();
    let mut ids = Tiles::new();
    ids.reserve(3);
    let mut counts = [0; 3];
    for (id, potential, clock) in rows {
        let tile = clocks.iter().position(|&other| other == clock).unwrap();
        let slot = tile as u32 * TILE as u32 + counts[tile];
        counts[tile] += 1;
        device.write(&[(slot, potential, Group(0))]).unwrap();
        ids.set(slot, MemoryId(id));
    }
    for (tile, count) in counts.into_iter().enumerate() {
        device.map_tile(tile as u32, Tile { segment: tile as u32, count });
    }
    let segments = clocks.map(|clock| Segment { clock: DecayClock::from_units(clock).unwrap(), ..Segment::default() });
    let mut out = Vec::new();
    device.rank(&segments, Scope::All, Order::HeaviestFirst, None, &ids, &mut out).unwrap();
    let ranked: Vec<_> = out.iter().map(|&(slot, weight)| (ids.get(slot).0, weight)).collect();
    assert_eq!(ranked, [(7, 40), (8, 40), (9, 30), (3, 15), (1, 0), (2, 0), (4, 0)]);
}

#[test]
fn ids_that_ascend_only_here_and_there_still_break_ties() {
    // Two runs of 2^16 slots, each ascending, the second with the smaller ids.
    let tiles = 32;
    let mut device = Cpu::new(2);
    device.reserve(tiles).unwrap();
    let mut ids = Tiles::new();
    ids.reserve(tiles as usize);
    let slots = 0..tiles * TILE as u32;
    let rows: Vec<_> = slots.clone().map(|slot| (slot, ONE / 2, Group(0))).collect();
    device.write(&rows).unwrap();
    (0..tiles).for_each(|tile| device.map_tile(tile, Tile { segment: 0, count: TILE as u32 }));
    slots.clone().for_each(|slot| ids.set(slot, MemoryId(u64::from(slot ^ (1 << 16)))));
    let mut out = Vec::new();
    device.rank(&[Segment::default()], Scope::All, Order::HeaviestFirst, None, &ids, &mut out).unwrap();
    assert!(out.into_iter().eq(slots.map(|slot| (slot ^ (1 << 16), ONE / 2))));
}

#[test]
fn an_arena_beyond_the_slots_is_refused_and_nothing_changed() {
    let mut device = Cpu::new(1);
    device.reserve(1).unwrap();
    assert!(device.reserve(u32::MAX).unwrap_err().to_string().starts_with("the device is full"));
    assert_eq!(device.bytes(), 5 * TILE as u64);
}
