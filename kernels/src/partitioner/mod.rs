//! Which device holds which partition, when a worker has several.
//!
//! [`assign`] is a pure function of what was measured of each device and of the sizes of the partitions. A partition is indivisible and lies
//! on one device; a pass is a batch over all partitions of a device, so that a pass over all devices takes as long as the last of them. On
//! every device the results are the same bits: an assignment never shows in the data.
//!
//! Each [`Strategy`] makes the greatest cost of a device as small as it can, and they differ in the cost alone. With w(p) the memories of
//! partition p, b(p) its bytes, and s, a, f the throughput, latency and free memory of device d, a device with partitions P costs
//!
//! | strategy | cost |
//! | --- | --- |
//! | [`Balanced`](Strategy::Balanced) | sum of w(p) |
//! | [`CapabilityAware`](Strategy::CapabilityAware) | sum of w(p) / s |
//! | [`MemoryAware`](Strategy::MemoryAware) | sum of b(p) / f |
//! | [`LatencyOptimized`](Strategy::LatencyOptimized) | a + sum of w(p) / s, 0 without a partition |
//!
//! under two constraints that hold for all: the partitions of a device fit in its free memory, and an unhealthy device has none.
//!
//! This is scheduling on uniform machines, Q || C_max (with latencies: with the times from which machines are available), which is
//! NP-hard. The answer is that of LPT: partitions from the largest on, each to the device that would finish it first (Graham 1969; on m
//! equal devices at most 4/3 - 1/(3m) times the optimum, on m unequal ones at most 2 - 2/(m + 1) times: Gonzalez, Ibarra, Sahni 1977).
//! Then moves and exchanges of two partitions, while they help the device that costs most, within a budget of comparisons. Partitions of
//! one size are assigned optimally. Costs are compared as fractions of integers, and ties go to the device named first: the same
//! assignment everywhere.

mod search;
mod watch;

pub use watch::{Cause, Limits, Moving, Verdict, Watch};

use search::Rates;

/// What a partitioner knows of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resource {
    /// Memories that a pass gets through in a second, as measured; `None` before anything was.
    pub throughput: Option<u64>,
    /// Bytes that partitions may take, what stays in reserve left out.
    pub free_bytes: u64,
    /// From the call of a pass to its first memory, and from its last to the answer: queue, launch, transfer. Nanoseconds.
    pub latency_ns: u64,
    /// Whether it may hold partitions at all.
    pub healthy: bool,
}

/// What a partitioner knows of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Memories: what a pass reads.
    pub memories: u64,
    /// Bytes on a device.
    pub bytes: u64,
}

/// What shall be as small as possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// The most memories of a device, however fast it is.
    Balanced,
    /// The longest time that a device computes. [`Strategy::Balanced`] while a healthy device is unmeasured or measured as 0: a
    /// guess beside measurements would be worse than none.
    CapabilityAware,
    /// The largest share of a device's free memory that is taken: every partition has the most room to grow before one must move.
    MemoryAware,
    /// The time from the call of a pass to the last device's answer: [`Strategy::CapabilityAware`] with what each device adds to every
    /// pass. A device whose latency is longer than all the work of the others gets nothing.
    LatencyOptimized,
}

impl Strategy {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Balanced, Self::CapabilityAware, Self::MemoryAware, Self::LatencyOptimized];
}

/// Why there is no assignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Partitions, and no device that may hold one.
    #[error("no device is healthy: {partitions} partitions have no place")]
    NoDevice {
        /// How many partitions there are.
        partitions: usize,
    },
    /// No device has room left for a partition.
    #[error("partition {partition} of {bytes} bytes fits on no device: {missing_bytes} bytes more are needed on one")]
    Full {
        /// The first that found no room, as its index.
        partition: usize,
        /// Its size.
        bytes: u64,
        /// By how much the device with the most room left is too small.
        missing_bytes: u64,
    },
}

/// The device of every partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    /// What was made small: another than was asked for only where that one needs measurements that are not there.
    pub strategy: Strategy,
    /// By the index of the partition: the index of its device.
    pub devices: Vec<usize>,
}

impl Assignment {
    /// The largest cost of a device, in the unit of the strategy: memories, seconds or a share of the free memory.
    pub fn cost(&self, resources: &[Resource], sizes: &[Size]) -> f64 {
        let rates = Rates::of(self.strategy, resources);
        let loads = rates.loads(&self.devices, sizes);
        loads.iter().map(|&load| rates.units(load)).fold(0.0, f64::max)
    }
}

/// Assigns every partition to a device.
///
/// Takes some hundred microseconds for a thousand partitions; `cargo xtask bench device` measures it.
///
/// ```
/// use engram_kernels::partitioner::{Resource, Size, Strategy, assign};
///
/// // Three devices with 3, 1 and 5 memories a second, and 1, 0 and 4 seconds before the first; room for 40, 100 and 25.
/// let device = |throughput, seconds: u64, free_bytes| Resource {
///     throughput: Some(throughput), latency_ns: seconds * 1_000_000_000, free_bytes, healthy: true,
/// };
/// let devices = [device(3, 1, 40), device(1, 0, 100), device(5, 4, 25)];
/// let assignment = assign(Strategy::LatencyOptimized, &devices, &[Size { memories: 1, bytes: 1 }; 60])?;
/// let of = |device| assignment.devices.iter().filter(|&&other| other == device).count();
/// assert_eq!([of(0), of(1), of(2)], [26, 9, 25]);
/// assert!((assignment.cost(&devices, &[Size { memories: 1, bytes: 1 }; 60]) - 9.6667).abs() < 1e-4);
/// # Ok::<(), engram_kernels::partitioner::Error>(())
/// ```
///
/// # Errors
/// [`Error::NoDevice`], [`Error::Full`]. Whether indivisible partitions fit is itself NP-hard: with partitions of several sizes and devices full
/// to the last one, room may be missed that a complete search would find.
pub fn assign(strategy: Strategy, resources: &[Resource], sizes: &[Size]) -> Result<Assignment, Error> {
    let strategy = usable(strategy, resources, sizes)?;
    let rates = Rates::of(strategy, resources);
    Ok(Assignment { strategy, devices: search::best(&rates, resources, sizes)? })
}

/// Assigns what `current` (by the index of the partition) leaves without a healthy device that has room for it: after a failure, or when there
/// are new partitions. All else stays where it is, unless that would leave no room.
///
/// # Errors
/// As [`assign`].
pub fn repair(
    strategy: Strategy,
    resources: &[Resource],
    sizes: &[Size],
    current: &[usize],
) -> Result<Assignment, Error> {
    let strategy = usable(strategy, resources, sizes)?;
    match search::best_beside(&Rates::of(strategy, resources), resources, sizes, current) {
        Some(devices) => Ok(Assignment { strategy, devices }),
        None => assign(strategy, resources, sizes),
    }
}

/// The strategy, or what stands in for it without measurements.
fn usable(strategy: Strategy, resources: &[Resource], sizes: &[Size]) -> Result<Strategy, Error> {
    if !sizes.is_empty() && !resources.iter().any(|resource| resource.healthy) {
        return Err(Error::NoDevice { partitions: sizes.len() });
    }
    Ok(match strategy {
        Strategy::CapabilityAware | Strategy::LatencyOptimized if !measured(resources) => Strategy::Balanced,
        strategy => strategy,
    })
}

/// Whether every healthy device has a throughput.
fn measured(resources: &[Resource]) -> bool {
    resources.iter().filter(|it| it.healthy).all(|it| it.throughput.is_some_and(|rate| rate > 0))
}

#[cfg(test)]
mod tests;
