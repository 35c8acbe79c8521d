//! Conversions between domain types and protocol messages: maps and members for coordinators and workers, writes for clients and workers.
//!
//! Holds no logic. Every field from the wire is checked here, once: what is returned satisfies the invariants of its type.
#![forbid(unsafe_code)]

mod write;

pub use write::{PartitionWrite, WriteBody, WriteRequest};

use engram_cluster::rebuild::{MapStateReport, ReplicaState};
use engram_cluster::{Change, Entry, PartitionMap};
use engram_memory::{ClusterId, Incarnation, Lsn, Member, Ordinal, RunId, StoreId, Term};
use engram_proto::v1;

/// A malformed field of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{field}: expected {expected}, found {found}")]
pub struct Malformed {
    /// Field name.
    pub field: &'static str,
    /// Expected value.
    pub expected: &'static str,
    /// Actual length or value.
    pub found: usize,
}

fn id(field: &'static str, bytes: &[u8]) -> Result<u128, Malformed> {
    let malformed = |_| Malformed { field, expected: "16 bytes", found: bytes.len() };
    bytes.try_into().map(u128::from_be_bytes).map_err(malformed)
}

/// Reads a counter that continues from this value.
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

/// Reads a store id.
///
/// # Errors
/// Not 16 bytes.
pub fn store_from_proto(store: &[u8]) -> Result<StoreId, Malformed> {
    id("store", store).map(StoreId)
}

/// Writes a map.
pub fn map_to_proto(map: &PartitionMap) -> v1::PartitionMap {
    v1::PartitionMap {
        cluster: map.cluster.0.to_be_bytes().to_vec().into(),
        version: map.version,
        partitions: map.partitions.iter().map(entry_to_proto).collect(),
    }
}

/// Writes a map entry.
pub fn entry_to_proto(entry: &Entry) -> v1::MapEntry {
    let members = |members: &[Member]| members.iter().map(member_id_to_proto).collect();
    v1::MapEntry {
        term: entry.term.0,
        primary: entry.primary.0,
        isr: members(&entry.isr),
        solo_safe: entry.solo_safe,
        activated: entry.activated,
        previous: members(&entry.prev),
        learners: entry.learners.iter().map(|ordinal| ordinal.0).collect(),
    }
}

/// Reads a map.
///
/// # Errors
/// An id in it is not 16 bytes.
pub fn map_from_proto(map: &v1::PartitionMap) -> Result<PartitionMap, Malformed> {
    Ok(PartitionMap {
        cluster: cluster_from_proto(&map.cluster)?,
        version: number("version", map.version)?,
        partitions: map.partitions.iter().map(entry_from_proto).collect::<Result<_, _>>()?,
    })
}

/// Reads a map entry.
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
        prev: members(&entry.previous)?,
        learners: entry.learners.iter().map(|&ordinal| Ordinal(ordinal)).collect(),
    };
    let expected =
        "the primary exactly once, one member if solo safe, no previous set once activated, a term below 2^63";
    read.check_invariants().map_err(|_| Malformed { field: "isr", expected, found: read.isr.len() })?;
    Ok(read)
}

/// Writes a change; `None` for a change that only a coordinator decides.
pub fn change_to_proto(change: &Change) -> Option<v1::map_change::Change> {
    use v1::map_change::Change as Message;
    Some(match change {
        Change::Activate => Message::Activate(v1::Activate {}),
        Change::Add { primary, newcomer } => Message::Add(v1::AddReplica {
            primary: Some(member_id_to_proto(primary)),
            replica: Some(member_id_to_proto(newcomer)),
        }),
        Change::Remove { primary, leaver } => {
            Message::Remove(v1::RemoveReplica { primary: Some(member_id_to_proto(primary)), replica: leaver.0 })
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
pub fn change_from_proto(change: Option<&v1::map_change::Change>) -> Result<Change, Malformed> {
    use v1::map_change::Change as Message;
    let absent = |field| Malformed { field, expected: "a value", found: 0 };
    let member = |field, member: &Option<v1::MemberId>| {
        member.as_ref().ok_or_else(|| absent(field)).and_then(member_id_from_proto)
    };
    Ok(match change.ok_or_else(|| absent("change"))? {
        Message::Activate(_) => Change::Activate,
        Message::Add(add) => {
            Change::Add { primary: member("primary", &add.primary)?, newcomer: member("newcomer", &add.replica)? }
        }
        Message::Remove(remove) => {
            Change::Remove { primary: member("primary", &remove.primary)?, leaver: Ordinal(remove.replica) }
        }
        Message::Promote(promote) => Change::Promote {
            primary: member("primary", &promote.primary)?,
            isr: promote.isr.iter().map(|&ordinal| Ordinal(ordinal)).collect(),
        },
    })
}

/// Writes the map state report of a worker, in answer to the request with this number.
pub fn map_state_to_proto(cluster: ClusterId, number: u64, report: &MapStateReport) -> v1::ReportMapStateRequest {
    let replica = |replica: &ReplicaState| v1::ReplicaState {
        promised_term: replica.promised.0,
        last_lsn: replica.last.0,
        last_term: replica.last_term.0,
        damaged: replica.damaged,
    };
    v1::ReportMapStateRequest {
        cluster: cluster.0.to_be_bytes().to_vec().into(),
        member: Some(member_id_to_proto(&report.member)),
        request_number: number,
        newest_map: report.last_map.as_ref().map(map_to_proto),
        replicas: report.replicas.iter().map(replica).collect(),
    }
}

/// Reads the map state report of a worker.
///
/// # Errors
/// An id in it is not 16 bytes, or its member is absent.
pub fn map_state_from_proto(report: &v1::ReportMapStateRequest) -> Result<MapStateReport, Malformed> {
    let absent = Malformed { field: "member", expected: "a value", found: 0 };
    let replica = |replica: &v1::ReplicaState| {
        Ok(ReplicaState {
            promised: Term(number("promised", replica.promised_term)?),
            last: Lsn(replica.last_lsn),
            last_term: Term(replica.last_term),
            damaged: replica.damaged,
        })
    };
    Ok(MapStateReport {
        member: member_id_from_proto(report.member.as_ref().ok_or(absent)?)?,
        last_map: report.newest_map.as_ref().map(map_from_proto).transpose()?,
        replicas: report.replicas.iter().map(replica).collect::<Result<_, _>>()?,
    })
}

/// Returns the trace of the failover from a process, on which workers and coordinators agree.
pub fn failover_trace(cluster: ClusterId, dead: &Member) -> engram_trace::Context {
    let subject =
        [&cluster.0.to_be_bytes()[..], &dead.store.0.to_be_bytes(), &dead.incarnation.0.to_be_bytes()].concat();
    engram_trace::Context::of("failover", &subject)
}

/// Returns the trace of a run, on which all workers agree.
pub fn run_trace(run: RunId) -> engram_trace::Context {
    engram_trace::Context::of("run", &run.0.to_be_bytes())
}

/// Returns the trace of a step of a training, on which the members of its group agree.
pub fn step_trace(run: RunId, submitted_ms: u64, step: u64) -> engram_trace::Context {
    let subject = [&run.0.to_be_bytes()[..], &submitted_ms.to_be_bytes(), &step.to_be_bytes()].concat();
    engram_trace::Context::of("training step", &subject)
}
