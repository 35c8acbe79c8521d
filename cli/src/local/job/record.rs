//! Record of a run of kind `Job` in the state directory.

use crate::local::process::Process;
use crate::local::state;
use anyhow::Context as _;
use engram_api::Code;
use engram_api::status::{JobStatus, ProcessPhase};
use engram_proto::v1::{RunPhase, RunStatus};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// File of a record.
const FILE: &str = "status.json";

/// State of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum JobPhase {
    Running,
    Succeeded,
    Failed,
    Cancelled,
}

/// State of a run and its processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct JobRecord {
    pub(crate) name: String,
    pub(crate) spec_fingerprint: String,
    pub(crate) phase: JobPhase,
    /// Why it failed.
    pub(crate) message: String,
    pub(crate) replicas: u32,
    /// Process of the command that executes it.
    pub(crate) supervisor: Process,
    /// Start and end in milliseconds since 1970.
    pub(crate) started_ms: u64,
    pub(crate) ended_ms: Option<u64>,
    pub(crate) status: JobStatus,
}

impl JobRecord {
    /// Creates the record of a run that starts now.
    pub(crate) fn new(name: &str, spec_fingerprint: String, replicas: u32) -> Self {
        Self {
            name: name.to_owned(),
            spec_fingerprint,
            phase: JobPhase::Running,
            message: String::new(),
            replicas,
            supervisor: Process::this(),
            started_ms: now_ms(),
            ended_ms: None,
            status: JobStatus::default(),
        }
    }

    /// Returns the folder of the job called `name`.
    pub(crate) fn folder(state_dir: &Path, name: &str) -> PathBuf {
        jobs(state_dir).join(name)
    }

    /// Reads the record of the job called `name`; `None` if there is none. One whose command was killed has failed.
    ///
    /// # Errors
    /// The record cannot be read.
    pub(crate) fn read(state_dir: &Path, name: &str) -> anyhow::Result<Option<Self>> {
        let path = Self::folder(state_dir, name).join(FILE);
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).with_context(|| format!("failed to read {}", path.display())),
        };
        let mut record: Self =
            serde_json::from_slice(&text).with_context(|| format!("failed to parse {}", path.display()))?;
        if record.phase == JobPhase::Running && !record.supervisor.is_alive() {
            record.phase = JobPhase::Failed;
            record.message = "the command that executed the run was killed, and its processes with it".into();
            record.status.active = 0;
            for process in record.status.processes.iter_mut().filter(|it| it.phase == ProcessPhase::Running) {
                (process.phase, process.reason) = (ProcessPhase::Failed, Some("Killed".into()));
            }
        }
        Ok(Some(record))
    }

    /// Reads all records, by name.
    ///
    /// # Errors
    /// A record cannot be read.
    pub(crate) fn all(state_dir: &Path) -> anyhow::Result<Vec<Self>> {
        let folders = std::fs::read_dir(jobs(state_dir)).into_iter().flatten().flatten();
        let mut names: Vec<String> = folders.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names.iter().filter_map(|name| Self::read(state_dir, name).transpose()).collect()
    }

    /// Writes the record.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn save(&self, state_dir: &Path) -> anyhow::Result<()> {
        state::replace_json(&Self::folder(state_dir, &self.name).join(FILE), self)
    }

    /// Removes the record and the logs.
    ///
    /// # Errors
    /// The folder cannot be removed.
    pub(crate) fn remove(&self, state_dir: &Path) -> anyhow::Result<()> {
        let folder = Self::folder(state_dir, &self.name);
        std::fs::remove_dir_all(&folder).with_context(|| format!("failed to remove {}", folder.display()))
    }

    /// Ends the run.
    pub(super) fn end(&mut self, phase: JobPhase, message: String) {
        (self.phase, self.message, self.ended_ms) = (phase, message, Some(now_ms()));
        self.status.active = 0;
    }

    /// Returns the record as the status of a run: an epoch is a process that has succeeded.
    pub(crate) fn run_status(&self) -> RunStatus {
        let phase = match self.phase {
            JobPhase::Running => RunPhase::Running,
            JobPhase::Succeeded => RunPhase::Succeeded,
            JobPhase::Failed => RunPhase::Failed,
            JobPhase::Cancelled => RunPhase::Cancelled,
        };
        let JobStatus { active, succeeded, failed, .. } = self.status;
        let elapsed_ms = self.ended_ms.unwrap_or_else(now_ms).saturating_sub(self.started_ms);
        let code = if self.phase == JobPhase::Failed { Code::RunFailed.id() } else { "" };
        let metrics = [("active", active), ("succeeded", succeeded), ("failed", failed)];
        RunStatus {
            name: self.name.clone(),
            phase: phase.into(),
            epoch: u64::try_from(succeeded).unwrap_or_default(),
            epochs: self.replicas.into(),
            elapsed_seconds: elapsed_ms as f64 / 1_000.0,
            eta_seconds: -1.0,
            message: self.message.clone(),
            code: code.to_owned(),
            metrics: metrics.map(|(name, value)| (name.to_owned(), f64::from(value))).into(),
            kind: "Job".into(),
            ended_ms: self.ended_ms.unwrap_or_default(),
            spec_fingerprint: self.spec_fingerprint.clone(),
            ..RunStatus::default()
        }
    }
}

fn jobs(state_dir: &Path) -> PathBuf {
    state_dir.join("jobs")
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
