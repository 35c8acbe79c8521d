//! Receives the heartbeats of a cluster's workers, asks `engram-cluster` what to do, and writes the partition map.
//!
//! Decides nothing itself: [`engram_cluster::detector`] decides which workers are dead, [`engram_cluster::decide`] what
//! to do, and the map store accepts legal changes only. Its death stops no worker: workers continue to serve under
//! their current map, and write it themselves if one of them fails meanwhile.
//!
//! Invariant: a lost map is never replaced by an empty or older one while workers have seen it; only an explicit order
//! rebuilds it.
//!
//! ```text
//! heartbeats, deaths ─> Detector ─> decide(map, observed) ─┐
//! proposals ───────────────────────────────────────────────┴─> one compare-and-swap ─> view ─> every worker
//! ```
#![forbid(unsafe_code)]

mod accept;
mod environment;
mod host;
mod manual_recovery;
mod rpc;
mod state;
pub mod wire;
mod writer;

pub use environment::Environment;
pub use host::{Handle, Host, Report};
pub use rpc::{QueryKind, TokenAuthorizer};
pub use state::{BootstrapProgress, GpuFault, WorkerCertificate};

use engram_cluster::detector::Timing;
use engram_identity::{Callers, Keys};
use engram_mapstore::MapStore;
use engram_memory::ClusterId;
use engram_proto::v1;
use futures::future::BoxFuture;
use parking_lot::{Mutex, MutexGuard};
use rpc::{Access, Endpoint, Endpoints};
use state::State;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_stream::Stream;
use tonic::transport::server::Connected;

/// Interval of HTTP/2 keepalives to a silent worker.
const KEEPALIVE: Duration = Duration::from_secs(5);

/// Options of a coordinator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Cluster.
    pub cluster: ClusterId,
    /// Its name in messages.
    pub cluster_name: String,
    /// Partitions of a cluster without a map.
    pub partitions: u32,
    /// Desired number of workers, unless an order changed it. At least `replication_factor`.
    pub workers: u32,
    /// Replicas of each partition, the primary's included. One by default.
    pub replication_factor: u32,
    /// How long a single replica waits for a peer that is proven dead to restart, before it is re-replicated elsewhere.
    /// 3 s by default: longer avoids transfers where workers start slowly, shorter reduces the time with a single
    /// replica.
    pub restart_grace: Duration,
    /// Every log write is durable before it is acknowledged (durability mode `sync`). True by default.
    pub keeps_all: bool,
    /// It writes forced changes of the map itself. True by default; false if the caller writes the map with its own
    /// permissions, and this coordinator only previews orders.
    pub executes_orders: bool,
    /// A new cluster starts from a snapshot: its first map consists of the workers that have loaded it. False by
    /// default.
    pub bootstraps: bool,
}

impl Options {
    /// Returns the defaults for a cluster with one replica of each partition.
    pub fn new(cluster: ClusterId, cluster_name: impl Into<String>, partitions: u32, workers: u32) -> Self {
        Self {
            cluster,
            cluster_name: cluster_name.into(),
            partitions,
            workers,
            replication_factor: 1,
            restart_grace: Duration::from_secs(3),
            keeps_all: true,
            executes_orders: true,
            bootstraps: false,
        }
    }
}

/// Why a coordinator does not start, or stops.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The map store failed.
    #[error("failed to use the map store")]
    MapStore(#[from] engram_mapstore::Error),
    /// A setting that is fixed at creation differs between the manifest and the map.
    #[error("the cluster has {found} {what}, the manifest says {expected}: it is fixed at creation")]
    FixedSettingChanged {
        /// The setting.
        what: &'static str,
        /// Value in the manifest.
        expected: u32,
        /// Value in the map.
        found: u32,
    },
    /// The listener failed.
    #[error("failed to serve")]
    Serve(#[from] tonic::transport::Error),
}

/// A coordinator, ready to run.
pub struct Coordinator {
    shared: Arc<Shared>,
}

/// State shared by the services, the writer and the timer.
pub(crate) struct Shared {
    options: Options,
    store: Arc<dyn MapStore>,
    state: Mutex<State>,
    /// Notified when the map may have to change.
    reconsider: Notify,
    /// The view sent to workers.
    view: watch::Sender<Arc<v1::HeartbeatResponse>>,
    /// Held from the decision to write until the view is published.
    writing: tokio::sync::Mutex<()>,
    /// Notified when the writer has written a map, or has nothing to write.
    written: Notify,
    /// Serializes orders.
    ordering: tokio::sync::Mutex<()>,
    /// Notified when a worker reported its map state.
    map_state_received: Notify,
    /// Set when this coordinator is removed: its streams end.
    ended: watch::Sender<bool>,
    started: Instant,
}

impl Shared {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        // State is consistent even after a panic: every field is replaced as a whole.
        self.state.lock()
    }

    /// Clock of the detector.
    pub(crate) fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Publishes the current view, if it changed.
    pub(crate) fn publish(&self) {
        let reply = Arc::new(self.state().view());
        self.view.send_if_modified(|published| {
            let changed = **published != *reply;
            *published = Arc::clone(&reply);
            changed
        });
    }
}

