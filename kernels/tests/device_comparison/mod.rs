//! One arena on several devices, whose results must always be equal.
#![allow(clippy::unwrap_used)] // Test helpers.

use crate::random_numbers::RandomNumbers;
use crate::reference_device::{ReferenceDevice, Vectors};
use engram_kernels::recall::{Query, RecallRequest};
use engram_kernels::{
    Device, DigestRequest, GroupUpdate, Order, RankRequest, Scope, Segment, Slot, TILE, Tile, Tiles, Update,
};
use engram_memory::clock::{Advance, FOLD_AT};
use engram_memory::{DecayClock, Group, MemoryId, ONE, mix64};

/// An arena on the reference device and several others, whose results must always be equal.
pub(crate) struct DeviceComparison {
    numbers: RandomNumbers,
    reference: ReferenceDevice,
    devices: Vec<Box<dyn Device>>,
    segments: Vec<Segment>,
    tiles: Vec<Tile>,
    ids: Tiles<MemoryId>,
    content: Tiles<u128>,
    vectors: Vectors,
    groups: u64,
}

impl DeviceComparison {
    pub(crate) fn new(seed: u64, tiles: usize, devices: Vec<Box<dyn Device>>) -> Self {
        let mut numbers = RandomNumbers(seed);
        let segments = (0..1 + numbers.below(5))
            .map(|_| {
                let any = numbers.below(u64::from(FOLD_AT)) as u32;
                let clock = numbers.one_of(&[any, any % ONE, 0, FOLD_AT - 1]);
                let hidden = numbers.below(4) == 0;
                Segment { clock: DecayClock::from_units(clock).unwrap(), hidden, ..Segment::default() }
            })
            .collect();
        let groups = numbers.one_of(&[1, 2, 3, 8, 9, 256]);
        // Large arenas use short vectors.
        let dimension = if tiles > 5 { 3 } else { numbers.one_of(&[1, 5, 32, 45]) };
        let mut comparison = Self {
            numbers,
            reference: ReferenceDevice::new(),
            devices,
            segments,
            tiles: vec![Tile::default(); tiles],
            ids: Tiles::new(),
            content: Tiles::new(),
            vectors: Vectors::new(tiles, dimension),
            groups,
        };
        comparison.fill();
        comparison
    }

