//! Replays a load against a model of a cluster, with the predictive and with the reactive rule.
//!
//! A worker serves its capacity from its start-up time on. Removed workers serve nothing more, and are paid until their drain ends.

use crate::autoscaler::{Autoscaler, Observation};
use crate::decision::{Decision, Purchase, Reason};
use crate::reactive::{ReactiveAutoscaler, desired};
use crate::settings::{Settings, SettingsError};
use serde::Serialize;
use std::collections::BTreeMap;

/// Time within which a change in the opposite direction is a reversal, in seconds.
const REVERSAL_SECONDS: f64 = 600.0;

/// Load of one interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoadPoint {
    /// Load that the cluster has to serve.
    pub demand: f64,
    /// What the metric reports, `None` if it is missing.
    pub metric: Option<f64>,
    /// Wall clock in seconds since the epoch, as the autoscaler reads it.
    pub wall_seconds: f64,
}

impl LoadPoint {
    /// Creates a point whose metric reports the demand.
    pub const fn exact(demand: f64, wall_seconds: f64) -> Self {
        Self { demand, metric: Some(demand), wall_seconds }
    }
}

/// Model of the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ClusterModel {
    /// Time from the decision for a worker until it serves, in seconds.
    pub startup_seconds: f64,
    /// Time from the decision against workers until they are gone, in seconds. No further worker is removed meanwhile.
    pub drain_seconds: f64,
}

/// Which rule decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Rule {
    /// [`ReactiveAutoscaler`].
    Reactive,
    /// [`Autoscaler`].
    Predictive,
}

/// State of the cluster at one interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Step {
    /// Load.
    pub demand: f64,
    /// Workers that serve.
    pub ready: u32,
    /// Workers decided.
    pub desired: u32,
}

/// Result of one rule.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RuleReport {
    /// The rule.
    pub rule: Rule,
    /// Intervals whose load exceeded the capacity of the workers that served.
    pub violations: u64,
    /// Load beyond that capacity, times hours.
    pub unserved_load_hours: f64,
    /// Hours of all workers that were paid.
    pub replica_hours: f64,
    /// Price of those hours, with prices in the settings: for the workers beyond the minimum that of spot workers, if it is lower.
    pub cost: Option<f64>,
    /// Changes of the number of workers.
    pub changes: u64,
    /// Changes in the opposite direction of a change less than 10 minutes before.
    pub reversals: u64,
    /// Most workers.
    pub most_workers: u32,
    /// Number of decisions by reason; empty for the reactive rule.
    pub reasons: BTreeMap<Reason, u64>,
    /// The cluster per interval.
    #[serde(skip)]
    pub steps: Vec<Step>,
    /// Decisions that changed the number of workers; empty for the reactive rule.
    #[serde(skip)]
    pub decisions: Vec<(f64, Decision)>,
}

impl RuleReport {
    const fn new(rule: Rule) -> Self {
        Self {
            rule,
            violations: 0,
            unserved_load_hours: 0.0,
            replica_hours: 0.0,
            cost: None,
            changes: 0,
            reversals: 0,
            most_workers: 0,
            reasons: BTreeMap::new(),
            steps: Vec::new(),
            decisions: Vec::new(),
        }
    }
}

/// Workers in all stages.
#[derive(Debug, Default)]
struct Cluster {
    ready: u32,
    /// Times at which starting workers serve, in increasing order.
    starting: Vec<f64>,
    /// Workers that drain, and the time at which they are gone.
    draining: Option<(u32, f64)>,
    last_change: Option<(f64, bool)>,
}

impl Cluster {
    fn workers(&self) -> u32 {
        self.ready + self.starting.len() as u32
    }

    fn paid(&self) -> u32 {
        self.workers() + self.draining.map_or(0, |(workers, _)| workers)
    }

    /// Completes what is due at `time`.
    fn advance(&mut self, time: f64) {
        let due = self.starting.partition_point(|ready_at| *ready_at <= time);
        self.starting.drain(..due);
        self.ready += due as u32;
        self.draining = self.draining.filter(|(_, end)| *end > time);
    }

