//! `cargo xtask gpu-check`: checks a real GPU, here or on a machine without a Rust toolchain.
//!
//! Package engram-gpu-check defines the checks and measurements. It is a single program with embedded fatbins and peer programs.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::process;
use crate::workspace::{self, Profile};

const PROGRAM: &str = "engram-gpu-check";
/// README next to the packaged program.
const README: &str = "\
./engram-gpu-check checks and measures Engram's kernels on the GPU of this machine (NVIDIA driver 580 or newer).
Nothing else is required. With compute-sanitizer, nvcc (CUB), and python3 with CuPy or PyTorch on the PATH it runs more checks;
checks with missing programs are skipped with the reason. The exit status is 0 if no check failed.

  ./engram-gpu-check                                    all checks: 10^9 updates, some minutes
  ./engram-gpu-check --updates 10m --memories 16m       less of it
  ./engram-gpu-check --help
  ./engram-gpu-check table gpu-check.json               the table of docs/results/gpu.md
";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Package the program for a GPU machine in this folder, or as an archive if the name ends in .tar, without running it
    #[arg(long, value_name = "DIR|FILE.tar")]
    pack: Option<PathBuf>,
    /// Build without optimisation, only to test this command: measurements are meaningless
    #[arg(long)]
    debug: bool,
    /// Arguments of the program, after `--`: `-- --updates 10m`; `-- --help` lists them
    #[arg(last = true)]
    arguments: Vec<OsString>,
}

/// Builds the program, and packages or runs it.
///
/// # Errors
/// When it cannot be built or packaged, there is no GPU, or a check failed.
pub(crate) fn run(options: &Options) -> Result<()> {
    let program = build(options.debug)?;
    match &options.pack {
        Some(to) => pack(&program, to),
        None => process::run(Command::new(program).args(&options.arguments)),
    }
}

fn build(debug: bool) -> Result<PathBuf> {
    // Together with the binary: otherwise its dependencies would have other features and be built again.
    let profile = if debug { Profile::Dev } else { Profile::Release };
    process::run(&mut profile.cargo("build", ["-p", "engram-cli", "-p", PROGRAM]))?;
    Ok(profile.folder().join(PROGRAM))
}

fn pack(program: &Path, to: &Path) -> Result<()> {
    let is_archive = to.extension().is_some_and(|extension| extension == "tar");
    let folder = if is_archive { workspace::target().join("gpu-check") } else { to.to_owned() };
    fs::create_dir_all(&folder).with_context(|| format!("failed to create {}", folder.display()))?;
    fs::copy(program, folder.join(PROGRAM)).context("failed to copy the program")?;
    fs::write(folder.join("README"), README).context("failed to write the README")?;
    if is_archive {
        let mut tar = Command::new("tar");
        tar.arg("-cf").arg(to).arg("-C").arg(&folder).args([PROGRAM, "README"]);
        process::run(&mut tar)?;
    }
    println!("packaged {PROGRAM} and its README in {}", to.display());
    Ok(())
}
