//! A cluster in one process: a coordinator with a map in a file, workers with stores in folders, loopback sockets.

use engram_api::LearnerClusterSpec;
use engram_client::{Client, Options as ClientOptions};
use engram_coordinator::{Coordinator, Options as CoordinatorOptions};
use engram_mapstore::FileStore;
use engram_memory::ClusterId;
use engram_proto::v1::memory_service_client::MemoryServiceClient;
use engram_worker::{Addresses, Error, Handle, Listen, Options, Worker};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::Channel;

pub(crate) const CLUSTER: ClusterId = ClusterId(0x00e0_0001);

pub(crate) struct Cluster {
    folder: TempDir,
    spec: LearnerClusterSpec,
    coordinator: String,
    workers: Vec<Option<Running>>,
}

struct Running {
    addresses: Addresses,
    handle: Handle,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), Error>>,
}

/// A specification with few partitions, so that each has several rows.
pub(crate) fn spec(workers: u32, partitions: u32) -> LearnerClusterSpec {
    LearnerClusterSpec { partitions, ..LearnerClusterSpec::with_workers(workers) }
}

impl Cluster {
    pub(crate) async fn start(spec: LearnerClusterSpec) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = FileStore::open(folder.path(), CLUSTER).unwrap();
        let options = CoordinatorOptions {
            cluster: CLUSTER,
            cluster_name: "test".into(),
            partitions: spec.partitions,
            workers: spec.workers,
        };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let coordinator = listener.local_addr().unwrap().to_string();
        let built = Coordinator::build(options, Arc::new(store)).unwrap();
        tokio::spawn(built.run(listener, std::future::pending()));
        let workers = (0..spec.workers).map(|_| None).collect();
        let mut cluster = Self { folder, spec, coordinator, workers };
        for ordinal in 0..cluster.spec.workers {
            cluster.start_worker(ordinal).await;
        }
        cluster.ready().await;
        cluster
    }

    pub(crate) fn options(&self, ordinal: u32) -> Options {
        Options {
            cluster: CLUSTER,
            cluster_name: "test".into(),
            ordinal,
            state_dir: self.folder.path().join(format!("worker-{ordinal}")),
            listen: Listen::anywhere(IpAddr::V4(Ipv4Addr::LOCALHOST)),
            advertise_host: None,
            coordinators: vec![self.coordinator.clone()],
            threads: Some(1),
            spec: self.spec.clone(),
        }
    }

    pub(crate) async fn start_worker(&mut self, ordinal: u32) {
        let worker = Worker::build(self.options(ordinal)).await.unwrap();
        let (addresses, handle) = (worker.addresses(), worker.handle());
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(worker.run(async {
            let _ = stopped.await;
        }));
        self.workers[ordinal as usize] = Some(Running { addresses, handle, stop, task });
    }

    /// Stops a worker in order.
    pub(crate) async fn stop_worker(&mut self, ordinal: u32) {
        let running = self.workers[ordinal as usize].take().expect("it runs");
        drop(running.handle);
        running.stop.send(()).unwrap();
        running.task.await.unwrap().unwrap();
    }

    /// Starts a worker that has stopped by itself.
    pub(crate) async fn start_again(&mut self, ordinal: u32) {
        let running = self.workers[ordinal as usize].take().expect("it ran");
        running.task.await.unwrap().unwrap();
        self.start_worker(ordinal).await;
        self.ready().await;
    }

    /// Waits until every worker that runs serves all that is its own.
    pub(crate) async fn ready(&self) {
        let all = || self.workers.iter().flatten().all(|running| running.handle.is_ready());
        until("all workers are ready", || async { all() }).await;
    }

    pub(crate) fn addresses(&self, ordinal: u32) -> Addresses {
        self.workers[ordinal as usize].as_ref().expect("it runs").addresses
    }

    pub(crate) fn endpoint(&self, ordinal: u32) -> String {
        self.addresses(ordinal).client.to_string()
    }

    pub(crate) async fn client(&self) -> Client {
        let endpoints: Vec<String> =
            self.workers.iter().flatten().map(|running| running.addresses.client.to_string()).collect();
        Client::connect(ClientOptions::new(endpoints).of_cluster(CLUSTER)).await.unwrap()
    }

    /// A bare client of one worker, which knows no map.
    pub(crate) async fn bare(&self, ordinal: u32) -> MemoryServiceClient<Channel> {
        let channel = self.channel(ordinal).await;
        MemoryServiceClient::new(channel).max_encoding_message_size(usize::MAX)
    }

    pub(crate) async fn channel(&self, ordinal: u32) -> Channel {
        let endpoint = format!("http://{}", self.endpoint(ordinal));
        Channel::from_shared(endpoint).unwrap().connect().await.unwrap()
    }
}

/// Waits for a condition; fails after a time that only a hang exceeds.
pub(crate) async fn until<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    let waited = tokio::time::timeout(Duration::from_secs(120), async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    waited.await.unwrap_or_else(|_| panic!("waited in vain until {what}"));
}
