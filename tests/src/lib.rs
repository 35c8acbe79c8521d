//! Runs the real `engram` binary as users do, and cleans up all processes.
//!
//! The binary is `ENGRAM_BIN`, else the newer of `target/{release,debug}/engram`. Every cluster has its own state directory and free
//! ports. Tests wait for conditions with generous deadlines: they assert behavior, not speed. A cluster that is dropped in a panic
//! prints the end of every log.
#![forbid(unsafe_code)]

mod cluster;
mod command;
mod dashboard;
mod observability;
mod storage;

pub use cluster::{Cluster, ClusterBuilder, is_running};
pub use command::{CommandOutput, binary, engram};
pub use dashboard::{Dashboard, Panel};
pub use observability::{Jaeger, Prometheus, SpanRecord, page};
pub use storage::Storage;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Deadline for everything except runs, on a machine that executes other tests.
pub const DEADLINE: Duration = Duration::from_secs(60);
/// Poll interval of conditions.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Waits until `condition` returns a value.
///
/// # Panics
/// The deadline expires.
pub fn wait_for<T>(what: &str, deadline: Duration, mut condition: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(started.elapsed() < deadline, "timed out after {} s waiting for {what}", deadline.as_secs());
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Reports that this test cannot run here. `cargo xtask test` counts it as skipped.
pub fn skipped(reason: &str) {
    use std::io::Write as _;
    // Written directly and at once: the test harness captures eprintln, and output of other tests could interleave.
    let _ = std::io::stderr().lock().write_all(format!("skipped: {reason}\n").as_bytes());
}

/// Returns the root of the repository.
pub fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package is in a folder of the repository").to_owned()
}

/// Returns the manifest of a cluster; `more` is YAML below `spec`, indented by two.
pub fn cluster_manifest(name: &str, workers: u32, more: &str) -> String {
    format!(
        "apiVersion: engram.dev/v1alpha1\nkind: LearnerCluster\nmetadata:\n  name: {name}\nspec:\n  workers: {workers}\n{more}"
    )
}

/// Returns the manifest of a memory run; `memory` is YAML below `spec.memory`, indented by four.
pub fn run_manifest(name: &str, cluster: &str, memory: &str) -> String {
    format!(
        "apiVersion: engram.dev/v1alpha1\nkind: LearnerRun\nmetadata:\n  name: {name}\nspec:\n  clusterRef: {{ name: \
         {cluster} }}\n  kind: Memory\n  memory:\n{memory}"
    )
}
