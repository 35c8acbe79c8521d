//! Predictive autoscaling as values in and decisions out: how many workers a cluster needs for its load, now and when a worker that
//! starts now is ready.
//!
//! - [`holt_winters`]: damped additive Holt-Winters smoothing, its initial state and its fit.
//! - [`forecaster`]: a forecast of the load with an upper quantile, from samples on a grid of slots; judges itself against a naive forecast.
//! - [`reactive`]: the rule without a forecast, and the limits of scaling down.
//! - [`autoscaler`], [`decision`]: one decision per observation, with its inputs and its reason.
//! - [`history`]: past decisions as text, from which another process continues.
//! - [`simulate`]: replays a load with both rules against a model of a cluster.
//!
//! There is no I/O and no clock here: times are passed in. Invariants:
//! - **Never fewer workers than the reactive rule accepts** for the observed load, within the limits of the settings.
//! - **No sample, no scale-down**: a metric that is missing or stuck can only add workers.
//! - **Time is monotonic**: a jump of the wall clock changes no decision.
//! - **State is bounded** and can be serialized: at most [`forecaster::MAX_SAMPLES`] samples and [`residuals::CAPACITY`] residuals.
#![forbid(unsafe_code)]

pub mod autoscaler;
mod clock;
pub mod decision;
pub mod forecaster;
pub mod history;
pub mod holt_winters;
pub mod reactive;
pub mod residuals;
pub mod settings;
pub mod simulate;
mod stuck;

pub use autoscaler::{Autoscaler, Observation};
pub use decision::{Decision, Reason};
pub use settings::{Settings, SettingsError};
