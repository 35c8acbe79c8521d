//! The first entries of a ranking: one read of the potentials.
//!
//! Each thread keeps its best candidates and uses the worst of them as a bound; chunks of 64 memories that cannot pass the bound are skipped.
//! An id is read only if the weight ties with the bound and ids of its span may precede the bound's. If there are many tiles, a sample of them
//! is scanned first, so that the bound is already close when the rest is read: otherwise ten times as many candidates would pass.

use super::rank::View;
use super::spans::{IdSpan, IdSpans, SPAN, TileSpans};
use crate::instructions::{Level, dispatch};
use crate::pool::Pool;
use crate::tiles::prefetch_behind;
use crate::{Order, Slot, TILE};
use engram_memory::{Group, MemoryId, ONE};
use parking_lot::Mutex;

/// Sampling interval: one of this many tiles is scanned first.
const SAMPLED: usize = 32;

/// Tiles in a task.
const TASK: usize = 16;

/// A memory in ascending order, whichever order was requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Candidate {
    /// Heaviest first: `ONE - weight`; lightest first: the weight.
    pub(super) key: u32,
    /// Heaviest first: the id; lightest first: its complement.
    pub(super) tie: u64,
    pub(super) slot: Slot,
}

/// The best candidates of one thread.
pub(super) struct BoundedHeap {
    limit: usize,
    held: Vec<Candidate>,
    /// No candidate at or after this one is among the first `limit`.
    bound: Candidate,
}

impl BoundedHeap {
    pub(super) fn new(limit: usize) -> Self {
        Self::before(limit, Candidate { key: u32::MAX, tie: u64::MAX, slot: Slot::MAX })
    }

    /// Considers only candidates before `bound`.
    fn before(limit: usize, bound: Candidate) -> Self {
        Self { limit, held: Vec::new(), bound }
    }

    /// Keeps a candidate that may be among the first.
    pub(super) fn hold(&mut self, candidate: Candidate) {
        if candidate >= self.bound {
            return;
        }
        self.held.push(candidate);
        // Twice the limit, so that the linear selection is amortized over as many candidates as it keeps.
        if self.held.len() >= (2 * self.limit).max(self.limit + 512) {
            self.prune();
        }
    }

    /// Returns the first candidates of all threads, in order.
    pub(super) fn of_all(limit: usize, best: impl Iterator<Item = Self>) -> Vec<Candidate> {
        let mut all = Self::new(limit);
        all.held = best.flat_map(|best| best.held).collect();
        all.prune();
        all.held.sort_unstable();
        all.held
    }

    fn prune(&mut self) {
        if self.held.len() > self.limit {
            self.bound = *self.held.select_nth_unstable(self.limit - 1).1;
            self.held.truncate(self.limit);
        }
    }
}

/// Finds the first `limit` (at least 1) of the scope in `order`.
pub(super) fn first(
    pool: &mut Pool,
    level: Level,
    view: View<'_>,
    spans: &mut IdSpans,
    order: Order,
    limit: usize,
    out: &mut Vec<(Slot, u32)>,
) {
    let tiles = view.tiles_in_scope();
    let mut pass = |tiles: &[usize], limit, bound: Option<Candidate>| {
        let new = || bound.map_or_else(|| BoundedHeap::new(limit), |bound| BoundedHeap::before(limit, bound));
        let best: Vec<_> = (0..pool.threads()).map(|_| Mutex::new(new())).collect();
        pool.for_each(
            spans.of_tiles(tiles).chunks_mut(TASK).collect(),
            |thread, tiles: &mut [(usize, &mut TileSpans)]| {
                let mut best = best[thread].lock();
                tiles.iter_mut().for_each(|(tile, spans)| scan(level, view, order, *tile, &mut spans[..], &mut best));
            },
        );
        BoundedHeap::of_all(limit, best.into_iter().map(|best| best.into_inner()))
    };
    let bound = sample(&tiles, limit).and_then(|(some, limit)| {
        let last = *pass(&some, limit, None).get(limit - 1)?;
        Some(Candidate { tie: last.tie.checked_add(1)?, ..last })
    });
    let mut all = pass(&tiles, limit, bound);
    // The sample was not representative: scan everything once more.
    if bound.is_some() && all.len() < limit {
        all = pass(&tiles, limit, None);
    }
    let weight = |key| if order == Order::HeaviestFirst { ONE - key } else { key };
    out.clear();
    out.extend(all.iter().map(|candidate| (candidate.slot, weight(candidate.key))));
}

