//! A learning epoch in process without a log: decay, 10,000 updates by slot, quality of two groups over all partitions.

use std::hint::black_box;

use anyhow::{Context, Result, ensure};
use engram_kernels::profiler::Recorder;
use engram_kernels::{Device, Update};
use engram_memory::{QualityVector, edge};

use crate::arena::Arena;
use crate::measure;
use crate::population::{self, DECAY, UPDATES};
use crate::profile::PASSES;
use crate::row::{Better, Budget, Row, Workload};

/// Measures one size; then records further epochs if requested.
///
/// # Errors
/// When the device fails, or memories are missing.
pub(crate) fn epoch_rows(memories: u32, threads: usize, recorder: Option<Recorder>) -> Result<Vec<Row>> {
    eprintln!("epoch: {memories} memories");
    let mut arena = Arena::new(memories, threads, population::uniform)?;
    let delta = population::delta()?;
    let numbers = population::distinct(UPDATES, memories);
    let updates: Vec<Update> =
        numbers.iter().map(|&number| Update { slot: arena.slots[number as usize], delta }).collect();
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
    let with_fold = Row {
        title: "learning epoch by slot, mean from one fold of the decay clock to the next".to_owned(),
        ours: measure::mean_with_one_fold(|| turn(&mut arena, &updates, decay, &mut parts))?,
        budgets: Vec::new(),
        ..by_slot.clone()
    };
    if let Some(recorder) = recorder {
        let mut arena = arena.profiled(recorder);
        for _ in 0..PASSES {
            turn(&mut arena, &updates, decay, &mut parts)?;
        }
    }
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

/// Runs one epoch and returns whether the clocks folded.
fn turn<D: Device>(
    arena: &mut Arena<D>,
    updates: &[Update],
    decay: u32,
    parts: &mut Vec<QualityVector>,
) -> Result<bool> {
    let folds = arena.decay(decay);
    arena.device.epoch(&arena.segments, updates, parts)?;
    let mut whole = QualityVector::default();
    for part in &*parts {
        whole.merge(part);
    }
    ensure!(black_box(&whole).total().count == arena.slots.len() as u64, "the quality vector misses memories");
    Ok(folds)
}
