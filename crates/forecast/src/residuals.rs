//! Errors of past forecasts, and quantiles of them.

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Residuals that are kept; the oldest is dropped.
pub const CAPACITY: usize = 512;
/// Parts of a period whose residuals have a quantile of their own.
pub const BINS: usize = 24;
/// Residuals that a quantile of one bin needs; with fewer, all residuals count.
const LEAST_IN_BIN: usize = 20;

/// The last residuals (sample minus forecast) with the part of the period that they belong to.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Residuals {
    entries: VecDeque<(u8, f64)>,
}

impl Residuals {
    /// Adds a residual of `bin`.
    pub fn add(&mut self, bin: u8, residual: f64) {
        if self.entries.len() == CAPACITY {
            self.entries.pop_front();
        }
        self.entries.push_back((bin, residual));
    }

    /// Returns the empirical quantile of a bin and its two neighbors, or of all residuals if those are few; `None` without residuals.
    pub fn quantile(&self, bin: u8, level: f64) -> Option<f64> {
        let is_near = |other: u8| (usize::from(other) + BINS - usize::from(bin) + 1) % BINS <= 2;
        let near: Vec<f64> = self.entries.iter().filter(|entry| is_near(entry.0)).map(|entry| entry.1).collect();
        if near.len() >= LEAST_IN_BIN {
            return quantile(near, level);
        }
        quantile(self.entries.iter().map(|entry| entry.1).collect(), level)
    }
}

/// Returns the quantile at `level` in [0, 1] by linear interpolation between order statistics (type 7 of Hyndman and Fan 1996).
pub fn quantile(mut values: Vec<f64>, level: f64) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    let last = values.len().checked_sub(1)?;
    let rank = level.clamp(0.0, 1.0) * last as f64;
    let below = values[rank.floor() as usize];
    let above = values[rank.ceil() as usize];
    Some(below + (above - below) * rank.fract())
}

/// Returns the loss of a forecast of the quantile at `level` (Koenker and Bassett 1978).
pub fn pinball(actual: f64, forecast: f64, level: f64) -> f64 {
    let error = actual - forecast;
    if error >= 0.0 { level * error } else { (level - 1.0) * error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_interpolate_and_only_the_newest_residuals_count() {
        assert_eq!(quantile(vec![4.0, 1.0, 3.0, 2.0], 0.5), Some(2.5));
        assert_eq!(quantile(vec![7.0], 0.95), Some(7.0));
        assert_eq!(quantile(Vec::new(), 0.95), None);
        let mut residuals = Residuals::default();
        for index in 0..2 * CAPACITY {
            residuals.add(0, index as f64);
        }
        assert_eq!(residuals.quantile(0, 0.0), Some(CAPACITY as f64));
    }

    #[test]
    fn a_bin_with_enough_residuals_has_its_own_quantile() {
        let mut residuals = Residuals::default();
        for _ in 0..LEAST_IN_BIN {
            residuals.add(23, 10.0);
            residuals.add(12, 1.0);
        }
        assert_eq!(residuals.quantile(0, 0.95), Some(10.0), "the bin before midnight is next to the bin after it");
        assert_eq!(residuals.quantile(12, 0.95), Some(1.0));
        assert_eq!(residuals.quantile(6, 0.0), Some(1.0), "all residuals");
    }

    #[test]
    fn pinball_loss_weighs_a_forecast_that_is_too_low_by_the_level() {
        assert!((pinball(10.0, 8.0, 0.95) - 1.9).abs() < 1e-12);
        assert!((pinball(8.0, 10.0, 0.95) - 0.1).abs() < 1e-12);
    }
}
