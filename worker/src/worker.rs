//! The life of a worker: open the store, bind, serve, follow the map, stop in order.

use crate::bootstrap;
use crate::device::{self, Asked, Device};
use crate::edge::{AllowAll, Authorizer};
use crate::engine::Engine;
use crate::heartbeat;
use crate::listeners::{self, Bound, Listeners};
use crate::machine::{Machine, Opened};
use crate::options::Options;
use crate::peers::{self, Greeter, Links, Proposals, Reachable, WayOut};
use crate::runs::{self, Runs};
use crate::service;
use crate::service::Memories;
use crate::shared::{Parts, Shared};
use crate::testimony;
use engram_client::{Client, Network, Plane};
use engram_identity::{Expected, Keys, Role};
use engram_memory::edge::OutOfRange;
use engram_memory::{Incarnation, Member, Term};
use engram_proto::v1;
use engram_proto::v1::memory_service_server::MemoryServiceServer;
use engram_proto::v1::peer_service_server::PeerServiceServer;
use engram_proto::v1::run_service_server::RunServiceServer;
use engram_store::{Clock, Engine as StoreEngine, FileDisk, Recovery, Store, SystemClock};
use futures::future::BoxFuture;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tonic::service::{Routes, RoutesBuilder};

/// How long calls under way may take after a stop was asked for.
const DRAIN: Duration = Duration::from_secs(10);
/// How long the store may take to seal and sync its log.
const STORE_STOP: Duration = Duration::from_secs(30);
/// Between looks at what is served: a part of the time that a failover takes.
const SERVED_TICK: Duration = Duration::from_millis(20);
/// Between looks at the store and at the lateness of timers.
const TICK: Duration = Duration::from_millis(250);

