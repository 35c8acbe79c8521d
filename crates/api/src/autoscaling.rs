//! `spec.autoscaling` of a `LearnerCluster`, and what the operator reports about it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::manifest_enum::words;
use crate::quantity::Duration;

words! {
    /// Who changes the number of workers.
    pub enum AutoscalingMode {
        /// The user: the operator only publishes what it would decide.
        DryRun,
        /// An autoscaler outside, such as KEDA or a HorizontalPodAutoscaler, to which the operator offers its decision.
        External,
        /// The operator, through the scale subresource.
        Operator,
    }
}

/// How the number of workers follows the load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Autoscaling {
    /// Who changes `spec.workers`. Only one may: with `Operator`, a change by others pauses the operator for ten minutes.
    #[serde(default = "default_mode")]
    pub mode: AutoscalingMode,

    /// Fewest workers, at least `replicationFactor`.
    #[schemars(range(min = 1, max = 100), example = 3)]
    pub min_workers: u32,

    /// Most workers, at least `minWorkers`.
    #[schemars(range(min = 1, max = 100), example = 10)]
    pub max_workers: u32,

    /// Reads and writes of partitions per second that one worker serves within its latency objective: measure it with
    /// `engram_operator_autoscaling_load` under load.
    #[schemars(range(min = 1, max = 1_000_000_000), example = 2_000)]
    pub operations_per_worker: u32,

    /// Share of `operationsPerWorker` that is used on average, above 0 and at most 1. Lower costs more workers and leaves room for peaks.
    #[serde(default = "default_target_utilization")]
    #[schemars(range(min = 0.05, max = 1.0))]
    pub target_utilization: f64,

    /// Time between decisions, 10s to 1h. The forecast has one value for each.
    #[serde(default = "default_interval")]
    #[schemars(extend("x-minimum" = "10s", "x-maximum" = "1h"))]
    pub interval: Duration,
}

const fn default_mode() -> AutoscalingMode {
    AutoscalingMode::DryRun
}

const fn default_target_utilization() -> f64 {
    0.7
}

const fn default_interval() -> Duration {
    Duration::from_millis(60_000)
}

/// Last decision about the number of workers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct AutoscalingStatus {
    /// Number of workers that the operator decided on.
    pub desired_workers: i32,
    /// Why, in CamelCase: `LoadAboveTarget`, `ForecastAboveTarget`, `LoadBelowTarget`, `OnTarget`, `Stabilizing`, `Draining`,
    /// `MetricMissing`, `MetricStuck`, `MaximumReached`, `OutsideLimits` or `Conflict`.
    pub reason: String,
    /// The same in a sentence, with the figures.
    pub message: String,
    /// Operations per second of all workers; absent if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load: Option<f64>,
    /// Highest operations per second that are expected until a worker that starts now would be ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected_load: Option<f64>,
    /// Upper bound of the expected load.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upper_load: Option<f64>,
    /// Seconds that the forecast looks ahead: the measured start-up time of a worker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub horizon_seconds: Option<f64>,
    /// Whether the forecast takes part: `Learning`, `Active`, `Inaccurate` or `Stale`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub forecast: String,
    /// When it was decided, RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-format" = "date-time"))]
    pub time: Option<String>,
}