impl Coordinator {
    /// Reads the current map. If it is damaged, the coordinator serves only an order to rebuild it.
    ///
    /// # Errors
    /// The map cannot be read, or contradicts `options`.
    pub fn build(options: Options, store: Arc<dyn MapStore>) -> Result<Self, Error> {
        let (map, damage) = match store.get() {
            Err(error @ engram_mapstore::Error::Damaged { .. }) => (None, Some(error.to_string())),
            read => (read?, None),
        };
        let (goal, orders) = (store.goal()?, store.overrides()?);
        let found = map.as_ref().map_or(options.partitions, |map| map.partitions.len() as u32);
        if found != options.partitions {
            return Err(Error::FixedSettingChanged { what: "partitions", expected: options.partitions, found });
        }
        let mut state = State::new(map, goal, 0);
        state.set_orders(orders);
        if let Some(damage) = damage {
            state.lose(damage);
        }
        let view = watch::Sender::new(Arc::new(state.view()));
        let shared = Shared {
            options,
            store,
            state: Mutex::new(state),
            reconsider: Notify::new(),
            view,
            writing: tokio::sync::Mutex::new(()),
            written: Notify::new(),
            ordering: tokio::sync::Mutex::new(()),
            map_state_received: Notify::new(),
            ended: watch::Sender::new(false),
            started: Instant::now(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Sets the environment before the coordinator starts.
    #[must_use]
    pub fn with_environment(self, surroundings: Environment) -> Self {
        self.shared.state().set_environment(surroundings);
        self
    }

    /// Serves on `listener` until `shutdown` completes, then closes the workers' streams, which they survive.
    ///
    /// # Errors
    /// The listener fails.
    pub fn run<'a>(
        self,
        listener: TcpListener,
        shutdown: impl Future<Output = ()> + Send + 'a,
    ) -> BoxFuture<'a, Result<(), Error>> {
        self.run_until(listener, Box::pin(shutdown))
    }

    /// Not generic, so that the coordinator is compiled once here and not in every program and test that runs one.
    fn run_until(self, listener: TcpListener, shutdown: BoxFuture<'_, ()>) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(self.run_on(accept::incoming(listener, Arc::default()), shutdown))
    }

    /// Serves over TLS, authorized by certificates. A connection lasts until it breaks, since its end is evidence of a
    /// worker's death.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_with_tls<'a>(
        self,
        listener: TcpListener,
        keys: Arc<Keys>,
        shutdown: impl Future<Output = ()> + Send + 'a,
    ) -> BoxFuture<'a, Result<(), Error>> {
        let incoming = accept::incoming(listener, Arc::default());
        let incoming = engram_identity::accept(incoming, Arc::clone(&keys), Callers::Certified, None);
        let endpoint = Endpoint::new(Arc::clone(&self.shared), Access::new(Some(keys)));
        let serving = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(KEEPALIVE))
            .add_service(rpc::server(Endpoints::One(endpoint)))
            .serve_with_incoming(incoming);
        Box::pin(self.serve_until(serving, shutdown))
    }

    /// Serves the connections of `incoming`.
    ///
    /// # Errors
    /// `incoming` fails.
    pub async fn run_on<C>(
        self,
        incoming: impl Stream<Item = std::io::Result<C>>,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), Error>
    where
        C: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        let endpoint = Endpoint::new(Arc::clone(&self.shared), Access::default());
        let serving = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(KEEPALIVE))
            .add_service(rpc::server(Endpoints::One(endpoint)))
            .serve_with_incoming(incoming);
        self.serve_until(serving, shutdown).await
    }

    async fn serve_until(
        self,
        serving: impl Future<Output = Result<(), tonic::transport::Error>>,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), Error> {
        let writer = tokio::spawn(writer::run(Arc::clone(&self.shared)));
        let timer = tokio::spawn(run_failure_detector(Arc::clone(&self.shared)));
        let result = tokio::select! {
            served = serving => served.map_err(Error::from),
            () = shutdown => Ok(()),
        };
        writer.abort();
        timer.abort();
        result
    }
}

async fn run_failure_detector(shared: Arc<Shared>) {
    let tick = Duration::from_millis(Timing::default().tick_ms);
    let mut ticks = tokio::time::interval(tick);
    // Missed ticks are not made up for: the detector measures its own lateness by them.
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if shared.state().tick(&shared.options, shared.now_ms()) {
            shared.publish();
        }
        // Suspicions become conclusive and grace periods end with time alone.
        shared.reconsider.notify_one();
    }
}
