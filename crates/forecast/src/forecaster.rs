//! Forecast of a load with an upper bound, from one sample per slot.
//!
//! The forecaster fits [`HoltWinters`] to its history, keeps the errors of its forecasts, and bounds the next forecast by their quantile.
//! The level of the quantile follows the share of samples above the bound (adaptive conformal inference, Gibbs and Candes 2021).
//! It judges itself by the pinball loss against the last sample plus the quantile of its own errors.

use crate::holt_winters::{HoltWinters, detect_period, fit};
use crate::residuals::{BINS, Residuals, pinball};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Longest period in slots.
pub const MAX_PERIOD_SLOTS: usize = 1_440;
/// Samples that are kept: three of the longest periods.
pub const MAX_SAMPLES: usize = 3 * MAX_PERIOD_SLOTS;
/// Longest horizon in slots.
pub const MAX_HORIZON_SLOTS: usize = 240;
/// Samples before the first forecast.
pub const LEAST_SAMPLES: usize = 20;
/// Slots between two fits without a period; with one it is the period.
const REFIT_SLOTS: usize = 60;
/// Step of the adaptive level.
const LEVEL_RATE: f64 = 0.02;
/// Time constant of the losses in slots without a period; with one it is the period.
const LOSS_SLOTS: f64 = 240.0;

/// Forecast of the load for the horizon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Forecast {
    /// Horizon in seconds.
    pub horizon_seconds: f64,
    /// Highest expected load between now and the horizon.
    pub expected: f64,
    /// Quantile below `expected` at one minus the level.
    pub lower: f64,
    /// Quantile above `expected` at the level.
    pub upper: f64,
    /// Level of the bounds.
    pub level: f64,
    /// Period of the load in seconds, if one was detected.
    pub period_seconds: Option<u32>,
}

/// Whether a forecast takes part in decisions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ForecastStatus {
    /// Too few samples.
    Learning,
    /// Takes part.
    Active,
    /// Was worse than a naive forecast for a period.
    Inaccurate,
    /// The last sample is too old.
    Stale,
}

/// A forecast that waits for its sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Pending {
    due: u64,
    bin: u8,
    expected: f64,
    upper: f64,
    naive: f64,
    naive_upper: f64,
}

/// Losses of both forecasts, as exponential sums.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Losses {
    own: f64,
    naive: f64,
    /// Share of a full time constant that has been seen.
    weight: f64,
    is_inaccurate: bool,
}

/// State of the forecast.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Forecaster {
    interval_seconds: u32,
    /// Candidates for the period, in slots.
    periods: Vec<usize>,
    target_level: f64,
    level: f64,
    history: VecDeque<Option<f64>>,
    /// Number of slots so far.
    slots: u64,
    last_sample: f64,
    /// Slots without a sample since the last one.
    missing: usize,
    model: Option<HoltWinters>,
    until_fit: usize,
    pending: VecDeque<Pending>,
    residuals: Residuals,
    naive_residuals: Residuals,
    losses: Losses,
}

impl Forecaster {
    /// Creates a forecaster without samples. `periods` are the candidates for the period in slots, each at most [`MAX_PERIOD_SLOTS`].
    pub fn new(interval_seconds: u32, periods: Vec<usize>, level: f64) -> Self {
        Self {
            interval_seconds,
            periods,
            target_level: level,
            level,
            history: VecDeque::new(),
            slots: 0,
            last_sample: 0.0,
            missing: 0,
            model: None,
            until_fit: 0,
            pending: VecDeque::new(),
            residuals: Residuals::default(),
            naive_residuals: Residuals::default(),
            losses: Losses::default(),
        }
    }

    /// Takes the sample of the next slot, `None` if it is missing. `horizon` is the number of slots to forecast from here on.
    pub fn observe(&mut self, sample: Option<f64>, horizon: usize) {
        let horizon = horizon.clamp(1, MAX_HORIZON_SLOTS);
        self.slots += 1;
        self.judge(sample);
        if self.history.len() == MAX_SAMPLES {
            self.history.pop_front();
        }
        self.history.push_back(sample);
        self.missing = if sample.is_some() { 0 } else { self.missing + 1 };
        self.last_sample = sample.unwrap_or(self.last_sample);
        if let Some(model) = &mut self.model {
            model.update(sample);
        }
        self.until_fit = self.until_fit.saturating_sub(1);
        if self.until_fit == 0 && sample.is_some() && self.history.len() >= LEAST_SAMPLES {
            self.refit(horizon);
        }
        self.issue(horizon);
    }

    /// Takes `count` slots without samples. After more of them than a forecaster can hold it starts again.
    pub fn skip(&mut self, count: usize, horizon: usize) {
        if count > MAX_PERIOD_SLOTS {
            *self = Self::new(self.interval_seconds, std::mem::take(&mut self.periods), self.target_level);
            return;
        }
        for _ in 0..count {
            self.observe(None, horizon);
        }
    }

