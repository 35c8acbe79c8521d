//! Several devices: computations and passes over logical devices and members of a group, partition assignment, and the overhead of an empty batch.

mod members;
mod multiple;
mod patterns;

pub(crate) use patterns::pattern_rows;

use std::hint::black_box;

use anyhow::{Result, ensure};
use engram_kernels::Device;
use engram_kernels::partitioner::{Resource, Size, Strategy, assign};
use engram_memory::mix64;

use crate::arena::Arena;
use crate::measure;
use crate::population;
use crate::row::{Better, Budget, Figure, Row};

/// Empty batches per measurement: one is below the clock's resolution.
const BATCHES: u32 = 1_000;
/// Assigned partitions: the maximum of a cluster.
const PARTITIONS: u32 = 1_024;
/// Devices that partitions are assigned to.
const DEVICES: u64 = 8;

/// Measures one size.
///
/// # Errors
/// When the device fails, or the partitions do not fit on the devices.
pub(crate) fn device_rows(memories: u32, threads: usize) -> Result<Vec<Row>> {
    eprintln!("device: {memories} memories");
    let mut rows = vec![empty_batch(memories, threads)?];
    for (strategy, name) in Strategy::ALL.into_iter().zip(["balanced", "capability", "memory", "latency"]) {
        rows.push(assignment(memories, strategy, name)?);
    }
    rows.extend(multiple::multi_device_rows(memories)?);
    Ok(rows)
}

/// Measures a batch without rows, updates or slots, through the device trait.
fn empty_batch(memories: u32, threads: usize) -> Result<Row> {
    let Arena { device, segments, .. } = Arena::new(memories, threads, population::uniform)?;
    let mut device: Box<dyn Device> = Box::new(device);
    let mut out = Vec::new();
    let batches = measure::milliseconds(|| -> Result<()> {
        for _ in 0..BATCHES {
            let device = black_box(&mut *device);
            device.write(black_box(&[]))?;
            device.update(black_box(&segments), black_box(&[]))?;
            device.read(black_box(&[]), &mut out)?;
        }
        ensure!(out.is_empty(), "{} rows of no slot", out.len());
        Ok(())
    })?;
    let title = "device layer, empty batch: write, update, read".to_owned();
    Ok(row(title, memories, "us", measure::scaled(batches, 1e3 / f64::from(BATCHES)), Some(2.0)))
}

/// Measures the assignment of partitions of similar size to devices whose speeds differ up to tenfold.
fn assignment(memories: u32, strategy: Strategy, name: &str) -> Result<Row> {
    let per_partition = u64::from(memories / PARTITIONS).max(1);
    let sizes: Vec<Size> = (0..u64::from(PARTITIONS))
        .map(|partition| {
            let memories = per_partition + mix64(partition) % (per_partition / 10).max(1);
            Size { memories, bytes: memories * 13 }
        })
        .collect();
    let all: u64 = sizes.iter().map(|size| size.bytes).sum();
    let resources: Vec<Resource> = (0..DEVICES)
        .map(|device| Resource {
            throughput: Some(1_000_000_000 * (1 + mix64(device) % 10)),
            free_bytes: all / DEVICES + mix64(device + 100) % all,
            latency_ns: mix64(device + 200) % 100_000,
            healthy: true,
        })
        .collect();
    let decision = measure::milliseconds(|| -> Result<()> {
        let assignment = assign(strategy, black_box(&resources), black_box(&sizes))?;
        ensure!(assignment.devices.len() == sizes.len(), "a partition has no device");
        Ok(())
    })?;
    Ok(row(format!("{PARTITIONS} partitions to {DEVICES} devices, {name}"), memories, "ms", decision, Some(5.0)))
}

fn row(title: String, memories: u32, unit: &str, ours: Figure, at_most: Option<f64>) -> Row {
    Row {
        title,
        workloads: Vec::new(),
        memories: u64::from(memories),
        unit: unit.to_owned(),
        better: Better::Lower,
        ours,
        peers: Vec::new(),
        budgets: at_most.map(Budget::Absolute).into_iter().collect(),
    }
}
