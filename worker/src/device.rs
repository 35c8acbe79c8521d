//! What does the passes over memories: the CPU, and GPUs beside it where the settings want them and the machine has some.

use crate::options::Options;
use crate::profile::Profiling;
use crate::worker::Error;
use engram_api::{GpuMode, GpuPartitioner};
use engram_kernels::gpu::cuda::{self, Cuda};
use engram_kernels::partitioner::Strategy;
use engram_kernels::profiler::{Profiled, ProfiledDriver, Recorder};
use engram_kernels::threshold::{self, Measured};
use engram_kernels::{Cpu, Device as Passes, Given, Gpu, Held, Mirrored, Standing};
use std::fmt::Write as _;
use std::time::Duration;

/// What the settings say of devices.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    mode: GpuMode,
    /// Memories of a pass from which a GPU does it; absent = to be measured.
    threshold: Option<u64>,
    strategy: Strategy,
    /// Its place among the workers that share the GPUs it sees, and how many these are.
    place: usize,
    workers: usize,
    threads: usize,
    deadline: Duration,
}

/// What was chosen, in words.
#[derive(Debug)]
pub(crate) struct Device {
    /// Name of the processor.
    pub(crate) cpu: String,
    /// Threads of its passes.
    pub(crate) threads: usize,
    /// What records its passes while somebody asks for it.
    pub(crate) profiling: Profiling,
    gpu: Choice,
}

#[derive(Debug)]
enum Choice {
    /// There is none, and why.
    None(String),
    /// There are some; their threshold was measured, or set. How they stand before the store has told for the first time; and what is said of
    /// others that cannot be used.
    Beside { measured: bool, at_first: Standing, unusable: Vec<String> },
}

impl Asked {
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
            place: options.ordinal as usize,
            workers: options.machine_workers.map_or(1, |workers| workers.max(1) as usize),
            threads: threads.max(1),
            deadline: options.gpu_deadline_ms.map_or(cuda::DEADLINE, Duration::from_millis),
        }
    }
}

impl Device {
    /// Why no GPU was opened, where none was.
    pub(crate) fn without(&self) -> Option<&str> {
        self.beside(None).err()
    }

    /// The CPU alone, and why.
    pub(crate) fn without_gpu((cpu, threads): (String, usize), why: &str) -> Self {
        Self { cpu, threads, profiling: Profiling::default(), gpu: Choice::None(why.to_owned()) }
    }

    /// What does the passes now, as the GPUs stand.
    pub(crate) fn name(&self, gpu: Option<&Standing>) -> String {
        let Ok((standing, ..)) = self.beside(gpu) else { return self.cpu.clone() };
        let mut names: Vec<&str> = standing.at_work().map(|held| held.name.as_str()).collect();
        names.push(&self.cpu);
        names.join(", ")
    }

    /// The GPUs as the store tells of them, whether their threshold was measured, and which cannot be used; or why there is none.
    fn beside<'a>(&'a self, told: Option<&'a Standing>) -> Result<(&'a Standing, bool, &'a [String]), &'a str> {
        match &self.gpu {
            Choice::None(why) => Err(why),
            Choice::Beside { measured, at_first, unusable } => Ok((told.unwrap_or(at_first), *measured, unusable)),
        }
    }

    /// How the GPUs stand.
    pub(crate) fn gpu(&self, gpu: Option<&Standing>) -> String {
        let (standing, measured, unusable) = match self.beside(gpu) {
            Ok(beside) => beside,
            Err(why) => return format!("not used: {why}"),
        };
        let from = if measured { "measured" } else { "as spec.gpu.threshold says" };
        let (at_work, several) = (standing.at_work().count(), standing.devices.len() > 1);
        let names = standing.at_work().map(|held| held.name.as_str()).collect::<Vec<_>>().join(", ");
        let does = if at_work > 1 { "do" } else { "does" };
        let mut text = match standing.threshold {
            _ if at_work == 0 => {
                let why = standing.given_up.as_deref().unwrap_or_default();
                let (name, were) = (&standing.name, if several { "were" } else { "was" });
                format!("{name} {were} given up: {why}; the CPU does all passes until this worker starts again")
            }
            Some(memories) => format!("{names} {does} passes over {memories} memories or more ({from})"),
            None => format!("{names} {does} no pass: the CPU is faster over any number of memories ({from})"),
        };
        for Held { name, id, partitions, memories, given_up, .. } in
            standing.devices.iter().filter(|_| several && at_work > 0)
        {
            let _ = match given_up {
                Some(why) => write!(text, "; {name} ({id}) was given up: {why}"),
                None => write!(text, "; {name} ({id}) holds {partitions} partitions with {memories} memories"),
            };
        }
        if standing.host_memories > 0 && at_work > 0 {
            let _ =
                write!(text, "; the CPU does the part of {} memories without room on a GPU", standing.host_memories);
        }
        unusable.iter().for_each(|why| text.extend(["; ", why]));
        text
    }
}

