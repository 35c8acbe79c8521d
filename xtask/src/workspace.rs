//! Paths of the checkout, cargo commands, and build profiles.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use anyhow::{Result, bail};

/// Returns the root of the checkout.
pub(crate) fn root() -> &'static Path {
    // `cargo run` sets this variable at run time as well. It is correct even if checkouts share a target folder and another one built this
    // program.
    static PACKAGE: LazyLock<PathBuf> = LazyLock::new(|| {
        std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
    });
    PACKAGE.parent().expect("xtask/ is in the root of the checkout")
}

/// Returns cargo's output folder: `CARGO_TARGET_DIR` if set, otherwise `target/`.
pub(crate) fn target() -> PathBuf {
    // `join` keeps an absolute path and resolves a relative one from the root, where cargo is started.
    root().join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

/// Returns a command for the cargo that runs this program, in the root of the checkout.
pub(crate) fn cargo<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = command_for_cargo(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments);
    command
}

/// Returns a command for a program that starts cargo, in the root of the checkout. Removes the variables of this package: build scripts
/// that read them would run again, and the crates that depend on them would be compiled again.
pub(crate) fn command_for_cargo(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root());
    let of_this = |name: &OsStr| {
        let name = name.to_string_lossy();
        name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
    };
    for (name, _) in std::env::vars_os().filter(|(name, _)| of_this(name)) {
        command.env_remove(name);
    }
    command
}

/// A profile of Cargo.toml.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Profile {
    /// `dev`, and `test`, which equals it here.
    Dev,
    /// `bench`: the dependencies of `release`, and the workspace with assertions and few optimizations. It has the folder of `release`, so that a
    /// program there is the one that was built last.
    Ci,
    /// `release`.
    Release,
}

impl Profile {
    /// Environment variable that names the profile of tests: dev or ci.
    pub(crate) const VARIABLE: &str = "ENGRAM_TEST_PROFILE";

    /// Returns the profile of tests and of programs built with them: the one that [`Self::VARIABLE`] names, `dev` by default.
    ///
    /// # Errors
    /// The variable has another value.
    pub(crate) fn of_tests() -> Result<Self> {
        let named = std::env::var_os(Self::VARIABLE).unwrap_or_default();
        match named.to_str() {
            Some("ci") => Ok(Self::Ci),
            Some("dev" | "") => Ok(Self::Dev),
            _ => bail!("{} is {named:?}; allowed: dev, ci", Self::VARIABLE),
        }
    }

    /// Returns the profile of benchmarks and fuzz targets: `release`, or `ci` where the tests use it, so that dependencies are built once.
    ///
    /// # Errors
    /// As [`Self::of_tests`].
    pub(crate) fn of_tools() -> Result<Self> {
        Ok(if Self::of_tests()? == Self::Ci { Self::Ci } else { Self::Release })
    }

    /// Returns a [`cargo`] build command in this profile.
    pub(crate) fn cargo<S: AsRef<OsStr>>(self, command: &str, arguments: impl IntoIterator<Item = S>) -> Command {
        let mut cargo = cargo([command]);
        match self {
            Self::Dev => {}
            Self::Ci => drop(cargo.args(["--profile", "bench"])),
            Self::Release => drop(cargo.arg("--release")),
        }
        cargo.args(arguments);
        cargo
    }

    /// Returns the folder of its programs.
    pub(crate) fn folder(self) -> PathBuf {
        target().join(match self {
            Self::Dev => "debug",
            Self::Ci | Self::Release => "release",
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::process;

    #[test]
    fn shared_crates_have_the_same_features_in_all_commands() {
        let built_of = |edges: &str, selection: &[&str]| -> BTreeSet<String> {
            let mut tree =
                cargo(["tree", "--locked", "--offline", "--edges", edges, "--prefix", "none", "--format", "{p} {f}"]);
            let listed = process::read(tree.args(selection)).unwrap();
            // Already listed packages are marked.
            listed.lines().map(|it| it.trim_end_matches("(*)").trim_end().to_owned()).collect()
        };
        let tests = built_of("normal,dev", &["--workspace"]);
        assert!(tests.len() > 400, "{tests:?}");
        let command = ["-p", "engram-cli"];
        let cluster =
            ["-p", "engram-cli", "-p", "engram-worker", "-p", "engram-operator", "-p", "engram-kubernetes-tests"];
        let benchmarks = ["-p", "engram-cli", "-p", "engram-benchmarks"];
        let python = ["-p", "engram-python"];
        for selection in [&command[..], &cluster, &benchmarks, &python] {
            let programs = built_of("normal", selection);
            // A different feature of one small crate rebuilds everything that depends on it.
            let other: Vec<_> = programs.difference(&tests).collect();
            assert!(other.is_empty(), "{selection:?}: features differ from those of the tests: {other:?}");
        }
    }
}
