//! Every pass of the CPU device equals the reference, for any number of threads and any instruction set.
#![allow(clippy::unwrap_used)] // Test helpers.

mod device_comparison;
mod random_numbers;
mod reference_device;

use device_comparison::DeviceComparison;
use engram_kernels::{Cpu, Device, Instructions, Order, RankRequest, Scope, Segment, TILE, Tile, Tiles};
use engram_memory::{DecayClock, Group, MemoryId, ONE};
use proptest::prelude::*;
use random_numbers::RandomNumbers;

fn cpu(threads: usize, instructions: Instructions) -> Box<dyn Device> {
    Box::new(Cpu::with(threads, instructions))
}

/// Returns devices with all instruction sets, and one, two and three threads.
fn devices() -> Vec<Box<dyn Device>> {
    let sets = [(1, Instructions::Widest), (2, Instructions::Avx2), (3, Instructions::Portable)];
    let more = [(3, Instructions::Widest), (1, Instructions::Avx2), (2, Instructions::Portable)];
    sets.into_iter().chain(more).map(|(threads, instructions)| cpu(threads, instructions)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn passes_equal_the_reference_over_random_arenas(seed: u64, tiles in 0_usize..5) {
        let mut devices = DeviceComparison::new(seed, tiles, devices());
        for _ in 0..12 {
            devices.step();
        }
        devices.compare();
    }
}

#[test]
fn passes_equal_the_reference_where_threads_and_splits_matter() {
    for seed in 0..6 {
        let devices = vec![cpu(2, Instructions::Widest), cpu(3, Instructions::Avx2), cpu(2, Instructions::Portable)];
        let mut devices = DeviceComparison::new(seed, 60, devices);
        for _ in 0..10 {
            devices.step();
            devices.rank();
        }
        devices.compare();
    }
}

#[test]
fn rank_is_by_weight_not_by_potential() {
    // (id, potential, clock) of three partitions; by raw potential the order would be 9, 7, 8, 3, 4, 2, 1.
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
    device
        .rank(
            &RankRequest {
                segments: &segments,
                ids: &ids,
                scope: Scope::All,
                order: Order::HeaviestFirst,
                limit: None,
            },
            &mut out,
        )
        .unwrap();
    let ranked: Vec<_> = out.iter().map(|&(slot, weight)| (ids.get(slot).0, weight)).collect();
    assert_eq!(ranked, [(7, 40), (8, 40), (9, 30), (3, 15), (1, 0), (2, 0), (4, 0)]);
}

#[test]
fn partially_ascending_ids_break_ties() {
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
    device
        .rank(
            &RankRequest {
                segments: &[Segment::default()],
                ids: &ids,
                scope: Scope::All,
                order: Order::HeaviestFirst,
                limit: None,
            },
            &mut out,
        )
        .unwrap();
    assert!(out.into_iter().eq(slots.map(|slot| (slot ^ (1 << 16), ONE / 2))));
}

/// Returns the order of a plain sort for slots that all have weight one half.
fn tied(slots: std::ops::Range<u32>, ids: &Tiles<MemoryId>, order: Order, limit: usize) -> Vec<(u32, u32)> {
    let mut slots: Vec<u32> = slots.collect();
    slots.sort_by_key(|&slot| ids.get(slot));
    if order == Order::LightestFirst {
        slots.reverse();
    }
    slots.into_iter().take(limit).map(|slot| (slot, ONE / 2)).collect()
}

#[test]
fn selection_among_ties_sees_changed_ids() {
    for (mut device, limit) in devices().into_iter().zip([1, 3, 300, 1_000, 64, 7]) {
        let mut numbers = RandomNumbers(limit as u64);
        let (tiles, last) = (12, 65);
        let slots = 0..(tiles - 1) * TILE as u32 + last;
        device.reserve(tiles).unwrap();
        let mut ids = Tiles::new();
        ids.reserve(tiles as usize);
        slots.clone().for_each(|slot| ids.set(slot, MemoryId(numbers.next())));
        let rows: Vec<_> = slots.clone().map(|slot| (slot, ONE / 2, Group(0))).collect();
        device.write(&rows).unwrap();
        let entry = |tile: u32| Tile { segment: 0, count: if tile + 1 == tiles { last } else { TILE as u32 } };
        (0..tiles).for_each(|tile| device.map_tile(tile, entry(tile)));
        let mut out = Vec::new();
        for turn in 0..20 {
            for order in [Order::HeaviestFirst, Order::LightestFirst] {
                device
                    .rank(
                        &RankRequest {
                            segments: &[Segment::default()],
                            ids: &ids,
                            scope: Scope::All,
                            order,
                            limit: Some(limit),
                        },
                        &mut out,
                    )
                    .unwrap();
                assert_eq!(out, tied(slots.clone(), &ids, order, limit), "turn {turn}, {:?}", device.info());
            }
            // Replaces some memories, among them the first, the last, and those at span boundaries.
            for (nth, slot) in [0, slots.end - 1, 1 + numbers.below(40_000) as u32].into_iter().enumerate() {
                let new = 3 * turn + nth as u64;
                ids.set(slot, MemoryId(numbers.one_of(&[new, u64::MAX - new])));
                device.write(&[(slot, ONE / 2, Group(0))]).unwrap();
            }
        }
    }
}

#[test]
fn selection_from_many_tiles_is_the_start_of_the_ranking() {
    const TILES: usize = 300;
    const EACH: u32 = 100;
    // Uniform; few weights and many ties; all of the first in one tile, which may or may not be sampled.
    let weights: [fn(u64, usize) -> u32; 4] = [
        |number, _| (number % u64::from(ONE)) as u32,
        |number, _| (number % 3) as u32,
        |number, tile| (number % 1_000) as u32 + if tile == 0 { ONE / 2 } else { 0 },
        |number, tile| (number % 1_000) as u32 + if tile == 5 { ONE / 2 } else { 0 },
    ];
    for weight in weights {
        let mut numbers = RandomNumbers(11);
        let mut ids = Tiles::new();
        ids.reserve(TILES);
        let mut device = Cpu::new(2);
        device.reserve(TILES as u32).unwrap();
        let mut rows = Vec::new();
        for tile in 0..TILES {
            device.map_tile(tile as u32, Tile { segment: 0, count: EACH });
            for slot in (tile * TILE) as u32..(tile * TILE) as u32 + EACH {
                ids.set(slot, MemoryId(numbers.next()));
                rows.push((slot, weight(numbers.next(), tile), Group((numbers.next() % 40) as u8)));
            }
        }
        device.write(&rows).unwrap();
        for order in [Order::HeaviestFirst, Order::LightestFirst] {
            for (scope, limit) in
                [(Scope::All, 1), (Scope::All, 100), (Scope::All, 1_500), (Scope::Group(Group(3)), 90)]
            {
                let mut expected: Vec<_> = rows
                    .iter()
                    .filter(|row| scope == Scope::All || row.2 == Group(3))
                    .map(|&(slot, weight, _)| match order {
                        Order::HeaviestFirst => (ONE - weight, ids.get(slot).0, slot, weight),
                        Order::LightestFirst => (weight, !ids.get(slot).0, slot, weight),
                    })
                    .collect();
                expected.sort_unstable();
                let expected: Vec<_> =
                    expected.iter().take(limit).map(|&(_, _, slot, weight)| (slot, weight)).collect();
                let mut out = Vec::new();
                device
                    .rank(
                        &RankRequest { segments: &[Segment::default()], ids: &ids, scope, order, limit: Some(limit) },
                        &mut out,
                    )
                    .unwrap();
                assert_eq!(out, expected, "{limit} of {scope:?}, {order:?}");
            }
        }
    }
}

#[test]
fn arena_beyond_the_slot_range_is_rejected_unchanged() {
    let mut device = Cpu::new(1);
    device.reserve(1).unwrap();
    assert!(device.reserve(u32::MAX).unwrap_err().to_string().starts_with("device is full"));
    assert_eq!(device.bytes(), 5 * TILE as u64);
}
