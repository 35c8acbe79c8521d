//! Runs every pass of the kernels once and compares it with the reference device.
#![allow(clippy::unwrap_used)] // Test helpers.

mod algebra;
mod geodesic;
mod training;

use crate::random_numbers::RandomNumbers;
use crate::reference_device::{ReferenceDevice, Vectors};
use engram_kernels::gpu::Driver;
use engram_kernels::priority::{Draws, Priorities};
use engram_kernels::recall::{Query, RecallRequest};
use engram_kernels::{
    Device, DigestRequest, Gpu, GroupUpdate, Order, RankRequest, Scope, Segment, Slot, TILE, Tile, Tiles, Update,
};
use engram_memory::clock::{Advance, FOLD_AT};
use engram_memory::{DecayClock, Group, MemoryId, ONE, mix64};
use std::collections::HashMap;

/// A pass or group of passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// An epoch with folds whose updates fit into buckets.
    Epoch,
    /// Epochs with more updates of one memory than a bucket holds.
    HotEpoch,
    /// An epoch with folds and without updates.
    Quality,
    /// Updates only, many of one memory.
    Update,
    /// Updates of groups, several of one group.
    Groups,
    /// The histogram.
    Histogram,
    /// Full rankings.
    Rank,
    /// First entries of rankings, with distinct and with tied weights.
    Few,
    /// The digest, with and without content.
    Digest,
    /// Reads and exports.
    Read,
    /// Look-ups and updates by id.
    Index,
    /// Prioritized sampling.
    Sample,
    /// Recall.
    Recall,
    /// Max-plus products.
    MaxPlus,
    /// Sums of outer products.
    OuterProducts,
    /// Networks of the geodesic model and their gradients.
    Networks,
    /// Path features of the geodesic model and their gradients.
    Paths,
    /// Gradients of networks in training.
    Training,
}

/// All parts.
pub(crate) const PARTS: [Part; 18] = [
    Part::Epoch,
    Part::HotEpoch,
    Part::Quality,
    Part::Update,
    Part::Groups,
    Part::Histogram,
    Part::Rank,
    Part::Few,
    Part::Digest,
    Part::Read,
    Part::Index,
    Part::Sample,
    Part::Recall,
    Part::MaxPlus,
    Part::OuterProducts,
    Part::Networks,
    Part::Paths,
    Part::Training,
];

/// The last segment: a partial tile, for expensive passes.
const SMALL: u32 = 2;

pub(crate) struct PassChecks<D: Driver> {
    numbers: RandomNumbers,
    gpu: Gpu<D>,
    reference: ReferenceDevice,
    segments: Vec<Segment>,
    tiles: Vec<Tile>,
    ids: Tiles<MemoryId>,
    lean: bool,
}

impl<D: Driver> PassChecks<D> {
    /// Creates tiles with these memory counts: of two segments in turn, and the last of a third. `lean` uses fewer threads.
    pub(crate) fn new(driver: D, seed: u64, counts: &[u32], lean: bool) -> Self {
        let mut numbers = RandomNumbers(seed);
        // One of the three clocks is about to fold, so that parts in turn see folds.
        let clocks = [numbers.below(u64::from(ONE)) as u32, FOLD_AT - 1 - numbers.below(1 << 20) as u32, 7];
        let segments: Vec<_> = clocks
            .iter()
            .map(|&units| Segment { clock: DecayClock::from_units(units).unwrap(), ..Segment::default() })
            .collect();
        let segment_of = |tile: usize| if tile + 1 == counts.len() { SMALL } else { tile as u32 % 2 };
        let tiles: Vec<_> =
            counts.iter().enumerate().map(|(tile, &count)| Tile { segment: segment_of(tile), count }).collect();
        let mut ids = Tiles::new();
        ids.reserve(tiles.len());
        let mut rows = Vec::new();
        for (index, tile) in tiles.iter().enumerate() {
            let clock = clocks[tile.segment as usize];
            for slot in (index * TILE) as Slot..(index * TILE) as Slot + tile.count {
                let weight = numbers.below(u64::from(ONE) + 1) as u32;
                let potential = match numbers.below(8) {
                    0 | 1 => clock.saturating_sub(weight), // Weight 0, for some long ago.
                    2 => clock + ONE,
                    3 => clock + ONE / 3,
                    _ => clock + weight,
                };
                let group = if numbers.below(8) == 0 { numbers.below(256) } else { numbers.below(2) };
                rows.push((slot, potential, Group(group as u8)));
                ids.set(slot, MemoryId(mix64(u64::from(slot) ^ seed)));
            }
        }
        let mut checks = Self {
            gpu: Gpu::new(driver, "kernels on the CPU".to_owned()),
            reference: ReferenceDevice::new(),
            numbers,
            segments,
            tiles,
            ids,
            lean,
        };
        let tiles = checks.tiles.clone();
        // In two steps, so that columns grow.
        checks.for_each(|device| device.reserve(1).unwrap());
        checks.for_each(|device| device.reserve(tiles.len() as u32).unwrap());
        for (index, &tile) in tiles.iter().enumerate() {
            checks.for_each(|device| device.map_tile(index as u32, tile));
        }
        checks.for_each(|device| device.write(&rows).unwrap());
        checks
    }

