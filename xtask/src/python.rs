//! `cargo xtask python`: builds the wheel of the Python package, and tests it as a user would install it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};

use crate::workspace::{self, Profile};
use crate::{process, tools};

/// Status of a machine that cannot build or test the package.
pub(crate) const SKIPPED: u8 = 77;
/// The build backend; its versions differ in what they write into a wheel.
const MATURIN: &str = "maturin==1.16.0";
/// What the tests need besides the wheel.
const TEST_PACKAGES: [&str; 4] = ["numpy", "pytest>=8", "pytest-timeout", "mypy>=1.15"];
/// What the tests of training need in addition; large.
const TORCH_PACKAGES: [&str; 2] = ["torch", "gymnasium"];

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Install the wheel into a fresh environment and run its tests, the type checker and the documented examples
    #[arg(long)]
    test: bool,
    /// Also run the tests and examples that need PyTorch, which is installed from the Python registry
    #[arg(long, requires = "test")]
    torch: bool,
    /// Arguments of pytest
    #[arg(last = true)]
    arguments: Vec<String>,
}

/// Builds the wheel under `target/wheels`: in the profile release, or with --test in that of the tests.
///
/// # Errors
/// A build or a test fails. A missing tool is reported, and ends with [`SKIPPED`].
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let maturin = match tools::python("python-build", "maturin", &[MATURIN]) {
        Ok(python) => python.with_file_name("maturin"),
        Err(error) => return Ok(skip("maturin", &error)),
    };
    let profile = if options.test { Profile::of_tests()? } else { Profile::Release };
    let program = build_program(profile)?;
    let wheel = build_wheel(&maturin, profile, (!options.test).then_some(program.as_path()))?;
    if !options.test {
        println!("{}", wheel.display());
        return Ok(ExitCode::SUCCESS);
    }
    let packages: Vec<&str> =
        TEST_PACKAGES.into_iter().chain(TORCH_PACKAGES.into_iter().filter(|_| options.torch)).collect();
    let (environment, module) =
        if options.torch { ("python-test-torch", "torch, gymnasium") } else { ("python-test", "pytest_timeout, mypy") };
    match tools::python(environment, module, &packages) {
        Ok(python) => test(&python, &wheel, &program, options).map(|()| ExitCode::SUCCESS),
        Err(error) => Ok(skip("the packages of the tests", &error)),
    }
}

fn skip(what: &str, error: &anyhow::Error) -> ExitCode {
    eprintln!("skipped: failed to install {what}: {error:#}");
    ExitCode::from(SKIPPED)
}

/// Builds the `engram` program and the native module in one command, so that they share their dependencies.
fn build_program(profile: Profile) -> Result<PathBuf> {
    process::run(&mut profile.cargo("build", ["-q", "--locked", "-p", "engram-cli"]))?;
    Ok(profile.folder().join("engram"))
}

/// Builds the wheel; with `program` it installs the command `engram`, too.
fn build_wheel(maturin: &Path, profile: Profile, program: Option<&Path>) -> Result<PathBuf> {
    let package = workspace::root().join("python");
    let scripts = package.join("engram.data/scripts");
    if let Some(program) = program {
        fs::create_dir_all(&scripts).with_context(|| format!("failed to create {}", scripts.display()))?;
        process::run(Command::new("strip").arg("-o").arg(scripts.join("engram")).arg(program))?;
    }
    let output = workspace::target().join("wheels");
    if output.exists() {
        fs::remove_dir_all(&output).with_context(|| format!("failed to remove {}", output.display()))?;
    }
    let name = match profile {
        Profile::Dev => "dev",
        Profile::Ci => "ci",
        Profile::Release => "release",
    };
    let mut build = workspace::command_for_cargo(maturin);
    build
        .args(["build", "--quiet", "--locked", "--strip", "--profile", name, "--out"])
        .arg(&output)
        .current_dir(&package);
    let built = process::run(build.env("CARGO_TARGET_DIR", workspace::target()));
    if program.is_some() {
        let data = package.join("engram.data");
        fs::remove_dir_all(&data).with_context(|| format!("failed to remove {}", data.display()))?;
    }
    built?;
    let mut files = fs::read_dir(&output).with_context(|| format!("failed to read {}", output.display()))?;
    let wheel = files.next().context("maturin wrote no wheel")??;
    Ok(wheel.path())
}

/// Installs the wheel and runs types, tests and documented examples.
fn test(python: &Path, wheel: &Path, program: &Path, options: &Options) -> Result<()> {
    let package = workspace::root().join("python");
    let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--force-reinstall", "--no-deps"];
    process::run(Command::new(python).args(install).arg(wheel))?;
    let cache = workspace::target().join("python-test/mypy");
    let mut types = Command::new(python);
    types.args(["-m", "mypy", "--strict", "engram", "--cache-dir"]).arg(cache).current_dir(&package);
    process::run(&mut types)?;
    // Imported from the installed wheel: the working directory has no package.
    let tests = package.join("tests");
    let mut pytest = Command::new(python);
    pytest.args(["-m", "pytest", "-p", "no:cacheprovider", "-c"]).arg(package.join("pyproject.toml"));
    pytest.args(["--rootdir"]).arg(&package).arg(&tests).args(["--doctest-modules", "--pyargs", "engram"]);
    if !options.torch {
        pytest.args(["-m", "not torch"]);
    }
    pytest.args(&options.arguments).current_dir(&tests).env("ENGRAM_BIN", program);
    process::run(&mut pytest)?;
    ensure!(program.is_file(), "{} is missing", program.display());
    Ok(())
}
