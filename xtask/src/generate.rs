//! `cargo xtask generate`: files that are made by a command and committed, so that they can be read without running it.
//!
//! `--check` makes them again and compares: CI fails on drift.

use std::fs;

use anyhow::{Context, Result, bail};

use crate::{process, workspace};

/// A committed file and the cargo command whose standard output it is.
struct Generated {
    path: &'static str,
    cargo: &'static [&'static str],
}

/// Everything that is generated.
const FILES: &[Generated] = &[
    Generated {
        path: "docs/reference/errors.md",
        cargo: &["run", "-q", "-p", "xtask", "--example", "reference", "errors"],
    },
    Generated {
        path: "docs/reference/manifest.schema.json",
        cargo: &["run", "-q", "-p", "xtask", "--example", "reference", "schema"],
    },
];

/// Writes the files, or with `check` compares them.
///
/// # Errors
/// When a command fails, or with `check` when a file is not what its command writes.
pub(crate) fn run(check: bool) -> Result<()> {
    let mut stale = Vec::new();
    for file in FILES {
        let fresh = process::read(&mut workspace::cargo(file.cargo))?;
        let path = workspace::root().join(file.path);
        let committed = fs::read_to_string(&path).ok();
        if committed.as_deref() == Some(fresh.as_str()) {
            continue;
        }
        if check {
            stale.push(file.path);
        } else {
            fs::write(&path, fresh).with_context(|| format!("failed to write {}", path.display()))?;
            println!("wrote {}", file.path);
        }
    }
    if !stale.is_empty() {
        bail!("not what its command writes (run `cargo xtask generate`): {}", stale.join(", "));
    }
    Ok(())
}
