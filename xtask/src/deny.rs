//! `cargo xtask deny`: licences, bans, sources and advisories, with cargo-deny and `deny.toml`.
//!
//! Advisories need a database on a public git server. If it is unreachable, all other checks run, and the advisories are reported as skipped.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::{process, tools, workspace};

/// The advisory database for Rust crates, as cargo-deny fetches it.
const ADVISORY_DATABASE: &str = "https://github.com/RustSec/advisory-db";

/// Timeout of the advisory database.
const REACH: Duration = Duration::from_secs(20);

/// Runs the checks.
///
/// # Errors
/// When a check failed, or cargo-deny is not available.
pub(crate) fn run() -> Result<()> {
    let program = tools::cargo_deny()?;
    process::run(&mut cargo_deny(&program, &["licenses", "bans", "sources"]))?;
    match unreachable_reason() {
        None => process::run(&mut cargo_deny(&program, &["advisories"])),
        Some(reason) => {
            eprintln!("skipped: advisories: {ADVISORY_DATABASE} cannot be reached: {reason}");
            Ok(())
        }
    }
}

fn cargo_deny(program: &PathBuf, checks: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.current_dir(workspace::root()).args(["--workspace", "check", "--hide-inclusion-graph"]).args(checks);
    command
}

/// Returns why the advisory database is unreachable, or `None`.
fn unreachable_reason() -> Option<String> {
    let mut probe = Command::new("git");
    // No prompt: a proxy that requires a password counts as unreachable.
    probe.args(["ls-remote", "--quiet", ADVISORY_DATABASE, "HEAD"]).env("GIT_TERMINAL_PROMPT", "0");
    match process::capture_within(&mut probe, REACH) {
        Ok(output) if output.status.success() => None,
        Ok(output) => {
            let stderr = String::from_utf8_lossy(&output.stderr);
            Some(stderr.lines().last().unwrap_or("git gave no reason").trim().to_owned())
        }
        Err(error) => Some(format!("{error:#}")),
    }
}