    fn fill(&mut self) {
        let tiles = self.tiles.len();
        self.ids.reserve(tiles);
        self.content.reserve(tiles);
        self.for_each(|device| device.reserve(tiles as u32).unwrap());
        let mut rows = Vec::new();
        // Random ids, ascending ids, or ids that differ in the highest and the lowest bits.
        let ids: fn(u64) -> u64 =
            self.numbers.one_of(&[mix64 as fn(u64) -> u64, |n| n, |n| n << 13, |n| (n << 60) ^ (n >> 4), |n| !n]);
        let tie = self.numbers.one_of(&[0, 1, 4, 100]);
        for index in 0..tiles {
            let any = self.numbers.below(TILE as u64) as u32;
            let count = self.numbers.one_of(&[TILE as u32, TILE as u32, any, 1, 0]);
            let segment = self.numbers.below(self.segments.len() as u64) as u32;
            self.tiles[index] = Tile { segment, count };
            self.for_each(|device| device.map_tile(index as u32, Tile { segment, count }));
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
        // A repeated slot: the last row wins.
        let repeated = rows.first().map(|&(slot, potential, _)| (slot, potential, Group(0)));
        rows.extend(repeated);
        self.for_each(|device| device.write(&rows).unwrap());
    }

    #[allow(dead_code)] // Not every test uses it.
    pub(crate) fn devices(&self) -> &[Box<dyn Device>] {
        &self.devices
    }

    fn for_each(&mut self, mut call: impl FnMut(&mut dyn Device)) {
        call(&mut self.reference);
        self.devices.iter_mut().for_each(|device| call(device.as_mut()));
    }

    /// Runs a pass on every device and compares the results.
    fn compare_results<T: PartialEq + std::fmt::Debug>(&mut self, mut call: impl FnMut(&mut dyn Device) -> T) -> T {
        let expected = call(&mut self.reference);
        for device in &mut self.devices {
            let actual = call(device.as_mut());
            assert!(actual == expected, "{:?}", device.info());
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
        let slots: Vec<_> = self.reference.slots().collect();
        if slots.is_empty() {
            return Vec::new();
        }
        let count = self.numbers.one_of(&[0, 1, 50, 3_000]);
        // Few slots, so that some are updated repeatedly.
        let spread = self.numbers.one_of(&[slots.len() as u64, 3]);
        (0..count)
            .map(|_| {
                let at = self.numbers.below(spread.min(slots.len() as u64));
                Update { slot: slots[at as usize], delta: self.numbers.delta() }
            })
            .collect()
    }

    pub(crate) fn step(&mut self) {
        match self.numbers.below(9) {
            0 => {
                let (segments, updates) = (self.decay(), self.updates());
                self.for_each(|device| device.update(&segments, &updates).unwrap());
            }
            1 | 2 => {
                let (segments, updates) = (self.decay(), self.updates());
                self.compare_results(|device| {
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
                self.compare_results(|device| {
                    let mut changed = vec![7];
                    device.update_groups(&segments, &updates, &mut changed).unwrap();
                    changed
                });
            }
            4 => {
                let (segments, bits) = (self.segments.clone(), self.numbers.below(13) as u32);
                self.compare_results(|device| device.histogram(&segments, bits).unwrap());
            }
            5 => self.rank(),
            6 => self.recall(),
            7 => self.replace(),
            _ => self.compare(),
        }
    }

    pub(crate) fn rank(&mut self) {
        let segments = self.segments.clone();
        let scope = self.scope();
        let order = self.numbers.one_of(&[Order::HeaviestFirst, Order::LightestFirst]);
        let limit = self.numbers.one_of(&[None, Some(0), Some(1), Some(10), Some(300), Some(2_000), Some(1 << 40)]);
        let ids = self.ids.clone();
        self.compare_results(|device| {
            let mut out = vec![(1, 1); 10];
            device.rank(&RankRequest { segments: &segments, ids: &ids, scope, order, limit }, &mut out).unwrap();
            out
        });
    }

    /// Replaces some memories.
    fn replace(&mut self) {
        let slots: Vec<_> = self.reference.slots().collect();
        let mut rows = Vec::new();
        for _ in 0..if slots.is_empty() { 0 } else { 40 } {
            let slot = slots[self.numbers.below(slots.len() as u64) as usize];
            let segment = self.tiles[slot as usize / TILE].segment as usize;
            let weight = self.numbers.one_of(&[0, ONE / 3, ONE]);
            let group = Group(self.numbers.below(self.groups) as u8);
            rows.push((slot, self.segments[segment].clock.units() + weight, group));
            self.ids.set(slot, MemoryId(self.numbers.next()));
        }
        self.for_each(|device| device.write(&rows).unwrap());
    }

    /// Changes some vectors, and recalls matches of one of them.
    fn recall(&mut self) {
        let slots: Vec<_> = self.reference.slots().collect();
        let query = self.vector();
        for _ in 0..if slots.is_empty() { 0 } else { 300 } {
            let slot = slots[self.numbers.below(slots.len() as u64) as usize];
            // Ties, and zero vectors.
            let vector = match self.numbers.below(8) {
                0 => vec![0; query.len()],
                1 => query.clone(),
                _ => self.vector(),
            };
            self.vectors.set(slot, &vector);
        }
        let (segments, scope, query) = (self.segments.clone(), self.scope(), Query::new(&query));
        let limit = self.numbers.one_of(&[0, 1, 10, 300, usize::MAX]);
        let (ids, vectors) = (self.ids.clone(), std::mem::replace(&mut self.vectors, Vectors::new(0, 1)));
        let request =
            RecallRequest { segments: &segments, ids: &ids, query: &query, features: vectors.column(), scope, limit };
        self.compare_results(|device| {
            let mut out = Vec::new();
            device.recall(&request, &mut out).unwrap();
            out
        });
        self.vectors = vectors;
    }

    /// Returns finite f16 values below 2, subnormal ones included.
    fn vector(&mut self) -> Vec<u16> {
        (0..self.vectors.column().dimension).map(|_| (self.numbers.next() & 0xbfff) as u16).collect()
    }

    fn scope(&mut self) -> Scope {
        match self.numbers.below(4) {
            0 => Scope::Segment(self.numbers.below(self.segments.len() as u64) as u32),
            1 => Scope::Group(Group(self.numbers.below(self.groups) as u8)),
            _ => Scope::All,
        }
    }

    /// Compares the content of all devices.
    pub(crate) fn compare(&mut self) {
        let (segments, ids, content) = (self.segments.clone(), self.ids.clone(), self.content.clone());
        let slots: Vec<_> = self.reference.slots().collect();
        self.compare_results(|device| {
            let mut rows = vec![(9, Group(9))];
            device.read(&slots, &mut rows).unwrap();
            rows
        });
        for content in [None, Some(&content)] {
            self.compare_results(|device| {
                let mut out = Vec::new();
                device.digest(&DigestRequest { segments: &segments, ids: &ids, content }, &mut out).unwrap();
                out
            });
        }
        for tile in 0..self.tiles.len() {
            self.compare_results(|device| {
                let mut columns = (vec![1], vec![1]);
                device.export(tile as u32, &mut columns.0, &mut columns.1).unwrap();
                columns
            });
        }
    }
}
