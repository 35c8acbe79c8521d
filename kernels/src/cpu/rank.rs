//! Full ranking: a stable sort by weight, then ties by id.
//!
//! Where ids ascend with the slots, the stable sort already orders ties. Elsewhere runs of one weight are sorted by id: few and short where
//! weights differ, the whole input where they are equal.
#![allow(unsafe_code)] // Implementations of the unsafe trait `Block`.

use super::sort::{Block, Entry, block_length, sort};
use crate::pool::Pool;
use crate::{Order, Scope, Segment, Slot, TILE, Tile, Tiles};
use engram_memory::{MemoryId, ONE};
use std::ops::Range;

/// Input of a ranking.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) tiles: &'a [Tile],
    pub(super) segments: &'a [Segment],
    pub(super) potentials: &'a Tiles<u32>,
    pub(super) groups: &'a Tiles<u8>,
    pub(super) ids: &'a Tiles<MemoryId>,
    pub(super) scope: Scope,
}

impl View<'_> {
    /// Returns the tiles that may hold memories of the scope.
    pub(super) fn tiles_in_scope(&self) -> Vec<usize> {
        let in_scope = |tile: &Tile| {
            let in_scope = match self.scope {
                Scope::Segment(only) => only == tile.segment,
                Scope::All | Scope::Group(_) => !self.segments[tile.segment as usize].hidden,
            };
            tile.count > 0 && in_scope
        };
        (0..self.tiles.len()).filter(|&index| in_scope(&self.tiles[index])).collect()
    }

    /// Returns an upper bound of the memories in scope: those of all groups.
    pub(super) fn at_most(&self) -> usize {
        self.tiles_in_scope().into_iter().map(|tile| self.tiles[tile].count as usize).sum()
    }

    /// Returns used potentials, groups and ids of a tile, and its clock.
    pub(super) fn columns(&self, tile: usize) -> (&[u32], &[u8], &[MemoryId], u32) {
        let Tile { segment, count } = self.tiles[tile];
        let count = count as usize;
        let clock = self.segments[segment as usize].clock.units();
        let (potentials, groups) = (&self.potentials.tile(tile)[..count], &self.groups.tile(tile)[..count]);
        (potentials, groups, &self.ids.tile(tile)[..count], clock)
    }

    /// Counts the memories of a tile that are in scope.
    fn count(&self, tile: usize) -> usize {
        match self.scope {
            Scope::Group(group) => self.columns(tile).1.iter().filter(|&&other| other == group.0).count(),
            _ => self.tiles[tile].count as usize,
        }
    }
}

/// Ranks the whole scope in `order`.
pub(super) fn all(pool: &mut Pool, view: View<'_>, order: Order, out: &mut Vec<Entry>) {
    let tiles = view.tiles_in_scope();
    let mut blocks: Vec<_> = tiles
        .chunks(block_length(pool, tiles.len() * TILE) / TILE)
        .map(|tiles| TileEntries { view, tiles, length: 0, ascending: false })
        .collect();
    pool.for_each(blocks.iter_mut().collect(), |_, block| block.count_and_check_order());
    let ascending = blocks.iter().all(|block| block.ascending)
        && blocks.windows(2).all(|pair| pair[0].last_id() < pair[1].first_id());
    resize(out, blocks.iter().map(|block| block.length).sum());

    let tied = sort(pool, &blocks, out, |part| {
        if !ascending {
            sort_runs(view.ids, part);
        }
        part.iter_mut().for_each(|entry| entry.1 = ONE - entry.1);
    });
    for range in tied {
        let run = &mut out[range];
        let (weight, length) = (ONE - run[0].1, run.len());
        if !ascending {
            sort_tied(pool, view.ids, run);
        }
        pool.for_each(run.chunks_mut(block_length(pool, length)).collect(), |_, part: &mut [Entry]| {
            part.iter_mut().for_each(|entry| entry.1 = weight);
        });
    }
    if order == Order::LightestFirst {
        out.reverse();
    }
}

/// Resizes `out`; its content is unspecified afterwards.
fn resize(out: &mut Vec<Entry>, length: usize) {
    if out.capacity() < length {
        // Zeroed memory from the system is paged in by the threads that fill it.
        *out = vec![(0, 0); length];
    } else {
        out.resize(length, (0, 0));
    }
}

/// Memories in scope of some tiles; the key is the distance of the weight from ONE.
struct TileEntries<'a> {
    view: View<'a>,
    tiles: &'a [usize],
    length: usize,
    /// Whether ids ascend over all tiles.
    ascending: bool,
}

impl TileEntries<'_> {
    /// Counts the memories and checks the order of their ids.
    fn count_and_check_order(&mut self) {
        let ids = |tile: usize| self.view.columns(tile).2;
        self.ascending = self.tiles.iter().all(|&tile| ids(tile).is_sorted())
            && self.tiles.windows(2).all(|pair| ids(pair[0]).last() < ids(pair[1]).first());
        self.length = self.tiles.iter().map(|&tile| self.view.count(tile)).sum();
    }

    fn first_id(&self) -> Option<&MemoryId> {
        self.tiles.first().and_then(|&tile| self.view.columns(tile).2.first())
    }

    fn last_id(&self) -> Option<&MemoryId> {
        self.tiles.last().and_then(|&tile| self.view.columns(tile).2.last())
    }
}

