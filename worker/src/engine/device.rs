//! Devices that execute passes over memories: the CPU, and GPUs if the settings ask for them and the machine has some.

use crate::lifecycle::worker::Error;
use crate::observability::profile::Profiling;
use crate::options::Options;
use engram_api::{GpuMode, GpuPartitioner};
use engram_kernels::gpu::cuda::{self, Cuda};
use engram_kernels::partitioner::Strategy;
use engram_kernels::profiler::{ProfiledDevice, ProfiledDriver, Recorder};
use engram_kernels::threshold::{self, Measurement};
use engram_kernels::{AvailableDevice, Cpu, Device as Passes, DeviceStatus, Gpu, MirrorStatus, MirroredDevice};
use std::fmt::Write as _;
use std::time::Duration;

/// Device settings of a worker.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceRequest {
    mode: GpuMode,
    /// Number of memories in a pass from which a GPU runs it; `None` = measured.
    threshold: Option<u64>,
    strategy: Strategy,
    /// Index among the workers that share the visible GPUs, and the number of these workers.
    index: usize,
    workers: usize,
    threads: usize,
    deadline: Duration,
}

/// The selected devices, for status texts.
#[derive(Debug)]
pub(crate) struct Device {
    /// Name of the CPU.
    pub(crate) cpu: String,
    /// Threads of CPU passes.
    pub(crate) threads: usize,
    /// Recorders of passes.
    pub(crate) profiling: Profiling,
    /// Driver number of each GPU of the passes, and the recorder of its kernels: tasks of runs use the same GPUs.
    pub(crate) task_gpus: Vec<(usize, Recorder)>,
    gpu: GpuSelection,
}

#[derive(Debug)]
enum GpuSelection {
    /// No GPU is used, with the reason.
    None(String),
    /// GPUs are used. Says whether their threshold was measured or set, their status until the store reports for the first time,
    /// and why others cannot be used.
    Available { measured: bool, initial_status: MirrorStatus, unusable: Vec<String> },
}

impl DeviceRequest {
    pub(crate) fn of(options: &Options) -> Self {
        let threads = options.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
        Self {
            mode: options.spec.gpu.mode,
            threshold: options.spec.gpu.threshold,
            strategy: match options.spec.gpu.partitioner {
                Some(GpuPartitioner::Balanced) => Strategy::Balanced,
                Some(GpuPartitioner::CapabilityAware) => Strategy::CapabilityAware,
                Some(GpuPartitioner::MemoryAware) => Strategy::MemoryAware,
                Some(GpuPartitioner::LatencyOptimized) | None => Strategy::LatencyOptimized,
            },
            index: options.ordinal as usize,
            workers: options.machine_workers.map_or(1, |workers| workers.max(1) as usize),
            threads: threads.max(1),
            deadline: options.gpu_deadline_ms.map_or(cuda::DEADLINE, Duration::from_millis),
        }
    }
}

impl Device {
    /// Returns why no GPU was opened, if none was.
    pub(crate) fn without(&self) -> Option<&str> {
        self.gpu_status(None).err()
    }

    /// Selects only the CPU, with the reason.
    pub(crate) fn without_gpu((cpu, threads): (String, usize), why: &str) -> Self {
        let (profiling, task_gpus) = (Profiling::default(), Vec::new());
        Self { cpu, threads, profiling, task_gpus, gpu: GpuSelection::None(why.to_owned()) }
    }

    /// Returns the names of the devices that run passes now.
    pub(crate) fn name(&self, gpu: Option<&MirrorStatus>) -> String {
        let Ok((status, ..)) = self.gpu_status(gpu) else { return self.cpu.clone() };
        let mut names: Vec<&str> = status.at_work().map(|device_status| device_status.name.as_str()).collect();
        names.push(&self.cpu);
        names.join(", ")
    }

