//! A cluster in one process: a coordinator with a map in a file, workers with stores in folders, loopback sockets.

use engram_api::LearnerClusterSpec;
use engram_client::{Client, Options as ClientOptions};
use engram_cluster::{Entry, PartitionMap};
use engram_coordinator::{Coordinator, Options as CoordinatorOptions};
use engram_faults::proxy;
use engram_mapstore::{FileStore, MapStore as _};
use engram_memory::{ClusterId, Member};
use engram_proto::v1;
use engram_proto::v1::admin_service_client::AdminServiceClient;
use engram_proto::v1::memory_service_client::MemoryServiceClient;
use engram_wire as wire;
use engram_worker::{Addresses, Error, Handle, Listen, LocalFiles, MapLocation, Options, Worker};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
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
    /// Folder of the volumes of a cluster that has some, as in Kubernetes.
    volumes: Option<PathBuf>,
    coordinator: String,
    workers: Vec<Option<RunningWorker>>,
    /// Overrides of peer addresses, by ordinals.
    detours: BTreeMap<u32, BTreeMap<u32, String>>,
    /// Links between workers of a cluster without a coordinator, lower ordinal first.
    pub(crate) links: BTreeMap<(u32, u32), proxy::Link>,
}

struct RunningWorker {
    addresses: Addresses,
    handle: Handle,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), Error>>,
}

/// Returns a specification with `replicas` replicas of each partition.
pub(crate) fn replicated(replicas: u32, workers: u32, partitions: u32) -> LearnerClusterSpec {
    LearnerClusterSpec { replication_factor: replicas, ..spec(workers, partitions) }
}

/// Returns a specification with few partitions, so that each has several rows, and one replica of each.
pub(crate) fn spec(workers: u32, partitions: u32) -> LearnerClusterSpec {
    LearnerClusterSpec { partitions, replication_factor: 1, ..LearnerClusterSpec::with_workers(workers) }
}

impl Cluster {
    pub(crate) async fn start(spec: LearnerClusterSpec) -> Self {
        Self::begin(spec, None).await
    }

    /// Starts a cluster whose workers have the volumes in a folder, as in Kubernetes.
    pub(crate) async fn start_with(spec: LearnerClusterSpec, volumes: &Path) -> Self {
        Self::begin(spec, Some(volumes.to_owned())).await
    }

    async fn begin(spec: LearnerClusterSpec, volumes: Option<PathBuf>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = FileStore::open(folder.path(), CLUSTER).unwrap();
        let options = CoordinatorOptions {
            replication_factor: spec.replication_factor,
            bootstraps: spec.bootstrap.is_some(),
            ..CoordinatorOptions::new(CLUSTER, "test", spec.partitions, spec.workers)
        };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let coordinator = listener.local_addr().unwrap().to_string();
        let built = Coordinator::build(options, Arc::new(store)).unwrap();
        tokio::spawn(built.run(listener, std::future::pending()));
        let workers = (0..spec.workers).map(|_| None).collect();
        let (detours, links) = (BTreeMap::new(), BTreeMap::new());
        let mut cluster = Self { folder, spec, volumes, coordinator, workers, detours, links };
        for ordinal in 0..cluster.spec.workers {
            cluster.start_worker(ordinal).await;
        }
        // A worker that has loaded its share of a snapshot stops to be restarted.
        let restarts = if cluster.spec.bootstrap.is_some() { cluster.spec.workers } else { 0 };
        for ordinal in 0..restarts {
            let running = cluster.workers[ordinal as usize].take().expect("it runs");
            running.task.await.unwrap().unwrap();
            cluster.start_worker(ordinal).await;
        }
        cluster.ready().await;
        cluster
    }

