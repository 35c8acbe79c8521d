//! `cargo xtask kubernetes`: tests on a real cluster in namespaces of this machine (package engram-kubernetes-tests).
//!
//! The program `engram-test-cluster` does the work; this command builds it and passes the arguments on. On a machine that cannot run it, it exits
//! with the program's status for "skipped" (77), which CI distinguishes from a failure.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::process;
use crate::workspace::{self, Profile};

const PROGRAMS: [&str; 4] = ["engram-test-cluster", "engram-operator", "engram-worker", "engram"];
/// Directory of the tests' programs.
const PACKAGES: [&str; 4] = ["engram-kubernetes-tests", "engram-operator", "engram-worker", "engram-cli"];

#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Options {
    /// Build in release, as users do: slower to build, but measurements count. Implied for the fault campaign
    #[arg(long)]
    release: bool,
    /// Also build the worker of an earlier commit, for suite `versions`: workers are downgraded and upgraded under load
    #[arg(long, value_name = "REVISION")]
    earlier: Option<String>,
    /// up | down | kubectl ... | load-image ARCHIVE | run [SUITE]; without arguments, all suites run on a new cluster
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Runs the program and returns its status.
///
/// # Errors
/// When it cannot be built or started.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let release = options.release || options.earlier.is_some() || options.arguments.iter().any(|it| it == "--campaign");
    let program = build(release)?.join(PROGRAMS[0]);
    let mut arguments = options.arguments.clone();
    if let Some(revision) = &options.earlier {
        build_earlier(revision, &program.with_file_name("engram-worker-earlier"))?;
        if arguments.is_empty() {
            arguments = ["run", "versions"].map(str::to_owned).into();
        }
    }
    let status = Command::new(&program)
        .args(&arguments)
        .status()
        .with_context(|| format!("failed to start {}", program.display()))?;
    Ok(ExitCode::from(status.code().and_then(|it| u8::try_from(it).ok()).unwrap_or(1)))
}

/// Builds the program, and operator, worker and CLI next to it, where it expects them; returns that folder.
pub(crate) fn build(release: bool) -> Result<PathBuf> {
    // With the same selection as `cargo build --release` and `cargo xtask test`, plus a test: other features would rebuild dependencies.
    let (profile, mut build) = if release {
        (Profile::Release, release_build())
    } else {
        let profile = Profile::of_tests()?;
        (profile, profile.cargo("build", ["-q", "--workspace", "--test", "worker"]))
    };
    process::run(build.args(PROGRAMS.iter().flat_map(|name| ["--bin", name])))?;
    Ok(profile.folder())
}

/// Builds operator and worker as users do, and returns their folder.
pub(crate) fn build_images() -> Result<PathBuf> {
    process::run(release_build().args(["--locked", "--bin", "engram-operator", "--bin", "engram-worker"]))?;
    Ok(Profile::Release.folder())
}

/// Returns the command for programs in release. All packages are selected, so that dependencies have the same features whichever is built.
fn release_build() -> Command {
    Profile::Release.cargo("build", ["-q"].into_iter().chain(PACKAGES.iter().flat_map(|name| ["-p", name])))
}

/// Builds the worker of another commit, in separate folders that are kept for the next time.
fn build_earlier(revision: &str, program: &Path) -> Result<()> {
    let folder = workspace::target().join("earlier");
    let (source, target) = (folder.join("source"), folder.join("target"));
    // A separate clone, since a worktree would be registered in this repository.
    if source.exists() {
        fs::remove_dir_all(&source).with_context(|| format!("failed to remove {}", source.display()))?;
    }
    let clone = ["clone", "--quiet", "--shared", "--no-checkout"];
    process::run(Command::new("git").args(clone).arg(workspace::root()).arg(&source))?;
    process::run(Command::new("git").arg("-C").arg(&source).args(["checkout", "--quiet", "--detach", revision]))?;
    let mut build =
        Profile::Release.cargo("build", ["-q", "--locked", "-p", "engram-worker", "--bin", "engram-worker"]);
    process::run(build.current_dir(&source).env("CARGO_TARGET_DIR", &target))?;
    let built = target.join("release/engram-worker");
    fs::copy(&built, program).with_context(|| format!("failed to copy {}", built.display()))?;
    Ok(())
}
