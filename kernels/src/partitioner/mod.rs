//! Assignment of partitions to the devices of a worker.
//!
//! [`assign`] is a pure function of the measurements of each device and the sizes of the partitions. A partition is indivisible and lies on one
//! device; a pass is a batch over all partitions of a device, so a pass over all devices takes as long as the slowest one. Every device computes
//! identical bits: an assignment never affects results.
//!
//! Each [`Strategy`] minimizes the maximum cost of a device; strategies differ in the cost only. With w(p) the memories of
//! partition p, b(p) its bytes, and s, a, f the throughput, latency and free memory of device d, a device with partitions P costs
//!
//! | strategy | cost |
//! | --- | --- |
//! | [`Balanced`](Strategy::Balanced) | sum of w(p) |
//! | [`CapabilityAware`](Strategy::CapabilityAware) | sum of w(p) / s |
//! | [`MemoryAware`](Strategy::MemoryAware) | sum of b(p) / f |
//! | [`LatencyOptimized`](Strategy::LatencyOptimized) | a + sum of w(p) / s, 0 without a partition |
//!
//! under two constraints: the partitions of a device fit in its free memory, and an unhealthy device has none.
//!
//! This is scheduling on uniform machines, Q || C_max (with latencies: with the times from which machines are available), which is
//! NP-hard. The algorithm is LPT: partitions in descending size, each to the device that would finish it first (Graham 1969; on m
//! equal devices at most 4/3 - 1/(3m) times the optimum, on m unequal ones at most 2 - 2/(m + 1) times: Gonzalez, Ibarra, Sahni 1977).
//! Moves and exchanges of two partitions follow while they reduce the maximum cost, within a budget of comparisons. Partitions of
//! equal size are assigned optimally. Costs are compared as fractions of integers, and ties go to the first device, so assignments are
//! deterministic.

mod rebalancer;
mod search;

pub use rebalancer::{Cause, Decision, Limits, MoveEstimate, Rebalancer};

use search::Rates;

/// Measurements of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resource {
    /// Measured throughput in memories per second; `None` before the first measurement.
    pub throughput: Option<u64>,
    /// Bytes available for partitions, without the reserve.
    pub free_bytes: u64,
    /// Fixed time of a pass in nanoseconds: queue, launch, transfer.
    pub latency_ns: u64,
    /// Whether it may hold partitions.
    pub healthy: bool,
}

/// Size of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Memories that a pass reads.
    pub memories: u64,
    /// Bytes on a device.
    pub bytes: u64,
}

/// Cost to minimize.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// The maximum number of memories of a device, regardless of its speed.
    Balanced,
    /// The maximum computing time of a device. Falls back to [`Strategy::Balanced`] while a healthy device has no measurement or one of 0: mixing
    /// guesses with measurements would be worse.
    CapabilityAware,
    /// The maximum used share of a device's free memory: maximizes the growth of partitions before one must move.
    MemoryAware,
    /// The time from the call of a pass to the last device's result: [`Strategy::CapabilityAware`] plus the fixed time of each device. A device
    /// whose latency exceeds the work of all others gets no partitions.
    LatencyOptimized,
}

impl Strategy {
    /// All strategies.
    pub const ALL: [Self; 4] = [Self::Balanced, Self::CapabilityAware, Self::MemoryAware, Self::LatencyOptimized];
}

/// Reason why there is no assignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// There are partitions but no healthy device.
    #[error("no device is healthy: {partitions} partitions cannot be assigned")]
    NoDevice {
        /// Number of partitions.
        partitions: usize,
    },
    /// A partition fits on no device.
    #[error("partition {partition} of {bytes} bytes fits on no device: {missing_bytes} more bytes are needed")]
    Full {
        /// Index of the first partition that does not fit.
        partition: usize,
        /// Its size.
        bytes: u64,
        /// Bytes that the device with the most free memory lacks.
        missing_bytes: u64,
    },
}

/// The assignment of every partition to a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    /// Strategy used: differs from the requested one only where that one lacks measurements.
    pub strategy: Strategy,
    /// By the index of the partition: the index of its device.
    pub devices: Vec<usize>,
}

impl Assignment {
    /// Returns the maximum cost of a device in the unit of the strategy: memories, seconds or a share of the free memory.
    pub fn cost(&self, resources: &[Resource], sizes: &[Size]) -> f64 {
        let rates = Rates::of(self.strategy, resources);
        let loads = rates.loads(&self.devices, sizes);
        loads.iter().map(|&load| rates.units(load)).fold(0.0, f64::max)
    }
}

/// Assigns every partition to a device.
///
/// Takes some hundred microseconds for a thousand partitions (`cargo xtask bench devices`).
///
/// ```
/// use engram_kernels::partitioner::{Resource, Size, Strategy, assign};
///
/// // Three devices with 3, 1 and 5 memories a second, latencies of 1, 0 and 4 seconds, and memory for 40, 100 and 25 bytes.
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
/// [`Error::NoDevice`], [`Error::Full`]. Packing indivisible partitions is NP-hard: with several sizes and nearly full devices, the search may
/// miss a packing that an exhaustive search would find.
pub fn assign(strategy: Strategy, resources: &[Resource], sizes: &[Size]) -> Result<Assignment, Error> {
    let strategy = usable(strategy, resources, sizes)?;
    let rates = Rates::of(strategy, resources);
    Ok(Assignment { strategy, devices: search::best(&rates, resources, sizes)? })
}

/// Assigns partitions whose device in `current` (by the index of the partition) is unhealthy, full or missing. All others stay where they are,
/// unless that leaves too little memory.
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
    match search::best_with_fixed(&Rates::of(strategy, resources), resources, sizes, current) {
        Some(devices) => Ok(Assignment { strategy, devices }),
        None => assign(strategy, resources, sizes),
    }
}

/// Returns the strategy, or its fallback without measurements.
fn usable(strategy: Strategy, resources: &[Resource], sizes: &[Size]) -> Result<Strategy, Error> {
    if !sizes.is_empty() && !resources.iter().any(|resource| resource.healthy) {
        return Err(Error::NoDevice { partitions: sizes.len() });
    }
    Ok(match strategy {
        Strategy::CapabilityAware | Strategy::LatencyOptimized if !measured(resources) => Strategy::Balanced,
        strategy => strategy,
    })
}

/// Returns whether every healthy device has a throughput.
fn measured(resources: &[Resource]) -> bool {
    resources.iter().filter(|it| it.healthy).all(|it| it.throughput.is_some_and(|rate| rate > 0))
}

#[cfg(test)]
mod tests;
