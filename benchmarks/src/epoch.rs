//! A learning epoch in process with the log off: decay, 10,000 updates by slot, the quality vector of two groups over all
//! partitions.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use engram_kernels::{Device, Update};
use engram_memory::hash::mix64;
use engram_memory::{QualityVector, edge, law};

use crate::arena::{self, Arena};
use crate::measure;
use crate::row::{Better, Budget, Figure, Row, Workload};

/// Updates of one epoch.
const UPDATES: usize = 10_000;
/// What one epoch takes from every weight.
const DECAY: f64 = 0.01;
/// More epochs than the clock needs to run full once at [`DECAY`].
const FOLD_BY: u32 = 1_000;

/// Measures one size.
///
/// # Errors
/// When the device fails, or lost memories.
pub(crate) fn rows(memories: u32, threads: usize) -> Result<Vec<Row>> {
    eprintln!("epoch: {memories} memories");
    let mut arena = Arena::new(memories, threads, arena::uniform)?;
    let updates = updates(&arena)?;
    let decay = edge::setting(DECAY).context("the decay is out of range")?;
    let mut parts = Vec::new();

    let figure = measure::milliseconds(|| turn(&mut arena, &updates, decay, &mut parts).map(drop))?;
    let by_slot = Row {
        title: "learning epoch, 10,000 updates by slot, 2 groups".to_owned(),
        workloads: vec![Workload { name: "epoch-by-slot".to_owned(), remark: String::new() }],
        memories: u64::from(memories),
        unit: "ms".to_owned(),
        better: Better::Lower,
        ours: figure,
        peers: Vec::new(),
        budgets: budgets(memories),
    };

    let (mean_ms, epochs) = mean_with_one_fold(&mut arena, &updates, decay, &mut parts)?;
    let with_fold = Row {
        title: "the same, mean from one fold of the decay clock to the next".to_owned(),
        ours: Figure { best: mean_ms, median: mean_ms, repeats: epochs },
        budgets: Vec::new(),
        workloads: by_slot.workloads.clone(),
        peers: Vec::new(),
        unit: by_slot.unit.clone(),
        ..by_slot
    };
    Ok(vec![by_slot, with_fold])
}

fn budgets(memories: u32) -> Vec<Budget> {
    let ratio = |peer: &str, at_least| Budget::Ratio { peer: peer.to_owned(), at_least };
    match memories {
        1_000_000 => vec![ratio("numpy", 6.0), ratio("torch", 3.0)],
        10_000_000 => vec![ratio("numpy", 5.0)],
        _ => Vec::new(),
    }
}

/// One epoch. Returns whether the clocks folded.
fn turn(arena: &mut Arena, updates: &[Update], decay: u32, parts: &mut Vec<QualityVector>) -> Result<bool> {
    let folds = arena.decay(decay);
    arena.device.epoch(&arena.segments, updates, parts)?;
    let mut whole = QualityVector::default();
    for part in &*parts {
        whole.merge(part);
    }
    ensure!(black_box(&whole).total().count == arena.slots.len() as u64, "the quality vector misses memories");
    Ok(folds)
}

/// Milliseconds per epoch, and how many epochs, from just after one fold up to and with the next.
fn mean_with_one_fold(
    arena: &mut Arena,
    updates: &[Update],
    decay: u32,
    parts: &mut Vec<QualityVector>,
) -> Result<(f64, u32)> {
    let mut until_fold = |limit: u32| -> Result<u32> {
        for epoch in 1..=limit {
            if turn(arena, updates, decay, parts)? {
                return Ok(epoch);
            }
        }
        anyhow::bail!("the decay clock did not fold within {limit} epochs")
    };
    until_fold(FOLD_BY)?;
    let started = Instant::now();
    let epochs = until_fold(FOLD_BY)?;
    Ok((started.elapsed().as_secs_f64() * 1e3 / f64::from(epochs), epochs))
}

/// Updates at distinct slots in no order, as the peers make them.
fn updates(arena: &Arena) -> Result<Vec<Update>> {
    let rate = edge::rate(0.05).context("the learning rate is out of range")?;
    let quality = edge::quality(0.8).context("the quality is out of range")?;
    let delta = law::delta(rate, quality);
    let mut slots = arena.slots.clone();
    let wanted = UPDATES.min(slots.len());
    // The first steps of a shuffle.
    for place in 0..wanted {
        let rest = (slots.len() - place) as u64;
        slots.swap(place, place + (mix64(place as u64) % rest) as usize);
    }
    Ok(slots[..wanted].iter().map(|&slot| Update { slot, delta }).collect())
}
