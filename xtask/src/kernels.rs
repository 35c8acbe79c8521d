//! `cargo xtask kernels`: the CUDA kernels as fatbins, which are committed, so that a build needs no toolkit.
//!
//! `--check` runs the kernels on the CPU under every sanitizer, with every planted defect and through ten million updates, builds the fatbins
//! again and compares them byte by byte. Either way nothing may spill, and no kernel may use more registers than `kernels/registers.toml` says.

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

/// Real architectures; the virtual one is the way forward to devices that none of them fits.
const ARCHITECTURES: [u32; 6] = [80, 86, 89, 90, 100, 120];
const VIRTUAL: u32 = 90;
/// The tests of the kernels on the CPU that an ordinary run of the tests leaves out, and that of the hashes.
const TESTS: [&str; 3] = ["manifest", "planted", "history"];
const BUDGET: &str = "registers.toml";
const MANIFEST: &str = "manifest.toml";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Writes nothing: runs the kernels on the CPU (needs g++), and fails when a fatbin is not what nvcc makes of the sources
    #[arg(long)]
    check: bool,
}

/// Builds or checks the fatbins.
///
/// # Errors
/// When a test or a comparison fails, a kernel spills or is over its budget, or (without `--check`) there is no nvcc.
pub(crate) fn run(options: &Options) -> Result<()> {
    if !options.check {
        return write(&build(&nvcc::find()?)?);
    }
    // Selected from the whole workspace: what they depend on then has the features that it has in every other test.
    let mut cargo = Profile::of_tests()?.cargo("test", ["--workspace"]);
    cargo.args(TESTS.iter().flat_map(|test| ["--test", test]));
    process::run(cargo.args(["--", "--include-ignored"]))?;
    match nvcc::find() {
        Ok(nvcc) => compare(&build(&nvcc)?),
        Err(error) => {
            println!("SKIPPED: the fatbins were not built again, their hashes alone were compared: {error:#}");
            Ok(())
        }
    }
}

/// What nvcc made.
struct Built {
    flags: Vec<String>,
    /// By the name of the source, without its extension.
    fatbins: BTreeMap<String, PathBuf>,
}

fn folder() -> PathBuf {
    workspace::root().join("kernels")
}

/// One set of flags for writing and checking: ptxas notes its options in what it makes.
fn flags() -> Vec<String> {
    let mut flags = ["-std=c++17", "-O3", "-fmad=false", "-fatbin", "-Xptxas", "-v"].map(str::to_owned).to_vec();
    let mut generate = |code: String| flags.extend(["-gencode".to_owned(), format!("arch=compute_{code}")]);
    generate(format!("{VIRTUAL},code=compute_{VIRTUAL}"));
    ARCHITECTURES.iter().for_each(|architecture| generate(format!("{architecture},code=sm_{architecture}")));
    flags
}

/// The `.cu` files, by name without extension.
fn sources() -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder()).context("failed to read kernels/")? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "cu") {
            names.extend(path.file_stem().map(|name| name.to_string_lossy().into_owned()));
        }
    }
    names.sort();
    Ok(names)
}

fn build(nvcc: &Path) -> Result<Built> {
    let out = workspace::target().join("kernels");
    fs::create_dir_all(&out).with_context(|| format!("failed to make {}", out.display()))?;
    let (flags, mut fatbins, mut reported) = (flags(), BTreeMap::new(), Vec::new());
    for name in sources()? {
        let fatbin = out.join(format!("{name}.fatbin"));
        // By its name from inside the folder, for the same bytes everywhere.
        let mut command = Command::new(nvcc);
        command.current_dir(folder()).args(&flags).arg(format!("{name}.cu")).arg("-o").arg(&fatbin);
        let output = command.output().context("failed to start nvcc")?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "nvcc refused {name}.cu:\n{said}");
        reported.extend(report::parse(&said).with_context(|| format!("failed to read what ptxas says of {name}.cu"))?);
        fatbins.insert(name, fatbin);
    }
    let budget = fs::read_to_string(folder().join(BUDGET)).context("failed to read the budget of registers")?;
    let budget = report::budget(&budget)?;
    print!("{}", report::table(&reported, &budget));
    report::check(&reported, &budget, ARCHITECTURES.len())?;
    Ok(Built { flags, fatbins })
}

fn write(built: &Built) -> Result<()> {
    let committed = folder().join("fatbins");
    fs::create_dir_all(&committed)?;
    for entry in fs::read_dir(&committed)? {
        fs::remove_file(entry?.path())?;
    }
    for (name, fatbin) in &built.fatbins {
        fs::copy(fatbin, committed.join(format!("{name}.fatbin"))).context("failed to write a fatbin")?;
    }
    fs::write(folder().join(MANIFEST), manifest(built)?).context("failed to write the manifest")?;
    println!("{} fatbins and {MANIFEST} are written", built.fatbins.len());
    Ok(())
}

fn compare(built: &Built) -> Result<()> {
    let mut wrong = Vec::new();
    for (name, fatbin) in &built.fatbins {
        let committed = folder().join("fatbins").join(format!("{name}.fatbin"));
        let committed = fs::read(&committed).with_context(|| format!("failed to read {}", committed.display()))?;
        let fresh = fs::read(fatbin)?;
        if committed != fresh {
            wrong.push(format!("{name}.fatbin differs in {}", fatbin::differences(&committed, &fresh).join(", ")));
        }
    }
    let committed = fs::read_to_string(folder().join(MANIFEST)).context("failed to read the manifest")?;
    if committed != manifest(built)? {
        wrong.push(format!("{MANIFEST} is not what it would be"));
    }
    ensure!(wrong.is_empty(), "{}; `cargo xtask kernels` writes them anew", wrong.join("; "));
    println!("{} fatbins are what nvcc {} makes of their sources, byte for byte", built.fatbins.len(), nvcc::VERSION);
    Ok(())
}

/// Compiler, flags, and for every fatbin its hash and those of all that it is made of. `kernels/tests/manifest.rs` reads it.
fn manifest(built: &Built) -> Result<String> {
    let mut text = String::from("# Written by `cargo xtask kernels`; do not edit.\n");
    writeln!(text, "compiler = \"nvcc {}\"", nvcc::VERSION)?;
    writeln!(text, "flags = \"{}\"", built.flags.join(" "))?;
    for (name, fatbin) in &built.fatbins {
        writeln!(text, "\n[{name}]\n\"{name}.fatbin\" = \"{}\"", sha256(fatbin)?)?;
        for source in with_includes(&format!("{name}.cu"))? {
            writeln!(text, "\"{source}\" = \"{}\"", sha256(&folder().join(&source))?)?;
        }
    }
    Ok(text)
}

/// A source and the headers that it includes, and they.
fn with_includes(source: &str) -> Result<BTreeSet<String>> {
    let (mut found, mut open) = (BTreeSet::new(), vec![source.to_owned()]);
    while let Some(next) = open.pop() {
        let text =
            fs::read_to_string(folder().join(&next)).with_context(|| format!("failed to read kernels/{next}"))?;
        let included = text.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"'));
        open.extend(included.filter(|included| !found.contains(*included)).map(str::to_owned));
        found.insert(next);
    }
    Ok(found)
}

fn sha256(path: &Path) -> Result<String> {
    let output = Command::new("sha256sum").arg(path).output().context("failed to start sha256sum")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let hash = text.split_whitespace().next().map(|hash| hash.trim_start_matches('\\').to_owned());
    hash.with_context(|| format!("sha256sum said nothing of {}", path.display()))
}
