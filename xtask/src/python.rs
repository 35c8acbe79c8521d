//! `cargo xtask python`: builds the wheel of the Python package, and tests it as a user would install it.

mod environment;
mod hidden;
mod suite;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};

use crate::workspace::{self, Profile};
use crate::{process, tools};
use environment::Environment;
use hidden::Hidden;
use suite::Suite;

/// Status of a machine that cannot build or test the package.
pub(crate) const SKIPPED: u8 = 77;
/// The build backend; its versions differ in what they write into a wheel.
const MATURIN: &str = "maturin==1.16.0";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Install the wheel into a new environment and run its tests, the type checker and the documented examples
    #[arg(long)]
    test: bool,
    /// Test the release wheel, with the engram command that is in it
    #[arg(long)]
    release: bool,
    /// Also run the tests and examples that need PyTorch, which is installed from the Python registry
    #[arg(long, requires = "test")]
    torch: bool,
    /// Also run the example that needs PyTorch, in an environment of its own
    #[arg(long, requires = "test", conflicts_with_all = ["torch", "integrations"])]
    torch_examples: bool,
    /// As --torch, and also run the tests with TransferQueue and TorchRL, and TransferQueue's own tests of a storage backend and performance
    /// script
    #[arg(long, requires = "test")]
    integrations: bool,
    /// Only create the environment of --torch-examples, for the next run with that option: PyTorch takes minutes to download
    #[arg(long, conflicts_with_all = ["test", "release"])]
    prepare: bool,
    /// Use the environments of the last run instead of new ones: what they have may hide what a package lacks
    #[arg(long, requires = "test")]
    reuse: bool,
    /// Arguments of pytest
    #[arg(last = true)]
    arguments: Vec<String>,
}

/// Builds the wheel under `target/wheels`: in the profile release, or with --test in the profile dev where the tests have it.
///
/// # Errors
/// A build or a test fails. A missing tool is reported, and ends with [`SKIPPED`].
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    if options.prepare {
        let suite = Suite::torch_examples();
        return Ok(match Environment::prepare(suite.environment, &suite.packages) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => skip("the packages of the examples", &error),
        });
    }
    let maturin = match tools::python("python-build", "maturin", &[MATURIN]) {
        Ok(python) => python.with_file_name("maturin"),
        Err(error) => return Ok(skip("maturin", &error)),
    };
    // maturin calls `cargo rustc`, which takes `--profile bench` for an order to build a test program: there is no wheel in that profile.
    let is_release = options.release || !options.test || Profile::of_tests()? != Profile::Dev;
    let profile = if is_release { Profile::Release } else { Profile::Dev };
    let program = build_program(profile)?;
    let wheel = build_wheel(&maturin, is_release.then_some(program.as_path()))?;
    if !options.test {
        println!("{}", wheel.display());
        return Ok(ExitCode::SUCCESS);
    }
    let program = (!is_release).then_some(program.as_path());
    for suite in Suite::of(options) {
        let environment = match Environment::new(suite.environment, &suite.packages, options.reuse) {
            Ok(environment) => environment,
            Err(error) => return Ok(skip("the packages of the examples", &error)),
        };
        environment.install_wheel(&wheel)?;
        run_examples(&environment.python(), program, &suite.examples)?;
        if !suite.test_packages.is_empty() {
            if let Err(error) = environment.install(&suite.test_packages) {
                return Ok(skip("the packages of the tests", &error));
            }
            test(&environment.python(), program, &suite, &options.arguments)?;
        }
        if suite.temporary {
            environment.remove()?;
        }
    }
    ensure!(program.is_none_or(Path::is_file), "the engram program is missing after the tests");
    Ok(ExitCode::SUCCESS)
}

