//! What fails on a real device, as far as it can be provoked: a mirror then gives the bits of the CPU, and says what happened.

use std::ops::Range;
use std::time::Duration;

use anyhow::{Result, bail, ensure};

use engram_kernels::gpu::{Argument, Driver};
use engram_kernels::{Cpu, Device, Error, Gpu, Mirrored, Order, Scope, Standing};
use engram_memory::{Histogram, QualityVector};

use super::arena::Arena;
use super::{PATIENT, Part, is_stand_in};
use crate::report::Found;

const MEMORIES: u32 = 60_000;
/// Passes after which a failure must have shown.
const PASSES: u32 = 200;
/// Behind all memory of any device.
const NOWHERE: usize = 1 << 46;

/// All that a pass says.
#[derive(PartialEq)]
struct Answers {
    ranked: Vec<(u32, u32)>,
    quality: Vec<QualityVector>,
    histogram: Histogram,
}

fn ask(arena: &Arena, device: &mut dyn Device) -> Result<Answers> {
    let (mut ranked, mut quality) = (Vec::new(), Vec::new());
    device.rank(&arena.segments, Scope::All, Order::HeaviestFirst, None, &arena.ids, &mut ranked)?;
    device.epoch(&arena.segments, &[], &mut quality)?;
    Ok(Answers { ranked, quality, histogram: device.histogram(&arena.segments, 8)? })
}

/// A mirror with memories, and what the CPU says of them.
fn mirror<D: Driver + 'static>(driver: D) -> Result<(Arena, Box<dyn Device>, Answers)> {
    let arena = Arena::new(MEMORIES);
    let mut cpu = Cpu::new(2);
    arena.write(&mut cpu)?;
    let expected = ask(&arena, &mut cpu)?;
    let mut mirror: Box<dyn Device> = Box::new(Mirrored::new(Cpu::new(2), Gpu::new(driver, "gpu".to_owned()), Some(0)));
    arena.write(&mut *mirror)?;
    Ok((arena, mirror, expected))
}

fn standing(device: &dyn Device) -> Result<Standing> {
    device.standing().cloned().ok_or_else(|| anyhow::anyhow!("a mirror has a GPU"))
}

/// No memory left for a pass: the CPU does it, and the GPU the next one that has some.
///
/// # Errors
/// When an answer differs, or nobody noticed.
pub(super) fn memory(part: &Part) -> Result<Found> {
    let (arena, mut mirror, expected) = mirror(part.open()?)?;
    ensure!(ask(&arena, &mut *mirror)? == expected, "a mirror differs from the CPU");
    ensure!(standing(&*mirror)?.fallbacks == 0, "there was no memory from the start: {:?}", standing(&*mirror)?);

    let mut other = part.open()?;
    let (mut ballast, mut bytes) = (Vec::new(), 1_usize << 34);
    while bytes >= 4_096 {
        match other.allocate(bytes) {
            Ok(buffer) => ballast.push((buffer, bytes)),
            Err(Error::Full { .. }) => bytes /= 2,
            Err(error) => bail!("memory could not be taken: {error}"),
        }
    }
    let taken: usize = ballast.iter().map(|(_, bytes)| bytes).sum();
    ensure!(ask(&arena, &mut *mirror)? == expected, "without memory a mirror differs from the CPU");
    let full = standing(&*mirror)?;
    ensure!(full.fallbacks > 0, "nobody noticed that no memory was left: {full:?}");
    ensure!(full.given_up.is_none(), "for want of memory for one pass the GPU was given up: {full:?}");

    drop(ballast);
    other.wait()?;
    ensure!(ask(&arena, &mut *mirror)? == expected, "with memory again a mirror differs from the CPU");
    let again = standing(&*mirror)?;
    ensure!(again.passes > full.passes && again.fallbacks == full.fallbacks, "the GPU was not used again: {again:?}");
    Ok(Found::done(format!("{} MiB taken: {} passes fell back, and went on after", taken >> 20, full.fallbacks)))
}

/// A device that does not answer in time.
///
/// # Errors
/// When an answer differs, or nobody noticed.
pub(super) fn no_answer(part: &Part) -> Result<Found> {
    lost(part.open_with(Duration::ZERO)?)
}

/// A launch that the driver refuses.
///
/// # Errors
/// When an answer differs, or nobody noticed, or the device cannot be opened again.
pub(super) fn refused_launch(part: &Part) -> Result<Found> {
    let found = lost(Faulty { driver: part.open_with(PATIENT)?, launches: 0, fault: Fault::NoBlocks })?;
    let (arena, mut mirror, expected) = mirror(part.open()?)?;
    ensure!(ask(&arena, &mut *mirror)? == expected, "opened again, the device differs from the CPU");
    ensure!(standing(&*mirror)?.given_up.is_none(), "opened again, the device fails");
    Ok(Found::done(format!("{}; opened again it works", found.detail)))
}

/// A kernel that reads where there is no memory, which ends the context.
///
/// # Errors
/// When an answer differs, or nobody noticed.
pub(super) fn wrong_address(part: &Part) -> Result<Found> {
    let driver = part.open_with(PATIENT)?;
    if is_stand_in(driver.name()) {
        return Ok(Found::skipped("kernels of the stand-in run in this process, which a wrong address would end"));
    }
    let found = lost(Faulty { driver, launches: 0, fault: Fault::Nowhere })?;
    let then = match part.open() {
        Ok(_) => "this process can open it again".to_owned(),
        Err(error) => format!("this process cannot open it again ({error:#})"),
    };
    Ok(Found::done(format!("{}; {then}", found.detail)))
}

/// A driver that fails on the way: the answers stay those of the CPU, and the GPU is given up.
fn lost<D: Driver + 'static>(driver: D) -> Result<Found> {
    let (arena, mut mirror, expected) = mirror(driver)?;
    for pass in 1..=PASSES {
        ensure!(ask(&arena, &mut *mirror)? == expected, "a mirror whose GPU fails differs from the CPU");
        if let Standing { given_up: Some(why), fallbacks, .. } = standing(&*mirror)? {
            ensure!(fallbacks == 1, "{fallbacks} passes fell back, and one was to");
            ensure!(ask(&arena, &mut *mirror)? == expected, "a mirror without its GPU differs from the CPU");
            return Ok(Found::done(format!("given up in round {pass} ({why}), with the bits of the CPU")));
        }
    }
    bail!("nobody noticed in {PASSES} rounds")
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// A launch of no blocks, which a driver refuses.
    NoBlocks,
    /// The first address that a kernel gets lies outside of all memory.
    Nowhere,
}

/// From this launch on.
const FIRST_FAULT: u32 = 5;

/// A driver with a fault.
struct Faulty<D> {
    driver: D,
    launches: u32,
    fault: Fault,
}

impl<D: Driver> Driver for Faulty<D> {
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
                    let Argument::Buffer(buffer) = *first else { unreachable!("it was found as one") };
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
