//! CPU implementation of [`Device`].
//!
//! A pass splits the tiles into tasks of consecutive tiles, which the threads of a [`Pool`] execute; within a tile it is a plain loop, compiled
//! for several sets of vector instructions. Threads accumulate integers, so results depend neither on the split nor on the number of threads.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod dot;
mod quality;
mod rank;
mod recall;
mod scatter;
mod sort;
mod spans;
mod top;
mod update;

use crate::instructions::{Instructions, Level};
use crate::pool::Pool;
use crate::recall::{RecallMatch, RecallRequest};
use crate::tiles::TilesMut;
use crate::{
    Device, DigestRequest, Error, GroupUpdate, Info, RankRequest, Segment, Slot, TILE, Tile, TileId, Tiles, Update,
};
use engram_memory::{Digest, Group, Histogram, QualityVector};
use parking_lot::{Mutex, MutexGuard};
use quality::{TileGroups, Total};
use spans::IdSpans;
use std::borrow::Cow;

/// Maximum number of tiles in an arena: a slot has 32 bits.
const MAX_TILES: u32 = Slot::MAX / TILE as u32 + 1;
/// A potential and a group.
const BYTES_PER_SLOT: u64 = 5;
/// Tiles in one task of a pass: about 10 us of work.
const TASK: usize = 8;
/// Fewer updates than this are applied by one thread: distributing them costs as much as applying them.
const MANY_UPDATES: usize = 1_024;

/// The CPU as a device, with its own threads and the widest vector instructions of the processor.
///
/// ```
/// use engram_kernels::{Cpu, Device, Segment, Tile, Update};
/// use engram_memory::{DecayClock, Group, ONE};
///
/// // Two memories of weight one half in one partition, whose clock stands at 7.
/// let mut device = Cpu::new(2);
/// device.reserve(1)?;
/// device.map_tile(0, Tile { segment: 0, count: 2 });
/// let mut clock = DecayClock::from_units(7).expect("far below the fold");
/// device.write(&[(0, 7 + ONE / 2, Group(0)), (1, 7 + ONE / 2, Group(1))])?;
///
/// // An epoch: the clock moves, one memory is reinforced.
/// clock.advance(100);
/// let mut quality = Vec::new();
/// device.epoch(&[Segment { clock, ..Segment::default() }], &[Update { slot: 1, delta: 300 }], &mut quality)?;
/// assert_eq!(quality[0].group(Group(0)).max, ONE / 2 - 100);
/// assert_eq!(quality[0].group(Group(1)).max, ONE / 2 + 200);
/// # Ok::<(), engram_kernels::Error>(())
/// ```
pub struct Cpu {
    info: Info,
    level: Level,
    pool: Pool,
    tiles: Vec<Tile>,
    potentials: Tiles<u32>,
    groups: Tiles<u8>,
    /// No memory has a higher group; determines the width of tables by group. Never decreases.
    highest_group: u8,
    /// Cached id ranges for selections.
    spans: IdSpans,
    /// Per-thread update buffers, kept because paging in new ones costs more than the updates.
    own_updates: Vec<Vec<Update>>,
}

impl Cpu {
    /// Creates a device without tiles whose passes use `threads` threads (1 to 1,024, the caller's included).
    pub fn new(threads: usize) -> Self {
        Self::with(threads, Instructions::Widest)
    }

    /// Like [`Cpu::new`], limited to `instructions`.
    pub fn with(threads: usize, instructions: Instructions) -> Self {
        let pool = Pool::new(threads);
        let threads = pool.threads();
        let level = Level::of(instructions);
        let name = format!("{} ({level})", processor());
        Self {
            info: Info { kind: "cpu", name, threads },
            level,
            pool,
            tiles: Vec::new(),
            potentials: Tiles::new(),
            groups: Tiles::new(),
            highest_group: 0,
            spans: IdSpans::default(),
            own_updates: vec![Vec::new(); threads],
        }
    }

    /// Runs a pass with `tiles` as the tile table, for example with some tiles marked free to exclude them.
    pub(crate) fn over<T>(&mut self, mut tiles: Vec<Tile>, pass: impl FnOnce(&mut Self) -> T) -> T {
        assert_eq!(tiles.len(), self.tiles.len(), "the tile table has an entry for each tile");
        std::mem::swap(&mut self.tiles, &mut tiles);
        let result = pass(self);
        self.tiles = tiles;
        result
    }

    /// Marks ids of `tile` as possibly changed without a write to this device.
    pub(crate) fn touch(&mut self, tile: TileId) {
        self.spans.forget_tile(tile as usize);
    }

