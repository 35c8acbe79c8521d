//! Starts the real `engram` binary, talks to it as users do, and sees to it that nothing is left running.
//!
//! The binary is `ENGRAM_BIN`, else the newer of `target/{release,debug}/engram`. Every cluster has a state directory of its
//! own and free ports. Waits are for conditions, each with a deadline that is generous: a test says what happens, not how fast.
//! A cluster that is dropped in a panic prints the end of every log.
#![forbid(unsafe_code)]

mod cluster;
mod command;
mod storage;

pub use cluster::{Cluster, Up, is_running};
pub use command::{Ran, binary, engram};
pub use storage::Storage;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Long enough for anything but a run, on a machine that is busy with other tests.
pub const DEADLINE: Duration = Duration::from_secs(60);
/// Between looks at a condition.
const LOOK: Duration = Duration::from_millis(20);

/// Waits until `condition` gives something.
///
/// # Panics
/// It does not within `deadline`.
pub fn wait_for<T>(what: &str, deadline: Duration, mut condition: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = condition() {
            return found;
        }
        assert!(began.elapsed() < deadline, "waited {} s for {what}", deadline.as_secs());
        std::thread::sleep(LOOK);
    }
}

/// The checkout that this package was built in.
pub fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package lies in the checkout").to_owned()
}

/// A cluster of this name with so many workers, as a manifest; `more` is YAML below `spec`, indented by two.
pub fn cluster_manifest(name: &str, workers: u32, more: &str) -> String {
    format!(
        "apiVersion: engram.dev/v1alpha1\nkind: LearnerCluster\nmetadata:\n  name: {name}\nspec:\n  workers: {workers}\n{more}"
    )
}

/// A memory run as a manifest; `memory` is YAML below `spec.memory`, indented by four.
pub fn run_manifest(name: &str, cluster: &str, memory: &str) -> String {
    format!(
        "apiVersion: engram.dev/v1alpha1\nkind: LearnerRun\nmetadata:\n  name: {name}\nspec:\n  clusterRef: {{ name: \
         {cluster} }}\n  kind: Memory\n  memory:\n{memory}"
    )
}
