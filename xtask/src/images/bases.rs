//! Base images of the Dockerfile, built on this machine from Debian packages: nothing is pulled.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::Target;
use super::builder::Builder;
use crate::{process, workspace};

/// Base image of programs.
pub(super) const RUNTIME: &str = "localhost/engram-base";
/// Base image of the build.
pub(super) const RUST: &str = "localhost/engram-rust";

/// Debian packages with the libraries that the programs link.
const PACKAGES: [&str; 2] = ["libc6", "libgcc-s1"];
/// Debian package with the public CA certificates.
const CA_PACKAGE: &str = "ca-certificates";
/// Path of the system trust bundle.
const CERTIFICATES: &str = "etc/ssl/certs/ca-certificates.crt";
/// User that the programs run as.
const USERS: &str = "root:x:0:0::/:/sbin/nologin\nnonroot:x:65532:65532::/:/sbin/nologin\n";
/// Host name lookup: first the file that a kubelet writes, then the cluster's DNS.
const NAME_SERVICE: &str = "hosts: files dns\n";
/// Additional Debian packages for building Rust programs and fetching crates.
const TO_BUILD: &str = "gcc,libc6-dev,make,ca-certificates";

/// Builds the base of programs: package libraries, CA certificates, user names.
pub(super) fn runtime(builder: &Builder) -> Result<()> {
    let root = builder.folder.join("base");
    if root.exists() {
        fs::remove_dir_all(&root).with_context(|| format!("failed to remove {}", root.display()))?;
    }
    let mut list = Command::new("dpkg-query");
    let listed = process::read(list.arg("--listfiles").args(PACKAGES)).context("the base is made on Debian")?;
    for file in listed.lines().filter(|line| is_library(line)) {
        put(&root, file.trim_start_matches('/'), &read(Path::new(file))?, 0o755)?;
    }
    put(&root, CERTIFICATES, &ca_certificates()?, 0o644)?;
    put(&root, "etc/passwd", USERS.as_bytes(), 0o644)?;
    put(&root, "etc/nsswitch.conf", NAME_SERVICE.as_bytes(), 0o644)?;
    let container = builder.begin("scratch")?;
    container.copy(&root, "/")?;
    container.commit(RUNTIME)
}

/// Returns the certificates of the package, without others that this machine trusts.
fn ca_certificates() -> Result<Vec<u8>> {
    let listed = process::read(Command::new("dpkg-query").args(["--listfiles", CA_PACKAGE]))?;
    let mut files: Vec<&str> = listed.lines().filter(|line| line.ends_with(".crt")).collect();
    ensure!(!files.is_empty(), "package {CA_PACKAGE} has no certificate");
    files.sort_unstable();
    let read = files.into_iter().map(|file| read(Path::new(file)));
    Ok(read.collect::<Result<Vec<_>>>()?.concat())
}

/// Checks that the base has every library that a program links.
pub(super) fn check_libraries(builder: &Builder, target: Target) -> Result<()> {
    let (root, program) = (builder.folder.join("base"), target.program());
    let linked = process::read(Command::new("ldd").arg(builder.folder.join(program)))?;
    for library in linked.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/'))) {
        ensure!(
            root.join(library.trim_start_matches('/')).exists(),
            "{program} links {library}, which none of these packages contains: {}",
            PACKAGES.join(", ")
        );
    }
    Ok(())
}

/// Builds the base of the build: this machine's Debian release, with the toolchain in use.
pub(super) fn rust(builder: &Builder) -> Result<()> {
    let release = fs::read_to_string("/etc/os-release").context("failed to read /etc/os-release")?;
    let release = release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    let release = release.context("/etc/os-release has no Debian release name")?;
    let toolchain = process::read(Command::new("rustc").args(["--print", "sysroot"]).current_dir(workspace::root()))?;
    let container = builder.begin("scratch")?;
    let mut debian = Command::new("mmdebstrap");
    debian.args(["--quiet", "--variant=minbase", &format!("--include={TO_BUILD}"), release]);
    debian.arg(&container.root).env("SOURCE_DATE_EPOCH", &builder.timestamp);
    process::run(&mut debian).context("failed to run mmdebstrap (on Debian: apt-get install mmdebstrap)")?;
    for folder in ["bin", "lib"] {
        let from = Path::new(toolchain.trim()).join(folder);
        container.copy(&from, &format!("/usr/local/{folder}"))?;
    }
    // Crates come through this machine's configuration, including its trusted CAs.
    let trusted = Path::new("/").join(CERTIFICATES);
    put(&container.root, CERTIFICATES, &read(&trusted)?, 0o644)?;
    container.environment("CARGO_HOME=/usr/local/cargo")?;
    container.commit(RUST)
}

/// Returns whether a file is a library that programs link, and not a gconv or audit module.
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
    fs::create_dir_all(path.parent().expect("the path is inside the root")).with_context(failed)?;
    fs::write(&path, bytes).with_context(failed)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).with_context(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_distinguished_from_other_package_files() {
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
