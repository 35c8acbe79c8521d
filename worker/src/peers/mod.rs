//! Communication between workers: one stream per pair for the stores, heartbeats between partners, map proposals to the
//! coordinators.
//!
//! Decides who dials whom, which streams are accepted, and how much may be in flight; the store interprets the messages. Messages
//! that cannot be sent are dropped: the store repeats them when it learns that a link is open.
//!
//! ```text
//! engine ──send──> Links ── Outbox ──frames──> the other worker's listener, or the stream it opened
//!    │                                            │
//!    │ <─receive, at most 32 MiB in flight─ read <─┘
//!    └──propose──> Proposals ── coordinators in turn, or the map store when none responds
//! ```
//!
//! Invariants: no message of a stream is processed before its hello was checked; each ordinal has one link, that of its newest
//! process; queues in both directions are bounded by bytes.

mod heartbeats;
mod hello;
mod link;
mod links;
mod map_store_client;
mod outbox;
mod peer_detector;
mod proposals;
mod service;
mod wire;

pub(crate) use heartbeats::run as heartbeat_partners;
pub(crate) use hello::{AdvertisedAddresses, HelloContext};
pub(crate) use link::{CONNECTION_WINDOW, FRAME_BYTES, STREAM_WINDOW, connect, dial_partners};
pub(crate) use links::{Links, StorePeers, Traffic};
pub(crate) use peer_detector::MIN_AGE_MS;
pub(crate) use proposals::{Proposals, submit_proposals};
pub(crate) use service::PeerEndpoint;

use crate::setup::Setup;
use crate::shared::Shared;
use engram_cluster::{Entry, PartitionMap};
use engram_memory::Ordinal;
use map_store_client::MapStoreClient;
use parking_lot::{Mutex, MutexGuard};
use peer_detector::PeerDetector;
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::task::JoinSet;

/// What this worker has to do with the others directly.
pub(crate) struct Peers {
    links: Arc<Links>,
    proposals: Arc<Proposals>,
    map_store: Option<MapStoreClient>,
    detector: Mutex<PeerDetector>,
}

impl Peers {
    pub(crate) fn new(setup: &Setup, links: Arc<Links>, proposals: Arc<Proposals>) -> Self {
        let detector = Mutex::new(PeerDetector::new(setup.clock.elapsed_ms()));
        Self { links, proposals, map_store: MapStoreClient::of(&setup.options), detector }
    }

    /// Open streams to the stores of other workers.
    pub(crate) fn links(&self) -> &Links {
        &self.links
    }

    /// Map changes proposed by the replicas here.
    pub(crate) fn proposals(&self) -> &Proposals {
        &self.proposals
    }

    /// Direct client of the map store, if this worker can reach it.
    const fn map_store(&self) -> Option<&MapStoreClient> {
        self.map_store.as_ref()
    }

    /// Returns the failure detector of partners.
    pub(crate) fn detector(&self) -> MutexGuard<'_, PeerDetector> {
        self.detector.lock()
    }
}

/// Returns the workers that share a partition with `me`, in any role.
pub(crate) fn partners(map: &PartitionMap, me: Ordinal) -> BTreeSet<Ordinal> {
    let mut partners: BTreeSet<Ordinal> = map
        .partitions
        .iter()
        .filter(|entry| member_ordinals(entry).any(|ordinal| ordinal == me))
        .flat_map(member_ordinals)
        .collect();
    partners.remove(&me);
    partners
}

/// Runs `maintain` for every worker that shares a partition with this one and has a higher ordinal: of two workers the one with the
/// lower ordinal dials. Ends when dropped.
async fn each_partner<F>(shared: &Arc<Shared>, maintain: impl Fn(Arc<Shared>, Ordinal) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut view = shared.membership.subscribe();
    let (mut dialled, mut tasks) = (BTreeSet::new(), JoinSet::new());
    view.mark_changed();
    while view.changed().await.is_ok() {
        let map = view.borrow_and_update().map.clone();
        let Some(map) = map else { continue };
        let higher = partners(&map, shared.ordinal()).into_iter().filter(|other| *other > shared.ordinal());
        for ordinal in higher.filter(|other| dialled.insert(*other)).collect::<Vec<_>>() {
            tasks.spawn(maintain(Arc::clone(shared), ordinal));
        }
    }
}

fn member_ordinals(entry: &Entry) -> impl Iterator<Item = Ordinal> {
    let members = entry.isr.iter().chain(&entry.prev).map(|member| member.ordinal);
    members.chain(entry.learners.iter().copied()).chain([entry.primary])
}
