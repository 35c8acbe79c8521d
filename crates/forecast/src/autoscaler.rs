//! One decision per observation: the reactive rule, the forecast, and the limits of scaling down.

use crate::clock::Clock;
use crate::decision::{Decision, Purchase, Reason};
use crate::forecaster::{Forecast, ForecastStatus, Forecaster, MAX_HORIZON_SLOTS};
use crate::history::Record;
use crate::reactive::{StabilizationWindow, desired, least_accepted, workers_for};
use crate::residuals::quantile;
use crate::settings::{Settings, SettingsError};
use crate::stuck::StuckDetector;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Start-up times that are kept.
const STARTUPS: usize = 64;

/// What is known at the time of a decision.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Observation {
    /// Wall clock in seconds since the epoch. Used across restarts only.
    pub wall_seconds: f64,
    /// Monotonic clock of this process in seconds.
    pub monotonic_seconds: f64,
    /// Load, `None` if the metric is missing. A value that is not finite or negative counts as missing.
    pub load: Option<f64>,
    /// Workers that the cluster should have, those included that start.
    pub workers: u32,
    /// Whether workers are being drained.
    pub is_draining: bool,
}

/// Evaluation of one sample of the metric.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Metric {
    Valid(f64),
    Stuck(f64),
    Missing,
}

/// A number of workers before the limits, and why.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Proposal {
    workers: u32,
    reason: Reason,
}

/// State of the autoscaler of one cluster. Serializable; a restored state continues with the next observation.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Autoscaler {
    settings: Settings,
    clock: Clock,
    /// Time of the last slot of the forecast.
    slot_seconds: Option<f64>,
    forecaster: Forecaster,
    startups: VecDeque<f64>,
    stuck: StuckDetector,
    window: StabilizationWindow,
    last_scale_up: Option<f64>,
    last_scale_down: Option<f64>,
}

impl Autoscaler {
    /// Creates an autoscaler without history.
    ///
    /// # Errors
    /// A setting is outside of its range.
    pub fn new(settings: Settings) -> Result<Self, SettingsError> {
        settings.validate()?;
        let forecaster = Forecaster::new(settings.interval_seconds, settings.period_slots(), settings.forecast_level);
        Ok(Self {
            settings,
            clock: Clock::default(),
            slot_seconds: None,
            forecaster,
            startups: VecDeque::new(),
            stuck: StuckDetector::default(),
            window: StabilizationWindow::default(),
            last_scale_up: None,
            last_scale_down: None,
        })
    }

    /// Adds a measured time from the decision for a worker until it serves, in seconds.
    pub fn record_startup(&mut self, seconds: f64) {
        if self.startups.len() == STARTUPS {
            self.startups.pop_front();
        }
        self.startups.push_back(seconds);
    }

    /// Returns the horizon of the forecast in seconds: the quantile of the start-up times, and the time until the next decision.
    pub fn horizon_seconds(&self) -> f64 {
        let measured = quantile(self.startups.iter().copied().collect(), self.settings.startup_quantile);
        measured.unwrap_or(self.settings.initial_startup_seconds) + f64::from(self.settings.interval_seconds)
    }

