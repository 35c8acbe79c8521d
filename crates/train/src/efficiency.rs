//! Scaling efficiency, defined so that it can fail.
//!
//! `E = (samples per second of the whole job, wall clock, communication included) / (sum of the solo throughputs of
//! the same devices)`. Dividing the members' own throughputs by each other is about 1 by construction, since the time
//! that a member waits for the others appears in no member's throughput.

use std::collections::BTreeMap;

/// Measures efficiency and the share of exposed communication over a window of steps.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EfficiencyMeter {
    solo: BTreeMap<u32, Solo>,
    samples: f64,
    wall_seconds: f64,
    exposed_seconds: f64,
    steps: u64,
}

/// What a device computed without communication.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Solo {
    samples: f64,
    seconds: f64,
    /// From an earlier window: the next measurement replaces it.
    is_old: bool,
}

impl EfficiencyMeter {
    /// A meter without measurements.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records what a device computed with its own batch and without communication. Measurements of one window add up.
    pub fn record_solo(&mut self, device: u32, samples: u64, seconds: f64) {
        if samples > 0 && seconds.is_finite() && seconds > 0.0 {
            let solo = self.solo.entry(device).or_default();
            if solo.is_old {
                *solo = Solo::default();
            }
            solo.samples += samples as f64;
            solo.seconds += seconds;
        }
    }

    /// Removes a device that is no longer a member and starts another window.
    pub fn remove(&mut self, device: u32) {
        self.solo.remove(&device);
        self.restart();
    }

    /// Starts another window; solo throughputs stay until they are measured in it.
    pub fn restart(&mut self) {
        self.solo.values_mut().for_each(|solo| solo.is_old = true);
        (self.samples, self.wall_seconds, self.exposed_seconds, self.steps) = (0.0, 0.0, 0.0, 0);
    }

    /// Records a committed step of the whole job: samples of all members, wall-clock time from the start of the step to
    /// the start of the next, and the part of it in which computation waited for communication.
    pub fn record_step(&mut self, samples: u64, wall_seconds: f64, exposed_seconds: f64) {
        self.samples += samples as f64;
        self.wall_seconds += wall_seconds;
        self.exposed_seconds += exposed_seconds;
        self.steps += 1;
    }

    /// Samples per second of the job. `None` before the first step.
    pub fn throughput(&self) -> Option<f64> {
        (self.steps > 0 && self.wall_seconds > 0.0).then(|| self.samples / self.wall_seconds)
    }

    /// Efficiency; 1 means that working together costs nothing. `None` without steps or solo measurements.
    pub fn efficiency(&self) -> Option<f64> {
        let solo: f64 = self.solo.values().map(|solo| solo.samples / solo.seconds).sum();
        if solo > 0.0 { self.throughput().map(|t| t / solo) } else { None }
    }

    /// Share of the wall-clock time in which computation waited for communication. `None` before the first step.
    pub fn communication_share(&self) -> Option<f64> {
        (self.steps > 0 && self.wall_seconds > 0.0).then(|| self.exposed_seconds / self.wall_seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two devices of 100 and 300 samples/s; each step takes `compute` plus `communication` seconds.
    fn job(sizes: [u64; 2], communication: f64) -> EfficiencyMeter {
        let mut meter = EfficiencyMeter::new();
        meter.record_solo(0, 100, 1.0);
        meter.record_solo(1, 300, 1.0);
        let compute = (sizes[0] as f64 / 100.0).max(sizes[1] as f64 / 300.0);
        (0..10).for_each(|_| meter.record_step(sizes[0] + sizes[1], compute + communication, communication));
        meter
    }

    #[test]
    fn efficiency_falls_with_communication_and_with_imbalance() {
        assert!((job([100, 300], 0.0).efficiency().unwrap() - 1.0).abs() < 1e-12);
        let delayed = job([100, 300], 0.5);
        assert!(delayed.efficiency().unwrap() < 0.7, "half a compute step of communication per step");
        assert!((delayed.communication_share().unwrap() - 1.0 / 3.0).abs() < 1e-12);
        // Equal batches on unequal devices: the fast one waits.
        assert!((job([200, 200], 0.0).efficiency().unwrap() - 0.5).abs() < 1e-12);
    }

    #[test]
    fn solo_throughput_is_that_of_the_window() {
        let mut meter = EfficiencyMeter::new();
        meter.record_solo(0, 100, 1.0);
        meter.record_solo(0, 100, 3.0);
        meter.record_step(200, 5.0, 1.0);
        assert_eq!(meter.efficiency(), Some(0.8));
        meter.restart();
        meter.record_step(100, 4.0, 0.0);
        assert_eq!(meter.efficiency(), Some(0.5), "the last one stays");
        meter.record_solo(0, 100, 4.0);
        assert_eq!(meter.efficiency(), Some(1.0), "and is replaced");
    }

    #[test]
    fn efficiency_is_absent_without_measurements() {
        let mut meter = job([100, 300], 0.0);
        meter.remove(1);
        assert_eq!(meter.efficiency(), None);
        let mut meter = EfficiencyMeter::new();
        meter.record_step(10, 1.0, 0.0);
        assert_eq!(meter.efficiency(), None);
    }
}
