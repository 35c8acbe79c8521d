//! Where things are: the root of the checkout, cargo, and the folder for what is built.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

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
