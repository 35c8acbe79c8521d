//! Rankings, and the files for CUB's equivalent sort.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use engram_kernels::gpu::cuda::Cuda;
use engram_kernels::{Device, Gpu, Order, RankRequest, Scope};
use engram_memory::ONE;

use super::{Clock, TimingFilter};
use crate::parts::arena::Arena;
use crate::peers::{KEYS, ORDER, SLOTS};
use crate::report::Row;

/// Limit of the top-k ranking.
const TOP: usize = 1_000;
/// Bytes of a sort by 31 bits: a histogram reads the keys; four passes read and write keys and slots.
const SORT_BYTES: u64 = 4 + 4 * 16;

/// Measures rankings. `scratch` receives a peer's input and the expected output.
pub(super) fn rows(
    clock: Clock,
    mut gpu: Gpu<Cuda>,
    memories: u32,
    scratch: Option<&Path>,
) -> Result<(Vec<Row>, Gpu<Cuda>)> {
    let arena = Arena::new(memories);
    arena.fill(&mut gpu)?;
    let Arena { segments, ids, .. } = &arena;
    let full = RankRequest { segments, ids, scope: Scope::All, order: Order::HeaviestFirst, limit: None };
    let (all, mut out) = (u64::from(memories), Vec::new());
    let mut row = |gpu: &mut Gpu<Cuda>, names, bytes, counted, limit| {
        clock.row(gpu, names, all, bytes, counted, |gpu| gpu.rank(&RankRequest { limit, ..full }, &mut out))
    };
    let sort = TimingFilter::Span("radix_histogram", "radix_pass");
    let rows = vec![
        row(&mut gpu, ("full rank: the sort alone", "sort"), SORT_BYTES * all, sort, None)?,
        row(&mut gpu, ("full rank, ties by id", "rank"), 0, TimingFilter::Kernels, None)?,
        row(&mut gpu, ("top 1,000, ties by id", "top"), 0, TimingFilter::Kernels, Some(TOP.min(memories as usize)))?,
    ];
    if let Some(scratch) = scratch {
        gpu.rank(&full, &mut out)?;
        ensure!(out.len() == memories as usize, "ranking returned {} of {memories} memories", out.len());
        let mut by_id: Vec<u32> = (0..memories).collect();
        by_id.sort_unstable_by_key(|&slot| ids.get(slot));
        let mut keys = Vec::with_capacity(by_id.len());
        for (_, entry, potentials, _) in arena.tiles() {
            let clock = segments[entry.segment as usize].clock;
            keys.extend(potentials.into_iter().map(|potential| ONE - clock.weight(potential).units()));
        }
        let keys: Vec<u32> = by_id.iter().map(|&slot| keys[slot as usize]).collect();
        let order: Vec<u32> = out.iter().map(|entry| entry.0).collect();
        for (name, values) in [(KEYS, keys), (SLOTS, by_id), (ORDER, order)] {
            let bytes: Vec<u8> = values.into_iter().flat_map(u32::to_le_bytes).collect();
            std::fs::write(scratch.join(name), bytes).with_context(|| format!("failed to write {name}"))?;
        }
    }
    Ok((rows, Gpu::new(gpu.into_driver(), "gpu".to_owned())))
}
