//! `cargo xtask deny`: licences, bans, sources and advisories, by cargo-deny and `deny.toml`.
//!
//! Advisories need a database that lives on a public git server. A machine that cannot reach it still checks everything
//! else, and says in plain words that advisories were skipped.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::{process, tools, workspace};

/// The database of security advisories for Rust crates, as cargo-deny fetches it.
const ADVISORY_DATABASE: &str = "https://github.com/RustSec/advisory-db";

/// How long the advisory database may take to answer before it counts as out of reach.
const REACH: Duration = Duration::from_secs(20);

/// Runs the checks.
///
/// # Errors
/// When a check that could run found something, or cargo-deny could not be had.
pub(crate) fn run() -> Result<()> {
    let program = tools::cargo_deny()?;
    process::run(&mut cargo_deny(&program, &["licenses", "bans", "sources"]))?;
    match database_out_of_reach() {
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

/// Why the advisory database cannot be fetched, or nothing when it can.
fn database_out_of_reach() -> Option<String> {
    let mut probe = Command::new("git");
    // No prompt: a proxy that asks for a password is out of reach, not a reason to wait.
    probe.args(["ls-remote", "--quiet", ADVISORY_DATABASE, "HEAD"]).env("GIT_TERMINAL_PROMPT", "0");
    match process::capture_within(&mut probe, REACH) {
        Ok(output) if output.status.success() => None,
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            Some(said.lines().last().unwrap_or("git gave no reason").trim().to_owned())
        }
        Err(error) => Some(format!("{error:#}")),
    }
}
