//! GPUs of tasks.
//!
//! Tasks use the GPUs of the worker's passes through drivers of their own, so that neither waits for the other in a queue of the host. A GPU
//! that fails in a task is used by no other task; the passes report their own failures.

use crate::engine::device::Device;
use crate::options::Options;
use engram_kernels::Gpu;
use engram_kernels::gpu::cuda::{self, Cuda};
use engram_kernels::profiler::{ProfiledDriver, Recorder};
use engram_learn::task_run::{ComputeDevice, DeviceUsage};
use engram_proto::v1;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Additions or multiplications from which a GPU is worth the transfers: the CPU takes about half a millisecond for them.
const LEAST_OPERATIONS: u64 = 1 << 22;

/// The GPUs, opened when the first task needs one.
#[derive(Default)]
pub(crate) struct TaskGpus(OnceLock<Vec<ComputeDevice>>);

impl TaskGpus {
    fn opened(&self) -> &[ComputeDevice] {
        self.0.get().map_or(&[], Vec::as_slice)
    }

    /// Returns the GPUs for a computation of this many operations. The first call may block for seconds.
    pub(in crate::runs) fn for_operations(
        &self,
        operations: u64,
        options: &Options,
        device: &Device,
    ) -> &[ComputeDevice] {
        // A cluster whose passes always use the GPU does the same with tasks.
        let least = if options.spec.gpu.threshold == Some(0) { 0 } else { LEAST_OPERATIONS };
        if operations < least { &[] } else { self.opened_by(options, device) }
    }

    /// Returns the GPUs. The first call may block for seconds.
    pub(in crate::runs) fn opened_by(&self, options: &Options, device: &Device) -> &[ComputeDevice] {
        if device.task_gpus.is_empty() {
            return &[];
        }
        self.0.get_or_init(|| {
            let deadline = options.gpu_deadline_ms.map_or(cuda::DEADLINE, Duration::from_millis);
            let opened = device.task_gpus.iter().filter_map(|(ordinal, recorder)| open(*ordinal, recorder, deadline));
            opened.collect()
        })
    }
}

/// Counters of the GPUs at the start of a task, to see what the task adds.
pub(in crate::runs::tasks) struct DevicesOfTask {
    begin: Instant,
    gpus: Vec<DeviceUsage>,
}

impl DevicesOfTask {
    /// Begins a task.
    pub(in crate::runs::tasks) fn begin(gpus: &TaskGpus) -> Self {
        Self { begin: Instant::now(), gpus: gpus.opened().iter().map(ComputeDevice::usage).collect() }
    }

    /// Returns the devices that computed the task, at its end. The CPU has the time that no GPU has.
    pub(in crate::runs::tasks) fn used(&self, gpus: &TaskGpus, threads: usize) -> v1::TaskDevices {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let mut rest = self.begin.elapsed();
        let mut devices = Vec::new();
        for (number, gpu) in gpus.opened().iter().enumerate() {
            // Opened by this task.
            let before = self.gpus.get(number).copied().unwrap_or_default();
            let usage = gpu.usage();
            let (busy, computations) = (usage.busy - before.busy, usage.computations - before.computations);
            if computations > 0 {
                rest = rest.saturating_sub(busy);
                let (name, memory_bytes) = (gpu.name().to_owned(), gpu.memory_bytes().unwrap_or_default());
                devices.push(v1::TaskDevice { name, memory_bytes, busy_us: micros(busy), computations });
            }
        }
        let name = format!("CPU, {threads} thread{}", if threads == 1 { "" } else { "s" });
        devices.insert(0, v1::TaskDevice { name, memory_bytes: 0, busy_us: micros(rest), computations: 0 });
        v1::TaskDevices { devices }
    }
}

fn open(ordinal: usize, recorder: &Recorder, deadline: Duration) -> Option<ComputeDevice> {
    match Cuda::open(ordinal, deadline) {
        Ok(mut driver) => {
            let memory = driver.memory().map_or(0, |(_, total)| total);
            let name = driver.name().to_owned();
            tracing::info!(gpu = name, ordinal, "tasks of runs use a GPU");
            let gpu = Gpu::new(ProfiledDriver::new(driver, recorder.clone()), name.clone());
            Some(ComputeDevice::new(name).with_memory(memory).with_gpu(gpu))
        }
        Err(error) => {
            tracing::warn!(ordinal, %error, "failed to open a GPU for tasks of runs; they use the CPU");
            None
        }
    }
}
