//! Which device holds which partition: the partitioner, fed with what passes show. Partitions that no device has room for stay with the host.

use crate::partitioner::{Error, Limits, Moving, Resource, Size, Strategy, Watch};
use std::cmp::Reverse;
use std::time::Duration;

/// Passes over quality of which the fastest is one observation: all that disturbs makes slower.
const WINDOW: u32 = 8;
/// Memories of a device below which a pass over them says more about the clock than about the device.
const LEAST_MEMORIES: u64 = 1 << 16;
/// Bytes of a mirror that is brought up below which that says nothing of how fast bytes move.
const LEAST_BYTES: u64 = 1 << 20;

/// What is known of a device.
#[derive(Debug)]
struct Known {
    resource: Resource,
    /// Passes of the window so far, and the highest throughput that one showed.
    seen: u32,
    fastest: u64,
}

/// Where every partition is. Pure: what is measured comes from outside.
#[derive(Debug)]
pub(super) struct Placement {
    strategy: Strategy,
    devices: Vec<Known>,
    /// Of the partitions that are not the host's; `None` before the first, and while no device may hold one.
    watch: Option<Watch>,
    /// By partition: whether no device has room for it. Such a partition counts nothing in the assignment.
    on_host: Vec<bool>,
    /// A device has a new throughput.
    observed: bool,
    /// Passes since partitions moved last: as many are expected to come.
    passes: u64,
    /// The fastest that bytes went to a device, a second.
    bytes_per_second: f64,
}

impl Placement {
    pub(super) fn new(strategy: Strategy, resources: Vec<Resource>) -> Self {
        let devices = resources.into_iter().map(|resource| Known { resource, seen: 0, fastest: 0 }).collect();
        Self { strategy, devices, watch: None, on_host: Vec::new(), observed: false, passes: 0, bytes_per_second: 0.0 }
    }

    /// The device that holds a partition; `None` = the host.
    pub(super) fn owner(&self, partition: usize) -> Option<usize> {
        let watch = self.watch.as_ref()?;
        // A partition that came since is nobody's yet.
        if self.on_host[partition] { None } else { watch.assignment().devices.get(partition).copied() }
    }

    /// A device is not to hold anything any more.
    pub(super) fn lost(&mut self, device: usize) {
        self.devices[device].resource.healthy = false;
    }

    /// A device has no more room than this.
    pub(super) fn full(&mut self, device: usize, bytes: u64) {
        let room = &mut self.devices[device].resource.free_bytes;
        *room = bytes.min(*room);
    }

    /// A pass was done; whether there is reason to look at the assignment.
    pub(super) fn passed(&mut self) -> bool {
        self.passes += 1;
        self.observed
    }

    /// A device took so long for a pass over the quality of so many memories.
    pub(super) fn measured(&mut self, device: usize, memories: u64, took: Duration) {
        let known = &mut self.devices[device];
        if memories < LEAST_MEMORIES {
            return;
        }
        // What a pass takes whatever its size apart, as far as that is known.
        let computed = took.saturating_sub(Duration::from_nanos(known.resource.latency_ns)).max(took / 16);
        let throughput = (memories as f64 / computed.as_secs_f64().max(1e-9)) as u64;
        known.fastest = known.fastest.max(throughput);
        known.seen += 1;
        if known.seen >= WINDOW {
            known.resource.throughput = Some(known.fastest);
            (known.seen, known.fastest) = (0, 0);
            self.observed = true;
        }
    }

    /// So many bytes went to a device in so long.
    pub(super) fn sent(&mut self, bytes: u64, took: Duration) {
        if bytes >= LEAST_BYTES {
            self.bytes_per_second = self.bytes_per_second.max(bytes as f64 / took.as_secs_f64().max(1e-9));
        }
    }