    /// Returns the status of the GPUs, whether their threshold was measured, and why others cannot be used; or why there is none.
    fn gpu_status<'a>(
        &'a self,
        texts: Option<&'a MirrorStatus>,
    ) -> Result<(&'a MirrorStatus, bool, &'a [String]), &'a str> {
        match &self.gpu {
            GpuSelection::None(why) => Err(why),
            GpuSelection::Available { measured, initial_status, unusable } => {
                Ok((texts.unwrap_or(initial_status), *measured, unusable))
            }
        }
    }

    /// Describes the status of the GPUs.
    pub(crate) fn gpu(&self, gpu: Option<&MirrorStatus>) -> String {
        let (status, measured, unusable) = match self.gpu_status(gpu) {
            Ok(with_gpus) => with_gpus,
            Err(why) => return format!("not used: {why}"),
        };
        let from = if measured { "measured" } else { "as spec.gpu.threshold says" };
        let (at_work, several) = (status.at_work().count(), status.devices.len() > 1);
        let names = status.at_work().map(|device_status| device_status.name.as_str()).collect::<Vec<_>>().join(", ");
        let does = if at_work > 1 { "run" } else { "runs" };
        let mut text = match status.threshold {
            _ if at_work == 0 => {
                let why = status.given_up.as_deref().unwrap_or_default();
                let (name, were) = (&status.name, if several { "were" } else { "was" });
                format!("{name} {were} disabled: {why}; the CPU runs all passes until this worker restarts")
            }
            Some(memories) => format!("{names} {does} passes over {memories} memories or more ({from})"),
            None => format!("{names} {does} no pass: the CPU is faster over any number of memories ({from})"),
        };
        for DeviceStatus { name, id, partitions, memories, given_up, .. } in
            status.devices.iter().filter(|_| several && at_work > 0)
        {
            let _ = match given_up {
                Some(why) => write!(text, "; {name} ({id}) was disabled: {why}"),
                None => write!(text, "; {name} ({id}) holds {partitions} partitions with {memories} memories"),
            };
        }
        if status.host_memories > 0 && at_work > 0 {
            let _ =
                write!(text, "; the CPU runs the part of {} memories that do not fit on a GPU", status.host_memories);
        }
        unusable.iter().for_each(|why| text.extend(["; ", why]));
        text
    }
}

/// Selects the devices.
///
/// # Errors
/// [`Error::NoGpu`]: a GPU is required, and none can be used.
pub(crate) fn choose(request: &DeviceRequest) -> Result<(Box<dyn Passes>, Device), Error> {
    let host = Cpu::new(request.threads);
    let cpu = (host.info().name.clone(), host.info().threads);
    let cpu_recorder = Recorder::off(cpu.0.clone());
    let cpu_only = |host: Cpu, why: &str| -> (Box<dyn Passes>, Device) {
        let device =
            Device { profiling: Profiling::of(vec![cpu_recorder.clone()]), ..Device::without_gpu(cpu.clone(), why) };
        (Box::new(ProfiledDevice::new(host, cpu_recorder.clone())), device)
    };
    if request.mode == GpuMode::Disabled {
        return Ok(cpu_only(host, "spec.gpu.mode is Disabled"));
    }
    match open(request) {
        Ok(OpenedGpus { gpus, threshold, recorders, ordinals, unusable }) => {
            let passes = MirroredDevice::over(host, gpus, threshold, request.strategy);
            let initial_status = passes.mirror_status().cloned().unwrap_or_default();
            let gpu = GpuSelection::Available { measured: request.threshold.is_none(), initial_status, unusable };
            let (cpu, threads) = cpu.clone();
            let task_gpus = ordinals.into_iter().zip(recorders.iter().cloned()).collect();
            let recorders = [cpu_recorder.clone()].into_iter().chain(recorders).collect();
            let device = Device { cpu, threads, profiling: Profiling::of(recorders), task_gpus, gpu };
            tracing::info!(gpu = device.gpu(None), "using GPUs");
            Ok((Box::new(ProfiledDevice::new(passes, cpu_recorder.clone())), device))
        }
        Err(why) if request.mode == GpuMode::Required => Err(Error::NoGpu { why }),
        Err(why) => {
            tracing::info!(why, "no GPU is used; the CPU runs all passes");
            Ok(cpu_only(host, &why))
        }
    }
}

type CudaGpu = Gpu<ProfiledDriver<Cuda>>;

/// Opened GPUs of this worker, their threshold, the recorders of their kernels, and why others cannot be used.
struct OpenedGpus {
    gpus: Vec<AvailableDevice<CudaGpu>>,
    threshold: Option<u64>,
    recorders: Vec<Recorder>,
    /// Their numbers at the driver.
    ordinals: Vec<usize>,
    unusable: Vec<String>,
}

