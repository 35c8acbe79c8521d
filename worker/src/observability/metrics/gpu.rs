//! Metrics by GPU.

use super::registry::Registrar;
use engram_kernels::MirrorStatus;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct GpuLabels {
    device: String,
}

/// Metrics by GPU.
pub(super) struct GpuMetrics {
    passes: Family<GpuLabels, Counter>,
    fallbacks: Family<GpuLabels, Counter>,
    uploaded_bytes: Family<GpuLabels, Counter>,
    allocated_bytes: Family<GpuLabels, Gauge<u64, AtomicU64>>,
    memories: Family<GpuLabels, Gauge<u64, AtomicU64>>,
    disabled: Family<GpuLabels, Gauge<u64, AtomicU64>>,
    host_memories: Gauge<u64, AtomicU64>,
}

impl GpuMetrics {
    pub(super) fn new(registrar: &mut Registrar) -> Self {
        let metrics = Self {
            passes: Family::default(),
            fallbacks: Family::default(),
            uploaded_bytes: Family::default(),
            allocated_bytes: Family::default(),
            memories: Family::default(),
            disabled: Family::default(),
            host_memories: Gauge::default(),
        };
        let labels = &["device"];
        registrar.register(
            "gpu_passes",
            labels,
            "Passes over memories that the GPU took part in",
            metrics.passes.clone(),
        );
        let help = "GPU passes that fell back to the CPU because the GPU was full or failed";
        registrar.register("gpu_fallbacks", labels, help, metrics.fallbacks.clone());
        let help = "Bytes of changed memories uploaded to the GPU";
        registrar.register("gpu_uploaded_bytes", labels, help, metrics.uploaded_bytes.clone());
        let help = "Bytes of GPU memory in columns";
        registrar.register("gpu_allocated_bytes", labels, help, metrics.allocated_bytes.clone());
        registrar.register("gpu_memories", labels, "Memories of the partitions on the GPU", metrics.memories.clone());
        let help = "1 if the worker disabled this GPU after an error; a restart tries it again";
        registrar.register("gpu_disabled", labels, help, metrics.disabled.clone());
        let help = "Memories of partitions that fit on no GPU, on workers with GPUs";
        registrar.register("gpu_host_memories", &[], help, metrics.host_memories.clone());
        metrics
    }

    pub(super) fn set(&self, status: &MirrorStatus) {
        for device in &status.devices {
            let labels = GpuLabels { device: device.id.clone() };
            let count = |family: &Family<GpuLabels, Counter>, value| {
                family.get_or_create(&labels).inner().store(value, Ordering::Relaxed);
            };
            count(&self.passes, device.passes);
            count(&self.fallbacks, device.fallbacks);
            count(&self.uploaded_bytes, device.mirrored_bytes);
            let state = |family: &Family<GpuLabels, Gauge<u64, AtomicU64>>, value| {
                family.get_or_create(&labels).set(value);
            };
            state(&self.allocated_bytes, device.bytes);
            state(&self.memories, device.memories);
            state(&self.disabled, u64::from(device.given_up.is_some()));
        }
        if status.devices.is_empty() {
            // An alert refers to this series, so a worker without GPUs exports it, too; an empty label counts as absent.
            self.disabled.get_or_create(&GpuLabels { device: String::new() }).set(0);
        }
        self.host_memories.set(status.host_memories);
    }
}
