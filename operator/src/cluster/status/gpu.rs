//! GPUs of a cluster: whether its pods request them, and condition GpuAvailable.

use engram_api::GpuMode;
use engram_api::status::{Truth, condition};

use crate::cluster::build::GPU_RESOURCE;
use crate::cluster::observe::observation::Observation;
use crate::cluster::status::StatusWriter;
use crate::cluster::validate::ValidatedCluster;

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

/// Sets condition GpuAvailable.
pub(super) fn set_gpu_condition(
    writer: &mut StatusWriter<'_>,
    cluster: &ValidatedCluster,
    observed: &Observation,
    gpu: &Gpu,
) {
    match gpu_problem(cluster, observed, gpu) {
        Some((reason, message)) => writer.set(condition::GPU_AVAILABLE, Truth::False, reason, &message),
        None => writer.set(condition::GPU_AVAILABLE, gpu.truth, gpu.reason, &gpu_text(cluster, gpu)),
    }
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
