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

/// Limit for all workers to start serving, and to stop.
const DEADLINE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(10);
/// Memories per batch while the cluster is filled.
const ROWS: u32 = 1 << 15;
const NAME: &str = "bench";
const ID: ClusterId = ClusterId(1);

/// Configuration of a cluster.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) workers: u32,
    /// Replicas of each partition.
    pub(crate) replicas: u32,
    pub(crate) durability: DurabilityMode,
}

impl Shape {
    /// Returns a configuration with one replica, in mode sync.
    pub(super) const fn plain(workers: u32) -> Self {
        Self { workers, replicas: 1, durability: DurabilityMode::Sync }
    }
}

pub(super) struct Cluster {
    pub(super) client: Client,
    pub(super) addresses: Vec<Addresses>,
    workers: Vec<Running>,
    map: Arc<FileStore>,
    /// Store identity of each worker.
    stores: BTreeMap<Ordinal, StoreId>,
    replicas: usize,
    coordinator: Running,
    /// Removed after everything that writes there has stopped.
    _folder: TempDir,
}

/// A part of the cluster that runs until it is stopped.
struct Running {
    options: Option<engram_worker::Options>,
    stop: watch::Sender<bool>,
    task: JoinHandle<Result<()>>,
}

impl Cluster {
    /// Starts a cluster with `memories` memories; each worker uses `threads` threads for passes.
    pub(super) async fn start_filled(shape: Shape, memories: u32, threads: usize, scratch: &Path) -> Result<Self> {
        let cluster = Self::start(shape, memories, threads, scratch).await?;
        let session = cluster.client.session();
        for start in (0..memories).step_by(ROWS as usize) {
            let ids: Vec<_> = (start..memories.min(start + ROWS)).map(population::id).collect();
            let weights = ids.iter().map(|id| population::uniform(*id).to_f64() as f32).collect();
            let groups = ids.iter().map(|id| population::group(*id)).collect();
            session.upsert(Rows { ids, weights, groups, ..Rows::default() }).await?;
        }
        let held = cluster.client.digest().await?.memories;
        ensure!(held == u64::from(memories), "{held} of {memories} memories were inserted");
        Ok(cluster)
    }

    /// Starts an empty cluster with room for twice as many memories.
    pub(super) async fn start(shape: Shape, memories: u32, threads: usize, scratch: &Path) -> Result<Self> {
        let Shape { workers, replicas, durability } = shape;
        let folder = tempfile::Builder::new().prefix("engram-bench-").tempdir_in(scratch);
        let folder = folder.with_context(|| format!("failed to create a folder in {}", scratch.display()))?;
        let mut spec = LearnerClusterSpec {
            partitions: PARTITIONS,
            replication_factor: replicas,
            durability: Durability { mode: durability },
            ..LearnerClusterSpec::with_workers(workers)
        };
        // Large enough that no memory is evicted, however unevenly ids hash.
        spec.capacity.memories = 2 * u64::from(memories) + u64::from(PARTITIONS) * 1_000;
        let options = engram_coordinator::Options {
            replication_factor: replicas,
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
                listen: Listen::any_port(IpAddr::V4(Ipv4Addr::LOCALHOST)),
                advertise_host: None,
                coordinators: coordinators.clone(),
                peer_detours: Default::default(),
                map_location: None,
                threads: Some(threads),
                machine_workers: None,
                local_files: None,
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
        let client = Client::connect(engram_client::Options::new(endpoints).with_cluster(ID)).await?;
        let stores = handles.iter().map(|handle| (handle.member().ordinal, handle.member().store)).collect();
        let replicas = replicas as usize;
        Ok(Self { client, addresses, workers: running, map, stores, replicas, coordinator, _folder: folder })
    }

    /// Returns a client of the peer listeners, as the driver of a run uses it.
    pub(super) async fn peer_client(&self) -> Result<Client> {
        let endpoints = self.addresses.iter().map(|addresses| addresses.peer.to_string());
        let mut options = engram_client::Options::new(endpoints).with_cluster(ID);
        options.plane = engram_client::Plane::Peer;
        Ok(Client::connect(options).await?)
    }

    /// Replaces a worker's disk by an empty one and restarts it. Returns the number of lost replicas.
    pub(super) async fn lose_disk(&mut self, ordinal: usize) -> Result<usize> {
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

    /// Returns whether every partition has all its replicas, on disks that still exist.
    pub(super) fn is_fully_replicated(&self) -> Result<bool> {
        let is_there = |member: &Member| self.stores.get(&member.ordinal) == Some(&member.store);
        Ok(self
            .map()?
            .partitions
            .iter()
            .all(|entry| entry.isr.iter().filter(|it| is_there(it)).count() == self.replicas))
    }

    fn map(&self) -> Result<PartitionMap> {
        self.map.get()?.context("a cluster that serves has a map")
    }

    /// Stops everything in order.
    pub(super) async fn stop(self) -> Result<()> {
        // All at once: each waits for replicas on the others.
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
            // A dropped sender also means stop.
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
        ensure!(started.elapsed() < DEADLINE, "workers did not start serving within {} s", DEADLINE.as_secs());
        tokio::time::sleep(POLL).await;
    }
    Ok(())
}
