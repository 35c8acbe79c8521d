//! Decides when to reassign partitions: after failures and recoveries, or when throughputs have drifted.

use super::{Assignment, Error, Resource, Size, Strategy, assign, measured, repair};

/// Thresholds for moving partitions between working devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Deviation of a throughput from the assigned one that counts as drift, in percent. Lower: noise looks like drift.
    pub drifts_beyond_percent: u64,
    /// Deviation within which a throughput counts as settled, in percent. Between the two limits the count is unchanged, so that a throughput at a
    /// limit does not toggle.
    pub settled_within_percent: u64,
    /// Observations of drift, none of them settled in between, before it counts. Lower: one slow pass moves partitions.
    pub observations: u32,
    /// Gain in percent of the cost of moving that a move must exceed: above 100, since both are estimates and a wrong move is reverted.
    pub gain_over_cost_percent: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { drifts_beyond_percent: 20, settled_within_percent: 10, observations: 3, gain_over_cost_percent: 150 }
    }
}

/// Estimated cost and horizon of a move.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MoveEstimate {
    /// Measured transfer rate between devices.
    pub bytes_per_second: f64,
    /// Passes expected under the new assignment.
    pub passes: f64,
}

/// Cause of a reassignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// A device with partitions is no longer healthy.
    Failed {
        /// Index of the device.
        device: usize,
    },
    /// An unused device became healthy, or was measured for the first time.
    Returned {
        /// Index of the device.
        device: usize,
    },
    /// The number of partitions changed.
    Partitions,
    /// Partitions of a device exceed its free memory.
    Full {
        /// Index of the device.
        device: usize,
    },
    /// The number of memories doubled or halved since the assignment.
    Resized,
    /// The throughput of a device differs from the one of the assignment.
    Drifted {
        /// Index of the device.
        device: usize,
    },
}

/// Result of an observation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// Keep the assignment.
    Keep,
    /// Move partitions: [`Rebalancer::assignment`] has changed.
    Reassigned(Cause),
}

/// Holds an assignment, and replaces it when necessary or worthwhile. Pure: measurements are passed in.
#[derive(Debug, Clone)]
pub struct Rebalancer {
    strategy: Strategy,
    limits: Limits,
    assignment: Assignment,
    /// Resources at the time of the assignment.
    assigned_by: Vec<Resource>,
    /// Memories of all partitions at that time.
    assigned_for: u64,
    /// By device: observations of drift since the last settled one.
    beyond: Vec<u32>,
}

impl Rebalancer {
    /// Creates the first assignment.
    ///
    /// # Errors
    /// As [`assign`].
    pub fn new(strategy: Strategy, limits: Limits, resources: &[Resource], sizes: &[Size]) -> Result<Self, Error> {
        let assignment = assign(strategy, resources, sizes)?;
        let (assigned_by, beyond) = (resources.to_vec(), vec![0; resources.len()]);
        Ok(Self { strategy, limits, assignment, assigned_by, assigned_for: memories(sizes), beyond })
    }

    /// Returns the current assignment.
    pub const fn assignment(&self) -> &Assignment {
        &self.assignment
    }

    /// Assigns only partitions without a healthy device that has memory for them, immediately; ignores throughputs.
    ///
    /// # Errors
    /// As [`assign`], if displaced partitions do not fit. The assignment stays.
    pub fn place_unassigned(&mut self, resources: &[Resource], sizes: &[Size]) -> Result<Decision, Error> {
        let Some(cause) = self.displacement_cause(resources, sizes) else { return Ok(Decision::Keep) };
        let assignment = repair(self.strategy, resources, sizes, &self.assignment.devices)?;
        self.adopt(assignment, resources, sizes);
        Ok(Decision::Reassigned(cause))
    }

