//! Status of a cluster, computed from the observed state.

pub(crate) mod epochs;
pub(crate) mod progress;
pub(crate) mod throttle;

use engram_api::status::{
    ClusterPhase, Condition, LearnerClusterStatus, Member, PartitionCounts, Truth, WorkerCounts, WorkerRevision,
    condition,
};
use engram_api::{Code, GpuMode};

use crate::cluster::build::{GPU_RESOURCE, Inputs};
use crate::cluster::observe::observation::Observation;
use crate::cluster::plan::partitions_with;
use crate::cluster::plan::safety::{self, StallReason};
use crate::cluster::status::progress::{in_progress, stuck_pods, unavailable, under_replicated};
use crate::cluster::validate::{InvalidSpec, ValidatedCluster};
use crate::names::UPGRADE;

/// Reasons of condition GpuAvailable for GPUs that are allocated but not used: the GPU of a worker failed, or is unusable.
pub(crate) const GPU_FAILED: &str = "GpuFailed";
pub(crate) const GPU_UNUSABLE: &str = "GpuUnusable";
/// Maximum number of workers with GPU problems that a message lists.
const MAX_LISTED_GPU_PROBLEMS: usize = 4;

/// Decision about GPUs.
pub(crate) struct Gpu {
    /// GPUs per pod.
    pub(crate) devices: u32,
    truth: Truth,
    reason: &'static str,
}

/// Decides whether pods request GPUs. `Auto` requests them only if some node offers them, and is decided once per generation, so
/// that nodes that come and go do not move pods.
pub(crate) fn gpu(cluster: &ValidatedCluster, observed: &Observation) -> Gpu {
    let count = cluster.spec.gpu.count.unwrap_or(1);
    let (devices, truth, reason) = match cluster.spec.gpu.mode {
        GpuMode::Disabled => (0, Truth::False, "Disabled"),
        GpuMode::Required => (count, Truth::True, "Required"),
        GpuMode::Auto => {
            let decided = observed.status.conditions.iter().find(|entry| entry.kind == condition::GPU_AVAILABLE);
            match decided
                .filter(|entry| entry.observed_generation == Some(cluster.generation))
                .map(|entry| (entry.status, entry.reason.as_str()))
            {
                // Pods keep GPUs that their workers cannot use: usability is only known for allocated GPUs.
                Some((Truth::True, _) | (Truth::False, GPU_FAILED | GPU_UNUSABLE)) => {
                    (count, Truth::True, "GpuNodesAvailable")
                }
                Some((Truth::False, _)) => (0, Truth::False, "NoGpuNodes"),
                Some((Truth::Unknown, _)) | None => match observed.gpu_offered {
                    Some(true) => (count, Truth::True, "GpuNodesAvailable"),
                    Some(false) => (0, Truth::False, "NoGpuNodes"),
                    None => (0, Truth::Unknown, "NodesNotReadable"),
                },
            }
        }
    };
    Gpu { devices, truth, reason }
}

