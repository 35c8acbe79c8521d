//! Conditions and phase of a cluster that is reconciled.

use engram_api::Code;
use engram_api::status::{ClusterPhase, Truth, WorkerCounts, condition};

use crate::cluster::build::Inputs;
use crate::cluster::observe::observation::Observation;
use crate::cluster::plan::safety;
use crate::cluster::status::gpu::set_gpu_condition;
use crate::cluster::status::progress::{StuckPods, in_progress, stuck_pods, unavailable, under_replicated};
use crate::cluster::status::{PlanSummary, StatusWriter};
use crate::cluster::validate::ValidatedCluster;
use crate::names::UPGRADE;

/// What the conditions and the phase of a cluster follow from.
pub(super) struct Assessment<'a> {
    cluster: &'a ValidatedCluster,
    observed: &'a Observation,
    plan: &'a PlanSummary<'a>,
    workers: WorkerCounts,
    /// Whether all pods are there, ready and up to date.
    all_up: bool,
    /// Whether all replicas of all partitions are in sync.
    is_full: bool,
    is_suspended: bool,
    /// Whether nothing is left to do.
    is_settled: bool,
    bootstrap: Option<Bootstrap>,
    stuck: Option<StuckPods>,
    /// What is in progress.
    progress: String,
    /// The partitions that are not served.
    unavailable: Option<String>,
}

/// A bootstrap from a snapshot that is in progress.
struct Bootstrap {
    progress: String,
    /// Reason of the conditions if it fails. It is retried, and succeeds once the problem is fixed.
    problem: Option<&'static str>,
}

impl<'a> Assessment<'a> {
    pub(super) fn of(
        cluster: &'a ValidatedCluster,
        observed: &'a Observation,
        plan: &'a PlanSummary<'a>,
        now: &str,
    ) -> Self {
        let (workers, map) = (counts(observed), observed.map.as_ref());
        let wanted = i32::try_from(plan.inputs.replicas).unwrap_or(i32::MAX);
        let all_up = workers.ready == wanted && workers.total == wanted && workers.up_to_date == wanted;
        let is_full = map.is_some_and(|map| map.is_full(cluster.spec.replication_factor));
        let is_marked = map.is_none_or(|map| map.suspended);
        let is_suspended = cluster.is_suspended() && workers.total == 0 && is_marked;
        let desired_pods = if cluster.is_suspended() { 0 } else { cluster.spec.workers };
        let has_its_size = plan.inputs.replicas == desired_pods;
        let bootstrapping = observed.bootstrapping.as_ref().filter(|_| map.is_none());
        Self {
            cluster,
            observed,
            plan,
            workers,
            all_up,
            is_full,
            is_suspended,
            is_settled: !plan.is_changing && all_up && (is_full || is_suspended) && has_its_size,
            bootstrap: bootstrapping.map(|bootstrap| Bootstrap {
                progress: bootstrap.to_string(),
                problem: bootstrap.problem.as_ref().map(|(_, code, _)| bootstrap_problem(code)),
            }),
            stuck: stuck_pods(cluster, observed, now),
            progress: in_progress(cluster, observed, plan.inputs, plan.is_changing),
            unavailable: unavailable(cluster, observed),
        }
    }

    /// Returns the counts of workers.
    pub(super) fn into_workers(self) -> WorkerCounts {
        self.workers
    }

    /// Sets all conditions.
    pub(super) fn set_conditions(&self, writer: &mut StatusWriter<'_>) {
        let (ready, reason, message) = self.ready();
        writer.set(condition::READY, ready, reason, &message);
        self.set_reconciling(writer, reason, &message);
        self.set_stalled(writer);
        writer.set(condition::ACCEPTED, Truth::True, "Valid", "");
        self.set_replicated(writer);
        set_gpu_condition(writer, self.cluster, self.observed, self.plan.gpu);
        self.set_update_available(writer);
        self.set_suspended(writer);
    }

