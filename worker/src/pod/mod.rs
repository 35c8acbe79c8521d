//! A worker in a pod: settings from the operator, a supervisor as the container's first process, and the orders of its hooks.
//!
//! ```text
//! kubelet ── engram-worker (PID 1, supervisor) ── engram-worker serve (the worker)
//!        │         └── certificates: asks the operator, renews
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
pub use identity::{Identity, Places};
pub use settings::{Place, Settings};
pub use supervisor::supervise;

use engram_memory::Member;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;

/// Where the operator's settings are mounted.
pub const SETTINGS: &str = "/etc/engram/cluster.json";
/// Where it is mounted whom the processes of the cluster believe.
pub const AUTHORITY: &str = "/etc/engram-ca";
/// Where a pod keeps its key and its certificate: in memory.
pub const IDENTITY: &str = "/run/engram";
/// The token with which a pod asks for its certificate.
pub const IDENTITY_TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount/engram-csr";
/// Where the disk is mounted.
pub const STATE: &str = "/var/lib/engram";
/// The file whose text the kubelet shows for a container that ended.
const TERMINATION_LOG: &str = "/dev/termination-log";

/// Leaves a line for whoever looks at the pod, where the kubelet offers a file for it.
pub fn tell_kubelet(line: &str) {
    if !Path::new(TERMINATION_LOG).exists() {
        return;
    }
    let opened = OpenOptions::new().append(true).open(TERMINATION_LOG);
    if let Err(error) = opened.and_then(|mut file| writeln!(file, "{line}")) {
        tracing::debug!(%error, "{TERMINATION_LOG} cannot be written");
    }
}

/// Says who runs in this container, before anybody hears of it. The kubelet tells it when the container has ended, however it did: then the
/// operator knows which process is no more, also when nobody was left to report it.
pub fn introduce(member: &Member) {
    tell_kubelet(&format!("worker {member}"));
}
