//! Failures that can be provoked on a real device: a mirrored device must return the CPU's bits and report the failure.

use std::ops::Range;
use std::time::Duration;

use anyhow::{Result, bail, ensure};

use engram_kernels::gpu::{Argument, Driver};
use engram_kernels::{Cpu, Device, Error, Gpu, MirrorStatus, MirroredDevice, Order, RankRequest, Scope};
use engram_memory::{Histogram, QualityVector};

use super::arena::Arena;
use super::{LONG_DEADLINE, Part, is_emulated};
use crate::report::PartResult;

const MEMORIES: u32 = 60_000;
/// Maximum passes until a failure must be reported.
const PASSES: u32 = 200;
/// An address beyond all device memory.
const NOWHERE: usize = 1 << 46;

/// Results of every pass.
#[derive(PartialEq)]
struct PassResults {
    ranked: Vec<(u32, u32)>,
    quality: Vec<QualityVector>,
    histogram: Histogram,
}

fn run_passes(arena: &Arena, device: &mut dyn Device) -> Result<PassResults> {
    let (mut ranked, mut quality) = (Vec::new(), Vec::new());
    let Arena { segments, ids, .. } = arena;
    let request = RankRequest { segments, ids, scope: Scope::All, order: Order::HeaviestFirst, limit: None };
    device.rank(&request, &mut ranked)?;
    device.epoch(&arena.segments, &[], &mut quality)?;
    Ok(PassResults { ranked, quality, histogram: device.histogram(&arena.segments, 8)? })
}

/// Creates a mirrored device with memories, and the CPU's results for them.
fn mirror<D: Driver + 'static>(driver: D) -> Result<(Arena, Box<dyn Device>, PassResults)> {
    let arena = Arena::new(MEMORIES);
    let mut cpu = Cpu::new(2);
    arena.write(&mut cpu)?;
    let expected = run_passes(&arena, &mut cpu)?;
    let mut mirror: Box<dyn Device> =
        Box::new(MirroredDevice::new(Cpu::new(2), Gpu::new(driver, "gpu".to_owned()), Some(0)));
    arena.write(&mut *mirror)?;
    Ok((arena, mirror, expected))
}

fn mirror_status(device: &dyn Device) -> Result<MirrorStatus> {
    device.mirror_status().cloned().ok_or_else(|| anyhow::anyhow!("device is not mirrored"))
}

/// Exhausts the memory for a pass: the CPU executes it, and the GPU the next one after memory is freed.
///
/// # Errors
/// When a result differs, or the failure is not reported.
pub(super) fn out_of_memory(part: &Part) -> Result<PartResult> {
    let (arena, mut mirror, expected) = mirror(part.open()?)?;
    ensure!(run_passes(&arena, &mut *mirror)? == expected, "results differ from the CPU");
    ensure!(mirror_status(&*mirror)?.fallbacks == 0, "out of memory before the fault: {:?}", mirror_status(&*mirror)?);

    let mut other = part.open()?;
    let (mut ballast, mut bytes) = (Vec::new(), 1_usize << 34);
    while bytes >= 4_096 {
        match other.allocate(bytes) {
            Ok(buffer) => ballast.push((buffer, bytes)),
            Err(Error::Full { .. }) => bytes /= 2,
            Err(error) => bail!("failed to exhaust device memory: {error}"),
        }
    }
    let taken: usize = ballast.iter().map(|(_, bytes)| bytes).sum();
    ensure!(run_passes(&arena, &mut *mirror)? == expected, "results without device memory differ from the CPU");
    let full = mirror_status(&*mirror)?;
    ensure!(full.fallbacks > 0, "out of memory was not reported: {full:?}");
    ensure!(full.given_up.is_none(), "the GPU was given up although only one pass ran out of memory: {full:?}");

    drop(ballast);
    other.wait()?;
    ensure!(run_passes(&arena, &mut *mirror)? == expected, "results after freeing memory differ from the CPU");
    let again = mirror_status(&*mirror)?;
    ensure!(
        again.passes > full.passes && again.fallbacks == full.fallbacks,
        "the GPU was not used after memory was freed: {again:?}"
    );
    Ok(PartResult::passed(format!(
        "{} MiB allocated: {} passes fell back to the CPU, later ones used the GPU",
        taken >> 20,
        full.fallbacks
    )))
}

/// Simulates a device that exceeds the deadline.
///
/// # Errors
/// When a result differs, or the failure is not reported.
pub(super) fn timeout(part: &Part) -> Result<PartResult> {
    check_failing_driver(part.open_with(Duration::ZERO)?)
}

