//! What people and tools are told: the status of a cluster, from what was found and never from what was wished.

use engram_api::GpuMode;
use engram_api::status::{
    ClusterPhase, Condition, LearnerClusterStatus, Member, PartitionCounts, Truth, WorkerCounts, WorkerRevision,
    condition,
};

use crate::build::Inputs;
use crate::evidence::{self, Stalled};
use crate::observed::Observed;
use crate::plan::partitions_with;
use crate::validate::{Refused, ValidatedCluster};

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
                .map(|known| known.status)
            {
                Some(Truth::True) => (count, Truth::True, "Offered"),
                Some(Truth::False) => (0, Truth::False, "NotOffered"),
                Some(Truth::Unknown) | None => match observed.gpu_offered {
                    Some(true) => (count, Truth::True, "Offered"),
                    Some(false) => (0, Truth::False, "NotOffered"),
                    None => (0, Truth::Unknown, "NodesNotReadable"),
                },
            }
        }
    };
    Gpu { devices, truth, reason }
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

    let (ready, reason, message) = if suspended {
        (Truth::False, "Suspended", "no pods run; the disks are kept")
    } else if evidence::is_mass_failure(observed) {
        (
            Truth::Unknown,
            "MassFailure",
            "many workers are silent at once; nothing is replaced until some are heard again",
        )
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
    writer.set(condition::STALLED, Truth::False, "Progressing", "");
    writer.set(condition::ACCEPTED, Truth::True, "Valid", "");
    let replicated = if full { "AllCopiesInSync" } else { "CopiesMissing" };
    writer.set(condition::REPLICATED, truth(full), replicated, "");
    writer.set(condition::GPU_AVAILABLE, gpu.truth, gpu.reason, "");
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
struct Writer<'a> {
    status: LearnerClusterStatus,
    generation: i64,
    now: &'a str,
}

impl<'a> Writer<'a> {
    fn new(old: &LearnerClusterStatus, generation: i64, now: &'a str) -> Self {
        let mut status = old.clone();
        status.observed_generation = Some(generation);
        Self { status, generation, now }
    }

    fn set(&mut self, kind: &str, truth: Truth, reason: &str, message: &str) {
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
