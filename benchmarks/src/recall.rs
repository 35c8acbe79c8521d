//! Recall of the best matches of a vector: cosine of f16 features times weight, over all partitions.

use anyhow::{Result, ensure};
use engram_kernels::profiler::{ProfiledDevice, Recorder};
use engram_kernels::recall::{FeatureColumn, Query, RecallRequest, inverse_norm};
use engram_kernels::{Device, Scope, TILE, Tiles};
use engram_memory::mix64;

use crate::arena::Arena;
use crate::measure;
use crate::population;
use crate::profile::PASSES;
use crate::row::{Better, Budget, Row, Workload};

/// Vector dimension of a small sentence model.
const DIMENSION: usize = 384;
/// Limit of the recall.
const FIRST: usize = 10;

/// Measures one size; then records further passes if requested.
///
/// # Errors
/// When the device fails, or memories are missing.
pub(crate) fn recall_rows(memories: u32, threads: usize, recorder: Option<Recorder>) -> Result<Vec<Row>> {
    eprintln!("recall: {memories} memories of {DIMENSION} f16");
    let Arena { mut device, segments, ids, slots } = Arena::new(memories, threads, population::uniform)?;
    let mut bits: Vec<Box<[u8]>> = Vec::new();
    bits.resize_with(ids.len(), || vec![0; TILE * DIMENSION * 2].into_boxed_slice());
    let mut inverse_norms = Tiles::new();
    inverse_norms.reserve(ids.len());
    for (number, &slot) in slots.iter().enumerate() {
        let vector = vector(number as u64);
        let row = &mut bits[slot as usize / TILE][slot as usize % TILE * DIMENSION * 2..][..DIMENSION * 2];
        row.as_chunks_mut::<2>().0.iter_mut().zip(&vector).for_each(|(stored, bits)| *stored = bits.to_le_bytes());
        inverse_norms.set(slot, inverse_norm(&vector));
    }
    let changes = vec![1; ids.len()];
    let features =
        FeatureColumn { dimension: DIMENSION, bits: &bits, inverse_norms: &inverse_norms, changes: &changes };
    let query = Query::new(&vector(u64::MAX));
    let request =
        RecallRequest { segments: &segments, ids: &ids, query: &query, features, scope: Scope::All, limit: FIRST };
    let mut out = Vec::new();
    let ours = measure::milliseconds(|| -> Result<()> {
        device.recall(&request, &mut out)?;
        ensure!(out.len() == FIRST.min(slots.len()), "{} memories recalled", out.len());
        Ok(())
    })?;
    if let Some(recorder) = recorder {
        let mut device = ProfiledDevice::new(device, recorder);
        for _ in 0..PASSES {
            device.recall(&request, &mut out)?;
        }
    }
    let budgets = match memories {
        100_000 => vec![Budget::Ratio { peer: "numpy".to_owned(), at_least: 1.5 }],
        _ => Vec::new(),
    };
    Ok(vec![Row {
        title: format!("recall, {DIMENSION} f16 (peers: f32), the first {FIRST}"),
        workloads: vec![Workload { name: "recall".to_owned(), remark: String::new() }],
        memories: u64::from(memories),
        unit: "ms".to_owned(),
        better: Better::Lower,
        ours,
        peers: Vec::new(),
        budgets,
    }])
}

/// Returns finite f16 values from -2 to 2.
fn vector(number: u64) -> Vec<u16> {
    (0..DIMENSION as u64).map(|index| (mix64(mix64(number) ^ index) & 0xbfff) as u16).collect()
}
