//! Manual recovery when nothing automatic is safe: rebuilding a lost map from what workers have seen of it, and
//! promoting a replica that is not in sync.
//!
//! A lost map is *proven* where nothing can have happened after the last map that was seen: every worker has reported,
//! from the same disks, and none of them has promised a later term. A primary makes its promise of a term durable
//! before it acknowledges anything, so a later primary would show. Everything else is a guess, which an operator must
//! confirm.

use crate::map::{Entry, PartitionMap};
use engram_memory::{ClusterId, Lsn, Member, Ordinal, PartitionId, StoreId, Term};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Offset of guessed terms: far above what a worker that did not report can have promised meanwhile, since a term is
/// raised at most ten times a second, so that it steps down when it reads the map.
pub const TERM_LEAP: u64 = 1_000_000;
/// Offset of the version of a rebuilt map.
pub const VERSION_LEAP: u64 = 1_000_000;

/// What a worker has stored about the partition map.
#[derive(Debug, Clone)]
pub struct MapStateReport {
    /// The reporting worker, as the process that runs.
    pub member: Member,
    /// Newest map on its disk.
    pub last_map: Option<PartitionMap>,
    /// Its replicas, indexed by partition.
    pub replicas: Vec<ReplicaState>,
}

/// State of a replica of one partition on disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReplicaState {
    /// Highest term promised.
    pub promised: Term,
    /// Last record in the log; 0 = nothing.
    pub last: Lsn,
    /// Term that wrote it.
    pub last_term: Term,
    /// Damaged; cannot become primary.
    pub damaged: bool,
}

/// A partition map rebuilt from reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecoveredMap {
    /// The map; its version is above every reported one.
    pub map: PartitionMap,
    /// Last known entry of each partition.
    pub last_entries: Vec<Option<Entry>>,
    /// By partition: why its entry is a guess; absent = proven.
    pub unproven: BTreeMap<PartitionId, String>,
}

/// The replica to promote when no in-sync one is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromotionCandidate {
    /// Its worker.
    pub member: Member,
    /// Its state.
    pub replica: ReplicaState,
}

/// Rebuilds a map from worker reports. `expected` are the ordinals of known workers; without any report there is no
/// map.
pub fn rebuild(
    cluster: ClusterId,
    partitions: u32,
    expected: &BTreeSet<Ordinal>,
    reports: &[MapStateReport],
) -> Option<RecoveredMap> {
    let fits = |map: &&PartitionMap| map.cluster == cluster && map.partitions.len() == partitions as usize;
    let newest =
        reports.iter().filter_map(|report| report.last_map.as_ref()).filter(fits).max_by_key(|map| map.version);
    let absent = find_missing_report(newest, expected, reports);
    let mut rebuilt = RecoveredMap {
        map: PartitionMap {
            cluster,
            version: newest.map_or(0, |map| map.version) + VERSION_LEAP,
            partitions: Vec::with_capacity(partitions as usize),
        },
        last_entries: Vec::with_capacity(partitions as usize),
        unproven: BTreeMap::new(),
    };
    for partition in (0..partitions).map(PartitionId) {
        let last_entry = newest.map(|map| &map.partitions[partition.0 as usize]);
        let reason = match last_entry {
            Some(last_entry) => absent.clone().or_else(|| find_newer_promise(last_entry, partition, reports)),
            None => Some(NO_MAP_REPORTED.to_owned()),
        };
        let entry = match (last_entry, reason) {
            (Some(last_entry), None) => proven_entry(last_entry, partition, reports),
            (_, reason) => {
                rebuilt.unproven.insert(partition, reason.unwrap_or_default());
                guess_entry(last_entry, partition, reports)?
            }
        };
        rebuilt.map.partitions.push(entry);
        rebuilt.last_entries.push(last_entry.cloned());
    }
    Some(rebuilt)
}

const NO_MAP_REPORTED: &str = "no worker that answers has kept a map";

