//! Measures the number of memories from which a GPU is faster than the CPU, and its throughput, with the quality pass.
//!
//! The CPU does the least work per memory in this pass, so for other passes the threshold errs on the side of the CPU.

use crate::mirror::Mirror;
use crate::{Cpu, Device, Error, Segment, Slot, TILE, Tile, TileId};
use engram_memory::{Group, ONE, mix64};
use std::time::{Duration, Instant};

/// Tiles of the two measured passes: 65,536 memories and 1,048,576.
const TILES: [TileId; 2] = [16, 256];
/// Runs of each; the fastest counts, since disturbances only slow passes down.
const RUNS: usize = 4;

/// Measurements of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measurement {
    /// Minimum number of memories from which the GPU is faster; `None` = never.
    pub threshold: Option<u64>,
    /// Throughput of the GPU in memories per second, without the fixed cost of a pass.
    pub throughput: u64,
    /// Fixed cost of a GPU pass.
    pub latency: Duration,
}

/// Durations of a pass over few memories and over many.
#[derive(Debug, Clone, Copy, PartialEq)]
struct PassTimes {
    few: Duration,
    many: Duration,
}

/// Measures CPU and GPU with the same passes. Both start without tiles, and have tiles afterwards.
///
/// # Errors
/// [`Error::Full`], [`Error::Failed`].
pub fn measure<M: Mirror>(host: &mut Cpu, gpu: &mut M) -> Result<Measurement, Error> {
    let memories = |tiles: TileId| u64::from(tiles) * TILE as u64;
    let [few, many] = TILES;
    host.reserve(many)?;
    gpu.reserve(many)?;
    let potentials = |tile: TileId| -> Vec<u32> {
        (0..TILE as u64).map(|at| mix64(u64::from(tile) << 12 | at) as u32 % ONE).collect()
    };
    let groups: Vec<u8> = (0..TILE).map(|at| at as u8 & 1).collect();
    for tile in 0..many {
        let potentials = potentials(tile);
        let first = tile * TILE as u32;
        let rows: Vec<(Slot, u32, Group)> =
            potentials.iter().zip(&groups).zip(first..).map(|((&it, &group), slot)| (slot, it, Group(group))).collect();
        host.write(&rows)?;
        gpu.replace(tile, &potentials, &groups)?;
    }
    let (of_host, of_gpu) = (time_passes(host)?, time_passes(gpu)?);
    let sizes = [memories(few), memories(many)];
    let (fixed, each) = line(sizes, of_gpu);
    Ok(Measurement {
        threshold: crossing(sizes, of_host, of_gpu),
        // Slower than the clock resolves: use the average throughput.
        throughput: if each > 0.0 { 1.0 / each } else { sizes[1] as f64 / of_gpu.many.as_secs_f64().max(1e-9) } as u64,
        latency: Duration::from_secs_f64(fixed.max(0.0)),
    })
}

fn time_passes(device: &mut dyn Device) -> Result<PassTimes, Error> {
    let [few, many] = TILES;
    Ok(PassTimes { few: fastest_pass(device, 0..few)?, many: fastest_pass(device, few..many)? })
}

/// Returns the fastest pass after adding these tiles.
fn fastest_pass(device: &mut dyn Device, tiles: std::ops::Range<TileId>) -> Result<Duration, Error> {
    tiles.for_each(|tile| device.map_tile(tile, Tile { segment: 0, count: TILE as u32 }));
    let mut quality = Vec::new();
    let mut fastest = Duration::MAX;
    for _ in 0..RUNS {
        let begin = Instant::now();
        device.epoch(&[Segment::default()], &[], &mut quality)?;
        fastest = fastest.min(begin.elapsed());
    }
    Ok(fastest)
}

/// Returns the line through both measurements: fixed seconds, and seconds per memory.
fn line([few, many]: [u64; 2], timed: PassTimes) -> (f64, f64) {
    let [least, most] = [timed.few, timed.many].map(|time| time.as_secs_f64());
    let each = (most - least).max(0.0) / (many - few) as f64;
    (least - each * few as f64, each)
}

/// Returns where the two lines cross.
fn crossing(sizes: [u64; 2], host: PassTimes, gpu: PassTimes) -> Option<u64> {
    let [few, _] = sizes;
    let (fixed, each) = (|timed| line(sizes, timed).0, |timed| line(sizes, timed).1);
    if gpu.few <= host.few && gpu.many <= host.many {
        // Faster throughout: the crossing is below the measured sizes.
        let gain = each(host) - each(gpu);
        let from = if gain > 0.0 { (fixed(gpu) - fixed(host)) / gain } else { 0.0 };
        return Some(from.clamp(0.0, few as f64).ceil() as u64);
    }
    let gain = each(host) - each(gpu);
    (gain > 0.0).then(|| ((fixed(gpu) - fixed(host)) / gain).max(0.0).ceil() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [u64; 2] = [65_536, 1_048_576];

    /// A device that takes `fixed` microseconds and `each` picoseconds per memory.
    fn device(fixed: u64, each: u64) -> PassTimes {
        let [few, many] = SIZES.map(|memories| Duration::from_nanos(fixed * 1_000 + each * memories / 1_000));
        PassTimes { few, many }
    }

    #[test]
    fn gpu_is_used_once_its_fixed_cost_is_amortized() {
        // 35 us against 0.15 ms per million.
        let at = crossing(SIZES, device(0, 150), device(35, 5)).unwrap();
        assert!((240_000..242_500).contains(&at), "{at}");
        // Beyond the measured sizes.
        let at = crossing(SIZES, device(0, 10), device(35, 5)).unwrap();
        assert!((6_900_000..7_100_000).contains(&at), "{at}");
    }

    #[test]
    fn gpu_slower_at_every_size_is_not_used() {
        assert_eq!(crossing(SIZES, device(0, 150), device(35, 150)), None);
        assert_eq!(crossing(SIZES, device(0, 150), device(5, 300_000)), None);
    }

    #[test]
    fn gpu_faster_at_every_size_is_always_used() {
        assert_eq!(crossing(SIZES, device(50, 150), device(35, 150)), Some(0));
        assert_eq!(crossing(SIZES, device(50, 150), device(35, 5)), Some(0));
        let at = crossing(SIZES, device(0, 5_000), device(35, 5)).unwrap();
        assert!((7_000..7_100).contains(&at), "{at}");
    }

    #[test]
    fn durations_that_fall_with_size_count_as_constant() {
        let odd = PassTimes { few: Duration::from_micros(40), many: Duration::from_micros(30) };
        assert_eq!(crossing(SIZES, odd, device(20, 1_000)), None);
        assert!(crossing(SIZES, device(0, 150), odd).is_some());
    }
}
