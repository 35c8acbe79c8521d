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
const TEST_PACKAGES: [&str; 5] = ["numpy", "pytest>=8", "pytest-timeout", "mypy>=1.15", "langgraph-checkpoint>=4"];
/// What the tests of training need in addition; large.
const TORCH_PACKAGES: [&str; 3] = ["torch", "gymnasium", "optuna"];
/// What the tests of all integrations need in addition. The version of TransferQueue is the one that was read: the backend uses some of its private
/// names.
const INTEGRATION_PACKAGES: [&str; 5] =
    ["TransferQueue==0.1.11", "torchrl", "tensordict", "opentelemetry-sdk", "grafana-foundation-sdk"];
/// Tests that need the packages above.
const TORCH_MARKERS: [&str; 1] = ["torch"];
const INTEGRATION_MARKERS: [&str; 4] = ["transferqueue", "torchrl", "opentelemetry", "grafana"];
/// Examples that need no other packages, and those that need more or take longer.
const EXAMPLES: [&str; 3] = ["quickstart.py", "actor_learner.py", "reverb_migration.py"];
const TORCH_EXAMPLES: [&str; 4] = ["dqn_cartpole.py", "search_loop.py", "tune_optuna.py", "federated.py"];

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Install the wheel into a fresh environment and run its tests, the type checker and the documented examples
    #[arg(long)]
    test: bool,
    /// Test the release wheel, with the engram command that is in it
    #[arg(long)]
    release: bool,
    /// Also run the tests and examples that need PyTorch, which is installed from the Python registry
    #[arg(long, requires = "test")]
    torch: bool,
    /// As --torch, and also run the tests with TransferQueue and TorchRL, and TransferQueue's own tests of a storage backend
    #[arg(long, requires = "test")]
    integrations: bool,
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
    let is_release = options.release || !options.test;
    let profile = if is_release { Profile::Release } else { Profile::of_tests()? };
    let program = build_program(profile)?;
    let wheel = build_wheel(&maturin, profile, is_release.then_some(program.as_path()))?;
    if !options.test {
        println!("{}", wheel.display());
        return Ok(ExitCode::SUCCESS);
    }
    let suite = Suite::of(options);
    match tools::python(suite.environment, suite.module, &suite.packages) {
        Ok(python) => test(&python, &wheel, (!is_release).then_some(program.as_path()), (&suite, &options.arguments))
            .map(|()| ExitCode::SUCCESS),
        Err(error) => Ok(skip("the packages of the tests", &error)),
    }
}

/// Builds the release wheel with the `engram` command in it, and installs it into an environment.
///
/// # Errors
/// A tool cannot be installed, or the build fails.
pub(crate) fn install_release(python: &Path) -> Result<()> {
    let maturin = tools::python("python-build", "maturin", &[MATURIN])?.with_file_name("maturin");
    let program = build_program(Profile::Release)?;
    install(python, &build_wheel(&maturin, Profile::Release, Some(&program))?)
}

fn install(python: &Path, wheel: &Path) -> Result<()> {
    let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--force-reinstall", "--no-deps"];
    process::run(Command::new(python).args(install).arg(wheel))
}

/// What is installed and run.
struct Suite {
    environment: &'static str,
    /// Modules that are there once the packages are installed.
    module: &'static str,
    packages: Vec<&'static str>,
    /// Tests that are left out: their packages are not installed.
    without: Vec<&'static str>,
    examples: Vec<&'static str>,
    /// Whether TransferQueue's own tests run.
    upstream: bool,
}

impl Suite {
    fn of(options: &Options) -> Self {
        let mut suite = Self {
            environment: "python-test",
            module: "pytest_timeout, mypy, langgraph.store.base",
            packages: TEST_PACKAGES.to_vec(),
            without: [&TORCH_MARKERS[..], &INTEGRATION_MARKERS].concat(),
            examples: EXAMPLES.to_vec(),
            upstream: options.integrations,
        };
        if options.torch || options.integrations {
            suite.packages.extend(TORCH_PACKAGES);
            suite.examples.extend(TORCH_EXAMPLES);
            (suite.environment, suite.module) = ("python-test-torch", "torch, gymnasium, optuna");
            suite.without = INTEGRATION_MARKERS.to_vec();
        }
        if options.integrations {
            suite.packages.extend(INTEGRATION_PACKAGES);
            (suite.environment, suite.module) =
                ("python-test-integrations", "torchrl, transfer_queue, gymnasium, optuna");
            suite.without.clear();
        }
        suite
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
    fs::create_dir_all(&scripts).with_context(|| format!("failed to create {}", scripts.display()))?;
    if let Some(program) = program {
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

/// Installs the wheel and runs types, tests, documented examples and example programs.
fn test(python: &Path, wheel: &Path, program: Option<&Path>, (suite, arguments): (&Suite, &[String])) -> Result<()> {
    let package = workspace::root().join("python");
    install(python, wheel)?;
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
    run_examples(python, program, &suite.examples)?;
    if suite.upstream {
        run_upstream(python, program, &tests)?;
    }
    ensure!(program.is_none_or(Path::is_file), "the engram program is missing after the tests");
    Ok(())
}

/// Runs example programs in an empty folder.
fn run_examples(python: &Path, program: Option<&Path>, examples: &[&str]) -> Result<()> {
    let folder = workspace::target().join("python-test/examples");
    fs::create_dir_all(&folder).with_context(|| format!("failed to create {}", folder.display()))?;
    for example in examples {
        let path = workspace::root().join("examples/python").join(example);
        process::run(python_with(python, program).arg(path).current_dir(&folder))
            .with_context(|| format!("example {example}"))?;
    }
    Ok(())
}

/// Runs TransferQueue's own tests of a storage backend, which are in its wheel, on the backend of this package.
fn run_upstream(python: &Path, program: Option<&Path>, tests: &Path) -> Result<()> {
    let output =
        Command::new(python).args(["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).output()?;
    let packages = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    let upstream = packages.join("tests/e2e");
    let mut pytest = python_with(python, program);
    pytest.args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "transfer_queue_engram"]);
    pytest.arg(upstream.join("test_kv_interface_e2e.py")).arg(upstream.join("test_e2e_lifecycle_consistency.py"));
    pytest.env("TQ_TEST_BACKEND", "Engram").env("PYTHONPATH", tests.join("upstream"));
    process::run(&mut pytest)
}