    fn for_each(&mut self, mut call: impl FnMut(&mut dyn Device)) {
        call(&mut self.reference);
        call(&mut self.gpu);
    }

    fn compare_results<T: PartialEq>(&mut self, what: &str, mut call: impl FnMut(&mut dyn Device) -> T) {
        let expected = call(&mut self.reference);
        assert!(call(&mut self.gpu) == expected, "{what} differs from the reference");
    }

    fn decay(&mut self) -> Vec<Segment> {
        for segment in &mut self.segments {
            segment.fold = match segment.clock.advance(10_737_418) {
                Advance::Moved => 0,
                Advance::Fold { subtract } => subtract,
            };
        }
        let segments = self.segments.clone();
        self.segments.iter_mut().for_each(|segment| segment.fold = 0);
        segments
    }

    fn any_slot(&mut self) -> Slot {
        let tile = self.numbers.below(self.tiles.len() as u64) as usize;
        (tile * TILE) as Slot + self.numbers.below(u64::from(self.tiles[tile].count)) as Slot
    }

    /// Returns `count` updates, of which `hot` of 256 address one memory.
    fn updates(&mut self, count: usize, hot: u64) -> Vec<Update> {
        let one = self.any_slot();
        (0..count)
            .map(|_| {
                let slot = if self.numbers.below(256) < hot { one } else { self.any_slot() };
                Update { slot, delta: self.numbers.delta() }
            })
            .collect()
    }

    /// Compares all potentials and groups.
    fn weights(&mut self, what: &str) {
        let slots: Vec<_> = self.reference.slots().step_by(if self.lean { 7 } else { 1 }).collect();
        self.compare_results(what, |device| {
            let mut rows = Vec::new();
            device.read(&slots, &mut rows).unwrap();
            rows
        });
    }

    fn epoch(&mut self, what: &str, updates: &[Update]) {
        let segments = self.decay();
        self.compare_results(what, |device| {
            let mut out = Vec::new();
            device.epoch(&segments, updates, &mut out).unwrap();
            out
        });
        self.weights(what);
    }

    pub(crate) fn check(&mut self, part: Part) {
        match part {
            Part::Epoch => {
                let updates = self.updates(40 * self.tiles.len(), 8);
                self.epoch("an epoch", &updates);
            }
            Part::HotEpoch => {
                // Few enough for the buckets, but most of one memory of the last tile; then too many.
                let (one, tiles) = (((self.tiles.len() - 1) * TILE) as Slot, self.tiles.len());
                let mut updates = self.updates(60 * tiles, 0);
                updates.iter_mut().skip(15 * tiles).for_each(|update| update.slot = one);
                self.epoch("an epoch with a hot memory", &updates);
                let updates = self.updates(1_100, 230);
                self.epoch("an epoch with a hot memory and many updates", &updates);
            }
            Part::Quality => self.epoch("an epoch without updates", &[]),
            Part::Update => {
                // Two blocks of the sort, five of the scan.
                let (segments, updates) = (self.decay(), self.updates(4_200, 200));
                self.for_each(|device| device.update(&segments, &updates).unwrap());
                self.weights("an update");
            }
            Part::Groups => self.groups(),
            Part::Histogram => {
                let segments = self.segments.clone();
                self.compare_results("a histogram", |device| device.histogram(&segments, 7).unwrap());
            }
            Part::Rank => {
                let scopes = [
                    (Scope::All, Order::HeaviestFirst),
                    (Scope::Segment(SMALL), Order::LightestFirst),
                    (Scope::Group(Group(1)), Order::HeaviestFirst),
                ];
                for (scope, order) in scopes.into_iter().take(if self.lean { 1 } else { 3 }) {
                    self.rank("a rank", scope, order, None);
                }
            }
            Part::Few => self.few(),
            Part::Digest => self.digest(),
            Part::Read => {
                self.weights("a read");
                for tile in 0..self.tiles.len() as u32 {
                    self.compare_results("an export", |device| {
                        let mut columns = (Vec::new(), Vec::new());
                        device.export(tile, &mut columns.0, &mut columns.1).unwrap();
                        columns
                    });
                }
            }
            Part::Index => self.index(),
            Part::Sample => self.sample(),
            Part::Recall => self.recall(),
            Part::MaxPlus | Part::OuterProducts => self.algebra(part),
            Part::Networks | Part::Paths => self.geodesic(part),
            Part::Training => self.training(),
        }
    }