/// Chooses what does the passes.
///
/// # Errors
/// [`Error::NoGpu`]: one is required, and cannot be used.
pub(crate) fn choose(asked: &Asked) -> Result<(Box<dyn Passes>, Device), Error> {
    let host = Cpu::new(asked.threads);
    let named = (host.info().name.clone(), host.info().threads);
    let own = Recorder::off(named.0.clone());
    let alone = |host: Cpu, why: &str| -> (Box<dyn Passes>, Device) {
        let device = Device { profiling: Profiling::of(vec![own.clone()]), ..Device::without_gpu(named.clone(), why) };
        (Box::new(Profiled::new(host, own.clone())), device)
    };
    if asked.mode == GpuMode::Disabled {
        return Ok(alone(host, "spec.gpu.mode is Disabled"));
    }
    match open(asked) {
        Ok(Opened { given, threshold, recorders, unusable }) => {
            let passes = Mirrored::over(host, given, threshold, asked.strategy);
            let at_first = passes.standing().cloned().unwrap_or_default();
            let gpu = Choice::Beside { measured: asked.threshold.is_none(), at_first, unusable };
            let (cpu, threads) = named.clone();
            let recorders = [own.clone()].into_iter().chain(recorders).collect();
            let device = Device { cpu, threads, profiling: Profiling::of(recorders), gpu };
            tracing::info!(gpu = device.gpu(None), "GPUs are there");
            Ok((Box::new(Profiled::new(passes, own.clone())), device))
        }
        Err(why) if asked.mode == GpuMode::Required => Err(Error::NoGpu { why }),
        Err(why) => {
            tracing::info!(why, "no GPU is used: the CPU does all passes");
            Ok(alone(host, &why))
        }
    }
}

type CudaGpu = Gpu<ProfiledDriver<Cuda>>;

/// The GPUs of this worker, from how many memories on they are used, what records their kernels, and what is said of those that cannot be used.
struct Opened {
    given: Vec<Given<CudaGpu>>,
    threshold: Option<u64>,
    recorders: Vec<Recorder>,
    unusable: Vec<String>,
}

/// Opens the GPUs of this worker, and finds from how many memories on they are worth their while.
fn open(asked: &Asked) -> Result<Opened, String> {
    let devices = cuda::probe().map_err(|error| error.to_string())?;
    let (ordinals, sharers) = dealt(devices, asked.place, asked.workers);
    // Of several it must be known how fast each is.
    let measures = asked.threshold.is_none() || ordinals.len() > 1;
    let (mut opened, mut reasons) = (Vec::new(), Vec::new());
    for ordinal in ordinals {
        match open_one(asked, ordinal, sharers, measures) {
            Ok(one) => opened.push(one),
            Err(why) => reasons.push((ordinal, why)),
        }
    }
    if opened.is_empty() {
        return Err(reasons.into_iter().map(|(_, why)| why).collect::<Vec<_>>().join("; "));
    }
    let mut unusable: Vec<String> =
        reasons.into_iter().map(|(ordinal, why)| format!("device {ordinal} cannot be used: {why}")).collect();
    let mut threshold = asked.threshold;
    if threshold.is_none() {
        // The part of a device that is slower than the CPU would be what a pass waits for. Of the others the one that gains last decides.
        threshold = opened.iter().filter_map(|(_, measured, _)| measured.as_ref()?.threshold).max();
        if threshold.is_some() {
            opened.retain(|(given, measured, _)| {
                let gains = measured.as_ref().is_some_and(|measured| measured.threshold.is_some());
                if !gains {
                    let name = &given.device.info().name;
                    unusable.push(format!("{name} ({}) is not used: the CPU is faster", given.id));
                }
                gains
            });
        }
    }
    let (given, recorders) = opened.into_iter().map(|(given, _, recorder)| (given, recorder)).unzip();
    Ok(Opened { given, threshold, recorders, unusable })
}

fn open_one(
    asked: &Asked,
    ordinal: usize,
    sharers: usize,
    measures: bool,
) -> Result<(Given<CudaGpu>, Option<Measured>, Recorder), String> {
    let mut driver = Cuda::open(ordinal, asked.deadline).map_err(|error| error.to_string())?;
    let (name, id) = (driver.name().to_owned(), driver.uuid().map_err(|error| error.to_string())?);
    let (free, _) = driver.memory().map_err(|error| error.to_string())?;
    // Something stays for what the driver takes itself.
    let free_bytes = (free - free / 16) / sharers as u64;
    let recorder = Recorder::off(name.clone());
    let mut device = Gpu::new(ProfiledDriver::new(driver, recorder.clone()), name.clone());
    let mut measured = None;
    if measures {
        let both = threshold::measure(&mut Cpu::new(asked.threads), &mut device);
        measured = Some(both.map_err(|error| format!("its first passes failed: {error}"))?);
        // Without the tiles of the measurement.
        device = Gpu::new(device.into_driver(), name);
    }
    let throughput = measured.map(|measured| measured.throughput);
    let latency = measured.map_or(Duration::ZERO, |measured| measured.latency);
    Ok((Given { device, id, free_bytes, throughput, latency }, measured, recorder))
}

