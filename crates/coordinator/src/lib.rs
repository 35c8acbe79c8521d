//! Receives the heartbeats of a cluster's workers, asks `engram-cluster` what to do, and writes the partition map.
//!
//! Decides nothing of its own: [`engram_cluster::decide`] does, and the map store lets in legal changes only. It has no
//! opinion of a worker that it has not heard since its own start, and its death ends nobody: workers go on serving under
//! the map they have.
//!
//! ```text
//! beats, deaths -> State (what was heard) -> decide(map, observed) -> compare-and-swap -> view -> every worker
//! ```
#![forbid(unsafe_code)]

mod service;
mod state;
pub mod wire;
mod writer;

pub use state::Heard;

use engram_mapstore::MapStore;
use engram_memory::ClusterId;
use engram_proto::v1;
use engram_proto::v1::coordinator_service_server::CoordinatorServiceServer;
use state::State;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};

/// A worker is thought dead after this silence: six beats of 200 ms, several times the worst lateness measured of a timer
/// on a machine with 32 busy threads per core.
pub const SUSPECT_AFTER: Duration = Duration::from_millis(1_200);

/// What a coordinator is for.
#[derive(Debug, Clone)]
pub struct Options {
    /// The cluster.
    pub cluster: ClusterId,
    /// Its name, for people.
    pub cluster_name: String,
    /// Partitions of a cluster that has no map yet.
    pub partitions: u32,
    /// Workers that it consists of.
    pub workers: u32,
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
    store: Arc<dyn MapStore>,
}

/// What the services, the writer and the timer share.
pub(crate) struct Shared {
    options: Options,
    state: Mutex<State>,
    /// Something was heard that may change the map.
    reconsider: Notify,
    /// What workers are told.
    view: watch::Sender<Arc<v1::BeatReply>>,
}

impl Shared {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        // A panic while it was held left values behind, each of them whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
    /// Reads the map that is there.
    ///
    /// # Errors
    /// The map cannot be read, or contradicts `options`.
    pub fn build(options: Options, store: Arc<dyn MapStore>) -> Result<Self, Error> {
        let map = store.get()?;
        if let Some(map) = &map {
            let fixed = |what, expected, found| {
                if expected == found { Ok(()) } else { Err(Error::Fixed { what, expected, found }) }
            };
            fixed("partitions", options.partitions, map.partitions.len() as u32)?;
            let workers = map.partitions.iter().map(|entry| entry.primary.0 + 1).max().unwrap_or(0);
            if workers > options.workers {
                return Err(Error::Fixed { what: "workers", expected: options.workers, found: workers });
            }
        }
        let state = State::new(map);
        let view = watch::Sender::new(Arc::new(state.view()));
        let shared = Shared { options, state: Mutex::new(state), reconsider: Notify::new(), view };
        Ok(Self { shared: Arc::new(shared), store })
    }

    /// Serves on `listener` until `shutdown` completes, then ends within a moment: streams of workers are cut, which they
    /// survive.
    ///
    /// # Errors
    /// The listener fails.
    pub async fn run(self, listener: TcpListener, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
        let writer = tokio::spawn(writer::run(Arc::clone(&self.shared), self.store));
        let timer = tokio::spawn(watch_for_silence(Arc::clone(&self.shared)));
        let service = CoordinatorServiceServer::new(service::Service { shared: self.shared })
            .max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
        let incoming = tonic::transport::server::TcpIncoming::from(listener).with_nodelay(Some(true));
        let serving = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(Duration::from_secs(5)))
            .add_service(service)
            .serve_with_incoming(incoming);
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
    let mut ticks = tokio::time::interval(SUSPECT_AFTER / 6);
    // Missed ticks are not made up for: a stalled process must not take its own pause for everybody's silence.
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if shared.state().tick() {
            shared.publish();
        }
    }
}
