//! `cargo xtask kernels`: compiles the CUDA kernels to fatbins, which are committed, so that a build needs no CUDA toolkit.
//!
//! `--check` runs the kernels on the CPU under every sanitizer, with every injected bug and through ten million updates, rebuilds the fatbins and
//! compares them byte by byte. In both modes, kernels must not spill and must stay within the register budget in `kernels/registers.toml`.

mod fatbin;
mod nvcc;
mod report;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::process;
use crate::workspace::{self, Profile};

/// Real architectures; devices that none of them fits use PTX of the virtual one.
const ARCHITECTURES: [u32; 6] = [80, 86, 89, 90, 100, 120];
const VIRTUAL: u32 = 90;
/// Kernel tests on the CPU that a plain test run skips, and the hash test.
const TESTS: [&str; 3] = ["manifest", "injected_bugs", "history"];
const BUDGET: &str = "registers.toml";
const MANIFEST: &str = "manifest.toml";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Write nothing: run the kernels on the CPU (needs g++), and fail if a fatbin differs from what nvcc builds from the sources
    #[arg(long)]
    check: bool,
}

/// Builds or checks the fatbins.
///
/// # Errors
/// When a test or a comparison fails, a kernel spills or exceeds its budget, or (without `--check`) nvcc is missing.
pub(crate) fn run(options: &Options) -> Result<()> {
    if !options.check {
        return write(&build(&nvcc::find()?)?);
    }
    // Selected from the whole workspace, so that dependencies have the same features as in other tests.
    let mut cargo = Profile::of_tests()?.cargo("test", ["--workspace"]);
    cargo.args(TESTS.iter().flat_map(|test| ["--test", test]));
    process::run(cargo.args(["--", "--include-ignored"]))?;
    match nvcc::find() {
        Ok(nvcc) => compare(&build(&nvcc)?),
        Err(error) => {
            println!("skipped: rebuilding the fatbins, only their hashes were compared: {error:#}");
            Ok(())
        }
    }
}

/// Output of nvcc.
struct KernelBuild {
    flags: Vec<String>,
    /// By source name without extension.
    fatbins: BTreeMap<String, PathBuf>,
}

fn folder() -> PathBuf {
    workspace::root().join("kernels")
}

/// Folder of the `.cu` files; headers are in its folder `include`.
fn sources_folder() -> PathBuf {
    folder().join("cuda")
}

/// Returns the nvcc flags. Fatbins record ptxas options, so writing and checking use the same ones.
fn flags() -> Vec<String> {
    let mut flags = ["-std=c++17", "-O3", "-fmad=false", "-fatbin", "-Xptxas", "-v"].map(str::to_owned).to_vec();
    let mut generate = |code: String| flags.extend(["-gencode".to_owned(), format!("arch=compute_{code}")]);
    generate(format!("{VIRTUAL},code=compute_{VIRTUAL}"));
    ARCHITECTURES.iter().for_each(|architecture| generate(format!("{architecture},code=sm_{architecture}")));
    flags
}

/// Returns the `.cu` files, by name without extension.
fn sources() -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(sources_folder()).context("failed to read kernels/cuda")? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "cu") {
            names.extend(path.file_stem().map(|name| name.to_string_lossy().into_owned()));
        }
    }
    names.sort();
    Ok(names)
}

fn build(nvcc: &Path) -> Result<KernelBuild> {
    let out = workspace::target().join("kernels");
    fs::create_dir_all(&out).with_context(|| format!("failed to create {}", out.display()))?;
    let (flags, mut fatbins, mut reported) = (flags(), BTreeMap::new(), Vec::new());
    for name in sources()? {
        let fatbin = out.join(format!("{name}.fatbin"));
        // A relative path from inside the folder, so that the output is the same everywhere.
        let mut command = Command::new(nvcc);
        command
            .current_dir(sources_folder())
            .args(&flags)
            .args(["-I", "include"])
            .arg(format!("{name}.cu"))
            .arg("-o")
            .arg(&fatbin);
        let output = command.output().context("failed to start nvcc")?;
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "nvcc failed on {name}.cu:\n{stderr}");
        reported
            .extend(report::parse(&stderr).with_context(|| format!("failed to parse the ptxas report of {name}.cu"))?);
        fatbins.insert(name, fatbin);
    }
    let budget = fs::read_to_string(folder().join(BUDGET)).context("failed to read the register budget")?;
    let budget = report::budget(&budget)?;
    print!("{}", report::table(&reported, &budget));
    report::check(&reported, &budget, ARCHITECTURES.len())?;
    Ok(KernelBuild { flags, fatbins })
}

