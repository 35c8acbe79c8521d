//! A GPU beside the CPU: the host's columns are what holds, and a GPU does the passes that are large enough for it on a mirror of them.
//!
//! All that changes memories is done by the CPU, and noted. Before a GPU does a pass its mirror takes what has changed since its last
//! one. So a GPU that fails takes nothing with it: the CPU does that pass and all later ones, and the bits are the same.

mod changes;

use crate::gpu::Driver;
use crate::recall::{Alike, Recall};
use crate::{
    Cpu, Device, Error, Gpu, GroupUpdate, Info, Order, Scope, Segment, SegmentId, Slot, TILE, Tile, TileId, Tiles,
    Update,
};
use changes::{Changes, Wanted};
use engram_memory::{Digest, Group, Histogram, MemoryId, QualityVector};

/// Tiles that are sent in one piece: 1 MiB of potentials.
const PIECE: usize = 64;
/// Bytes of a row that is sent: slot, potential, group.
const ROW_BYTES: u64 = 9;
/// Bytes of a memory in a tile that is sent: potential, group.
const SLOT_BYTES: u64 = 5;

/// How a GPU beside the CPU stands.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Standing {
    /// What the vendor calls it.
    pub name: String,
    /// It does passes over so many memories and more; `None` = no pass.
    pub threshold: Option<u64>,
    /// Passes that it did.
    pub passes: u64,
    /// Passes that were large enough, and that the CPU did because the GPU had no memory left or failed.
    pub fallbacks: u64,
    /// Bytes of rows that the mirror took.
    pub mirrored_bytes: u64,
    /// Bytes of the mirror, features and what passes take for themselves apart; 0 when it was given up.
    pub bytes: u64,
    /// Why it was given up; it does no pass then.
    pub given_up: Option<String>,
}

/// The CPU, with a GPU for large passes.
///
/// Passes that change memories ([`Device::write`], [`Device::update`], [`Device::update_groups`], the updates of [`Device::epoch`]), reads
/// of single slots and exports are the CPU's. Quality, histograms, rankings, recall and digests over [`Standing::threshold`] memories or
/// more are the GPU's. The memory of the host is that of [`Cpu`], and an eighth of a byte a memory.
pub struct Mirrored<D: Driver> {
    host: Cpu,
    /// `None` when it was given up.
    gpu: Option<Gpu<D>>,
    info: Info,
    tiles: Vec<Tile>,
    changes: Changes,
    standing: Standing,
}

impl<D: Driver> Mirrored<D> {
    /// Over two devices without tiles. The GPU does passes over `threshold` memories and more, none without one.
    pub fn new(host: Cpu, gpu: Gpu<D>, threshold: Option<u64>) -> Self {
        let name = gpu.info().name.clone();
        let own = host.info();
        let info = Info { kind: gpu.info().kind, name: format!("{name}, {}", own.name), threads: own.threads };
        let standing = Standing { name, threshold, ..Standing::default() };
        Self { host, gpu: Some(gpu), info, tiles: Vec::new(), changes: Changes::default(), standing }
    }

    /// Memories that a pass over `scope` looks at.
    fn memories(&self, segments: &[Segment], scope: Scope) -> u64 {
        let counts = |tile: &&Tile| match scope {
            Scope::Segment(only) => tile.segment == only,
            Scope::All | Scope::Group(_) => tile.count > 0 && !segments[tile.segment as usize].hidden,
        };
        self.tiles.iter().filter(counts).map(|tile| u64::from(tile.count)).sum()
    }

    /// Memories of the arena.
    fn all(&self) -> u64 {
        self.tiles.iter().map(|tile| u64::from(tile.count)).sum()
    }

