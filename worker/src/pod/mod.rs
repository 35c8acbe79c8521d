//! A worker in a pod: settings from the operator, a supervisor as the container's first process, and the commands of its hooks.
//!
//! ```text
//! kubelet ── engram-worker (PID 1, supervisor) ── engram-worker serve (the worker)
//!        │         └── certificates: requested from the operator, renewed
//!        └── engram-worker drain (preStop) ── admin.sock ──┘
//! ```

mod drain;
mod environment;
mod healthcheck;
mod identity;
mod settings;
mod socket;
mod supervisor;

pub use drain::drain;
pub use healthcheck::healthcheck;
pub use identity::{Identity, IdentityPaths};
pub use settings::{PodInfo, Settings};
pub use supervisor::supervise;

use engram_memory::Member;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;

/// Mount path of the operator's settings.
pub const SETTINGS: &str = "/etc/engram/cluster.json";
/// Mount path of the cluster's trust bundle.
pub const TRUST_BUNDLE: &str = "/etc/engram-ca";
/// Directory of the pod's key and certificate: in memory.
pub const IDENTITY: &str = "/run/engram";
/// Token with which a pod requests its certificate.
pub const IDENTITY_TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount/engram-csr";
/// Mount path of the disk.
pub const STATE: &str = "/var/lib/engram";
/// File whose text the kubelet shows for a container that ended.
const TERMINATION_LOG: &str = "/dev/termination-log";

/// Appends a line to the termination message of the container, if the kubelet offers a file for it.
pub fn write_termination_message(line: &str) {
    if !Path::new(TERMINATION_LOG).exists() {
        return;
    }
    let file = OpenOptions::new().append(true).open(TERMINATION_LOG);
    if let Err(error) = file.and_then(|mut file| writeln!(file, "{line}")) {
        tracing::debug!(%error, "failed to write {TERMINATION_LOG}");
    }
}

/// Announces which member runs in this container, before it becomes known to others. The kubelet publishes the message when the
/// container has ended, however it did: then the operator knows which process is dead, even if no supervisor was left to report it.
pub fn announce(member: &Member) {
    write_termination_message(&format!("worker {member}"));
}