/// Finds workers that do not use their allocated GPUs. Returns the condition's reason and message.
fn gpu_problem(cluster: &ValidatedCluster, observed: &Observation, gpu: &Gpu) -> Option<(&'static str, String)> {
    if cluster.spec.gpu.mode == GpuMode::Disabled || (gpu.devices == 0 && !cluster.claims_gpu()) {
        return None;
    }
    // A pod of an older template may have none.
    let has_devices = |ordinal: u32| observed.pods.iter().any(|pod| pod.ordinal == ordinal && pod.has_devices);
    let troubles: Vec<_> = observed.gpu_problems.iter().filter(|(ordinal, _)| has_devices(**ordinal)).collect();
    let given_up = troubles.iter().any(|(_, trouble)| trouble.was_in_use);
    let reason = if given_up { GPU_FAILED } else { GPU_UNUSABLE };
    let mut sentences = troubles.iter().map(|(ordinal, trouble)| format!("worker {ordinal}: {}", trouble.reason));
    let first: Vec<String> = sentences.by_ref().take(MAX_LISTED_GPU_PROBLEMS).collect();
    let more = match sentences.count() {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    let message = format!("{}{more}; a worker retries GPUs when it restarts", first.join("; "));
    (!troubles.is_empty()).then_some((reason, message))
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
    inputs: &Inputs,
    update: Option<&WorkerRevision>,
    gpu: &Gpu,
    changing: bool,
    now: &str,
) -> LearnerClusterStatus {
    let mut writer = StatusWriter::new(&observed.status, cluster.generation, now);
    let (workers, copies) = (counts(observed), cluster.spec.replication_factor as usize);
    let served = observed.map.as_ref().is_some_and(|map| map.partitions.iter().all(|partition| partition.activated));
    let full = observed.map.as_ref().is_some_and(|map| map.is_full(cluster.spec.replication_factor));
    let wanted = i32::try_from(inputs.replicas).unwrap_or(i32::MAX);
    let all_up = workers.ready == wanted && workers.total == wanted && workers.up_to_date == wanted;
    let marked = observed.map.as_ref().is_some_and(|map| map.suspended);
    let suspended = cluster.is_suspended() && workers.total == 0 && (marked || observed.map.is_none());
    let settled = !changing && all_up && (full || suspended) && inputs.replicas == desired_pods(cluster);

    let bootstrapping = observed.bootstrapping.as_ref().filter(|_| observed.map.is_none());
    let loading = bootstrapping.map(ToString::to_string);
    let problem =
        bootstrapping.and_then(|progress| progress.problem.as_ref()).map(|(_, code, _)| bootstrap_problem(code));
    let stuck = stuck_pods(cluster, observed, now);
    let progress_text = in_progress(cluster, observed, inputs, changing);
    let unavailable = unavailable(cluster, observed);
    let (ready, reason, message) = if suspended {
        (Truth::False, "Suspended", "no pods run; the disks are kept; set spec.suspend to false to resume".to_owned())
    } else if safety::is_mass_failure(observed) {
        (
            Truth::Unknown,
            "MassFailure",
            "many workers are unreachable at once; none is replaced until some send heartbeats again; check nodes and network".into(),
        )
    } else if let Some(progress) = &loading {
        (Truth::False, problem.unwrap_or("Bootstrapping"), progress.clone())
    } else if observed.map.is_none() {
        let (reason, message) = match &stuck {
            Some(stuck) => (stuck.reason, &stuck.message),
            None => ("WaitingForPartitionMap", &progress_text),
        };
        (Truth::False, reason, message.clone())
    } else if let Some(unavailable) = &unavailable {
        let cause = stuck.as_ref().map_or(&progress_text, |stuck| &stuck.message);
        (Truth::False, "PartitionsUnavailable", format!("{unavailable}; {cause}"))
    } else if let Some(stuck) = &stuck {
        (Truth::False, stuck.reason, format!("all partitions are served; {}", stuck.message))
    } else if !settled {
        (Truth::False, "Reconciling", format!("all partitions are served; {progress_text}"))
    } else {
        (Truth::True, "AllPartitionsServed", String::new())
    };
    writer.set(condition::READY, ready, reason, &message);
    let stalled = stuck.as_ref().filter(|stuck| stuck.is_stalled && !suspended);
    let is_reconciling = !(settled || suspended || cluster.is_paused() || stalled.is_some());
    if cluster.is_paused() {
        let message = "spec.paused is true; set it to false to continue";
        writer.set(condition::RECONCILING, Truth::False, "Paused", message);
    } else {
        let message = if settled { "" } else { message.as_str() };
        writer.set(condition::RECONCILING, truth(is_reconciling), reason, message);
    }
    match (problem.zip(loading.as_ref()), stalled) {
        // Bootstrap is retried and succeeds once the problem is fixed.
        (Some((problem, progress)), _) => writer.set(condition::STALLED, Truth::True, problem, progress),
        (None, Some(stuck)) => writer.set(condition::STALLED, Truth::True, stuck.reason, &stuck.message),
        (None, None) => writer.set(condition::STALLED, Truth::False, "Progressing", ""),
    }
    writer.set(condition::ACCEPTED, Truth::True, "Valid", "");
    let replicated = if full { "AllReplicasInSync" } else { "UnderReplicated" };
    let why = if full { String::new() } else { replication_text(cluster, observed, unavailable, &progress_text) };
    writer.set(condition::REPLICATED, truth(full), replicated, &why);
    match gpu_problem(cluster, observed, gpu) {
        Some((reason, message)) => writer.set(condition::GPU_AVAILABLE, Truth::False, reason, &message),
        None => writer.set(condition::GPU_AVAILABLE, gpu.truth, gpu.reason, &gpu_text(cluster, gpu)),
    }
    let message = update.map_or_else(String::new, |update| {
        format!(
            "running {} (template {}); available {} (template {}); to accept it set spec.upgrade: Auto or annotation {UPGRADE}={}",
            inputs.worker.image,
            inputs.worker.template_revision,
            update.image,
            update.template_revision,
            update.template_revision
        )
    });
    let reason = if update.is_some() { "NewerVersionAvailable" } else { "UpToDate" };
    writer.set(condition::UPDATE_AVAILABLE, truth(update.is_some()), reason, &message);
    let (reason, message) = match cluster.is_suspended() {
        true if suspended => ("SuspendRequested", ""),
        true => ("SuspendRequested", "pods are deleted once all replicas are in sync"),
        false => ("NotRequested", ""),
    };
    writer.set(condition::SUSPENDED, truth(suspended), reason, message);

    let status = &mut writer.status;
    status.cluster_id = Some(inputs.cluster_id.clone());
    status.selector = Some(cluster.names.selector());
    status.worker = Some(inputs.worker.clone());
    status.version = inputs.worker.image.rsplit_once(':').map(|(_, version)| version.to_owned());
    if let Some(map) = &observed.map {
        status.partitions = Some(PartitionCounts {
            healthy: partitions_with(map, |in_sync, active| active && in_sync >= copies),
            under_replicated: partitions_with(map, |in_sync, active| active && in_sync < copies),
            single_replica: partitions_with(map, |in_sync, active| active && in_sync == 1 && copies > 1),
            unavailable: partitions_with(map, |_, active| !active),
        });
    }
    let is_first_start = !matches!(
        observed.status.phase,
        Some(ClusterPhase::Ready | ClusterPhase::Degraded | ClusterPhase::Unavailable)
    );
    status.phase = Some(if suspended {
        ClusterPhase::Suspended
    } else if cluster.is_suspended() {
        ClusterPhase::Suspending
    } else if ready == Truth::True {
        ClusterPhase::Ready
    } else if stalled.is_some() {
        ClusterPhase::Stalled
    } else if observed.map.is_none() || (!served && is_first_start) {
        ClusterPhase::Starting
    } else if !served {
        ClusterPhase::Unavailable
    } else if is_scaling(cluster, observed, inputs) {
        ClusterPhase::Scaling
    } else if workers.up_to_date != workers.total || (all_up && full) {
        ClusterPhase::Updating
    } else {
        ClusterPhase::Degraded
    });
    status.members = members(cluster, observed);
    status.workers = Some(workers);
    writer.status
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

/// Returns why the partitions are not fully replicated.
fn replication_text(
    cluster: &ValidatedCluster,
    observed: &Observation,
    unavailable: Option<String>,
    progress: &str,
) -> String {
    let few = under_replicated(cluster, observed).or(unavailable).unwrap_or_default();
    let rest = progress.strip_suffix(few.as_str()).map_or(progress, |rest| rest.trim_end_matches("; "));
    if rest.is_empty() { format!("{few}; re-replication is in progress") } else { format!("{few}; {rest}") }
}

/// Returns why pods request no GPUs.
fn gpu_text(cluster: &ValidatedCluster, gpu: &Gpu) -> String {
    let resource = cluster.spec.gpu.resource_name.as_deref().unwrap_or(GPU_RESOURCE);
    match (gpu.truth, cluster.spec.gpu.mode) {
        (Truth::True, _) => String::new(),
        (_, GpuMode::Disabled) => "spec.gpu.mode is Disabled".into(),
        (Truth::False, _) => {
            format!("no node offered {resource} when this generation of the spec was first reconciled; workers use CPUs")
        }
        (Truth::Unknown, _) => {
            "the operator cannot list nodes, so workers use CPUs: grant it the ClusterRole of the chart, or set spec.gpu.mode".into()
        }
    }
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

fn desired_pods(cluster: &ValidatedCluster) -> u32 {
    if cluster.is_suspended() { 0 } else { cluster.spec.workers }
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

fn truth(holds: bool) -> Truth {
    if holds { Truth::True } else { Truth::False }
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

/// Replaces the condition of the same type; its transition time is kept unless the status changed.
pub(crate) fn set_condition(conditions: &mut Vec<Condition>, mut fresh: Condition) {
    match conditions.iter_mut().find(|entry| entry.kind == fresh.kind) {
        Some(entry) => {
            if entry.status == fresh.status {
                fresh.last_transition_time.clone_from(&entry.last_transition_time);
            }
            *entry = fresh;
        }
        None => conditions.push(fresh),
    }
}
