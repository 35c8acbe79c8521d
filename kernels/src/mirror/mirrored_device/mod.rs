//! CPU device that offloads large passes to GPUs, which mirror its columns.
//!
//! The CPU makes all changes and records them. Each partition is assigned to one device, or to the host if no device has enough memory. Before a
//! device executes its part of a pass, its mirror is updated with the recorded changes; then all devices run in parallel, each on its own
//! thread, and the CPU handles the partitions of the host. A failed device loses no data: the CPU repeats its part of the pass, its partitions
//! move to other devices or the CPU, and the results are bit-identical.

mod changes;
mod device_mirror;
mod merge;
mod passes;
mod placement;
mod status;

pub use status::{DeviceStatus, MirrorStatus};

use crate::mirror::Mirror;
use crate::partitioner::{Resource, Size, Strategy};
use crate::pool::Pool;
use crate::{Cpu, Device, Error, Info, Scope, Segment, SegmentId, TILE, Tile, TileId, Update};
use changes::Changes;
use device_mirror::DeviceMirror;
use placement::Placement;
use std::time::{Duration, Instant};

/// Bytes of a memory on a device: potential, group, id.
const COLUMN_BYTES: u64 = 13;
/// Working bytes per memory of a full ranking, which needs the most: two lists of slots, keys and slots twice.
const WORKING_BYTES: u64 = 32;
/// Bytes per memory in addition to its vector: the inverse norm.
const NORM_BYTES: u64 = 4;

/// A device available for offloading, with its measurements.
#[derive(Debug)]
pub struct AvailableDevice<M> {
    /// Device without tiles.
    pub device: M,
    /// Persistent identifier, or the name if there is none.
    pub id: String,
    /// Bytes that it may allocate.
    pub free_bytes: u64,
    /// Measured throughput of the quality pass, in memories per second.
    pub throughput: Option<u64>,
    /// Measured fixed cost of such a pass.
    pub latency: Duration,
}

impl<M: Device> AvailableDevice<M> {
    /// Creates an entry without measurements.
    pub fn unmeasured(device: M) -> Self {
        let id = device.info().name.clone();
        Self { device, id, free_bytes: u64::MAX, throughput: None, latency: Duration::ZERO }
    }
}

/// A CPU that offloads large passes to GPUs.
///
/// The CPU executes passes that change memories ([`Device::write`], [`Device::update`], [`Device::update_groups`], the updates of
/// [`Device::epoch`]), reads of single slots, and exports. GPUs execute quality, histograms, rankings, recall and digests over
/// [`MirrorStatus::threshold`] memories or more. Host memory is that of [`Cpu`] plus one bit per memory.
pub struct MirroredDevice<M: Mirror> {
    host: Cpu,
    mirrors: Vec<DeviceMirror<M>>,
    info: Info,
    tiles: Vec<Tile>,
    /// By host tile: the device that mirrors it, and the device's tile.
    locations: Vec<Option<(usize, TileId)>>,
    changes: Changes,
    placement: Placement,
    /// Whether tiles, devices or measurements changed since the last placement.
    placement_stale: bool,
    /// Whether mirrored tiles were released without a new device.
    tiles_displaced: bool,
    /// Bytes per memory on a device, working memory included.
    slot_bytes: u64,
    /// One thread per device, created by the first pass on several devices.
    threads: Option<Pool>,
    status: MirrorStatus,
}

/// Result of a device or the CPU (`None`) for its part of a pass.
struct PartResult<T> {
    device: Option<usize>,
    output: T,
    elapsed: Duration,
}

/// Executor of a part of a pass.
enum Executor<'a, M> {
    Device(usize, &'a mut M),
    Host(&'a mut Cpu, Vec<Tile>),
}

/// A part of a pass, and its result and duration.
type Job<'a, M, T> = (Executor<'a, M>, Option<(Result<T, Error>, Duration)>);

impl<M: Mirror> MirroredDevice<M> {
    /// Creates a device from a CPU and a GPU without tiles. The GPU executes passes over at least `threshold` memories; none if `None`.
    pub fn new(host: Cpu, gpu: M, threshold: Option<u64>) -> Self {
        Self::over(host, vec![AvailableDevice::unmeasured(gpu)], threshold, Strategy::LatencyOptimized)
    }

