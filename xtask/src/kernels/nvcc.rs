//! The one nvcc that the fatbins are made with: on the PATH, or assembled from the wheels of its parts.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::tools;

/// Another one would make other bytes. Its code for real architectures runs on drivers from 580 on, and so does its PTX.
pub(super) const VERSION: &str = "13.0.88";

/// What makes a compiler: driver and front end, optimiser, headers. About 100 MB, under `target/nvcc`.
const WHEELS: [&str; 5] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
];

/// Finds or makes it.
///
/// # Errors
/// When it is not on the PATH and the wheels cannot be installed.
pub(super) fn find() -> Result<PathBuf> {
    let on_path = PathBuf::from("nvcc");
    if is_the_one(&on_path) {
        return Ok(on_path);
    }
    let mut install = vec!["--quiet", "--no-deps", "--no-compile"];
    install.extend(WHEELS);
    let python = tools::python("nvcc", "nvidia.cu13", &install)
        .with_context(|| format!("no nvcc {VERSION} on the PATH, and none could be installed"))?;
    let where_it_is = "import nvidia.cu13; print(list(nvidia.cu13.__path__)[0])";
    let output = Command::new(python).args(["-c", where_it_is]).output().context("failed to start python")?;
    let nvcc = Path::new(String::from_utf8_lossy(&output.stdout).trim()).join("bin/nvcc");
    ensure!(is_the_one(&nvcc), "{} is not nvcc {VERSION}", nvcc.display());
    Ok(nvcc)
}

fn is_the_one(nvcc: &Path) -> bool {
    let output = Command::new(nvcc).arg("--version").output();
    output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains(&format!("V{VERSION}")))
}