/// Opens the GPUs of this worker and determines their threshold.
fn open(request: &DeviceRequest) -> Result<OpenedGpus, String> {
    let devices = cuda::probe().map_err(|error| error.to_string())?;
    let (ordinals, sharers) = assign_devices(devices, request.index, request.workers);
    // With several GPUs their relative speed must be known.
    let measures = request.threshold.is_none() || ordinals.len() > 1;
    let (mut opened, mut reasons) = (Vec::new(), Vec::new());
    for ordinal in ordinals {
        match open_one(request, ordinal, sharers, measures) {
            Ok((gpu, measured, recorder)) => opened.push((gpu, measured, (recorder, ordinal))),
            Err(why) => reasons.push((ordinal, why)),
        }
    }
    if opened.is_empty() {
        return Err(reasons.into_iter().map(|(_, why)| why).collect::<Vec<_>>().join("; "));
    }
    let mut unusable: Vec<String> =
        reasons.into_iter().map(|(ordinal, why)| format!("device {ordinal} cannot be used: {why}")).collect();
    let mut threshold = request.threshold;
    if threshold.is_none() {
        // A pass would wait for a device that is slower than the CPU. Of the others, the one with the highest threshold decides.
        threshold = opened.iter().filter_map(|(_, measured, _)| measured.as_ref()?.threshold).max();
        if threshold.is_some() {
            opened.retain(|(gpus, measured, _)| {
                let gains = measured.as_ref().is_some_and(|measured| measured.threshold.is_some());
                if !gains {
                    let name = &gpus.device.info().name;
                    unusable.push(format!("{name} ({}) is not used: the CPU is faster", gpus.id));
                }
                gains
            });
        }
    }
    let (gpus, numbered): (_, Vec<_>) = opened.into_iter().map(|(gpus, _, numbered)| (gpus, numbered)).unzip();
    let (recorders, ordinals) = numbered.into_iter().unzip();
    Ok(OpenedGpus { gpus, threshold, recorders, ordinals, unusable })
}

fn open_one(
    request: &DeviceRequest,
    ordinal: usize,
    sharers: usize,
    measures: bool,
) -> Result<(AvailableDevice<CudaGpu>, Option<Measurement>, Recorder), String> {
    let mut driver = Cuda::open(ordinal, request.deadline).map_err(|error| error.to_string())?;
    let (name, id) = (driver.name().to_owned(), driver.uuid().map_err(|error| error.to_string())?);
    let (free, _) = driver.memory().map_err(|error| error.to_string())?;
    // Leaves a margin for the driver.
    let free_bytes = (free - free / 16) / sharers as u64;
    let recorder = Recorder::off(name.clone());
    let mut device = Gpu::new(ProfiledDriver::new(driver, recorder.clone()), name.clone());
    let mut measured = None;
    if measures {
        let both = threshold::measure(&mut Cpu::new(request.threads), &mut device);
        measured = Some(both.map_err(|error| format!("failed to measure its first passes: {error}"))?);
        // Drops the tiles of the measurement.
        device = Gpu::new(device.into_driver(), name);
    }
    let throughput = measured.map(|measured| measured.throughput);
    let latency = measured.map_or(Duration::ZERO, |measured| measured.latency);
    Ok((AvailableDevice { device, id, free_bytes, throughput, latency }, measured, recorder))
}

