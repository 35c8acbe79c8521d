//! What a coordinator should do about the map, given what it observed.
//!
//! With one copy of each partition there are two occasions: a cluster that has no map yet and whose workers are all here,
//! and a worker that came back on its disk as a new process, whose partitions go on under the next term. A worker that comes
//! with another disk under an old name is *absent*: what it held is on the disk that is missing, and nothing is formatted.

use crate::map::{Entry, PartitionMap};
use crate::place::{Candidate, place};
use engram_memory::{ClusterId, Member, Ordinal, PartitionId, Term};

/// What a coordinator heard since its own start.
#[derive(Debug, Clone)]
pub struct Observed {
    /// The cluster.
    pub cluster: ClusterId,
    /// Partitions of a new map.
    pub partitions: u32,
    /// Workers that a new cluster consists of: ordinals 0 to this - 1.
    pub workers: u32,
    /// The members heard, one per ordinal, with their failure domain.
    pub members: Vec<(Member, String)>,
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// Write this map, the first, if there is none.
    Create(PartitionMap),
    /// Replace these entries.
    Change(Vec<(PartitionId, Entry)>),
    /// Nothing.
    Keep,
}

/// Decides, and says what keeps the cluster from serving everything, in words.
pub fn decide(map: Option<&PartitionMap>, observed: &Observed) -> (Decision, Vec<String>) {
    match map {
        None => create(observed),
        Some(map) => resume(map, observed),
    }
}

fn create(observed: &Observed) -> (Decision, Vec<String>) {
    let heard = |ordinal: u32| observed.members.iter().find(|(member, _)| member.ordinal == Ordinal(ordinal));
    let missing: Vec<_> = (0..observed.workers).filter(|&ordinal| heard(ordinal).is_none()).collect();
    if !missing.is_empty() {
        return (Decision::Keep, vec![format!("waiting for workers {missing:?} to form the cluster")]);
    }
    let candidates: Vec<_> = (0..observed.workers)
        .filter_map(heard)
        .map(|(member, domain)| Candidate { ordinal: member.ordinal, domain: domain.clone() })
        .collect();
    let placed = match place(observed.partitions, &candidates, 1) {
        Ok(placed) => placed,
        Err(error) => return (Decision::Keep, vec![error.to_string()]),
    };
    let partitions = placed
        .iter()
        .map(|chosen| {
            let (member, _) = heard(chosen[0].0).expect("placed on a worker that was heard");
            Entry::solo(Term(1), *member)
        })
        .collect();
    (Decision::Create(PartitionMap { cluster: observed.cluster, version: 1, partitions }), Vec::new())
}

fn resume(map: &PartitionMap, observed: &Observed) -> (Decision, Vec<String>) {
    let mut changes = Vec::new();
    let mut conditions = std::collections::BTreeSet::new();
    for (partition, entry) in map.entries() {
        let Some(primary) = entry.primary_member() else { continue };
        let heard = observed.members.iter().map(|(member, _)| member).find(|member| member.ordinal == primary.ordinal);
        match heard {
            None => {
                conditions.insert(format!("worker {} has not been heard", primary.ordinal));
            }
            Some(member) if member.store != primary.store => {
                conditions.insert(format!(
                    "worker {} came with store {}, but its memories are on store {}: bring that disk back",
                    member.ordinal, member.store, primary.store
                ));
            }
            // It is the only copy, so nobody else can claim the partition: the new term is active at once.
            Some(member) if member.incarnation > primary.incarnation => {
                changes.push((partition, Entry::solo(Term(entry.term.0 + 1), *member)));
            }
            Some(_) => {}
        }
    }
    let decision = if changes.is_empty() { Decision::Keep } else { Decision::Change(changes) };
    (decision, conditions.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_memory::{Incarnation, StoreId};

    fn member(ordinal: u32, store: u128, incarnation: u64) -> (Member, String) {
        let member = Member { ordinal: Ordinal(ordinal), store: StoreId(store), incarnation: Incarnation(incarnation) };
        (member, format!("node-{ordinal}"))
    }

    fn observed(members: Vec<(Member, String)>) -> Observed {
        Observed { cluster: ClusterId(9), partitions: 16, workers: 3, members }
    }

    fn formed() -> PartitionMap {
        let all = observed(vec![member(2, 102, 1), member(0, 100, 1), member(1, 101, 1)]);
        match decide(None, &all) {
            (Decision::Create(map), conditions) if conditions.is_empty() => map,
            other => panic!("a cluster with all its workers forms: {other:?}"),
        }
    }

    #[test]
    fn a_cluster_forms_when_all_its_workers_are_here_and_not_before() {
        let (decision, conditions) = decide(None, &observed(vec![member(0, 100, 1), member(2, 102, 1)]));
        assert_eq!(decision, Decision::Keep);
        assert_eq!(conditions, ["waiting for workers [1] to form the cluster"]);
        let map = formed();
        assert_eq!(map.partitions.len(), 16);
        assert!(map.partitions.iter().all(|entry| entry.term == Term(1) && entry.activated && entry.isr.len() == 1));
    }

    #[test]
    fn a_restarted_worker_goes_on_under_the_next_term_and_the_others_are_left_alone() {
        let map = formed();
        let back = observed(vec![member(0, 100, 1), member(1, 101, 5), member(2, 102, 1)]);
        let (Decision::Change(changes), conditions) = decide(Some(&map), &back) else { panic!("expected a change") };
        assert!(conditions.is_empty());
        let mut after = map.clone();
        for (partition, entry) in changes {
            assert_eq!(map.partitions[partition.0 as usize].primary, Ordinal(1));
            after.partitions[partition.0 as usize] = entry;
        }
        assert_eq!(map.check(&after), Ok(()));
        let restarted = back.members[1].0;
        assert!(after.served_by(&restarted).count() > 0);
        assert!(after.served_by(&restarted).all(|(_, term)| term == Term(2)));
        assert_eq!(decide(Some(&after), &back).0, Decision::Keep, "a decision that was carried out is not repeated");
        // A beat of the older process that arrives late changes nothing.
        let late = observed(vec![member_of(&after, 0), member(1, 101, 1), member_of(&after, 2)]);
        assert_eq!(decide(Some(&after), &late).0, Decision::Keep);
    }

    fn member_of(map: &PartitionMap, ordinal: u32) -> (Member, String) {
        let entry = map.partitions.iter().find(|entry| entry.primary == Ordinal(ordinal)).unwrap();
        (entry.isr[0], String::new())
    }

    #[test]
    fn another_disk_under_an_old_name_is_absent() {
        let map = formed();
        let swapped = observed(vec![member(0, 100, 1), member(1, 666, 9), member(2, 102, 1)]);
        let (decision, conditions) = decide(Some(&map), &swapped);
        assert_eq!(decision, Decision::Keep);
        assert_eq!(conditions.len(), 1);
        assert!(conditions[0].contains("bring that disk back"), "{conditions:?}");
    }
}
