//! What workers say to each other: one stream per pair for the stores, beats between partners, proposals to the coordinators.
//!
//! Decides who dials whom, what is let in, and how much may be under way; what a message means is the store's business. What cannot
//! be sent is dropped: the store makes it good when it hears that a link is open.
//!
//! ```text
//! engine ──send──> Links ── Outbox ──frames──> the other worker's listener, or the stream it opened
//!    │                                            │
//!    │ <──hear, at most 32 MiB not taken── read <─┘
//!    └──propose──> Proposals ── coordinators in turn, or the map store when none answers
//! ```
//!
//! Invariants: nothing is taken of a stream before its hello was checked; a place has one link, that of its newest process; what
//! waits in either direction is bounded by bytes.

mod beats;
mod hello;
mod link;
mod links;
mod map_keeper;
mod outbox;
mod proposals;
mod service;
mod wire;
mod witness;

pub(crate) use beats::run as beat_partners;
pub(crate) use hello::{Greeter, Reachable};
pub(crate) use link::{CONNECTION_WINDOW, STREAM_WINDOW, dial_partners};
pub(crate) use links::{Links, Traffic, WayOut};
pub(crate) use map_keeper::MapKeeper;
pub(crate) use proposals::{Proposals, hand_over as hand_over_proposals};
pub(crate) use service::Service;
pub(crate) use witness::{OPINION_MS, Witness};

use crate::shared::Shared;
use engram_cluster::{Entry, PartitionMap};
use engram_memory::Ordinal;
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::task::JoinSet;

/// The workers that share a partition with `me`, in any role.
pub(crate) fn partners(map: &PartitionMap, me: Ordinal) -> BTreeSet<Ordinal> {
    let mut partners: BTreeSet<Ordinal> =
        map.partitions.iter().filter(|entry| places(entry).any(|place| place == me)).flat_map(places).collect();
    partners.remove(&me);
    partners
}

/// Runs `keep` for every worker that shares a partition with this one and has a higher number: of two workers the lower one dials.
/// Ends when dropped.
async fn each_partner<F>(shared: &Arc<Shared>, keep: impl Fn(Arc<Shared>, Ordinal) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut view = shared.view.subscribe();
    let (mut dialled, mut tasks) = (BTreeSet::new(), JoinSet::new());
    view.mark_changed();
    while view.changed().await.is_ok() {
        let map = view.borrow_and_update().map.clone();
        let Some(map) = map else { continue };
        let higher = partners(&map, shared.ordinal()).into_iter().filter(|other| *other > shared.ordinal());
        for ordinal in higher.filter(|other| dialled.insert(*other)).collect::<Vec<_>>() {
            tasks.spawn(keep(Arc::clone(shared), ordinal));
        }
    }
}

fn places(entry: &Entry) -> impl Iterator<Item = Ordinal> {
    let members = entry.isr.iter().chain(&entry.prev).map(|member| member.ordinal);
    members.chain(entry.learners.iter().copied()).chain([entry.primary])
}
