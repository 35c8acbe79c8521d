//! Whether a partition can only be recovered by a forced promotion.

use super::{ClusterObservation, ClusterView, MemberHealth, workers};
use crate::map::{Entry, PartitionMap};
use engram_memory::{Ordinal, PartitionId};
use std::collections::BTreeSet;

/// Checks that a partition has no eligible candidate left. `damaged` lists the workers whose replica is damaged.
///
/// # Errors
/// Why a forced promotion is refused: the partition is served, recovers by itself, or still may.
pub fn check_force_promotable(
    map: &PartitionMap,
    partition: PartitionId,
    observed: &ClusterObservation,
    damaged: &BTreeSet<Ordinal>,
) -> Result<(), String> {
    let view = ClusterView { map, observed };
    let entry: &Entry = &map.partitions[partition.0 as usize];
    let whole = |ordinal: Ordinal| !damaged.contains(&ordinal);
    if let Some(member) = entry.candidates().find(|it| whole(it.ordinal) && view.eligible(entry, it).is_some()) {
        let ordinal = member.ordinal;
        let serves = view.worker(ordinal).is_some_and(|worker| entry.activated && entry.served_by(&worker.member));
        let what = if serves {
            "serves it"
        } else {
            "is alive and holds all acknowledged writes: it takes over automatically"
        };
        return Err(format!("worker {ordinal} {what}"));
    }
    let unknown = entry.candidates().filter(|member| view.health(entry, member) == MemberHealth::Unknown);
    let unknown: BTreeSet<Ordinal> = unknown.map(|member| member.ordinal).collect();
    if unknown.is_empty() {
        return Ok(());
    }
    Err(format!(
        "{} may hold all acknowledged writes and is not confirmed dead: wait, or make sure that it no longer runs",
        workers(unknown)
    ))
}