/// Returns the GPUs of the worker with index `place` among those that share them, and how many workers share each. GPUs are
/// assigned round-robin; with more workers than GPUs, each worker gets one.
fn assign_devices(devices: usize, index: usize, workers: usize) -> (Vec<usize>, usize) {
    if devices >= workers {
        return ((index % workers..devices).step_by(workers).collect(), 1);
    }
    let own = index % devices;
    (vec![own], (own..workers).step_by(devices).count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_text_names_the_devices_and_the_reason() {
        let cpu = || ("EPYC".to_owned(), 8);
        let cpu_only = Device::without_gpu(cpu(), "there is no CUDA driver");
        assert_eq!(
            (cpu_only.name(None), cpu_only.gpu(None)),
            ("EPYC".into(), "not used: there is no CUDA driver".into())
        );
        let device_status = |id: &str| DeviceStatus { name: "H100".into(), id: id.into(), ..DeviceStatus::default() };
        let devices = vec![device_status("GPU-1")];
        let mut status =
            MirrorStatus { name: "H100".into(), threshold: Some(250_000), devices, ..MirrorStatus::default() };
        let initial_status = status.clone();
        let with_gpus = |measured| Device {
            cpu: cpu().0,
            threads: 8,
            profiling: Profiling::default(),
            task_gpus: Vec::new(),
            gpu: GpuSelection::Available { measured, initial_status: initial_status.clone(), unusable: Vec::new() },
        };
        let texts = |device: &Device, status: &MirrorStatus| (device.name(Some(status)), device.gpu(Some(status)));
        assert_eq!(texts(&with_gpus(true), &status), (with_gpus(true).name(None), with_gpus(true).gpu(None)));
        let (name, gpu) = texts(&with_gpus(true), &status);
        assert_eq!(name, "H100, EPYC");
        assert_eq!(gpu, "H100 runs passes over 250000 memories or more (measured)");
        assert!(texts(&with_gpus(false), &status).1.ends_with("(as spec.gpu.threshold says)"));
        status.threshold = None;
        assert!(texts(&with_gpus(true), &status).1.contains("the CPU is faster over any number of memories"));

        // One of two failed, and the other lacks memory for everything.
        let why = "device failed in pass 'epoch' (code 700)";
        let lost = DeviceStatus { given_up: Some(why.into()), ..device_status("GPU-2") };
        let left = DeviceStatus { partitions: 9, memories: 90, ..device_status("GPU-1") };
        status = MirrorStatus { threshold: Some(0), devices: vec![left, lost.clone()], host_memories: 7, ..status };
        let (name, gpu) = texts(&with_gpus(true), &status);
        assert_eq!(name, "H100, EPYC");
        let expected = "H100 runs passes over 0 memories or more (measured); H100 (GPU-1) holds 9 partitions with 90 memories; \
                        H100 (GPU-2) was disabled: device failed in pass 'epoch' (code 700); \
                        the CPU runs the part of 7 memories that do not fit on a GPU";
        assert_eq!(gpu, expected);

        (status.devices, status.given_up) = (vec![lost], Some(why.into()));
        let (name, gpu) = texts(&with_gpus(true), &status);
        assert_eq!(name, "EPYC");
        assert!(gpu.starts_with("H100 was disabled: device failed in pass 'epoch' (code 700)"), "{gpu}");
    }

    #[test]
    fn every_gpu_is_assigned_and_every_worker_has_one() {
        assert_eq!(assign_devices(4, 0, 1), (vec![0, 1, 2, 3], 1));
        assert_eq!([0, 1].map(|index| assign_devices(3, index, 2).0), [vec![0, 2], vec![1]]);
        assert_eq!(
            [0, 1, 2, 3, 4].map(|index| assign_devices(2, index, 5)),
            [0, 1, 0, 1, 0].map(|own| (vec![own], 3 - own))
        );
        for (devices, workers) in (1..9).flat_map(|devices| (1..9).map(move |workers| (devices, workers))) {
            let mut shared = vec![0; devices];
            for index in 0..workers {
                let (own, sharers) = assign_devices(devices, index, workers);
                assert!(!own.is_empty());
                own.iter().for_each(|&device| shared[device] += 1);
                assert!(own.iter().all(|&device| (device..workers).step_by(devices).count().max(1) == sharers));
            }
            assert!(shared.iter().all(|&workers| workers > 0), "{devices} devices, {workers} workers: {shared:?}");
        }
        // A cluster that grew after the worker count was set.
        assert_eq!(assign_devices(4, 5, 2), (vec![1, 3], 1));
    }

    #[test]
    fn a_disabled_gpu_is_never_probed() {
        let request = DeviceRequest {
            mode: GpuMode::Disabled,
            threshold: Some(0),
            strategy: Strategy::Balanced,
            index: 3,
            workers: 9,
            threads: 1,
            deadline: Duration::ZERO,
        };
        let (passes, device) = choose(&request).unwrap();
        assert!(passes.mirror_status().is_none());
        assert_eq!(device.gpu(None), "not used: spec.gpu.mode is Disabled");
    }
}