/// Finds a worker, or a disk, that has not reported: it may have been assigned a partition, and have served it, since
/// the map was stored.
fn find_missing_report(
    newest: Option<&PartitionMap>,
    expected: &BTreeSet<Ordinal>,
    reports: &[MapStateReport],
) -> Option<String> {
    let members = newest.iter().flat_map(|map| &map.partitions).flat_map(Entry::candidates);
    let recorded: BTreeSet<(Ordinal, StoreId)> = members.map(|member| (member.ordinal, member.store)).collect();
    let reported_store = |ordinal: Ordinal| {
        reports.iter().find(|report| report.member.ordinal == ordinal).map(|report| report.member.store)
    };
    let mut missing = expected.clone();
    missing.extend(recorded.iter().map(|(ordinal, _)| *ordinal));
    missing.retain(|ordinal| reported_store(*ordinal).is_none());
    if !missing.is_empty() {
        let names: Vec<String> = missing.iter().map(ToString::to_string).collect();
        return Some(format!("worker{} {} did not report", if names.len() == 1 { "" } else { "s" }, names.join(", ")));
    }
    recorded.into_iter().find_map(|(ordinal, store)| {
        let store_now = reported_store(ordinal).filter(|reported| *reported != store)?;
        Some(format!("worker {ordinal} reported store {store_now}, expected store {store}"))
    })
}

/// Finds a worker whose promise is above the last known term.
fn find_newer_promise(last_entry: &Entry, partition: PartitionId, reports: &[MapStateReport]) -> Option<String> {
    let ahead = reports.iter().find(|report| replica_state(report, partition).promised > last_entry.term)?;
    let (ordinal, promised) = (ahead.member.ordinal, replica_state(ahead, partition).promised);
    Some(format!("worker {ordinal} has promised term {promised}, the last known term is {}", last_entry.term))
}

/// Returns the last known entry. Its primary may have acknowledged although `activated` was not seen: all in its
/// in-sync set hold everything either way, the previous set may not.
fn proven_entry(last_entry: &Entry, partition: PartitionId, reports: &[MapStateReport]) -> Entry {
    let primary = reports.iter().find(|report| report.member.ordinal == last_entry.primary);
    let may_have_served = primary.is_some_and(|report| replica_state(report, partition).promised >= last_entry.term);
    let prev = if may_have_served { Vec::new() } else { last_entry.prev.clone() };
    Entry { prev, ..last_entry.clone() }
}

fn guess_entry(last_entry: Option<&Entry>, partition: PartitionId, reports: &[MapStateReport]) -> Option<Entry> {
    let is_intact = |member: &&Member| {
        let on_its_disk =
            |report: &&MapStateReport| (report.member.ordinal, report.member.store) == (member.ordinal, member.store);
        reports.iter().find(on_its_disk).is_some_and(|report| !replica_state(report, partition).damaged)
    };
    let superseded = last_entry.is_none_or(|last_entry| {
        reports.iter().any(|report| replica_state(report, partition).promised > last_entry.term)
    });
    let in_sync: Vec<Member> =
        last_entry.iter().filter(|_| !superseded).flat_map(|report| &report.isr).filter(is_intact).copied().collect();
    let is_candidate = |ordinal: Ordinal| in_sync.is_empty() || in_sync.iter().any(|member| member.ordinal == ordinal);
    let chosen = find_most_advanced(partition, reports.iter().filter(|report| is_candidate(report.member.ordinal)))
        .or_else(|| {
            reports.first().map(|report| PromotionCandidate { member: report.member, replica: ReplicaState::default() })
        })?;
    let mut entry = force_entry(last_entry, &chosen.member, highest_promise(partition, reports));
    entry.term.0 += TERM_LEAP;
    entry.isr.extend(in_sync.into_iter().filter(|member| member.ordinal != chosen.member.ordinal));
    Some(entry)
}

/// Returns the most advanced replica: of the latest term, and among those the longest. A damaged one does not count.
pub fn find_most_advanced<'a>(
    partition: PartitionId,
    reports: impl IntoIterator<Item = &'a MapStateReport>,
) -> Option<PromotionCandidate> {
    let chosen = |report: &MapStateReport| PromotionCandidate {
        member: report.member,
        replica: replica_state(report, partition),
    };
    let whole = reports.into_iter().map(chosen).filter(|it| !it.replica.damaged);
    whole.max_by_key(|it| (it.replica.last_term, it.replica.last, Reverse(it.member.ordinal)))
}

/// Returns the replica of a partition from a report.
pub fn replica_state(report: &MapStateReport, partition: PartitionId) -> ReplicaState {
    report.replicas.get(partition.0 as usize).copied().unwrap_or_default()
}

/// Returns the highest term that any worker has promised.
pub fn highest_promise(partition: PartitionId, reports: &[MapStateReport]) -> Term {
    reports.iter().map(|report| replica_state(report, partition).promised).max().unwrap_or(Term(0))
}

