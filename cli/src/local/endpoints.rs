//! `endpoints.json`: what a local cluster that runs writes of itself, for commands and for scripts.

use super::process::Process;
use super::state::{self, FORMAT};
use crate::error::problem;
use engram_api::Code;
use engram_worker::Listen;
use serde::{Deserialize, Serialize};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Its name in the state directory.
const FILE: &str = "endpoints.json";

/// A local cluster and where it listens. It is there while the cluster runs; a cluster that was killed leaves it behind,
/// which [`Endpoints::is_running`] sees.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Endpoints {
    /// Version of this structure.
    pub(crate) format_version: u32,
    /// The cluster, 32 hex digits.
    pub(crate) cluster: String,
    /// Its name.
    pub(crate) name: String,
    /// `engram up`.
    #[serde(flatten)]
    pub(crate) supervisor: Process,
    /// Whether all workers were ready once.
    pub(crate) ready: bool,
    /// Whether its listeners speak TLS, and the person's certificate is in the state directory.
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
    /// Its process; absent between its end and its restart.
    pub(crate) process: Option<Process>,
    /// Where it listens.
    pub(crate) address: SocketAddr,
    /// How often it was started again.
    pub(crate) restarts: u32,
}

/// A worker's process and addresses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct WorkerEndpoints {
    /// Its place in the cluster.
    pub(crate) ordinal: u32,
    /// Its process; absent between its end and its restart.
    pub(crate) process: Option<Process>,
    /// How often it was started again.
    pub(crate) restarts: u32,
    /// For clients.
    pub(crate) client: SocketAddr,
    /// For other workers.
    pub(crate) peer: SocketAddr,
    /// For administration.
    pub(crate) admin: SocketAddr,
    /// For metrics and health.
    pub(crate) http: SocketAddr,
}

impl WorkerEndpoints {
    /// Of a worker that has not been started yet.
    pub(crate) const fn new(ordinal: u32, listen: Listen) -> Self {
        let Listen { client, peer, admin, http } = listen;
        Self { ordinal, process: None, restarts: 0, client, peer, admin, http }
    }

    /// What people call it, and its log file.
    pub(crate) fn name(&self) -> String {
        format!("worker-{}", self.ordinal)
    }
}

impl Endpoints {
    /// Reads those of a state directory; `None` where there are none.
    ///
    /// # Errors
    /// They cannot be read, or are of a newer version.
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

    /// Writes them, replacing what is there in one step. They say nothing after a crash, so nobody waits for the disk.
    ///
    /// # Errors
    /// The file system refuses.
    pub(crate) fn write(&self, folder: &Path) -> anyhow::Result<()> {
        state::replace_json(&Self::path(folder), self)
    }

    /// Takes them away: the cluster has ended.
    pub(crate) fn remove(folder: &Path) {
        // One that stays is found to be of a process that has ended.
        let _ = std::fs::remove_file(Self::path(folder));
    }

    /// Whether the supervisor that wrote them still runs.
    pub(crate) fn is_running(&self) -> bool {
        self.format_version <= FORMAT && self.supervisor.is_alive()
    }

    fn path(folder: &Path) -> PathBuf {
        folder.join(FILE)
    }
}
