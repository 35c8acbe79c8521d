//! buildah with its own storage, which is removed after the build.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::Target;
use crate::{process, workspace};

/// Image builder.
pub(super) struct Builder {
    /// Directory of the archives and their inputs.
    pub(super) folder: PathBuf,
    /// Commit time in seconds since 1970, used for every file.
    pub(super) timestamp: String,
    storage: PathBuf,
}

impl Builder {
    pub(super) fn new() -> Result<Self> {
        let version = Command::new("buildah").arg("--version").output();
        version.context("failed to run buildah (on Debian: apt-get install buildah)")?;
        // The Dockerfile names this folder: cargo's default one, even if CARGO_TARGET_DIR is set.
        let folder = workspace::root().join("target/images");
        let storage = folder.join("storage");
        fs::create_dir_all(storage.join("tmp")).with_context(|| format!("failed to create {}", storage.display()))?;
        let mut commit = Command::new("git");
        commit.args(["log", "-1", "--format=%ct"]).current_dir(workspace::root());
        let timestamp = process::read(&mut commit)?.trim().to_owned();
        Ok(Self { folder, timestamp, storage })
    }

    /// Returns a buildah command.
    pub(super) fn command<const N: usize>(&self, arguments: [&str; N]) -> Command {
        let mut command = Command::new("buildah");
        // Without mounts and containers, which works wherever root does.
        command.args(["--storage-driver", "vfs", "--root"]).arg(&self.storage);
        command.arg("--runroot").arg(self.storage.join("run")).args(arguments);
        // Build stages store their data below the temporary directory, which is removed with it.
        command.env("TMPDIR", self.storage.join("tmp"));
        command.env("BUILDAH_ISOLATION", "chroot").current_dir(workspace::root());
        command
    }

    /// Starts an image from another one, or from `scratch`.
    pub(super) fn begin(&self, from: &str) -> Result<Container<'_>> {
        let name = process::read(&mut self.command(["from", "--pull-never", from]))?.trim().to_owned();
        let root = process::read(&mut self.command(["mount", &name]))?.trim().into();
        Ok(Container { builder: self, name, root })
    }

    /// Builds a target of the Dockerfile, writes it as an archive, and returns its digest.
    pub(super) fn build(&self, target: Target, name: &str, arguments: &[String]) -> Result<String> {
        let mut build = self.command(["build", "--quiet", "--format", "oci", "--timestamp", &self.timestamp]);
        build.args(["--target", target.name(), "--tag", name, "--build-arg", &format!("VERSION={}", super::VERSION)]);
        for argument in arguments {
            build.args(["--build-arg", argument]);
        }
        process::run(build.arg("."))?;
        let archive = self.archive(target);
        // buildah appends to an existing archive.
        if archive.exists() {
            fs::remove_file(&archive).with_context(|| format!("failed to remove {}", archive.display()))?;
        }
        let digest = self.storage.join("digest");
        let mut push = self.command(["push", "--quiet", "--digestfile"]);
        process::run(push.arg(&digest).args([name, &format!("oci-archive:{}:{name}", archive.display())]))?;
        fs::read_to_string(&digest).with_context(|| format!("failed to read {}", digest.display()))
    }

    /// Returns the archive path of a target.
    pub(super) fn archive(&self, target: Target) -> PathBuf {
        self.folder.join(format!("{}.tar", target.name()))
    }

    /// Removes the storage.
    pub(super) fn clean(self) -> Result<()> {
        fs::remove_dir_all(&self.storage).with_context(|| format!("failed to remove {}", self.storage.display()))
    }
}

/// A working container: an image under construction or inspection.
pub(super) struct Container<'a> {
    builder: &'a Builder,
    pub(super) name: String,
    /// Root of its files on this machine.
    pub(super) root: PathBuf,
}

impl Container<'_> {
    /// Sets an environment variable for later stages.
    pub(super) fn environment(&self, variable: &str) -> Result<()> {
        process::run(&mut self.builder.command(["config", "--env", variable, &self.name]))
    }

    /// Copies the content of a folder into the container.
    pub(super) fn copy(&self, folder: &Path, inside: &str) -> Result<()> {
        process::run(self.builder.command(["copy", "--quiet", &self.name]).arg(folder).arg(inside))
    }

    /// Runs a program of the image with its configuration and returns the output.
    pub(super) fn read(&self, program: &[&str]) -> Result<String> {
        process::read(self.builder.command(["run", &self.name, "--"]).args(program))
    }

    /// Commits the container as an image.
    pub(super) fn commit(self, image: &str) -> Result<()> {
        let Self { builder, name, .. } = self;
        let commit = ["commit", "--quiet", "--rm", "--timestamp", &builder.timestamp, &name, image];
        process::run(&mut builder.command(commit))
    }

    /// Removes the container.
    pub(super) fn discard(self) -> Result<()> {
        process::run(&mut self.builder.command(["rm", &self.name]))
    }
}
