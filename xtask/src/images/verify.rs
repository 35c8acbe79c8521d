//! What is promised of an image: the same sources give the same one, there is no shell in it, its program starts, and not as root.

use anyhow::{Context, Result, bail, ensure};

use super::Target;
use super::builder::{Builder, Container};
use crate::process;

/// Who the programs run as.
const USER: &str = "65532:65532";
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
    let container = builder.begin(name)?;
    let checked = content(&container, target);
    container.discard()?;
    checked.with_context(|| format!("{name} does not keep what is promised"))
}

fn content(container: &Container<'_>, target: Target) -> Result<()> {
    if let Some(shell) = SHELLS.iter().find(|shell| container.root.join(shell).exists()) {
        bail!("there is a shell, /{shell}");
    }
    let program = format!("/{}", target.program());
    let said = container.read(&[&program, "--version"]).context("its program does not start")?;
    ensure!(said.contains(super::VERSION), "its program says that it is {}", said.trim());
    Ok(())
}
