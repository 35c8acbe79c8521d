//! The parts of the check, each of which runs in a process of its own and prints what it found.

mod arena;
mod bench;
mod failures;
mod history;
mod passes;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use engram_kernels::gpu::cuda::{Cuda, DEADLINE};

/// For kernels that are slowed down on purpose.
const PATIENT: Duration = Duration::from_secs(600);
/// The name of a device whose kernels run in this process: the stand-in for NVIDIA's library in tests.
const STAND_IN: &str = "stand-in";

/// Which part, and what it is told.
#[derive(Args)]
pub(crate) struct Part {
    name: Name,
    #[arg(long)]
    device: usize,
    #[arg(long, default_value_t = 0)]
    updates: u64,
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[arg(long, default_value_t = 0)]
    rounds: u64,
    #[arg(long, default_value_t = 0)]
    contexts: u64,
    #[arg(long, default_value_t = 0)]
    memories: u64,
    #[arg(long, default_value_t = 0)]
    ranked: u64,
    #[arg(long, default_value_t = 0)]
    repeats: usize,
    #[arg(long)]
    patient: bool,
    #[arg(long)]
    scratch: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Name {
    Passes,
    Several,
    History,
    Drivers,
    FailuresMemory,
    FailuresNoAnswer,
    FailuresRefusedLaunch,
    FailuresWrongAddress,
    Bench,
}

/// Runs one part.
///
/// # Errors
/// What does not hold.
pub(crate) fn run(part: &Part) -> Result<()> {
    let found = match part.name {
        Name::Passes => passes::run(part)?,
        Name::Several => passes::several(part)?,
        Name::History => history::run(part)?,
        Name::Drivers => history::drivers(part)?,
        Name::FailuresMemory => failures::memory(part)?,
        Name::FailuresNoAnswer => failures::no_answer(part)?,
        Name::FailuresRefusedLaunch => failures::refused_launch(part)?,
        Name::FailuresWrongAddress => failures::wrong_address(part)?,
        Name::Bench => bench::run(part)?,
    };
    println!("{}", serde_json::to_string(&found).context("failed to write what was found")?);
    Ok(())
}

impl Part {
    fn open(&self) -> Result<Cuda> {
        self.open_with(if self.patient { PATIENT } else { DEADLINE })
    }

    fn open_with(&self, deadline: Duration) -> Result<Cuda> {
        Cuda::open(self.device, deadline).context("the device cannot be opened")
    }
}

fn is_stand_in(name: &str) -> bool {
    name.starts_with(STAND_IN)
}
