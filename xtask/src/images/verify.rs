//! What is promised of an image: the same sources give the same one, there is no shell in it, nor anything of a GPU's driver, its program
//! starts, and not as root; and it asks a container runtime for GPUs or does not.

use std::fs;

use anyhow::{Context, Result, bail, ensure};

use super::Target;
use super::builder::{Builder, Container};
use crate::process;

/// Who the programs run as.
const USER: &str = "65532:65532";
/// Where libraries are, and what those of a driver are called: a node mounts its own.
const LIBRARIES: [&str; 4] =
    ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "usr/lib/aarch64-linux-gnu"];
const DRIVER: [&str; 3] = ["libcuda.", "libnvidia-", "libnvrtc"];
/// Where shells are looked for.
const SHELLS: [&str; 5] = ["bin/sh", "bin/bash", "bin/busybox", "usr/bin/sh", "usr/bin/bash"];

/// Looks into an image.
///
/// # Errors
/// Something that is promised does not hold.
pub(super) fn image(builder: &Builder, target: Target, name: &str) -> Result<()> {
    let config = "{{.OCIv1.Config.User}} {{.OCIv1.Config.Entrypoint}}";
    let told = process::read(&mut builder.command(["inspect", "--type", "image", "--format", config, name]))?;
    let promised = format!("{USER} [/{}]", target.program());
    ensure!(told.trim() == promised, "{name} starts {}, and not {promised}", told.trim());
    let config = "{{range .OCIv1.Config.Env}}{{.}}\n{{end}}";
    let told = process::read(&mut builder.command(["inspect", "--type", "image", "--format", config, name]))?;
    let mut asked: Vec<&str> = told.lines().filter(|line| line.starts_with("NVIDIA_")).collect();
    asked.sort_unstable();
    ensure!(asked == target.environment(), "{name} asks a container runtime for {asked:?}");
    let container = builder.begin(name)?;
    let checked = content(&container, target);
    container.discard()?;
    checked.with_context(|| format!("{name} does not keep what is promised"))
}

fn content(container: &Container<'_>, target: Target) -> Result<()> {
    if let Some(shell) = SHELLS.iter().find(|shell| container.root.join(shell).exists()) {
        bail!("there is a shell, /{shell}");
    }
    for folder in LIBRARIES.iter().map(|folder| container.root.join(folder)).filter(|folder| folder.exists()) {
        let names = fs::read_dir(&folder)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        let names: Vec<String> = names.collect::<Result<_>>()?;
        let of_driver = names.iter().find(|name| DRIVER.iter().any(|library| name.starts_with(library)));
        ensure!(of_driver.is_none(), "there is {of_driver:?} in /{}: that is the node's", folder.display());
    }
    let program = format!("/{}", target.program());
    let said = container.read(&[&program, "--version"]).context("its program does not start")?;
    ensure!(said.contains(super::VERSION), "its program says that it is {}", said.trim());
    Ok(())
}