    /// Processes the latest measurements of the same devices, in the same order.
    ///
    /// Partitions of a failed device, those that no longer fit, and new ones are assigned immediately, and nothing else moves
    /// ([`Rebalancer::place_unassigned`]). Otherwise partitions move only if the time saved over the expected passes exceeds the time of the move
    /// ([`Limits::gain_over_cost_percent`]).
    ///
    /// # Errors
    /// As [`Rebalancer::place_unassigned`].
    pub fn observe(&mut self, resources: &[Resource], sizes: &[Size], moving: MoveEstimate) -> Result<Decision, Error> {
        let needed = self.place_unassigned(resources, sizes)?;
        if needed != Decision::Keep {
            return Ok(needed);
        }
        let (now, then) = (memories(sizes), self.assigned_for);
        let resized = (now >= then.saturating_mul(2) || now <= then / 2).then_some(Cause::Resized);
        let Some(cause) = self.cause(resources).or(resized) else { return Ok(Decision::Keep) };
        // A new assignment of everything may fail although the current one fits.
        let Ok(other) = assign(self.strategy, resources, sizes) else { return Ok(Decision::Keep) };
        if !self.pays_off(&other, resources, sizes, moving) {
            // Restart the count: otherwise the next observation would repeat the decision.
            self.beyond.fill(0);
            self.assigned_for = now;
            return Ok(Decision::Keep);
        }
        self.adopt(other, resources, sizes);
        Ok(Decision::Reassigned(cause))
    }

    /// Returns why some partitions have no valid device.
    fn displacement_cause(&self, resources: &[Resource], sizes: &[Size]) -> Option<Cause> {
        let devices = &self.assignment.devices;
        let fails = |device: &usize| resources.get(*device).is_none_or(|it| !it.healthy);
        if let Some(&device) = devices.iter().find(|&device| fails(device)) {
            return Some(Cause::Failed { device });
        }
        if devices.len() != sizes.len() {
            return Some(Cause::Partitions);
        }
        let mut left: Vec<u128> = resources.iter().map(|it| u128::from(it.free_bytes)).collect();
        devices.iter().zip(sizes).find_map(|(&device, size)| match left[device].checked_sub(u128::from(size.bytes)) {
            Some(rest) => {
                left[device] = rest;
                None
            }
            None => Some(Cause::Full { device }),
        })
    }

    fn adopt(&mut self, assignment: Assignment, resources: &[Resource], sizes: &[Size]) {
        self.assignment = assignment;
        self.assigned_by = resources.to_vec();
        self.assigned_for = memories(sizes);
        self.beyond = vec![0; resources.len()];
    }

    /// Returns the first device for which another assignment may be better.
    fn cause(&mut self, resources: &[Resource]) -> Option<Cause> {
        self.beyond.resize(resources.len(), 0);
        let mut cause = None;
        for (device, now) in resources.iter().enumerate().filter(|(_, now)| now.healthy) {
            let before = self.assigned_by.get(device).filter(|before| before.healthy);
            let (Some(Resource { throughput: Some(before), .. }), Some(now)) = (before, now.throughput) else {
                // The device recovered, or is measured for the first time.
                if now.throughput.is_some() {
                    cause = cause.or(Some(Cause::Returned { device }));
                }
                continue;
            };
            let percent = u128::from(now.abs_diff(*before)) * 100;
            let is_within = |limit: u64| percent <= u128::from(limit) * u128::from(*before);
            if !is_within(self.limits.drifts_beyond_percent) {
                self.beyond[device] += 1;
            } else if is_within(self.limits.settled_within_percent) {
                self.beyond[device] = 0;
            }
            if self.beyond[device] >= self.limits.observations {
                cause = cause.or(Some(Cause::Drifted { device }));
            }
        }
        cause
    }

    /// Returns whether moving to `other` pays off; requires measurements of every device.
    fn pays_off(&self, other: &Assignment, resources: &[Resource], sizes: &[Size], moving: MoveEstimate) -> bool {
        if !measured(resources) {
            return false;
        }
        let seconds = |devices: &[usize]| {
            let by_time = Assignment { strategy: Strategy::LatencyOptimized, devices: devices.to_vec() };
            by_time.cost(resources, sizes)
        };
        let gain = (seconds(&self.assignment.devices) - seconds(&other.devices)) * moving.passes;
        let moved = self.assignment.devices.iter().zip(&other.devices).zip(sizes).filter(|((from, to), _)| from != to);
        let bytes: f64 = moved.map(|(_, size)| size.bytes as f64).sum();
        gain * 100.0 > f64::from(self.limits.gain_over_cost_percent) * bytes / moving.bytes_per_second
    }
}

/// Returns the memories of all partitions.
fn memories(sizes: &[Size]) -> u64 {
    sizes.iter().map(|size| size.memories).fold(0, u64::saturating_add)
}
