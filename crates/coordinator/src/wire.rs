//! Conversions between the protocol's map and its messages; workers use them too.

use crate::state::{Addresses, Heard};
use engram_cluster::rebuild::{Copy, Testimony};
use engram_cluster::{Change, Entry, PartitionMap};
use engram_mapstore::{Order, Step, What};
use engram_memory::{ClusterId, Incarnation, Lsn, Member, Ordinal, PartitionId, StoreId, Term};
use engram_proto::v1;

/// Why a message is not what it should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{field}: expected {expected}, found {found}")]
pub struct Malformed {
    /// Field.
    pub field: &'static str,
    /// What it should be.
    pub expected: &'static str,
    /// How many there are.
    pub found: usize,
}

fn id(field: &'static str, bytes: &[u8]) -> Result<u128, Malformed> {
    let malformed = |_| Malformed { field, expected: "16 bytes", found: bytes.len() };
    bytes.try_into().map(u128::from_be_bytes).map_err(malformed)
}

/// Reads a number that is raised from there on.
fn number(field: &'static str, found: u64) -> Result<u64, Malformed> {
    let malformed = Malformed { field, expected: "less than 2^63", found: found as usize };
    if found > Entry::LAST_TERM.0 { Err(malformed) } else { Ok(found) }
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
        store: store_from_proto(&member.store)?,
        incarnation: Incarnation(member.incarnation),
    })
}

/// Reads the identity of a disk.
pub(crate) fn store_from_proto(store: &[u8]) -> Result<StoreId, Malformed> {
    id("store", store).map(StoreId)
}

/// Writes a map.
pub fn map_to_proto(map: &PartitionMap) -> v1::ClusterMap {
    v1::ClusterMap {
        cluster: map.cluster.0.to_be_bytes().to_vec().into(),
        version: map.version,
        partitions: map.partitions.iter().map(entry_to_proto).collect(),
    }
}

pub(crate) fn entry_to_proto(entry: &Entry) -> v1::MapEntry {
    let members = |members: &[Member]| members.iter().map(member_id_to_proto).collect();
    v1::MapEntry {
        term: entry.term.0,
        primary: entry.primary.0,
        isr: members(&entry.isr),
        solo_safe: entry.solo_safe,
        activated: entry.activated,
        prev: members(&entry.prev),
        learners: entry.learners.iter().map(|ordinal| ordinal.0).collect(),
    }
}

/// Reads a map.
///
/// # Errors
/// An id in it is not 16 bytes.
pub fn map_from_proto(map: &v1::ClusterMap) -> Result<PartitionMap, Malformed> {
    Ok(PartitionMap {
        cluster: cluster_from_proto(&map.cluster)?,
        version: number("version", map.version)?,
        partitions: map.partitions.iter().map(entry_from_proto).collect::<Result<_, _>>()?,
    })
}

/// Reads an entry of a map.
///
/// # Errors
/// A store id in it is not 16 bytes, or its primary is not in sync.
pub fn entry_from_proto(entry: &v1::MapEntry) -> Result<Entry, Malformed> {
    let members = |members: &[v1::MemberId]| members.iter().map(member_id_from_proto).collect::<Result<Vec<_>, _>>();
    let read = Entry {
        term: Term(entry.term),
        primary: Ordinal(entry.primary),
        isr: members(&entry.isr)?,
        solo_safe: entry.solo_safe,
        activated: entry.activated,
        prev: members(&entry.prev)?,
        learners: entry.learners.iter().map(|&ordinal| Ordinal(ordinal)).collect(),
    };
    let expected = "the primary among it once, nobody else where one is alone, none before it once it is activated, at a term below 2^63";
    read.check_alone().map_err(|_| Malformed { field: "isr", expected, found: read.isr.len() })?;
    Ok(read)
}

/// Writes a change; `None` for what only a coordinator decides.
pub fn change_to_proto(change: &Change) -> Option<v1::map_proposal::Change> {
    use v1::map_proposal::Change as Message;
    Some(match change {
        Change::Activate => Message::Activate(v1::Activate {}),
        Change::Add { primary, newcomer } => Message::Add(v1::AddCopy {
            primary: Some(member_id_to_proto(primary)),
            newcomer: Some(member_id_to_proto(newcomer)),
        }),
        Change::Remove { primary, leaver } => {
            Message::Remove(v1::RemoveCopy { primary: Some(member_id_to_proto(primary)), leaver: leaver.0 })
        }
        Change::Promote { primary, isr } => Message::Promote(v1::Promote {
            primary: Some(member_id_to_proto(primary)),
            isr: isr.iter().map(|ordinal| ordinal.0).collect(),
        }),
        Change::Learn(_) => return None,
    })
}

