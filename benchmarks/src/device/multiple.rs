//! Passes over 1, 2 and 4 logical devices: each is a single-threaded CPU with its own memory, driven like a GPU.
//!
//! On a machine with two cores, two devices can be twice as fast as one, and four no faster than two: there the figures of four show overhead
//! rather than scaling.

use anyhow::{Result, ensure};
use engram_kernels::partitioner::Strategy;
use engram_kernels::{AvailableDevice, Cpu, Device, LogicalDevice, MirroredDevice, Order, RankRequest, Scope};
use engram_memory::mix64;

use crate::arena::Arena;
use crate::measure;
use crate::population::{self, PARTITIONS};
use crate::row::{Figure, Row};

/// Numbers of devices.
const COUNTS: [usize; 3] = [1, 2, 4];

pub(super) fn multi_device_rows(memories: u32) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let mut expected = Vec::new();
    Arena::new(memories, 1, population::uniform)?.qualities(&mut expected)?;
    for count in COUNTS {
        let mut arena = Arena::over(devices(count), memories, population::uniform)?;
        let mut quality = Vec::new();
        arena.qualities(&mut quality)?;
        ensure!(quality == expected, "quality of {count} devices differs from that of one CPU");
        let pass = measure::milliseconds(|| arena.qualities(&mut quality))?;
        rows.push(row(count, "store: quality pass", memories, "ms", pass));

        let slots: Vec<_> = (0..10_000).map(|n| arena.slots[mix64(n) as usize % arena.slots.len()]).collect();
        let synced = measure::milliseconds(|| {
            let updates: Vec<_> = slots.iter().map(|&slot| engram_kernels::Update { slot, delta: 1 }).collect();
            arena.device.epoch(&arena.segments, &updates, &mut quality)
        })?;
        rows.push(row(count, "store: 10,000 updates, mirror synchronization, quality", memories, "ms", synced));

        let mut ranked = Vec::new();
        let ranking = measure::milliseconds(|| {
            let Arena { device, segments, ids, .. } = &mut arena;
            device.rank(
                &RankRequest { segments, ids, scope: Scope::All, order: Order::HeaviestFirst, limit: None },
                &mut ranked,
            )
        })?;
        ensure!(ranked.len() == memories as usize, "a ranking of {} memories", ranked.len());
        rows.push(row(count, "store: full ranking, merged", memories, "ms", ranking));

        let status = arena.device.mirror_status().expect("the device is mirrored");
        let most = status.devices.iter().map(|held| held.memories).max().unwrap_or(0);
        let over_mean = (most * count as u64) as f64 / f64::from(memories) - 1.0;
        rows.push(row(
            count,
            "store: maximum memories of a device over the mean",
            memories,
            "%",
            measure::once(over_mean * 100.0),
        ));
        ensure!(status.fallbacks == 0 && status.given_up.is_none(), "{status:?}");
    }
    // One memory per partition: measures calls, threads and sums.
    for count in COUNTS {
        let mut arena = Arena::over(devices(count), PARTITIONS * 4, population::uniform)?;
        let mut quality = Vec::new();
        let pass = measure::milliseconds(|| arena.qualities(&mut quality))?;
        rows.push(row(
            count,
            "store: a pass over almost no memories",
            PARTITIONS * 4,
            "us",
            measure::scaled(pass, 1e3),
        ));
    }
    Ok(rows)
}

/// Returns a CPU with single-threaded mirroring devices.
fn devices(count: usize) -> MirroredDevice<LogicalDevice> {
    let given = (0..count)
        .map(|number| AvailableDevice::unmeasured(LogicalDevice::new(format!("logical {number}"), 1, u32::MAX)));
    MirroredDevice::over(Cpu::new(1), given.collect(), Some(0), Strategy::LatencyOptimized)
}

impl<D: Device> Arena<D> {
    fn qualities(&mut self, out: &mut Vec<engram_memory::QualityVector>) -> Result<(), engram_kernels::Error> {
        self.device.epoch(&self.segments, &[], out)
    }
}

/// The size of a row is the number of devices.
fn row(devices: usize, what: &str, memories: u32, unit: &str, ours: Figure) -> Row {
    super::row(format!("{what}, {memories} memories"), devices as u32, unit, ours, None)
}
