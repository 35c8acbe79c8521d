//! GPUs of tasks.
//!
//! Tasks use the GPUs of the worker's passes through drivers of their own, so that neither waits for the other in a queue of the host. A GPU
//! that fails in a task is used by no other task; the passes report their own failures.

use crate::device::Device;
use crate::options::Options;
use engram_kernels::Gpu;
use engram_kernels::gpu::cuda::{self, Cuda};
use engram_kernels::profiler::{ProfiledDriver, Recorder};
use engram_learn::task_run::ComputeDevice;
use std::sync::OnceLock;
use std::time::Duration;

/// Additions or multiplications from which a GPU is worth the transfers: the CPU takes about half a millisecond for them.
const LEAST_OPERATIONS: u64 = 1 << 22;

/// The GPUs, opened when the first task needs one.
#[derive(Default)]
pub(crate) struct TaskGpus(OnceLock<Vec<ComputeDevice>>);

impl TaskGpus {
    /// Returns the GPUs for a computation of this many operations. The first call may block for seconds.
    pub(super) fn for_operations(&self, operations: u64, options: &Options, device: &Device) -> &[ComputeDevice] {
        // A cluster whose passes always use the GPU does the same with tasks.
        let least = if options.spec.gpu.threshold == Some(0) { 0 } else { LEAST_OPERATIONS };
        if operations < least || device.task_gpus.is_empty() {
            return &[];
        }
        self.0.get_or_init(|| {
            let deadline = options.gpu_deadline_ms.map_or(cuda::DEADLINE, Duration::from_millis);
            let opened = device.task_gpus.iter().filter_map(|(ordinal, recorder)| open(*ordinal, recorder, deadline));
            opened.collect()
        })
    }
}

fn open(ordinal: usize, recorder: &Recorder, deadline: Duration) -> Option<ComputeDevice> {
    match Cuda::open(ordinal, deadline) {
        Ok(driver) => {
            let name = driver.name().to_owned();
            tracing::info!(gpu = name, ordinal, "tasks of runs use a GPU");
            let gpu = Gpu::new(ProfiledDriver::new(driver, recorder.clone()), name.clone());
            Some(ComputeDevice::new(name).with_gpu(gpu))
        }
        Err(error) => {
            tracing::warn!(ordinal, %error, "failed to open a GPU for tasks of runs; they use the CPU");
            None
        }
    }
}