    /// Has the GPU do a pass over `memories` memories; `None` where the CPU is to do it.
    fn on_gpu<T>(&mut self, memories: u64, pass: impl FnOnce(&mut Gpu<D>) -> Result<T, Error>) -> Option<T> {
        if memories == 0 || memories < self.standing.threshold? {
            return None;
        }
        let gpu = self.gpu.as_mut()?;
        let tiles = self.tiles.len();
        let fits = match tiles > gpu.tiles() {
            // With room for the next few, where there is: to grow, all columns move.
            true => gpu.reserve((tiles + tiles / 16) as u32).or_else(|_| gpu.reserve(tiles as u32)),
            false => Ok(()),
        };
        let is_too_small = matches!(fits, Err(Error::Full { .. }));
        let done = fits.and_then(|()| bring_up(gpu, &mut self.host, &self.tiles, &self.changes)).and_then(|bytes| {
            self.changes.clear();
            self.standing.mirrored_bytes += bytes;
            pass(gpu)
        });
        self.standing.bytes = gpu.bytes();
        match done {
            Ok(done) => {
                self.standing.passes += 1;
                Some(done)
            }
            Err(error) => {
                self.standing.fallbacks += 1;
                match error {
                    // It has all its memory still, and another pass may need less.
                    Error::Full { .. } if !is_too_small => {}
                    Error::Full { .. } => {
                        self.gpu = None;
                        self.give_up(&error);
                    }
                    Error::Failed { .. } => {
                        // To give back the memory of a device that hangs may hang: what it had stays its own until the process ends.
                        std::mem::forget(self.gpu.take());
                        self.give_up(&error);
                    }
                }
                None
            }
        }
    }

    fn give_up(&mut self, error: &Error) {
        self.standing.given_up = Some(error.to_string());
        self.standing.bytes = 0;
        self.info = self.host.info().clone();
        self.changes = Changes::default();
    }

    /// Notes changes, while there is a mirror to bring up.
    fn note(&mut self, note: impl FnOnce(&mut Changes, &[Tile])) {
        if self.gpu.is_some() {
            note(&mut self.changes, &self.tiles);
        }
    }

    /// Notes that all of these segments changed.
    fn note_segments(&mut self, is_changed: impl Fn(SegmentId) -> bool) {
        self.note(|changes, tiles| {
            let changed = tiles.iter().enumerate().filter(|(_, tile)| tile.count > 0 && is_changed(tile.segment));
            changed.for_each(|(tile, _)| changes.all_updated(tile as TileId));
        });
    }

    fn note_folds(&mut self, segments: &[Segment]) {
        if segments.iter().any(|segment| segment.fold > 0) {
            self.note_segments(|segment| segments[segment as usize].fold > 0);
        }
    }

    fn note_updates(&mut self, segments: &[Segment], updates: &[Update]) {
        self.note_folds(segments);
        self.note(|changes, _| updates.iter().for_each(|update| changes.updated(update.slot)));
    }
}

/// Sends a mirror what has changed, and gives the bytes of it; after an error all of it is still to be sent.
fn bring_up<D: Driver>(gpu: &mut Gpu<D>, host: &mut Cpu, tiles: &[Tile], changes: &Changes) -> Result<u64, Error> {
    let (mut slots, mut whole) = (Vec::new(), Vec::new());
    for (tile, changed) in changes.iter() {
        let entry = tiles[tile as usize];
        if changed.entry {
            gpu.map_tile(tile, entry);
        } else if changed.ids {
            gpu.touch(tile);
        }
        match changes.wanted(tile, entry.count) {
            Wanted::None => {}
            Wanted::Slots(of_tile) => slots.extend(of_tile),
            Wanted::All => whole.push(tile),
        }
    }
    let mut rows = Vec::new();
    host.read(&slots, &mut rows)?;
    gpu.refresh(&slots, &rows)?;
    let (mut potentials, mut groups) = (Vec::new(), Vec::new());
    for piece in whole.chunk_by(|tile, next| tile + 1 == *next).flat_map(|run| run.chunks(PIECE)) {
        let (mut all_potentials, mut all_groups) = (Vec::new(), Vec::new());
        for (place, &tile) in piece.iter().enumerate() {
            host.export(tile, &mut potentials, &mut groups)?;
            all_potentials.extend_from_slice(&potentials);
            all_groups.extend_from_slice(&groups);
            if place + 1 < piece.len() {
                all_potentials.resize((place + 1) * TILE, 0);
                all_groups.resize((place + 1) * TILE, 0);
            }
        }
        gpu.replace(piece[0], &all_potentials, &all_groups)?;
    }
    Ok(slots.len() as u64 * ROW_BYTES + (whole.len() * TILE) as u64 * SLOT_BYTES)
}

impl<D: Driver> Device for Mirrored<D> {
    fn info(&self) -> &Info {
        &self.info
    }

    fn standing(&self) -> Option<&Standing> {
        Some(&self.standing)
    }

