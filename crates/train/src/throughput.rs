//! How long a member needs for a batch: `t(b) = overhead + b / throughput`, estimated from its steps.

use std::collections::VecDeque;

/// Weight of the past per observation: an observation 34 steps ago counts half.
const FORGETTING: f64 = 0.98;
/// Number of residuals from which the size of an ordinary deviation is estimated.
const WINDOW: usize = 32;
/// Residuals before outliers are clipped.
const WARM: usize = 8;
/// Deviations beyond this many median absolute deviations are clipped.
const OUTLIER: f64 = 3.0;
/// First uncertainty of (overhead, slope): with one batch size seen, the time is attributed to the slope.
const PRIOR: [f64; 2] = [1.0, 1e3];

/// Time of a batch of b samples: `overhead_seconds + b / samples_per_second`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimeModel {
    /// Time of an empty batch; >= 0.
    pub overhead_seconds: f64,
    /// Samples per second beyond the overhead; positive.
    pub samples_per_second: f64,
}

impl TimeModel {
    /// Predicted time of a batch.
    pub fn seconds(&self, samples: usize) -> f64 {
        self.overhead_seconds + samples as f64 / self.samples_per_second
    }
}

/// Estimates a [`TimeModel`] by recursive least squares with forgetting; single slow steps count little.
#[derive(Debug, Clone, PartialEq)]
pub struct TimeObserver {
    /// Batch size that counts as 1, so that both coefficients have the size of a step's time. 0 before the first.
    unit: f64,
    coefficients: [f64; 2],
    covariance: [[f64; 2]; 2],
    residuals: VecDeque<f64>,
}

impl Default for TimeObserver {
    fn default() -> Self {
        Self {
            unit: 0.0,
            coefficients: [0.0; 2],
            covariance: [[PRIOR[0], 0.0], [0.0, PRIOR[1]]],
            residuals: VecDeque::new(),
        }
    }
}

impl TimeObserver {
    /// An observer without observations.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records a step of `samples` samples that took `seconds` without communication. Ignores empty batches and times
    /// that are not positive.
    pub fn observe(&mut self, samples: usize, seconds: f64) {
        if samples == 0 || !(seconds.is_finite() && seconds > 0.0) {
            return;
        }
        if self.unit == 0.0 {
            self.unit = samples as f64;
        }
        let x = [1.0, samples as f64 / self.unit];
        let residual = self.clip(seconds - (self.coefficients[0] + self.coefficients[1] * x[1]));
        let p = self.covariance;
        let px = [p[0][0] * x[0] + p[0][1] * x[1], p[1][0] * x[0] + p[1][1] * x[1]];
        let denominator = FORGETTING + x[0] * px[0] + x[1] * px[1];
        for i in 0..2 {
            self.coefficients[i] += px[i] / denominator * residual;
            for j in 0..2 {
                self.covariance[i][j] = (p[i][j] - px[i] * px[j] / denominator) / FORGETTING;
            }
        }
        // With equal batches one direction is never observed and its uncertainty would grow without bound.
        let excess = ((self.covariance[0][0] + self.covariance[1][1]) / (PRIOR[0] + PRIOR[1])).max(1.0);
        self.covariance.iter_mut().flatten().for_each(|c| *c /= excess);
    }

    fn clip(&mut self, residual: f64) -> f64 {
        let clipped = if self.residuals.len() < WARM {
            residual
        } else {
            let mut sizes: Vec<f64> = self.residuals.iter().map(|r| r.abs()).collect();
            sizes.sort_by(f64::total_cmp);
            // 1.4826 turns a median absolute deviation into a standard deviation.
            let limit = OUTLIER * 1.4826 * sizes[sizes.len() / 2];
            residual.clamp(-limit, limit)
        };
        if self.residuals.len() == WINDOW {
            self.residuals.pop_front();
        }
        // The residual itself, not the clipped one: a lasting change raises the limit and is followed.
        self.residuals.push_back(residual);
        clipped
    }

    /// The current estimate. `None` before the first observation.
    pub fn model(&self) -> Option<TimeModel> {
        if self.unit == 0.0 {
            return None;
        }
        let [overhead, slope] = self.coefficients;
        let whole = overhead + slope;
        // Noise can make either negative; then the other explains the time of a usual batch.
        let (overhead, slope) =
            if slope > 0.0 && overhead >= 0.0 { (overhead, slope) } else { (0.0, whole.max(f64::MIN_POSITIVE)) };
        Some(TimeModel { overhead_seconds: overhead, samples_per_second: self.unit / slope })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Deterministic noise in [-1, 1].
    fn noise(i: u64) -> f64 {
        engram_neural::philox(3, [i as u32, 0, 0, 0])[0] as f64 / 2f64.powi(31) - 1.0
    }

    #[test]
    fn time_model_is_learned_despite_noise_and_outliers_and_follows_a_change() {
        let mut observer = TimeObserver::new();
        let mut feed = |overhead: f64, rate: f64, steps: std::ops::Range<u64>| {
            for i in steps {
                let samples = 100 + (i * 37 % 100) as usize;
                let time = (overhead + samples as f64 / rate) * (1.0 + 0.02 * noise(i));
                observer.observe(samples, if i % 20 == 19 { 30.0 * time } else { time });
            }
            observer.model().unwrap()
        };
        let model = feed(0.01, 5_000.0, 0..400);
        assert!((model.seconds(150) / 0.04 - 1.0).abs() < 0.03, "{model:?}");
        assert!((model.samples_per_second / 5_000.0 - 1.0).abs() < 0.15, "{model:?}");
        let slower = feed(0.01, 2_500.0, 400..800);
        assert!((slower.seconds(150) / 0.07 - 1.0).abs() < 0.03, "{slower:?}");
    }

    #[test]
    fn equal_batches_for_long_do_not_make_the_estimate_diverge() {
        let mut observer = TimeObserver::new();
        (0..100_000).for_each(|i| observer.observe(64, 0.02 * (1.0 + 0.05 * noise(i))));
        let model = observer.model().unwrap();
        assert!((model.seconds(64) / 0.02 - 1.0).abs() < 0.03, "{model:?}");
        assert!(model.seconds(128) < 0.042 && model.seconds(128) > 0.03, "{model:?}");
        assert_eq!(TimeObserver::new().model(), None);
    }
}