/// Provokes a launch that the driver rejects.
///
/// # Errors
/// When a result differs, the failure is not reported, or the device cannot be reopened.
pub(super) fn rejected_launch(part: &Part) -> Result<PartResult> {
    let result = check_failing_driver(FaultyDriver {
        driver: part.open_with(LONG_DEADLINE)?,
        launches: 0,
        fault: Fault::NoBlocks,
    })?;
    let (arena, mut mirror, expected) = mirror(part.open()?)?;
    ensure!(run_passes(&arena, &mut *mirror)? == expected, "results of the reopened device differ from the CPU");
    ensure!(mirror_status(&*mirror)?.given_up.is_none(), "the reopened device fails");
    Ok(PartResult::passed(format!("{}; the reopened device works", result.detail)))
}

/// Provokes a kernel access to an invalid address, which destroys the context.
///
/// # Errors
/// When a result differs, or the failure is not reported.
pub(super) fn invalid_address(part: &Part) -> Result<PartResult> {
    let driver = part.open_with(LONG_DEADLINE)?;
    if is_emulated(driver.name()) {
        return Ok(PartResult::skipped("emulated kernels run in this process, which an invalid address would crash"));
    }
    let result = check_failing_driver(FaultyDriver { driver, launches: 0, fault: Fault::Nowhere })?;
    let then = match part.open() {
        Ok(_) => "this process can reopen it".to_owned(),
        Err(error) => format!("this process cannot reopen it ({error:#})"),
    };
    Ok(PartResult::passed(format!("{}; {then}", result.detail)))
}

/// Checks a failing driver: results stay those of the CPU, and the GPU is given up.
fn check_failing_driver<D: Driver + 'static>(driver: D) -> Result<PartResult> {
    let (arena, mut mirror, expected) = mirror(driver)?;
    for pass in 1..=PASSES {
        ensure!(run_passes(&arena, &mut *mirror)? == expected, "results differ from the CPU when the GPU fails");
        if let MirrorStatus { given_up: Some(why), fallbacks, .. } = mirror_status(&*mirror)? {
            ensure!(fallbacks == 1, "{fallbacks} passes fell back to the CPU, expected 1");
            ensure!(
                run_passes(&arena, &mut *mirror)? == expected,
                "results differ from the CPU after the GPU was given up"
            );
            return Ok(PartResult::passed(format!("given up in round {pass} ({why}), results equal the CPU's")));
        }
    }
    bail!("the failure was not reported in {PASSES} rounds")
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// A launch of zero blocks, which a driver rejects.
    NoBlocks,
    /// An invalid address as first buffer of a kernel.
    Nowhere,
}

/// Launch number from which the fault is active.
const FIRST_FAULT: u32 = 5;

/// A driver with a fault.
struct FaultyDriver<D> {
    driver: D,
    launches: u32,
    fault: Fault,
}

impl<D: Driver> Driver for FaultyDriver<D> {
    type Buffer = D::Buffer;
    type Graph = D::Graph;

    fn allocate(&mut self, bytes: usize) -> Result<D::Buffer, Error> {
        self.driver.allocate(bytes)
    }

    fn upload(&mut self, buffer: &D::Buffer, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        self.driver.upload(buffer, offset, bytes)
    }

    fn download(&mut self, buffer: &D::Buffer, offset: usize, out: &mut [u8]) -> Result<(), Error> {
        self.driver.download(buffer, offset, out)
    }

    fn copy(&mut self, from: &D::Buffer, to: &D::Buffer, bytes: usize) -> Result<(), Error> {
        self.driver.copy(from, to, bytes)
    }

    fn fill(&mut self, buffer: &D::Buffer, range: Range<usize>, byte: u8) -> Result<(), Error> {
        self.driver.fill(buffer, range, byte)
    }

    fn launch(
        &mut self,
        kernel: &'static str,
        blocks: u32,
        arguments: &[Argument<'_, D::Buffer>],
    ) -> Result<(), Error> {
        self.launches += 1;
        if self.launches < FIRST_FAULT {
            return self.driver.launch(kernel, blocks, arguments);
        }
        match self.fault {
            Fault::NoBlocks => self.driver.launch(kernel, 0, arguments),
            Fault::Nowhere => {
                let mut arguments = arguments.to_vec();
                if let Some(first) = arguments.iter_mut().find(|argument| matches!(argument, Argument::Buffer(_))) {
                    let Argument::Buffer(buffer) = *first else { unreachable!("the argument is a buffer") };
                    *first = Argument::Inside(buffer, NOWHERE);
                }
                self.driver.launch(kernel, blocks, &arguments)
            }
        }
    }

    fn wait(&mut self) -> Result<(), Error> {
        self.driver.wait()
    }
}