    fn reserve(&mut self, tiles: u32) -> Result<(), Error> {
        self.host.reserve(tiles)?;
        self.tiles.resize(self.tiles.len().max(tiles as usize), Tile::default());
        self.note(|changes, tiles| changes.reserve(tiles.len()));
        Ok(())
    }

    fn map_tile(&mut self, tile: TileId, entry: Tile) {
        self.host.map_tile(tile, entry);
        self.tiles[tile as usize] = entry;
        self.note(|changes, _| changes.mapped(tile));
    }

    fn write(&mut self, rows: &[(Slot, u32, Group)]) -> Result<(), Error> {
        self.host.write(rows)?;
        self.note(|changes, _| rows.iter().for_each(|row| changes.written(row.0)));
        Ok(())
    }

    fn read(&mut self, slots: &[Slot], out: &mut Vec<(u32, Group)>) -> Result<(), Error> {
        self.host.read(slots, out)
    }

    fn update(&mut self, segments: &[Segment], updates: &[Update]) -> Result<(), Error> {
        self.host.update(segments, updates)?;
        self.note_updates(segments, updates);
        Ok(())
    }

    fn update_groups(
        &mut self,
        segments: &[Segment],
        updates: &[GroupUpdate],
        changed: &mut Vec<u64>,
    ) -> Result<(), Error> {
        self.host.update_groups(segments, updates, changed)?;
        let mut is_changed: Vec<bool> = segments.iter().map(|segment| segment.fold > 0).collect();
        updates.iter().for_each(|update| is_changed[update.segment as usize] = true);
        self.note_segments(|segment| is_changed[segment as usize]);
        Ok(())
    }

    fn epoch(&mut self, segments: &[Segment], updates: &[Update], out: &mut Vec<QualityVector>) -> Result<(), Error> {
        let is_large = self.gpu.is_some() && self.standing.threshold.is_some_and(|least| self.all() >= least);
        if !is_large {
            // In one pass.
            self.host.epoch(segments, updates, out)?;
            self.note_updates(segments, updates);
            return Ok(());
        }
        self.update(segments, updates)?;
        let folded: Vec<Segment> = segments.iter().map(|segment| Segment { fold: 0, ..*segment }).collect();
        match self.on_gpu(self.all(), |gpu| gpu.epoch(&folded, &[], out)) {
            Some(()) => Ok(()),
            None => self.host.epoch(&folded, &[], out),
        }
    }

    fn histogram(&mut self, segments: &[Segment], bits: u32) -> Result<Histogram, Error> {
        match self.on_gpu(self.all(), |gpu| gpu.histogram(segments, bits)) {
            Some(histogram) => Ok(histogram),
            None => self.host.histogram(segments, bits),
        }
    }

    fn rank(
        &mut self,
        segments: &[Segment],
        scope: Scope,
        order: Order,
        limit: Option<usize>,
        ids: &Tiles<MemoryId>,
        out: &mut Vec<(Slot, u32)>,
    ) -> Result<(), Error> {
        let memories = self.memories(segments, scope);
        match self.on_gpu(memories, |gpu| gpu.rank(segments, scope, order, limit, ids, out)) {
            Some(()) => Ok(()),
            None => self.host.rank(segments, scope, order, limit, ids, out),
        }
    }

    fn recall(
        &mut self,
        segments: &[Segment],
        asked: &Recall<'_>,
        ids: &Tiles<MemoryId>,
        out: &mut Vec<Alike>,
    ) -> Result<(), Error> {
        let memories = self.memories(segments, asked.scope);
        match self.on_gpu(memories, |gpu| gpu.recall(segments, asked, ids, out)) {
            Some(()) => Ok(()),
            None => self.host.recall(segments, asked, ids, out),
        }
    }

    fn digest(
        &mut self,
        segments: &[Segment],
        ids: &Tiles<MemoryId>,
        content: Option<&Tiles<u128>>,
        out: &mut Vec<Digest>,
    ) -> Result<(), Error> {
        match self.on_gpu(self.all(), |gpu| gpu.digest(segments, ids, content, out)) {
            Some(()) => Ok(()),
            None => self.host.digest(segments, ids, content, out),
        }
    }

    fn export(&mut self, tile: TileId, potentials: &mut Vec<u32>, groups: &mut Vec<u8>) -> Result<(), Error> {
        self.host.export(tile, potentials, groups)
    }

    fn bytes(&self) -> u64 {
        self.host.bytes()
    }
}
