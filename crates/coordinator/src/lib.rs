//! Receives the heartbeats of a cluster's workers, asks `engram-cluster` what to do, and writes the partition map.
//!
//! Decides nothing of its own: [`engram_cluster::detector`] says who is dead, [`engram_cluster::decide`] what to do, and the
//! map store lets in legal changes only. Its death ends nobody: workers go on serving under the map they have, and write it by
//! themselves when one of them fails meanwhile.
//!
//! Invariant: a map that is lost beside workers that have seen one is never replaced by an empty one, nor by an older one; only a
//! person's order makes it anew.
//!
//! ```text
//! beats, deaths ─> Detector ─> decide(map, observed) ─┐
//! proposals ──────────────────────────────────────────┴─> one compare-and-swap ─> view ─> every worker
//! ```
#![forbid(unsafe_code)]

mod guard;
mod host;
mod last_resort;
mod relief;
mod service;
mod state;
pub mod wire;
mod writer;

pub use guard::{Accounts, Asks};
pub use host::{Handle, Host, Report};
pub use relief::Surroundings;
pub use state::{Bootstrapping, Certified, GpuTrouble};

use engram_cluster::detector::Timing;
use engram_identity::{Callers, Keys};
use engram_mapstore::MapStore;
use engram_memory::ClusterId;
use engram_proto::v1;
use engram_proto::v1::coordinator_service_server::CoordinatorServiceServer;
use futures::future::BoxFuture;
use state::State;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_stream::Stream;
use tonic::transport::server::{Connected, TcpIncoming};

/// A worker that says nothing for this long is asked whether it is there.
const KEEPALIVE: Duration = Duration::from_secs(5);
const MESSAGE_BYTES: usize = engram_proto::MAX_PEER_MESSAGE_BYTES;

/// What a coordinator is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The cluster.
    pub cluster: ClusterId,
    /// Its name, for people.
    pub cluster_name: String,
    /// Partitions of a cluster that has no map yet.
    pub partitions: u32,
    /// Workers that it shall have, unless people ordered another number since. At least `replication_factor`.
    pub workers: u32,
    /// Copies of each partition, the primary's included. One by default.
    pub replication_factor: u32,
    /// How long a lone copy waits for a partner that died with proof and is started again, before it is copied elsewhere. 3 s by
    /// default: longer spares copies where workers are slow to start, shorter leaves a lone copy alone for less.
    pub restart_grace: Duration,
    /// Every log write is durable before it is acknowledged (durability mode `sync`). True by default.
    pub keeps_all: bool,
    /// What a person orders against the rules of the map it writes itself. True by default; false where such a person writes the map by
    /// rights of their own, and this coordinator judges what is ordered.
    pub carries_out_orders: bool,
    /// A new cluster begins from a snapshot: its first map is formed of the workers that have loaded it. False by default.
    pub bootstraps: bool,
}

impl Options {
    /// A cluster with one copy of each partition, everything else as by default.
    pub fn new(cluster: ClusterId, cluster_name: impl Into<String>, partitions: u32, workers: u32) -> Self {
        Self {
            cluster,
            cluster_name: cluster_name.into(),
            partitions,
            workers,
            replication_factor: 1,
            restart_grace: Duration::from_secs(3),
            keeps_all: true,
            carries_out_orders: true,
            bootstraps: false,
        }
    }
}

