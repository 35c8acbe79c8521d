//! Damped additive Holt-Winters smoothing (Gardner and McKenzie 1985; Hyndman et al., Forecasting: Principles and Practice, 8.3).
//!
//! With level `l`, trend `b`, seasonal terms `s` of period `m` and a sample `y`:
//!
//! ```text
//! l   = a (y - s[t-m]) + (1 - a) (l' + phi b')
//! b   = B (l - l') + (1 - B) phi b'
//! s[t] = g (y - l) + (1 - g) s[t-m]
//! forecast(h) = l + (phi + phi^2 + ... + phi^h) b + s of the matching slot
//! ```

use serde::{Deserialize, Serialize};

/// Smoothing parameters.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Smoothing {
    /// Weight of a sample in the level (`a`), in [0, 1].
    pub level: f64,
    /// Weight of a change of the level in the trend (`B`), in [0, 1].
    pub trend: f64,
    /// Weight of a sample in its seasonal term (`g`), in [0, 1].
    pub seasonal: f64,
    /// Damping of the trend per slot (`phi`), in [0, 1].
    pub damping: f64,
}

impl Default for Smoothing {
    fn default() -> Self {
        Self { level: 0.3, trend: 0.05, seasonal: 0.2, damping: 0.98 }
    }
}

/// State of the smoothing after the samples so far.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HoltWinters {
    smoothing: Smoothing,
    level: f64,
    trend: f64,
    /// One term per slot of the period; empty without a period.
    seasonal: Vec<f64>,
    /// Slot of the period of the next sample.
    position: usize,
}

impl HoltWinters {
    /// Creates a state. `seasonal` has one term per slot of the period, the first for the next sample; empty means no period.
    pub const fn new(smoothing: Smoothing, level: f64, trend: f64, seasonal: Vec<f64>) -> Self {
        Self { smoothing, level, trend, seasonal, position: 0 }
    }

    /// Estimates the initial state from the samples that follow it: the first two periods with `period`, the first sample without.
    /// Returns `None` if a period has no sample.
    pub fn initial(smoothing: Smoothing, samples: &[Option<f64>], period: Option<usize>) -> Option<Self> {
        let Some(period) = period else {
            let first = samples.iter().flatten().next()?;
            return Some(Self::new(smoothing, *first, 0.0, Vec::new()));
        };
        let mut periods = samples.chunks_exact(period);
        let (first, second) = (periods.next()?, periods.next()?);
        let (level, next_level) = (mean(first)?, mean(second)?);
        let trend = (next_level - level) / period as f64;
        // The mean of a period is the level at its middle.
        let start = level - trend * (period as f64 - 1.0) / 2.0;
        let deviation = |index: usize| {
            let line = start + trend * index as f64;
            samples[index].map(|sample| sample - line)
        };
        let terms: Vec<Option<f64>> =
            (0..period).map(|slot| mean(&[deviation(slot), deviation(slot + period)])).collect();
        Some(Self::new(smoothing, start - trend, trend, smooth_circular(&terms)))
    }

    /// Takes the sample of the next slot; without a sample the state moves along its own forecast.
    pub fn update(&mut self, sample: Option<f64>) {
        let Smoothing { level: a, trend: b, seasonal: g, damping } = self.smoothing;
        let drift = damping * self.trend;
        let expected = self.level + drift;
        let seasonal = self.seasonal.get(self.position).copied().unwrap_or(0.0);
        if let Some(sample) = sample {
            let level = a * (sample - seasonal) + (1.0 - a) * expected;
            self.trend = b * (level - self.level) + (1.0 - b) * drift;
            self.level = level;
            if let Some(term) = self.seasonal.get_mut(self.position) {
                *term = g * (sample - level) + (1.0 - g) * seasonal;
            }
        } else {
            self.level = expected;
            self.trend = drift;
        }
        self.position = (self.position + 1) % self.seasonal.len().max(1);
    }

    /// Returns the forecast for `steps` slots after the last sample; 1 is the next slot.
    pub fn forecast(&self, steps: usize) -> f64 {
        self.forecast_with(steps, damped_sum(self.smoothing.damping, steps))
    }

    /// Returns the highest forecast for the slots 1 to `steps`.
    pub fn peak(&self, steps: usize) -> f64 {
        let mut power = 1.0;
        let mut sum = 0.0;
        let mut highest = f64::NEG_INFINITY;
        for step in 1..=steps.max(1) {
            power *= self.smoothing.damping;
            sum += power;
            highest = highest.max(self.forecast_with(step, sum));
        }
        highest
    }

    /// Returns the slot of the period that is `steps` slots after the last sample; 0 without a period.
    pub fn slot(&self, steps: usize) -> usize {
        let period = self.seasonal.len().max(1);
        (self.position + steps.saturating_sub(1)) % period
    }

    /// Returns the smoothing parameters.
    pub const fn smoothing(&self) -> Smoothing {
        self.smoothing
    }

    /// Returns the number of slots of the period.
    pub const fn period(&self) -> Option<usize> {
        if self.seasonal.is_empty() { None } else { Some(self.seasonal.len()) }
    }

    fn forecast_with(&self, steps: usize, damped_sum: f64) -> f64 {
        let seasonal = self.seasonal.get(self.slot(steps)).copied().unwrap_or(0.0);
        self.level + damped_sum * self.trend + seasonal
    }
}

/// Returns `phi + phi^2 + ... + phi^steps`.
fn damped_sum(damping: f64, steps: usize) -> f64 {
    let mut power = 1.0;
    let mut sum = 0.0;
    for _ in 0..steps {
        power *= damping;
        sum += power;
    }
    sum
}

