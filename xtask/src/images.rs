//! `cargo xtask images`: the images of the Dockerfile, as OCI archives under `target/images`.
//!
//! Without `--from-source` nothing is pulled: cargo builds the programs here, and their base is made of files of the Debian packages
//! that are installed on this machine, so that the C library of the image is the one that the programs were linked with. Only the last
//! stages of the Dockerfile run then. The same commit, toolchain and packages give images of the same digest.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::{process, workspace};

/// Targets of the Dockerfile, each with its program.
const TARGETS: [(&str, &str); 2] = [("operator", "engram-operator"), ("worker", "engram-worker")];
/// The Debian packages whose libraries the programs are linked with.
const PACKAGES: [&str; 2] = ["libc6", "libgcc-s1"];
/// The certificates of public authorities, of package ca-certificates.
const CERTIFICATES: &str = "etc/ssl/certs/ca-certificates.crt";
/// Who the programs run as.
const USERS: &str = "root:x:0:0::/:/sbin/nologin\nnonroot:x:65532:65532::/:/sbin/nologin\n";
/// Names of hosts: first the file that a kubelet writes, then the cluster's DNS.
const NAME_SERVICE: &str = "hosts: files dns\n";
/// The base, in the builder's own storage.
const BASE: &str = "localhost/engram-base";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Runs every stage of the Dockerfile; the bases are pulled
    #[arg(long)]
    from_source: bool,
    /// Takes the programs of the development profile: built sooner, several times as large, and slower
    #[arg(long, conflicts_with = "from_source")]
    debug: bool,
    /// What stands before the names: PREFIX/operator, PREFIX/worker
    #[arg(long, value_name = "PREFIX", default_value = "engram")]
    prefix: String,
    /// Another base than the Dockerfile's for the programs to run on, with --from-source
    #[arg(long, value_name = "IMAGE", requires = "from_source")]
    runtime_base: Option<String>,
    /// Another base than the Dockerfile's to build on, with --from-source
    #[arg(long, value_name = "IMAGE", requires = "from_source")]
    rust_base: Option<String>,
}

/// Makes the images and prints where they are.
///
/// # Errors
/// There is no buildah, or a step fails.
pub(crate) fn run(options: &Options) -> Result<()> {
    let builder = Builder::new()?;
    let arguments = if options.from_source {
        let base = |name: &str, value: &Option<String>| value.as_ref().map(|image| format!("{name}={image}"));
        let bases = [base("RUST_BASE", &options.rust_base), base("RUNTIME_BASE", &options.runtime_base)];
        bases.into_iter().flatten().collect()
    } else {
        programs(&builder.folder, options.debug)?;
        base(&builder)?;
        vec!["BINARIES=prebuilt".to_owned(), format!("RUNTIME_BASE={BASE}")]
    };
    for (target, _) in TARGETS {
        let archive = builder.build(target, &format!("{}/{target}:{}", options.prefix, version()), &arguments)?;
        let size = archive.metadata().map_or(0, |metadata| metadata.len());
        println!("{} ({:.1} MiB)", archive.display(), size as f64 / f64::from(1 << 20));
    }
    fs::remove_dir_all(&builder.storage).with_context(|| format!("failed to remove {}", builder.storage.display()))
}

/// The version of the programs: the workspace's, which is this package's too.
const fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// buildah, with a storage of its own.
struct Builder {
    /// Where the archives and what goes into them lie.
    folder: PathBuf,
    storage: PathBuf,
    /// Seconds since 1970 of the commit: the time of every file.
    timestamp: String,
}

impl Builder {
    fn new() -> Result<Self> {
        let found = Command::new("buildah").arg("--version").output();
        found.context("there is no buildah (on Debian: apt-get install buildah)")?;
        // The Dockerfile names this folder: cargo's own, wherever else CARGO_TARGET_DIR points.
        let folder = workspace::root().join("target/images");
        let storage = folder.join("storage");
        fs::create_dir_all(&storage).with_context(|| format!("failed to make {}", storage.display()))?;
        let mut commit = Command::new("git");
        commit.args(["log", "-1", "--format=%ct"]).current_dir(workspace::root());
        let timestamp = process::read(&mut commit)?.trim().to_owned();
        Ok(Self { folder, storage, timestamp })
    }

    fn command<const N: usize>(&self, arguments: [&str; N]) -> Command {
        let mut command = Command::new("buildah");
        // No mounts and no containers: that works wherever root does.
        command.args(["--storage-driver", "vfs", "--root"]).arg(&self.storage);
        command.arg("--runroot").arg(self.storage.join("run")).args(arguments);
        command.env("BUILDAH_ISOLATION", "chroot").current_dir(workspace::root());
        command
    }

