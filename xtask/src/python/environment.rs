//! Virtual environments of the suites, new for each run: what an earlier run installed must not hide what a package lacks.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::{process, workspace};

/// File of an environment that was created for the next run, with the packages that it has.
const PREPARED: &str = "prepared";
/// Creates an environment in place of an older one. Its own test installs nothing.
const CREATE: &[&str] =
    if cfg!(test) { &["-m", "venv", "--clear", "--without-pip"] } else { &["-m", "venv", "--clear"] };
const INSTALL: [&str; 4] = ["-m", "pip", "install", "--disable-pip-version-check"];

pub(super) struct Environment {
    home: PathBuf,
    /// It has the packages of an earlier run.
    is_reused: bool,
}

impl Environment {
    /// Creates an environment with packages, takes the one that was prepared for this run, or with `reuse` that of the last run.
    ///
    /// # Errors
    /// There is no python3 with the venv module, or a package cannot be installed.
    pub(super) fn new(name: &str, packages: &[&str], reuse: bool) -> Result<Self> {
        let home = home_of(name);
        if is_prepared(name, packages) {
            fs::remove_file(home.join(PREPARED)).context("failed to take the prepared environment")?;
            return Ok(Self { home, is_reused: false });
        }
        let environment = Self { is_reused: reuse && home.join("bin/python").exists(), home };
        if !environment.is_reused {
            process::run(Command::new("python3").args(CREATE).arg(&environment.home))
                .context("failed to create a virtual environment (on Debian: apt-get install python3-venv)")?;
        }
        environment.install(packages)?;
        Ok(environment)
    }

    /// Creates an environment with packages for the next run.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub(super) fn prepare(name: &str, packages: &[&str]) -> Result<()> {
        let environment = Self::new(name, packages, false)?;
        let mark = environment.home.join(PREPARED);
        fs::write(&mark, packages.join("\n")).with_context(|| format!("failed to write {}", mark.display()))
    }

    pub(super) fn python(&self) -> PathBuf {
        self.home.join("bin/python")
    }

    /// Installs packages with their dependencies.
    ///
    /// # Errors
    /// A package cannot be installed.
    pub(super) fn install<S: AsRef<OsStr>>(&self, packages: &[S]) -> Result<()> {
        if packages.is_empty() {
            return Ok(());
        }
        process::run(Command::new(self.python()).args(INSTALL).args(packages))
    }

    /// Installs the wheel as a user does, with its dependencies.
    ///
    /// # Errors
    /// As [`Self::install`].
    pub(super) fn install_wheel(&self, wheel: &Path) -> Result<()> {
        if self.is_reused {
            // The version of another build may be the same.
            return install_again(&self.python(), wheel);
        }
        self.install(&[wheel])
    }

    /// # Errors
    /// A file cannot be removed.
    pub(super) fn remove(self) -> Result<()> {
        fs::remove_dir_all(&self.home).with_context(|| format!("failed to remove {}", self.home.display()))
    }
}

/// Replaces the installed wheel, and leaves its dependencies alone.
///
/// # Errors
/// It cannot be installed.
pub(super) fn install_again(python: &Path, wheel: &Path) -> Result<()> {
    process::run(Command::new(python).args(INSTALL).args(["--quiet", "--force-reinstall", "--no-deps"]).arg(wheel))
}

/// Whether an environment with exactly these packages was prepared for the next run.
fn is_prepared(name: &str, packages: &[&str]) -> bool {
    fs::read_to_string(home_of(name).join(PREPARED)).is_ok_and(|found| found == packages.join("\n"))
}

fn home_of(name: &str) -> PathBuf {
    workspace::target().join("python-environments").join(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has(environment: &Environment, module: &str) -> bool {
        Command::new(environment.python()).args(["-c", &format!("import {module}")]).output().unwrap().status.success()
    }

    #[test]
    fn prepared_environment_serves_one_run_and_later_ones_are_new() {
        let name = format!("test-{}", std::process::id());
        Environment::prepare(&name, &[]).unwrap();
        assert!(is_prepared(&name, &[]) && !is_prepared(&name, &["torch"]));
        let leave_module = |environment: &Environment| {
            let packages = environment.home.join("lib").read_dir().unwrap().next().unwrap().unwrap().path();
            fs::write(packages.join("site-packages/left_behind.py"), "").unwrap();
        };
        let first = Environment::new(&name, &[], false).unwrap();
        assert!(!is_prepared(&name, &[]));
        leave_module(&first);
        assert!(has(&first, "left_behind") && has(&Environment::new(&name, &[], true).unwrap(), "left_behind"));
        let second = Environment::new(&name, &[], false).unwrap();
        assert!(!has(&second, "left_behind"));
        second.remove().unwrap();
        assert!(!home_of(&name).exists());
    }
}
