//! A cluster of processes, as started by `engram up`.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use engram_client::{Client, Options, Rows};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::population;

const READY: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);
/// Memories per batch while the cluster is filled.
const ROWS: u32 = 1 << 15;
/// State directory in its folder.
const STATE: &str = "state";

/// Processes of `engram up`, stopped on drop.
pub(super) struct Cluster {
    up: Child,
    endpoints: Vec<String>,
    workers: Vec<u64>,
    folder: TempDir,
}

impl Cluster {
    /// Starts a cluster of this `spec` with `spawn`.
    pub(super) fn start(
        scratch: &Path,
        spec: &Value,
        spawn: impl FnOnce(&mut Command) -> Result<Child>,
    ) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("engram-bench-").tempdir_in(scratch)?;
        let manifest = folder.path().join("cluster.yaml");
        let whole = json!({
            "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerCluster", "metadata": { "name": "bench" }, "spec": spec,
        });
        fs::write(&manifest, whole.to_string())?;
        let mut command = engram()?;
        command.arg("up").arg(&manifest).args(["--port-base", "0", "--state-dir"]).arg(folder.path().join(STATE));
        let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let up = spawn(command).context("failed to start engram up")?;
        let mut cluster = Self { up, endpoints: Vec::new(), workers: Vec::new(), folder };
        cluster.wait_until_ready()?;
        Ok(cluster)
    }

    /// Returns the addresses of its workers for clients.
    pub(super) fn endpoints(&self) -> &[String] {
        &self.endpoints
    }

    /// Returns its folder, which is removed with the cluster.
    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Kills a worker with SIGKILL; `engram up` starts it again.
    pub(super) fn kill_worker(&self, index: usize) -> Result<()> {
        let pid = self.workers.get(index).context("there is no such worker")?;
        kill(Pid::from_raw(i32::try_from(*pid)?), Signal::SIGKILL).context("failed to kill a worker")
    }

    /// Runs `engram` with these arguments on this cluster, and returns its output.
    pub(super) fn engram<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Result<Vec<u8>> {
        let mut command = engram()?;
        command.args(arguments).arg("--state-dir").arg(self.folder.path().join(STATE));
        let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output().context("failed to run engram")?;
        ensure!(output.status.success(), "engram exited with {}", output.status);
        Ok(output.stdout)
    }

    /// Returns a client, after inserting `memories` memories.
    pub(super) async fn connect_and_fill(&self, memories: u32) -> Result<Client> {
        let client = Client::connect(Options::new(self.endpoints.iter().cloned())).await?;
        let session = client.session();
        for start in (0..memories).step_by(ROWS as usize) {
            let ids: Vec<_> = (start..memories.min(start + ROWS)).map(population::id).collect();
            let weights = ids.iter().map(|id| population::uniform(*id).to_f64() as f32).collect();
            session.upsert(Rows { ids, weights, ..Rows::default() }).await?;
        }
        Ok(client)
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let begun = Instant::now();
        let file = self.folder.path().join(STATE).join("endpoints.json");
        loop {
            ensure!(begun.elapsed() < READY, "engram up is not ready within {} s", READY.as_secs());
            ensure!(self.up.try_wait()?.is_none(), "engram up has exited");
            std::thread::sleep(POLL);
            // There is no file before the first write.
            let Ok(text) = fs::read_to_string(&file) else { continue };
            let endpoints: Value = serde_json::from_str(&text).context("endpoints.json is not JSON")?;
            if endpoints["ready"] == true {
                let workers = endpoints["workers"].as_array().context("endpoints.json has no workers")?;
                let addresses = workers.iter().filter_map(|it| it["client"].as_str().map(str::to_owned));
                self.endpoints = addresses.collect();
                self.workers = workers.iter().filter_map(|it| it["process"]["pid"].as_u64()).collect();
                return Ok(());
            }
        }
    }

    /// Returns the resident memory of all workers.
    pub(super) fn resident_mib(&self) -> Result<f64> {
        let mut kib = 0.0;
        for worker in &self.workers {
            let status = fs::read_to_string(format!("/proc/{worker}/status")).context("a worker has exited")?;
            let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
            kib += line.trim().trim_end_matches(" kB").parse::<f64>().context("VmRSS is no number")?;
        }
        Ok(kib / 1024.0)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let up = Pid::from_raw(self.up.id().cast_signed());
        if kill(up, Signal::SIGTERM).is_ok() {
            // It stops its workers; a worker that does not stop is leaked.
            let _ = self.up.wait();
        }
    }
}

/// Returns the `engram` binary that was built with this program.
fn engram() -> Result<Command> {
    Ok(Command::new(std::env::current_exe()?.with_file_name("engram")))
}