/// Returns the mean of the samples that are present.
fn mean(samples: &[Option<f64>]) -> Option<f64> {
    let (sum, count) = samples.iter().flatten().fold((0.0, 0_u32), |(sum, count), sample| (sum + sample, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

/// Averages each term with its neighbors, a 96th of the period in all, so that the noise of two samples does not repeat in every period.
fn smooth_circular(terms: &[Option<f64>]) -> Vec<f64> {
    let period = terms.len();
    let reach = period / 192;
    let average = |slot: usize| {
        let window: Vec<Option<f64>> =
            (0..=2 * reach).map(|offset| terms[(slot + period + offset - reach) % period]).collect();
        mean(&window).unwrap_or(0.0)
    };
    (0..period).map(average).collect()
}

/// Fits the smoothing to samples and returns the state after them.
///
/// Searches a grid for the least squared error of the forecast `steps` slots ahead over the last three periods; the first period
/// is not judged, since the initial state comes from it. Returns `None` with fewer than two periods or without a sample.
pub fn fit(samples: &[Option<f64>], period: Option<usize>, steps: usize) -> Option<HoltWinters> {
    let judged_from = period.map_or(samples.len() / 4, |period| samples.len().saturating_sub(3 * period).max(period));
    let mut best: Option<(f64, HoltWinters)> = None;
    for smoothing in grid(period.is_some()) {
        let mut state = HoltWinters::initial(smoothing, samples, period)?;
        let error = replay(&mut state, samples, judged_from, steps.max(1));
        if best.as_ref().is_none_or(|(least, _)| error < *least) {
            best = Some((error, state));
        }
    }
    best.map(|(_, state)| state)
}

/// Returns the candidates of [`fit`]. The defaults come first, so they win a tie.
fn grid(has_period: bool) -> impl Iterator<Item = Smoothing> {
    let seasonal_weights: &[f64] = if has_period { &[0.05, 0.1, 0.2] } else { &[0.0] };
    let others = [0.05, 0.1, 0.2, 0.3, 0.5].into_iter().flat_map(move |level| {
        [0.01, 0.05, 0.1].into_iter().flat_map(move |trend| {
            seasonal_weights.iter().flat_map(move |&seasonal| {
                [0.9, 0.98].into_iter().map(move |damping| Smoothing { level, trend, seasonal, damping })
            })
        })
    });
    std::iter::once(Smoothing::default()).chain(others)
}

/// Moves `state` over all samples and returns the sum of the squared errors of forecasts for the samples from `judged_from` on.
fn replay(state: &mut HoltWinters, samples: &[Option<f64>], judged_from: usize, steps: usize) -> f64 {
    let sum = damped_sum(state.smoothing.damping, steps);
    let mut error = 0.0;
    for (index, sample) in samples.iter().enumerate() {
        let due = index + steps - 1;
        if let Some(Some(actual)) = samples.get(due).filter(|_| due >= judged_from) {
            error += (actual - state.forecast_with(steps, sum)).powi(2);
        }
        state.update(*sample);
    }
    error
}

/// Returns the candidate that explains the samples without their linear trend: an autocorrelation at its lag of at least 0.3 that is higher
/// than at half of it, and two full periods of samples. A longer candidate needs an error lower by a fifth.
pub fn detect_period(samples: &[Option<f64>], candidates: &[usize]) -> Option<usize> {
    let residuals = without_trend(samples)?;
    let mut best: Option<(usize, f64)> = None;
    let mut ordered = candidates.to_vec();
    ordered.sort_unstable();
    for period in ordered.into_iter().filter(|&period| period >= 2 && samples.len() >= 2 * period) {
        let correlation = autocorrelation(&residuals, period);
        // A load that changes slowly resembles itself at any short lag.
        let is_peak = correlation > autocorrelation(&residuals, period / 2) + 0.05;
        let error = 1.0 - correlation;
        if correlation >= 0.3 && is_peak && best.is_none_or(|(_, least)| error < 0.8 * least) {
            best = Some((period, error));
        }
    }
    best.map(|(period, _)| period)
}

/// Returns the samples minus their least-squares line; `None` without samples.
fn without_trend(samples: &[Option<f64>]) -> Option<Vec<Option<f64>>> {
    let points = || samples.iter().enumerate().filter_map(|(index, sample)| sample.map(|y| (index as f64, y)));
    let count = points().count() as f64;
    let (sum_x, sum_y) = points().fold((0.0, 0.0), |(sum_x, sum_y), (x, y)| (sum_x + x, sum_y + y));
    if count == 0.0 {
        return None;
    }
    let (mean_x, mean_y) = (sum_x / count, sum_y / count);
    let (product, square) = points().fold((0.0, 0.0), |(product, square), (x, y)| {
        (product + (x - mean_x) * (y - mean_y), square + (x - mean_x).powi(2))
    });
    let slope = if square > 0.0 { product / square } else { 0.0 };
    let residual =
        |(index, sample): (usize, &Option<f64>)| sample.map(|y| y - mean_y - slope * (index as f64 - mean_x));
    Some(samples.iter().enumerate().map(residual).collect())
}

/// Returns the correlation of the residuals with themselves `lag` slots before, over the pairs of which both are present.
fn autocorrelation(residuals: &[Option<f64>], lag: usize) -> f64 {
    let (mut product, mut first, mut second) = (0.0, 0.0, 0.0);
    for (earlier, later) in residuals.iter().zip(&residuals[lag..]) {
        if let (Some(earlier), Some(later)) = (earlier, later) {
            product += earlier * later;
            first += earlier * earlier;
            second += later * later;
        }
    }
    let scale: f64 = f64::sqrt(first * second);
    if scale > 0.0 { product / scale } else { 0.0 }
}