    fn groups(&mut self) {
        let segments = self.decay();
        let mut rules: Vec<_> = [(0, 0), (0, 1), (1, 1), (0, 1), (0, 1), (SMALL, 0), (0, 255)]
            .map(|(segment, group)| GroupUpdate { segment, group: Group(group), delta: self.numbers.delta() })
            .into();
        rules.push(GroupUpdate { delta: ONE as i32, ..rules[1] });
        rules.push(GroupUpdate { delta: -5, ..rules[1] });
        self.compare_results("an update of groups", |device| {
            let mut changed = Vec::new();
            device.update_groups(&segments, &rules, &mut changed).unwrap();
            changed
        });
        self.weights("an update of groups");
    }

    fn rank(&mut self, what: &str, scope: Scope, order: Order, limit: Option<usize>) {
        let (segments, ids) = (self.segments.clone(), self.ids.clone());
        self.compare_results(what, |device| {
            let mut out = Vec::new();
            device.rank(&RankRequest { segments: &segments, ids: &ids, scope, order, limit }, &mut out).unwrap();
            out
        });
    }

    fn few(&mut self) {
        for order in [Order::HeaviestFirst, Order::LightestFirst] {
            // A quarter has weight 0, an eighth weight 1: both cuts are among ties.
            let limit = self.reference.slots().count() / 20;
            self.rank("the first few", Scope::All, order, Some(limit));
        }
    }

    fn digest(&mut self) {
        let (segments, ids) = (self.segments.clone(), self.ids.clone());
        let mut content = Tiles::new();
        content.reserve(self.tiles.len());
        for _ in 0..100 {
            let (slot, any) =
                (self.any_slot(), u128::from(self.numbers.next()) << 64 | u128::from(self.numbers.next()));
            content.set(slot, any);
        }
        for content in [None, Some(&content)] {
            self.compare_results("a digest", |device| {
                let mut out = Vec::new();
                device.digest(&DigestRequest { segments: &segments, ids: &ids, content }, &mut out).unwrap();
                out
            });
        }
    }

    fn index(&mut self) {
        let slots: Vec<Slot> = self.reference.slots().collect();
        let mut place: HashMap<MemoryId, Slot> = slots.iter().map(|&slot| (self.ids.get(slot), slot)).collect();
        let ids = self.ids.clone();
        let unknown = MemoryId(mix64(1 << 40));
        self.gpu.build_index(self.numbers.next(), &ids).unwrap();
        // Some are erased, and some of these inserted again.
        let gone: Vec<Slot> = slots.iter().copied().filter(|slot| slot % 5 == 0).collect();
        let back: Vec<Slot> = gone.iter().copied().filter(|slot| slot % 2 == 0).collect();
        let mut erased: Vec<_> = gone.iter().map(|&slot| ids.get(slot)).collect();
        erased.push(unknown);
        self.gpu.erase(&erased).unwrap();
        self.gpu.insert(&back, &ids).unwrap();
        gone.iter().filter(|slot| **slot % 2 == 1).for_each(|&slot| {
            place.remove(&ids.get(slot));
        });
        let mut requested: Vec<_> = slots.iter().step_by(3).map(|&slot| ids.get(slot)).collect();
        requested.extend([unknown, MemoryId(u64::MAX)]);
        let expected: Vec<_> = requested.iter().map(|id| place.get(id).copied()).collect();
        assert!(self.gpu.find(&requested).unwrap() == expected, "index lookup differs");

        let segments = self.decay();
        let updates: Vec<_> = (0..600)
            .map(|_| (requested[self.numbers.below(40).min(requested.len() as u64 - 1) as usize], self.numbers.delta()))
            .chain([(unknown, 5)])
            .collect();
        let resolve = |(id, delta): &(MemoryId, i32)| place.get(id).map(|&slot| Update { slot, delta: *delta });
        let by_slot: Vec<_> = updates.iter().filter_map(resolve).collect();
        let missing: Vec<_> = (0..updates.len()).filter(|&at| !place.contains_key(&updates[at].0)).collect();
        self.reference.update(&segments, &by_slot).unwrap();
        assert!(self.gpu.update_by_id(&segments, &updates).unwrap() == missing, "missing ids differ");
        self.weights("an update by id");
    }

