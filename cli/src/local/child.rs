//! Child processes that `up` starts: workers and the coordinator.
//!
//! A child never outlives `up`: the kernel kills it with its parent (Linux), and it exits when its stdin, a pipe from the parent,
//! closes. `up` also closes the pipe for a graceful stop.

use anyhow::Context as _;
use engram_api::{Code, ExitCode};
use engram_coordinator::Coordinator;
use engram_identity::{ExpectedPeer, Files, Keys, Role};
use engram_mapstore::FileStore;
use engram_memory::ClusterId;
use engram_telemetry::{Log, LogFormat, Program, Spans};
use engram_worker::{Worker, exit};
use serde::{Deserialize, Serialize};
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// Time limit for remaining tasks at shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(200);

/// Configuration of the coordinator process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct CoordinatorOptions {
    /// Cluster id, 32 hex digits.
    pub(crate) cluster: String,
    pub(crate) cluster_name: String,
    /// Partitions of a new cluster.
    pub(crate) partitions: u32,
    /// Initial number of workers; a later goal overrides it.
    pub(crate) workers: u32,
    /// Replicas of each partition.
    pub(crate) replication_factor: u32,
    /// How long a single replica waits for a restarting peer, in milliseconds.
    pub(crate) restart_grace_ms: u64,
    /// Whether every log write is durable before it is acknowledged.
    pub(crate) keeps_all: bool,
    /// Folder of the partition map.
    pub(crate) state_dir: PathBuf,
    /// Listen address.
    pub(crate) listen: SocketAddr,
    /// Whether workers of a new cluster load a snapshot first.
    #[serde(default)]
    pub(crate) bootstraps: bool,
    /// Certificates; absent = plaintext.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tls: Option<Files>,
}

/// Runs a worker process.
pub(crate) fn worker(config: &Path) -> anyhow::Result<ExitCode> {
    engram_worker::count_panics();
    let options: engram_worker::Options = read(config)?;
    process("engram-worker", Spans::Sampled, move |stop| async move {
        let worker = Worker::build(options).await?;
        let handle = worker.handle();
        worker.run(stop).await?;
        Ok(if handle.restart_requested() { exit::RESTART } else { 0 })
    })
}

/// Runs the coordinator process.
pub(crate) fn coordinator(config: &Path) -> anyhow::Result<ExitCode> {
    let options: CoordinatorOptions = read(config)?;
    process("engram-coordinator", Spans::Tracing, move |stop| async move {
        let cluster: ClusterId = options.cluster.parse().ok().context("cluster is not 32 hex digits")?;
        let store = FileStore::open(&options.state_dir, cluster)?;
        let listener = TcpListener::bind(options.listen)
            .await
            .with_context(|| format!("failed to listen on {}", options.listen))?;
        let CoordinatorOptions { cluster_name, partitions, workers, replication_factor, keeps_all, tls, .. } = options;
        let options = engram_coordinator::Options {
            replication_factor,
            restart_grace: Duration::from_millis(options.restart_grace_ms),
            keeps_all,
            bootstraps: options.bootstraps,
            ..engram_coordinator::Options::new(cluster, cluster_name, partitions, workers)
        };
        let coordinator = Coordinator::build(options, Arc::new(store))?;
        let Some(tls) = tls else {
            coordinator.run(listener, stop).await?;
            return Ok(0);
        };
        let keys = Keys::open_for(tls, cluster, ExpectedPeer::any(Role::Coordinator))?;
        keys.watch();
        coordinator.run_with_tls(listener, keys, stop).await?;
        Ok(0)
    })
}

fn read<T: serde::de::DeserializeOwned>(config: &Path) -> anyhow::Result<T> {
    let text = std::fs::read(config).with_context(|| format!("failed to read {}", config.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("failed to parse {}", config.display()))
}

/// Runs `body` to completion and exits with its status. `body` receives a future that completes when the process should stop.
fn process<F: Future<Output = anyhow::Result<i32>>>(
    name: &'static str,
    spans: Spans,
    body: impl FnOnce(std::pin::Pin<Box<dyn Future<Output = ()> + Send>>) -> F,
) -> anyhow::Result<ExitCode> {
    #[cfg(target_os = "linux")]
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)
        .context("failed to tie this process to its parent")?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().context("failed to start threads")?;
    let telemetry = {
        let _entered = runtime.enter();
        let filter = engram_telemetry::environment_filter();
        let log = Log { filter: &filter, format: LogFormat::Text };
        engram_telemetry::start(Program { name, version: env!("CARGO_PKG_VERSION"), spans }, log)?
    };
    let parent = watch_stdin()?;
    let result = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).context("failed to listen for signals")?;
        let stop = Box::pin(async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = parent => {}
            }
        });
        body(stop).await
    });
    // Sends the last spans while the runtime still carries the connection.
    drop(telemetry);
    runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
    match result {
        Ok(0) => Ok(ExitCode::Ok),
        Ok(status) => std::process::exit(status),
        Err(error) => {
            // stderr is the log of this process.
            tracing::error!(error = format!("{error:#}"), "process failed");
            let _ = std::io::stderr().flush();
            std::process::exit(exit_status(&error))
        }
    }
}

/// Returns the exit status of a failed process.
fn exit_status(error: &anyhow::Error) -> i32 {
    match error.downcast_ref() {
        Some(engram_coordinator::Error::FixedSettingChanged { .. }) => exit::of_code(Code::Immutable),
        _ => exit::status(error),
    }
}

/// Completes when stdin closes: the parent has exited, or stops this process.
///
/// # Errors
/// A thread cannot be started.
pub(crate) fn watch_stdin() -> anyhow::Result<oneshot::Receiver<()>> {
    let (ended, parent) = oneshot::channel();
    let watch = move || {
        let mut byte = [0];
        while !matches!(std::io::stdin().read(&mut byte), Ok(0) | Err(_)) {}
        // The receiver is dropped if the process stops for another reason.
        let _ = ended.send(());
    };
    std::thread::Builder::new().name("engram-parent".into()).spawn(watch).context("failed to start a thread")?;
    Ok(parent)
}
