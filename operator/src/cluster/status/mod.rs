//! Status of a cluster, computed from the observed state.

mod conditions;
pub(crate) mod epochs;
pub(crate) mod gpu;
pub(crate) mod progress;
pub(crate) mod throttle;

use engram_api::status::{
    ClusterPhase, Condition, LearnerClusterStatus, Member, PartitionCounts, Truth, WorkerRevision, condition,
};

use crate::cluster::build::Inputs;
use crate::cluster::observe::observation::Observation;
use crate::cluster::plan::partitions_with;
use crate::cluster::plan::safety::StallReason;
use crate::cluster::status::conditions::Assessment;
use crate::cluster::status::gpu::Gpu;
use crate::cluster::validate::{InvalidSpec, ValidatedCluster};
use crate::kube::conditions::set_condition;

/// What the plan says about the cluster.
pub(crate) struct PlanSummary<'a> {
    pub(crate) inputs: &'a Inputs,
    /// Revision of the workers that is available and not accepted.
    pub(crate) update: Option<&'a WorkerRevision>,
    pub(crate) gpu: &'a Gpu,
    /// Whether it changes anything.
    pub(crate) is_changing: bool,
}

/// Returns the status of a cluster with an invalid spec; everything but conditions and phase is unchanged.
pub fn invalid_spec_status(
    generation: i64,
    old: &LearnerClusterStatus,
    problem: &InvalidSpec,
    now: &str,
) -> LearnerClusterStatus {
    let mut writer = StatusWriter::new(old, generation, now);
    writer.set(condition::ACCEPTED, Truth::False, "Invalid", &problem.message);
    writer.set(condition::STALLED, Truth::True, "Invalid", &format!("the spec is invalid: {}", problem.message));
    writer.set(condition::RECONCILING, Truth::False, "Invalid", "reconciliation continues once the spec is valid");
    writer.set(condition::READY, Truth::False, "Invalid", "the spec is invalid; condition Accepted names the fields");
    writer.status.phase = Some(ClusterPhase::Invalid);
    writer.status
}

/// Returns the status of a cluster that requires manual intervention.
pub(crate) fn stalled_status(
    cluster: &ValidatedCluster,
    observed: &Observation,
    stalled: &StallReason,
    now: &str,
) -> LearnerClusterStatus {
    let mut writer = StatusWriter::new(&observed.status, cluster.generation, now);
    writer.set(condition::ACCEPTED, Truth::True, "Valid", "");
    writer.set(condition::STALLED, Truth::True, stalled.reason, &stalled.message);
    writer.set(condition::RECONCILING, Truth::False, stalled.reason, &stalled.message);
    writer.set(condition::READY, Truth::False, stalled.reason, &stalled.message);
    writer.status.phase = Some(ClusterPhase::Stalled);
    writer.status.selector = Some(cluster.names.selector());
    writer.status
}

/// Returns the status of a cluster that is reconciled.
pub(crate) fn status(
    cluster: &ValidatedCluster,
    observed: &Observation,
    plan: &PlanSummary<'_>,
    now: &str,
) -> LearnerClusterStatus {
    let mut writer = StatusWriter::new(&observed.status, cluster.generation, now);
    let assessment = Assessment::of(cluster, observed, plan, now);
    let phase = assessment.phase();
    assessment.set_conditions(&mut writer);
    let status = &mut writer.status;
    status.cluster_id = Some(plan.inputs.cluster_id.clone());
    status.selector = Some(cluster.names.selector());
    status.worker = Some(plan.inputs.worker.clone());
    status.version = plan.inputs.worker.image.rsplit_once(':').map(|(_, version)| version.to_owned());
    if let Some(map) = &observed.map {
        let copies = cluster.spec.replication_factor as usize;
        status.partitions = Some(PartitionCounts {
            healthy: partitions_with(map, |in_sync, active| active && in_sync >= copies),
            under_replicated: partitions_with(map, |in_sync, active| active && in_sync < copies),
            single_replica: partitions_with(map, |in_sync, active| active && in_sync == 1 && copies > 1),
            unavailable: partitions_with(map, |_, active| !active),
        });
    }
    status.phase = Some(phase);
    status.members = members(cluster, observed);
    status.workers = Some(assessment.into_workers());
    writer.status
}

/// Records a failed reconcile in condition Reconciling.
pub(crate) fn set_reconcile_failed(status: &mut LearnerClusterStatus, message: &str, now: &str) {
    let generation = status.observed_generation.unwrap_or_default();
    let mut writer = StatusWriter::new(status, generation, now);
    writer.set(condition::RECONCILING, Truth::True, "ReconcileFailed", message);
    *status = writer.status;
}

/// Returns whether no reconcile is in progress.
pub(crate) fn is_idle(status: &LearnerClusterStatus) -> bool {
    status.conditions.iter().any(|entry| entry.kind == condition::RECONCILING && entry.status == Truth::False)
}

fn members(cluster: &ValidatedCluster, observed: &Observation) -> Vec<Member> {
    let mut members: Vec<_> = observed
        .pods
        .iter()
        .map(|pod| {
            let (primaries, copies) =
                observed.map.as_ref().map_or((0, 0), |map| (map.primaries(pod.ordinal), map.copies(pod.ordinal)));
            let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
            let (name, node) = (cluster.names.pod(pod.ordinal), pod.node.clone());
            let member = Member {
                name,
                store: observed.map.as_ref().and_then(|map| map.stores.get(&pod.ordinal).copied()),
                node,
                primaries: number(primaries),
                backups: number(copies.saturating_sub(primaries)),
            };
            (pod.ordinal, member)
        })
        .collect();
    members.sort_by_key(|(ordinal, _)| *ordinal);
    members.into_iter().map(|(_, member)| member).collect()
}

/// Builds a status; transition times change only when a condition's status changes.
pub(crate) struct StatusWriter<'a> {
    pub(crate) status: LearnerClusterStatus,
    generation: i64,
    now: &'a str,
}

impl<'a> StatusWriter<'a> {
    pub(crate) fn new(old: &LearnerClusterStatus, generation: i64, now: &'a str) -> Self {
        let mut status = old.clone();
        status.observed_generation = Some(generation);
        Self { status, generation, now }
    }

    pub(crate) fn set(&mut self, kind: &str, truth: Truth, reason: &str, message: &str) {
        set_condition(
            &mut self.status.conditions,
            Condition {
                kind: kind.to_owned(),
                status: truth,
                reason: reason.to_owned(),
                message: message.to_owned(),
                observed_generation: Some(self.generation),
                last_transition_time: self.now.to_owned(),
            },
        );
    }
}