    /// Replaces potentials and groups from the first slot of `tile` on; the ids stay the same.
    pub(crate) fn replace(&mut self, tile: TileId, potentials: &[u32], groups: &[u8]) {
        let pieces = potentials.chunks(TILE).zip(groups.chunks(TILE));
        for (tile, (potentials, groups)) in (tile as usize..).zip(pieces) {
            self.potentials.tile_mut(tile)[..potentials.len()].copy_from_slice(potentials);
            self.groups.tile_mut(tile)[..groups.len()].copy_from_slice(groups);
        }
        self.highest_group = groups.iter().copied().fold(self.highest_group, u8::max);
    }

    /// Returns potential and group at a slot.
    pub(crate) fn row(&self, slot: Slot) -> (u32, Group) {
        (self.potentials.get(slot), Group(self.groups.get(slot)))
    }

    /// Returns the used potentials and groups of a tile.
    pub(crate) fn columns(&self, tile: TileId) -> (&[u32], &[u8]) {
        let (tile, used) = (tile as usize, ..self.tiles[tile as usize].count as usize);
        (&self.potentials.tile(tile)[used], &self.groups.tile(tile)[used])
    }

    /// Calls `f(thread, first tile, tiles, their potentials)` for all tiles, one task at a time.
    fn each_task<'a>(
        pool: &mut Pool,
        tiles: &'a [Tile],
        potentials: &'a mut Tiles<u32>,
        f: impl Fn(usize, usize, &'a [Tile], TilesMut<'a, u32>) + Sync,
    ) {
        let tasks = tiles.chunks(TASK).zip(potentials.parts_mut(TASK)).enumerate().collect();
        pool.for_each(tasks, |thread, (task, (tiles, potentials))| f(thread, task * TASK, tiles, potentials));
    }

    /// Folds the segments that need it and returns them with `fold` set to 0.
    fn fold<'a>(&mut self, segments: &'a [Segment]) -> Cow<'a, [Segment]> {
        if segments.iter().all(|segment| segment.fold == 0) {
            return Cow::Borrowed(segments);
        }
        let level = self.level;
        Self::each_task(&mut self.pool, &self.tiles, &mut self.potentials, |_, _, tiles, mut potentials| {
            for (index, tile) in tiles.iter().enumerate().filter(|(_, tile)| tile.count > 0) {
                let fold = segments[tile.segment as usize].fold;
                if fold > 0 {
                    update::fold_tile(level, &mut potentials.tile_mut(index)[..tile.count as usize], fold);
                }
            }
        });
        segments.iter().map(|segment| Segment { fold: 0, ..*segment }).collect()
    }

    /// Applies updates by slot, before or after the fold (see [`update::apply`]).
    fn apply(&mut self, segments: &[Segment], updates: &[Update]) {
        let (tiles, level) = (&self.tiles[..], self.level);
        let threads = self.pool.threads();
        if threads == 1 || updates.len() < MANY_UPDATES {
            let all = self.potentials.parts_mut(tiles.len().max(1)).next();
            return all.into_iter().for_each(|mut all| update::apply(tiles, segments, 0, &mut all, updates));
        }
        // Each thread applies, in order, the updates of the tiles that it reads next.
        let share = tiles.len().div_ceil(threads).max(1);
        let parts = self.potentials.parts_mut(share).zip(&mut self.own_updates).enumerate().collect();
        self.pool.for_each(parts, |_, (part, (mut potentials, own))| {
            let first = part * share;
            let slots = (first * TILE) as u64..((first + share) * TILE) as u64;
            let own = update::select(level, updates, slots, own);
            update::apply(tiles, segments, first, &mut potentials, own);
        });
    }

    /// Returns one table of `length` per thread.
    fn tables<T: Clone>(&self, length: usize, empty: T) -> Vec<Mutex<Vec<T>>> {
        (0..self.pool.threads()).map(|_| Mutex::new(vec![empty.clone(); length])).collect()
    }
}

/// Locks the table of a thread.
fn table<T>(tables: &[Mutex<T>], thread: usize) -> MutexGuard<'_, T> {
    tables[thread].lock()
}

/// Returns the processor's model name, if the system reports it.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

impl Device for Cpu {
    fn info(&self) -> &Info {
        &self.info
    }

    fn reserve(&mut self, tiles: u32) -> Result<(), Error> {
        if tiles > MAX_TILES {
            return Err(Error::Full { missing_bytes: u64::from(tiles - MAX_TILES) * TILE as u64 * BYTES_PER_SLOT });
        }
        self.potentials.reserve(tiles as usize);
        self.groups.reserve(tiles as usize);
        self.tiles.resize(self.potentials.len(), Tile::default());
        Ok(())
    }