/// Returns the entry under which `member` becomes primary with whatever it holds, at a term above `before` and every
/// promise.
pub fn force_entry(before: Option<&Entry>, member: &Member, promised: Term) -> Entry {
    let term = before.map_or(Term(0), |before| before.term).max(promised);
    Entry {
        term: Term(term.0 + 1),
        primary: member.ordinal,
        isr: vec![*member],
        // The primary sets it itself, once all of its log is on disk.
        solo_safe: false,
        activated: false,
        prev: Vec::new(),
        learners: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::change::Change;
    use engram_memory::Incarnation;

    fn member(ordinal: u32, incarnation: u64) -> Member {
        let store = StoreId(u128::from(ordinal) + 100);
        Member { ordinal: Ordinal(ordinal), store, incarnation: Incarnation(incarnation) }
    }

    fn state_at(promised: u64, last: u64, last_term: u64) -> ReplicaState {
        ReplicaState { promised: Term(promised), last: Lsn(last), last_term: Term(last_term), damaged: false }
    }

    /// Three workers, one partition on workers 0 and 1, all of them restarted; worker 2 has an older map.
    fn reports() -> Vec<MapStateReport> {
        let first = Entry::first(vec![member(0, 1), member(1, 1)]);
        let second = first.apply(&Change::Promote { primary: member(1, 1), isr: vec![Ordinal(0), Ordinal(1)] });
        let second = second.unwrap().apply(&Change::Activate).unwrap();
        let map = |version, entry: &Entry| {
            Some(PartitionMap { cluster: ClusterId(7), version, partitions: vec![entry.clone()] })
        };
        vec![
            MapStateReport { member: member(0, 2), last_map: map(3, &second), replicas: vec![state_at(2, 9, 2)] },
            MapStateReport { member: member(1, 2), last_map: map(3, &second), replicas: vec![state_at(2, 10, 2)] },
            MapStateReport { member: member(2, 2), last_map: map(1, &first), replicas: vec![state_at(1, 4, 1)] },
        ]
    }

    fn rebuilt(reports: &[MapStateReport]) -> RecoveredMap {
        rebuild(ClusterId(7), 1, &(0..3).map(Ordinal).collect(), reports).unwrap()
    }

    #[test]
    fn complete_reports_prove_the_last_known_map() {
        let reports = reports();
        let rebuilt = rebuilt(&reports);
        assert_eq!(rebuilt.unproven, BTreeMap::new());
        assert_eq!(rebuilt.map.partitions[..], reports[0].last_map.as_ref().unwrap().partitions[..]);
        assert!(rebuilt.map.version > 3, "workers take newer maps only");
    }

    #[test]
    fn a_possible_later_primary_makes_the_entry_a_guess_above_every_promise() {
        let whole = reports();
        let guess = |reports: &[MapStateReport]| {
            let rebuilt = rebuilt(reports);
            let entry = rebuilt.map.partitions[0].clone();
            assert!(entry.term.0 > TERM_LEAP && !entry.activated && entry.prev.is_empty());
            (rebuilt.unproven[&PartitionId(0)].clone(), entry.isr)
        };
        // Also a worker that never held the partition: it may have been added, and become primary, since.
        let (why, isr) = guess(&whole[..2]);
        assert_eq!((why.as_str(), isr), ("worker 2 did not report", vec![member(1, 2), member(0, 1)]));
        let mut replaced = whole.clone();
        replaced[1].member.store = StoreId(5);
        replaced[1].replicas = vec![ReplicaState::default()];
        let (why, isr) = guess(&replaced);
        assert!(why.contains("worker 1 reported store"), "{why}");
        assert_eq!(isr, [member(0, 2)]);
        let mut ahead = whole.clone();
        ahead[2].replicas = vec![state_at(3, 11, 3)];
        let (why, isr) = guess(&ahead);
        assert_eq!(why, "worker 2 has promised term 3, the last known term is 2");
        assert_eq!(isr, [member(2, 2)], "the most advanced replica");
        let mut blind = whole;
        blind.iter_mut().for_each(|it| it.last_map = None);
        let (why, isr) = guess(&blind);
        assert_eq!((why.as_str(), isr), (NO_MAP_REPORTED, vec![member(1, 2)]));
    }

    #[test]
    fn primary_that_promised_may_have_acknowledged_without_a_visible_activation() {
        let mut reports = reports();
        for it in &mut reports[..2] {
            let entry = &mut it.last_map.as_mut().unwrap().partitions[0];
            (entry.activated, entry.prev) = (false, vec![member(0, 1), member(1, 1), member(2, 1)]);
        }
        assert_eq!(rebuilt(&reports).map.partitions[0].prev, []);
        for it in &mut reports {
            it.replicas[0].promised = Term(1);
        }
        assert_eq!(rebuilt(&reports).map.partitions[0].prev.len(), 3, "it never served: others still may");
    }
}
