//! Metrics of LearnerRuns. Only the leader has series, because it alone reconciles runs.

use parking_lot::Mutex;
use std::collections::BTreeMap;

use engram_api::status::RunPhase;
use k8s_openapi::jiff::Timestamp;
use kube::runtime::reflector::Store;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use crate::context::Key;
use crate::kube::stored_object::StoredObject as _;
use crate::learner_run::object::RunObject;
use crate::learner_run::{EndedRun, RunResult};
use crate::telemetry::metrics::Registrar;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, EncodeLabelSet)]
struct PhaseLabels {
    namespace: String,
    learner_cluster: String,
    kind: String,
    phase: String,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, EncodeLabelSet)]
struct ResultLabels {
    namespace: String,
    learner_cluster: String,
    kind: String,
    result: &'static str,
}

/// Figures of the runs of all clusters.
#[derive(Default)]
pub(crate) struct RunMetrics {
    /// Watched runs, by scope.
    watched: Mutex<Vec<Store<RunObject>>>,
    /// Runs that ended while this replica was the leader. Counters are created with the cluster's first run, so that the first
    /// failure is an increase.
    ended: Family<ResultLabels, Counter>,
    /// Time of the last end, in seconds since 1970, also of runs that were deleted since.
    last_ends: Mutex<BTreeMap<ResultLabels, i64>>,
}

impl RunMetrics {
    /// Adds the runs of a scope.
    pub(crate) fn watch(&self, store: Store<RunObject>) {
        self.watched.lock().push(store);
    }

    /// Records an ended run; `is_new` if it ended just now.
    pub(crate) fn record_end(&self, namespace: &str, run: &EndedRun, is_new: bool) {
        for result in RunResult::ALL {
            drop(self.ended.get_or_create(&labels(namespace, run, result)));
        }
        let labels = labels(namespace, run, run.result);
        if is_new {
            self.ended.get_or_create(&labels).inc();
        }
        let ended = run.ended.parse::<Timestamp>().map_or(0, Timestamp::as_second);
        let mut ends = self.last_ends.lock();
        let last = ends.entry(labels).or_insert(ended);
        *last = ended.max(*last);
    }

    /// Removes the clusters of a scope that are not in `present`.
    pub(crate) fn keep_only(&self, scope: Option<&str>, present: impl Fn(&Key) -> bool) {
        let is_kept = |labels: &ResultLabels| {
            let key = Key { namespace: labels.namespace.clone(), name: labels.learner_cluster.clone() };
            key.stays(scope, &present)
        };
        self.last_ends.lock().retain(|labels, _| {
            let is_kept = is_kept(labels);
            if !is_kept {
                // The counters of all results were created together.
                for result in RunResult::ALL {
                    self.ended.remove(&ResultLabels { result: result.as_str(), ..labels.clone() });
                }
            }
            is_kept
        });
    }

    /// Registers the series, without values unless this replica is the leader.
    pub(crate) fn register(&self, registrar: &mut Registrar, is_leader: bool) {
        let (phases, ends) = (Family::<PhaseLabels, Gauge>::default(), Family::<ResultLabels, Gauge>::default());
        if is_leader {
            for store in self.watched.lock().iter() {
                for run in store.state() {
                    phases.get_or_create(&phase_of(&run)).inc();
                }
            }
            for (labels, ended) in self.last_ends.lock().iter() {
                ends.get_or_create(labels).set(*ended);
            }
        }
        let [namespace, cluster, kind] = ["namespace", "learner_cluster", "kind"];
        let help = "LearnerRuns by phase; series of the leader only";
        registrar.register("engram_runs", &[namespace, cluster, kind, "phase"], help, phases);
        let results = [namespace, cluster, kind, "result"];
        let help = "LearnerRuns that ended while this replica was the leader, by result";
        registrar.register("engram_ended_runs", &results, help, self.ended.clone());
        let help = "Time at which the last LearnerRun with this result ended, in seconds since the Unix epoch";
        registrar.register("engram_last_run_end_timestamp_seconds", &results, help, ends);
    }
}

fn labels(namespace: &str, run: &EndedRun, result: RunResult) -> ResultLabels {
    ResultLabels {
        namespace: namespace.to_owned(),
        learner_cluster: run.cluster.clone(),
        kind: run.kind.clone(),
        result: result.as_str(),
    }
}

fn phase_of(run: &RunObject) -> PhaseLabels {
    PhaseLabels {
        namespace: run.namespace().to_owned(),
        learner_cluster: run.cluster().to_owned(),
        kind: run.head().kind.clone(),
        phase: run.status().phase.unwrap_or(RunPhase::Pending).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(result: RunResult, ended: &str) -> EndedRun {
        EndedRun { cluster: "words".into(), kind: "Memory".into(), result, ended: ended.into() }
    }

    #[test]
    fn ended_runs_are_counted_once_and_forgotten_with_their_cluster() {
        let metrics = RunMetrics::default();
        let first = ended(RunResult::Failed, "2026-11-28T04:00:00Z");
        metrics.record_end("research", &first, true);
        // Every reconcile of an ended run records it again.
        metrics.record_end("research", &first, false);
        metrics.record_end("research", &ended(RunResult::Failed, "2026-11-28T03:00:00Z"), false);
        let count = |result| metrics.ended.get_or_create(&labels("research", &first, result)).get();
        assert_eq!(RunResult::ALL.map(count), [0, 1, 0]);
        let at = metrics.last_ends.lock().values().copied().collect::<Vec<_>>();
        assert_eq!(at, [1_795_838_400], "the end of the last run");

        metrics.keep_only(Some("elsewhere"), |_| false);
        assert_eq!(metrics.last_ends.lock().len(), 1);
        metrics.keep_only(None, |_| false);
        assert_eq!(metrics.last_ends.lock().len(), 0);
        assert_eq!(count(RunResult::Failed), 0, "a new cluster of this name starts from zero");
    }
}