    /// Creates a device from a CPU without tiles and any number of GPUs. These execute passes over at least `threshold` memories; none if `None`.
    /// `strategy` determines the assignment of partitions.
    pub fn over(host: Cpu, candidate: Vec<AvailableDevice<M>>, threshold: Option<u64>, strategy: Strategy) -> Self {
        let resource = |candidate: &AvailableDevice<M>| Resource {
            throughput: candidate.throughput,
            free_bytes: candidate.free_bytes,
            latency_ns: candidate.latency.as_nanos() as u64,
            healthy: true,
        };
        let placement = Placement::new(strategy, candidate.iter().map(resource).collect());
        let device_status = |candidate: &AvailableDevice<M>| {
            let (name, id) = (candidate.device.info().name.clone(), candidate.id.clone());
            DeviceStatus { name, id, bytes: candidate.device.bytes(), ..DeviceStatus::default() }
        };
        let devices: Vec<DeviceStatus> = candidate.iter().map(device_status).collect();
        let names: Vec<&str> = devices.iter().map(|device_status| device_status.name.as_str()).collect();
        let status = MirrorStatus { threshold, name: names.join(", "), devices, ..MirrorStatus::default() };
        let mut own = Self {
            info: host.info().clone(),
            host,
            mirrors: candidate.into_iter().map(|candidate| DeviceMirror::new(candidate.device)).collect(),
            tiles: Vec::new(),
            locations: Vec::new(),
            changes: Changes::default(),
            placement,
            placement_stale: true,
            tiles_displaced: false,
            slot_bytes: COLUMN_BYTES + WORKING_BYTES,
            threads: None,
            status,
        };
        own.update_status();
        own
    }

    /// Counts the memories that a pass over `scope` reads.
    fn memories(&self, segments: &[Segment], scope: Scope) -> u64 {
        let counts = |tile: &&Tile| match scope {
            Scope::Segment(only) => tile.segment == only,
            Scope::All | Scope::Group(_) => tile.count > 0 && !segments[tile.segment as usize].hidden,
        };
        self.tiles.iter().filter(counts).map(|tile| u64::from(tile.count)).sum()
    }

    /// Counts the memories of the arena.
    fn all(&self) -> u64 {
        self.tiles.iter().map(|tile| u64::from(tile.count)).sum()
    }

    fn is_large(&self, memories: u64) -> bool {
        memories > 0
            && self.status.threshold.is_some_and(|least| memories >= least)
            && self.mirrors.iter().any(|mirror| mirror.device.is_some())
    }

    /// Runs a pass over `memories` memories, of one segment or of all of them, on the devices and, for the rest, on the CPU; `None` if the CPU should
    /// run it alone.
    fn run_offloaded<T: Send>(
        &mut self,
        segments: usize,
        memories: u64,
        only: Option<SegmentId>,
        pass: impl Fn(&mut dyn Device) -> Result<T, Error> + Sync,
    ) -> Result<Option<Vec<PartResult<T>>>, Error> {
        if !self.is_large(memories) {
            return Ok(None);
        }
        let any_given_up = self.place_partitions(segments);
        let participates = |device: &usize| {
            let holds = self.mirrors[*device].device.is_some() && self.status.devices[*device].memories > 0;
            holds && only.is_none_or(|segment| self.placement.owner(segment as usize) == Some(*device))
        };
        let participants: Vec<usize> = (0..self.mirrors.len()).filter(participates).collect();
        let mut failed = self.sync_mirrors(&participants);
        let is_synced = |device: &usize| failed.iter().all(|(other, _)| other != device);
        let synced: Vec<usize> = participants.into_iter().filter(is_synced).collect();

        let parts = if synced.is_empty() { None } else { Some(self.run_parts(&synced, only, &mut failed, pass)?) };
        let outcome = parts.iter().flatten().filter_map(|part| part.device);
        let mut is_done = false;
        for device in outcome {
            is_done = true;
            self.status.devices[device].passes += 1;
        }
        self.status.passes += u64::from(is_done);
        self.status.fallbacks += u64::from(any_given_up || !failed.is_empty());
        for (device, error) in failed {
            self.status.devices[device].fallbacks += 1;
            // A device that is only full keeps its memory, and another pass may need less.
            if matches!(error, Error::Failed { .. }) {
                self.give_up(device, &error);
            }
        }
        self.placement_stale |= self.placement.finish_pass();
        self.update_bytes();
        Ok(parts)
    }