/// Why a worker does not start, or ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A setting that the law does not admit.
    #[error("spec.learning: {0}")]
    Settings(#[from] OutOfRange),
    /// A GPU is required, and none can be used.
    #[error("spec.gpu.mode: Required, and no GPU can be used: {why}; allowed here: Auto, Disabled")]
    NoGpu {
        /// The reason.
        why: String,
    },
    /// A listener cannot be had.
    #[error("failed to listen for {role} calls on {address}: {source}; is the port in use?")]
    Bind {
        /// Which.
        role: &'static str,
        /// Where.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The store does not open, or did not stop in order.
    #[error(transparent)]
    Store(#[from] engram_store::Error),
    /// The certificates are of no use.
    #[error("failed to use the certificates: {0}")]
    Keys(#[from] engram_identity::Error),
    /// The snapshot that the cluster begins from is of no use.
    #[error("cannot begin from the snapshot: {0}")]
    Bootstrap(engram_api::Problem),
    /// A thread cannot be started.
    #[error("failed to start a thread")]
    Thread(#[source] std::io::Error),
    /// A listener failed.
    #[error("failed to serve {role} calls")]
    Serve {
        /// Which.
        role: &'static str,
        /// Why.
        source: tonic::transport::Error,
    },
    /// The HTTP page failed.
    #[error("failed to serve the HTTP page")]
    Http {
        /// Why.
        source: std::io::Error,
    },
    /// The store serves no more.
    #[error("the store failed: {0}")]
    Fault(String),
    /// The store did not stop in time.
    #[error("the store did not stop within {} s", STORE_STOP.as_secs())]
    StuckStore,
}

/// Where a worker listens.
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
    bound: Bound,
    authorizer: Arc<dyn Authorizer>,
    /// Beats come from a thread of their own.
    beats_apart: bool,
    /// Its disk is new, and its cluster begins from a snapshot.
    loads: bool,
}

/// What others in the process may do with a worker.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<Shared>,
}

impl Worker {
    /// Opens the store and binds the listeners.
    ///
    /// # Errors
    /// As [`Error`] says; nothing is left half done.
    // Like `run_until`, boxed: an `async fn` is compiled anew into everything that awaits it.
    pub fn build(options: Options) -> BoxFuture<'static, Result<Self, Error>> {
        Box::pin(Self::opened(options))
    }

    async fn opened(options: Options) -> Result<Self, Error> {
        let store_options = options.store()?;
        let asked = Asked::of(&options);
        // It opens a driver, and times passes.
        let chosen = tokio::task::spawn_blocking(move || device::choose(&asked)).await;
        let (passes, device) =
            chosen.map_err(|error| Error::Fault(format!("the choice of a device panicked: {error}")))??;
        let keys = options.tls.as_ref().map(|tls| {
            let expected = Expected::one(Role::Worker, options.ordinal);
            Keys::open_for(tls.files.clone(), options.cluster, expected)
        });
        let keys = keys.transpose()?;
        let listening = Listeners::bind(&options.listen, options.tls.as_ref().zip(keys.as_ref())).await?;
        let (folder, seen_in) = (options.state_dir.clone(), options.state_dir.clone());
        // Recovery reads files for as long as it takes.
        let opened = tokio::task::spawn_blocking(move || {
            // What was on its way to a storage when the process before ended.
            let _ = std::fs::remove_dir_all(runs::outgoing(&folder));
            let loaded = bootstrap::settle(&folder).map_err(|source| engram_store::Error::Io {
                operation: "put a loaded snapshot in place in",
                path: folder.display().to_string(),
                source,
            })?;
            let disk = Arc::new(FileDisk::new(folder)?);
            let (store, recovery) = Store::open(disk, Arc::new(SystemClock), passes, store_options)?;
            let of_map = |term: Term| loaded.map_or(term > Term(0), |loaded| loaded.is_before(term));
            let promised = store.replicas().iter().any(|replica| of_map(replica.term));
            let seen = testimony::seen_before(&seen_in, promised);
            Ok::<_, engram_store::Error>((store, recovery, seen, loaded))
        });
        let (store, recovery, seen, loaded) =
            opened.await.map_err(|error| Error::Fault(format!("recovery panicked: {error}")))??;
        let ways = Ways::default();
        let lossless_since = store.identity().lossless_since();
        let store = StoreEngine::start(store, ways.out()).map_err(Error::Thread)?;
        let opened = Opened { store, recovery, lossless_since, device: (device.cpu.clone(), device.threads) };
        let begins = options.spec.bootstrap.is_some();
        let mut worker =
            Self::assemble(options, listening, opened, device, ways, Arc::new(SystemClock), (Network::default(), keys));
        worker.shared.seen_before.store(seen, Ordering::Release);
        // A disk that has seen a map has a past of its own.
        worker.loads = begins && loaded.is_none() && seen == 0;
        worker.shared.bootstrap.tell(loaded.filter(|_| begins).map(bootstrap::Loaded::told));
        Ok(worker)
    }

    /// The same on a machine that is not the one of this process; whatever the options say of folders, addresses to listen on and threads
    /// is without effect. Where others reach it they do say.
    ///
    /// # Errors
    /// The settings are not allowed, or the store does not open.
    pub fn on(machine: Machine, options: Options) -> Result<Self, Error> {
        let Machine { clock, network, client, peer, open } = machine;
        let ways = Ways::default();
        let opened = open(options.store()?, ways.out())?;
        let listening = Listeners::simulated(client, peer);
        let device = Device::without_gpu(opened.device.clone(), "this machine is simulated");
        Ok(Self {
            beats_apart: false,
            ..Self::assemble(options, listening, opened, device, ways, clock, (network, None))
        })
    }

    fn assemble(
        options: Options,
        (listeners, bound): (Listeners, Bound),
        opened: Opened,
        device: Device,
        ways: Ways,
        clock: Arc<dyn Clock>,
        (network, keys): (Network, Option<Arc<Keys>>),
    ) -> Self {
        let network = match &keys {
            Some(keys) => {
                keys.follow();
                Network::secured(Arc::clone(keys), Expected::any(Role::Worker))
            }
            None => network,
        };
        let Opened { store: handle, recovery, lossless_since, .. } = opened;
        let (store, incarnation) = handle.identity();
        let member = Member { ordinal: options.ordinal(), store, incarnation };
        let recovery = told(&recovery, incarnation);
        tracing::info!(%member, recovery, device = device.name(None), "store is open");
        let mut peers = engram_client::Options::new(Vec::<String>::new()).of_cluster(options.cluster);
        peers.plane = Plane::Peer;
        peers.network = network.clone();
        let greeter = Greeter::new(&options, member, lossless_since, reachable(&options, bound));
        let (engine, peers) = (Engine(handle), Client::given(peers));
        let Ways { links, proposals } = ways;
        let parts = Parts { options, clock, network, keys, greeter, links, proposals, engine, peers, recovery, device };
        let shared = Arc::new(Shared::new(parts));
        Self { shared, listeners, bound, authorizer: Arc::new(AllowAll), beats_apart: true, loads: false }
    }

    /// The same, asking `authorizer` about every call.
    #[must_use]
    pub fn authorized_by(mut self, authorizer: impl Authorizer) -> Self {
        self.authorizer = Arc::new(authorizer);
        self
    }

    /// Where it listens.
    pub const fn addresses(&self) -> Addresses {
        let Bound { client, peer, admin, http } = self.bound;
        Addresses { client, peer, admin, http }
    }

    /// For others in the process.
    pub fn handle(&self) -> Handle {
        Handle { shared: Arc::clone(&self.shared) }
    }

    /// What its services share, without them.
    #[cfg(test)]
    pub(crate) fn into_shared(self) -> Arc<Shared> {
        self.shared
    }

    /// Serves until `shutdown` completes, an administrator asks for a stop, or the store fails; then takes no more calls, finishes those under
    /// way and stops the store in order: what was acknowledged is there at the next start.
    ///
    /// # Errors
    /// The store failed or did not stop, or a listener failed.
    pub fn run<'a>(self, shutdown: impl Future<Output = ()> + Send + 'a) -> BoxFuture<'a, Result<(), Error>> {
        self.run_until(Box::pin(shutdown))
    }

    /// Not generic: with it all of the worker is compiled here, once, and not into each program and test that runs one.
    fn run_until(self, shutdown: BoxFuture<'_, ()>) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(self.serve(shutdown))
    }

    async fn serve(self, shutdown: BoxFuture<'_, ()>) -> Result<(), Error> {
        let Self { shared, listeners, authorizer, beats_apart, loads, .. } = self;
        let _stop = StopOnDrop(Arc::clone(&shared));
        let (health, services) = client_services(&shared);
        let (mut serving, mut between) = listeners.serve(Arc::clone(&shared), authorizer, services).await;
        let mut background = JoinSet::new();
        background.spawn(follow(Arc::clone(&shared), health.clone()));
        background.spawn(peers::dial_partners(Arc::clone(&shared)));
        background.spawn(peers::hand_over_proposals(Arc::clone(&shared)));
        let heart = if beats_apart {
            // A machine that is not this one has no folder here.
            background.spawn(testimony::run(Arc::clone(&shared)));
            Some(heartbeat::start(Arc::clone(&shared)).map_err(Error::Thread)?)
        } else {
            background.spawn(heartbeat::run(Arc::clone(&shared)));
            None
        };
        let loading = async {
            match shared.options.spec.bootstrap.as_ref().filter(|_| loads) {
                Some(spec) => bootstrap::run(&shared, spec).await,
                None => Ok(()),
            }
        };
        let ended = tokio::select! {
            // What is loaded ends by itself where it goes well.
            Err(problem) = loading => Err(Error::Bootstrap(problem)),
            () = shutdown => Ok(()),
            () = shared.asked_to_stop.notified() => Ok(()),
            fault = watch_store(&shared) => Err(Error::Fault(fault)),
            Some(served) = serving.join_next() => served.unwrap_or_else(|error| Err(Error::Fault(error.to_string()))),
            Some(served) = between.join_next() => served.unwrap_or_else(|error| Err(Error::Fault(error.to_string()))),
        };
        tracing::info!("stopping");
        health.set_not_serving::<MemoryServiceServer<Memories>>().await;
        shared.stopping.send_replace(true);
        shared.runs.stop();
        let drained = tokio::time::timeout(DRAIN, async { while serving.join_next().await.is_some() {} }).await;
        if drained.is_err() {
            tracing::warn!("calls under way did not end in time");
        }
        serving.abort_all();
        // Until here, since calls under way waited for other copies.
        background.abort_all();
        shared.links.cut_all("this worker stops");
        let drained = tokio::time::timeout(DRAIN, async { while between.join_next().await.is_some() {} }).await;
        if drained.is_err() {
            tracing::warn!("calls of other workers did not end in time");
        }
        between.abort_all();
        let stopped = tokio::time::timeout(STORE_STOP, shared.engine.stop()).await;
        // It ends with the flag set above, within a beat.
        if let Some(heart) = heart {
            let _ = tokio::task::spawn_blocking(move || heart.join()).await;
        }
        ended?;
        stopped.map_err(|_| Error::StuckStore)??;
        Ok(())
    }
}

