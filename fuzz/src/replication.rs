//! Messages between workers, up to the store that receives them.

use crate::{wire, world};
use engram_cluster::{Entry, PartitionMap};
use engram_memory::{ClusterId, Command, Incarnation, Member, MemoryId, Ordinal, Record, StoreId, Term, Upsert};
use engram_proto::v1;
use engram_store::leases::GRANT_MS;
use engram_store::peer::{Envelope, Proposal};
use engram_store::{ManualClock, Peers, Store};
use prost::Message as _;
use std::sync::Arc;

/// The peer.
const PEER: Member = Member { ordinal: Ordinal(0), store: StoreId(77), incarnation: Incarnation(1) };
/// Term of the first map, with this store as a backup, or as the primary.
const TERM: Term = Term(3);

/// Encodes a message as it is sent.
pub fn encode_envelope(envelope: Envelope) -> v1::PeerMessage {
    wire::encode(envelope)
}

/// The first byte selects whether the store is the primary, the rest is a frame. The store receives its messages one after another and keeps
/// working; its disk stays recoverable.
pub(crate) fn frame(bytes: &[u8]) {
    let Some((role, bytes)) = bytes.split_first() else { return };
    let Ok(frame) = v1::PeerFrame::decode(bytes) else { return };
    let leads = role % 2 == 1;
    let (disk, clock) = (world::disk(), Arc::new(ManualClock::new(1_000_000)));
    let (mut store, _) = world::open_at(&disk, 2, Arc::clone(&clock)).expect("the disk has an empty store");
    store.set_peers(Box::new(RoundTripPeers));
    store.update_map(&map(&store, leads));
    store.connect_peer(PEER);
    store.turn().expect("the disk does not fail");
    // Leases of an earlier process have expired: a primary may serve.
    clock.advance(GRANT_MS);
    store.turn().expect("the disk does not fail");
    for message in frame.messages.into_iter().take(32) {
        let envelope = match wire::decode(message, 1) {
            Ok(envelope) => envelope,
            Err(malformed) => {
                assert!(malformed.to_string().contains("allowed"), "{malformed}");
                continue;
            }
        };
        assert!(envelope.bytes() <= bytes.len() * 2 + 64, "memory is proportional to the input");
        if leads {
            let upsert = Command::Upsert(Upsert { ids: (1..4).map(MemoryId).collect(), ..Upsert::default() });
            store.write(vec![(world::P, Record::bare(upsert))], drop);
        }
        store.receive(PEER, vec![envelope]).expect("no message of a peer fails the device");
        store.turn().expect("no message of a peer fails the log");
        let status = &store.replicas()[0];
        assert!(status.applied <= status.commit && status.commit <= status.last, "{status:?}");
    }
    drop(store);
    disk.kill();
    let (_, recovery) = world::open(&disk, 2).expect("the log is recoverable after any message");
    assert!(recovery.corrupt.is_empty() && recovery.skipped_snapshots.is_empty(), "{recovery:?}");
}

/// Checks that every sent message decodes to itself.
struct RoundTripPeers;

impl Peers for RoundTripPeers {
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
