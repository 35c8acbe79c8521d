//! The full rank: gather (slot, weight key), sort, break ties by id.

use super::sort::{Entry, sort};
use crate::pool::Pool;
use crate::{Order, Scope, Segment, TILE, Tile, Tiles};
use engram_memory::{MemoryId, ONE};
use std::sync::atomic::{AtomicBool, Ordering};

/// Memories of a gathering task.
const TASK: usize = 1 << 16;

/// What a ranking looks at.
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
    /// The tiles that may hold memories of the scope.
    pub(super) fn tiles_in_scope(&self) -> Vec<usize> {
        let wanted =
            |tile: &Tile| tile.count > 0 && !matches!(self.scope, Scope::Segment(only) if only != tile.segment);
        (0..self.tiles.len()).filter(|&index| wanted(&self.tiles[index])).collect()
    }

    /// Used potentials, groups and ids of a tile, and its clock.
    pub(super) fn columns(&self, tile: usize) -> (&[u32], &[u8], &[MemoryId], u32) {
        let Tile { segment, count } = self.tiles[tile];
        let count = count as usize;
        let clock = self.segments[segment as usize].clock.units();
        let (potentials, groups) = (&self.potentials.tile(tile)[..count], &self.groups.tile(tile)[..count]);
        (potentials, groups, &self.ids.tile(tile)[..count], clock)
    }

    /// How many memories of a tile are in the scope.
    fn count(&self, tile: usize) -> usize {
        match self.scope {
            Scope::Group(group) => self.columns(tile).1.iter().filter(|&&other| other == group.0).count(),
            _ => self.tiles[tile].count as usize,
        }
    }
}

/// All of the scope in `order`.
pub(super) fn all(pool: &mut Pool, view: View<'_>, order: Order, out: &mut Vec<Entry>) {
    let tiles = view.tiles_in_scope();
    let mut counts = vec![0; tiles.len()];
    let tasks = TASK / TILE;
    pool.each(
        tiles.chunks(tasks).zip(counts.chunks_mut(tasks)).collect(),
        |_, (tiles, counts): (&[usize], &mut [usize])| {
            tiles.iter().zip(counts).for_each(|(&tile, count)| *count = view.count(tile));
        },
    );
    // Zeroed memory that the allocator takes from the system is touched, and so paged in, by the threads that fill it.
    let mut gathered: Vec<Entry> = vec![(0, 0); counts.iter().sum()];
    let ascending = AtomicBool::new(true);
    let mut rest = gathered.as_mut_slice();
    let mut parts = Vec::with_capacity(tiles.len().div_ceil(tasks));
    for (tiles, counts) in tiles.chunks(tasks).zip(counts.chunks(tasks)) {
        let (part, others) = rest.split_at_mut(counts.iter().sum());
        rest = others;
        parts.push((tiles, part));
    }
    pool.each(parts, |_, (tiles, part)| gather(view, tiles, part, &ascending));
    // Tasks looked at their own ids only.
    let mut ascending = ascending.into_inner();
    let mut last = None;
    for &tile in &tiles {
        let ids = view.columns(tile).2;
        ascending &= last.is_none_or(|last| last < ids[0]);
        last = ids.last().copied();
    }

    resize(out, gathered.len());
    sort_by_weight(pool, view.ids, &mut gathered, out, ascending);
    if order == Order::LightestFirst {
        out.reverse();
    }
}

/// Makes `out` as long as asked; what it holds then has no meaning.
fn resize(out: &mut Vec<Entry>, length: usize) {
    if out.capacity() < length {
        *out = vec![(0, 0); length];
    } else {
        out.resize(length, (0, 0));
    }
}

/// Fills `part` with the scope's slots of `tiles`, and for each how far its weight is below ONE.
fn gather(view: View<'_>, tiles: &[usize], part: &mut [Entry], ascending: &AtomicBool) {
    let mut places = part.iter_mut();
    let mut in_order = ascending.load(Ordering::Relaxed);
    let mut last = None;
    for &tile in tiles {
        let (potentials, groups, ids, clock) = view.columns(tile);
        let first = (tile * TILE) as u32;
        let key = |potential: u32| ONE - (potential.max(clock) - clock);
        if let Scope::Group(group) = view.scope {
            let memories = potentials.iter().zip(groups).enumerate().filter(|(_, (_, other))| **other == group.0);
            for ((offset, (&potential, _)), place) in memories.zip(&mut places) {
                *place = (first + offset as u32, key(potential));
            }
        } else {
            for ((offset, &potential), place) in potentials.iter().enumerate().zip(&mut places) {
                *place = (first + offset as u32, key(potential));
            }
        }
        in_order = in_order && last.is_none_or(|last| last < ids[0]) && ids.is_sorted();
        last = ids.last().copied();
    }
    if !in_order {
        ascending.store(false, Ordering::Relaxed);
    }
}

/// Sorts entries of key `ONE - weight` from `from` into `to`, in rank order, and turns the keys into weights. `ascending`: they
/// come in the order of their ids.
fn sort_by_weight(pool: &mut Pool, ids: &Tiles<MemoryId>, from: &mut [Entry], to: &mut [Entry], ascending: bool) {
    let tied = sort(pool, from, to, |part| {
        if !ascending {
            part.chunk_by_mut(|a, b| a.1 == b.1).for_each(|run| sort_run(ids, run));
        }
        part.iter_mut().for_each(|entry| entry.1 = ONE - entry.1);
    });
    for range in tied {
        let weight = ONE - to[range.start].1;
        let (from, to) = (&mut from[range.clone()], &mut to[range]);
        if !ascending {
            sort_tied(pool, ids, from, to);
        }
        pool.each(to.chunks_mut(TASK).collect(), |_, part: &mut [Entry]| {
            part.iter_mut().for_each(|entry| entry.1 = weight);
        });
    }
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

/// Sorts a long run of one weight by id, on all threads: by the 32 highest bits in which ids differ, then what is still tied
/// by the next. Keys have no meaning afterwards.
fn sort_tied(pool: &mut Pool, ids: &Tiles<MemoryId>, scratch: &mut [Entry], run: &mut [Entry]) {
    let first = ids.get(run[0].0).0;
    let mut differences: Vec<u64> = vec![0; run.len().div_ceil(TASK)];
    pool.each(run.chunks(TASK).zip(&mut differences).collect(), |_, (part, difference)| {
        *difference = part.iter().fold(0, |all, entry| all | (ids.get(entry.0).0 ^ first));
    });
    let Some(highest) = differences.iter().fold(0, |all, difference| all | difference).checked_ilog2() else {
        return; // Only if ids were not distinct, which the caller promises they are.
    };
    let shift = (highest + 1).saturating_sub(u32::BITS);
    pool.each(run.chunks(TASK).zip(scratch.chunks_mut(TASK)).collect(), |_, (run, keyed)| {
        for (entry, keyed) in run.iter().zip(keyed) {
            *keyed = (entry.0, (ids.get(entry.0).0 >> shift) as u32);
        }
    });
    let tied = sort(pool, scratch, run, |part| {
        if shift > 0 {
            part.chunk_by_mut(|a, b| a.1 == b.1).for_each(|run| sort_run(ids, run));
        }
    });
    for range in tied {
        sort_tied(pool, ids, &mut scratch[range.clone()], &mut run[range]);
    }
}
