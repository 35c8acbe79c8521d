//! Placement of partitions on devices, from measurements of passes. Partitions that fit on no device stay on the host.

use crate::partitioner::{Error, Limits, MoveEstimate, Rebalancer, Resource, Size, Strategy};
use std::cmp::Reverse;
use std::time::Duration;

/// Quality passes per observation; the fastest counts, since disturbances only slow passes down.
const WINDOW: u32 = 8;
/// Minimum memories of a measured pass: shorter passes measure the clock rather than the device.
const MIN_MEMORIES: u64 = 1 << 16;
/// Minimum bytes of a measured transfer.
const MIN_BYTES: u64 = 1 << 20;

/// Measurements of a device.
#[derive(Debug)]
struct DeviceObservation {
    resource: Resource,
    /// Passes in the current window, and the highest throughput among them.
    passes: u32,
    fastest: u64,
}

/// The assignment of partitions. Pure: measurements are passed in.
#[derive(Debug)]
pub(super) struct Placement {
    strategy: Strategy,
    devices: Vec<DeviceObservation>,
    /// Rebalancer for partitions that are not on the host; `None` before the first assignment, and while no device is usable.
    rebalancer: Option<Rebalancer>,
    /// By partition: whether it fits on no device. Such partitions count as empty in the assignment.
    on_host: Vec<bool>,
    /// Whether a device has a new throughput.
    observed: bool,
    /// Passes since the last move; as many are expected to follow.
    passes: u64,
    /// Highest measured transfer rate to a device.
    bytes_per_second: f64,
}

impl Placement {
    pub(super) fn new(strategy: Strategy, resources: Vec<Resource>) -> Self {
        let devices =
            resources.into_iter().map(|resource| DeviceObservation { resource, passes: 0, fastest: 0 }).collect();
        Self {
            strategy,
            devices,
            rebalancer: None,
            on_host: Vec::new(),
            observed: false,
            passes: 0,
            bytes_per_second: 0.0,
        }
    }

    /// Returns the device of a partition; `None` = the host.
    pub(super) fn owner(&self, partition: usize) -> Option<usize> {
        let rebalancer = self.rebalancer.as_ref()?;
        // A new partition has no device yet.
        if self.on_host[partition] { None } else { rebalancer.assignment().devices.get(partition).copied() }
    }

    /// Marks a device as lost.
    pub(super) fn mark_lost(&mut self, device: usize) {
        self.devices[device].resource.healthy = false;
    }

    /// Limits a device to this many bytes.
    pub(super) fn mark_full(&mut self, device: usize, bytes: u64) {
        let free_bytes = &mut self.devices[device].resource.free_bytes;
        *free_bytes = bytes.min(*free_bytes);
    }

    /// Counts a pass; returns whether to review the assignment.
    pub(super) fn finish_pass(&mut self) -> bool {
        self.passes += 1;
        self.observed
    }

    /// Records the duration of a quality pass on a device.
    pub(super) fn record_pass(&mut self, device: usize, memories: u64, elapsed: Duration) {
        let device = &mut self.devices[device];
        if memories < MIN_MEMORIES {
            return;
        }
        // Without the fixed cost of a pass, as far as it is known.
        let computed = elapsed.saturating_sub(Duration::from_nanos(device.resource.latency_ns)).max(elapsed / 16);
        let throughput = (memories as f64 / computed.as_secs_f64().max(1e-9)) as u64;
        device.fastest = device.fastest.max(throughput);
        device.passes += 1;
        if device.passes >= WINDOW {
            device.resource.throughput = Some(device.fastest);
            (device.passes, device.fastest) = (0, 0);
            self.observed = true;
        }
    }

    /// Records the duration of a transfer to a device.
    pub(super) fn record_transfer(&mut self, bytes: u64, elapsed: Duration) {
        if bytes >= MIN_BYTES {
            self.bytes_per_second = self.bytes_per_second.max(bytes as f64 / elapsed.as_secs_f64().max(1e-9));
        }
    }

