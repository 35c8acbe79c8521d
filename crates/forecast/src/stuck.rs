//! Detection of a metric that repeats its last value although the load changes.

use serde::{Deserialize, Serialize};

/// Share of repeated samples above which repetition is normal for the metric.
const NORMAL_SHARE: f64 = 0.2;
/// Weight of one sample in that share.
const RATE: f64 = 0.01;
/// Repeated samples that are a coincidence at most.
const LEAST_REPEATS: u32 = 5;

/// Counts repeated samples.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct StuckDetector {
    last: Option<f64>,
    /// Time of the first sample with the last value.
    since: f64,
    repeats: u32,
    /// Share of samples that repeated the one before, of the recent ones.
    share: f64,
    samples: u32,
}

impl StuckDetector {
    /// Takes a sample at `time` and returns whether the metric is stuck: the same value for `after` seconds, where values usually differ.
    pub(crate) fn is_stuck(&mut self, sample: f64, time: f64, after: f64) -> bool {
        if self.last != Some(sample) {
            // Repetition that ends was either normal or an outage; a long one is not evidence that values usually repeat.
            let repeats = self.repeats.min(LEAST_REPEATS);
            self.share = (0..repeats).fold(self.share, |share, _| share + RATE * (1.0 - share)) * (1.0 - RATE);
            (self.last, self.since, self.repeats) = (Some(sample), time, 0);
            self.samples = self.samples.saturating_add(1);
            return false;
        }
        self.repeats = self.repeats.saturating_add(1);
        // A constant load from the first sample on has no values that usually differ.
        let varies = self.samples > LEAST_REPEATS && self.share < NORMAL_SHARE;
        varies && self.repeats >= LEAST_REPEATS && time - self.since >= after
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_value_is_stuck_only_where_values_usually_differ() {
        let mut varying = StuckDetector::default();
        for minute in 0..60 {
            assert!(!varying.is_stuck(f64::from(minute), f64::from(minute) * 60.0, 600.0));
        }
        let stuck: Vec<bool> = (60..75).map(|minute| varying.is_stuck(59.0, f64::from(minute) * 60.0, 600.0)).collect();
        assert_eq!(stuck.iter().position(|&stuck| stuck), Some(9), "600 s after the first sample with the value");
        let mut constant = StuckDetector::default();
        assert!((0..600).all(|minute| !constant.is_stuck(7.0, f64::from(minute) * 60.0, 600.0)));
        let mut coarse = StuckDetector::default();
        let is_stuck = |minute: u32| coarse.is_stuck(f64::from(minute / 20), f64::from(minute) * 60.0, 600.0);
        assert!(!(0..2_000).map(is_stuck).skip(200).any(|stuck| stuck), "a counter of few workers repeats");
    }
}
