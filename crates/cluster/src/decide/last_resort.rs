//! Whether a person has to decide who leads a partition, because nothing automatic is safe.

use super::{Fate, Observed, Scene, workers};
use crate::map::{Entry, PartitionMap};
use engram_memory::{Ordinal, PartitionId};
use std::collections::BTreeSet;

/// Whether a partition has nobody left who may lead it, where `damaged` holds a copy that is not whole.
///
/// # Errors
/// Why not, in words: it is served, heals by itself, or may still.
pub fn is_forsaken(
    map: &PartitionMap,
    partition: PartitionId,
    observed: &Observed,
    damaged: &BTreeSet<Ordinal>,
) -> Result<(), String> {
    let scene = Scene { map, observed };
    let entry: &Entry = &map.partitions[partition.0 as usize];
    let whole = |ordinal: Ordinal| !damaged.contains(&ordinal);
    if let Some(member) = entry.candidates().find(|it| whole(it.ordinal) && scene.eligible(entry, it).is_some()) {
        let ordinal = member.ordinal;
        let serves = scene.seen(ordinal).is_some_and(|seen| entry.activated && entry.served_by(&seen.member));
        let what = if serves { "serves it" } else { "answers and holds all of it: it takes over by itself" };
        return Err(format!("worker {ordinal} {what}"));
    }
    let doubtful = entry.candidates().filter(|member| scene.fate(entry, member) == Fate::Doubtful);
    let doubtful: BTreeSet<Ordinal> = doubtful.map(|member| member.ordinal).collect();
    if doubtful.is_empty() {
        return Ok(());
    }
    Err(format!(
        "{} may hold all of it, and nobody knows yet that it is gone: wait a moment, or see to it that it runs no more",
        workers(doubtful)
    ))
}
