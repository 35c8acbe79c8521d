//! Life cycle of a worker: open the store, bind, serve, follow the map, stop in order.

use crate::buffers::follow_declarations;
use crate::engine::Engine;
use crate::engine::device::{self, Device, DeviceRequest};
use crate::lifecycle::bootstrap;
use crate::lifecycle::services::client_services;
use crate::lifecycle::watch::{follow_served, watch_store};
use crate::machine::{Machine, OpenedStore};
use crate::membership::heartbeat;
use crate::membership::map_state;
use crate::options::Options;
use crate::peers::{self, AdvertisedAddresses, HelloContext, Links, Proposals, StorePeers};
use crate::runs::{self, Runs};
use crate::service::Memories;
use crate::service::connections::listeners::{BoundAddresses, Listeners};
use crate::service::edge::{AllowAll, Authorizer};
use crate::shared::{Shared, SharedParts};
use engram_client::{Client, Network, Plane};
use engram_identity::{ExpectedPeer, Keys, Role};
use engram_memory::edge::OutOfRange;
use engram_memory::{Incarnation, Member, Term};
use engram_proto::v1;
use engram_proto::v1::memory_service_server::MemoryServiceServer;
use engram_store::{Clock, Engine as StoreEngine, FileDisk, Recovery, Store, SystemClock};
use futures::future::BoxFuture;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::task::JoinSet;

/// Time for calls in flight after a stop was requested.
const DRAIN: Duration = Duration::from_secs(10);
/// Time for the store to seal and sync its log.
const STORE_STOP: Duration = Duration::from_secs(30);

