//! Checks of an image: no shell, no GPU driver files, its program starts, and not as root; and it requests GPUs from the container runtime only if
//! intended.

use std::fs;

use anyhow::{Context, Result, bail, ensure};

use super::Target;
use super::builder::{Builder, Container};
use crate::process;

/// User that the programs run as.
const USER: &str = "65532:65532";
/// Library directories, and the name prefix of driver libraries: a node mounts its own.
const LIBRARIES: [&str; 4] =
    ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "usr/lib/aarch64-linux-gnu"];
const DRIVER: [&str; 3] = ["libcuda.", "libnvidia-", "libnvrtc"];
/// Paths of shells.
const SHELLS: [&str; 5] = ["bin/sh", "bin/bash", "bin/busybox", "usr/bin/sh", "usr/bin/bash"];

/// Checks an image.
///
/// # Errors
/// When a check fails.
pub(super) fn image(builder: &Builder, target: Target, name: &str) -> Result<()> {
    let config = "{{.OCIv1.Config.User}} {{.OCIv1.Config.Entrypoint}}";
    let output = process::read(&mut builder.command(["inspect", "--type", "image", "--format", config, name]))?;
    let expected = format!("{USER} [/{}]", target.program());
    ensure!(output.trim() == expected, "{name} starts {}, expected {expected}", output.trim());
    let config = "{{range .OCIv1.Config.Env}}{{.}}\n{{end}}";
    let output = process::read(&mut builder.command(["inspect", "--type", "image", "--format", config, name]))?;
    let mut requested: Vec<&str> = output.lines().filter(|line| line.starts_with("NVIDIA_")).collect();
    requested.sort_unstable();
    ensure!(requested == target.environment(), "{name} requests {requested:?} from the container runtime");
    let container = builder.begin(name)?;
    let checked = content(&container, target);
    container.discard()?;
    checked.with_context(|| format!("image {name} failed its checks"))
}

fn content(container: &Container<'_>, target: Target) -> Result<()> {
    if let Some(shell) = SHELLS.iter().find(|shell| container.root.join(shell).exists()) {
        bail!("image contains a shell, /{shell}");
    }
    for folder in LIBRARIES.iter().map(|folder| container.root.join(folder)).filter(|folder| folder.exists()) {
        let names = fs::read_dir(&folder)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        let names: Vec<String> = names.collect::<Result<_>>()?;
        let of_driver = names.iter().find(|name| DRIVER.iter().any(|library| name.starts_with(library)));
        ensure!(
            of_driver.is_none(),
            "image contains driver library {of_driver:?} in /{}, which the node provides",
            folder.display()
        );
    }
    let program = format!("/{}", target.program());
    let output = container.read(&[&program, "--version"]).context("failed to start the program")?;
    ensure!(output.contains(super::VERSION), "the program reports version {}", output.trim());
    Ok(())
}
