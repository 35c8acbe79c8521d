//! What a coordinator's host knows beside the beats, and workers that shall lead nothing: they are about to be stopped.

use crate::state::State;
use engram_cluster::{HandOver, PartitionMap};
use engram_memory::{Member, Ordinal, PartitionId};
use std::collections::{BTreeMap, BTreeSet};

/// Moves under way at a time: each is a pause of its partition, and a worker that stops has a deadline.
const AT_ONCE: usize = 8;

/// What a host knows of the workers beside what they say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Surroundings {
    /// What fails together with a worker: its node, or zone. Where none is named, each worker fails alone.
    pub domains: BTreeMap<Ordinal, String>,
    /// Workers that shall lead nothing, but keep their copies.
    pub relieved: BTreeSet<Ordinal>,
    /// There was a map once: where none is found no first one is written.
    pub had_map: bool,
}

impl State {
    /// Takes what its host knows; whether anything is new.
    pub(crate) fn set_surroundings(&mut self, surroundings: Surroundings) -> bool {
        let changed = self.surroundings != surroundings;
        self.surroundings = surroundings;
        changed
    }

    /// What fails together with a worker.
    pub(crate) fn domain(&self, ordinal: Ordinal) -> String {
        // Without another word each process is its own failure domain.
        self.surroundings.domains.get(&ordinal).cloned().unwrap_or_else(|| format!("worker-{ordinal}"))
    }

    /// Moves what workers lead that shall lead nothing, and moves nothing to them.
    pub(crate) fn relieve(&mut self, map: &PartitionMap) {
        let relieved = &self.surroundings.relieved;
        if relieved.is_empty() {
            return;
        }
        let alive: BTreeMap<Ordinal, Member> =
            self.members().filter(|heard| heard.alive).map(|heard| (heard.member.ordinal, heard.member)).collect();
        self.hand_overs = hand_overs(map, relieved, &alive, &self.hand_overs);
    }
}

/// Returns the moves that are wanted: those planned, but for those to or of relieved workers, and what relieves them.
fn hand_overs(
    map: &PartitionMap,
    relieved: &BTreeSet<Ordinal>,
    alive: &BTreeMap<Ordinal, Member>,
    planned: &[HandOver],
) -> Vec<HandOver> {
    let entry = |partition: PartitionId| &map.partitions[partition.0 as usize];
    let others = |it: &&HandOver| !relieved.contains(&it.to) && !relieved.contains(&entry(it.partition).primary);
    let mut wanted: Vec<HandOver> = planned.iter().filter(others).copied().collect();
    let mut leads: BTreeMap<Ordinal, usize> = BTreeMap::new();
    for entry in &map.partitions {
        *leads.entry(entry.primary).or_default() += 1;
    }
    let led = (0..).map(PartitionId).zip(&map.partitions);
    let led = led.filter(|(_, entry)| entry.activated && relieved.contains(&entry.primary));
    let mut moves = 0;
    for (partition, entry) in led {
        let may =
            entry.isr.iter().filter(|member| alive.get(&member.ordinal).is_some_and(|it| it.store == member.store));
        let may = may.map(|member| member.ordinal).filter(|ordinal| !relieved.contains(ordinal));
        let Some(to) = may.min_by_key(|ordinal| (leads.get(ordinal).copied().unwrap_or(0), *ordinal)) else { continue };
        if moves == AT_ONCE {
            break;
        }
        moves += 1;
        *leads.entry(to).or_default() += 1;
        wanted.push(HandOver { partition, to });
    }
    wanted
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_cluster::Entry;
    use engram_memory::{ClusterId, Incarnation, StoreId};

    #[test]
    fn a_relieved_worker_gives_all_it_leads_to_living_partners_and_gets_nothing() {
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
        let hand = |partition, to| HandOver { partition: PartitionId(partition), to: Ordinal(to) };
        let planned = [hand(2, 0), hand(4, 1)];
        let wanted = hand_overs(&map, &[Ordinal(0)].into(), &alive, &planned);
        assert_eq!(wanted, [hand(4, 1), hand(0, 1), hand(1, 2)], "3 is silent, and of the last there is one copy");
        let both = hand_overs(&map, &[Ordinal(0), Ordinal(1)].into(), &alive, &[]);
        assert_eq!(both, [hand(1, 2)], "nothing goes from one that leaves to another");
    }
}
