//! What people and tools are told: the status of a cluster, from what was found and never from what was wished.

use engram_api::status::{
    ClusterPhase, Condition, LearnerClusterStatus, Member, PartitionCounts, Truth, WorkerCounts, WorkerRevision,
    condition,
};
use engram_api::{Code, GpuMode};

use crate::build::Inputs;
use crate::evidence::{self, Stalled};
use crate::observed::Observed;
use crate::plan::partitions_with;
use crate::validate::{Refused, ValidatedCluster};

/// Why devices that pods were given are not used, as the condition has it: a worker gave its own up, or found none that it can use.
pub(crate) const GPU_GIVEN_UP: &str = "GpuGivenUp";
pub(crate) const GPU_NOT_USED: &str = "GpuNotUsed";
/// Workers whose trouble is told at length.
const GPU_TROUBLES_TOLD: usize = 4;

/// What was decided about devices.
pub(crate) struct Gpu {
    /// Devices per pod.
    pub(crate) devices: u32,
    truth: Truth,
    reason: &'static str,
}

/// Decides about devices. `Auto` asks for them only where some node offers them, and is decided once per generation: a
/// node that comes and goes moves nobody.
pub(crate) fn gpu(cluster: &ValidatedCluster, observed: &Observed) -> Gpu {
    let count = cluster.spec.gpu.count.unwrap_or(1);
    let (devices, truth, reason) = match cluster.spec.gpu.mode {
        GpuMode::Disabled => (0, Truth::False, "Disabled"),
        GpuMode::Required => (count, Truth::True, "Required"),
        GpuMode::Auto => {
            let decided = observed.status.conditions.iter().find(|known| known.kind == condition::GPU_AVAILABLE);
            match decided
                .filter(|known| known.observed_generation == Some(cluster.generation))
                .map(|known| (known.status, known.reason.as_str()))
            {
                // Pods keep devices that their workers cannot use: whether they can is known of those that were given some alone.
                Some((Truth::True, _) | (Truth::False, GPU_GIVEN_UP | GPU_NOT_USED)) => (count, Truth::True, "Offered"),
                Some((Truth::False, _)) => (0, Truth::False, "NotOffered"),
                Some((Truth::Unknown, _)) | None => match observed.gpu_offered {
                    Some(true) => (count, Truth::True, "Offered"),
                    Some(false) => (0, Truth::False, "NotOffered"),
                    None => (0, Truth::Unknown, "NodesNotReadable"),
                },
            }
        }
    };
    Gpu { devices, truth, reason }
}

