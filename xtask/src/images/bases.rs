//! The bases of the Dockerfile, made on this machine of Debian packages: nothing is pulled.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::Target;
use super::builder::Builder;
use crate::{process, workspace};

/// What programs run on.
pub(super) const RUNTIME: &str = "localhost/engram-base";
/// What they are built on.
pub(super) const RUST: &str = "localhost/engram-rust";

/// The Debian packages whose libraries the programs are linked with.
const PACKAGES: [&str; 2] = ["libc6", "libgcc-s1"];
/// The package with the certificates of public authorities.
const AUTHORITIES: &str = "ca-certificates";
/// Where programs look for whom to trust.
const CERTIFICATES: &str = "etc/ssl/certs/ca-certificates.crt";
/// Who the programs run as.
const USERS: &str = "root:x:0:0::/:/sbin/nologin\nnonroot:x:65532:65532::/:/sbin/nologin\n";
/// Names of hosts: first the file that a kubelet writes, then the cluster's DNS.
const NAME_SERVICE: &str = "hosts: files dns\n";
/// What a Debian needs besides its smallest set to build programs of Rust, and to fetch crates.
const TO_BUILD: &str = "gcc,libc6-dev,ca-certificates";

/// Makes the base that programs run on: the libraries of the packages, certificates, names of users.
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
    put(&root, CERTIFICATES, &authorities()?, 0o644)?;
    put(&root, "etc/passwd", USERS.as_bytes(), 0o644)?;
    put(&root, "etc/nsswitch.conf", NAME_SERVICE.as_bytes(), 0o644)?;
    let container = builder.begin("scratch")?;
    container.copy(&root, "/")?;
    container.commit(RUNTIME)
}

/// The certificates of the package, and no others that this machine may trust.
fn authorities() -> Result<Vec<u8>> {
    let listed = process::read(Command::new("dpkg-query").args(["--listfiles", AUTHORITIES]))?;
    let mut files: Vec<&str> = listed.lines().filter(|line| line.ends_with(".crt")).collect();
    ensure!(!files.is_empty(), "package {AUTHORITIES} has no certificate");
    files.sort_unstable();
    let read = files.into_iter().map(|file| read(Path::new(file)));
    Ok(read.collect::<Result<Vec<_>>>()?.concat())
}

/// Whether the base has all that a program of this machine is linked with.
pub(super) fn suits(builder: &Builder, target: Target) -> Result<()> {
    let (root, program) = (builder.folder.join("base"), target.program());
    let linked = process::read(Command::new("ldd").arg(builder.folder.join(program)))?;
    for library in linked.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/'))) {
        ensure!(
            root.join(library.trim_start_matches('/')).exists(),
            "{program} is linked with {library}, which is of none of the packages {}",
            PACKAGES.join(", ")
        );
    }
    Ok(())
}

/// Makes the base that programs are built on: this machine's release of Debian, with the toolchain that runs here.
pub(super) fn rust(builder: &Builder) -> Result<()> {
    let release = fs::read_to_string("/etc/os-release").context("failed to read /etc/os-release")?;
    let release = release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    let release = release.context("/etc/os-release names no release of Debian")?;
    let toolchain = process::read(Command::new("rustc").args(["--print", "sysroot"]).current_dir(workspace::root()))?;
    let container = builder.begin("scratch")?;
    let mut debian = Command::new("mmdebstrap");
    debian.args(["--quiet", "--variant=minbase", &format!("--include={TO_BUILD}"), release]);
    debian.arg(&container.root).env("SOURCE_DATE_EPOCH", &builder.timestamp);
    process::run(&mut debian)
        .context("mmdebstrap makes a Debian to build on (on Debian: apt-get install mmdebstrap)")?;
    for folder in ["bin", "lib"] {
        let from = Path::new(toolchain.trim()).join(folder);
        container.copy(&from, &format!("/usr/local/{folder}"))?;
    }
    // Crates come from where this machine gets them: whom it trusts on the way is its own affair.
    let trusted = Path::new("/").join(CERTIFICATES);
    put(&container.root, CERTIFICATES, &read(&trusted)?, 0o644)?;
    container.environment("CARGO_HOME=/usr/local/cargo")?;
    container.commit(RUST)
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
