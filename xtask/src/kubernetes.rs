//! `cargo xtask kubernetes`: the tests on a real cluster in namespaces of this machine (package engram-kubernetes-tests).
//!
//! All of it is the program `engram-test-cluster`; this command builds it and hands the arguments on. A machine that cannot run
//! it says why, and ends with the program's status for "skipped" (77), which `.ci/run` tells apart from a failure.

use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::{process, workspace};

const PROGRAMS: [&str; 4] = ["engram-test-cluster", "engram-operator", "engram-worker", "engram"];
/// Where they are.
const PACKAGES: [&str; 4] = ["engram-kubernetes-tests", "engram-operator", "engram-worker", "engram-cli"];

#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Options {
    /// Build what runs as users run it: slower to build, and what is measured counts. The campaign always does
    #[arg(long)]
    release: bool,
    /// up | down | kubectl ... | load-image ARCHIVE | run [SUITE]; without any, all suites run on a cluster of their own
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Runs the program and returns its status.
///
/// # Errors
/// When it cannot be built or started.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let release = options.release || options.arguments.iter().any(|it| it == "--campaign");
    build(release)?;
    let program = workspace::target().join(if release { "release" } else { "debug" }).join(PROGRAMS[0]);
    let status = std::process::Command::new(&program)
        .args(&options.arguments)
        .status()
        .with_context(|| format!("failed to start {}", program.display()))?;
    Ok(ExitCode::from(status.code().and_then(|it| u8::try_from(it).ok()).unwrap_or(1)))
}

/// Builds the program, and operator, worker and command beside it, where it looks for them.
pub(crate) fn build(release: bool) -> Result<()> {
    // Selected as `cargo build --release` selects them, and `cargo xtask test`, together with a test: with other features their
    // dependencies would be built once more.
    let mut build = if release {
        workspace::cargo(["build", "-q", "--release"].into_iter().chain(PACKAGES.iter().flat_map(|name| ["-p", name])))
    } else {
        workspace::cargo(["build", "-q", "--workspace", "--test", "worker"])
    };
    process::run(build.args(PROGRAMS.iter().flat_map(|name| ["--bin", name])))
}
