//! A cluster in this process: a coordinator with its map in a file, workers with stores in folders, loopback sockets.

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use engram_api::{Durability, DurabilityMode, LearnerClusterSpec};
use engram_client::{Client, Rows};
use engram_cluster::PartitionMap;
use engram_coordinator::Coordinator;
use engram_mapstore::{FileStore, MapStore as _};
use engram_memory::{ClusterId, Member, Ordinal, StoreId};
use engram_worker::{Addresses, Handle, Listen, Worker};
use futures::future::try_join_all;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::population::{self, PARTITIONS};

/// How long all workers may take until they serve, and until they have stopped.
const DEADLINE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(10);
/// Memories given to the cluster at once while it is filled.
const ROWS: u32 = 1 << 15;
const NAME: &str = "bench";
const ID: ClusterId = ClusterId(1);

/// What a cluster is like.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) workers: u32,
    /// Copies of each partition.
    pub(crate) copies: u32,
    pub(crate) durability: DurabilityMode,
}

impl Shape {
    /// One copy, in mode sync.
    pub(super) const fn plain(workers: u32) -> Self {
        Self { workers, copies: 1, durability: DurabilityMode::Sync }
    }
}

pub(super) struct Cluster {
    pub(super) client: Client,
    pub(super) addresses: Vec<Addresses>,
    workers: Vec<Running>,
    map: Arc<FileStore>,
    /// The disk of each worker.
    stores: BTreeMap<Ordinal, StoreId>,
    copies: usize,
    coordinator: Running,
    /// Removed when everything that writes there has ended.
    _folder: TempDir,
}

/// A part of the cluster that runs until it is told to stop.
struct Running {
    options: Option<engram_worker::Options>,
    stop: watch::Sender<bool>,
    task: JoinHandle<Result<()>>,
}

impl Cluster {
    /// A cluster that holds `memories` memories; `threads` for each worker's passes over them.
    pub(super) async fn filled(shape: Shape, memories: u32, threads: usize, scratch: &Path) -> Result<Self> {
        let cluster = Self::start(shape, memories, threads, scratch).await?;
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

    async fn start(shape: Shape, memories: u32, threads: usize, scratch: &Path) -> Result<Self> {
        let Shape { workers, copies, durability } = shape;
        let folder = tempfile::Builder::new().prefix("engram-bench-").tempdir_in(scratch);
        let folder = folder.with_context(|| format!("failed to make a folder in {}", scratch.display()))?;
        let mut spec = LearnerClusterSpec {
            partitions: PARTITIONS,
            replication_factor: copies,
            durability: Durability { mode: durability },
            ..LearnerClusterSpec::with_workers(workers)
        };
        // Nothing is to be evicted, however unevenly ids hash.
        spec.capacity.memories = 2 * u64::from(memories) + u64::from(PARTITIONS) * 1_000;
        let options = engram_coordinator::Options {
            replication_factor: copies,
            keeps_all: durability == DurabilityMode::Sync,
            ..engram_coordinator::Options::new(ID, NAME, PARTITIONS, workers)
        };
        let map = Arc::new(FileStore::open(folder.path(), ID)?);
        let coordinator = Coordinator::build(options, Arc::clone(&map) as _)?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("failed to listen")?;
        let coordinators = vec![listener.local_addr().context("failed to listen")?.to_string()];
        let coordinator = Running::start(None, |shutdown| async { Ok(coordinator.run(listener, shutdown).await?) });

        let (mut addresses, mut handles, mut running) = (Vec::new(), Vec::new(), Vec::new());
        for ordinal in 0..workers {
            let options = engram_worker::Options {
                cluster: ID,
                cluster_name: NAME.to_owned(),
                ordinal,
                state_dir: folder.path().join(format!("worker-{ordinal}")),
                listen: Listen::anywhere(IpAddr::V4(Ipv4Addr::LOCALHOST)),
                advertise_host: None,
                coordinators: coordinators.clone(),
                peer_detours: Default::default(),
                map_place: None,
                threads: Some(threads),
                machine_workers: None,
                gpu_deadline_ms: None,
                tls: None,
                inputs: None,
                snapshots: None,
                bootstrap: None,
                spec: spec.clone(),
            };
            let (worker, handle, reached) = Running::worker(options).await?;
            addresses.push(reached);
            handles.push(handle);
            running.push(worker);
        }
        until_ready(&handles).await?;
        let endpoints = addresses.iter().map(|addresses| addresses.client.to_string());
        let client = Client::connect(engram_client::Options::new(endpoints).of_cluster(ID)).await?;
        let stores = handles.iter().map(|handle| (handle.member().ordinal, handle.member().store)).collect();
        let copies = copies as usize;
        Ok(Self { client, addresses, workers: running, map, stores, copies, coordinator, _folder: folder })
    }

    /// Takes a worker's disk away and starts it again on an empty one. Answers how many copies were on it.
    pub(super) async fn lose(&mut self, ordinal: usize) -> Result<usize> {
        let worker = self.workers.remove(ordinal);
        let options = worker.options.clone().context("workers have options")?;
        let there = Ordinal(options.ordinal);
        let held = self.map()?.partitions.iter().filter(|entry| entry.isr.iter().any(|it| it.ordinal == there)).count();
        worker.stop().await?;
        fs::remove_dir_all(&options.state_dir).context("failed to remove the folder of a worker")?;
        let (worker, handle, _) = Running::worker(options).await?;
        self.workers.insert(ordinal, worker);
        self.stores.insert(there, handle.member().store);
        Ok(held)
    }

    /// Whether every partition has all its copies, on disks that are still there.
    pub(super) fn is_whole(&self) -> Result<bool> {
        let is_there = |member: &Member| self.stores.get(&member.ordinal) == Some(&member.store);
        Ok(self.map()?.partitions.iter().all(|entry| entry.isr.iter().filter(|it| is_there(it)).count() == self.copies))
    }

    fn map(&self) -> Result<PartitionMap> {
        self.map.get()?.context("a cluster that serves has a map")
    }

    /// Stops everything in order.
    pub(super) async fn stop(self) -> Result<()> {
        // All at once: each waits a while for copies on the others.
        let parts = self.workers.into_iter().chain([self.coordinator]);
        let stopped = try_join_all(parts.map(Running::stop));
        tokio::time::timeout(DEADLINE, stopped).await.context("the cluster did not stop in time")?.map(drop)
    }
}

impl Running {
    fn start<F>(
        options: Option<engram_worker::Options>,
        run: impl FnOnce(Pin<Box<dyn Future<Output = ()> + Send>>) -> F,
    ) -> Self
    where
        F: Future<Output = Result<()>> + Send + 'static,
    {
        let (stop, mut stopped) = watch::channel(false);
        let until_stopped = async move {
            // The sender is gone when the cluster is: that is a stop as well.
            let _ = stopped.wait_for(|stopped| *stopped).await;
        };
        Self { options, stop, task: tokio::spawn(run(Box::pin(until_stopped))) }
    }

    async fn worker(options: engram_worker::Options) -> Result<(Self, Handle, Addresses)> {
        let worker = Worker::build(options.clone()).await?;
        let (handle, addresses) = (worker.handle(), worker.addresses());
        let running = Self::start(Some(options), |shutdown| async { Ok(worker.run(shutdown).await?) });
        Ok((running, handle, addresses))
    }

    async fn stop(self) -> Result<()> {
        self.stop.send_replace(true);
        self.task.await.context("a part of the cluster panicked")?
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