/// Why a coordinator does not start, or ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The map store.
    #[error(transparent)]
    MapStore(#[from] engram_mapstore::Error),
    /// The manifest and the map of an existing cluster differ in what is fixed.
    #[error("the cluster has {found} {what}, the manifest says {expected}: it is fixed at creation")]
    Fixed {
        /// What is fixed.
        what: &'static str,
        /// What the manifest says.
        expected: u32,
        /// What the map says.
        found: u32,
    },
    /// The listener.
    #[error("failed to serve")]
    Serve(#[from] tonic::transport::Error),
}

/// A coordinator, ready to run.
pub struct Coordinator {
    shared: Arc<Shared>,
}

/// What the services, the writer and the timer share.
pub(crate) struct Shared {
    options: Options,
    store: Arc<dyn MapStore>,
    state: Mutex<State>,
    /// Something was heard or asked for that may change the map.
    reconsider: Notify,
    /// What workers are told.
    view: watch::Sender<Arc<v1::BeatReply>>,
    /// Held from the decision to write until workers were told.
    writing: tokio::sync::Mutex<()>,
    /// One order of people at a time.
    ordering: tokio::sync::Mutex<()>,
    /// A worker told what its disk has seen.
    testified: Notify,
    /// This coordinator is no more: its streams end.
    ended: watch::Sender<bool>,
    started: Instant,
}

impl Shared {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        // A panic while it was held left values behind, each of them whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The clock of the detector.
    pub(crate) fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Tells workers what is known now, if it differs from what they were told.
    pub(crate) fn publish(&self) {
        let reply = Arc::new(self.state().view());
        self.view.send_if_modified(|told| {
            let changed = **told != *reply;
            *told = Arc::clone(&reply);
            changed
        });
    }
}

impl Coordinator {
    /// Reads the map that is there. Where it is damaged, the coordinator serves nothing but a person's order to make it anew.
    ///
    /// # Errors
    /// The map cannot be read, or contradicts `options`.
    pub fn build(options: Options, store: Arc<dyn MapStore>) -> Result<Self, Error> {
        let (map, damage) = match store.get() {
            Err(error @ engram_mapstore::Error::Damaged { .. }) => (None, Some(error.to_string())),
            read => (read?, None),
        };
        let (goal, orders) = (store.goal()?, store.orders()?);
        let found = map.as_ref().map_or(options.partitions, |map| map.partitions.len() as u32);
        if found != options.partitions {
            return Err(Error::Fixed { what: "partitions", expected: options.partitions, found });
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
            ordering: tokio::sync::Mutex::new(()),
            testified: Notify::new(),
            ended: watch::Sender::new(false),
            started: Instant::now(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Tells what its host knows before it begins.
    #[must_use]
    pub fn surrounded(self, surroundings: Surroundings) -> Self {
        self.shared.state().set_surroundings(surroundings);
        self
    }

    /// Serves on `listener` until `shutdown` completes, then ends within a moment: streams of workers are cut, which they
    /// survive.
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

    /// Not generic: with it all of the coordinator is compiled here, once, and not into each program and test that runs one.
    fn run_until(self, listener: TcpListener, shutdown: BoxFuture<'_, ()>) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(self.run_on(TcpIncoming::from(listener).with_nodelay(Some(true)), shutdown))
    }

    /// The same over TLS: who may ask what, certificates say. A connection lasts until it breaks, since the end of one is evidence of a
    /// worker's death.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_secured<'a>(
        self,
        listener: TcpListener,
        keys: Arc<Keys>,
        shutdown: impl Future<Output = ()> + Send + 'a,
    ) -> BoxFuture<'a, Result<(), Error>> {
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let incoming = engram_identity::accept(incoming, Arc::clone(&keys), Callers::Certified, None);
        let service = service::Service { shared: Arc::clone(&self.shared) };
        let service = guard::Guarded { service, keys: Some(keys), accounts: None };
        let serving = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(KEEPALIVE))
            .add_service(CoordinatorServiceServer::new(service).max_decoding_message_size(MESSAGE_BYTES))
            .serve_with_incoming(incoming);
        Box::pin(self.run_beside(serving, shutdown))
    }

    /// The same for whatever connections `incoming` brings.
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
        let service = service::Service { shared: Arc::clone(&self.shared) };
        let serving = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(KEEPALIVE))
            .add_service(CoordinatorServiceServer::new(service).max_decoding_message_size(MESSAGE_BYTES))
            .serve_with_incoming(incoming);
        self.run_beside(serving, shutdown).await
    }

    async fn run_beside(
        self,
        serving: impl Future<Output = Result<(), tonic::transport::Error>>,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), Error> {
        let writer = tokio::spawn(writer::run(Arc::clone(&self.shared)));
        let timer = tokio::spawn(watch_for_silence(Arc::clone(&self.shared)));
        let result = tokio::select! {
            served = serving => served.map_err(Error::from),
            () = shutdown => Ok(()),
        };
        writer.abort();
        timer.abort();
        result
    }
}

async fn watch_for_silence(shared: Arc<Shared>) {
    let tick = Duration::from_millis(Timing::default().tick_ms);
    let mut ticks = tokio::time::interval(tick);
    // Missed ticks are not made up for: the detector judges itself by how late they come.
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if shared.state().tick(&shared.options, shared.now_ms()) {
            shared.publish();
        }
        // Suspicions ripen and graces end with time alone.
        shared.reconsider.notify_one();
    }
}
