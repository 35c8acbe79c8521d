//! What a coordinator's host knows besides the heartbeats, and transfers of leadership away from cordoned workers.

use engram_cluster::{LeadershipTransfer, PartitionMap};
use engram_memory::{Member, Ordinal, PartitionId};
use std::collections::{BTreeMap, BTreeSet};

/// Concurrent transfers: each pauses its partition, and a worker that stops has a deadline.
const MAX_TRANSFERS: usize = 8;

/// What a host knows about the workers from outside.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Environment {
    /// Failure domain of each worker: its node or zone. A worker without one is its own domain.
    pub domains: BTreeMap<Ordinal, String>,
    /// Workers that should be primary of nothing, but keep their replicas: they are about to stop.
    pub relieved: BTreeSet<Ordinal>,
    /// A map existed before: if none is found, no first one is written.
    pub had_map: bool,
}

impl Environment {
    /// Returns the failure domain of a worker.
    pub(crate) fn domain(&self, ordinal: Ordinal) -> String {
        // A worker without a configured domain is its own failure domain.
        self.domains.get(&ordinal).cloned().unwrap_or_else(|| format!("worker-{ordinal}"))
    }
}

/// Returns the planned transfers without those to or from cordoned workers, plus those away from cordoned workers.
pub(crate) fn plan_transfers(
    map: &PartitionMap,
    relieved: &BTreeSet<Ordinal>,
    alive: &BTreeMap<Ordinal, Member>,
    planned: &[LeadershipTransfer],
) -> Vec<LeadershipTransfer> {
    let entry = |partition: PartitionId| &map.partitions[partition.0 as usize];
    let others =
        |it: &&LeadershipTransfer| !relieved.contains(&it.to) && !relieved.contains(&entry(it.partition).primary);
    let mut transfers: Vec<LeadershipTransfer> = planned.iter().filter(others).copied().collect();
    let mut primaries: BTreeMap<Ordinal, usize> = BTreeMap::new();
    for entry in &map.partitions {
        *primaries.entry(entry.primary).or_default() += 1;
    }
    let cordoned_partitions = (0..).map(PartitionId).zip(&map.partitions);
    let cordoned_partitions =
        cordoned_partitions.filter(|(_, entry)| entry.activated && relieved.contains(&entry.primary));
    let mut in_flight = 0;
    for (partition, entry) in cordoned_partitions {
        let candidates =
            entry.isr.iter().filter(|member| alive.get(&member.ordinal).is_some_and(|it| it.store == member.store));
        let candidates = candidates.map(|member| member.ordinal).filter(|ordinal| !relieved.contains(ordinal));
        let Some(to) = candidates.min_by_key(|ordinal| (primaries.get(ordinal).copied().unwrap_or(0), *ordinal)) else {
            continue;
        };
        if in_flight == MAX_TRANSFERS {
            break;
        }
        in_flight += 1;
        *primaries.entry(to).or_default() += 1;
        transfers.push(LeadershipTransfer { partition, to });
    }
    transfers
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_cluster::Entry;
    use engram_memory::{ClusterId, Incarnation, StoreId};

    #[test]
    fn cordoned_worker_transfers_all_its_partitions_and_gets_none() {
        let member = |ordinal: u32| Member {
            ordinal: Ordinal(ordinal),
            store: StoreId(u128::from(ordinal) + 1),
            incarnation: Incarnation(1),
        };
        let pair = |a, b| Entry::first(vec![member(a), member(b)]);
        let partitions =
            vec![pair(0, 1), pair(0, 2), pair(1, 0), pair(0, 3), pair(2, 1), Entry::first(vec![member(0)])];
        let map = PartitionMap { cluster: ClusterId(1), version: 1, partitions };
        let alive: BTreeMap<Ordinal, Member> = [0, 1, 2].map(|ordinal| (Ordinal(ordinal), member(ordinal))).into();
        let transfer = |partition, to| LeadershipTransfer { partition: PartitionId(partition), to: Ordinal(to) };
        let planned = [transfer(2, 0), transfer(4, 1)];
        let wanted = plan_transfers(&map, &[Ordinal(0)].into(), &alive, &planned);
        assert_eq!(
            wanted,
            [transfer(4, 1), transfer(0, 1), transfer(1, 2)],
            "worker 3 is silent, and the last partition has one replica"
        );
        let both = plan_transfers(&map, &[Ordinal(0), Ordinal(1)].into(), &alive, &[]);
        assert_eq!(both, [transfer(1, 2)], "no transfer between cordoned workers");
    }
}