    fn map_tile(&mut self, tile: TileId, entry: Tile) {
        assert!(entry.count as usize <= TILE, "tile entry has {} used slots, at most {TILE} are allowed", entry.count);
        self.tiles[tile as usize] = entry;
        self.touch(tile);
    }

    fn write(&mut self, rows: &[(Slot, u32, Group)]) -> Result<(), Error> {
        for &(slot, potential, group) in rows {
            self.potentials.set(slot, potential);
            self.groups.set(slot, group.0);
            self.spans.forget(slot);
            self.highest_group = self.highest_group.max(group.0);
        }
        Ok(())
    }

    fn read(&mut self, slots: &[Slot], out: &mut Vec<(u32, Group)>) -> Result<(), Error> {
        out.clear();
        out.extend(slots.iter().map(|&slot| self.row(slot)));
        Ok(())
    }

    fn update(&mut self, segments: &[Segment], updates: &[Update]) -> Result<(), Error> {
        let segments = self.fold(segments);
        self.apply(&segments, updates);
        Ok(())
    }

    fn update_groups(
        &mut self,
        segments: &[Segment],
        updates: &[GroupUpdate],
        changed: &mut Vec<u64>,
    ) -> Result<(), Error> {
        let level = self.level;
        // Grouped by segment, in order, so that a tile finds its updates.
        let mut by_segment: Vec<usize> = (0..updates.len()).collect();
        by_segment.sort_by_key(|&update| updates[update].segment);
        let counts = self.tables(updates.len(), 0_u64);
        let groups = &self.groups;
        Self::each_task(&mut self.pool, &self.tiles, &mut self.potentials, |thread, first, tiles, mut potentials| {
            let mut counts = table(&counts, thread);
            for (index, tile) in tiles.iter().enumerate().filter(|(_, tile)| tile.count > 0) {
                let Segment { clock, fold, .. } = segments[tile.segment as usize];
                let used = ..tile.count as usize;
                let (potentials, groups) = (&mut potentials.tile_mut(index)[used], &groups.tile(first + index)[used]);
                if fold > 0 {
                    update::fold_tile(level, potentials, fold);
                }
                let own = by_segment.partition_point(|&update| updates[update].segment < tile.segment);
                let own = by_segment[own..].iter().take_while(|update| updates[**update].segment == tile.segment);
                for &update in own {
                    let GroupUpdate { group, delta, .. } = updates[update];
                    let count = update::update_group(level, potentials, groups, group.0, clock.units(), delta);
                    counts[update] += u64::from(count);
                }
            }
        });
        changed.extend(
            (0..updates.len())
                .map(|update| (0..counts.len()).map(|thread| table(&counts, thread)[update]).sum::<u64>()),
        );
        Ok(())
    }

    fn epoch(&mut self, segments: &[Segment], updates: &[Update], out: &mut Vec<QualityVector>) -> Result<(), Error> {
        let one_pass = update::fold_may_follow(segments);
        if one_pass {
            self.apply(segments, updates);
        } else {
            self.update(segments, updates)?;
        }
        let level = self.level;
        let width = usize::from(self.highest_group) + 1;
        let totals = self.tables(segments.len() * width, Total::EMPTY);
        let guesses: Vec<_> = (0..self.pool.threads()).map(|_| Mutex::new(TileGroups::NONE)).collect();
        let groups = &self.groups;
        Self::each_task(&mut self.pool, &self.tiles, &mut self.potentials, |thread, first, tiles, mut potentials| {
            let (mut totals, mut guess) = (table(&totals, thread), table(&guesses, thread));
            for (index, tile) in tiles.iter().enumerate().filter(|(_, tile)| tile.count > 0) {
                let Segment { clock, fold, .. } = segments[tile.segment as usize];
                let used = ..tile.count as usize;
                let (potentials, groups) = (&mut potentials.tile_mut(index)[used], &groups.tile(first + index)[used]);
                if one_pass && fold > 0 {
                    update::fold_tile(level, potentials, fold);
                }
                let totals = &mut totals[tile.segment as usize * width..][..width];
                quality::add_tile(level, potentials, groups, clock.units(), &mut guess, totals);
            }
        });
        let mut totals = totals.into_iter().map(|totals| totals.into_inner());
        let mut sum = totals.next().expect("a pool has at least one thread");
        for other in totals {
            sum.iter_mut().zip(&other).for_each(|(sum, other)| sum.merge(other));
        }
        out.resize_with(segments.len(), QualityVector::default);
        for (vector, totals) in out.iter_mut().zip(sum.chunks_exact(width)) {
            let groups = totals.iter().enumerate();
            vector.assign(groups.map(|(group, total)| (Group(group as u8), total.quality())));
        }
        Ok(())
    }