    /// Returns condition Ready: whether it holds, reason and message.
    fn ready(&self) -> (Truth, &'static str, String) {
        let stuck = self.stuck.as_ref();
        if self.is_suspended {
            let message = "no pods run; the disks are kept; set spec.suspend to false to resume";
            (Truth::False, "Suspended", message.to_owned())
        } else if safety::is_mass_failure(self.observed) {
            let message = "many workers are unreachable at once; none is replaced until some send heartbeats again; \
                           check nodes and network";
            (Truth::Unknown, "MassFailure", message.to_owned())
        } else if let Some(Bootstrap { progress, problem }) = &self.bootstrap {
            (Truth::False, problem.unwrap_or("Bootstrapping"), progress.clone())
        } else if self.observed.map.is_none() {
            let waiting = ("WaitingForPartitionMap", &self.progress);
            let (reason, message) = stuck.map_or(waiting, |stuck| (stuck.reason, &stuck.message));
            (Truth::False, reason, message.clone())
        } else if let Some(unavailable) = &self.unavailable {
            let cause = stuck.map_or(&self.progress, |stuck| &stuck.message);
            (Truth::False, "PartitionsUnavailable", format!("{unavailable}; {cause}"))
        } else if let Some(stuck) = stuck {
            (Truth::False, stuck.reason, format!("all partitions are served; {}", stuck.message))
        } else if !self.is_settled {
            (Truth::False, "Reconciling", format!("all partitions are served; {}", self.progress))
        } else {
            (Truth::True, "AllPartitionsServed", String::new())
        }
    }

    /// Returns the pods that do not start by themselves.
    fn stalled(&self) -> Option<&StuckPods> {
        self.stuck.as_ref().filter(|stuck| stuck.is_stalled && !self.is_suspended)
    }

    /// Sets condition Reconciling; reason and message are those of condition Ready.
    fn set_reconciling(&self, writer: &mut StatusWriter<'_>, reason: &str, message: &str) {
        if self.cluster.is_paused() {
            let message = "spec.paused is true; set it to false to continue";
            writer.set(condition::RECONCILING, Truth::False, "Paused", message);
            return;
        }
        let is_reconciling = !(self.is_settled || self.is_suspended || self.stalled().is_some());
        let message = if self.is_settled { "" } else { message };
        writer.set(condition::RECONCILING, truth(is_reconciling), reason, message);
    }

    fn set_stalled(&self, writer: &mut StatusWriter<'_>) {
        let bootstrap = self.bootstrap.as_ref();
        let problem = bootstrap.and_then(|bootstrap| Some((bootstrap.problem?, &bootstrap.progress)));
        match problem.or_else(|| self.stalled().map(|stuck| (stuck.reason, &stuck.message))) {
            Some((reason, message)) => writer.set(condition::STALLED, Truth::True, reason, message),
            None => writer.set(condition::STALLED, Truth::False, "Progressing", ""),
        }
    }

    fn set_replicated(&self, writer: &mut StatusWriter<'_>) {
        if self.is_full {
            writer.set(condition::REPLICATED, Truth::True, "AllReplicasInSync", "");
        } else {
            writer.set(condition::REPLICATED, Truth::False, "UnderReplicated", &self.replication_text());
        }
    }

    /// Returns why the partitions are not fully replicated.
    fn replication_text(&self) -> String {
        let few = under_replicated(self.cluster, self.observed).or_else(|| self.unavailable.clone());
        let (few, progress) = (few.unwrap_or_default(), self.progress.as_str());
        let rest = progress.strip_suffix(few.as_str()).map_or(progress, |rest| rest.trim_end_matches("; "));
        if rest.is_empty() { format!("{few}; re-replication is in progress") } else { format!("{few}; {rest}") }
    }

