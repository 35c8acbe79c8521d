//! Compares every pass on the device with the reference device: the tests that CI runs with the kernels on the CPU.

use anyhow::{Result, ensure};
use engram_kernels::partitioner::Strategy;
use engram_kernels::{AvailableDevice, Cpu, Device, Gpu, MirroredDevice};

use super::Part;
use crate::device_comparison::DeviceComparison;
use crate::pass_checks::{PARTS, PassChecks};
use crate::report::PartResult;

/// Steps per random arena.
const STEPS: u32 = 12;

/// Checks every pass twice, then random arenas on a GPU, and on a mirrored device.
///
/// # Errors
/// When the device cannot be opened. A difference panics.
pub(super) fn run(part: &Part) -> Result<PartResult> {
    let mut checks = PassChecks::new(part.open()?, 5, &[4_096, 4_096, 3_000, 700], false);
    for pass in PARTS.into_iter().chain(PARTS) {
        eprintln!("{pass:?}");
        checks.check(pass);
    }
    drop(checks);
    for round in 0..part.rounds {
        let gpu: Box<dyn Device> = Box::new(Gpu::new(part.open()?, "gpu".to_owned()));
        let mirror: Box<dyn Device> =
            Box::new(MirroredDevice::new(Cpu::new(2), Gpu::new(part.open()?, "gpu".to_owned()), Some(0)));
        check_random_arena(round, vec![gpu, mirror])?;
    }
    Ok(PartResult::passed(format!(
        "{} passes and {} random arenas equal the reference, bit for bit",
        2 * PARTS.len(),
        part.rounds
    )))
}

/// Checks random arenas on a mirrored device over several contexts of the one GPU, with each strategy.
///
/// # Errors
/// As [`run`].
pub(super) fn several(part: &Part) -> Result<PartResult> {
    let devices = part.contexts.max(2);
    for (round, strategy) in (0..part.rounds).zip(Strategy::ALL.into_iter().cycle()) {
        let given = (0..devices).map(|_| Ok(AvailableDevice::unmeasured(Gpu::new(part.open()?, "gpu".to_owned()))));
        let mirror = MirroredDevice::over(Cpu::new(2), given.collect::<Result<_>>()?, Some(0), strategy);
        check_random_arena(100 + round, vec![Box::new(mirror)])?;
    }
    Ok(PartResult::passed(format!(
        "{} random arenas over {devices} devices on one GPU equal the reference",
        part.rounds
    )))
}

/// Checks a random arena; the last device is a mirrored one.
fn check_random_arena(seed: u64, devices: Vec<Box<dyn Device>>) -> Result<()> {
    let mut devices = DeviceComparison::new(seed, (seed % 5) as usize + 1, devices);
    for _ in 0..STEPS {
        devices.step();
    }
    devices.rank();
    devices.compare();
    let status =
        devices.devices().last().and_then(|mirror| mirror.mirror_status()).expect("the last device is mirrored");
    ensure!(status.given_up.is_none() && status.fallbacks == 0, "the mirrored device fell back to the CPU: {status:?}");
    Ok(())
}