/// Returns a sample of many tiles, and a rank in it that almost certainly comes after the first `limit` of all tiles: the expected share plus
/// four standard deviations. A sample of fewer than eight tiles would be a guess.
fn sample(tiles: &[usize], limit: usize) -> Option<(Vec<usize>, usize)> {
    if tiles.len() < 8 * SAMPLED {
        return None;
    }
    let share = limit.div_ceil(SAMPLED);
    Some((tiles.iter().copied().step_by(SAMPLED).collect(), share + 4 * share.isqrt() + 4))
}

/// Filter for memories of a tile that can pass a bound.
#[derive(Clone, Copy)]
struct Filter {
    clock: u32,
    order: Order,
    group: Option<Group>,
    bound: Candidate,
}

fn scan(level: Level, view: View<'_>, order: Order, tile: usize, spans: &mut [IdSpan], best: &mut BoundedHeap) {
    let (potentials, groups, ids, clock) = view.columns(tile);
    let group = view.scope.group();
    let mut at = 0;
    loop {
        let filter = Filter { clock, order, group, bound: best.bound };
        at = next_chunk(level, potentials, groups, ids, spans, at, filter);
        if at >= potentials.len() {
            return;
        }
        let end = (at + CHUNK).min(potentials.len());
        let (least, most) = range(order, clock, best.bound.key);
        for offset in (at..end).filter(|&offset| (least..=most).contains(&potentials[offset])) {
            if group.is_none_or(|group| group.0 == groups[offset]) {
                let (key, tie) = keys(order, clock, potentials[offset], ids[offset]);
                best.hold(Candidate { key, tie, slot: (tile * TILE + offset) as u32 });
            }
        }
        at = end;
    }
}

#[inline(always)]
fn keys(order: Order, clock: u32, potential: u32, id: MemoryId) -> (u32, u64) {
    let weight = potential.max(clock) - clock;
    if order == Order::HeaviestFirst { (ONE - weight, id.0) } else { (weight, !id.0) }
}

/// Returns the range of potentials whose key can be at or before `last`, so that one comparison decides most memories.
#[inline(always)]
fn range(order: Order, clock: u32, last: u32) -> (u32, u32) {
    match order {
        Order::HeaviestFirst if last >= ONE => (0, u32::MAX),
        Order::HeaviestFirst => (clock + (ONE - last), u32::MAX),
        Order::LightestFirst => (0, clock.saturating_add(last)),
    }
}

/// Memories skipped together; all in one span.
const CHUNK: usize = 64;
/// Potentials of a cache line.
const LINE: usize = 16;
/// Prefetch distance in potentials: the hardware prefetcher does not cross a page, and scanning 2 KiB takes about as long as a memory access.
const AHEAD: usize = 512;

dispatch! {
    /// Returns the start of the next chunk from `at` on with a candidate before the bound, or the length if there is none. Fills the spans of the
    /// ids that it reads.
    fn next_chunk(
        potentials: &[u32],
        groups: &[u8],
        ids: &[MemoryId],
        spans: &mut [IdSpan],
        at: usize,
        filter: Filter,
    ) -> usize {
        let Filter { clock, order, group, bound } = filter;
        let with_ties = range(order, clock, bound.key);
        // No key is below 0: an empty range.
        let without = bound.key.checked_sub(1).map_or((1, 0), |last| range(order, clock, last));
        let mut start = at;
        while start < potentials.len() {
            let end = (start + CHUNK).min(potentials.len());
            let chunk = &potentials[start..end];
            let span = &mut spans[start / SPAN];
            let reach = if span.first_tie(order) < bound.tie { with_ties } else { without };
            chunk.iter().step_by(LINE).for_each(|potential| prefetch_behind(potential, AHEAD));
            let within = |(least, most): (u32, u32), potential| (potential >= least) & (potential <= most);
            let may = chunk.iter().fold(false, |any, &potential| any | within(reach, potential));
            if may {
                let (groups, tied) = (&groups[start..end], &ids[start..end]);
                let in_group = |other| match group { Some(group) => group.0 == other, None => true };
                let before = |any, (&potential, &other)| any | (within(without, potential) & in_group(other));
                if chunk.iter().zip(groups).fold(false, before) {
                    return start;
                }
                // Only ties are left, which the ids decide.
                if *span == IdSpan::UNKNOWN {
                    let first = start / SPAN * SPAN;
                    *span = IdSpan::of(&ids[first..(first + SPAN).min(ids.len())]);
                }
                let mut any = false;
                for ((&potential, &other), &id) in chunk.iter().zip(groups).zip(tied) {
                    let (key, tie) = keys(order, clock, potential, id);
                    any |= in_group(other) & (key == bound.key) & (tie < bound.tie);
                }
                if any {
                    return start;
                }
            }
            start = end;
        }
        potentials.len()
    }
}
