//! Where the Kubernetes programs are.
//!
//! In this order: the folder that `KUBE_BIN` names; the cache of this version (`ENGRAM_KUBERNETES_CACHE`, else
//! `~/.cache/engram/kubernetes`); packed in `shared/kubernetes` next to the checkout; built from their Go modules into the cache,
//! with the sources and locked sums that lie in `programs/`. What was packed has to have the committed sums of the programs;
//! programs built here are trusted because their modules were checked.
//!
//! cert-manager is apart: one suite alone wants it, and it is in no pack.

use crate::requirements::{Skip, find as find_command};
use anyhow::{Context, Result, ensure};
use sha2::{Digest as _, Sha256};
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the committed sums say: `SHA256  NAME` a line.
const SUMS: &str = include_str!("../programs/SHA256SUMS");
/// The one program `kubernetes` is each of these, by the name that it is called by.
const COMPONENTS: [&str; 7] =
    ["etcd", "kubectl", "kubelet", "kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler"];
/// The program of cert-manager, and the folder of its CRDs next to it.
pub(crate) const CERT_MANAGER: &str = "cert-manager";
pub(crate) const DEFINITIONS: &str = "definitions";
/// What it is built from; another lock is another program.
const CERT_MANAGER_LOCK: &str = include_str!("../programs/source/cert-manager/go.sum");
/// Named last, when everything before it is whole.
const COMPLETE: &str = "complete";

/// The folder of the programs, each component by its own name.
///
/// # Errors
/// [`Skip`] where there are none and none can be built; a sum that does not fit; a failed build.
pub fn find() -> Result<PathBuf> {
    if let Some(folder) = std::env::var_os("KUBE_BIN") {
        let folder = PathBuf::from(folder);
        for name in COMPONENTS.iter().chain(&["coredns"]) {
            ensure!(folder.join(name).is_file(), "KUBE_BIN is {}, where {name} is missing", folder.display());
        }
        return Ok(fs::canonicalize(folder)?);
    }
    let cache = cache(SUMS)?;
    if cache.join(COMPLETE).is_file() {
        return Ok(cache);
    }
    let making = making(&cache)?;
    let packed = checkout().join("../shared/kubernetes");
    if packed.join("kubernetes.zst").is_file() {
        eprintln!("unpacking the Kubernetes programs into {}", cache.display());
        unpack(&packed, &making)?;
        check(&making)?;
    } else {
        build(
            "build",
            &making,
            "the Kubernetes programs from their Go modules, once; this takes a quarter of an hour",
        )?;
        // The modules were checked against their own sums. These here say only whether it is the same compiler's work.
        if let Err(error) = check(&making) {
            eprintln!("{error:#}; built here from the same sources, so they are used");
        }
    }
    for name in COMPONENTS {
        let link = making.join(name);
        if !link.is_symlink() {
            symlink("kubernetes", link)?;
        }
    }
    fs::write(making.join(COMPLETE), SUMS)?;
    finish(&making, cache)
}

/// The folder with cert-manager, [`CERT_MANAGER`] and its [`DEFINITIONS`]; built where it is not there.
///
/// # Errors
/// [`Skip`] where there is no Go to build it with; a failed build.
pub(crate) fn cert_manager() -> Result<PathBuf> {
    let cache = cache(CERT_MANAGER_LOCK)?;
    if !cache.join(CERT_MANAGER).is_file() {
        let making = making(&cache)?;
        build("build-cert-manager", &making, "cert-manager from its Go modules, once; this takes minutes")?;
        return finish(&making, cache);
    }
    Ok(cache)
}

/// An empty folder next to the final name: a folder with the final name is complete.
fn making(cache: &Path) -> Result<PathBuf> {
    let making = cache.with_extension("making");
    if making.exists() {
        fs::remove_dir_all(&making)?;
    }
    fs::create_dir_all(&making).with_context(|| format!("failed to make {}", making.display()))?;
    Ok(making)
}

fn finish(making: &Path, cache: PathBuf) -> Result<PathBuf> {
    if cache.exists() {
        fs::remove_dir_all(&cache)?;
    }
    fs::rename(making, &cache)?;
    Ok(cache)
}

/// One folder for each set of sums.
fn cache(sums: &str) -> Result<PathBuf> {
    let root = match std::env::var_os("ENGRAM_KUBERNETES_CACHE") {
        Some(folder) => PathBuf::from(folder),
        None => match std::env::var_os("HOME") {
            Some(home) => PathBuf::from(home).join(".cache/engram/kubernetes"),
            None => return Err(Skip("neither KUBE_BIN, ENGRAM_KUBERNETES_CACHE nor HOME is set".into()).into()),
        },
    };
    Ok(std::path::absolute(root)?.join(&hexadecimal(&Sha256::digest(sums))[..16]))
}

fn unpack(packed: &Path, folder: &Path) -> Result<()> {
    for (name, _) in sums() {
        let path = packed.join(format!("{name}.zst"));
        let file = File::open(&path).with_context(|| format!("failed to open {}", path.display()))?;
        let mut reader = zstd::Decoder::new(file)?;
        // They were packed with a long window.
        reader.window_log_max(27)?;
        let target = folder.join(name);
        io::copy(&mut reader, &mut File::create(&target)?).with_context(|| format!("failed to unpack {name}"))?;
        fs::set_permissions(&target, fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

/// Runs a script of `programs/` that builds `what` into a folder.
fn build(script: &str, folder: &Path, what: &str) -> Result<()> {
    let go = std::env::var_os("PATH").is_some_and(|it| std::env::split_paths(&it).any(|it| it.join("go").is_file()));
    if !go && find_command("go").is_none() {
        let why = "some programs of the test cluster are neither here nor packed (KUBE_BIN names a folder of the Kubernetes \
            programs), and there is no Go (1.26 or later) to build them with";
        return Err(Skip(why.into()).into());
    }
    eprintln!("building {what} on two cores");
    let status = Command::new(checkout().join("tests/kubernetes/programs").join(script)).arg(folder).status()?;
    ensure!(status.success(), "programs/{script} failed ({status})");
    Ok(())
}

/// Whether the programs are those whose sums are committed.
fn check(folder: &Path) -> Result<()> {
    for (name, sum) in sums() {
        let found = sum_of(&folder.join(name))?;
        ensure!(found == sum, "{name} has the SHA-256 sum {found}, and programs/SHA256SUMS says {sum}");
    }
    Ok(())
}

fn sums() -> impl Iterator<Item = (&'static str, &'static str)> {
    SUMS.lines().filter_map(|line| line.split_once("  ")).map(|(sum, name)| (name, sum))
}

fn sum_of(path: &Path) -> Result<String> {
    let mut file = File::open(path).with_context(|| format!("failed to open {}", path.display()))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let length = file.read(&mut buffer).with_context(|| format!("failed to read {}", path.display()))?;
        if length == 0 {
            break;
        }
        hash.update(&buffer[..length]);
    }
    Ok(hexadecimal(&hash.finalize()))
}

pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("the package lies two folders down").to_owned()
}
