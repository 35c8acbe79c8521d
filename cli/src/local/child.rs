//! What runs inside the processes that `up` starts.
//!
//! Such a process ends when `up` does, however that ends: the kernel kills it with its parent (Linux), and it watches the
//! pipe that is its stdin, whose other end closes with the parent. The pipe is also how `up` stops it in order.

use anyhow::Context as _;
use engram_api::ExitCode;
use engram_coordinator::Coordinator;
use engram_identity::{Expected, Files, Keys, Role};
use engram_mapstore::FileStore;
use engram_memory::ClusterId;
use engram_worker::{Worker, exit as cause};
use serde::{Deserialize, Serialize};
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// How long tasks may hold up the end of a process that has done its work.
const END: Duration = Duration::from_millis(200);

/// What the coordinator is told at its start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct CoordinatorOptions {
    /// The cluster, 32 hex digits.
    pub(crate) cluster: String,
    /// Its name.
    pub(crate) cluster_name: String,
    /// Partitions of a new cluster.
    pub(crate) partitions: u32,
    /// Workers that it consists of, unless people ordered another number since.
    pub(crate) workers: u32,
    /// Copies of each partition.
    pub(crate) replication_factor: u32,
    /// How long a lone copy waits for a partner that is started again, in milliseconds.
    pub(crate) restart_grace_ms: u64,
    /// Whether every log write is durable before it is acknowledged.
    pub(crate) keeps_all: bool,
    /// Folder of the map.
    pub(crate) state_dir: PathBuf,
    /// Where it listens.
    pub(crate) listen: SocketAddr,
    /// Whether a new cluster begins from a snapshot, which its workers load.
    #[serde(default)]
    pub(crate) bootstraps: bool,
    /// Certificates; absent = in clear.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tls: Option<Files>,
}

/// Runs a worker.
///
/// # Errors
/// It cannot start, or failed.
pub(crate) fn worker(config: &Path) -> anyhow::Result<ExitCode> {
    let options: engram_worker::Options = read(config)?;
    process(move |stop| async move {
        let worker = Worker::build(options).await?;
        let handle = worker.handle();
        worker.run(stop).await?;
        Ok(if handle.begins_again() { cause::AGAIN } else { 0 })
    })
}

/// Runs the coordinator.
///
/// # Errors
/// It cannot start, or failed.
pub(crate) fn coordinator(config: &Path) -> anyhow::Result<ExitCode> {
    let options: CoordinatorOptions = read(config)?;
    process(move |stop| async move {
        let cluster: ClusterId = options.cluster.parse().ok().context("cluster: allowed are 32 hex digits")?;
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
        let keys = Keys::open_for(tls, cluster, Expected::any(Role::Coordinator))?;
        keys.follow();
        coordinator.run_secured(listener, keys, stop).await?;
        Ok(0)
    })
}

fn read<T: serde::de::DeserializeOwned>(config: &Path) -> anyhow::Result<T> {
    let text = std::fs::read(config).with_context(|| format!("failed to read {}", config.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("{} is not what it should be", config.display()))
}

/// Runs `body` until it ends, with the status of the process; it is given what completes when the process shall stop.
fn process<F: Future<Output = anyhow::Result<i32>>>(
    body: impl FnOnce(std::pin::Pin<Box<dyn Future<Output = ()> + Send>>) -> F,
) -> anyhow::Result<ExitCode> {
    #[cfg(target_os = "linux")]
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)
        .context("failed to tie this process to its parent")?;
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::try_from_env("ENGRAM_LOG").unwrap_or_else(|_| "info".into()))
        .with_ansi(false)
        .with_writer(std::io::stderr)
        // It would tell of a line that cannot be written (the log's disk is full) on stderr, which is the log, and panic there.
        .log_internal_errors(false)
        .init();
    let parent = watch_parent()?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().context("failed to start threads")?;
    let result = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).context("failed to listen for signals")?;
        let stop = Box::pin(async move {
            tokio::select! {
                _ = terminate.recv() => {}
                // An error means that the thread is gone, which nothing but the end of stdin brings about.
                _ = parent => {}
            }
        });
        body(stop).await
    });
    runtime.shutdown_timeout(END);
    match result {
        Ok(0) => Ok(ExitCode::Ok),
        Ok(status) => std::process::exit(status),
        Err(error) => {
            // The log is what people read after a failure; it is this process's stderr.
            tracing::error!(error = format!("{error:#}"), "ended");
            let _ = std::io::stderr().flush();
            std::process::exit(cause::status(&error))
        }
    }
}

/// Completes when stdin ends: the parent is gone, or wants this process to stop.
fn watch_parent() -> anyhow::Result<oneshot::Receiver<()>> {
    let (ended, parent) = oneshot::channel();
    let watch = move || {
        let mut byte = [0];
        while !matches!(std::io::stdin().read(&mut byte), Ok(0) | Err(_)) {}
        // The receiver is gone when the process stops for another reason.
        let _ = ended.send(());
    };
    std::thread::Builder::new().name("engram-parent".into()).spawn(watch).context("failed to start a thread")?;
    Ok(parent)
}