    /// Builds one target and writes it as an archive.
    fn build(&self, target: &str, name: &str, arguments: &[String]) -> Result<PathBuf> {
        let mut build = self.command(["build", "--quiet", "--format", "oci", "--timestamp", &self.timestamp]);
        build.args(["--target", target, "--tag", name, "--build-arg", &format!("VERSION={}", version())]);
        for argument in arguments {
            build.args(["--build-arg", argument]);
        }
        process::run(build.arg("."))?;
        let archive = self.folder.join(format!("{target}.tar"));
        // The tool adds to an archive that is there.
        if archive.exists() {
            fs::remove_file(&archive).with_context(|| format!("failed to remove {}", archive.display()))?;
        }
        let to = format!("oci-archive:{}:{name}", archive.display());
        process::run(&mut self.command(["push", "--quiet", name, &to]))?;
        Ok(archive)
    }
}

/// Builds the programs and puts them, without symbols, where the Dockerfile takes them from.
fn programs(folder: &Path, debug: bool) -> Result<()> {
    let mut cargo = workspace::cargo(["build", "--locked", "--package", "engram-operator", "--package"]);
    cargo.args(["engram-worker", "--bins"]).args((!debug).then_some("--release"));
    process::run(&mut cargo)?;
    let built = workspace::target().join(if debug { "debug" } else { "release" });
    for (_, program) in TARGETS {
        let mut strip = Command::new("strip");
        process::run(strip.arg("-o").arg(folder.join(program)).arg(built.join(program)))?;
    }
    Ok(())
}

/// Makes the base: the libraries of the packages, certificates, names of users.
fn base(builder: &Builder) -> Result<()> {
    let root = builder.folder.join("base");
    if root.exists() {
        fs::remove_dir_all(&root).with_context(|| format!("failed to remove {}", root.display()))?;
    }
    let mut list = Command::new("dpkg-query");
    let listed = process::read(list.arg("--listfiles").args(PACKAGES)).context("the base is made on Debian")?;
    for file in listed.lines().filter(|line| is_library(line)) {
        put(&root, file.trim_start_matches('/'), &read(Path::new(file))?, 0o755)?;
    }
    put(&root, CERTIFICATES, &read(&Path::new("/").join(CERTIFICATES))?, 0o644)?;
    put(&root, "etc/passwd", USERS.as_bytes(), 0o644)?;
    put(&root, "etc/nsswitch.conf", NAME_SERVICE.as_bytes(), 0o644)?;
    for (_, program) in TARGETS {
        let linked = process::read(Command::new("ldd").arg(builder.folder.join(program)))?;
        for library in linked.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/'))) {
            ensure!(
                root.join(library.trim_start_matches('/')).exists(),
                "{program} is linked with {library}, which is of none of the packages {}",
                PACKAGES.join(", ")
            );
        }
    }
    let container = process::read(&mut builder.command(["from", "scratch"]))?;
    let container = container.trim();
    process::run(builder.command(["copy", "--quiet", container]).arg(&root).arg("/"))?;
    let commit = ["commit", "--quiet", "--rm", "--timestamp", &builder.timestamp, container, BASE];
    process::run(&mut builder.command(commit))
}

/// Whether a file of a package is a library that programs are linked with: not one of those that convert texts or audit loaders.
fn is_library(path: &str) -> bool {
    let name = path.rsplit_once('/').map_or(path, |(_, name)| name);
    (path.starts_with("/lib") || path.starts_with("/usr/lib"))
        && (name.ends_with(".so") || name.contains(".so."))
        && !["/gconv/", "/audit/"].iter().any(|folder| path.contains(folder))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("failed to read {}", path.display()))
}

fn put(root: &Path, inside: &str, bytes: &[u8], mode: u32) -> Result<()> {
    let path = root.join(inside);
    let failed = || format!("failed to write {}", path.display());
    fs::create_dir_all(path.parent().expect("it lies in the root")).with_context(failed)?;
    fs::write(&path, bytes).with_context(failed)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).with_context(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_told_from_what_else_a_package_holds() {
        for library in [
            "/lib/x86_64-linux-gnu/libc.so.6",
            "/lib64/ld-linux-x86-64.so.2",
            "/usr/lib/x86_64-linux-gnu/libgcc_s.so.1",
        ] {
            assert!(is_library(library), "{library}");
        }
        for other in [
            "/usr/share/doc/libc6/copyright",
            "/usr/lib/x86_64-linux-gnu/gconv/UTF-16.so",
            "/etc/ld.so.conf.d/x.conf",
            "/lib",
        ] {
            assert!(!is_library(other), "{other}");
        }
    }
}
