//! `endpoints.json`: processes and addresses of a running local cluster, for commands and scripts.

use super::process::Process;
use super::state::{self, FORMAT};
use crate::error::problem;
use engram_api::Code;
use engram_worker::Listen;
use serde::{Deserialize, Serialize};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// File name in the state directory.
const FILE: &str = "endpoints.json";

/// Processes and addresses of a local cluster. The file exists while the cluster runs; a killed cluster leaves it behind, which
/// [`Endpoints::is_running`] detects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Endpoints {
    /// Version of the file format.
    pub(crate) format_version: u32,
    /// Cluster id, 32 hex digits.
    pub(crate) cluster: String,
    /// Cluster name.
    pub(crate) name: String,
    /// `engram up`.
    #[serde(flatten)]
    pub(crate) supervisor: Process,
    /// Whether all workers have been ready.
    pub(crate) ready: bool,
    /// Whether connections use TLS, with a client certificate in the state directory.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) tls: bool,
    /// The coordinator.
    pub(crate) coordinator: CoordinatorEndpoint,
    /// The workers, by ordinal.
    pub(crate) workers: Vec<WorkerEndpoints>,
}

/// The coordinator's process and address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CoordinatorEndpoint {
    /// Process; absent while restarting.
    pub(crate) process: Option<Process>,
    /// Listen address.
    pub(crate) address: SocketAddr,
    /// Number of restarts.
    pub(crate) restarts: u32,
}

/// A worker's process and addresses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct WorkerEndpoints {
    /// Number of the worker.
    pub(crate) ordinal: u32,
    /// Process; absent while restarting.
    pub(crate) process: Option<Process>,
    /// Number of restarts.
    pub(crate) restarts: u32,
    /// Client address.
    pub(crate) client: SocketAddr,
    /// Peer address.
    pub(crate) peer: SocketAddr,
    /// Admin address.
    pub(crate) admin: SocketAddr,
    /// HTTP address for metrics and health.
    pub(crate) http: SocketAddr,
}

impl WorkerEndpoints {
    /// Returns the endpoints of a worker that is not started yet.
    pub(crate) const fn new(ordinal: u32, listen: Listen) -> Self {
        let Listen { client, peer, admin, http } = listen;
        Self { ordinal, process: None, restarts: 0, client, peer, admin, http }
    }

    /// Returns the name of the worker and of its log.
    pub(crate) fn name(&self) -> String {
        format!("worker-{}", self.ordinal)
    }
}

impl Endpoints {
    /// Reads the file of a state directory; `None` if it does not exist.
    ///
    /// # Errors
    /// The file cannot be read, or has a newer format.
    pub(crate) fn read(folder: &Path) -> anyhow::Result<Option<Self>> {
        let path = Self::path(folder);
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(None);
            }
            Err(error) => {
                return Err(problem(
                    Code::StateDirectoryUnusable,
                    format!("failed to read {}: {error}", path.display()),
                ));
            }
        };
        state::check_format(&path, &text)?;
        let read = serde_json::from_str(&text);
        let damaged = |error| format!("{} is damaged: {error}", path.display());
        read.map(Some).map_err(|error| problem(Code::StateDirectoryUnusable, damaged(error)))
    }

    /// Replaces the file atomically, without sync: it is meaningless after a crash.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn write(&self, folder: &Path) -> anyhow::Result<()> {
        state::replace_json(&Self::path(folder), self)
    }

    /// Removes the file when the cluster stops.
    pub(crate) fn remove(folder: &Path) {
        // A stale file names a process that has exited.
        let _ = std::fs::remove_file(Self::path(folder));
    }

    /// Whether the supervisor that wrote the file is running.
    pub(crate) fn is_running(&self) -> bool {
        self.format_version <= FORMAT && self.supervisor.is_alive()
    }

    fn path(folder: &Path) -> PathBuf {
        folder.join(FILE)
    }
}