/// Ends the heartbeat, the listeners and the links also where [`Worker::run`] is dropped before its end.
struct StopOnDrop(Arc<Shared>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stopping.send_replace(true);
        self.0.links.cut_all("this worker stops");
    }
}

impl Handle {
    /// Whether it serves all that the map gives it.
    pub fn is_ready(&self) -> bool {
        self.shared.is_ready()
    }

    /// Tells it a map and members, as a coordinator would.
    pub fn hear(&self, reply: v1::BeatReply) {
        self.shared.hear("", reply);
    }

    /// Whether it has stopped to be started again at once, by whoever started it.
    pub fn begins_again(&self) -> bool {
        self.shared.begins_again.load(Ordering::Acquire)
    }

    /// Who it is.
    pub fn member(&self) -> Member {
        self.shared.member
    }

    /// To the other workers.
    pub fn peers(&self) -> &Client {
        &self.shared.peers
    }
}

/// What clients find beside the memories.
fn client_services(shared: &Arc<Shared>) -> (tonic_health::server::HealthReporter, Routes) {
    let (health, service) = tonic_health::server::health_reporter();
    let mut routes = RoutesBuilder::default();
    routes.add_service(service);
    routes.add_service(run_service(shared, service::Plane::Client));
    listeners::reflection(&mut routes);
    (health, routes.routes())
}