    /// Assigns every partition by current sizes; returns whether any assignment changed.
    pub(super) fn arrange(&mut self, sizes: &[Size]) -> bool {
        let before: Vec<Option<usize>> = (0..self.on_host.len()).map(|partition| self.owner(partition)).collect();
        self.on_host.resize(sizes.len(), false);
        let resources: Vec<Resource> = self.devices.iter().map(|device| device.resource).collect();
        self.readmit_host_partitions(&resources, sizes);
        self.assign_to_host(&resources, sizes);
        let moving = MoveEstimate { bytes_per_second: self.bytes_per_second, passes: self.passes as f64 };
        let observed = std::mem::take(&mut self.observed);
        loop {
            let counted: Vec<Size> = sizes
                .iter()
                .zip(&self.on_host)
                .map(|(size, &left)| if left { NOTHING } else { counted(*size) })
                .collect();
            let result = match &mut self.rebalancer {
                None => Rebalancer::new(self.strategy, Limits::default(), &resources, &counted).map(|rebalancer| {
                    self.rebalancer = Some(rebalancer);
                }),
                Some(rebalancer) if observed => rebalancer.observe(&resources, &counted, moving).map(drop),
                Some(rebalancer) => rebalancer.place_unassigned(&resources, &counted).map(drop),
            };
            match result {
                Ok(()) => break,
                Err(Error::Full { partition, .. }) => self.on_host[partition] = true,
                Err(Error::NoDevice { .. }) => {
                    self.rebalancer = None;
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

    /// Readmits partitions of the host that fit on a device again with a margin, which prevents repeated transfers.
    fn readmit_host_partitions(&mut self, resources: &[Resource], sizes: &[Size]) {
        if self.rebalancer.is_none() {
            return self.on_host.fill(false);
        }
        let mut free_bytes: Vec<u64> = resources.iter().map(|it| if it.healthy { it.free_bytes } else { 0 }).collect();
        for (partition, size) in sizes.iter().enumerate() {
            if let Some(device) = self.owner(partition) {
                free_bytes[device] = free_bytes[device].saturating_sub(size.bytes);
            }
        }
        for (partition, size) in sizes.iter().enumerate().filter(|(_, size)| size.bytes > 0) {
            let most = free_bytes.iter_mut().max().expect("there is at least one device");
            if self.on_host[partition] && size.bytes + size.bytes / 4 <= *most {
                *most -= size.bytes;
                self.on_host[partition] = false;
            }
        }
    }

    /// Leaves unplaced partitions on the host that fit on no device while all others stay: moving others to free memory would cost more transfers.
    fn assign_to_host(&mut self, resources: &[Resource], sizes: &[Size]) {
        let mut free_bytes: Vec<u64> = resources.iter().map(|it| if it.healthy { it.free_bytes } else { 0 }).collect();
        let mut unplaced = Vec::new();
        for (partition, size) in sizes.iter().enumerate().filter(|(partition, _)| !self.on_host[*partition]) {
            let holder =
                self.rebalancer.as_ref().and_then(|rebalancer| rebalancer.assignment().devices.get(partition).copied());
            match holder.filter(|&device| resources[device].healthy && size.bytes <= free_bytes[device]) {
                Some(device) => free_bytes[device] -= size.bytes,
                None => unplaced.push(partition),
            }
        }
        unplaced.sort_by_key(|&partition| Reverse(sizes[partition].bytes));
        for partition in unplaced {
            let most = free_bytes.iter_mut().max().expect("there is at least one device");
            match most.checked_sub(sizes[partition].bytes) {
                Some(rest) => *most = rest,
                None => self.on_host[partition] = true,
            }
        }
    }
}

const NOTHING: Size = Size { memories: 0, bytes: 0 };

/// Counts an empty partition as one memory, so that empty partitions spread over all devices.
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

    /// Counts the partitions of each device, and of the host.
    fn counts(placement: &Placement, devices: usize) -> Vec<usize> {
        let owners = || (0..placement.on_host.len()).map(|partition| placement.owner(partition).unwrap_or(devices));
        (0..=devices).map(|device| owners().filter(|&owner| owner == device).count()).collect()
    }

    #[test]
    fn empty_partitions_spread_and_stay_when_they_fill() {
        let mut placement = placement(&[10_000, 10_000]);
        assert!(placement.arrange(&[NOTHING; 8]));
        assert_eq!(counts(&placement, 2), [4, 4, 0]);
        assert!(!placement.arrange(&[PARTITION; 8]));
    }

    #[test]
    fn partition_stays_on_host_until_a_device_has_memory_to_spare() {
        let mut placement = placement(&[250, 350]);
        assert!(placement.arrange(&[PARTITION; 8]));
        assert_eq!(counts(&placement, 2), [2, 3, 3]);
        // Growth displaces one more; a small shrink keeps it on the host, a large one readmits it.
        let of = |bytes| [Size { bytes, ..PARTITION }; 8];
        assert!(placement.arrange(&of(120)));
        assert_eq!(counts(&placement, 2), [2, 2, 4]);
        assert!(!placement.arrange(&of(115)), "120 free bytes for a partition of 115");
        assert!(placement.arrange(&of(60)));
        assert_eq!(counts(&placement, 2)[2], 0);
    }

    #[test]
    fn partitions_of_a_lost_device_move_to_other_devices_and_the_host() {
        let mut placement = placement(&[400, 400, 100]);
        placement.arrange(&[PARTITION; 8]);
        assert_eq!(counts(&placement, 3), [4, 3, 1, 0]);
        let before: Vec<_> = (0..8).map(|partition| placement.owner(partition)).collect();
        placement.mark_lost(0);
        assert!(placement.arrange(&[PARTITION; 8]));
        assert_eq!(counts(&placement, 3), [0, 4, 1, 3]);
        for (partition, before) in before.into_iter().enumerate().filter(|(_, owner)| *owner != Some(0)) {
            assert_eq!(placement.owner(partition), before, "nothing else moves");
        }
        placement.mark_lost(1);
        placement.mark_lost(2);
        assert!(placement.arrange(&[PARTITION; 8]));
        assert_eq!(counts(&placement, 3), [0, 0, 0, 8]);
        assert!(!placement.arrange(&[PARTITION; 8]));
    }

    #[test]
    fn slow_device_loses_partitions_once_confirmed_and_worthwhile() {
        let sizes = [PARTITION; 16];
        // A pass over eight partitions takes 810 us; later three times as long on the second device.
        let observe = |placement: &mut Placement, second_us| {
            for _ in 0..WINDOW {
                placement.record_pass(0, 800_000, Duration::from_micros(810));
                placement.record_pass(1, 800_000, Duration::from_micros(second_us));
                placement.finish_pass();
            }
            placement.finish_pass() && placement.arrange(&sizes)
        };
        let mut placement = placement(&[10_000, 10_000]);
        placement.arrange(&sizes);
        assert_eq!(counts(&placement, 2), [8, 8, 0]);
        // Without a measured transfer rate nothing moves.
        assert!(!(0..9).any(|_| observe(&mut placement, 2_410)));
        placement.record_transfer(MIN_BYTES, Duration::from_micros(100));
        let moved: Vec<bool> = (0..3).map(|_| observe(&mut placement, 2_410)).collect();
        assert_eq!(moved, [false, false, true]);
        assert_eq!(counts(&placement, 2), [12, 4, 0]);
        assert!(!(0..9).any(|_| observe(&mut placement, 2_410)), "throughput equals the one of the assignment");
        // One slow pass in a window is noise, and small passes are ignored.
        let mut steady = self::placement(&[10_000, 10_000]);
        steady.arrange(&sizes);
        steady.record_transfer(MIN_BYTES, Duration::from_micros(100));
        for pass in 0..200 {
            steady.record_pass(0, 800_000, Duration::from_micros(if pass % 3 == 0 { 9_000 } else { 815 }));
            steady.record_pass(1, 800_000, Duration::from_micros(805));
            steady.record_pass(1, MIN_MEMORIES - 1, Duration::from_secs(1));
            assert!(!(steady.finish_pass() && steady.arrange(&sizes)));
        }
    }
}
