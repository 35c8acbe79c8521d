//! When to assign anew: a device failed or came back, or throughputs are no longer those that the assignment was made for.

use super::{Assignment, Error, Resource, Size, Strategy, assign, measured, repair};

/// What it takes to move partitions between devices that work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Percent by which a throughput must differ from the one that was assigned by. Lower: noise looks like drift.
    pub drifts_beyond_percent: u64,
    /// Percent within which it is back: what lies between says neither, so that a throughput at the limit does not count as coming and going.
    pub settled_within_percent: u64,
    /// Observations beyond the limit before it is believed, none of them settled between. Lower: one slow pass moves partitions.
    pub observations: u32,
    /// Percent of the cost of moving that the gain must exceed: above 100, since both are estimates, and what was moved for nothing is moved back.
    pub gain_over_cost_percent: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { drifts_beyond_percent: 20, settled_within_percent: 10, observations: 3, gain_over_cost_percent: 150 }
    }
}

/// What moving costs and how long there is something to gain.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Moving {
    /// Bytes of partitions that go from one device to another in a second, as measured.
    pub bytes_per_second: f64,
    /// Passes that the new assignment will last for.
    pub passes: f64,
}

/// Why to assign anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// A device with partitions may hold none any more.
    Failed {
        /// Its index.
        device: usize,
    },
    /// A device without a part in the assignment is healthy, or is measured for the first time.
    Returned {
        /// Its index.
        device: usize,
    },
    /// There are other partitions than before.
    Partitions,
    /// Partitions of a device grew beyond its free memory, or that became less.
    Full {
        /// Its index.
        device: usize,
    },
    /// There are twice as many memories as were assigned, or half as many.
    Resized,
    /// A throughput is another than assigned by.
    Drifted {
        /// Its index.
        device: usize,
    },
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Keep,
    /// Move partitions: [`Watch::assignment`] is a new one.
    Reassigned(Cause),
}

/// Holds an assignment, and replaces it when that is needed or worth it. Pure: what is measured comes from outside.
#[derive(Debug, Clone)]
pub struct Watch {
    strategy: Strategy,
    limits: Limits,
    assignment: Assignment,
    /// What it was made by.
    assigned_by: Vec<Resource>,
    /// Memories of all partitions then.
    assigned_for: u64,
    /// By device: observations beyond the limit since the last settled one.
    beyond: Vec<u32>,
}

impl Watch {
    /// Assigns for the first time.
    ///
    /// # Errors
    /// As [`assign`].
    pub fn new(strategy: Strategy, limits: Limits, resources: &[Resource], sizes: &[Size]) -> Result<Self, Error> {
        let assignment = assign(strategy, resources, sizes)?;
        let (assigned_by, beyond) = (resources.to_vec(), vec![0; resources.len()]);
        Ok(Self { strategy, limits, assignment, assigned_by, assigned_for: memories(sizes), beyond })
    }

    /// The assignment that holds.
    pub const fn assignment(&self) -> &Assignment {
        &self.assignment
    }

    /// Gives every partition a healthy device that has room for it: at once, and nothing else moves. Of throughputs it takes no notice.
    ///
    /// # Errors
    /// As [`assign`], when the devices do not hold what has lost its place. The assignment stays.
    pub fn keep_up(&mut self, resources: &[Resource], sizes: &[Size]) -> Result<Verdict, Error> {
        let Some(cause) = self.homeless(resources, sizes) else { return Ok(Verdict::Keep) };
        let assignment = repair(self.strategy, resources, sizes, &self.assignment.devices)?;
        self.adopt(assignment, resources, sizes);
        Ok(Verdict::Reassigned(cause))
    }

    /// Takes what was measured last of the same devices, in the same order.
    ///
    /// A device that failed loses its partitions at once, one that is full those that it has no room for, new partitions get a place, and nothing else
    /// moves ([`Watch::keep_up`]). Otherwise partitions move only if the time that all passes to come gain exceeds the time that moving takes
    /// ([`Limits::gain_over_cost_percent`]).
    ///
    /// # Errors
    /// As [`Watch::keep_up`].
    pub fn observe(&mut self, resources: &[Resource], sizes: &[Size], moving: Moving) -> Result<Verdict, Error> {
        let needed = self.keep_up(resources, sizes)?;
        if needed != Verdict::Keep {
            return Ok(needed);
        }
        let (now, then) = (memories(sizes), self.assigned_for);
        let resized = (now >= then.saturating_mul(2) || now <= then / 2).then_some(Cause::Resized);
        let Some(cause) = self.cause(resources).or(resized) else { return Ok(Verdict::Keep) };
        // What fits now may look as if it did not when all of it is placed anew.
        let Ok(other) = assign(self.strategy, resources, sizes) else { return Ok(Verdict::Keep) };
        if !self.is_worth(&other, resources, sizes, moving) {
            // To be believed anew: the same question would have the same answer at the next observation.
            self.beyond.fill(0);
            self.assigned_for = now;
            return Ok(Verdict::Keep);
        }
        self.adopt(other, resources, sizes);
        Ok(Verdict::Reassigned(cause))
    }

    /// Why partitions have no place any more.
    fn homeless(&self, resources: &[Resource], sizes: &[Size]) -> Option<Cause> {
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

    /// The first device by which another assignment may be better.
    fn cause(&mut self, resources: &[Resource]) -> Option<Cause> {
        self.beyond.resize(resources.len(), 0);
        let mut cause = None;
        for (device, now) in resources.iter().enumerate().filter(|(_, now)| now.healthy) {
            let before = self.assigned_by.get(device).filter(|before| before.healthy);
            let (Some(Resource { throughput: Some(before), .. }), Some(now)) = (before, now.throughput) else {
                // It comes back, or is measured for the first time.
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

    /// Whether moving to `other` pays: known only where every device was measured.
    fn is_worth(&self, other: &Assignment, resources: &[Resource], sizes: &[Size], moving: Moving) -> bool {
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

/// Of all partitions.
fn memories(sizes: &[Size]) -> u64 {
    sizes.iter().map(|size| size.memories).fold(0, u64::saturating_add)
}
