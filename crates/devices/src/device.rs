//! Devices of a computation.

use crate::{Accelerator, accelerator};
use engram_information::{PartialSum, partial_sums_of_rows};
use engram_kernels::gpu::{GeodesicKernels, TrainingKernels};
use engram_kernels::partitioner::Resource;
use engram_kernels::profiler::{Kind, Recorder};
use parking_lot::{Mutex, MutexGuard};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Value of [`Health`] without a limit.
const UNLIMITED: u64 = u64::MAX;

/// A device that executes kernels one at a time, on a thread of its own: a thread of the CPU, or a GPU and the thread that drives it.
#[derive(Clone)]
pub struct ComputeDevice {
    name: String,
    resource: Resource,
    health: Health,
    recorder: Recorder,
    memory_bytes: Option<u64>,
    gpu: Option<Arc<Mutex<dyn Accelerator>>>,
    usage: Arc<Usage>,
}

/// Counters of a GPU; clones of a device share them.
#[derive(Default)]
struct Usage {
    computations: AtomicU64,
    busy_ns: AtomicU64,
}

/// What a GPU has computed since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceUsage {
    /// Computations, those that failed included.
    pub computations: u64,
    /// Their duration, transfers included.
    pub busy: Duration,
}

impl Usage {
    /// Counts a computation.
    fn count<T>(&self, compute: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let result = compute();
        let took = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.computations.fetch_add(1, Ordering::Relaxed);
        self.busy_ns.fetch_add(took, Ordering::Relaxed);
        result
    }
}

impl fmt::Debug for ComputeDevice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = formatter.debug_struct("ComputeDevice");
        fields.field("name", &self.name).field("resource", &self.resource).field("gpu", &self.gpu.is_some());
        fields.finish_non_exhaustive()
    }
}

/// Whether a device is in use; clones share it. A removed device never returns: add a new one.
#[derive(Debug, Clone)]
pub struct Health {
    /// Executions until the device is removed, the one that is lost included; 0 = removed.
    left: Arc<AtomicU64>,
}

impl ComputeDevice {
    /// Creates a device of unknown speed and unlimited memory that records nothing.
    pub fn new(name: impl Into<String>) -> Self {
        let name = name.into();
        let resource = Resource { throughput: None, free_bytes: u64::MAX, latency_ns: 0, healthy: true };
        let health = Health { left: Arc::new(AtomicU64::new(UNLIMITED)) };
        let recorder = Recorder::off(name.clone());
        Self { name, resource, health, recorder, memory_bytes: None, gpu: None, usage: Arc::default() }
    }

    /// Sets the measured speed in items per second.
    #[must_use]
    pub const fn with_speed(mut self, items_per_second: Option<u64>) -> Self {
        self.resource.throughput = items_per_second;
        self
    }

    /// Sets the memory that work may use.
    #[must_use]
    pub const fn with_free_bytes(mut self, bytes: u64) -> Self {
        self.resource.free_bytes = bytes;
        self
    }

    /// Sets the size of its memory, for reports.
    #[must_use]
    pub const fn with_memory(mut self, bytes: u64) -> Self {
        self.memory_bytes = Some(bytes);
        self
    }

    /// Sets the recorder of its timeline.
    #[must_use]
    pub fn with_recorder(mut self, recorder: Recorder) -> Self {
        self.recorder = recorder;
        self
    }

    /// Sets the GPU that computes what it has kernels for; the CPU computes the rest, and blocks for which the GPU has no memory.
    #[must_use]
    pub fn with_gpu(mut self, gpu: impl Accelerator + 'static) -> Self {
        self.gpu = Some(Arc::new(Mutex::new(gpu)));
        self
    }

    /// Returns the display name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the size of its memory, where it is known.
    pub const fn memory_bytes(&self) -> Option<u64> {
        self.memory_bytes
    }

    /// Returns what its GPU has computed; computations of a device without GPU are not counted.
    pub fn usage(&self) -> DeviceUsage {
        DeviceUsage {
            computations: self.usage.computations.load(Ordering::Relaxed),
            busy: Duration::from_nanos(self.usage.busy_ns.load(Ordering::Relaxed)),
        }
    }

    /// Returns the same device with counters of its own: its computations are not part of [`Self::usage`] of this one.
    #[must_use]
    pub fn with_own_usage(&self) -> Self {
        Self { usage: Arc::default(), ..self.clone() }
    }

    /// Returns the handle that removes the device.
    pub fn health(&self) -> Health {
        self.health.clone()
    }

    /// Returns the recorder of its timeline.
    pub const fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    /// Returns what the partitioner knows of the device.
    pub fn resource(&self) -> Resource {
        Resource { healthy: !self.health.is_removed(), ..self.resource }
    }

