//! What there is on this machine: the GPU, and programs that it may lack.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use engram_kernels::gpu::cuda::{self, Cuda, DEADLINE};

use crate::report::Device;

/// Where the toolkit is installed when it is not on the PATH.
const TOOLKIT: &str = "/usr/local/cuda/bin";

/// Opens a GPU and lets it go again.
///
/// # Errors
/// Why it cannot be used.
pub(crate) fn device(ordinal: usize) -> Result<Device> {
    const NONE: &str = "there is no GPU to check";
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

/// A program of this name.
pub(crate) fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([Path::new(TOOLKIT).to_owned()]);
    folders.map(|folder| folder.join(name)).find(|candidate| candidate.is_file())
}

/// Why there is none.
pub(crate) fn lacking(name: &str) -> String {
    format!("no {name} on the PATH or in {TOOLKIT}")
}