/// Why a worker failed to start, or stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A setting is out of range for the law.
    #[error("spec.learning: {0}")]
    Settings(#[from] OutOfRange),
    /// A GPU is required, and none can be used.
    #[error("spec.gpu.mode: Required, and no GPU can be used: {why}; allowed here: Auto, Disabled")]
    NoGpu {
        /// The reason.
        why: String,
    },
    /// A listener failed to bind.
    #[error("failed to listen for {role} calls on {address}: {source}; is the port in use?")]
    Bind {
        /// The listener.
        role: &'static str,
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: std::io::Error,
    },
    /// The store failed to open or to stop.
    #[error(transparent)]
    Store(#[from] engram_store::Error),
    /// The certificates are invalid.
    #[error("failed to use the certificates: {0}")]
    Keys(#[from] engram_identity::Error),
    /// The snapshot of `spec.bootstrap` cannot be used.
    #[error("failed to bootstrap from snapshot: {0}")]
    Bootstrap(engram_api::Problem),
    /// A thread failed to start.
    #[error("failed to start a thread")]
    Thread(#[source] std::io::Error),
    /// A listener failed.
    #[error("failed to serve {role} calls")]
    Serve {
        /// The listener.
        role: &'static str,
        /// The cause.
        source: tonic::transport::Error,
    },
    /// The HTTP page failed.
    #[error("failed to serve the HTTP page")]
    Http {
        /// The cause.
        source: std::io::Error,
    },
    /// The store failed.
    #[error("the store failed: {0}")]
    Fault(String),
    /// The store did not stop in time.
    #[error("the store did not stop within {} s", STORE_STOP.as_secs())]
    StuckStore,
}

/// Addresses of a worker's listeners.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    /// For clients.
    pub client: SocketAddr,
    /// For workers of the same cluster.
    pub peer: SocketAddr,
    /// For administration.
    pub admin: SocketAddr,
    /// For metrics and health.
    pub http: SocketAddr,
}

/// A worker whose store is open and whose listeners are bound.
pub struct Worker {
    shared: Arc<Shared>,
    listeners: Listeners,
    bound: BoundAddresses,
    authorizer: Arc<dyn Authorizer>,
    /// Whether heartbeats are sent from a dedicated thread.
    has_heartbeat_thread: bool,
    /// Whether it loads a snapshot, because its disk is new and the cluster has `spec.bootstrap`.
    loads_snapshot: bool,
}

/// Handle of a worker for other components of the process.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<Shared>,
}

impl Worker {
    /// Opens the store and binds the listeners.
    ///
    /// # Errors
    /// See [`Error`]; nothing is left half done.
    // Boxed like `run_until`: an `async fn` is compiled again into everything that awaits it.
    pub fn build(options: Options) -> BoxFuture<'static, Result<Self, Error>> {
        Box::pin(Self::opened(options))
    }

    async fn opened(options: Options) -> Result<Self, Error> {
        let store_options = options.store()?;
        let request = DeviceRequest::of(&options);
        // Opens a driver and measures passes.
        let selection = tokio::task::spawn_blocking(move || device::choose(&request)).await;
        let (passes, device) =
            selection.map_err(|error| Error::Fault(format!("device selection panicked: {error}")))??;
        let keys = options.tls.as_ref().map(|tls| {
            let expected = ExpectedPeer::one(Role::Worker, options.ordinal);
            Keys::open_for(tls.files.clone(), options.cluster, expected)
        });
        let keys = keys.transpose()?;
        let listening = Listeners::bind(&options.listen, options.tls.as_ref().zip(keys.as_ref())).await?;
        let (folder, state_dir) = (options.state_dir.clone(), options.state_dir.clone());
        // Recovery may read files for a long time.
        let opened = tokio::task::spawn_blocking(move || {
            // Partial uploads of the previous process.
            let _ = std::fs::remove_dir_all(runs::outgoing(&folder));
            let loaded = bootstrap::install_or_discard(&folder).map_err(|source| engram_store::Error::Io {
                operation: "install a loaded snapshot in",
                path: folder.display().to_string(),
                source,
            })?;
            let disk = Arc::new(FileDisk::new(folder)?);
            let (store, recovery) = Store::open(disk, Arc::new(SystemClock), passes, store_options)?;
            let of_map = |term: Term| loaded.map_or(term > Term(0), |loaded| loaded.is_before(term));
            let promised = store.replicas().iter().any(|replica| of_map(replica.term));
            let map_version = map_state::seen_map_version(&state_dir, promised);
            Ok::<_, engram_store::Error>((store, recovery, map_version, loaded))
        });
        let (store, recovery, map_version, loaded) =
            opened.await.map_err(|error| Error::Fault(format!("recovery panicked: {error}")))??;
        let channels = PeerChannels::default();
        let lossless_since = store.identity().lossless_since();
        let store = StoreEngine::start(store, channels.store_peers()).map_err(Error::Thread)?;
        let opened = OpenedStore { store, recovery, lossless_since, device: (device.cpu.clone(), device.threads) };
        let has_bootstrap = options.spec.bootstrap.is_some();
        let mut worker = Self::assemble(
            options,
            listening,
            opened,
            device,
            channels,
            Arc::new(SystemClock),
            (Network::default(), keys),
        );
        worker.shared.membership.set_disk_map_version(map_version);
        // A disk that has seen a map holds data of its own.
        worker.loads_snapshot = has_bootstrap && loaded.is_none() && map_version == 0;
        worker
            .shared
            .lifecycle
            .bootstrap()
            .set_status(loaded.filter(|_| has_bootstrap).map(bootstrap::LoadRecord::status));
        Ok(worker)
    }

    /// Creates a worker on another machine than that of this process. Folders, listen addresses and threads in the options are
    /// ignored, but the advertised addresses are used.
    ///
    /// # Errors
    /// The settings are invalid, or the store failed to open.
    pub fn on(machine: Machine, options: Options) -> Result<Self, Error> {
        let Machine { clock, network, client, peer, open } = machine;
        let channels = PeerChannels::default();
        let opened = open(options.store()?, channels.store_peers())?;
        let listening = Listeners::simulated(client, peer);
        let device = Device::without_gpu(opened.device.clone(), "the machine is simulated");
        Ok(Self {
            has_heartbeat_thread: false,
            ..Self::assemble(options, listening, opened, device, channels, clock, (network, None))
        })
    }

    fn assemble(
        options: Options,
        (listeners, bound): (Listeners, BoundAddresses),
        opened: OpenedStore,
        device: Device,
        channels: PeerChannels,
        clock: Arc<dyn Clock>,
        (network, keys): (Network, Option<Arc<Keys>>),
    ) -> Self {
        let network = match &keys {
            Some(keys) => {
                keys.watch();
                Network::with_tls(Arc::clone(keys), ExpectedPeer::any(Role::Worker))
            }
            None => network,
        };
        let OpenedStore { store: handle, recovery, lossless_since, .. } = opened;
        let (store, incarnation) = handle.identity();
        let member = Member { ordinal: options.ordinal(), store, incarnation };
        if recovery.disk_full {
            tracing::warn!("the disk is full: starting read-only; free space or use a larger volume");
        }
        let recovery = recovery_summary(&recovery, incarnation);
        tracing::info!(%member, recovery, device = device.name(None), "store opened");
        let mut peers = engram_client::Options::new(Vec::<String>::new()).with_cluster(options.cluster);
        peers.plane = Plane::Peer;
        peers.network = network.clone();
        let hello = HelloContext::new(&options, member, lossless_since, advertised(&options, bound));
        let (engine, client) = (Engine::new(handle), Client::with_external_map(peers));
        let PeerChannels { links, proposals } = channels;
        let connections = listeners.connections().clone();
        let parts = SharedParts {
            options,
            clock,
            network,
            keys,
            hello,
            links,
            proposals,
            engine,
            client,
            recovery,
            device,
            connections,
        };
        let shared = Arc::new_cyclic(|this| Shared::new(parts, Weak::clone(this)));
        Self {
            shared,
            listeners,
            bound,
            authorizer: Arc::new(AllowAll),
            has_heartbeat_thread: true,
            loads_snapshot: false,
        }
    }

    /// Uses `authorizer` for every call.
    #[must_use]
    pub fn authorized_by(mut self, authorizer: impl Authorizer) -> Self {
        self.authorizer = Arc::new(authorizer);
        self
    }

    /// Returns the addresses of the listeners.
    pub const fn addresses(&self) -> Addresses {
        let BoundAddresses { client, peer, admin, http } = self.bound;
        Addresses { client, peer, admin, http }
    }

    /// Returns a handle.
    pub fn handle(&self) -> Handle {
        Handle { shared: Arc::clone(&self.shared) }
    }

    /// Returns the shared state without the services.
    #[cfg(test)]
    pub(crate) fn into_shared(self) -> Arc<Shared> {
        self.shared
    }

    /// Serves until `shutdown` completes, an administrator requests a stop, or the store fails; then rejects new calls, completes
    /// those in flight and stops the store: acknowledged writes are there at the next start.
    ///
    /// # Errors
    /// The store failed or did not stop, or a listener failed.
    pub fn run<'a>(self, shutdown: impl Future<Output = ()> + Send + 'a) -> BoxFuture<'a, Result<(), Error>> {
        self.run_until(Box::pin(shutdown))
    }

    /// Not generic, so that the worker is compiled here once, and not into each program that runs one.
    fn run_until(self, shutdown: BoxFuture<'_, ()>) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(self.serve(shutdown))
    }

    async fn serve(self, shutdown: BoxFuture<'_, ()>) -> Result<(), Error> {
        let Self { shared, listeners, authorizer, has_heartbeat_thread, loads_snapshot, .. } = self;
        let _stop = StopOnDrop(Arc::clone(&shared));
        let (health, services) = client_services(&shared);
        let (mut servers, mut peer_servers) = listeners.serve(Arc::clone(&shared), authorizer, services).await;
        let mut background = JoinSet::new();
        background.spawn(follow_served(Arc::clone(&shared), health.clone()));
        if !shared.setup.options.spec.buffers.is_empty() {
            background.spawn(follow_declarations(Arc::clone(&shared)));
        }
        background.spawn(Runs::limit_history(Arc::clone(&shared)));
        background.spawn(peers::dial_partners(Arc::clone(&shared)));
        background.spawn(peers::submit_proposals(Arc::clone(&shared)));
        let heartbeat_thread = if has_heartbeat_thread {
            // A simulated machine has no folder here.
            background.spawn(map_state::run(Arc::clone(&shared)));
            Some(heartbeat::start(Arc::clone(&shared)).map_err(Error::Thread)?)
        } else {
            background.spawn(heartbeat::run(Arc::clone(&shared)));
            None
        };
        let loading = async {
            match shared.setup.options.spec.bootstrap.as_ref().filter(|_| loads_snapshot) {
                Some(spec) => bootstrap::run(&shared, spec).await,
                None => Ok(()),
            }
        };
        let ended = tokio::select! {
            // A successful load ends on its own.
            Err(problem) = loading => Err(Error::Bootstrap(problem)),
            () = shutdown => Ok(()),
            () = shared.lifecycle.stop_requested() => Ok(()),
            fault = watch_store(&shared) => Err(Error::Fault(fault)),
            Some(served) = servers.join_next() => served.unwrap_or_else(|error| Err(Error::Fault(error.to_string()))),
            Some(served) = peer_servers.join_next() => served.unwrap_or_else(|error| Err(Error::Fault(error.to_string()))),
        };
        tracing::info!("stopping");
        health.set_not_serving::<MemoryServiceServer<Memories>>().await;
        shared.lifecycle.begin_stop();
        shared.runs.stop();
        let drained = tokio::time::timeout(DRAIN, async { while servers.join_next().await.is_some() {} }).await;
        if drained.is_err() {
            tracing::warn!("calls in flight did not end in time");
        }
        servers.abort_all();
        // Kept until here, because calls in flight wait for other replicas.
        background.abort_all();
        shared.peers.links().close_all("this worker stops");
        let drained = tokio::time::timeout(DRAIN, async { while peer_servers.join_next().await.is_some() {} }).await;
        if drained.is_err() {
            tracing::warn!("calls of other workers did not end in time");
        }
        peer_servers.abort_all();
        let stopped = tokio::time::timeout(STORE_STOP, shared.engine.stop()).await;
        // The thread ends with the flag set above, within a heartbeat interval.
        if let Some(heartbeat_thread) = heartbeat_thread {
            let _ = tokio::task::spawn_blocking(move || heartbeat_thread.join()).await;
        }
        ended?;
        stopped.map_err(|_| Error::StuckStore)??;
        Ok(())
    }
}

