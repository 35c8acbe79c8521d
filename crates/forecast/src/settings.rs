//! Settings of the autoscaler, checked once.

use crate::forecaster::MAX_PERIOD_SLOTS;
use serde::{Deserialize, Serialize};

const DAY_SECONDS: u32 = 86_400;

/// Prices of a worker per hour, in any currency.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Prices {
    /// Price of an on-demand worker.
    pub on_demand: f64,
    /// Price of a spot worker, if spot workers may be used.
    pub spot: Option<f64>,
}

/// What an autoscaler aims for, and its limits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Fewest workers, at least 1.
    pub min_workers: u32,
    /// Most workers.
    pub max_workers: u32,
    /// Load that one worker serves within its objective, in the unit of the load.
    pub worker_capacity: f64,
    /// Share of the capacity that is used on average, in (0, 1]. Lower costs more workers and leaves room for noise.
    pub target_utilization: f64,
    /// Relative deviation from the target that causes no change, in [0, 1).
    pub tolerance: f64,
    /// Seconds between observations, and length of a slot of the forecast.
    pub interval_seconds: u32,
    /// Lengths of the period of the load to consider, in seconds; multiples of `interval_seconds`. The one that fits is detected.
    pub periods: Vec<u32>,
    /// Time for which fewer workers must suffice before workers are removed, in seconds.
    pub stabilization_seconds: u32,
    /// Least time between two scale-downs, in seconds.
    pub scale_down_interval_seconds: u32,
    /// Share of the workers that one scale-down removes, at least one worker.
    pub scale_down_percent: u32,
    /// Quantile of the measured start-up times that is the horizon of the forecast, in (0, 1).
    pub startup_quantile: f64,
    /// Start-up time until one has been measured, in seconds.
    pub initial_startup_seconds: f64,
    /// Share of samples that should stay below the upper bound of the forecast, in (0.5, 1).
    pub forecast_level: f64,
    /// Time after which a repeated value counts as a stuck metric, in seconds.
    pub stuck_seconds: u32,
    /// Prices, if on-demand and spot workers are to be chosen by cost.
    pub prices: Option<Prices>,
}

/// A setting is outside of its range.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{field} is {value}; allowed: {allowed}")]
pub struct SettingsError {
    /// Name of the setting.
    pub field: &'static str,
    /// Its value.
    pub value: String,
    /// What is allowed.
    pub allowed: String,
}

impl Settings {
    /// Creates settings with defaults for workers of a capacity.
    pub fn new(worker_capacity: f64) -> Self {
        let mut settings = Self {
            min_workers: 1,
            max_workers: 100,
            worker_capacity,
            target_utilization: 0.7,
            tolerance: 0.1,
            interval_seconds: 60,
            periods: Vec::new(),
            stabilization_seconds: 300,
            scale_down_interval_seconds: 60,
            scale_down_percent: 10,
            startup_quantile: 0.9,
            initial_startup_seconds: 120.0,
            forecast_level: 0.95,
            stuck_seconds: 600,
            prices: None,
        };
        settings.set_interval(60);
        settings
    }

    /// Sets the interval, and the periods an hour, a day and a week as far as the forecast can hold them.
    pub fn set_interval(&mut self, interval_seconds: u32) {
        self.interval_seconds = interval_seconds;
        let fits = |period: &u32| {
            let slots = period.checked_div(interval_seconds).unwrap_or(0);
            (4..=MAX_PERIOD_SLOTS as u32).contains(&slots) && period.is_multiple_of(interval_seconds)
        };
        self.periods = [3_600, DAY_SECONDS, 7 * DAY_SECONDS].into_iter().filter(fits).collect();
    }

    /// Load per worker at the target utilization.
    pub fn target_load(&self) -> f64 {
        self.worker_capacity * self.target_utilization
    }

    /// Lengths of the periods in slots.
    pub(crate) fn period_slots(&self) -> Vec<usize> {
        self.periods.iter().map(|period| (period / self.interval_seconds) as usize).collect()
    }

