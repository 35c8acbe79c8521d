//! `cargo xtask edge`: the program for devices of federated runs as one static file.

use std::env::consts::ARCH;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::{process, workspace};

const PACKAGE: &str = "engram-edge";
/// Bytes that the file may have: it is for devices with little memory and slow links.
const MOST_BYTES: u64 = 12 << 20;

/// Builds the program and checks that it is static and small.
///
/// # Errors
/// It cannot be built, needs a library of the device, or is larger than allowed.
pub(crate) fn run() -> Result<()> {
    let program = build()?;
    let bytes = check(&program)?;
    println!("{}: {bytes} bytes ({:.1} MiB), static", program.display(), bytes as f64 / f64::from(1 << 20));
    Ok(())
}

fn build() -> Result<PathBuf> {
    let target = format!("{ARCH}-unknown-linux-gnu");
    // With a target, build scripts and macros are built without the flag, which they cannot have.
    let mut command = Command::new("cargo");
    command
        .current_dir(workspace::root())
        .args(["build", "--locked", "--package", PACKAGE, "--profile", "edge", "--target", &target])
        .env("RUSTFLAGS", "-C target-feature=+crt-static");
    process::run(&mut command)?;
    Ok(workspace::target().join(target).join("edge").join(PACKAGE))
}

/// Returns the size of a program that is static and starts.
fn check(program: &Path) -> Result<u64> {
    let content = fs::read(program).with_context(|| format!("failed to read {}", program.display()))?;
    ensure!(!has_interpreter(&content), "{} needs a dynamic loader: it is not static", program.display());
    let bytes = content.len() as u64;
    ensure!(bytes <= MOST_BYTES, "{} has {bytes} bytes; allowed: at most {MOST_BYTES}", program.display());
    let version = process::read(Command::new(program).arg("--version"))?;
    ensure!(version.starts_with(PACKAGE), "{} --version printed {version:?}", program.display());
    Ok(bytes)
}

/// Whether a 64-bit little-endian ELF file names a dynamic loader: a program header of type `PT_INTERP`, 3.
fn has_interpreter(content: &[u8]) -> bool {
    let number = |at: usize, bytes: usize| {
        let field = content.get(at..at + bytes).unwrap_or_default();
        field.iter().rev().fold(0_usize, |number, byte| number << 8 | usize::from(*byte))
    };
    let (table, size, count) = (number(32, 8), number(54, 2), number(56, 2));
    (0..count).any(|index| number(table + index * size, 4) == 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loader_is_found_in_dynamic_programs_only() {
        let mut file = vec![0_u8; 64 + 2 * 56];
        (file[32], file[54], file[56]) = (64, 56, 2);
        (file[64], file[64 + 56]) = (1, 2);
        assert!(!has_interpreter(&file));
        file[64 + 56] = 3;
        assert!(has_interpreter(&file));
    }
}