    /// Gives every partition its place, by the sizes that they have now; whether one has another place than before.
    pub(super) fn arrange(&mut self, sizes: &[Size]) -> bool {
        let before: Vec<Option<usize>> = (0..self.on_host.len()).map(|partition| self.owner(partition)).collect();
        self.on_host.resize(sizes.len(), false);
        let resources: Vec<Resource> = self.devices.iter().map(|known| known.resource).collect();
        self.take_back(&resources, sizes);
        self.leave_out(&resources, sizes);
        let moving = Moving { bytes_per_second: self.bytes_per_second, passes: self.passes as f64 };
        let observed = std::mem::take(&mut self.observed);
        loop {
            let counted: Vec<Size> = sizes
                .iter()
                .zip(&self.on_host)
                .map(|(size, &left)| if left { NOTHING } else { counted(*size) })
                .collect();
            let kept = match &mut self.watch {
                None => Watch::new(self.strategy, Limits::default(), &resources, &counted).map(|watch| {
                    self.watch = Some(watch);
                }),
                Some(watch) if observed => watch.observe(&resources, &counted, moving).map(drop),
                Some(watch) => watch.keep_up(&resources, &counted).map(drop),
            };
            match kept {
                Ok(()) => break,
                Err(Error::Full { partition, .. }) => self.on_host[partition] = true,
                Err(Error::NoDevice { .. }) => {
                    self.watch = None;
                    break;
                }
            }
        }
        let changed = (0..sizes.len()).any(|partition| before.get(partition).copied() != Some(self.owner(partition)));
        if changed {
            self.passes = 0;
        }
        changed
    }

    /// Partitions of the host for which there is room again, and some to spare: one that comes and goes is sent each time.
    fn take_back(&mut self, resources: &[Resource], sizes: &[Size]) {
        if self.watch.is_none() {
            return self.on_host.fill(false);
        }
        let mut room: Vec<u64> = resources.iter().map(|it| if it.healthy { it.free_bytes } else { 0 }).collect();
        for (partition, size) in sizes.iter().enumerate() {
            if let Some(device) = self.owner(partition) {
                room[device] = room[device].saturating_sub(size.bytes);
            }
        }
        for (partition, size) in sizes.iter().enumerate().filter(|(_, size)| size.bytes > 0) {
            let most = room.iter_mut().max().expect("a worker has a device");
            if self.on_host[partition] && size.bytes + size.bytes / 4 <= *most {
                *most -= size.bytes;
                self.on_host[partition] = false;
            }
        }
    }

    /// Partitions without a place for which no device has room, when all others stay where they are, stay with the host: to make room by moving others
    /// would send these for nothing.
    fn leave_out(&mut self, resources: &[Resource], sizes: &[Size]) {
        let mut room: Vec<u64> = resources.iter().map(|it| if it.healthy { it.free_bytes } else { 0 }).collect();
        let mut homeless = Vec::new();
        for (partition, size) in sizes.iter().enumerate().filter(|(partition, _)| !self.on_host[*partition]) {
            let holder = self.watch.as_ref().and_then(|watch| watch.assignment().devices.get(partition).copied());
            match holder.filter(|&device| resources[device].healthy && size.bytes <= room[device]) {
                Some(device) => room[device] -= size.bytes,
                None => homeless.push(partition),
            }
        }
        homeless.sort_by_key(|&partition| Reverse(sizes[partition].bytes));
        for partition in homeless {
            let most = room.iter_mut().max().expect("a worker has a device");
            match most.checked_sub(sizes[partition].bytes) {
                Some(rest) => *most = rest,
                None => self.on_host[partition] = true,
            }
        }
    }
}

const NOTHING: Size = Size { memories: 0, bytes: 0 };