    /// Checks all ranges.
    ///
    /// # Errors
    /// A setting is outside of its range.
    pub fn validate(&self) -> Result<(), SettingsError> {
        let check = |valid: bool, field, value: &dyn ToString, allowed: &str| {
            let error = || SettingsError { field, value: shorten(value.to_string()), allowed: allowed.to_owned() };
            if valid { Ok(()) } else { Err(error()) }
        };
        let within = |value: f64, low: f64, high: f64| value > low && value < high;
        check(self.min_workers >= 1, "min_workers", &self.min_workers, "at least 1")?;
        let most = format!("{} (min_workers) to 10000", self.min_workers);
        check((self.min_workers..=10_000).contains(&self.max_workers), "max_workers", &self.max_workers, &most)?;
        let capacity = self.worker_capacity;
        check(capacity.is_finite() && capacity > 0.0, "worker_capacity", &capacity, "a finite number above 0")?;
        let target = self.target_utilization;
        check(target > 0.0 && target <= 1.0, "target_utilization", &target, "above 0, at most 1")?;
        check((0.0..1.0).contains(&self.tolerance), "tolerance", &self.tolerance, "0 to below 1")?;
        let interval = self.interval_seconds;
        check((1..=3_600).contains(&interval), "interval_seconds", &interval, "1 to 3600")?;
        self.validate_periods()?;
        let percent = self.scale_down_percent;
        check((1..=100).contains(&percent), "scale_down_percent", &percent, "1 to 100")?;
        check(within(self.startup_quantile, 0.0, 1.0), "startup_quantile", &self.startup_quantile, "above 0, below 1")?;
        let startup = self.initial_startup_seconds;
        check((0.0..=86_400.0).contains(&startup), "initial_startup_seconds", &startup, "0 to 86400")?;
        check(within(self.forecast_level, 0.5, 1.0), "forecast_level", &self.forecast_level, "above 0.5, below 1")?;
        let prices = self.prices.iter().flat_map(|prices| [Some(prices.on_demand), prices.spot]).flatten();
        for price in prices {
            check(price.is_finite() && price >= 0.0, "prices", &price, "finite numbers of at least 0")?;
        }
        Ok(())
    }

    fn validate_periods(&self) -> Result<(), SettingsError> {
        let interval = self.interval_seconds;
        let most = MAX_PERIOD_SLOTS as u32 * interval;
        let is_allowed = |&&period: &&u32| period.is_multiple_of(interval) && (2 * interval..=most).contains(&period);
        match self.periods.iter().find(|period| !is_allowed(period)) {
            None if self.periods.len() <= 8 => Ok(()),
            None => Err(SettingsError {
                field: "periods",
                value: format!("a list of {}", self.periods.len()),
                allowed: "at most 8 periods".into(),
            }),
            Some(period) => Err(SettingsError {
                field: "periods",
                value: period.to_string(),
                allowed: format!("multiples of interval_seconds ({interval}) from {} to {most}", 2 * interval),
            }),
        }
    }
}

/// Shortens the text of a very large or small float, which has hundreds of digits.
fn shorten(text: String) -> String {
    match text.parse::<f64>() {
        Ok(value) if text.len() > 24 => format!("{value:e}"),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_outside_of_their_range_are_rejected_by_name() {
        let mut settings = Settings::new(100.0);
        assert_eq!(settings.validate(), Ok(()));
        assert_eq!(settings.periods, [3_600, 86_400], "a week has more slots of a minute than the forecast holds");
        settings.target_utilization = 1.5;
        assert_eq!(
            settings.validate().unwrap_err().to_string(),
            "target_utilization is 1.5; allowed: above 0, at most 1"
        );
        settings = Settings { periods: vec![90], ..Settings::new(100.0) };
        assert!(settings.validate().unwrap_err().to_string().starts_with("periods is 90; allowed: multiples"));
        settings = Settings { max_workers: 2, min_workers: 3, ..Settings::new(100.0) };
        assert_eq!(settings.validate().unwrap_err().field, "max_workers");
        assert_eq!(Settings::new(f64::NAN).validate().unwrap_err().field, "worker_capacity");
    }
}