    fn histogram(&mut self, segments: &[Segment], bits: u32) -> Result<Histogram, Error> {
        let mut histogram = Histogram::new(bits).expect("the caller passes bits in range");
        let width = usize::from(self.highest_group) + 1;
        let bins = self.tables(width << bits, 0_u32);
        let groups = &self.groups;
        Self::each_task(&mut self.pool, &self.tiles, &mut self.potentials, |thread, first, tiles, mut potentials| {
            let mut bins = table(&bins, thread);
            for (index, tile) in tiles.iter().enumerate().filter(|(_, tile)| tile.count > 0) {
                let Segment { clock, hidden, .. } = segments[tile.segment as usize];
                if hidden {
                    continue;
                }
                let used = ..tile.count as usize;
                let (potentials, groups) = (&potentials.tile_mut(index)[used], &groups.tile(first + index)[used]);
                quality::count_tile(potentials, groups, clock, bits, &mut bins);
            }
        });
        for thread in 0..bins.len() {
            for (group, bins) in table(&bins, thread).chunks_exact(1 << bits).enumerate() {
                if bins.iter().any(|&count| count > 0) {
                    let sums = histogram.bins_mut(Group(group as u8));
                    sums.iter_mut().zip(bins).for_each(|(sum, &count)| *sum += u64::from(count));
                }
            }
        }
        Ok(histogram)
    }

    fn rank(&mut self, request: &RankRequest<'_>, out: &mut Vec<(Slot, u32)>) -> Result<(), Error> {
        let RankRequest { segments, ids, scope, order, limit } = *request;
        let (tiles, potentials, groups) = (&self.tiles, &self.potentials, &self.groups);
        let view = rank::View { tiles, segments, potentials, groups, ids, scope };
        match limit {
            Some(0) => out.clear(),
            // A small limit: select the few entries and sort only them.
            Some(limit) if limit <= view.at_most() / 16 => {
                top::first(&mut self.pool, self.level, view, &mut self.spans, order, limit, out);
            }
            _ => {
                rank::all(&mut self.pool, view, order, out);
                out.truncate(limit.unwrap_or(usize::MAX));
            }
        }
        Ok(())
    }

    fn recall(&mut self, request: &RecallRequest<'_>, out: &mut Vec<RecallMatch>) -> Result<(), Error> {
        let RecallRequest { segments, ids, scope, .. } = *request;
        let (tiles, potentials, groups) = (&self.tiles, &self.potentials, &self.groups);
        let view = rank::View { tiles, segments, potentials, groups, ids, scope };
        let request = RecallRequest { limit: request.limit.min(view.at_most()), ..*request };
        recall::first(&mut self.pool, self.level, view, &request, out);
        Ok(())
    }

    fn digest(&mut self, request: &DigestRequest<'_>, out: &mut Vec<Digest>) -> Result<(), Error> {
        let DigestRequest { segments, ids, content } = *request;
        let digests = self.tables(segments.len(), Digest::default());
        let groups = &self.groups;
        Self::each_task(&mut self.pool, &self.tiles, &mut self.potentials, |thread, first, tiles, mut potentials| {
            let mut digests = table(&digests, thread);
            for (index, tile) in tiles.iter().enumerate().filter(|(_, tile)| tile.count > 0) {
                let clock = segments[tile.segment as usize].clock;
                let potentials = potentials.tile_mut(index);
                let (groups, ids) = (groups.tile(first + index), ids.tile(first + index));
                let content = content.map(|content| content.tile(first + index));
                for offset in 0..tile.count as usize {
                    let weight = clock.weight(potentials[offset]);
                    let content = content.map_or(0, |content| content[offset]);
                    digests[tile.segment as usize].add(ids[offset], weight, Group(groups[offset]), content);
                }
            }
        });
        out.clear();
        out.resize(segments.len(), Digest::default());
        for thread in 0..digests.len() {
            out.iter_mut().zip(table(&digests, thread).iter()).for_each(|(sum, &digest)| sum.merge(digest));
        }
        Ok(())
    }

    fn export(&mut self, tile: TileId, potentials: &mut Vec<u32>, groups: &mut Vec<u8>) -> Result<(), Error> {
        let used = ..self.tiles[tile as usize].count as usize;
        potentials.clear();
        potentials.extend_from_slice(&self.potentials.tile(tile as usize)[used]);
        groups.clear();
        groups.extend_from_slice(&self.groups.tile(tile as usize)[used]);
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.tiles.len() as u64 * TILE as u64 * BYTES_PER_SLOT
    }
}
