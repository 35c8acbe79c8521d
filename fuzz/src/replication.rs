//! What workers say to each other, as far as the store that hears it.

use crate::{wire, world};
use engram_cluster::{Entry, PartitionMap};
use engram_memory::{ClusterId, Command, Incarnation, Member, MemoryId, Ordinal, Record, StoreId, Term, Upsert};
use engram_proto::v1;
use engram_store::leases::GRANT_MS;
use engram_store::peer::{Envelope, Proposal};
use engram_store::{ManualClock, Peers, Store};
use prost::Message as _;
use std::sync::Arc;

/// The other worker.
const PEER: Member = Member { ordinal: Ordinal(0), store: StoreId(77), incarnation: Incarnation(1) };
/// Term of the first map, with this store as a follower, or as the primary.
const TERM: Term = Term(3);

/// A message as it travels.
pub fn encode_envelope(envelope: Envelope) -> v1::PeerMessage {
    wire::encode(envelope)
}

/// The first byte says whether the store is the primary, the rest is a frame. The store hears its messages one after the other
/// and goes on working; what it then has on disk is whole.
pub(crate) fn frame(bytes: &[u8]) {
    let Some((role, bytes)) = bytes.split_first() else { return };
    let Ok(frame) = v1::PeerFrame::decode(bytes) else { return };
    let leads = role % 2 == 1;
    let (disk, clock) = (world::disk(), Arc::new(ManualClock::new(1_000_000)));
    let (mut store, _) = world::open_at(&disk, 2, Arc::clone(&clock)).expect("the disk is that of an empty store");
    store.set_peers(Box::new(Told));
    store.learn(&map(&store, leads));
    store.connected(PEER);
    store.turn().expect("the disk works");
    // Leases of a process before have ended: a primary may serve.
    clock.advance(GRANT_MS);
    store.turn().expect("the disk works");
    for message in frame.messages.into_iter().take(32) {
        let envelope = match wire::decode(message, 1) {
            Ok(envelope) => envelope,
            Err(malformed) => {
                assert!(malformed.to_string().contains("allowed"), "{malformed}");
                continue;
            }
        };
        assert!(envelope.bytes() <= bytes.len() * 2 + 64, "memory is taken for what is there");
        if leads {
            let upsert = Command::Upsert(Upsert { ids: (1..4).map(MemoryId).collect(), ..Upsert::default() });
            store.write(vec![(world::P, Record::bare(upsert))], drop);
        }
        store.hear(PEER, vec![envelope]).expect("nothing that a peer says stops the device");
        store.turn().expect("nothing that a peer says stops the log");
        let status = &store.replicas()[0];
        assert!(status.applied <= status.commit && status.commit <= status.last, "{status:?}");
    }
    drop(store);
    disk.kill();
    let (_, recovery) = world::open(&disk, 2).expect("whatever a peer says, the log can be recovered");
    assert!(recovery.corrupt.is_empty() && recovery.passed_over.is_empty(), "{recovery:?}");
}

/// Everything that a store says is something that a store hears.
struct Told;

impl Peers for Told {
    fn send(&mut self, _to: Ordinal, envelopes: Vec<Envelope>) {
        for envelope in envelopes {
            assert_eq!(wire::decode(wire::encode(envelope.clone()), 1), Ok(envelope));
        }
    }

    fn propose(&mut self, _proposals: Vec<Proposal>) {}
}

fn map(store: &Store, leads: bool) -> PartitionMap {
    let me = store.member();
    let first = if leads { [me, PEER] } else { [PEER, me] };
    let entry = Entry { term: TERM, ..Entry::first(first.to_vec()) };
    PartitionMap { cluster: ClusterId(7), version: 1, partitions: vec![entry] }
}