    /// Takes the decisions of a process before this one: forecast, delays and start-up times continue from there.
    pub fn resume<'a>(&mut self, records: impl IntoIterator<Item = &'a Record>) {
        for record in records {
            if let Some(seconds) = record.startup_seconds {
                self.record_startup(seconds);
            }
            let seconds = record.seconds as f64;
            self.step(&Observation {
                wall_seconds: seconds,
                monotonic_seconds: seconds,
                load: record.load,
                workers: record.workers,
                is_draining: false,
            });
        }
        self.clock.restart();
    }

    /// Takes an observation and returns the decision for it.
    pub fn step(&mut self, observation: &Observation) -> Decision {
        let interval = f64::from(self.settings.interval_seconds);
        let times = self.clock.advance(observation.wall_seconds, observation.monotonic_seconds, interval);
        let metric = self.metric(observation.load, times.delays);
        let sample = if let Metric::Valid(load) = metric { Some(load) } else { None };
        // What no number of workers serves is one value for the forecast, so that one absurd sample does not last.
        let most = f64::from(self.settings.max_workers) * self.settings.worker_capacity;
        let horizon = ((self.horizon_seconds() / interval).ceil() as usize).clamp(1, MAX_HORIZON_SLOTS);
        self.advance_slots(times.phase, sample.map(|load| load.min(most)), horizon);
        let forecast = self.forecaster.forecast(horizon);
        let forecast_status = self.forecaster.status();
        let active = forecast.as_ref().filter(|_| forecast_status == ForecastStatus::Active);
        let proposal = self.propose(metric, active, observation.workers);
        let decided = self.limit(proposal, observation, times.delays);
        let mut decision = Decision {
            load: observation.load,
            workers: observation.workers,
            desired: decided.workers,
            reactive: sample.map(|load| desired(&self.settings, load, observation.workers)),
            predictive: active.map(|forecast| self.needed(forecast)),
            forecast_status,
            clock_jump_seconds: (times.jump.abs() > 2.0 * interval).then_some(times.jump),
            reason: decided.reason,
            purchase: self.settings.prices.map(|it| Purchase::cheapest(decided.workers, self.settings.min_workers, it)),
            forecast,
            message: String::new(),
        };
        decision.message = decision.sentence(self.settings.worker_capacity);
        decision
    }

    fn metric(&mut self, load: Option<f64>, time: f64) -> Metric {
        match load.filter(|load| load.is_finite() && *load >= 0.0) {
            None => Metric::Missing,
            Some(load) if self.stuck.is_stuck(load, time, f64::from(self.settings.stuck_seconds)) => {
                Metric::Stuck(load)
            }
            Some(load) => Metric::Valid(load),
        }
    }

    /// Gives the forecaster the sample of the slot at `phase` seconds. A second observation within a slot is no sample.
    fn advance_slots(&mut self, phase: f64, sample: Option<f64>, horizon: usize) {
        let interval = f64::from(self.settings.interval_seconds);
        let Some(last) = self.slot_seconds else {
            self.slot_seconds = Some(phase);
            self.forecaster.observe(sample, horizon);
            return;
        };
        // Rounds, so that observations that are early or late by less than half a slot have one each.
        let slots = ((phase - last) / interval).round();
        if slots >= 1.0 {
            self.slot_seconds = Some(last + slots * interval);
            self.forecaster.skip(slots as usize - 1, horizon);
            self.forecaster.observe(sample, horizon);
        }
    }

    /// Returns the workers for a forecast: its expected load at the target, and its upper bound at the capacity.
    fn needed(&self, forecast: &Forecast) -> u32 {
        let for_expected = workers_for(forecast.expected, self.settings.target_load());
        for_expected.max(workers_for(forecast.upper, self.settings.worker_capacity))
    }

    /// Returns the workers that the forecast asks for: as they are while the forecast is within the tolerance, or fewer.
    fn predicted(&self, forecast: &Forecast, workers: u32) -> u32 {
        let needed = self.needed(forecast);
        let serves = |load: f64, per_worker: f64| workers_for(load, per_worker) <= workers;
        let is_tolerated = serves(forecast.upper, self.settings.worker_capacity)
            && serves(forecast.expected, self.settings.target_load() * (1.0 + self.settings.tolerance));
        if is_tolerated { needed.min(workers) } else { needed }
    }

    fn propose(&self, metric: Metric, forecast: Option<&Forecast>, workers: u32) -> Proposal {
        let predicted = forecast.map(|forecast| self.predicted(forecast, workers));
        let load = match metric {
            Metric::Valid(load) => load,
            // Without a sample the forecast can only add workers.
            Metric::Missing | Metric::Stuck(_) => {
                let reason = if metric == Metric::Missing { Reason::MetricMissing } else { Reason::MetricStuck };
                return match predicted.filter(|&predicted| predicted > workers) {
                    Some(predicted) => Proposal { workers: predicted, reason: Reason::ForecastAboveTarget },
                    None => Proposal { workers, reason },
                };
            }
        };
        let reactive = desired(&self.settings, load, workers);
        let proposed = match predicted {
            None => reactive,
            // With a forecast, the tolerance of the reactive rule keeps no worker.
            Some(predicted) if reactive <= workers => predicted.max(least_accepted(&self.settings, load)),
            Some(predicted) => predicted.max(reactive),
        };
        let reason = match proposed {
            _ if proposed < workers => Reason::LoadBelowTarget,
            _ if proposed == workers => Reason::OnTarget,
            _ if proposed == reactive => Reason::LoadAboveTarget,
            _ => Reason::ForecastAboveTarget,
        };
        Proposal { workers: proposed, reason }
    }

    /// Applies minimum, maximum, and the rules of scaling down.
    fn limit(&mut self, proposal: Proposal, observation: &Observation, time: f64) -> Proposal {
        let Settings { min_workers, max_workers, .. } = self.settings;
        let workers = observation.workers;
        let limited = proposal.workers.clamp(min_workers, max_workers);
        let window = f64::from(self.settings.stabilization_seconds);
        if self.window.is_empty() {
            // The first window of a process begins with the workers that exist.
            self.window.highest(workers, time, window);
        }
        let highest = self.window.highest(limited, time, window);
        if !(min_workers..=max_workers).contains(&workers) {
            return Proposal { workers: limited, reason: Reason::OutsideLimits };
        }
        if limited > workers {
            self.last_scale_up = Some(time);
        }
        if limited >= workers {
            let reason = match proposal.reason {
                _ if proposal.workers > max_workers => Reason::MaximumReached,
                Reason::LoadBelowTarget => Reason::OnTarget,
                reason => reason,
            };
            return Proposal { workers: limited, reason };
        }
        if observation.is_draining {
            return Proposal { workers, reason: Reason::Draining };
        }
        let pause = f64::from(self.settings.scale_down_interval_seconds);
        // Two windows after a scale-up: what noise added once, noise would add again.
        let is_recent = self.last_scale_down.is_some_and(|last| time - last < pause)
            || self.last_scale_up.is_some_and(|last| time - last < 2.0 * window);
        if highest >= workers || is_recent {
            return Proposal { workers, reason: Reason::Stabilizing };
        }
        self.last_scale_down = Some(time);
        let step = (u64::from(workers) * u64::from(self.settings.scale_down_percent) / 100).max(1) as u32;
        Proposal { workers: highest.max(workers - step), reason: Reason::LoadBelowTarget }
    }
}