    /// Returns the forecast for `horizon` slots; `None` while learning.
    pub fn forecast(&self, horizon: usize) -> Option<Forecast> {
        let model = self.model.as_ref()?;
        let horizon = horizon.clamp(1, MAX_HORIZON_SLOTS);
        let at_horizon = model.forecast(horizon);
        let expected = model.peak(horizon).max(0.0);
        let bin = Self::bin(model, horizon);
        let bound = |level| at_horizon + self.residuals.quantile(bin, level).unwrap_or(0.0);
        Some(Forecast {
            horizon_seconds: horizon as f64 * f64::from(self.interval_seconds),
            expected,
            lower: bound(1.0 - self.level).clamp(0.0, expected),
            upper: bound(self.level).max(expected),
            level: self.level,
            period_seconds: model.period().map(|slots| slots as u32 * self.interval_seconds),
        })
    }

    /// Returns whether the forecast takes part in decisions.
    pub fn status(&self) -> ForecastStatus {
        let Some(model) = &self.model else { return ForecastStatus::Learning };
        // A period carries the forecast over a gap; without one the last samples are all there is.
        let longest_gap = model.period().map_or(LEAST_SAMPLES / 2, |period| period / 4);
        if self.missing > longest_gap {
            ForecastStatus::Stale
        } else if self.losses.is_inaccurate {
            ForecastStatus::Inaccurate
        } else {
            ForecastStatus::Active
        }
    }

    fn bin(model: &HoltWinters, steps: usize) -> u8 {
        let bin = model.period().map_or(0, |period| model.slot(steps) * BINS / period);
        u8::try_from(bin).expect("a slot is below the period, so the bin is below 24")
    }

    fn refit(&mut self, horizon: usize) {
        let samples: &[Option<f64>] = self.history.make_contiguous();
        let period = detect_period(samples, &self.periods);
        let before = self.model.as_ref().and_then(HoltWinters::period);
        if let Some(model) = fit(samples, period, horizon) {
            if model.period() != before {
                // Errors of another model say nothing about this one.
                (self.residuals, self.losses) = (Residuals::default(), Losses::default());
                self.pending.clear();
                self.backtest(&model, horizon);
            }
            self.until_fit = period.unwrap_or(REFIT_SLOTS);
            self.model = Some(model);
        }
    }

    /// Fills the residuals with the errors of a fresh model over its last period, which the fit has seen.
    fn backtest(&mut self, fitted: &HoltWinters, horizon: usize) {
        let samples: &[Option<f64>] = self.history.make_contiguous();
        let Some(mut model) = HoltWinters::initial(fitted.smoothing(), samples, fitted.period()) else { return };
        let from = fitted.period().unwrap_or(0);
        for (index, sample) in samples.iter().enumerate() {
            if let Some(Some(actual)) = samples.get(index + horizon - 1).filter(|_| index >= from) {
                self.residuals.add(Self::bin(&model, horizon), actual - model.forecast(horizon));
            }
            model.update(*sample);
        }
    }

    /// Adds a forecast and the naive one for the slot at the horizon.
    fn issue(&mut self, horizon: usize) {
        let Some(model) = self.model.as_ref().filter(|_| self.missing == 0) else { return };
        let bin = Self::bin(model, horizon);
        let expected = model.forecast(horizon);
        let naive = self.last_sample;
        let pending = Pending {
            due: self.slots + horizon as u64,
            bin,
            expected,
            upper: expected + self.residuals.quantile(bin, self.level).unwrap_or(0.0),
            naive,
            naive_upper: naive + self.naive_residuals.quantile(bin, self.target_level).unwrap_or(0.0),
        };
        // A shorter horizon than before: the forecasts after this one are dropped, so that those that wait are in order.
        while self.pending.back().is_some_and(|last| last.due >= pending.due) {
            self.pending.pop_back();
        }
        self.pending.push_back(pending);
    }

    /// Compares the forecast for this slot with its sample.
    fn judge(&mut self, sample: Option<f64>) {
        while self.pending.front().is_some_and(|first| first.due <= self.slots) {
            let Some(pending) = self.pending.pop_front() else { return };
            if let Some(actual) = sample.filter(|_| pending.due == self.slots) {
                self.learn(&pending, actual);
            }
        }
    }

    fn learn(&mut self, pending: &Pending, actual: f64) {
        let miss = if actual > pending.upper { 1.0 } else { 0.0 };
        self.level = (self.level + LEVEL_RATE * (miss - (1.0 - self.target_level))).clamp(0.5, 0.995);
        self.residuals.add(pending.bin, actual - pending.expected);
        self.naive_residuals.add(pending.bin, actual - pending.naive);
        let constant = self.model.as_ref().and_then(HoltWinters::period).map_or(LOSS_SLOTS, |period| period as f64);
        let own = pinball(actual, pending.upper, self.target_level);
        let naive = pinball(actual, pending.naive_upper, self.target_level);
        self.losses.add(own, naive, 1.0 / constant);
    }
}

impl Losses {
    fn add(&mut self, own: f64, naive: f64, rate: f64) {
        self.own += rate * (own - self.own);
        self.naive += rate * (naive - self.naive);
        self.weight += rate * (1.0 - self.weight);
        // After one time constant; the distance between the limits keeps the status from changing with every sample.
        let limit = if self.is_inaccurate { 1.0 } else { 1.1 };
        self.is_inaccurate = self.weight > 0.63 && self.own > limit * self.naive;
    }
}