    /// Starts a cluster without a coordinator: its map is written into the store with two replicas of each partition, and every
    /// worker gets map and members once.
    pub(crate) async fn without_coordinator(spec: LearnerClusterSpec) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let unused = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap().local_addr().unwrap();
        let workers = (0..spec.workers).map(|_| None).collect();
        let mut cluster = Self {
            folder,
            spec,
            volumes: None,
            coordinator: unused.to_string(),
            workers,
            detours: BTreeMap::new(),
            links: BTreeMap::new(),
        };
        // The worker with the lower ordinal dials: higher ones start first, so that links to them can be created.
        for ordinal in (0..cluster.spec.workers).rev() {
            for higher in ordinal + 1..cluster.spec.workers {
                let link = proxy::Link::open(cluster.addresses(higher).peer, u64::from(higher)).await.unwrap();
                let detours = cluster.detours.entry(ordinal).or_default();
                detours.insert(higher, link.address().to_string());
                cluster.links.insert((ordinal, higher), link);
            }
            cluster.start_worker(ordinal).await;
        }
        let running = || cluster.workers.iter().flatten();
        let members: Vec<Member> = running().map(|running| running.handle.member()).collect();
        let pair = |partition: usize| [0, 1].map(|replica| members[(partition + replica) % members.len()]).to_vec();
        let partitions = (0..cluster.spec.partitions as usize).map(|partition| Entry::first(pair(partition))).collect();
        let map = PartitionMap { cluster: CLUSTER, version: 0, partitions };
        let map = FileStore::open(cluster.folder.path(), CLUSTER).unwrap().compare_and_swap(None, map).unwrap();
        let entry = |running: &RunningWorker| {
            let (member, addresses) = (running.handle.member(), running.addresses);
            v1::MemberEntry {
                ordinal: member.ordinal.0,
                store: member.store.0.to_be_bytes().to_vec().into(),
                incarnation: member.incarnation.0,
                client_address: addresses.client.to_string(),
                peer_address: addresses.peer.to_string(),
                http_address: addresses.http.to_string(),
                alive: true,
                dead: false,
                leaving: false,
            }
        };
        let map = Some(wire::map_to_proto(&map));
        let reply =
            v1::HeartbeatResponse { map, members: running().map(entry).collect(), ..v1::HeartbeatResponse::default() };
        running().for_each(|running| running.handle.receive(reply.clone()));
        cluster.ready().await;
        cluster
    }

    /// Kills a worker: nothing is drained or reported.
    pub(crate) async fn kill_worker(&mut self, ordinal: u32) {
        let running = self.workers[ordinal as usize].take().expect("it runs");
        running.task.abort();
        let _ = running.task.await;
    }

    /// Returns the status of a worker's partitions.
    pub(crate) async fn status(&self, ordinal: u32) -> Vec<v1::PartitionStatus> {
        self.worker_status(ordinal).await.partition_status
    }

    pub(crate) async fn worker_status(&self, ordinal: u32) -> v1::WorkerStatus {
        let address = format!("http://{}", self.addresses(ordinal).admin);
        let channel = Channel::from_shared(address).unwrap().connect().await.unwrap();
        let mut admin = AdminServiceClient::new(channel);
        admin.get_worker_status(v1::GetWorkerStatusRequest {}).await.unwrap().into_inner()
    }

    pub(crate) fn options(&self, ordinal: u32) -> Options {
        Options {
            cluster: CLUSTER,
            cluster_name: "test".into(),
            ordinal,
            state_dir: self.folder.path().join(format!("worker-{ordinal}")),
            listen: Listen::any_port(IpAddr::V4(Ipv4Addr::LOCALHOST)),
            advertise_host: None,
            coordinators: vec![self.coordinator.clone()],
            peer_detours: self.detours.get(&ordinal).cloned().unwrap_or_default(),
            map_location: Some(MapLocation::Folder(self.folder.path().to_owned())),
            threads: Some(1),
            // The emulated GPU runs on a busy CPU.
            machine_workers: None,
            local_files: Some(LocalFiles {
                owner_key: self.folder.path().join("owner.key"),
                folders: vec![self.folder.path().join("files")],
            }),
            gpu_deadline_ms: Some(600_000),
            inputs: self.volumes.clone(),
            snapshots: self.volumes.clone(),
            bootstrap: None,
            tls: None,
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
        self.workers[ordinal as usize] = Some(RunningWorker { addresses, handle, stop, task });
    }

    /// Stops a worker in order.
    pub(crate) async fn stop_worker(&mut self, ordinal: u32) {
        let running = self.workers[ordinal as usize].take().expect("it runs");
        drop(running.handle);
        running.stop.send(()).unwrap();
        running.task.await.unwrap().unwrap();
    }

    /// Restarts a worker that has stopped on its own.
    pub(crate) async fn start_again(&mut self, ordinal: u32) {
        let running = self.workers[ordinal as usize].take().expect("it ran");
        running.task.await.unwrap().unwrap();
        self.start_worker(ordinal).await;
        self.ready().await;
    }

    /// Waits until every running worker is ready.
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
        Client::connect(ClientOptions::new(endpoints).with_cluster(CLUSTER)).await.unwrap()
    }

    /// Returns a client of the peer listeners, as workers use it.
    pub(crate) async fn peer_client(&self) -> Client {
        let endpoints = self.workers.iter().flatten().map(|running| running.addresses.peer.to_string());
        let mut options = ClientOptions::new(endpoints).with_cluster(CLUSTER);
        options.plane = engram_client::Plane::Peer;
        Client::connect(options).await.unwrap()
    }

    /// Returns a bare client of one worker, without a map.
    pub(crate) async fn bare(&self, ordinal: u32) -> MemoryServiceClient<Channel> {
        let channel = self.channel(ordinal).await;
        MemoryServiceClient::new(channel).max_encoding_message_size(usize::MAX)
    }

    pub(crate) async fn channel(&self, ordinal: u32) -> Channel {
        let endpoint = format!("http://{}", self.endpoint(ordinal));
        Channel::from_shared(endpoint).unwrap().connect().await.unwrap()
    }
}

/// Records a run that no worker drives, so that a test can send its learning epochs.
pub(crate) async fn recorded_run(client: &Client, name: &str) -> engram_memory::RunId {
    let spec = r#"{"clusterRef":{"name":"test"},"kind":"Memory","suspend":true,
        "memory":{"source":{"example":{"name":"StateOfTheUnion"}}}}"#;
    let submitted = client.submit_run(name, spec, None, None).await.unwrap();
    engram_proto::answers::run_id(&submitted.status.unwrap().run).unwrap()
}

/// Waits for a condition; panics after a time that only a hang exceeds.
pub(crate) async fn until<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    let waited = tokio::time::timeout(Duration::from_secs(120), async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    waited.await.unwrap_or_else(|_| panic!("timed out waiting until {what}"));
}

/// Runs the asynchronous part of a test.
pub(crate) fn block_on(body: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(body);
}