/// The GPUs of the worker at `place` among those that share them, and how many share each: dealt out one after the other, or, where there are
/// more workers than GPUs, one for each worker in turn.
fn dealt(devices: usize, place: usize, workers: usize) -> (Vec<usize>, usize) {
    if devices >= workers {
        return ((place % workers..devices).step_by(workers).collect(), 1);
    }
    let own = place % devices;
    (vec![own], (own..workers).step_by(devices).count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_say_what_does_the_passes_and_why() {
        let cpu = || ("EPYC".to_owned(), 8);
        let alone = Device::without_gpu(cpu(), "there is no CUDA driver");
        assert_eq!((alone.name(None), alone.gpu(None)), ("EPYC".into(), "not used: there is no CUDA driver".into()));
        let held = |id: &str| Held { name: "H100".into(), id: id.into(), ..Held::default() };
        let devices = vec![held("GPU-1")];
        let mut standing = Standing { name: "H100".into(), threshold: Some(250_000), devices, ..Standing::default() };
        let at_first = standing.clone();
        let beside = |measured| Device {
            cpu: cpu().0,
            threads: 8,
            profiling: Profiling::default(),
            gpu: Choice::Beside { measured, at_first: at_first.clone(), unusable: Vec::new() },
        };
        let told = |device: &Device, standing: &Standing| (device.name(Some(standing)), device.gpu(Some(standing)));
        assert_eq!(told(&beside(true), &standing), (beside(true).name(None), beside(true).gpu(None)));
        let (name, gpu) = told(&beside(true), &standing);
        assert_eq!(name, "H100, EPYC");
        assert_eq!(gpu, "H100 does passes over 250000 memories or more (measured)");
        assert!(told(&beside(false), &standing).1.ends_with("(as spec.gpu.threshold says)"));
        standing.threshold = None;
        assert!(told(&beside(true), &standing).1.contains("the CPU is faster over any number of memories"));

        // One of two is lost, and the other has not room for everything.
        let why = "the device failed in pass 'epoch' (code 700)";
        let lost = Held { given_up: Some(why.into()), ..held("GPU-2") };
        let left = Held { partitions: 9, memories: 90, ..held("GPU-1") };
        standing = Standing { threshold: Some(0), devices: vec![left, lost.clone()], host_memories: 7, ..standing };
        let (name, gpu) = told(&beside(true), &standing);
        assert_eq!(name, "H100, EPYC");
        let expected = "H100 does passes over 0 memories or more (measured); H100 (GPU-1) holds 9 partitions with 90 memories; \
                        H100 (GPU-2) was given up: the device failed in pass 'epoch' (code 700); \
                        the CPU does the part of 7 memories without room on a GPU";
        assert_eq!(gpu, expected);

        (standing.devices, standing.given_up) = (vec![lost], Some(why.into()));
        let (name, gpu) = told(&beside(true), &standing);
        assert_eq!(name, "EPYC");
        assert!(gpu.starts_with("H100 was given up: the device failed in pass 'epoch' (code 700)"), "{gpu}");
    }

    #[test]
    fn every_gpu_of_a_machine_has_a_worker_and_every_worker_a_gpu() {
        assert_eq!(dealt(4, 0, 1), (vec![0, 1, 2, 3], 1));
        assert_eq!([0, 1].map(|place| dealt(3, place, 2).0), [vec![0, 2], vec![1]]);
        assert_eq!([0, 1, 2, 3, 4].map(|place| dealt(2, place, 5)), [0, 1, 0, 1, 0].map(|own| (vec![own], 3 - own)));
        for (devices, workers) in (1..9).flat_map(|devices| (1..9).map(move |workers| (devices, workers))) {
            let mut shared = vec![0; devices];
            for place in 0..workers {
                let (own, sharers) = dealt(devices, place, workers);
                assert!(!own.is_empty());
                own.iter().for_each(|&device| shared[device] += 1);
                assert!(own.iter().all(|&device| (device..workers).step_by(devices).count().max(1) == sharers));
            }
            assert!(shared.iter().all(|&workers| workers > 0), "{devices} devices, {workers} workers: {shared:?}");
        }
        // A cluster that grew since it was told.
        assert_eq!(dealt(4, 5, 2), (vec![1, 3], 1));
    }

    #[test]
    fn a_cluster_that_wants_no_gpu_never_asks_for_one() {
        let asked = Asked {
            mode: GpuMode::Disabled,
            threshold: Some(0),
            strategy: Strategy::Balanced,
            place: 3,
            workers: 9,
            threads: 1,
            deadline: Duration::ZERO,
        };
        let (passes, device) = choose(&asked).unwrap();
        assert!(passes.standing().is_none());
        assert_eq!(device.gpu(None), "not used: spec.gpu.mode is Disabled");
    }
}