/// A partition without a memory counts as one of one: partitions that are empty still spread over all devices.
fn counted(size: Size) -> Size {
    Size { memories: size.memories.max(1), ..size }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARTITION: Size = Size { memories: 100_000, bytes: 100 };

    fn resource(free_bytes: u64) -> Resource {
        Resource { throughput: Some(1_000_000_000), free_bytes, latency_ns: 10_000, healthy: true }
    }

    fn placement(free_bytes: &[u64]) -> Placement {
        Placement::new(Strategy::LatencyOptimized, free_bytes.iter().map(|&bytes| resource(bytes)).collect())
    }

    /// How many partitions each device has, and the host.
    fn counts(placement: &Placement, devices: usize) -> Vec<usize> {
        let owners = || (0..placement.on_host.len()).map(|partition| placement.owner(partition).unwrap_or(devices));
        (0..=devices).map(|device| owners().filter(|&owner| owner == device).count()).collect()
    }

    #[test]
    fn partitions_without_a_memory_spread_too_and_stay_when_they_fill() {
        let mut placement = placement(&[10_000, 10_000]);
        assert!(placement.arrange(&[NOTHING; 8]));
        assert_eq!(counts(&placement, 2), [4, 4, 0]);
        assert!(!placement.arrange(&[PARTITION; 8]));
    }

    #[test]
    fn what_no_device_has_room_for_is_the_hosts_until_there_is_room_to_spare() {
        let mut placement = placement(&[250, 350]);
        assert!(placement.arrange(&[PARTITION; 8]));
        assert_eq!(counts(&placement, 2), [2, 3, 3]);
        // It grows on: one more has to go. It shrinks, by less than it takes to come back, and by enough.
        let of = |bytes| [Size { bytes, ..PARTITION }; 8];
        assert!(placement.arrange(&of(120)));
        assert_eq!(counts(&placement, 2), [2, 2, 4]);
        assert!(!placement.arrange(&of(115)), "120 bytes of room for a partition of 115");
        assert!(placement.arrange(&of(60)));
        assert_eq!(counts(&placement, 2)[2], 0);
    }

    #[test]
    fn a_lost_device_leaves_its_partitions_to_those_with_room_and_the_host() {
        let mut placement = placement(&[400, 400, 100]);
        placement.arrange(&[PARTITION; 8]);
        assert_eq!(counts(&placement, 3), [4, 3, 1, 0]);
        let before: Vec<_> = (0..8).map(|partition| placement.owner(partition)).collect();
        placement.lost(0);
        assert!(placement.arrange(&[PARTITION; 8]));
        assert_eq!(counts(&placement, 3), [0, 4, 1, 3]);
        for (partition, before) in before.into_iter().enumerate().filter(|(_, owner)| *owner != Some(0)) {
            assert_eq!(placement.owner(partition), before, "nothing else moves");
        }
        placement.lost(1);
        placement.lost(2);
        assert!(placement.arrange(&[PARTITION; 8]));
        assert_eq!(counts(&placement, 3), [0, 0, 0, 8]);
        assert!(!placement.arrange(&[PARTITION; 8]));
    }

    #[test]
    fn a_device_that_becomes_slow_gives_partitions_away_once_that_is_believed_and_pays() {
        let sizes = [PARTITION; 16];
        // A pass over eight partitions takes 810 us; that of the second device soon three times as long.
        let observe = |placement: &mut Placement, second_us| {
            for _ in 0..WINDOW {
                placement.measured(0, 800_000, Duration::from_micros(810));
                placement.measured(1, 800_000, Duration::from_micros(second_us));
                placement.passed();
            }
            placement.passed() && placement.arrange(&sizes)
        };
        let mut placement = placement(&[10_000, 10_000]);
        placement.arrange(&sizes);
        assert_eq!(counts(&placement, 2), [8, 8, 0]);
        // How fast bytes move was never seen: nothing is moved for a guess.
        assert!(!(0..9).any(|_| observe(&mut placement, 2_410)));
        placement.sent(LEAST_BYTES, Duration::from_micros(100));
        let moved: Vec<bool> = (0..3).map(|_| observe(&mut placement, 2_410)).collect();
        assert_eq!(moved, [false, false, true]);
        assert_eq!(counts(&placement, 2), [12, 4, 0]);
        assert!(!(0..9).any(|_| observe(&mut placement, 2_410)), "it is as it was assigned by");
        // One slow pass of a window is noise, and small passes say nothing.
        let mut steady = self::placement(&[10_000, 10_000]);
        steady.arrange(&sizes);
        steady.sent(LEAST_BYTES, Duration::from_micros(100));
        for pass in 0..200 {
            steady.measured(0, 800_000, Duration::from_micros(if pass % 3 == 0 { 9_000 } else { 815 }));
            steady.measured(1, 800_000, Duration::from_micros(805));
            steady.measured(1, LEAST_MEMORIES - 1, Duration::from_secs(1));
            assert!(!(steady.passed() && steady.arrange(&sizes)));
        }
    }
}
