//! buildah, with a storage of its own that goes when it has done its work.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::Target;
use crate::{process, workspace};

/// What builds images.
pub(super) struct Builder {
    /// Where the archives and what goes into them lie.
    pub(super) folder: PathBuf,
    /// Seconds since 1970 of the commit: the time of every file.
    pub(super) timestamp: String,
    storage: PathBuf,
}

impl Builder {
    pub(super) fn new() -> Result<Self> {
        let found = Command::new("buildah").arg("--version").output();
        found.context("there is no buildah (on Debian: apt-get install buildah)")?;
        // The Dockerfile names this folder: cargo's own, wherever else CARGO_TARGET_DIR points.
        let folder = workspace::root().join("target/images");
        let storage = folder.join("storage");
        fs::create_dir_all(storage.join("tmp")).with_context(|| format!("failed to make {}", storage.display()))?;
        let mut commit = Command::new("git");
        commit.args(["log", "-1", "--format=%ct"]).current_dir(workspace::root());
        let timestamp = process::read(&mut commit)?.trim().to_owned();
        Ok(Self { folder, timestamp, storage })
    }

    /// A command of buildah.
    pub(super) fn command<const N: usize>(&self, arguments: [&str; N]) -> Command {
        let mut command = Command::new("buildah");
        // No mounts and no containers: that works wherever root does.
        command.args(["--storage-driver", "vfs", "--root"]).arg(&self.storage);
        command.arg("--runroot").arg(self.storage.join("run")).args(arguments);
        // What the stages keep between builds lies below the temporary folder, and goes with it.
        command.env("TMPDIR", self.storage.join("tmp"));
        command.env("BUILDAH_ISOLATION", "chroot").current_dir(workspace::root());
        command
    }

    /// Begins an image from another, or from nothing, `scratch`.
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
        // The tool adds to an archive that is there.
        if archive.exists() {
            fs::remove_file(&archive).with_context(|| format!("failed to remove {}", archive.display()))?;
        }
        let digest = self.storage.join("digest");
        let mut push = self.command(["push", "--quiet", "--digestfile"]);
        process::run(push.arg(&digest).args([name, &format!("oci-archive:{}:{name}", archive.display())]))?;
        fs::read_to_string(&digest).with_context(|| format!("failed to read {}", digest.display()))
    }

    /// Where the archive of a target is.
    pub(super) fn archive(&self, target: Target) -> PathBuf {
        self.folder.join(format!("{}.tar", target.name()))
    }

    /// Gives back the space that the work took.
    pub(super) fn clean(self) -> Result<()> {
        fs::remove_dir_all(&self.storage).with_context(|| format!("failed to remove {}", self.storage.display()))
    }
}

/// An image that is being made, or looked into.
pub(super) struct Container<'a> {
    builder: &'a Builder,
    pub(super) name: String,
    /// Its files, as they lie on this machine.
    pub(super) root: PathBuf,
}

impl Container<'_> {
    /// Sets what the commands of later stages find in their environment.
    pub(super) fn environment(&self, variable: &str) -> Result<()> {
        process::run(&mut self.builder.command(["config", "--env", variable, &self.name]))
    }

    /// Copies a folder's content to a place inside.
    pub(super) fn copy(&self, folder: &Path, inside: &str) -> Result<()> {
        process::run(self.builder.command(["copy", "--quiet", &self.name]).arg(folder).arg(inside))
    }

    /// What a program of the image says, run as the image says.
    pub(super) fn read(&self, program: &[&str]) -> Result<String> {
        process::read(self.builder.command(["run", &self.name, "--"]).args(program))
    }

    /// Makes an image of it.
    pub(super) fn commit(self, image: &str) -> Result<()> {
        let Self { builder, name, .. } = self;
        let commit = ["commit", "--quiet", "--rm", "--timestamp", &builder.timestamp, &name, image];
        process::run(&mut builder.command(commit))
    }

    /// Takes it away.
    pub(super) fn discard(self) -> Result<()> {
        process::run(&mut self.builder.command(["rm", &self.name]))
    }
}
