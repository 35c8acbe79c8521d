//! `cargo xtask gpu-check`: the check of a real GPU, here or on a machine without a Rust toolchain.
//!
//! What is checked, and how it is measured, is in package engram-gpu-check, which is one program: fatbins and the programs of the peers are
//! inside it.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::process;
use crate::workspace::{self, Profile};

const PROGRAM: &str = "engram-gpu-check";
/// What lies beside the program for whoever finds it.
const README: &str = "\
./engram-gpu-check checks and measures Engram's kernels on the GPU of this machine (NVIDIA driver 580 or newer).
Nothing else is needed. With compute-sanitizer, nvcc (CUB), and python3 with CuPy or PyTorch on the PATH it does more;
what is lacking is skipped with the reason. It ends with 0 when nothing failed.

  ./engram-gpu-check                                    everything: 10^9 updates, some minutes
  ./engram-gpu-check --updates 10m --memories 16m       less of it
  ./engram-gpu-check --help
  ./engram-gpu-check table gpu-check.json               the table of docs/results/gpu.md
";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Runs nothing: makes what is carried to a GPU machine, in this folder, or as one archive where the name ends in .tar
    #[arg(long, value_name = "DIR|FILE.tar")]
    pack: Option<PathBuf>,
    /// Builds without optimisation: to try the command itself, since figures then mean nothing
    #[arg(long)]
    debug: bool,
    /// What the program is told, behind `--`: `-- --updates 10m`; `-- --help` shows all of it
    #[arg(last = true)]
    arguments: Vec<OsString>,
}

/// Builds the program; packs it, or runs it here.
///
/// # Errors
/// When it cannot be built or packed, there is no GPU, or a check failed.
pub(crate) fn run(options: &Options) -> Result<()> {
    let program = build(options.debug)?;
    match &options.pack {
        Some(to) => pack(&program, to),
        None => process::run(Command::new(program).args(&options.arguments)),
    }
}

fn build(debug: bool) -> Result<PathBuf> {
    // Together with the binary: alone, its dependencies would have other features and be built once more.
    let profile = if debug { Profile::Dev } else { Profile::Release };
    process::run(&mut profile.cargo("build", ["-p", "engram-cli", "-p", PROGRAM]))?;
    Ok(profile.folder().join(PROGRAM))
}

fn pack(program: &Path, to: &Path) -> Result<()> {
    let is_archive = to.extension().is_some_and(|extension| extension == "tar");
    let folder = if is_archive { workspace::target().join("gpu-check") } else { to.to_owned() };
    fs::create_dir_all(&folder).with_context(|| format!("failed to make {}", folder.display()))?;
    fs::copy(program, folder.join(PROGRAM)).context("failed to copy the program")?;
    fs::write(folder.join("README"), README).context("failed to write the README")?;
    if is_archive {
        let mut tar = Command::new("tar");
        tar.arg("-cf").arg(to).arg("-C").arg(&folder).args([PROGRAM, "README"]);
        process::run(&mut tar)?;
    }
    println!("{} is what a GPU machine needs: {PROGRAM}, and how to run it", to.display());
    Ok(())
}