/// Finds the workers whose pods were given devices and that do without: why, and the sentence that names them.
fn gpu_trouble(cluster: &ValidatedCluster, observed: &Observed, gpu: &Gpu) -> Option<(&'static str, String)> {
    if cluster.spec.gpu.mode == GpuMode::Disabled || (gpu.devices == 0 && !cluster.claims_gpu()) {
        return None;
    }
    // A pod of an older template may have none.
    let is_given = |ordinal: u32| observed.pods.iter().any(|pod| pod.ordinal == ordinal && pod.has_devices);
    let troubles: Vec<_> = observed.gpu_troubles.iter().filter(|(ordinal, _)| is_given(**ordinal)).collect();
    let given_up = troubles.iter().any(|(_, trouble)| trouble.given_up);
    let reason = if given_up { GPU_GIVEN_UP } else { GPU_NOT_USED };
    let mut told = troubles.iter().map(|(ordinal, trouble)| format!("worker {ordinal}: {}", trouble.why));
    let first: Vec<String> = told.by_ref().take(GPU_TROUBLES_TOLD).collect();
    let more = match told.count() {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    let message = format!("{}{more}; a worker looks for GPUs again when it starts", first.join("; "));
    (!troubles.is_empty()).then_some((reason, message))
}

/// Makes the status of a cluster whose spec is refused; everything else stays as it was.
pub fn refused(generation: i64, old: &LearnerClusterStatus, refused: &Refused, now: &str) -> LearnerClusterStatus {
    let mut writer = Writer::new(old, generation, now);
    writer.set(condition::ACCEPTED, Truth::False, "Invalid", &refused.message);
    writer.set(condition::STALLED, Truth::True, "Invalid", "the spec is refused; change it");
    writer.set(condition::RECONCILING, Truth::False, "Invalid", "");
    writer.set(condition::READY, Truth::False, "Invalid", "the spec is refused");
    writer.status.phase = Some(ClusterPhase::Invalid);
    writer.status
}

/// Makes the status of a cluster that waits for a person.
pub(crate) fn stalled(
    cluster: &ValidatedCluster,
    observed: &Observed,
    stalled: &Stalled,
    now: &str,
) -> LearnerClusterStatus {
    let mut writer = Writer::new(&observed.status, cluster.generation, now);
    writer.set(condition::ACCEPTED, Truth::True, "Valid", "");
    writer.set(condition::STALLED, Truth::True, stalled.reason, &stalled.message);
    writer.set(condition::RECONCILING, Truth::False, stalled.reason, "");
    writer.set(condition::READY, Truth::False, stalled.reason, &stalled.message);
    writer.status.phase = Some(ClusterPhase::Stalled);
    writer.status.selector = Some(cluster.names.selector());
    writer.status
}

/// Makes the status of a cluster that is looked after.
pub(crate) fn status(
    cluster: &ValidatedCluster,
    observed: &Observed,
    inputs: &Inputs,
    update: Option<&WorkerRevision>,
    gpu: &Gpu,
    changing: bool,
    now: &str,
) -> LearnerClusterStatus {
    let mut writer = Writer::new(&observed.status, cluster.generation, now);
    let (workers, copies) = (counts(observed), cluster.spec.replication_factor as usize);
    let served = observed.map.as_ref().is_some_and(|map| map.partitions.iter().all(|partition| partition.activated));
    let full = observed.map.as_ref().is_some_and(|map| map.is_full(cluster.spec.replication_factor));
    let wanted = i32::try_from(inputs.replicas).unwrap_or(i32::MAX);
    let all_up = workers.ready == wanted && workers.total == wanted && workers.up_to_date == wanted;
    let marked = observed.map.as_ref().is_some_and(|map| map.suspended);
    let suspended = cluster.is_suspended() && workers.total == 0 && (marked || observed.map.is_none());
    let settled = !changing && all_up && (full || suspended) && inputs.replicas == wanted_pods(cluster);

    let bootstrapping = observed.bootstrapping.as_ref().filter(|_| observed.map.is_none());
    let loading = bootstrapping.map(ToString::to_string);
    let problem = bootstrapping.and_then(|told| told.problem.as_ref()).map(|(_, code, _)| bootstrap_problem(code));
    let (ready, reason, message) = if suspended {
        (Truth::False, "Suspended", "no pods run; the disks are kept")
    } else if evidence::is_mass_failure(observed) {
        (
            Truth::Unknown,
            "MassFailure",
            "many workers are silent at once; nothing is replaced until some are heard again",
        )
    } else if let Some(told) = &loading {
        (Truth::False, problem.unwrap_or("Bootstrapping"), told.as_str())
    } else if observed.map.is_none() {
        (Truth::False, "WaitingForMap", "no PartitionMap says yet who holds which partition")
    } else if !served {
        (Truth::False, "PartitionsUnavailable", "some partitions are not served")
    } else if !settled {
        (Truth::False, "Reconciling", "all partitions are served, and something is still being changed or re-made")
    } else {
        (Truth::True, "AllPartitionsServed", "")
    };
    writer.set(condition::READY, ready, reason, message);
    let is_reconciling = !(settled || suspended || cluster.is_paused());
    let (why, paused) = if cluster.is_paused() { ("Paused", "spec.paused is true") } else { (reason, "") };
    writer.set(condition::RECONCILING, truth(is_reconciling), why, paused);
    match problem.zip(loading.as_ref()) {
        // It is tried again, and goes on when what is wrong is put right.
        Some((problem, told)) => writer.set(condition::STALLED, Truth::True, problem, told),
        None => writer.set(condition::STALLED, Truth::False, "Progressing", ""),
    }
    writer.set(condition::ACCEPTED, Truth::True, "Valid", "");
    let replicated = if full { "AllCopiesInSync" } else { "CopiesMissing" };
    writer.set(condition::REPLICATED, truth(full), replicated, "");
    match gpu_trouble(cluster, observed, gpu) {
        Some((reason, message)) => writer.set(condition::GPU_AVAILABLE, Truth::False, reason, &message),
        None => writer.set(condition::GPU_AVAILABLE, gpu.truth, gpu.reason, ""),
    }
    let message = update.map_or_else(String::new, |update| {
        format!(
            "runs {} (template {}); this operator would run {} (template {})",
            inputs.worker.image, inputs.worker.template_revision, update.image, update.template_revision
        )
    });
    let reason = if update.is_some() { "Newer" } else { "Current" };
    writer.set(condition::UPDATE_AVAILABLE, truth(update.is_some()), reason, &message);
    let reason = if cluster.is_suspended() { "Asked" } else { "NotAsked" };
    writer.set(condition::SUSPENDED, truth(suspended), reason, "");

    let status = &mut writer.status;
    status.cluster_id = Some(inputs.cluster_id.clone());
    status.selector = Some(cluster.names.selector());
    status.worker = Some(inputs.worker.clone());
    status.version = inputs.worker.image.rsplit_once(':').map(|(_, version)| version.to_owned());
    if let Some(map) = &observed.map {
        status.partitions = Some(PartitionCounts {
            healthy: partitions_with(map, |held, active| active && held >= copies),
            degraded: partitions_with(map, |held, active| active && held < copies),
            alone: partitions_with(map, |held, active| active && held == 1 && copies > 1),
            unavailable: partitions_with(map, |_, active| !active),
        });
    }
    status.phase = Some(if suspended {
        ClusterPhase::Suspended
    } else if cluster.is_suspended() {
        ClusterPhase::Suspending
    } else if ready == Truth::True {
        ClusterPhase::Ready
    } else if observed.map.is_none() || !served {
        ClusterPhase::Starting
    } else if inputs.replicas != cluster.spec.workers || workers.total != wanted {
        ClusterPhase::Scaling
    } else if workers.up_to_date != workers.total {
        ClusterPhase::Updating
    } else {
        ClusterPhase::Degraded
    });
    status.members = members(cluster, observed);
    status.workers = Some(workers);
    writer.status
}

/// Why a cluster cannot begin from its snapshot, in one word.
fn bootstrap_problem(code: &str) -> &'static str {
    match Code::find(code) {
        Some(Code::SnapshotUnusable) => "SnapshotUnusable",
        Some(Code::CapacityExceeded) => "SnapshotTooLarge",
        Some(Code::StorageUnusable) => "StorageUnusable",
        _ => "BootstrapFailed",
    }
}

