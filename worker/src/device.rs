//! What does the passes over memories: the CPU, and a GPU beside it where the settings want one and the machine has one.

use crate::options::Options;
use crate::worker::Error;
use engram_api::GpuMode;
use engram_kernels::gpu::cuda::{self, Cuda};
use engram_kernels::{Cpu, Device as Passes, Gpu, Mirrored, Standing, threshold};
use std::time::Duration;

/// What the settings say of devices.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    mode: GpuMode,
    /// Memories of a pass from which a GPU does it; absent = to be measured.
    threshold: Option<u64>,
    /// Workers that share a machine take its GPUs in turn.
    ordinal: usize,
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
    gpu: Choice,
}

#[derive(Debug)]
enum Choice {
    /// There is none, and why.
    None(String),
    /// There is one; its threshold was measured, or set. How it stands before the store has told for the first time.
    Beside { measured: bool, at_first: Standing },
}

impl Asked {
    pub(crate) fn of(options: &Options) -> Self {
        let threads = options.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
        Self {
            mode: options.spec.gpu.mode,
            threshold: options.spec.gpu.threshold,
            ordinal: options.ordinal as usize,
            threads: threads.max(1),
            deadline: options.gpu_deadline_ms.map_or(cuda::DEADLINE, Duration::from_millis),
        }
    }
}

impl Device {
    /// The CPU alone, and why.
    pub(crate) fn without_gpu((cpu, threads): (String, usize), why: &str) -> Self {
        Self { cpu, threads, gpu: Choice::None(why.to_owned()) }
    }

    /// What does the passes now, as the GPU stands.
    pub(crate) fn name(&self, gpu: Option<&Standing>) -> String {
        match self.beside(gpu) {
            Ok((gpu, _)) if gpu.given_up.is_none() => format!("{}, {}", gpu.name, self.cpu),
            _ => self.cpu.clone(),
        }
    }

    /// The GPU as the store tells of it, and whether its threshold was measured; or why there is none.
    fn beside<'a>(&'a self, told: Option<&'a Standing>) -> Result<(&'a Standing, bool), &'a str> {
        match &self.gpu {
            Choice::None(why) => Err(why),
            Choice::Beside { measured, at_first } => Ok((told.unwrap_or(at_first), *measured)),
        }
    }

    /// How the GPU stands.
    pub(crate) fn gpu(&self, gpu: Option<&Standing>) -> String {
        let (Standing { name, threshold, given_up, .. }, measured) = match self.beside(gpu) {
            Ok(beside) => beside,
            Err(why) => return format!("not used: {why}"),
        };
        let from = if measured { "measured" } else { "as spec.gpu.threshold says" };
        match (given_up, threshold) {
            (Some(why), _) => {
                format!("{name} was given up: {why}; the CPU does all passes until this worker starts again")
            }
            (None, Some(memories)) => format!("{name} does passes over {memories} memories or more ({from})"),
            (None, None) => format!("{name} does no pass: the CPU is faster over any number of memories ({from})"),
        }
    }
}

/// Chooses what does the passes.
///
/// # Errors
/// [`Error::NoGpu`]: one is required, and cannot be used.
pub(crate) fn choose(asked: &Asked) -> Result<(Box<dyn Passes>, Device), Error> {
    let host = Cpu::new(asked.threads);
    let named = (host.info().name.clone(), host.info().threads);
    if asked.mode == GpuMode::Disabled {
        return Ok((Box::new(host), Device::without_gpu(named, "spec.gpu.mode is Disabled")));
    }
    match open(asked) {
        Ok((gpu, threshold)) => {
            let passes = Mirrored::new(host, gpu, threshold);
            let at_first = passes.standing().cloned().unwrap_or_default();
            let gpu = Choice::Beside { measured: asked.threshold.is_none(), at_first };
            let (cpu, threads) = named;
            let device = Device { cpu, threads, gpu };
            tracing::info!(gpu = device.gpu(None), "a GPU is there");
            Ok((Box::new(passes), device))
        }
        Err(why) if asked.mode == GpuMode::Required => Err(Error::NoGpu { why }),
        Err(why) => {
            tracing::info!(why, "no GPU is used: the CPU does all passes");
            Ok((Box::new(host), Device::without_gpu(named, &why)))
        }
    }
}

/// Opens the GPU of this worker, and finds from how many memories on it is worth its while.
fn open(asked: &Asked) -> Result<(Gpu<Cuda>, Option<u64>), String> {
    let devices = cuda::probe().map_err(|error| error.to_string())?;
    let driver = Cuda::open(asked.ordinal % devices, asked.deadline).map_err(|error| error.to_string())?;
    let name = driver.name().to_owned();
    let gpu = Gpu::new(driver, name.clone());
    if asked.threshold.is_some() {
        return Ok((gpu, asked.threshold));
    }
    let mut gpu = gpu;
    let threshold = threshold::measure(&mut Cpu::new(asked.threads), &mut gpu)
        .map_err(|error| format!("its first passes failed: {error}"))?;
    // Without the tiles of the measurement.
    Ok((Gpu::new(gpu.into_driver(), name), threshold))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_say_what_does_the_passes_and_why() {
        let cpu = || ("EPYC".to_owned(), 8);
        let alone = Device::without_gpu(cpu(), "there is no CUDA driver");
        assert_eq!((alone.name(None), alone.gpu(None)), ("EPYC".into(), "not used: there is no CUDA driver".into()));
        let mut standing = Standing { name: "H100".into(), threshold: Some(250_000), ..Standing::default() };
        let at_first = standing.clone();
        let beside = |measured| Device {
            cpu: cpu().0,
            threads: 8,
            gpu: Choice::Beside { measured, at_first: at_first.clone() },
        };
        let told = |device: &Device, standing: &Standing| (device.name(Some(standing)), device.gpu(Some(standing)));
        assert_eq!(told(&beside(true), &standing), (beside(true).name(None), beside(true).gpu(None)));
        let (name, gpu) = told(&beside(true), &standing);
        assert_eq!(name, "H100, EPYC");
        assert_eq!(gpu, "H100 does passes over 250000 memories or more (measured)");
        assert!(told(&beside(false), &standing).1.ends_with("(as spec.gpu.threshold says)"));
        standing.threshold = None;
        assert!(told(&beside(true), &standing).1.contains("the CPU is faster over any number of memories"));
        standing.given_up = Some("the device failed in pass 'epoch' (code 700)".into());
        let (name, gpu) = told(&beside(true), &standing);
        assert_eq!(name, "EPYC");
        assert!(gpu.starts_with("H100 was given up: the device failed in pass 'epoch' (code 700)"), "{gpu}");
    }

    #[test]
    fn a_cluster_that_wants_no_gpu_never_asks_for_one() {
        let asked =
            Asked { mode: GpuMode::Disabled, threshold: Some(0), ordinal: 3, threads: 1, deadline: Duration::ZERO };
        let (passes, device) = choose(&asked).unwrap();
        assert!(passes.standing().is_none());
        assert_eq!(device.gpu(None), "not used: spec.gpu.mode is Disabled");
    }
}
