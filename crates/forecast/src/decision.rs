//! A scaling decision with its inputs, its forecast and its reason.

use crate::forecaster::{Forecast, ForecastStatus};
use crate::settings::Prices;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Why a number of workers was decided. Names are stable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Reason {
    /// The observed load needs more workers.
    LoadAboveTarget,
    /// The load that is forecast needs more workers before one that starts later would be ready.
    ForecastAboveTarget,
    /// Fewer workers have sufficed for the whole stabilization window.
    LoadBelowTarget,
    /// The load fits the workers.
    OnTarget,
    /// Fewer workers suffice, but not for the whole stabilization window, or the last scale-down was too recent.
    Stabilizing,
    /// Fewer workers suffice, but workers are being drained.
    Draining,
    /// There is no sample of the load: workers are not removed.
    MetricMissing,
    /// The load repeats one value although it usually changes: workers are not removed.
    MetricStuck,
    /// More workers are needed than the maximum allows.
    MaximumReached,
    /// The number of workers was outside of the limits.
    OutsideLimits,
}

impl Reason {
    /// Returns the stable name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::LoadAboveTarget => "LoadAboveTarget",
            Self::ForecastAboveTarget => "ForecastAboveTarget",
            Self::LoadBelowTarget => "LoadBelowTarget",
            Self::OnTarget => "OnTarget",
            Self::Stabilizing => "Stabilizing",
            Self::Draining => "Draining",
            Self::MetricMissing => "MetricMissing",
            Self::MetricStuck => "MetricStuck",
            Self::MaximumReached => "MaximumReached",
            Self::OutsideLimits => "OutsideLimits",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Workers by how they are bought.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Purchase {
    /// On-demand workers.
    pub on_demand: u32,
    /// Spot workers.
    pub spot: u32,
    /// Price of all of them per hour.
    pub price_per_hour: f64,
}

impl Purchase {
    /// Divides `workers`: the first `min_workers` are on-demand, the others are spot workers if those are cheaper.
    pub fn cheapest(workers: u32, min_workers: u32, prices: Prices) -> Self {
        let spot_price = prices.spot.filter(|spot| *spot < prices.on_demand);
        let spot = spot_price.map_or(0, |_| workers.saturating_sub(min_workers));
        let on_demand = workers - spot;
        let price_per_hour = f64::from(on_demand) * prices.on_demand + f64::from(spot) * spot_price.unwrap_or(0.0);
        Self { on_demand, spot, price_per_hour }
    }
}

/// One decision.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Decision {
    /// Observed load, if there was a sample.
    pub load: Option<f64>,
    /// Workers before the decision, those included that start.
    pub workers: u32,
    /// Workers after it.
    pub desired: u32,
    /// Workers that the reactive rule wants.
    pub reactive: Option<u32>,
    /// Workers that the forecast needs.
    pub predictive: Option<u32>,
    /// Forecast, also while it takes no part.
    pub forecast: Option<Forecast>,
    /// Whether the forecast took part.
    pub forecast_status: ForecastStatus,
    /// Seconds by which the wall clock jumped since the last observation, if it did. The decision does not depend on it.
    pub clock_jump_seconds: Option<f64>,
    /// Why.
    pub reason: Reason,
    /// On-demand and spot workers, with prices in the settings.
    pub purchase: Option<Purchase>,
    /// One sentence for people.
    pub message: String,
}

impl Decision {
    /// Returns the sentence for the other fields. `capacity` is the load that one worker serves.
    pub(crate) fn sentence(&self, capacity: f64) -> String {
        let action = match (self.workers, self.desired) {
            (before, after) if before == after => format!("Keep {}", plural(after)),
            (before, after) => format!("Scale from {before} to {}", plural(after)),
        };
        let load =
            self.load.map_or_else(|| "the load is unknown".into(), |load| format!("the load is {}", short(load)));
        let serves = format!("{} serve {}", plural(self.workers), short(f64::from(self.workers) * capacity));
        let because = match (self.reason, &self.forecast) {
            (Reason::ForecastAboveTarget, Some(forecast)) => {
                let Forecast { expected, upper, level, horizon_seconds, .. } = forecast;
                let (expected, upper) = (short(*expected), short(*upper));
                format!(
                    "within {horizon_seconds:.0} s a load of {expected} is expected, at most {upper} in {:.0} % of cases; {serves}",
                    level * 100.0
                )
            }
            (Reason::LoadAboveTarget, _) => format!("{load} and needs {}", self.reactive_workers()),
            (Reason::LoadBelowTarget, _) => format!("{load}, and fewer workers sufficed for the stabilization window"),
            (Reason::OnTarget | Reason::ForecastAboveTarget, _) => format!("{load}; {serves}"),
            (Reason::Stabilizing, _) => format!("{load}; fewer workers suffice, but the stabilization window is open"),
            (Reason::Draining, _) => format!("{load}; fewer workers suffice, but workers are being drained"),
            (Reason::MetricMissing, _) => "the metric is missing, so no worker is removed".into(),
            (Reason::MetricStuck, _) => {
                format!("the metric is stuck at {}, so no worker is removed", self.stuck_value())
            }
            (Reason::MaximumReached, _) => format!("{load}; more workers are needed than the maximum allows"),
            (Reason::OutsideLimits, _) => "the number of workers was outside of the limits".into(),
        };
        format!("{action}: {because}.")
    }

    fn reactive_workers(&self) -> String {
        self.reactive.map_or_else(|| "more workers".into(), plural)
    }

    fn stuck_value(&self) -> String {
        self.load.map_or_else(|| "one value".into(), short)
    }
}

fn plural(workers: u32) -> String {
    if workers == 1 { "1 worker".into() } else { format!("{workers} workers") }
}

/// Formats a load with three significant digits or more.
fn short(load: f64) -> String {
    if load.abs() < 100.0 { format!("{load:.2}") } else { format!("{load:.0}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_beyond_the_minimum_are_spot_workers_where_those_are_cheaper() {
        let prices = Prices { on_demand: 2.0, spot: Some(0.5) };
        assert_eq!(Purchase::cheapest(7, 3, prices), Purchase { on_demand: 3, spot: 4, price_per_hour: 8.0 });
        assert_eq!(Purchase::cheapest(2, 3, prices).spot, 0, "never the minimum");
        assert_eq!(Purchase::cheapest(7, 3, Prices { spot: Some(2.5), ..prices }).price_per_hour, 14.0);
        assert_eq!(Purchase::cheapest(7, 3, Prices { spot: None, ..prices }).on_demand, 7);
    }

    #[test]
    fn reasons_have_the_names_that_are_serialized() {
        for reason in [Reason::ForecastAboveTarget, Reason::MetricStuck, Reason::OutsideLimits] {
            assert_eq!(serde_json::to_value(reason).unwrap(), reason.as_str());
        }
    }
}
