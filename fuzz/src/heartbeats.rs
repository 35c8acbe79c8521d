//! Messages between workers and a coordinator.

use engram_cluster::{Entry, PartitionMap, rebuild};
use engram_memory::{ClusterId, Incarnation, Member, Ordinal, PartitionId, StoreId};
use engram_proto::v1;
use engram_wire as wire;
use prost::Message;
use std::collections::BTreeSet;

const PARTITIONS: u32 = 3;
const CLUSTER: ClusterId = ClusterId(7);

/// The first byte selects the message type of the rest.
pub(crate) fn heartbeat(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else { return };
    match kind % 4 {
        0 => each::<v1::HeartbeatRequest>(bytes, |heartbeat| {
            let Some(hello) = heartbeat.hello else { return };
            if let Some(Ok(member)) = hello.member.as_ref().map(wire::member_id_from_proto) {
                assert_eq!(wire::member_id_from_proto(&wire::member_id_to_proto(&member)), Ok(member));
            }
            let _ = wire::cluster_from_proto(&hello.cluster);
        }),
        1 => each::<v1::HeartbeatResponse>(bytes, |reply| {
            if let Some(Ok(map)) = reply.map.as_ref().map(wire::map_from_proto) {
                accepted(&map);
                assert_eq!(wire::map_from_proto(&wire::map_to_proto(&map)), Ok(map));
            }
        }),
        2 => each::<v1::MapChange>(bytes, |proposal| {
            let Ok(change) = wire::change_from_proto(proposal.change.as_ref()) else { return };
            if let Some(encoded) = wire::change_to_proto(&change) {
                assert_eq!(wire::change_from_proto(Some(&encoded)), Ok(change.clone()));
            }
            // A worker's proposal is applied to the current entry, or rejected.
            for before in entries() {
                if let Ok(after) = before.apply(&change) {
                    match before.check(&after) {
                        Ok(()) => after.check_invariants().expect("an accepted change keeps the invariants"),
                        Err(illegal) => assert!(!illegal.to_string().is_empty()),
                    }
                }
            }
        }),
        // Reports of several disks, from which a lost map is rebuilt.
        _ => {
            let mut rest = bytes;
            let mut reports = Vec::new();
            while let Ok(message) = v1::ReportMapStateRequest::decode_length_delimited(&mut rest) {
                reports.extend(wire::map_state_from_proto(&message));
                if rest.is_empty() {
                    break;
                }
            }
            let expected: BTreeSet<Ordinal> = (0..3).map(Ordinal).collect();
            let rebuilt = rebuild::rebuild(CLUSTER, PARTITIONS, &expected, &reports);
            assert_eq!(rebuilt.is_none(), reports.is_empty(), "one report suffices to rebuild a map");
            for entry in rebuilt.iter().flat_map(|rebuilt| &rebuilt.map.partitions) {
                assert!(entry.primary_member().is_some(), "{entry:?} has no primary");
            }
            for partition in (0..PARTITIONS).map(PartitionId) {
                let promised = rebuild::highest_promise(partition, &reports);
                if let Some(chosen) = rebuild::find_most_advanced(partition, &reports) {
                    assert!(rebuild::force_entry(None, &chosen.member, promised).term > promised);
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

/// Checks that a decoded map is usable.
pub(crate) fn accepted(map: &PartitionMap) {
    for (_, entry) in map.entries() {
        assert!(entry.primary_member().is_some(), "{entry:?} has no primary");
        assert_eq!(entry.check(entry), Ok(()), "an unchanged entry is valid");
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