/// Reads a change.
///
/// # Errors
/// It is absent, or a member in it is absent or malformed.
pub fn change_from_proto(change: Option<&v1::map_proposal::Change>) -> Result<Change, Malformed> {
    use v1::map_proposal::Change as Message;
    let absent = |field| Malformed { field, expected: "a value", found: 0 };
    let member = |field, member: &Option<v1::MemberId>| {
        member.as_ref().ok_or_else(|| absent(field)).and_then(member_id_from_proto)
    };
    Ok(match change.ok_or_else(|| absent("change"))? {
        Message::Activate(_) => Change::Activate,
        Message::Add(add) => {
            Change::Add { primary: member("primary", &add.primary)?, newcomer: member("newcomer", &add.newcomer)? }
        }
        Message::Remove(remove) => {
            Change::Remove { primary: member("primary", &remove.primary)?, leaver: Ordinal(remove.leaver) }
        }
        Message::Promote(promote) => Change::Promote {
            primary: member("primary", &promote.primary)?,
            isr: promote.isr.iter().map(|&ordinal| Ordinal(ordinal)).collect(),
        },
    })
}

/// Writes what a worker's disk has seen, in answer to the question of this number.
pub fn testimony_to_proto(cluster: ClusterId, number: u64, testimony: &Testimony) -> v1::Testimony {
    let copy = |copy: &Copy| v1::SeenCopy {
        promised: copy.promised.0,
        last_lsn: copy.last.0,
        last_term: copy.last_term.0,
        damaged: copy.damaged,
    };
    v1::Testimony {
        cluster: cluster.0.to_be_bytes().to_vec().into(),
        member: Some(member_id_to_proto(&testimony.member)),
        number,
        seen: testimony.seen.as_ref().map(map_to_proto),
        copies: testimony.copies.iter().map(copy).collect(),
    }
}

/// Reads what a worker's disk has seen.
///
/// # Errors
/// An id in it is not 16 bytes, or its member is absent.
pub fn testimony_from_proto(testimony: &v1::Testimony) -> Result<Testimony, Malformed> {
    let absent = Malformed { field: "member", expected: "a value", found: 0 };
    let copy = |copy: &v1::SeenCopy| {
        Ok(Copy {
            promised: Term(number("promised", copy.promised)?),
            last: Lsn(copy.last_lsn),
            last_term: Term(copy.last_term),
            damaged: copy.damaged,
        })
    };
    Ok(Testimony {
        member: member_id_from_proto(testimony.member.as_ref().ok_or(absent)?)?,
        seen: testimony.seen.as_ref().map(map_from_proto).transpose()?,
        copies: testimony.copies.iter().map(copy).collect::<Result<_, _>>()?,
    })
}

pub(crate) fn order_to_proto(order: &Order) -> v1::MapOrder {
    let what = match order.what {
        What::ForcePromote => "force-promote",
        What::RebuildMap => "rebuild-map",
    };
    v1::MapOrder {
        at_ms: order.at_ms,
        by: order.by.clone(),
        reason: order.reason.clone(),
        what: what.to_owned(),
        map_version: order.version,
        steps: order.steps.iter().map(step_to_proto).collect(),
    }
}

pub(crate) fn step_to_proto(step: &Step) -> v1::MapOrderStep {
    v1::MapOrderStep {
        partition: step.partition.0,
        before: step.before.as_ref().map(entry_to_proto),
        after: Some(entry_to_proto(&step.after)),
        lost: step.lost.clone(),
    }
}

/// Reads what was judged of a partition.
///
/// # Errors
/// It does not say what shall be there, or an entry in it is malformed.
pub fn step_from_proto(step: &v1::MapOrderStep) -> Result<Step, Malformed> {
    let absent = Malformed { field: "after", expected: "a value", found: 0 };
    Ok(Step {
        partition: PartitionId(step.partition),
        before: step.before.as_ref().map(entry_from_proto).transpose()?,
        after: entry_from_proto(step.after.as_ref().ok_or(absent)?)?,
        lost: step.lost.clone(),
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
        dead: heard.dead,
        leaving: heard.is_leaving(),
    }
}

pub(crate) fn addresses(hello: &v1::Hello) -> Addresses {
    Addresses {
        client: hello.client_address.clone(),
        peer: hello.peer_address.clone(),
        http: hello.http_address.clone(),
    }
}
