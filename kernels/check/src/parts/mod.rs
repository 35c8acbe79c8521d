//! Parts of the check, each of which runs in its own process and prints its result.

mod arena;
mod bench;
mod failures;
mod history;
mod passes;
mod training;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use engram_kernels::gpu::cuda::{Cuda, DEADLINE};

/// Deadline for kernels slowed down by a sanitizer.
const LONG_DEADLINE: Duration = Duration::from_secs(600);
/// Name prefix of an emulated device, whose kernels run in this process.
const EMULATED_NAME: &str = "emulated";

/// Arguments of a part.
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
    long_deadline: bool,
    #[arg(long)]
    scratch: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Name {
    Passes,
    Training,
    MultipleDevices,
    History,
    Drivers,
    FailuresOutOfMemory,
    FailuresTimeout,
    FailuresRejectedLaunch,
    FailuresInvalidAddress,
    Bench,
}

/// Runs one part.
///
/// # Errors
/// The failed condition.
pub(crate) fn run(part: &Part) -> Result<()> {
    let result = match part.name {
        Name::Passes => passes::run(part)?,
        Name::Training => training::run(part)?,
        Name::MultipleDevices => passes::several(part)?,
        Name::History => history::run(part)?,
        Name::Drivers => history::drivers(part)?,
        Name::FailuresOutOfMemory => failures::out_of_memory(part)?,
        Name::FailuresTimeout => failures::timeout(part)?,
        Name::FailuresRejectedLaunch => failures::rejected_launch(part)?,
        Name::FailuresInvalidAddress => failures::invalid_address(part)?,
        Name::Bench => bench::run(part)?,
    };
    println!("{}", serde_json::to_string(&result).context("failed to write the result")?);
    Ok(())
}

impl Part {
    fn open(&self) -> Result<Cuda> {
        self.open_with(if self.long_deadline { LONG_DEADLINE } else { DEADLINE })
    }

    fn open_with(&self, deadline: Duration) -> Result<Cuda> {
        Cuda::open(self.device, deadline).context("failed to open the device")
    }
}

fn is_emulated(name: &str) -> bool {
    name.starts_with(EMULATED_NAME)
}