/// Says in a status that what should be done was hindered.
pub(crate) fn hinder(status: &mut LearnerClusterStatus, message: &str, now: &str) {
    let generation = status.observed_generation.unwrap_or_default();
    let mut writer = Writer::new(status, generation, now);
    writer.set(condition::RECONCILING, Truth::True, "Failed", message);
    *status = writer.status;
}

/// Whether nothing is expected to change by itself.
pub(crate) fn is_at_rest(status: &LearnerClusterStatus) -> bool {
    status.conditions.iter().any(|known| known.kind == condition::RECONCILING && known.status == Truth::False)
}

fn wanted_pods(cluster: &ValidatedCluster) -> u32 {
    if cluster.is_suspended() { 0 } else { cluster.spec.workers }
}

fn counts(observed: &Observed) -> WorkerCounts {
    let newest = observed.set.as_ref().map(|set| set.update_revision.as_str()).unwrap_or_default();
    let count = |number: usize| i32::try_from(number).unwrap_or(i32::MAX);
    let pods = &observed.pods;
    WorkerCounts {
        total: count(pods.len()),
        ready: count(pods.iter().filter(|pod| pod.ready && !pod.terminating).count()),
        up_to_date: count(pods.iter().filter(|pod| pod.revision == newest).count()),
        draining: count(pods.iter().filter(|pod| pod.terminating).count()),
    }
}

fn members(cluster: &ValidatedCluster, observed: &Observed) -> Vec<Member> {
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

/// A status while it is written; times move only where a condition turns.
pub(crate) struct Writer<'a> {
    pub(crate) status: LearnerClusterStatus,
    generation: i64,
    now: &'a str,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(old: &LearnerClusterStatus, generation: i64, now: &'a str) -> Self {
        let mut status = old.clone();
        status.observed_generation = Some(generation);
        Self { status, generation, now }
    }

    pub(crate) fn set(&mut self, kind: &str, truth: Truth, reason: &str, message: &str) {
        turn(
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

/// Puts a condition in place of the older one of its kind, whose time stays unless it turned.
pub(crate) fn turn(conditions: &mut Vec<Condition>, mut fresh: Condition) {
    match conditions.iter_mut().find(|known| known.kind == fresh.kind) {
        Some(known) => {
            if known.status == fresh.status {
                fresh.last_transition_time.clone_from(&known.last_transition_time);
            }
            *known = fresh;
        }
        None => conditions.push(fresh),
    }
}