    /// Runs a pass on these synchronized devices and on the CPU for the rest. The CPU then repeats the parts of devices that failed.
    fn run_parts<T: Send>(
        &mut self,
        synced: &[usize],
        only: Option<SegmentId>,
        failed: &mut Vec<(usize, Error)>,
        pass: impl Fn(&mut dyn Device) -> Result<T, Error> + Sync,
    ) -> Result<Vec<PartResult<T>>, Error> {
        let is_left = |device: Option<usize>| device.is_none_or(|device| !synced.contains(&device));
        let left = match self.status.host_memories > 0 || !failed.is_empty() {
            true => self.remaining_tiles(only, is_left),
            false => None,
        };
        let Self { host, mirrors, threads, .. } = self;
        let of_devices = mirrors.iter_mut().enumerate().filter(|(device, _)| synced.contains(device));
        let of_devices =
            of_devices.filter_map(|(index, mirror)| Some(Executor::Device(index, mirror.device.as_mut()?)));
        let of_host = left.map(|tiles| Executor::Host(host, tiles));
        let mut jobs: Vec<Job<'_, M, T>> = of_devices.chain(of_host).map(|executor| (executor, None)).collect();
        run_jobs(threads, jobs.iter_mut().collect(), |(executor, outcome)| {
            let begin = Instant::now();
            let output = match executor {
                Executor::Device(_, device) => pass(*device),
                Executor::Host(host, tiles) => host.over(std::mem::take(tiles), |host| pass(host)),
            };
            *outcome = Some((output, begin.elapsed()));
        });
        let mut parts = Vec::new();
        let mut redo = Vec::new();
        for (executor, outcome) in jobs {
            let (output, elapsed) = outcome.expect("every job ran");
            match (executor, output) {
                (Executor::Device(device, _), Ok(output)) => {
                    parts.push(PartResult { device: Some(device), output, elapsed });
                }
                (Executor::Device(device, _), Err(error)) => {
                    redo.push(device);
                    failed.push((device, error));
                }
                (_, output) => parts.push(PartResult { device: None, output: output?, elapsed }),
            }
        }
        if !redo.is_empty()
            && let Some(tiles) =
                self.remaining_tiles(only, |device| device.is_some_and(|device| redo.contains(&device)))
        {
            let begin = Instant::now();
            let output = self.host.over(tiles, |host| pass(host))?;
            parts.push(PartResult { device: None, output, elapsed: begin.elapsed() });
        }
        Ok(parts)
    }

    /// Returns the tile table of the selected holders; `None` if it has no memory of the requested segments.
    fn remaining_tiles(&self, only: Option<SegmentId>, is_left: impl Fn(Option<usize>) -> bool) -> Option<Vec<Tile>> {
        let locations = self.locations.iter().map(|place| place.map(|(device, _)| device));
        let entry = |(tile, place): (&Tile, _)| if is_left(place) { *tile } else { Tile::default() };
        let tiles: Vec<Tile> = self.tiles.iter().zip(locations).map(entry).collect();
        let counts = |tile: &Tile| tile.count > 0 && only.is_none_or(|only| tile.segment == only);
        tiles.iter().any(counts).then_some(tiles)
    }

    /// Updates the mirrors of these devices in parallel; returns the devices that failed.
    fn sync_mirrors(&mut self, devices: &[usize]) -> Vec<(usize, Error)> {
        let Self { host, mirrors, tiles, changes, threads, placement, status, .. } = self;
        let targets = mirrors.iter_mut().enumerate().filter(|(device, _)| devices.contains(device));
        let mut jobs: Vec<_> = targets.map(|(device, mirror)| (device, mirror, Ok(0), Duration::ZERO)).collect();
        let (host, tiles, pending) = (&*host, &tiles[..], &*changes);
        run_jobs(threads, jobs.iter_mut().collect(), |(_, mirror, sent, elapsed)| {
            let begin = Instant::now();
            *sent = mirror.sync(host, tiles, pending);
            *elapsed = begin.elapsed();
        });
        let mut failed = Vec::new();
        for (device, mirror, sent, elapsed) in jobs {
            match sent {
                Ok(bytes) => {
                    mirror.tiles().for_each(|(_, tile)| changes.mark_clean(tile));
                    status.devices[device].mirrored_bytes += bytes;
                    status.mirrored_bytes += bytes;
                    placement.record_transfer(bytes, elapsed);
                }
                Err(error) => failed.push((device, error)),
            }
        }
        failed
    }