/// What peers find beside the memories.
pub(crate) fn peer_services(shared: &Arc<Shared>) -> Routes {
    let mut routes = RoutesBuilder::default();
    routes.add_service(run_service(shared, service::Plane::Peer));
    routes.add_service(
        PeerServiceServer::new(peers::Service { shared: Arc::clone(shared) })
            .max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES)
            .max_encoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES),
    );
    routes.routes()
}

fn run_service(shared: &Arc<Shared>, plane: service::Plane) -> RunServiceServer<runs::Service> {
    // A report holds a row per epoch, so its limit is that of peers on both listeners.
    RunServiceServer::new(runs::Service { shared: Arc::clone(shared), plane })
        .max_decoding_message_size(engram_proto::MAX_MESSAGE_BYTES)
        .max_encoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES)
}

/// Follows what is served here: drives its runs, and says whether this worker is healthy.
async fn follow(shared: Arc<Shared>, health: tonic_health::server::HealthReporter) {
    let mut view = shared.view.subscribe();
    let (mut served, mut ready, mut followed) = (Vec::new(), None, false);
    loop {
        // The store serves what the map gives a little later: a promise has to be durable first.
        let changed = match tokio::time::timeout(SERVED_TICK, view.changed()).await {
            Ok(Err(_)) => return,
            Ok(Ok(())) => true,
            Err(_) => false,
        };
        let now = shared.served();
        if now != served {
            tracing::info!(partitions = now.len(), before = served.len(), "serves");
            let new = now.iter().filter(|partition| served.binary_search(partition).is_err());
            shared.metrics.taken_over.inc_by(new.count() as u64);
        }
        if changed || now != served || !followed || shared.runs.is_unattended() {
            served = now;
            followed = Runs::follow(&shared).await;
        }
        if ready.replace(shared.is_ready()) != Some(shared.is_ready()) {
            if shared.is_ready() {
                health.set_serving::<MemoryServiceServer<Memories>>().await;
            } else {
                health.set_not_serving::<MemoryServiceServer<Memories>>().await;
            }
        }
    }
}