fn write(built: &KernelBuild) -> Result<()> {
    let committed = folder().join("fatbins");
    fs::create_dir_all(&committed)?;
    for entry in fs::read_dir(&committed)? {
        fs::remove_file(entry?.path())?;
    }
    for (name, fatbin) in &built.fatbins {
        fs::copy(fatbin, committed.join(format!("{name}.fatbin"))).context("failed to write a fatbin")?;
    }
    fs::write(folder().join(MANIFEST), manifest(built)?).context("failed to write the manifest")?;
    println!("wrote {} fatbins and {MANIFEST}", built.fatbins.len());
    Ok(())
}

fn compare(built: &KernelBuild) -> Result<()> {
    let mut errors = Vec::new();
    for (name, fatbin) in &built.fatbins {
        let committed = folder().join("fatbins").join(format!("{name}.fatbin"));
        let committed = fs::read(&committed).with_context(|| format!("failed to read {}", committed.display()))?;
        let fresh = fs::read(fatbin)?;
        if committed != fresh {
            errors.push(format!("{name}.fatbin differs in {}", fatbin::differences(&committed, &fresh).join(", ")));
        }
    }
    let committed = fs::read_to_string(folder().join(MANIFEST)).context("failed to read the manifest")?;
    if committed != manifest(built)? {
        errors.push(format!("{MANIFEST} is stale"));
    }
    ensure!(errors.is_empty(), "{}; run `cargo xtask kernels` to rebuild them", errors.join("; "));
    println!("{} fatbins match nvcc {} output byte for byte", built.fatbins.len(), nvcc::VERSION);
    Ok(())
}

/// Returns the manifest: compiler, flags, and the hashes of every fatbin and its sources. `kernels/tests/manifest.rs` reads it.
fn manifest(built: &KernelBuild) -> Result<String> {
    let mut text = String::from("# Written by `cargo xtask kernels`; do not edit.\n");
    writeln!(text, "compiler = \"nvcc {}\"", nvcc::VERSION)?;
    writeln!(text, "flags = \"{}\"", built.flags.join(" "))?;
    for (name, fatbin) in &built.fatbins {
        writeln!(text, "\n[{name}]\n\"{name}.fatbin\" = \"{}\"", sha256(fatbin)?)?;
        for source in with_includes(&format!("{name}.cu"))? {
            writeln!(text, "\"{source}\" = \"{}\"", sha256(&source_path(&source))?)?;
        }
    }
    Ok(text)
}

/// Returns a source and all headers that it includes, transitively.
fn with_includes(source: &str) -> Result<BTreeSet<String>> {
    let (mut sources, mut open) = (BTreeSet::new(), vec![source.to_owned()]);
    while let Some(next) = open.pop() {
        let path = source_path(&next);
        let text = fs::read_to_string(&path).with_context(|| format!("failed to read {}", path.display()))?;
        let included = text.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"'));
        open.extend(included.filter(|included| !sources.contains(*included)).map(str::to_owned));
        sources.insert(next);
    }
    Ok(sources)
}

/// Returns the path of a source or header.
fn source_path(name: &str) -> PathBuf {
    sources_folder().join(if name.ends_with(".cuh") { "include" } else { "" }).join(name)
}

fn sha256(path: &Path) -> Result<String> {
    let output = Command::new("sha256sum").arg(path).output().context("failed to start sha256sum")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let hash = text.split_whitespace().next().map(|hash| hash.trim_start_matches('\\').to_owned());
    hash.with_context(|| format!("sha256sum printed no hash for {}", path.display()))
}