/// Builds the release wheel with the `engram` command in it, and installs it into an environment.
///
/// # Errors
/// A tool cannot be installed, or the build fails.
pub(crate) fn install_release(python: &Path) -> Result<()> {
    let maturin = tools::python("python-build", "maturin", &[MATURIN])?.with_file_name("maturin");
    let program = build_program(Profile::Release)?;
    environment::install_again(python, &build_wheel(&maturin, Some(&program))?)
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

/// Builds the release wheel that installs `program` as the command `engram`, or without it a wheel in the profile dev.
fn build_wheel(maturin: &Path, program: Option<&Path>) -> Result<PathBuf> {
    let package = workspace::root().join("python");
    let scripts = package.join("engram.data/scripts");
    fs::create_dir_all(&scripts).with_context(|| format!("failed to create {}", scripts.display()))?;
    if let Some(program) = program {
        process::run(Command::new("strip").arg("-o").arg(scripts.join("engram")).arg(program))?;
    }
    let output = workspace::target().join("wheels");
    if output.exists() {
        fs::remove_dir_all(&output).with_context(|| format!("failed to remove {}", output.display()))?;
    }
    let profile = if program.is_some() { "release" } else { "dev" };
    let mut build = workspace::command_for_cargo(maturin);
    build
        .args(["build", "--quiet", "--locked", "--strip", "--profile", profile, "--out"])
        .arg(&output)
        .current_dir(&package);
    let built = process::run(build.env("CARGO_TARGET_DIR", workspace::target()));
    let data = package.join("engram.data");
    fs::remove_dir_all(&data).with_context(|| format!("failed to remove {}", data.display()))?;
    built?;
    let mut files = fs::read_dir(&output).with_context(|| format!("failed to read {}", output.display()))?;
    let wheel = files.next().context("maturin wrote no wheel")??;
    Ok(wheel.path())
}

/// Returns a command that uses `program` as `engram`; `None` is the one of the wheel.
fn python_with(python: &Path, program: Option<&Path>) -> Command {
    let mut command = Command::new(python);
    match program {
        Some(program) => command.env("ENGRAM_BIN", program),
        None => command.env_remove("ENGRAM_BIN"),
    };
    command
}

/// Runs types, tests and documented examples.
fn test(python: &Path, program: Option<&Path>, suite: &Suite, arguments: &[String]) -> Result<()> {
    let package = workspace::root().join("python");
    let cache = workspace::target().join("python-test/mypy");
    let mut types = Command::new(python);
    types.args(["-m", "mypy", "--strict", "engram", "--cache-dir"]).arg(cache).current_dir(&package);
    process::run(&mut types)?;
    // Imported from the installed wheel: the working directory has no package.
    let tests = package.join("tests");
    let mut pytest = python_with(python, program);
    pytest.args(["-m", "pytest", "-p", "no:cacheprovider", "-c"]).arg(package.join("pyproject.toml"));
    pytest.args(["--rootdir"]).arg(&package).arg(&tests).args(["--doctest-modules", "--pyargs", "engram"]);
    pytest.args(["--ignore"]).arg(tests.join("upstream"));
    if !suite.without.is_empty() {
        pytest.args(["-m", &format!("not {}", suite.without.join(" and not "))]);
    }
    pytest.args(arguments).current_dir(&tests);
    process::run(&mut pytest)?;
    if suite.upstream { run_upstream(python, program, &tests) } else { Ok(()) }
}

/// Runs example programs in an empty folder, where the repository is not visible.
fn run_examples(python: &Path, program: Option<&Path>, examples: &[&str]) -> Result<()> {
    let hidden = Hidden::new()?;
    if hidden.is_none() {
        eprintln!("skipped: examples without the repository: this user can't have a mount namespace");
    }
    let folder = workspace::target().join("python-test/examples");
    fs::create_dir_all(&folder).with_context(|| format!("failed to create {}", folder.display()))?;
    for example in examples {
        let path = workspace::root().join("examples/python").join(example);
        let result = match &hidden {
            Some(hidden) => hidden.run(python, program, &path),
            None => process::run(python_with(python, program).arg(path).current_dir(&folder)),
        };
        result.with_context(|| format!("example {example}"))?;
    }
    Ok(())
}

/// Runs TransferQueue's own tests of a storage backend and its performance script, which are in its wheel, on the backend of this package.
fn run_upstream(python: &Path, program: Option<&Path>, tests: &Path) -> Result<()> {
    let output =
        Command::new(python).args(["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).output()?;
    let packages = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    let upstream = packages.join("tests/e2e");
    let mut pytest = python_with(python, program);
    pytest.args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "transfer_queue_engram"]);
    pytest.arg(upstream.join("test_kv_interface_e2e.py")).arg(upstream.join("test_e2e_lifecycle_consistency.py"));
    pytest.env("TQ_TEST_BACKEND", "Engram").env("PYTHONPATH", tests.join("upstream"));
    process::run(&mut pytest)?;
    let mut performance = python_with(python, program);
    performance.arg(tests.join("upstream/performance.py"));
    performance.arg(packages.join("scripts/performance_test/perftest.py"));
    process::run(performance.current_dir(workspace::target()))
}
