//! GPUs beside the CPU: the host's columns are what holds, and the GPUs do the passes that are large enough for them on copies of those.
//!
//! All that changes memories is done by the CPU, and noted. Each partition is on one device, or on none where no device has room for it.
//! Before a device does its part of a pass its copies take what has changed since its last one; then all devices are at work at once, each
//! on a thread of its own, and the CPU over what no device holds. So a device that fails takes nothing with it: the CPU does its part of
//! that pass, its partitions go to the others or to the CPU, and the bits are the same.

mod beside;
mod changes;
mod merge;
mod placement;
mod standing;

pub use standing::{Held, Standing};

use crate::mirror::Mirror;
use crate::partitioner::{Resource, Size, Strategy};
use crate::pool::Pool;
use crate::recall::{Alike, Recall};
use crate::{
    Cpu, Device, Error, GroupUpdate, Info, Order, Scope, Segment, SegmentId, Slot, TILE, Tile, TileId, Tiles, Update,
};
use beside::Beside;
use changes::Changes;
use engram_memory::{Digest, Group, Histogram, MemoryId, QualityVector};
use placement::Placement;
use std::time::{Duration, Instant};

/// Bytes of a memory on a device: potential, group, id.
const COLUMN_BYTES: u64 = 13;
/// Bytes of a memory that the pass which needs most, a full ranking, takes beside the columns: two lists of slots, keys and slots twice.
const WORKING_BYTES: u64 = 32;
/// Bytes of a memory beside its vector: one over the norm.
const NORM_BYTES: u64 = 4;

/// A device to be had beside the CPU, and what is known of it.
#[derive(Debug)]
pub struct Given<M> {
    /// Without tiles.
    pub device: M,
    /// By what it is known wherever it is; a name otherwise.
    pub id: String,
    /// Bytes that it may take.
    pub free_bytes: u64,
    /// Memories a second of a pass over quality, as measured.
    pub throughput: Option<u64>,
    /// What such a pass takes whatever its size, as measured.
    pub latency: Duration,
}

impl<M: Device> Given<M> {
    /// A device of which nothing is known.
    pub fn unmeasured(device: M) -> Self {
        let id = device.info().name.clone();
        Self { device, id, free_bytes: u64::MAX, throughput: None, latency: Duration::ZERO }
    }
}

/// The CPU, with GPUs for large passes.
///
/// Passes that change memories ([`Device::write`], [`Device::update`], [`Device::update_groups`], the updates of [`Device::epoch`]), reads
/// of single slots and exports are the CPU's. Quality, histograms, rankings, recall and digests over [`Standing::threshold`] memories or
/// more are the GPUs'. The memory of the host is that of [`Cpu`], and an eighth of a byte a memory.
pub struct Mirrored<M: Mirror> {
    host: Cpu,
    beside: Vec<Beside<M>>,
    info: Info,
    tiles: Vec<Tile>,
    /// By tile: the device that has a copy, and which of its tiles that is.
    places: Vec<Option<(usize, TileId)>>,
    changes: Changes,
    placement: Placement,
    /// Tiles, devices or what is known of them are others than those that partitions were placed by.
    unsettled: bool,
    /// Copies were given up without a new place.
    scattered: bool,
    /// Of a memory on a device, with what passes take.
    slot_bytes: u64,
    /// A thread for each device, from the first pass of several on.
    threads: Option<Pool>,
    standing: Standing,
}

/// What a device, or the CPU (`None`), found.
struct Part<T> {
    device: Option<usize>,
    found: T,
    took: Duration,
}

/// Who does a part of a pass.
enum By<'a, M> {
    Device(usize, &'a mut M),
    Host(&'a mut Cpu, Vec<Tile>),
}

/// A part of a pass, and what came of it.
type Job<'a, M, T> = (By<'a, M>, Option<(Result<T, Error>, Duration)>);

