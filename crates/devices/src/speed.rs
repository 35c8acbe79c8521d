//! Measured speeds by kernel, device and size.

use std::collections::BTreeMap;
use std::time::Duration;

/// Runs of a kernel on a device before its speed counts.
const CALIBRATION_RUNS: u64 = 10;
/// Runs that the mean remembers, so that it follows a device that slows down.
const MEMORY: f64 = 100.0;

/// Speeds of devices by kernel and size class, learned from runs: never from data sheets.
#[derive(Debug, Clone, Default)]
pub struct SpeedModel {
    estimates: BTreeMap<(&'static str, String, u32), Estimate>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Estimate {
    runs: u64,
    /// Seconds per item.
    mean: f64,
    variance: f64,
}

impl SpeedModel {
    /// Adds a run of `items` items. Runs without items or time are ignored.
    pub fn add(&mut self, kernel: &'static str, device: &str, items: usize, elapsed: Duration) {
        if items == 0 || elapsed.is_zero() {
            return;
        }
        let estimate = self.estimates.entry((kernel, device.to_owned(), items.ilog2())).or_default();
        estimate.runs += 1;
        let share = 1.0 / (estimate.runs as f64).min(MEMORY);
        let difference = elapsed.as_secs_f64() / items as f64 - estimate.mean;
        estimate.mean += share * difference;
        estimate.variance = (1.0 - share) * (estimate.variance + share * difference * difference);
    }

    /// Returns the speed in items per second for runs of about `items` items; `None` before 10 runs.
    pub fn speed(&self, kernel: &'static str, device: &str, items: usize) -> Option<u64> {
        let estimate = self.calibrated(kernel, device, items)?;
        // At least 1: 0 would mean unmeasured.
        Some(((1.0 / estimate.mean) as u64).max(1))
    }

    /// Returns the standard deviation of the time of a run relative to its mean; `None` before 10 runs.
    pub fn deviation(&self, kernel: &'static str, device: &str, items: usize) -> Option<f64> {
        let estimate = self.calibrated(kernel, device, items)?;
        Some(estimate.variance.sqrt() / estimate.mean)
    }

    fn calibrated(&self, kernel: &'static str, device: &str, items: usize) -> Option<&Estimate> {
        let class = items.max(1).ilog2();
        self.estimates.get(&(kernel, device.to_owned(), class)).filter(|it| it.runs >= CALIBRATION_RUNS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_is_known_after_ten_runs_and_follows_a_change() {
        let mut model = SpeedModel::default();
        for run in 0..10 {
            assert_eq!(model.speed("product", "a", 1_000), None, "after {run} runs");
            model.add("product", "a", 1_000, Duration::from_millis(10));
        }
        let near = |speed: Option<u64>, expected: u64| speed.is_some_and(|it| it.abs_diff(expected) <= expected / 50);
        assert!(near(model.speed("product", "a", 1_023), 100_000), "{:?}", model.speed("product", "a", 1_023));
        assert!(model.deviation("product", "a", 1_000).unwrap() < 1e-6);
        assert_eq!(model.speed("product", "a", 2_048), None, "another size class");
        assert_eq!(model.speed("product", "b", 1_000), None, "another device");
        (0..1_000).for_each(|_| model.add("product", "a", 1_000, Duration::from_millis(20)));
        assert!(near(model.speed("product", "a", 1_000), 50_000), "{:?}", model.speed("product", "a", 1_000));
        model.add("product", "a", 0, Duration::from_millis(1));
    }
}