    /// Starts or removes workers; those that start are removed first.
    fn set(&mut self, desired: u32, time: f64, model: ClusterModel) {
        let workers = self.workers();
        for _ in workers..desired {
            self.starting.push(time + model.startup_seconds);
        }
        let mut surplus = workers.saturating_sub(desired);
        while surplus > 0 && self.starting.pop().is_some() {
            surplus -= 1;
        }
        self.ready -= surplus;
        if surplus > 0 && model.drain_seconds > 0.0 {
            let before = self.draining.map_or(0, |(workers, _)| workers);
            self.draining = Some((before + surplus, time + model.drain_seconds));
        }
    }

    /// Counts a change of the number of workers at `time`.
    fn count_change(&mut self, desired: u32, time: f64, report: &mut RuleReport) {
        let workers = self.workers();
        if desired == workers {
            return;
        }
        let is_up = desired > workers;
        report.changes += 1;
        let is_reversal = |(last, was_up): (f64, bool)| was_up != is_up && time - last < REVERSAL_SECONDS;
        report.reversals += u64::from(self.last_change.is_some_and(is_reversal));
        self.last_change = Some((time, is_up));
    }
}

/// Decides by either rule.
enum Decider {
    Reactive(ReactiveAutoscaler),
    Predictive(Box<Autoscaler>),
}

impl Decider {
    fn new(rule: Rule, settings: &Settings, model: ClusterModel) -> Result<Self, SettingsError> {
        Ok(match rule {
            Rule::Reactive => Self::Reactive(ReactiveAutoscaler::default()),
            Rule::Predictive => {
                let mut autoscaler = Autoscaler::new(settings.clone())?;
                autoscaler.record_startup(model.startup_seconds);
                Self::Predictive(Box::new(autoscaler))
            }
        })
    }

    fn decide(&mut self, settings: &Settings, observation: &Observation, report: &mut RuleReport) -> u32 {
        match self {
            Self::Reactive(reactive) => {
                let Observation { load, workers, monotonic_seconds, .. } = *observation;
                reactive.decide(settings, load, workers, monotonic_seconds)
            }
            Self::Predictive(autoscaler) => {
                let decision = autoscaler.step(observation);
                let desired = decision.desired;
                *report.reasons.entry(decision.reason).or_default() += 1;
                if desired != observation.workers {
                    report.decisions.push((observation.wall_seconds, decision));
                }
                desired
            }
        }
    }
}

/// Replays `load`, one point per interval of the settings, with one rule. The cluster starts with the workers for the first point.
///
/// # Errors
/// A setting is outside of its range.
pub fn replay(
    rule: Rule,
    load: &[LoadPoint],
    settings: &Settings,
    model: ClusterModel,
) -> Result<RuleReport, SettingsError> {
    settings.validate()?;
    let mut decider = Decider::new(rule, settings, model)?;
    let mut report = RuleReport::new(rule);
    let first = load.first().map_or(0, |point| desired(settings, point.demand, 0));
    let mut cluster = Cluster { ready: first.clamp(settings.min_workers, settings.max_workers), ..Cluster::default() };
    let interval = f64::from(settings.interval_seconds);
    for (index, point) in load.iter().enumerate() {
        let time = index as f64 * interval;
        cluster.advance(time);
        let observation = Observation {
            wall_seconds: point.wall_seconds,
            monotonic_seconds: time,
            load: point.metric,
            workers: cluster.workers(),
            is_draining: cluster.draining.is_some(),
        };
        let desired = decider.decide(settings, &observation, &mut report);
        cluster.count_change(desired, time, &mut report);
        cluster.set(desired, time, model);
        account(&mut report, &cluster, point.demand, desired, settings);
    }
    Ok(report)
}

/// Adds one interval to the report.
fn account(report: &mut RuleReport, cluster: &Cluster, demand: f64, desired: u32, settings: &Settings) {
    let hours = f64::from(settings.interval_seconds) / 3_600.0;
    let unserved = demand - f64::from(cluster.ready) * settings.worker_capacity;
    if unserved > 0.0 {
        report.violations += 1;
        report.unserved_load_hours += unserved * hours;
    }
    report.replica_hours += f64::from(cluster.paid()) * hours;
    if let Some(prices) = settings.prices {
        let purchase = Purchase::cheapest(cluster.paid(), settings.min_workers, prices);
        *report.cost.get_or_insert_default() += purchase.price_per_hour * hours;
    }
    report.most_workers = report.most_workers.max(desired);
    report.steps.push(Step { demand, ready: cluster.ready, desired });
}
