//! Every pass on the device, compared with what the law says: the tests that run the kernels on the CPU in CI.

use anyhow::{Result, ensure};
use engram_kernels::partitioner::Strategy;
use engram_kernels::{Cpu, Device, Given, Gpu, Mirrored};

use super::Part;
use crate::report::Found;
use crate::story::{PARTS, Story};
use crate::twins::Twins;

/// Steps of a random arena.
const STEPS: u32 = 12;

/// All parts of the story twice, then random arenas in a GPU, and in a mirror of one.
///
/// # Errors
/// When the device cannot be opened. What differs from the law panics.
pub(super) fn run(part: &Part) -> Result<Found> {
    let mut story = Story::new(part.open()?, 5, &[4_096, 4_096, 3_000, 700], false);
    for pass in PARTS.into_iter().chain(PARTS) {
        eprintln!("{pass:?}");
        story.tell(pass);
    }
    drop(story);
    for round in 0..part.rounds {
        let gpu: Box<dyn Device> = Box::new(Gpu::new(part.open()?, "gpu".to_owned()));
        let mirror: Box<dyn Device> =
            Box::new(Mirrored::new(Cpu::new(2), Gpu::new(part.open()?, "gpu".to_owned()), Some(0)));
        live(round, vec![gpu, mirror])?;
    }
    Ok(Found::done(format!("{} passes and {} random arenas equal the law, bit for bit", 2 * PARTS.len(), part.rounds)))
}

/// Random arenas in a mirror over as many devices as there are contexts, all of them on the one GPU, by each strategy.
///
/// # Errors
/// As [`run`].
pub(super) fn several(part: &Part) -> Result<Found> {
    let devices = part.contexts.max(2);
    for (round, strategy) in (0..part.rounds).zip(Strategy::ALL.into_iter().cycle()) {
        let given = (0..devices).map(|_| Ok(Given::unmeasured(Gpu::new(part.open()?, "gpu".to_owned()))));
        let mirror = Mirrored::over(Cpu::new(2), given.collect::<Result<_>>()?, Some(0), strategy);
        live(100 + round, vec![Box::new(mirror)])?;
    }
    Ok(Found::done(format!("{} random arenas over {devices} devices on the one GPU equal the law", part.rounds)))
}

/// A random arena; the last device is a mirror.
fn live(seed: u64, devices: Vec<Box<dyn Device>>) -> Result<()> {
    let mut twins = Twins::new(seed, (seed % 5) as usize + 1, devices);
    for _ in 0..STEPS {
        twins.step();
    }
    twins.rank();
    twins.compare();
    let standing = twins.devices().last().and_then(|mirror| mirror.standing()).expect("a mirror has a GPU");
    ensure!(standing.given_up.is_none() && standing.fallbacks == 0, "the mirror gave up: {standing:?}");
    Ok(())
}