/// Looks after the store and the timers; returns when the store fails.
async fn watch_store(shared: &Shared) -> String {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut snapshots, mut damaged) = (0, 0);
    let (mut fallbacks, mut given_up) = (0, 0);
    loop {
        let due = Instant::now() + TICK;
        ticks.tick().await;
        let late = Instant::now().saturating_duration_since(due);
        shared.loop_lag_ms.store(late.as_millis() as u64, Ordering::Relaxed);
        let stats = shared.engine.stats();
        if stats.snapshots > snapshots {
            snapshots = stats.snapshots;
            shared.last_snapshot_ms.store(shared.clock.now_ms(), Ordering::Relaxed);
        }
        if stats.damaged_snapshots > damaged {
            damaged = stats.damaged_snapshots;
            tracing::warn!(damaged, damage = stats.damage.as_deref(), "found a damaged snapshot");
        }
        if let Some(gpu) = &stats.gpu {
            let lost = || gpu.devices.iter().filter(|device| device.given_up.is_some());
            if lost().count() > given_up {
                given_up = lost().count();
                let left = gpu.at_work().count();
                tracing::error!(
                    gpu = gpu.name,
                    why = gpu.given_up,
                    left,
                    "gave up a GPU; what is left, and the CPU, do all passes"
                );
            } else if gpu.fallbacks > fallbacks && gpu.at_work().next().is_some() {
                tracing::warn!(
                    gpu = gpu.name,
                    passes = gpu.fallbacks,
                    "a GPU has no memory for a pass; the CPU did its part"
                );
            }
            fallbacks = gpu.fallbacks;
        }
        if let Some(fault) = stats.fault {
            return fault;
        }
    }
}

/// The ways out of a store, which is there later than they are.
#[derive(Default)]
struct Ways {
    links: Arc<Links>,
    proposals: Arc<Proposals>,
}

impl Ways {
    fn out(&self) -> Box<WayOut> {
        Box::new(WayOut { links: Arc::clone(&self.links), proposals: Arc::clone(&self.proposals) })
    }
}

fn reachable(options: &Options, bound: Bound) -> Reachable {
    let at = |address: SocketAddr| match &options.advertise_host {
        Some(host) => format!("{host}:{}", address.port()),
        None => address.to_string(),
    };
    Reachable { client: at(bound.client), peer: at(bound.peer), http: at(bound.http) }
}

/// What recovery found, in words.
fn told(recovery: &Recovery, incarnation: Incarnation) -> String {
    if incarnation == Incarnation(1) {
        return "first start on this disk".to_owned();
    }
    let mut told = format!(
        "{} memories in {} partitions, {} records replayed",
        recovery.memories, recovery.partitions, recovery.replayed
    );
    if !recovery.lost_nothing {
        told.push_str("; the process before may have written more than was found");
    }
    for (partition, what) in &recovery.passed_over {
        told.push_str(&format!("; partition {partition}: a damaged snapshot was passed over ({what})"));
    }
    for (partition, what) in &recovery.corrupt {
        told.push_str(&format!("; partition {partition} is corrupt ({what})"));
    }
    told
}