/// Stops the heartbeat, the listeners and the links also if [`Worker::run`] is dropped early.
struct StopOnDrop(Arc<Shared>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.lifecycle.begin_stop();
        self.0.peers.links().close_all("this worker stops");
    }
}

impl Handle {
    /// Returns whether it serves all partitions assigned to it.
    pub fn is_ready(&self) -> bool {
        self.shared.is_ready()
    }

    /// Passes it a map and members, as a coordinator would.
    pub fn receive(&self, reply: v1::HeartbeatResponse) {
        self.shared.membership.receive("", reply);
    }

    /// Returns whether it stopped to be restarted at once by its parent.
    pub fn restart_requested(&self) -> bool {
        self.shared.lifecycle.is_restart_requested()
    }

    /// Returns its member id.
    pub fn member(&self) -> Member {
        self.shared.setup.member
    }

    /// Returns the client for the other workers.
    pub fn peers(&self) -> &Client {
        &self.shared.client
    }
}

/// Outgoing channels of a store, which is created after them.
#[derive(Default)]
struct PeerChannels {
    links: Arc<Links>,
    proposals: Arc<Proposals>,
}

impl PeerChannels {
    fn store_peers(&self) -> Box<StorePeers> {
        Box::new(StorePeers { links: Arc::clone(&self.links), proposals: Arc::clone(&self.proposals) })
    }
}

fn advertised(options: &Options, bound: BoundAddresses) -> AdvertisedAddresses {
    let at = |address: SocketAddr| match &options.advertise_host {
        Some(host) => format!("{host}:{}", address.port()),
        None => address.to_string(),
    };
    AdvertisedAddresses { client: at(bound.client), peer: at(bound.peer), http: at(bound.http) }
}

/// Describes the result of recovery.
fn recovery_summary(recovery: &Recovery, incarnation: Incarnation) -> String {
    if incarnation == Incarnation(1) {
        return "first start on this disk".to_owned();
    }
    let mut text = format!(
        "{} memories in {} partitions, {} records replayed",
        recovery.memories, recovery.partitions, recovery.replayed
    );
    if !recovery.lossless {
        text.push_str("; the previous process may have written more than was recovered");
    }
    if recovery.disk_full {
        text.push_str("; the disk is full: reads are served, writes fail until space is freed or the volume is larger");
    }
    for (partition, what) in &recovery.skipped_snapshots {
        text.push_str(&format!("; partition {partition}: skipped a damaged snapshot ({what})"));
    }
    for (partition, what) in &recovery.corrupt {
        text.push_str(&format!("; partition {partition} is corrupt ({what})"));
    }
    text
}
