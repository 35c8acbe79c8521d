//! Resources of this machine: the GPU, and optional programs.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use engram_kernels::gpu::cuda::{self, Cuda, DEADLINE};

use crate::report::Device;

/// Install location of the toolkit if it is not on the PATH.
const TOOLKIT: &str = "/usr/local/cuda/bin";

/// Opens a GPU, reads its properties, and closes it.
///
/// # Errors
/// The reason why it cannot be used.
pub(crate) fn device(ordinal: usize) -> Result<Device> {
    const NONE: &str = "no GPU to check";
    cuda::probe().context(NONE)?;
    let mut cuda = Cuda::open(ordinal, DEADLINE).context(NONE)?;
    let (major, minor) = cuda.capability();
    let version = cuda::version()?;
    Ok(Device {
        name: cuda.name().to_owned(),
        ordinal,
        capability: format!("{major}.{minor}"),
        driver: format!("{}.{}", version / 1_000, version % 1_000 / 10),
        memory_bytes: cuda.memory()?.1,
    })
}

/// Finds a program by name.
pub(crate) fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([Path::new(TOOLKIT).to_owned()]);
    folders.map(|folder| folder.join(name)).find(|candidate| candidate.is_file())
}

/// Returns the error text for a missing program.
pub(crate) fn missing_program(name: &str) -> String {
    format!("no {name} on the PATH or in {TOOLKIT}")
}
