//! What a machine has to have, and how a test says that it cannot run there.

use anyhow::Result;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Reason why tests cannot run here: reported, counted as skipped, never as passed.
#[derive(Debug, Clone)]
pub struct Skip(pub String);

impl Skip {
    /// Exit status of a program that was skipped.
    pub const STATUS: u8 = 77;
}

impl std::fmt::Display for Skip {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "skipped: {}", self.0)
    }
}

impl std::error::Error for Skip {}

/// Programs of the distribution, and the Debian package of each.
const COMMANDS: [(&str, &str); 12] = [
    ("containerd", "containerd"),
    ("ctr", "containerd"),
    ("runc", "runc"),
    ("iptables", "iptables"),
    ("nft", "nftables"),
    ("conntrack", "conntrack"),
    ("socat", "socat"),
    ("ethtool", "ethtool"),
    ("ipset", "ipset"),
    ("ip", "iproute2"),
    ("nsenter", "util-linux"),
    ("openssl", "openssl"),
];
/// Where distributions put the programs of the container network interface.
const CNI: [&str; 3] = ["/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"];

/// Fails with [`Skip`] where the machine lacks something. `containers`: nodes are real, not fake.
///
/// # Errors
/// [`Skip`], which names everything that is missing.
pub(crate) fn check(containers: bool) -> Result<()> {
    let mut missing: Vec<String> = Vec::new();
    if !nix::unistd::geteuid().is_root() {
        missing.push("root".into());
    } else if !namespaces() {
        missing.push("permission to make namespaces".into());
    }
    let mut packages: Vec<&str> = Vec::new();
    for (command, package) in COMMANDS {
        let needed = containers || matches!(command, "ip" | "nsenter" | "openssl");
        if needed && find(command).is_none() {
            packages.push(package);
        }
    }
    if containers && cni_programs().is_none() {
        packages.push("containernetworking-plugins");
    }
    packages.dedup();
    if !packages.is_empty() {
        missing.push(format!("Debian packages {}", packages.join(" ")));
    }
    if containers && !writable_cgroups() {
        missing.push("a cgroup hierarchy that can be written to".into());
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(Skip(format!("this machine lacks {}", missing.join("; "))).into())
}

/// The folder of the CNI programs.
pub(crate) fn cni_programs() -> Option<PathBuf> {
    CNI.iter().map(PathBuf::from).find(|folder| folder.join("bridge").is_file())
}

/// Search path of everything that runs in a node.
pub(crate) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A program of the distribution.
pub(crate) fn find(command: &str) -> Option<PathBuf> {
    PATH.split(':').map(|folder| Path::new(folder).join(command)).find(|path| path.is_file())
}

fn namespaces() -> bool {
    let tried = Command::new("unshare").args(["--net", "--mount", "--pid", "--uts", "--fork", "true"]).output();
    tried.is_ok_and(|it| it.status.success())
}

fn writable_cgroups() -> bool {
    let tried = crate::cgroup::hierarchies().first().map(|it| it.join("engram-try"));
    tried.is_some_and(|folder| std::fs::create_dir(&folder).and_then(|()| std::fs::remove_dir(&folder)).is_ok())
}