    /// Returns the sums of some rows of a Fisher matrix over some leaves, by the GPU if there is one; see [`partial_sums_of_rows`].
    ///
    /// # Errors
    /// Those of [`partial_sums_of_rows`].
    pub fn partial_sums(
        &self,
        scores: &[f32],
        parameters: usize,
        rows: &Range<usize>,
        leaves: Range<usize>,
        samples: usize,
    ) -> Result<Vec<PartialSum>, engram_information::Error> {
        // The CPU names the score that is not finite.
        if scores.iter().all(|score| score.is_finite())
            && let Some(sums) =
                self.on_gpu(|gpu| accelerator::partial_sums(gpu, scores, parameters, rows, leaves.clone(), samples))
        {
            return Ok(sums);
        }
        partial_sums_of_rows(scores, parameters, rows, leaves, samples)
    }

    /// Computes a part of the geodesic model on the GPU. Returns `None` if the caller has to use the CPU: without a GPU that has the
    /// kernels, if it has too little memory, or if it fails, which removes the device.
    pub fn geodesic<T>(
        &self,
        compute: impl FnOnce(&mut dyn GeodesicKernels) -> Result<T, engram_kernels::Error>,
    ) -> Option<T> {
        let mut gpu = self.gpu_in_use()?;
        let kernels = gpu.geodesic()?;
        self.counted(|| compute(kernels))
    }

    /// Computes gradients of a training on the GPU. Returns `None` as [`Self::geodesic`].
    pub fn training<T>(
        &self,
        compute: impl FnOnce(&mut dyn TrainingKernels) -> Result<T, engram_kernels::Error>,
    ) -> Option<T> {
        let mut gpu = self.gpu_in_use()?;
        let kernels = gpu.training()?;
        self.counted(|| compute(kernels))
    }

    fn gpu_in_use(&self) -> Option<MutexGuard<'_, dyn Accelerator + 'static>> {
        if self.health.is_removed() { None } else { self.gpu.as_ref().map(|gpu| gpu.lock()) }
    }

    /// Counts a computation; one that fails removes the device.
    fn counted<T>(&self, compute: impl FnOnce() -> Result<T, engram_kernels::Error>) -> Option<T> {
        let result = self.usage.count(compute);
        if matches!(result, Err(engram_kernels::Error::Failed { .. })) {
            self.health.remove();
        }
        result.ok()
    }

    /// Computes on the GPU; `None` if the caller has to use the CPU: without a GPU, or if it has too little memory. A GPU that fails is
    /// removed, so that its result does not count.
    pub(crate) fn on_gpu<T: Default>(
        &self,
        compute: impl FnOnce(&mut dyn Accelerator) -> Result<T, engram_kernels::Error>,
    ) -> Option<T> {
        let mut gpu = self.gpu.as_ref()?.lock();
        match self.usage.count(|| compute(&mut *gpu)) {
            Ok(result) => Some(result),
            Err(engram_kernels::Error::Full { .. }) => None,
            Err(_) => {
                self.health.remove();
                Some(T::default())
            }
        }
    }

    /// Executes a kernel; `None` if the device was removed before or meanwhile, which loses the result.
    pub(crate) fn execute<T>(&self, name: &'static str, kernel: impl FnOnce() -> T) -> Option<T> {
        if self.health.is_removed() {
            return None;
        }
        let result = self.recorder.span(Kind::Kernel, name, kernel);
        self.health.count_execution().then_some(result)
    }
}

impl Health {
    /// Removes the device; the kernel that it executes is lost.
    pub fn remove(&self) {
        self.left.store(0, Ordering::Release);
    }

    /// Removes the device in the middle of the execution after the next `executions`.
    pub fn remove_after(&self, executions: u64) {
        self.left.store(executions.saturating_add(1), Ordering::Release);
    }

    /// Returns whether the device was removed.
    pub fn is_removed(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0
    }

    /// Counts an execution. Returns whether its result counts.
    fn count_execution(&self) -> bool {
        let next = |left: u64| if left == UNLIMITED { left } else { left.saturating_sub(1) };
        let before = self.left.fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| Some(next(left)));
        before.is_ok_and(|left| next(left) > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removed_device_loses_the_execution_in_progress() {
        let device = ComputeDevice::new("a");
        let health = device.health();
        assert_eq!(device.execute("pass", || 1), Some(1));
        assert_eq!(device.execute("pass", || health.remove()), None);
        assert_eq!(device.execute("pass", || 1), None, "a removed device executes nothing");
        assert!(!device.resource().healthy);
    }

    #[test]
    fn device_is_removed_in_the_middle_of_the_execution_after_the_given_number() {
        let device = ComputeDevice::new("a");
        device.health().remove_after(2);
        let mut executed = 0;
        let results: Vec<bool> = (0..5).map(|_| device.execute("pass", || executed += 1).is_some()).collect();
        assert_eq!(results, [true, true, false, false, false]);
        assert_eq!(executed, 3, "the third execution began and was lost");
    }
}
