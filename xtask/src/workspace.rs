//! Where things are: the root of the checkout, cargo, what it builds in which profile, and the folder for that.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use anyhow::{Result, bail};

/// The root of the checkout.
pub(crate) fn root() -> &'static Path {
    // `cargo run` names the folder of this package at run time as well. That one holds even where checkouts share a target
    // folder and this program was built in another of them.
    static PACKAGE: LazyLock<PathBuf> = LazyLock::new(|| {
        std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
    });
    PACKAGE.parent().expect("xtask/ lies in the root of the checkout")
}

/// Cargo's folder for what is built: `CARGO_TARGET_DIR` when set, otherwise `target/`.
pub(crate) fn target() -> PathBuf {
    // `join` keeps an absolute path and takes a relative one from the root, where cargo is started.
    root().join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

/// The cargo that runs this program, started in the root of the checkout. It is told nothing of the package that this program is
/// of: a crate whose build asks for that would be built again, with all that need it.
pub(crate) fn cargo<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(root());
    let of_this = |name: &OsStr| {
        let name = name.to_string_lossy();
        name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
    };
    for (name, _) in std::env::vars_os().filter(|(name, _)| of_this(name)) {
        command.env_remove(name);
    }
    command
}

/// A profile of cargo's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Profile {
    /// `dev`, and `test`, which is the same here.
    Dev,
    /// `release`.
    Release,
}

impl Profile {
    /// That of tests, and of what is built with them: `dev`, or what `ENGRAM_TEST_PROFILE` names. Whoever builds for release anyway, as CI
    /// does, has what both depend on built once when the tests are built so too; with assertions, if the variables of cargo's ask for them.
    ///
    /// # Errors
    /// When it names something else.
    pub(crate) fn of_tests() -> Result<Self> {
        let named = std::env::var_os("ENGRAM_TEST_PROFILE").unwrap_or_default();
        match named.to_str() {
            Some("release") => Ok(Self::Release),
            Some("dev" | "") => Ok(Self::Dev),
            _ => bail!("ENGRAM_TEST_PROFILE is {named:?}; allowed: dev, release"),
        }
    }

    /// [`cargo`] with a command that builds, in this profile.
    pub(crate) fn cargo<S: AsRef<OsStr>>(self, command: &str, arguments: impl IntoIterator<Item = S>) -> Command {
        let mut cargo = cargo([command]);
        if self == Self::Release {
            cargo.arg("--release");
        }
        cargo.args(arguments);
        cargo
    }

    /// The folder of the programs that are built in it.
    pub(crate) fn folder(self) -> PathBuf {
        target().join(match self {
            Self::Dev => "debug",
            Self::Release => "release",
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::process;

    #[test]
    fn what_several_commands_build_has_the_same_features_in_all_of_them() {
        let built_of = |edges: &str, selection: &[&str]| -> BTreeSet<String> {
            let mut tree =
                cargo(["tree", "--locked", "--offline", "--edges", edges, "--prefix", "none", "--format", "{p} {f}"]);
            let listed = process::read(tree.args(selection)).unwrap();
            // What was listed before is marked.
            listed.lines().map(|it| it.trim_end_matches("(*)").trim_end().to_owned()).collect()
        };
        let tests = built_of("normal,dev", &["--workspace"]);
        assert!(tests.len() > 400, "{tests:?}");
        let command = ["-p", "engram-cli"];
        let cluster =
            ["-p", "engram-cli", "-p", "engram-worker", "-p", "engram-operator", "-p", "engram-kubernetes-tests"];
        let benchmarks = ["-p", "engram-cli", "-p", "engram-benchmarks"];
        for selection in [&command[..], &cluster, &benchmarks] {
            let programs = built_of("normal", selection);
            // One feature more of one small crate, and all that rests on it is built twice: minutes, for whoever builds both.
            let other: Vec<_> = programs.difference(&tests).collect();
            assert!(
                other.is_empty(),
                "{selection:?}: these have other features in the tests; name such a feature: {other:?}"
            );
        }
    }
}