// SAFETY: all data is borrowed and not modified.
unsafe impl Block for TileEntries<'_> {
    fn len(&self) -> usize {
        self.length
    }

    #[inline(always)]
    fn each(&self, mut f: impl FnMut(Entry)) {
        for &tile in self.tiles {
            let (potentials, groups, _, clock) = self.view.columns(tile);
            let slots = (tile * TILE) as u32..;
            let key = |potential: u32| ONE - (potential.max(clock) - clock);
            if let Scope::Group(group) = self.view.scope {
                for ((slot, &potential), &other) in slots.zip(potentials).zip(groups) {
                    if other == group.0 {
                        f((slot, key(potential)));
                    }
                }
            } else {
                for (slot, &potential) in slots.zip(potentials) {
                    f((slot, key(potential)));
                }
            }
        }
    }
}

/// Prefetch distance in runs for the ids of a run: the processor handles a few dozen outstanding loads.
const AHEAD: usize = 16;

/// Sorts every run of equal keys by id, on one thread.
fn sort_runs(ids: &Tiles<MemoryId>, part: &mut [Entry]) {
    let runs = runs(part);
    // Most runs are short and their ids are scattered: without prefetching, the loads dominate.
    let ask = |run: &Range<usize>, part: &[Entry]| {
        part[run.clone()].iter().take(AHEAD).for_each(|entry| ids.prefetch(entry.0));
    };
    runs.iter().take(AHEAD).for_each(|run| ask(run, part));
    for (index, run) in runs.iter().enumerate() {
        if let Some(run) = runs.get(index + AHEAD) {
            ask(run, part);
        }
        sort_run(ids, &mut part[run.clone()]);
    }
}

/// Returns the ranges of equal keys.
fn runs(part: &[Entry]) -> Vec<Range<usize>> {
    let mut runs = Vec::new();
    let mut at = 0;
    while let Some(offset) = part[at..].windows(2).position(|pair| pair[0].1 == pair[1].1) {
        let start = at + offset;
        let length = part[start..].iter().take_while(|entry| entry.1 == part[start].1).count();
        at = start + length;
        runs.push(start..at);
    }
    runs
}

/// Sorts a run of one weight by id, on one thread.
fn sort_run(ids: &Tiles<MemoryId>, run: &mut [Entry]) {
    match run.len() {
        0 | 1 => {}
        2..=16 => run.sort_unstable_by_key(|entry| ids.get(entry.0)),
        _ => {
            let mut by_id: Vec<_> = run.iter().map(|entry| (ids.get(entry.0), entry.0)).collect();
            by_id.sort_unstable();
            run.iter_mut().zip(by_id).for_each(|(entry, (_, slot))| entry.0 = slot);
        }
    }
}

/// Sorts a long run of one weight by id, on all threads: by the 32 highest bits in which ids differ, then remaining ties by the next bits.
/// Keys are unspecified afterwards.
fn sort_tied(pool: &mut Pool, ids: &Tiles<MemoryId>, run: &mut [Entry]) {
    let length = block_length(pool, run.len());
    let first = ids.get(run[0].0).0;
    let mut slots: Vec<Slot> = vec![0; run.len()];
    let mut differences: Vec<u64> = vec![0; run.len().div_ceil(length)];
    let blocks = run.chunks(length).zip(slots.chunks_mut(length)).zip(&mut differences).collect();
    pool.for_each(blocks, |_, ((run, slots), difference)| {
        for (entry, slot) in run.iter().zip(slots) {
            *slot = entry.0;
            *difference |= ids.get(entry.0).0 ^ first;
        }
    });
    let Some(highest) = differences.iter().fold(0, |all, difference| all | difference).checked_ilog2() else {
        return; // Unreachable: the caller guarantees distinct ids.
    };
    let shift = (highest + 1).saturating_sub(u32::BITS);
    let blocks: Vec<_> = slots.chunks(length).map(|slots| SlotsById { ids, slots, shift }).collect();
    let tied = sort(pool, &blocks, run, |part| {
        if shift > 0 {
            sort_runs(ids, part);
        }
    });
    for range in tied {
        sort_tied(pool, ids, &mut run[range]);
    }
}

/// Slots with 32 bits of their id as key.
struct SlotsById<'a> {
    ids: &'a Tiles<MemoryId>,
    slots: &'a [Slot],
    shift: u32,
}

// SAFETY: all data is borrowed and not modified.
unsafe impl Block for SlotsById<'_> {
    fn len(&self) -> usize {
        self.slots.len()
    }

    #[inline(always)]
    fn each(&self, mut f: impl FnMut(Entry)) {
        for &slot in self.slots {
            f((slot, (self.ids.get(slot).0 >> self.shift) as u32));
        }
    }
}
