//! Benchmarks the passes of the CPU device: `cargo run --release -p engram-kernels --example passes -- [memories] [threads]`.
//!
//! Memories are spread over 256 segments with two groups; updates address random slots. Prints the minimum and the median of each pass.

use engram_kernels::{Cpu, Device, DigestRequest, Order, RankRequest, Scope, Segment, TILE, Tile, Tiles, Update};
use engram_memory::{DecayClock, Group, MemoryId, ONE, mix64};
use std::time::{Duration, Instant};

const SEGMENTS: u32 = 256;
const CLOCK: u32 = 10_737_418;

fn main() {
    let mut arguments = std::env::args().skip(1).map(|text| text.replace('_', ""));
    let memories: usize = arguments.next().map_or(1_000_000, |text| text.parse().expect("a number of memories"));
    let threads = arguments.next().map_or(2, |text| text.parse().expect("a number of threads"));

    let mut device = Cpu::new(threads);
    println!("{}, {} threads, {memories} memories", device.info().name, device.info().threads);
    let tiles = memories.div_ceil(TILE);
    device.reserve(tiles as u32).expect("memory");
    for tile in 0..tiles {
        let count = (memories - tile * TILE).min(TILE) as u32;
        device.map_tile(tile as u32, Tile { segment: tile as u32 % SEGMENTS, count });
    }
    let mut segments = vec![
        Segment {
            clock: DecayClock::from_units(CLOCK).expect("the clock is below the fold"),
            ..Segment::default()
        };
        256
    ];
    let weight = |slot: u64| (mix64(slot + 1) >> 34) as u32;
    fill(&mut device, memories, |slot| CLOCK + weight(slot));
    let updates: Vec<_> = (0..10_000_u64)
        .map(|n| Update {
            slot: (mix64(n + 77) % memories as u64) as u32,
            delta: if n % 2 == 0 { 42_949_673 } else { -42_949_672 },
        })
        .collect();

    let mut quality = Vec::new();
    time("epoch, 10,000 updates", 400, || device.epoch(&segments, &updates, &mut quality).expect("a pass"));
    time("epoch, no updates", 400, || device.epoch(&segments, &[], &mut quality).expect("a pass"));
    time("updates only", 400, || device.update(&segments, &updates).expect("a pass"));
    segments.iter_mut().for_each(|segment| segment.fold = 1);
    time("epoch, 10,000 updates, fold", 100, || device.epoch(&segments, &updates, &mut quality).expect("a pass"));
    segments.iter_mut().for_each(|segment| segment.fold = 0);

    let mut ascending = Tiles::new();
    let mut hashed = Tiles::new();
    ascending.reserve(tiles);
    hashed.reserve(tiles);
    for slot in 0..memories as u32 {
        ascending.set(slot, MemoryId(u64::from(slot)));
        hashed.set(slot, MemoryId(mix64(u64::from(slot))));
    }
    let mut out = Vec::new();
    for (weights, potential) in [("random", None), ("all tied", Some(CLOCK + ONE / 2))] {
        for (order_of_ids, ids) in [("ids ascend", &ascending), ("ids random", &hashed)] {
            fill(&mut device, memories, |slot| potential.unwrap_or_else(|| CLOCK + weight(slot)));
            let mut rank = |name: &str, times, limit| {
                time(&format!("{name}, {weights}, {order_of_ids}"), times, || {
                    let (scope, order) = (Scope::All, Order::HeaviestFirst);
                    let request = RankRequest { segments: &segments, ids, scope, order, limit };
                    device.rank(&request, &mut out).expect("a pass");
                });
            };
            rank("top 1,000", 40, Some(1_000));
            rank("full rank", 7, None);
        }
    }
    let mut digests = Vec::new();
    time("digest", 7, || {
        let request = DigestRequest { segments: &segments, ids: &hashed, content: None };
        device.digest(&request, &mut digests).expect("a pass");
    });
    time("histogram", 7, || drop(device.histogram(&segments, 12).expect("a pass")));
}

fn fill(device: &mut Cpu, memories: usize, potential: impl Fn(u64) -> u32) {
    let rows: Vec<_> =
        (0..memories).map(|slot| (slot as u32, potential(slot as u64), Group((slot % 2) as u8))).collect();
    device.write(&rows).expect("a pass");
}

fn time(name: &str, times: usize, mut pass: impl FnMut()) {
    let mut durations: Vec<Duration> = (0..times)
        .map(|_| {
            let start = Instant::now();
            pass();
            start.elapsed()
        })
        .collect();
    durations.sort_unstable();
    let milliseconds = |duration: Duration| duration.as_secs_f64() * 1e3;
    println!(
        "{name:40} min {:8.3} ms, median {:8.3} ms",
        milliseconds(durations[0]),
        milliseconds(durations[times / 2])
    );
}
