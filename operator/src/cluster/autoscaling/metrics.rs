//! Metrics of the last decision about the number of workers of each cluster.

use std::sync::atomic::AtomicU64;

use engram_api::AutoscalingStatus;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use crate::context::Key;
use crate::telemetry::metrics::{CLUSTER_LABELS, ClusterLabels, Registrar};

type Figures = Family<ClusterLabels, Gauge<f64, AtomicU64>>;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DecisionLabels {
    namespace: String,
    learner_cluster: String,
    reason: String,
    forecast: String,
}

/// Series of the last decisions.
#[derive(Default)]
pub(crate) struct AutoscalingMetrics {
    desired: Family<ClusterLabels, Gauge>,
    decisions: Family<DecisionLabels, Gauge>,
    load: Figures,
    expected: Figures,
    upper: Figures,
    horizon: Figures,
}

impl AutoscalingMetrics {
    /// Adds the last decision for a cluster.
    pub(crate) fn set(&self, key: &Key, decision: &AutoscalingStatus) {
        let labels = ClusterLabels { namespace: key.namespace.clone(), learner_cluster: key.name.clone() };
        self.desired.get_or_create(&labels).set(decision.desired_workers.into());
        for (family, value) in [
            (&self.load, decision.load),
            (&self.expected, decision.expected_load),
            (&self.upper, decision.upper_load),
            (&self.horizon, decision.horizon_seconds),
        ] {
            if let Some(value) = value {
                family.get_or_create(&labels).set(value);
            }
        }
        let ClusterLabels { namespace, learner_cluster } = labels;
        let (reason, forecast) = (decision.reason.clone(), decision.forecast.clone());
        self.decisions.get_or_create(&DecisionLabels { namespace, learner_cluster, reason, forecast }).set(1);
    }

    /// Registers the series.
    pub(crate) fn register(self, registrar: &mut Registrar) {
        let help = "Workers that the autoscaler decided on";
        registrar.register("engram_operator_autoscaling_desired_workers", &CLUSTER_LABELS, help, self.desired);
        let help = "1 for reason and forecast state of the last decision of the autoscaler";
        let [namespace, learner_cluster] = CLUSTER_LABELS;
        let labels = [namespace, learner_cluster, "reason", "forecast"];
        registrar.register("engram_operator_autoscaling_decision", &labels, help, self.decisions);
        let help = "Reads and writes of partitions per second of all workers, as the autoscaler measured it";
        registrar.register("engram_operator_autoscaling_load", &CLUSTER_LABELS, help, self.load);
        let help = "Highest load that the autoscaler expects until a worker that starts now would be ready";
        registrar.register("engram_operator_autoscaling_expected_load", &CLUSTER_LABELS, help, self.expected);
        let help = "Upper bound of the load that the autoscaler expects";
        registrar.register("engram_operator_autoscaling_upper_load", &CLUSTER_LABELS, help, self.upper);
        let help = "How far the forecast of the autoscaler looks ahead: the measured start-up time of a worker";
        registrar.register("engram_operator_autoscaling_horizon_seconds", &CLUSTER_LABELS, help, self.horizon);
    }
}
