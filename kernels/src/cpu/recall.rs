//! Recall: the first few by score, in one read of the features.

use super::dot::dots;
use super::rank::View;
use super::top::{Best, Candidate};
use crate::TILE;
use crate::instructions::Level;
use crate::pool::Pool;
use crate::recall::{Alike, FeatureColumn, Query, Recall, key, score_of};
use engram_memory::{Group, MemoryId};
use std::sync::Mutex;

/// Memories that are scored together: their scores stay in the nearest cache.
const CHUNK: usize = 64;

/// The first of the scope by score; `view` has the same scope.
pub(super) fn first(pool: &mut Pool, level: Level, view: View<'_>, asked: &Recall<'_>, out: &mut Vec<Alike>) {
    out.clear();
    if asked.limit == 0 {
        return;
    }
    assert_eq!(asked.query.dimension(), asked.features.dimension, "a query has the dimension of the features");
    let best: Vec<_> = (0..pool.threads()).map(|_| Mutex::new(Best::new(asked.limit))).collect();
    pool.each(view.tiles_in_scope(), |thread, tile: usize| {
        scan(level, view, asked, tile, &mut best[thread].lock().expect("a panic ends the pass"));
    });
    let first =
        Best::of_all(asked.limit, best.into_iter().map(|best| best.into_inner().expect("a panic ends the pass")));
    out.extend(first.into_iter().map(|Candidate { key, slot, .. }| {
        let (tile, offset) = (slot as usize / TILE, slot as usize % TILE);
        let (potentials, _, _, clock) = view.columns(tile);
        Alike { slot, weight: weight(potentials[offset], clock), score: score_of(key) }
    }));
}

fn scan(level: Level, view: View<'_>, asked: &Recall<'_>, tile: usize, best: &mut Best) {
    let (potentials, groups, ids, clock) = view.columns(tile);
    let FeatureColumn { dimension, bits, inverse_norms, .. } = asked.features;
    let group = asked.scope.group();
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
        score_rows(level, asked.query, rows, norms, &potentials[range.clone()], clock, scores);
        hold(best, scores, groups, ids, group, (tile * TILE + start) as u32);
    }
}

fn hold(best: &mut Best, scores: &[f32], groups: &[u8], ids: &[MemoryId], group: Option<Group>, first: u32) {
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

/// Scores consecutive memories.
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
        *score = query.scored(*score, norm, weight(potential, clock));
    }
}
