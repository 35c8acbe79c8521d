//! What workers tell a coordinator, and what it tells them.

use engram_cluster::{Entry, PartitionMap, rebuild};
use engram_coordinator::wire;
use engram_memory::{ClusterId, Incarnation, Member, Ordinal, PartitionId, StoreId};
use engram_proto::v1;
use prost::Message;
use std::collections::BTreeSet;

const PARTITIONS: u32 = 3;
const CLUSTER: ClusterId = ClusterId(7);

/// The first byte says which message the rest is.
pub(crate) fn heartbeat(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else { return };
    match kind % 4 {
        0 => each::<v1::Beat>(bytes, |beat| {
            let Some(hello) = beat.hello else { return };
            if let Some(Ok(member)) = hello.member.as_ref().map(wire::member_id_from_proto) {
                assert_eq!(wire::member_id_from_proto(&wire::member_id_to_proto(&member)), Ok(member));
            }
            let _ = wire::cluster_from_proto(&hello.cluster);
        }),
        1 => each::<v1::BeatReply>(bytes, |reply| {
            if let Some(Ok(map)) = reply.map.as_ref().map(wire::map_from_proto) {
                accepted(&map);
                assert_eq!(wire::map_from_proto(&wire::map_to_proto(&map)), Ok(map));
            }
        }),
        2 => each::<v1::MapProposal>(bytes, |proposal| {
            let Ok(change) = wire::change_from_proto(proposal.change.as_ref()) else { return };
            if let Some(told) = wire::change_to_proto(&change) {
                assert_eq!(wire::change_from_proto(Some(&told)), Ok(change.clone()));
            }
            // What a worker proposes is applied to the entry that is there, or refused.
            for before in entries() {
                if let Ok(after) = before.changed(&change) {
                    match before.check(&after) {
                        Ok(()) => after.check_alone().expect("what is legal can be handed on"),
                        Err(illegal) => assert!(!illegal.to_string().is_empty()),
                    }
                }
            }
        }),
        // What several disks have seen, from which a lost map is made anew.
        _ => {
            let mut rest = bytes;
            let mut told = Vec::new();
            while let Ok(message) = v1::Testimony::decode_length_delimited(&mut rest) {
                told.extend(wire::testimony_from_proto(&message));
                if rest.is_empty() {
                    break;
                }
            }
            let expected: BTreeSet<Ordinal> = (0..3).map(Ordinal).collect();
            let rebuilt = rebuild::rebuild(CLUSTER, PARTITIONS, &expected, &told);
            assert_eq!(rebuilt.is_none(), told.is_empty(), "one word is enough for a map");
            for entry in rebuilt.iter().flat_map(|rebuilt| &rebuilt.map.partitions) {
                assert!(entry.primary_member().is_some(), "{entry:?} has no primary");
            }
            for partition in (0..PARTITIONS).map(PartitionId) {
                let promised = rebuild::highest_promise(partition, &told);
                if let Some(chosen) = rebuild::most_advanced(partition, &told) {
                    assert!(rebuild::forced(None, &chosen.member, promised).term > promised);
                }
            }
        }
    }
}

fn each<M: Message + Default>(bytes: &[u8], check: impl FnOnce(M)) {
    if let Ok(message) = M::decode(bytes) {
        check(message);
    }
}

/// A map that was read is one that can be worked with.
pub(crate) fn accepted(map: &PartitionMap) {
    for (_, entry) in map.entries() {
        assert!(entry.primary_member().is_some(), "{entry:?} has no primary");
        assert_eq!(entry.check(entry), Ok(()), "an entry may stay as it is");
    }
}

fn entries() -> [Entry; 3] {
    let member = |ordinal: u32| Member {
        ordinal: Ordinal(ordinal),
        store: StoreId(u128::from_be_bytes([ordinal as u8 + 1; 16])),
        incarnation: Incarnation(1),
    };
    let pair = Entry::first(vec![member(0), member(1)]);
    let changing = Entry { activated: false, prev: vec![member(2)], learners: vec![Ordinal(3)], ..pair.clone() };
    [pair, changing, Entry::first(vec![member(1)])]
}