    /// Assigns partitions to devices and allocates their memory; returns whether a device was given up.
    fn place_partitions(&mut self, segments: usize) -> bool {
        let mut any_given_up = false;
        while std::mem::take(&mut self.placement_stale) {
            let all = self.placement.arrange(&self.sizes(segments)) | std::mem::take(&mut self.tiles_displaced);
            self.move_tiles(all);
            for device in 0..self.mirrors.len() {
                let mirror = &mut self.mirrors[device];
                let (tiles, wanted) = (mirror.device.as_ref().map_or(0, Mirror::tiles), mirror.required_tiles());
                if let Some(error) = mirror.allocation_error.take_if(|_| wanted == 0) {
                    // It has not enough memory for any partition.
                    any_given_up = true;
                    self.status.devices[device].fallbacks += 1;
                    self.give_up(device, &error);
                    continue;
                }
                match mirror.reserve() {
                    Ok(()) => mirror.allocation_error = None,
                    Err(error @ Error::Full { .. }) => {
                        // Growing columns temporarily need twice the memory: retry from empty.
                        self.clear_device(device);
                        if tiles == 0 {
                            let fits = (wanted * 7 / 8 * TILE) as u64;
                            self.placement.mark_full(device, fits * self.slot_bytes);
                            self.mirrors[device].allocation_error = Some(error);
                        }
                    }
                    Err(error) => {
                        any_given_up = true;
                        self.status.devices[device].fallbacks += 1;
                        self.give_up(device, &error);
                    }
                }
            }
            self.count_memories(segments);
        }
        any_given_up
    }

    /// Returns the size of each segment.
    fn sizes(&self, segments: usize) -> Vec<Size> {
        let mut sizes = vec![Size { memories: 0, bytes: 0 }; segments];
        for tile in self.tiles.iter().filter(|tile| tile.count > 0) {
            let size = &mut sizes[tile.segment as usize];
            size.memories += u64::from(tile.count);
            size.bytes += TILE as u64 * self.slot_bytes;
        }
        sizes
    }

    /// Moves tiles to the devices of their partitions: tiles whose entry changed, or all.
    fn move_tiles(&mut self, all: bool) {
        for (tile, entry) in (0..).zip(&self.tiles) {
            if !(all || self.changes.is_mapped(tile)) {
                continue;
            }
            let owner = if entry.count > 0 { self.placement.owner(entry.segment as usize) } else { None };
            let place = &mut self.locations[tile as usize];
            if place.map(|(device, _)| device) == owner {
                continue;
            }
            if let Some((device, own)) = *place {
                self.mirrors[device].release(own);
            }
            *place = owner.map(|device| {
                self.changes.reset(tile);
                (device, self.mirrors[device].take(tile))
            });
        }
    }

    /// Removes all tiles from a device until the next placement.
    fn clear_device(&mut self, device: usize) {
        self.locations.iter_mut().for_each(|place| *place = place.filter(|(holder, _)| *holder != device));
        self.mirrors[device].clear();
        (self.placement_stale, self.tiles_displaced) = (true, true);
    }

    fn give_up(&mut self, device: usize, error: &Error) {
        let mirror = &mut self.mirrors[device];
        if matches!(error, Error::Failed { .. }) {
            // Freeing the memory of a hanging device may block, so it is leaked.
            std::mem::forget(mirror.device.take());
        } else {
            mirror.device = None;
        }
        let device_status = &mut self.status.devices[device];
        device_status.given_up = Some(error.to_string());
        (device_status.partitions, device_status.memories) = (0, 0);
        self.placement.mark_lost(device);
        self.clear_device(device);
        self.update_status();
        if self.mirrors.iter().all(|mirror| mirror.device.is_none()) {
            self.changes = Changes::default();
        }
    }

