//! Conversions between the protocol's map and its messages; workers use them too.

use crate::state::{Addresses, Heard};
use engram_cluster::{Entry, PartitionMap};
use engram_memory::{ClusterId, Incarnation, Member, Ordinal, StoreId, Term};
use engram_proto::v1;

/// Why a message is not what it should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{field}: expected {expected}, found {found} bytes")]
pub struct Malformed {
    /// Field.
    pub field: &'static str,
    /// What it should be.
    pub expected: &'static str,
    /// Its length.
    pub found: usize,
}

fn id(field: &'static str, bytes: &[u8]) -> Result<u128, Malformed> {
    let malformed = |_| Malformed { field, expected: "16 bytes", found: bytes.len() };
    bytes.try_into().map(u128::from_be_bytes).map_err(malformed)
}

/// Reads a cluster id.
///
/// # Errors
/// Not 16 bytes.
pub fn cluster_from_proto(bytes: &[u8]) -> Result<ClusterId, Malformed> {
    id("cluster", bytes).map(ClusterId)
}

/// Writes a member.
pub fn member_id_to_proto(member: &Member) -> v1::MemberId {
    v1::MemberId {
        ordinal: member.ordinal.0,
        store: member.store.0.to_be_bytes().to_vec().into(),
        incarnation: member.incarnation.0,
    }
}

/// Reads a member.
///
/// # Errors
/// Its store id is not 16 bytes.
pub fn member_id_from_proto(member: &v1::MemberId) -> Result<Member, Malformed> {
    Ok(Member {
        ordinal: Ordinal(member.ordinal),
        store: StoreId(id("store", &member.store)?),
        incarnation: Incarnation(member.incarnation),
    })
}

/// Writes a map.
pub fn map_to_proto(map: &PartitionMap) -> v1::ClusterMap {
    let members = |members: &[Member]| members.iter().map(member_id_to_proto).collect();
    v1::ClusterMap {
        cluster: map.cluster.0.to_be_bytes().to_vec().into(),
        version: map.version,
        partitions: map
            .partitions
            .iter()
            .map(|entry| v1::MapEntry {
                term: entry.term.0,
                primary: entry.primary.0,
                isr: members(&entry.isr),
                solo_safe: entry.solo_safe,
                activated: entry.activated,
                prev: members(&entry.prev),
                learners: entry.learners.iter().map(|ordinal| ordinal.0).collect(),
            })
            .collect(),
    }
}

/// Reads a map.
///
/// # Errors
/// An id in it is not 16 bytes.
pub fn map_from_proto(map: &v1::ClusterMap) -> Result<PartitionMap, Malformed> {
    let members = |members: &[v1::MemberId]| members.iter().map(member_id_from_proto).collect::<Result<Vec<_>, _>>();
    let entry = |entry: &v1::MapEntry| {
        Ok(Entry {
            term: Term(entry.term),
            primary: Ordinal(entry.primary),
            isr: members(&entry.isr)?,
            solo_safe: entry.solo_safe,
            activated: entry.activated,
            prev: members(&entry.prev)?,
            learners: entry.learners.iter().map(|&ordinal| Ordinal(ordinal)).collect(),
        })
    };
    Ok(PartitionMap {
        cluster: cluster_from_proto(&map.cluster)?,
        version: map.version,
        partitions: map.partitions.iter().map(entry).collect::<Result<_, _>>()?,
    })
}

pub(crate) fn member_to_proto(heard: &Heard) -> v1::MemberEntry {
    v1::MemberEntry {
        ordinal: heard.member.ordinal.0,
        store: heard.member.store.0.to_be_bytes().to_vec().into(),
        incarnation: heard.member.incarnation.0,
        client_address: heard.addresses.client.clone(),
        peer_address: heard.addresses.peer.clone(),
        http_address: heard.addresses.http.clone(),
        alive: heard.alive,
    }
}

pub(crate) fn addresses(hello: &v1::Hello) -> Addresses {
    Addresses {
        client: hello.client_address.clone(),
        peer: hello.peer_address.clone(),
        http: hello.http_address.clone(),
    }
}
