//! Recall: the first matches by score, in one read of the features.

use super::dot::dots;
use super::rank::View;
use super::top::{BoundedHeap, Candidate};
use crate::TILE;
use crate::instructions::Level;
use crate::pool::Pool;
use crate::recall::{FeatureColumn, Query, RecallMatch, RecallRequest, key, score_of};
use engram_memory::{Group, MemoryId};
use parking_lot::Mutex;

/// Memories scored together: their scores stay in the L1 cache.
const CHUNK: usize = 64;

/// Finds the first matches of the scope by score; `view` has the same scope.
pub(super) fn first(
    pool: &mut Pool,
    level: Level,
    view: View<'_>,
    request: &RecallRequest<'_>,
    out: &mut Vec<RecallMatch>,
) {
    out.clear();
    if request.limit == 0 {
        return;
    }
    assert_eq!(request.query.dimension(), request.features.dimension, "query and features have the same dimension");
    let best: Vec<_> = (0..pool.threads()).map(|_| Mutex::new(BoundedHeap::new(request.limit))).collect();
    pool.for_each(view.tiles_in_scope(), |thread, tile: usize| {
        scan(level, view, request, tile, &mut best[thread].lock());
    });
    let first = BoundedHeap::of_all(request.limit, best.into_iter().map(|best| best.into_inner()));
    out.extend(first.into_iter().map(|Candidate { key, slot, .. }| {
        let (tile, offset) = (slot as usize / TILE, slot as usize % TILE);
        let (potentials, _, _, clock) = view.columns(tile);
        RecallMatch { slot, weight: weight(potentials[offset], clock), score: score_of(key) }
    }));
}

fn scan(level: Level, view: View<'_>, request: &RecallRequest<'_>, tile: usize, best: &mut BoundedHeap) {
    let (potentials, groups, ids, clock) = view.columns(tile);
    let FeatureColumn { dimension, bits, inverse_norms, .. } = request.features;
    let group = request.scope.group();
    let width = dimension * size_of::<u16>();
    let mut scores = [0_f32; CHUNK];
    for start in (0..potentials.len()).step_by(CHUNK) {
        let range = start..(start + CHUNK).min(potentials.len());
        let (groups, ids) = (&groups[range.clone()], &ids[range.clone()]);
        if group.is_some_and(|group| !groups.contains(&group.0)) {
            continue;
        }
        let scores = &mut scores[..range.len()];
        let rows = &bits[tile][range.start * width..range.end * width];
        let norms = &inverse_norms.tile(tile)[range.clone()];
        score_rows(level, request.query, rows, norms, &potentials[range.clone()], clock, scores);
        hold(best, scores, groups, ids, group, (tile * TILE + start) as u32);
    }
}

fn hold(best: &mut BoundedHeap, scores: &[f32], groups: &[u8], ids: &[MemoryId], group: Option<Group>, first: u32) {
    for (slot, ((&score, &other), id)) in (first..).zip(scores.iter().zip(groups).zip(ids)) {
        if group.is_none_or(|group| group.0 == other) {
            best.hold(Candidate { key: key(score), tie: id.0, slot });
        }
    }
}

#[inline(always)]
fn weight(potential: u32, clock: u32) -> u32 {
    potential.max(clock) - clock
}

/// Computes the scores of consecutive memories.
fn score_rows(
    level: Level,
    query: &Query,
    rows: &[u8],
    norms: &[f32],
    potentials: &[u32],
    clock: u32,
    scores: &mut [f32],
) {
    dots(level, &query.features, rows, scores);
    for (score, (&norm, &potential)) in scores.iter_mut().zip(norms.iter().zip(potentials)) {
        *score = query.score_from_dot(*score, norm, weight(potential, clock));
    }
}
