//! A cluster in this process: a coordinator with its map in a file, workers with stores in folders, loopback sockets.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use engram_api::LearnerClusterSpec;
use engram_client::{Client, Rows};
use engram_coordinator::Coordinator;
use engram_mapstore::FileStore;
use engram_memory::ClusterId;
use engram_worker::{Addresses, Handle, Listen, Worker};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::population::{self, PARTITIONS};

/// How long all workers may take until they serve, and until they have stopped.
const DEADLINE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(10);
/// Memories given to the cluster at once while it is filled.
const ROWS: u32 = 1 << 15;
const NAME: &str = "bench";
const ID: ClusterId = ClusterId(1);

pub(super) struct Cluster {
    pub(super) client: Client,
    pub(super) addresses: Vec<Addresses>,
    stop: watch::Sender<bool>,
    running: JoinSet<Result<()>>,
    /// Removed when everything that writes there has ended.
    _folder: TempDir,
}

impl Cluster {
    /// `workers` workers that hold `memories` memories together; `threads` each for the passes over them.
    pub(super) async fn filled(workers: u32, memories: u32, threads: usize, scratch: &Path) -> Result<Self> {
        let cluster = Self::start(workers, memories, threads, scratch).await?;
        let session = cluster.client.session();
        for start in (0..memories).step_by(ROWS as usize) {
            let ids: Vec<_> = (start..memories.min(start + ROWS)).map(population::id).collect();
            let weights = ids.iter().map(|id| population::uniform(*id).to_f64() as f32).collect();
            let groups = ids.iter().map(|id| population::group(*id)).collect();
            session.upsert(Rows { ids, weights, groups, ..Rows::default() }).await?;
        }
        let held = cluster.client.digest().await?.memories;
        ensure!(held == u64::from(memories), "{held} of {memories} memories are there");
        Ok(cluster)
    }

    async fn start(workers: u32, memories: u32, threads: usize, scratch: &Path) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("engram-bench-").tempdir_in(scratch);
        let folder = folder.with_context(|| format!("failed to make a folder in {}", scratch.display()))?;
        let (stop, stopped) = watch::channel(false);
        let until_stopped = || {
            let mut stopped = stopped.clone();
            async move {
                // The sender is gone when the cluster is: that is a stop as well.
                let _ = stopped.wait_for(|stopped| *stopped).await;
            }
        };
        let mut running = JoinSet::new();

        let mut spec = LearnerClusterSpec { partitions: PARTITIONS, ..LearnerClusterSpec::with_workers(workers) };
        // Nothing is to be evicted, however unevenly ids hash.
        spec.capacity.memories = 2 * u64::from(memories) + u64::from(PARTITIONS) * 1_000;
        let options =
            engram_coordinator::Options { cluster: ID, cluster_name: NAME.to_owned(), partitions: PARTITIONS, workers };
        let coordinator = Coordinator::build(options, Arc::new(FileStore::open(folder.path(), ID)?))?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("failed to listen")?;
        let coordinators = vec![listener.local_addr().context("failed to listen")?.to_string()];
        let shutdown = until_stopped();
        running.spawn(async move { Ok(coordinator.run(listener, shutdown).await?) });

        let (mut addresses, mut handles) = (Vec::new(), Vec::new());
        for ordinal in 0..workers {
            let options = engram_worker::Options {
                cluster: ID,
                cluster_name: NAME.to_owned(),
                ordinal,
                state_dir: folder.path().join(format!("worker-{ordinal}")),
                listen: Listen::anywhere(IpAddr::V4(Ipv4Addr::LOCALHOST)),
                advertise_host: None,
                coordinators: coordinators.clone(),
                threads: Some(threads),
                spec: spec.clone(),
            };
            let worker = Worker::build(options).await?;
            addresses.push(worker.addresses());
            handles.push(worker.handle());
            let shutdown = until_stopped();
            running.spawn(async move { Ok(worker.run(shutdown).await?) });
        }
        until_ready(&handles).await?;
        let endpoints = addresses.iter().map(|addresses| addresses.client.to_string());
        let client = Client::connect(engram_client::Options::new(endpoints).of_cluster(ID)).await?;
        Ok(Self { client, addresses, stop, running, _folder: folder })
    }

    /// Stops everything in order.
    pub(super) async fn stop(mut self) -> Result<()> {
        self.stop.send_replace(true);
        let ended = async {
            while let Some(ended) = self.running.join_next().await {
                ended.context("a part of the cluster panicked")??;
            }
            Ok(())
        };
        tokio::time::timeout(DEADLINE, ended).await.context("the cluster did not stop in time")?
    }
}

async fn until_ready(workers: &[Handle]) -> Result<()> {
    let started = Instant::now();
    while !workers.iter().all(Handle::is_ready) {
        ensure!(started.elapsed() < DEADLINE, "not all workers serve within {} s", DEADLINE.as_secs());
        tokio::time::sleep(POLL).await;
    }
    Ok(())
}
