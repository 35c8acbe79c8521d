//! Recall of the best matches of a vector.

use anyhow::Result;
use engram_kernels::gpu::cuda::Cuda;
use engram_kernels::recall::{FeatureColumn, Query, RecallRequest, inverse_norm};
use engram_kernels::{Device, Gpu, Scope, TILE, Tiles};
use engram_memory::mix64;

use super::{Clock, TimingFilter};
use crate::parts::arena::Arena;
use crate::report::Row;

/// Vector dimension of a small sentence model.
const DIMENSION: usize = 384;
/// Maximum number of memories: 768 MB of features.
const MOST: u32 = 1_000_000;
/// Limit of the recall.
const FIRST: usize = 10;

pub(super) fn rows(clock: Clock, mut gpu: Gpu<Cuda>, memories: u32) -> Result<Vec<Row>> {
    let arena = Arena::new(memories.min(MOST));
    arena.fill(&mut gpu)?;
    let Arena { segments, ids, memories } = &arena;
    let mut inverse_norms = Tiles::new();
    inverse_norms.reserve(ids.len());
    let bits: Vec<Box<[u8]>> = (0..ids.len())
        .map(|tile| {
            let mut rows = Vec::with_capacity(TILE * DIMENSION * 2);
            for at in 0..TILE {
                let vector = vector((tile * TILE + at) as u64);
                inverse_norms.tile_mut(tile)[at] = inverse_norm(&vector);
                rows.extend(vector.into_iter().flat_map(u16::to_le_bytes));
            }
            rows.into_boxed_slice()
        })
        .collect();
    let changes = vec![1; ids.len()];
    let features =
        FeatureColumn { dimension: DIMENSION, bits: &bits, inverse_norms: &inverse_norms, changes: &changes };
    let query = Query::new(&vector(u64::MAX));
    let request = RecallRequest { segments, ids, query: &query, features, scope: Scope::All, limit: FIRST };
    let (all, mut out) = (u64::from(*memories), Vec::new());
    // Reads features, and of each memory its slot, norm and potential; writes its key.
    let bytes = all * (2 * DIMENSION as u64 + 16);
    let row = clock.row(
        &mut gpu,
        ("recall, 384 f16, the first 10", "recall"),
        all,
        bytes,
        TimingFilter::Sum(&["recall_keys"]),
        |gpu| gpu.recall(&request, &mut out),
    )?;
    Ok(vec![row])
}

/// Returns finite f16 values from -2 to 2.
fn vector(number: u64) -> Vec<u16> {
    (0..DIMENSION as u64).map(|index| (mix64(mix64(number) ^ index) & 0xbfff) as u16).collect()
}
