//! The nvcc version that builds the fatbins: from the PATH, or assembled from Python wheels.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::tools;

/// Other versions produce other bytes. Its code and PTX require driver 580 or newer.
pub(super) const VERSION: &str = "13.0.88";

/// Parts of the compiler: driver and front end, optimizer, headers. About 100 MB, under `target/nvcc`.
const WHEELS: [&str; 5] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
];

/// Finds or installs nvcc.
///
/// # Errors
/// When it is not on the PATH and the wheels cannot be installed.
pub(super) fn find() -> Result<PathBuf> {
    let on_path = PathBuf::from("nvcc");
    if has_version(&on_path) {
        return Ok(on_path);
    }
    let mut install = vec!["--quiet", "--no-deps", "--no-compile"];
    install.extend(WHEELS);
    let python = tools::python("nvcc", "nvidia.cu13", &install)
        .with_context(|| format!("no nvcc {VERSION} on the PATH, and failed to install it"))?;
    let print_path = "import nvidia.cu13; print(list(nvidia.cu13.__path__)[0])";
    let output = Command::new(python).args(["-c", print_path]).output().context("failed to start python")?;
    let nvcc = Path::new(String::from_utf8_lossy(&output.stdout).trim()).join("bin/nvcc");
    ensure!(has_version(&nvcc), "{} is not nvcc {VERSION}", nvcc.display());
    Ok(nvcc)
}

fn has_version(nvcc: &Path) -> bool {
    let output = Command::new(nvcc).arg("--version").output();
    output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains(&format!("V{VERSION}")))
}