    fn sample(&mut self) {
        let priorities = Priorities::new(39_322);
        // In segment order rather than arena order; a tile may precede an earlier one.
        let mut order: Vec<u32> = (0..self.tiles.len() as u32).rev().collect();
        order.sort_by_key(|&tile| self.tiles[tile as usize].segment);
        let sums = self.gpu.priority_sums(&self.segments, &order, &priorities).unwrap();

        let (mut all, mut totals) = (Vec::new(), vec![0_u64; self.segments.len()]);
        for &tile in &order {
            let Tile { segment, count } = self.tiles[tile as usize];
            let slots: Vec<_> = (0..count).map(|offset| tile * TILE as u32 + offset).collect();
            let mut rows = Vec::new();
            self.reference.read(&slots, &mut rows).unwrap();
            for (slot, (potential, _)) in slots.into_iter().zip(rows) {
                let own = priorities.of(self.segments[segment as usize].clock.weight(potential).units());
                totals[segment as usize] += u64::from(own);
                all.push((segment, slot, own));
            }
        }
        let shares: Vec<_> = sums.shares().iter().map(|share| (share.segment, share.total)).collect();
        let is_present = |segment: u32| self.tiles.iter().any(|tile| tile.segment == segment);
        let expected: Vec<_> = (0..).zip(totals).filter(|(segment, _)| is_present(*segment)).collect();
        assert!(shares == expected, "sums of priorities differ");

        // Another worker holds a partition in front, and one between the first segment and the others.
        let elsewhere = 1 << 40;
        let mut begin = elsewhere;
        let offsets: Vec<u64> = shares
            .iter()
            .enumerate()
            .map(|(place, share)| {
                let offset = begin;
                begin += share.1 + if place == 0 { elsewhere } else { 0 };
                offset
            })
            .collect();
        let draws = Draws { seed: self.numbers.next(), step: 7, stream: 0, count: 500, total: begin };
        let drawn = self.gpu.sample(&sums, &offsets, &draws).unwrap();
        let expected: Vec<_> = (0..draws.count)
            .map(|draw| {
                let threshold = draws.threshold(draw);
                let mut sums: HashMap<u32, u64> =
                    shares.iter().map(|share| share.0).zip(offsets.iter().copied()).collect();
                let hit = all.iter().find(|(segment, _, own)| {
                    let sum = sums.get_mut(segment).unwrap();
                    let before = *sum;
                    *sum += u64::from(*own);
                    (before..*sum).contains(&threshold)
                });
                hit.map(|&(_, slot, own)| (slot, own))
            })
            .collect();
        assert!(expected.contains(&None) && drawn == expected, "draws differ");
    }

    fn recall(&mut self) {
        let numbers = &mut self.numbers;
        let mut vectors = Vectors::new(self.tiles.len(), 45);
        // Finite f16 below 2, subnormal ones included.
        let mut vector = || -> Vec<u16> { (0..45).map(|_| (numbers.next() & 0xbfff) as u16).collect() };
        let query_bits = vector();
        let small: Vec<Slot> =
            self.reference.slots().filter(|slot| self.tiles[*slot as usize / TILE].segment == SMALL).collect();
        for &slot in &small {
            let row = match slot % 50 {
                0 => vec![0; 45],
                1 => query_bits.clone(),
                _ => vector(),
            };
            vectors.set(slot, &row);
        }
        let changed = vector();
        let query = Query::new(&query_bits);
        let (segments, ids) = (self.segments.clone(), self.ids.clone());
        for limit in [10, usize::MAX] {
            let request = RecallRequest {
                segments: &segments,
                ids: &ids,
                query: &query,
                features: vectors.column(),
                scope: Scope::Segment(SMALL),
                limit,
            };
            self.compare_results("recall", |device| {
                let mut out = Vec::new();
                device.recall(&request, &mut out).unwrap();
                out
            });
            // Changed vectors are transferred again.
            vectors.set(small[0], &changed);
        }
    }
}