    fn set_update_available(&self, writer: &mut StatusWriter<'_>) {
        let Some(update) = self.plan.update else {
            writer.set(condition::UPDATE_AVAILABLE, Truth::False, "UpToDate", "");
            return;
        };
        let worker = &self.plan.inputs.worker;
        let message = format!(
            "running {} (template {}); available {} (template {}); to accept it set spec.upgrade: Auto or annotation {UPGRADE}={}",
            worker.image, worker.template_revision, update.image, update.template_revision, update.template_revision
        );
        writer.set(condition::UPDATE_AVAILABLE, Truth::True, "NewerVersionAvailable", &message);
    }

    fn set_suspended(&self, writer: &mut StatusWriter<'_>) {
        let (reason, message) = match self.cluster.is_suspended() {
            true if self.is_suspended => ("SuspendRequested", ""),
            true => ("SuspendRequested", "pods are deleted once all replicas are in sync"),
            false => ("NotRequested", ""),
        };
        writer.set(condition::SUSPENDED, truth(self.is_suspended), reason, message);
    }

    /// Returns the phase, which sums up the conditions.
    pub(super) fn phase(&self) -> ClusterPhase {
        let Self { cluster, observed, plan, workers, .. } = self;
        let map = observed.map.as_ref();
        let is_served = map.is_some_and(|map| map.partitions.iter().all(|partition| partition.activated));
        let has_served = matches!(
            observed.status.phase,
            Some(ClusterPhase::Ready | ClusterPhase::Degraded | ClusterPhase::Unavailable)
        );
        if self.is_suspended {
            ClusterPhase::Suspended
        } else if cluster.is_suspended() {
            ClusterPhase::Suspending
        } else if self.ready().0 == Truth::True {
            ClusterPhase::Ready
        } else if self.stalled().is_some() {
            ClusterPhase::Stalled
        } else if map.is_none() || (!is_served && !has_served) {
            ClusterPhase::Starting
        } else if !is_served {
            ClusterPhase::Unavailable
        } else if is_scaling(cluster, observed, plan.inputs) {
            ClusterPhase::Scaling
        } else if workers.up_to_date != workers.total || (self.all_up && self.is_full) {
            ClusterPhase::Updating
        } else {
            ClusterPhase::Degraded
        }
    }
}

/// Returns whether the number of workers changes, as opposed to a worker that is missing.
fn is_scaling(cluster: &ValidatedCluster, observed: &Observation, inputs: &Inputs) -> bool {
    let is_known = |ordinal: u32| {
        observed.pods.iter().any(|pod| pod.ordinal == ordinal)
            || observed.map.as_ref().is_some_and(|map| map.stores.contains_key(&ordinal))
    };
    inputs.replicas != cluster.spec.workers
        || observed.set.as_ref().is_some_and(|set| set.replicas != inputs.replicas)
        || observed.pods.iter().any(|pod| pod.ordinal >= inputs.replicas)
        || !(0..inputs.replicas).all(is_known)
}

/// Returns the condition reason for a failed bootstrap.
fn bootstrap_problem(code: &str) -> &'static str {
    match Code::find(code) {
        Some(Code::SnapshotUnusable) => "SnapshotUnusable",
        Some(Code::CapacityExceeded) => "SnapshotTooLarge",
        Some(Code::StorageUnusable) => "StorageUnusable",
        _ => "BootstrapFailed",
    }
}

fn counts(observed: &Observation) -> WorkerCounts {
    let newest = observed.set.as_ref().map(|set| set.update_revision.as_str()).unwrap_or_default();
    let count = |number: usize| i32::try_from(number).unwrap_or(i32::MAX);
    let pods = &observed.pods;
    // The first pods of a cluster may be older than the first status of its StatefulSet; they are no update.
    let is_first = newest.is_empty() && observed.map.is_none();
    WorkerCounts {
        total: count(pods.len()),
        ready: count(pods.iter().filter(|pod| pod.ready && !pod.terminating).count()),
        up_to_date: count(pods.iter().filter(|pod| is_first || pod.revision == newest).count()),
        // Known to the plan.
        draining: 0,
    }
}

fn truth(holds: bool) -> Truth {
    if holds { Truth::True } else { Truth::False }
}