    /// Accounts for vectors, which devices hold from the first recall on.
    fn note_dimension(&mut self, dimension: usize) {
        let slot_bytes = COLUMN_BYTES + WORKING_BYTES + (dimension * size_of::<u16>()) as u64 + NORM_BYTES;
        self.placement_stale |= slot_bytes != self.slot_bytes;
        self.slot_bytes = slot_bytes;
    }

    /// Counts the partitions and memories of each device.
    fn count_memories(&mut self, segments: usize) {
        let mut totals = vec![(0, 0); self.mirrors.len()];
        self.status.host_memories = 0;
        for (place, tile) in self.locations.iter().zip(&self.tiles) {
            match *place {
                Some((device, _)) => totals[device].1 += u64::from(tile.count),
                None => self.status.host_memories += u64::from(tile.count),
            }
        }
        for (segment, size) in self.sizes(segments).into_iter().enumerate() {
            if let Some(device) = self.placement.owner(segment).filter(|_| size.memories > 0) {
                totals[device].0 += 1;
            }
        }
        for (device_status, (partitions, memories)) in self.status.devices.iter_mut().zip(totals) {
            (device_status.partitions, device_status.memories) = (partitions, memories);
        }
    }

    /// Updates the lists of working and given-up devices.
    fn update_status(&mut self) {
        let Self { mirrors, status, info, host, .. } = self;
        let several = status.devices.len() > 1;
        let given_up = |device_status: &DeviceStatus| {
            let why = device_status.given_up.as_ref()?;
            Some(if several { format!("{} ({}): {why}", device_status.name, device_status.id) } else { why.clone() })
        };
        let lost: Vec<String> = status.devices.iter().filter_map(given_up).collect();
        status.given_up = (!lost.is_empty()).then(|| lost.join("; "));
        let own = host.info();
        let mut names: Vec<&str> = status.at_work().map(|device_status| device_status.name.as_str()).collect();
        let kind = mirrors.iter().find_map(|mirror| Some(mirror.device.as_ref()?.info().kind)).unwrap_or(own.kind);
        names.push(&own.name);
        *info = Info { kind, name: names.join(", "), threads: own.threads };
        self.update_bytes();
    }

    /// Updates the memory use of each device.
    fn update_bytes(&mut self) {
        for (device_status, mirror) in self.status.devices.iter_mut().zip(&self.mirrors) {
            device_status.bytes = mirror.device.as_ref().map_or(0, |device| device.bytes());
        }
        self.status.bytes = self.status.devices.iter().map(|device_status| device_status.bytes).sum();
    }

    /// Records changes while any device is in use.
    fn note(&mut self, note: impl FnOnce(&mut Changes, &[Tile])) {
        if self.mirrors.iter().any(|mirror| mirror.device.is_some()) {
            note(&mut self.changes, &self.tiles);
        }
    }

    /// Records a change of all memories of these segments.
    fn note_segments(&mut self, is_changed: impl Fn(SegmentId) -> bool) {
        self.note(|changes, tiles| {
            let changed = tiles.iter().enumerate().filter(|(_, tile)| tile.count > 0 && is_changed(tile.segment));
            changed.for_each(|(tile, _)| changes.mark_all_updated(tile as TileId));
        });
    }

    fn note_folds(&mut self, segments: &[Segment]) {
        if segments.iter().any(|segment| segment.fold > 0) {
            self.note_segments(|segment| segments[segment as usize].fold > 0);
        }
    }

    fn note_updates(&mut self, segments: &[Segment], updates: &[Update]) {
        self.note_folds(segments);
        self.note(|changes, _| updates.iter().for_each(|update| changes.mark_updated(update.slot)));
    }
}

/// Runs every job, several of them in parallel.
fn run_jobs<J: Send>(threads: &mut Option<Pool>, jobs: Vec<J>, work: impl Fn(J) + Sync) {
    match jobs.len() {
        0 | 1 => jobs.into_iter().for_each(work),
        count => {
            if threads.as_ref().is_none_or(|pool| pool.threads() < count) {
                *threads = Some(Pool::new(count));
            }
            let pool = threads.as_mut().expect("the pool was created above");
            pool.for_each(jobs, |_, job| work(job));
        }
    }
}