impl<M: Mirror> Mirrored<M> {
    /// Over two devices without tiles. The GPU does passes over `threshold` memories and more, none without one.
    pub fn new(host: Cpu, gpu: M, threshold: Option<u64>) -> Self {
        Self::over(host, vec![Given::unmeasured(gpu)], threshold, Strategy::LatencyOptimized)
    }

    /// Over a CPU without tiles and any number of devices. These do passes over `threshold` memories and more, none without one; `strategy` says
    /// how partitions are shared out.
    pub fn over(host: Cpu, given: Vec<Given<M>>, threshold: Option<u64>, strategy: Strategy) -> Self {
        let resource = |given: &Given<M>| Resource {
            throughput: given.throughput,
            free_bytes: given.free_bytes,
            latency_ns: given.latency.as_nanos() as u64,
            healthy: true,
        };
        let placement = Placement::new(strategy, given.iter().map(resource).collect());
        let held = |given: &Given<M>| {
            let (name, id) = (given.device.info().name.clone(), given.id.clone());
            Held { name, id, bytes: given.device.bytes(), ..Held::default() }
        };
        let devices: Vec<Held> = given.iter().map(held).collect();
        let names: Vec<&str> = devices.iter().map(|held| held.name.as_str()).collect();
        let standing = Standing { threshold, name: names.join(", "), devices, ..Standing::default() };
        let mut own = Self {
            info: host.info().clone(),
            host,
            beside: given.into_iter().map(|given| Beside::new(given.device)).collect(),
            tiles: Vec::new(),
            places: Vec::new(),
            changes: Changes::default(),
            placement,
            unsettled: true,
            scattered: false,
            slot_bytes: COLUMN_BYTES + WORKING_BYTES,
            threads: None,
            standing,
        };
        own.tell();
        own
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

    fn is_large(&self, memories: u64) -> bool {
        memories > 0
            && self.standing.threshold.is_some_and(|least| memories >= least)
            && self.beside.iter().any(|beside| beside.device.is_some())
    }

    /// Has the devices do a pass over `memories` memories, of one segment or of all of them, each over what it holds, and the CPU over the rest;
    /// `None` where the CPU is to do it alone.
    fn parts<T: Send>(
        &mut self,
        segments: usize,
        memories: u64,
        only: Option<SegmentId>,
        pass: impl Fn(&mut dyn Device) -> Result<T, Error> + Sync,
    ) -> Result<Option<Vec<Part<T>>>, Error> {
        if !self.is_large(memories) {
            return Ok(None);
        }
        let refused = self.settle(segments);
        let is_asked = |device: &usize| {
            let holds = self.beside[*device].device.is_some() && self.standing.devices[*device].memories > 0;
            holds && only.is_none_or(|segment| self.placement.owner(segment as usize) == Some(*device))
        };
        let asked: Vec<usize> = (0..self.beside.len()).filter(is_asked).collect();
        let mut failed = self.bring_up(&asked);
        let is_up = |device: &usize| failed.iter().all(|(other, _)| other != device);
        let up: Vec<usize> = asked.into_iter().filter(is_up).collect();

        let parts = if up.is_empty() { None } else { Some(self.run(&up, only, &mut failed, pass)?) };
        let done = parts.iter().flatten().filter_map(|part| part.device);
        let mut is_done = false;
        for device in done {
            is_done = true;
            self.standing.devices[device].passes += 1;
        }
        self.standing.passes += u64::from(is_done);
        self.standing.fallbacks += u64::from(refused || !failed.is_empty());
        for (device, error) in failed {
            self.standing.devices[device].fallbacks += 1;
            // What is only full has all its memory still, and another pass may need less.
            if matches!(error, Error::Failed { .. }) {
                self.give_up(device, &error);
            }
        }
        self.unsettled |= self.placement.passed();
        self.weigh();
        Ok(parts)
    }

    /// Runs a pass on these devices, whose copies are up to date, and on the CPU over the rest. What a device failed to do the CPU does after.
    fn run<T: Send>(
        &mut self,
        up: &[usize],
        only: Option<SegmentId>,
        failed: &mut Vec<(usize, Error)>,
        pass: impl Fn(&mut dyn Device) -> Result<T, Error> + Sync,
    ) -> Result<Vec<Part<T>>, Error> {
        let is_left = |device: Option<usize>| device.is_none_or(|device| !up.contains(&device));
        let left = match self.standing.host_memories > 0 || !failed.is_empty() {
            true => self.rest(only, is_left),
            false => None,
        };
        let Self { host, beside, threads, .. } = self;
        let of_devices = beside.iter_mut().enumerate().filter(|(device, _)| up.contains(device));
        let of_devices = of_devices.filter_map(|(index, beside)| Some(By::Device(index, beside.device.as_mut()?)));
        let of_host = left.map(|tiles| By::Host(host, tiles));
        let mut jobs: Vec<Job<'_, M, T>> = of_devices.chain(of_host).map(|by| (by, None)).collect();
        at_once(threads, jobs.iter_mut().collect(), |(by, done)| {
            let begin = Instant::now();
            let found = match by {
                By::Device(_, device) => pass(*device),
                By::Host(host, tiles) => host.over(std::mem::take(tiles), |host| pass(host)),
            };
            *done = Some((found, begin.elapsed()));
        });
        let mut parts = Vec::new();
        let mut redo = Vec::new();
        for (by, done) in jobs {
            let (found, took) = done.expect("every job was done");
            match (by, found) {
                (By::Device(device, _), Ok(found)) => parts.push(Part { device: Some(device), found, took }),
                (By::Device(device, _), Err(error)) => {
                    redo.push(device);
                    failed.push((device, error));
                }
                (_, found) => parts.push(Part { device: None, found: found?, took }),
            }
        }
        if !redo.is_empty()
            && let Some(tiles) = self.rest(only, |device| device.is_some_and(|device| redo.contains(&device)))
        {
            let begin = Instant::now();
            let found = self.host.over(tiles, |host| pass(host))?;
            parts.push(Part { device: None, found, took: begin.elapsed() });
        }
        Ok(parts)
    }

    /// The tile table of what is left by those that hold it; `None` where no memory of the segments asked for is.
    fn rest(&self, only: Option<SegmentId>, is_left: impl Fn(Option<usize>) -> bool) -> Option<Vec<Tile>> {
        let places = self.places.iter().map(|place| place.map(|(device, _)| device));
        let entry = |(tile, place): (&Tile, _)| if is_left(place) { *tile } else { Tile::default() };
        let tiles: Vec<Tile> = self.tiles.iter().zip(places).map(entry).collect();
        let counts = |tile: &Tile| tile.count > 0 && only.is_none_or(|only| tile.segment == only);
        tiles.iter().any(counts).then_some(tiles)
    }

    /// Brings the copies of these devices up to date, all at once; those that failed, and why.
    fn bring_up(&mut self, devices: &[usize]) -> Vec<(usize, Error)> {
        let Self { host, beside, tiles, changes, threads, placement, standing, .. } = self;
        let asked = beside.iter_mut().enumerate().filter(|(device, _)| devices.contains(device));
        let mut jobs: Vec<_> = asked.map(|(device, beside)| (device, beside, Ok(0), Duration::ZERO)).collect();
        let (host, tiles, noted) = (&*host, &tiles[..], &*changes);
        at_once(threads, jobs.iter_mut().collect(), |(_, beside, sent, took)| {
            let begin = Instant::now();
            *sent = beside.bring_up(host, tiles, noted);
            *took = begin.elapsed();
        });
        let mut failed = Vec::new();
        for (device, beside, sent, took) in jobs {
            match sent {
                Ok(bytes) => {
                    beside.tiles().for_each(|(_, tile)| changes.cleared(tile));
                    standing.devices[device].mirrored_bytes += bytes;
                    standing.mirrored_bytes += bytes;
                    placement.sent(bytes, took);
                }
                Err(error) => failed.push((device, error)),
            }
        }
        failed
    }

    /// Gives every partition its place, and every device memory for what it is to hold; whether one was given up on the way.
    fn settle(&mut self, segments: usize) -> bool {
        let mut refused = false;
        while std::mem::take(&mut self.unsettled) {
            let all = self.placement.arrange(&self.sizes(segments)) | std::mem::take(&mut self.scattered);
            self.relocate(all);
            for device in 0..self.beside.len() {
                let beside = &mut self.beside[device];
                let (tiles, wanted) = (beside.device.as_ref().map_or(0, Mirror::tiles), beside.wanted());
                if let Some(error) = beside.refused.take_if(|_| wanted == 0) {
                    // There is no partition that it has room for.
                    refused = true;
                    self.standing.devices[device].fallbacks += 1;
                    self.give_up(device, &error);
                    continue;
                }
                match beside.reserve() {
                    Ok(()) => beside.refused = None,
                    Err(error @ Error::Full { .. }) => {
                        // Columns that move when they grow need twice their room: once more, from nothing.
                        self.scatter(device);
                        if tiles == 0 {
                            let fits = (wanted * 7 / 8 * TILE) as u64;
                            self.placement.full(device, fits * self.slot_bytes);
                            self.beside[device].refused = Some(error);
                        }
                    }
                    Err(error) => {
                        refused = true;
                        self.standing.devices[device].fallbacks += 1;
                        self.give_up(device, &error);
                    }
                }
            }
            self.count(segments);
        }
        refused
    }

    /// By segment.
    fn sizes(&self, segments: usize) -> Vec<Size> {
        let mut sizes = vec![Size { memories: 0, bytes: 0 }; segments];
        for tile in self.tiles.iter().filter(|tile| tile.count > 0) {
            let size = &mut sizes[tile.segment as usize];
            size.memories += u64::from(tile.count);
            size.bytes += TILE as u64 * self.slot_bytes;
        }
        sizes
    }

    /// Takes tiles to where their partitions are now: those whose entry changed, or all.
    fn relocate(&mut self, all: bool) {
        for (tile, entry) in (0..).zip(&self.tiles) {
            if !(all || self.changes.is_mapped(tile)) {
                continue;
            }
            let owner = if entry.count > 0 { self.placement.owner(entry.segment as usize) } else { None };
            let place = &mut self.places[tile as usize];
            if place.map(|(device, _)| device) == owner {
                continue;
            }
            if let Some((device, own)) = *place {
                self.beside[device].give(own);
            }
            *place = owner.map(|device| {
                self.changes.unknown(tile);
                (device, self.beside[device].take(tile))
            });
        }
    }

    /// Has a device hold nothing, until partitions are placed again.
    fn scatter(&mut self, device: usize) {
        self.places.iter_mut().for_each(|place| *place = place.filter(|(holder, _)| *holder != device));
        self.beside[device].clear();
        (self.unsettled, self.scattered) = (true, true);
    }

    fn give_up(&mut self, device: usize, error: &Error) {
        let beside = &mut self.beside[device];
        if matches!(error, Error::Failed { .. }) {
            // To give back the memory of a device that hangs may hang: what it had stays its own until the process ends.
            std::mem::forget(beside.device.take());
        } else {
            beside.device = None;
        }
        let held = &mut self.standing.devices[device];
        held.given_up = Some(error.to_string());
        (held.partitions, held.memories) = (0, 0);
        self.placement.lost(device);
        self.scatter(device);
        self.tell();
        if self.beside.iter().all(|beside| beside.device.is_none()) {
            self.changes = Changes::default();
        }
    }

    /// From the first recall on devices hold vectors, too.
    fn vectors_of(&mut self, dimension: usize) {
        let slot_bytes = COLUMN_BYTES + WORKING_BYTES + (dimension * size_of::<u16>()) as u64 + NORM_BYTES;
        self.unsettled |= slot_bytes != self.slot_bytes;
        self.slot_bytes = slot_bytes;
    }

    /// Counts what each device holds.
    fn count(&mut self, segments: usize) {
        let mut held = vec![(0, 0); self.beside.len()];
        self.standing.host_memories = 0;
        for (place, tile) in self.places.iter().zip(&self.tiles) {
            match *place {
                Some((device, _)) => held[device].1 += u64::from(tile.count),
                None => self.standing.host_memories += u64::from(tile.count),
            }
        }
        for (segment, size) in self.sizes(segments).into_iter().enumerate() {
            if let Some(device) = self.placement.owner(segment).filter(|_| size.memories > 0) {
                held[device].0 += 1;
            }
        }
        for (told, (partitions, memories)) in self.standing.devices.iter_mut().zip(held) {
            (told.partitions, told.memories) = (partitions, memories);
        }
    }

    /// Says which devices are at work, and which were given up.
    fn tell(&mut self) {
        let Self { beside, standing, info, host, .. } = self;
        let several = standing.devices.len() > 1;
        let given_up = |held: &Held| {
            let why = held.given_up.as_ref()?;
            Some(if several { format!("{} ({}): {why}", held.name, held.id) } else { why.clone() })
        };
        let lost: Vec<String> = standing.devices.iter().filter_map(given_up).collect();
        standing.given_up = (!lost.is_empty()).then(|| lost.join("; "));
        let own = host.info();
        let mut names: Vec<&str> = standing.at_work().map(|held| held.name.as_str()).collect();
        let kind = beside.iter().find_map(|beside| Some(beside.device.as_ref()?.info().kind)).unwrap_or(own.kind);
        names.push(&own.name);
        *info = Info { kind, name: names.join(", "), threads: own.threads };
        self.weigh();
    }

    /// Says how many bytes are on each device.
    fn weigh(&mut self) {
        for (held, beside) in self.standing.devices.iter_mut().zip(&self.beside) {
            held.bytes = beside.device.as_ref().map_or(0, |device| device.bytes());
        }
        self.standing.bytes = self.standing.devices.iter().map(|held| held.bytes).sum();
    }

    /// Notes changes, while there is a copy to bring up.
    fn note(&mut self, note: impl FnOnce(&mut Changes, &[Tile])) {
        if self.beside.iter().any(|beside| beside.device.is_some()) {
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

/// Does every job, those of several at once.
fn at_once<J: Send>(threads: &mut Option<Pool>, jobs: Vec<J>, work: impl Fn(J) + Sync) {
    match jobs.len() {
        0 | 1 => jobs.into_iter().for_each(work),
        count => {
            if threads.as_ref().is_none_or(|pool| pool.threads() < count) {
                *threads = Some(Pool::new(count));
            }
            let pool = threads.as_mut().expect("it was made above");
            pool.each(jobs, |_, job| work(job));
        }
    }
}

/// The segment that a scope is, when it is one.
const fn only(scope: Scope) -> Option<SegmentId> {
    match scope {
        Scope::Segment(segment) => Some(segment),
        Scope::All | Scope::Group(_) => None,
    }
}

impl<M: Mirror> Device for Mirrored<M> {
    fn info(&self) -> &Info {
        &self.info
    }

    fn standing(&self) -> Option<&Standing> {
        Some(&self.standing)
    }

    fn reserve(&mut self, tiles: u32) -> Result<(), Error> {
        self.host.reserve(tiles)?;
        self.tiles.resize(self.tiles.len().max(tiles as usize), Tile::default());
        self.places.resize(self.tiles.len(), None);
        self.note(|changes, tiles| changes.reserve(tiles.len()));
        Ok(())
    }

    fn map_tile(&mut self, tile: TileId, entry: Tile) {
        self.host.map_tile(tile, entry);
        self.tiles[tile as usize] = entry;
        self.note(|changes, _| changes.mapped(tile));
        self.unsettled = true;
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
        let memories = self.all();
        if !self.is_large(memories) {
            // In one pass.
            self.host.epoch(segments, updates, out)?;
            self.note_updates(segments, updates);
            return Ok(());
        }
        self.update(segments, updates)?;
        let folded: Vec<Segment> = segments.iter().map(|segment| Segment { fold: 0, ..*segment }).collect();
        let parts = self.parts(segments.len(), memories, None, |device| {
            let mut found = Vec::new();
            device.epoch(&folded, &[], &mut found).map(|()| found)
        })?;
        let Some(parts) = parts else { return self.host.epoch(&folded, &[], out) };
        for part in &parts {
            if let Some(device) = part.device {
                self.placement.measured(device, self.standing.devices[device].memories, part.took);
            }
        }
        merge::qualities(parts.into_iter().map(|part| part.found).collect(), out);
        Ok(())
    }

    fn histogram(&mut self, segments: &[Segment], bits: u32) -> Result<Histogram, Error> {
        let parts = self.parts(segments.len(), self.all(), None, |device| device.histogram(segments, bits))?;
        let parts = parts.map(|parts| parts.into_iter().map(|part| part.found).collect());
        parts.and_then(merge::histograms).map_or_else(|| self.host.histogram(segments, bits), Ok)
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
        let parts = self.parts(segments.len(), memories, only(scope), |device| {
            let mut found = Vec::new();
            device.rank(segments, scope, order, limit, ids, &mut found).map(|()| found)
        })?;
        let Some(mut parts) = parts else { return self.host.rank(segments, scope, order, limit, ids, out) };
        for part in &mut parts {
            if let Some(device) = part.device {
                part.found.iter_mut().for_each(|entry| entry.0 = self.beside[device].origin(entry.0));
            }
        }
        merge::ranked(parts.into_iter().map(|part| part.found).collect(), order, limit, ids, out);
        Ok(())
    }

    fn recall(
        &mut self,
        segments: &[Segment],
        asked: &Recall<'_>,
        ids: &Tiles<MemoryId>,
        out: &mut Vec<Alike>,
    ) -> Result<(), Error> {
        let memories = self.memories(segments, asked.scope);
        self.vectors_of(asked.features.dimension);
        let parts = self.parts(segments.len(), memories, only(asked.scope), |device| {
            let mut found = Vec::new();
            device.recall(segments, asked, ids, &mut found).map(|()| found)
        })?;
        let Some(mut parts) = parts else { return self.host.recall(segments, asked, ids, out) };
        for part in &mut parts {
            if let Some(device) = part.device {
                part.found.iter_mut().for_each(|alike| alike.slot = self.beside[device].origin(alike.slot));
            }
        }
        merge::recalled(parts.into_iter().map(|part| part.found).collect(), asked.limit, ids, out);
        Ok(())
    }

    fn digest(
        &mut self,
        segments: &[Segment],
        ids: &Tiles<MemoryId>,
        content: Option<&Tiles<u128>>,
        out: &mut Vec<Digest>,
    ) -> Result<(), Error> {
        let parts = self.parts(segments.len(), self.all(), None, |device| {
            let mut found = Vec::new();
            device.digest(segments, ids, content, &mut found).map(|()| found)
        })?;
        let Some(parts) = parts else { return self.host.digest(segments, ids, content, out) };
        merge::digests(parts.into_iter().map(|part| part.found).collect(), out);
        Ok(())
    }

    fn export(&mut self, tile: TileId, potentials: &mut Vec<u32>, groups: &mut Vec<u8>) -> Result<(), Error> {
        self.host.export(tile, potentials, groups)
    }

    fn bytes(&self) -> u64 {
        self.host.bytes()
    }
}
