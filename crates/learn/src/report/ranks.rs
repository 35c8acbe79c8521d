//! What memories were before: a few rankings of the past, evenly spread whatever the length of the run, and from them who
//! stands on top, who rose and who fell.
//!
//! A rank here is 1 plus the number of heavier memories: equal weights share it. (The store's order breaks ties by id, which
//! is right for a store and says nothing to a reader: many memories may stand at weight 1.)

use super::{EpochName, RankedMemory, Standing};
use engram_memory::{MemoryId, Weight};
use hashbrown::{HashMap, HashSet};
use serde::{Deserialize, Serialize};

/// Rankings that are kept at most. With twice the step every second one goes.
const KEPT: usize = 8;

/// The head of a ranking as it stood after an epoch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RankNote {
    /// The epoch.
    pub epoch: EpochName,
    /// Ids and weights in units, in rank order.
    pub ranking: Vec<(u64, u32)>,
}

/// A memory as it stands now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// Its id.
    pub id: MemoryId,
    /// Its key, where it has one.
    pub key: Option<String>,
    /// Its weight.
    pub weight: Weight,
}

/// Rankings noted along a run, bounded in number.
///
/// Which ones are kept depends on the numbers of the epochs alone: a driver that goes on elsewhere hands the notes of the
/// past in again, in order, and has what the first one had.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankHistory {
    /// Epochs between two notes.
    step: u64,
    notes: Vec<RankNote>,
}

impl Default for RankHistory {
    fn default() -> Self {
        Self { step: 1, notes: Vec::new() }
    }
}

/// The tables of a report.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Movers {
    /// Heaviest now.
    pub top: Vec<RankedMemory>,
    /// Gained most since the middle of what was noted.
    pub risen: Vec<RankedMemory>,
    /// Lost most since they were noted at their heaviest.
    pub fallen: Vec<RankedMemory>,
}

impl RankHistory {
    /// Memories that are noted of a ranking; enough to see where those on top now came from.
    pub const DEPTH: usize = 1_000;

    /// Whether the ranking after the epoch with this number is worth fetching.
    pub fn wants(&self, epoch: u64) -> bool {
        (epoch + 1).is_multiple_of(self.step) && self.notes.last().is_none_or(|note| note.epoch.number < epoch)
    }

    /// Keeps a note; nothing happens when it is not wanted.
    pub fn note(&mut self, note: RankNote) {
        if !self.wants(note.epoch.number) {
            return;
        }
        self.notes.push(note);
        if self.notes.len() > KEPT {
            self.step *= 2;
            let step = self.step;
            self.notes.retain(|note| (note.epoch.number + 1).is_multiple_of(step));
        }
    }

    /// Drops what was noted at or after `epoch`, the last one of the run: it is the present.
    pub fn before(&mut self, epoch: u64) {
        self.notes.retain(|note| note.epoch.number < epoch);
    }

    /// The epochs that were noted, ascending.
    pub fn epochs(&self) -> Vec<EpochName> {
        self.notes.iter().map(|note| note.epoch.clone()).collect()
    }

    /// Every memory that was noted, by id: those whose present state [`RankHistory::movers`] has to know.
    pub fn noted(&self) -> Vec<MemoryId> {
        let ids: HashSet<u64> = self.notes.iter().flat_map(|note| &note.ranking).map(|&(id, _)| id).collect();
        let mut ids: Vec<MemoryId> = ids.into_iter().map(MemoryId).collect();
        ids.sort_unstable();
        ids
    }

    /// The tables of a report, of at most `most` rows each, from the head of the ranking now, in rank order, and the
    /// present state of the other memories that were noted. A memory that is in neither was removed and is left out.
    pub fn movers(&self, now: &[Known], others: &[Known], most: usize) -> Movers {
        let past: Vec<HashMap<u64, Standing>> = self.notes.iter().map(|note| standings(&note.ranking)).collect();
        let head: Vec<(u64, u32)> = now.iter().map(|known| (known.id.0, known.weight.units())).collect();
        let present = standings(&head);
        let row = |known: &Known| RankedMemory {
            id: known.id.0,
            key: known.key.clone(),
            weight: known.weight.to_f64(),
            rank: present.get(&known.id.0).map(|standing| standing.rank),
            earlier: past.iter().map(|note| note.get(&known.id.0).copied()).collect(),
        };
        let best = |change: &dyn Fn(&Known) -> f64, candidates: &mut dyn Iterator<Item = &Known>| {
            let mut found: Vec<(f64, &Known)> = candidates.map(|known| (change(known), known)).collect();
            found.retain(|(change, _)| *change > 0.0);
            found.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.id.cmp(&b.1.id)));
            found.into_iter().take(most).map(|(_, known)| row(known)).collect::<Vec<_>>()
        };
        // Whoever is not in a note weighed no more than the last one that is.
        let middle = past.len() / 2;
        let floor = self.notes.get(middle).and_then(|note| note.ranking.last()).map_or(0, |&(_, units)| units);
        let floor = Weight::from_units(floor).unwrap_or(Weight::ONE).to_f64();
        let gain = |known: &Known| {
            let then = past.get(middle).map_or(f64::INFINITY, |note| note.get(&known.id.0).map_or(floor, |s| s.weight));
            known.weight.to_f64() - then
        };
        let loss = |known: &Known| {
            let heaviest = past.iter().filter_map(|note| note.get(&known.id.0)).map(|s| s.weight).fold(0.0, f64::max);
            heaviest - known.weight.to_f64()
        };
        Movers {
            top: now.iter().take(most).map(row).collect(),
            risen: best(&gain, &mut now.iter()),
            fallen: best(&loss, &mut now.iter().chain(others)),
        }
    }
}

/// Rank and weight of each memory of a ranking.
fn standings(ranking: &[(u64, u32)]) -> HashMap<u64, Standing> {
    let mut rank = 0;
    let mut before = None;
    let mut standings = HashMap::with_capacity(ranking.len());
    for (at, &(id, units)) in ranking.iter().enumerate() {
        if before != Some(units) {
            (rank, before) = (at as u64 + 1, Some(units));
        }
        let weight = Weight::from_units(units).unwrap_or(Weight::ONE).to_f64();
        standings.insert(id, Standing { rank, weight });
    }
    standings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(number: u64, ranking: &[(u64, u32)]) -> RankNote {
        RankNote { epoch: EpochName { number, label: None }, ranking: ranking.to_vec() }
    }

    #[test]
    fn notes_stay_few_and_evenly_spread_and_do_not_depend_on_who_took_them() {
        let mut history = RankHistory::default();
        let mut taken = Vec::new();
        for epoch in 0..1_000 {
            if history.wants(epoch) {
                taken.push(note(epoch, &[]));
                history.note(note(epoch, &[]));
            }
            assert!(history.notes.len() <= KEPT);
        }
        history.before(999);
        let numbers: Vec<u64> = history.epochs().iter().map(|epoch| epoch.number).collect();
        assert_eq!(numbers, [127, 255, 383, 511, 639, 767, 895]);
        let mut again = RankHistory::default();
        taken.into_iter().for_each(|note| again.note(note));
        again.before(999);
        assert_eq!(again, history);
    }

    #[test]
    fn equal_weights_share_a_rank_and_movers_are_told_by_weight() {
        let mut history = RankHistory::default();
        history.note(note(0, &[(1, 900), (2, 900), (3, 500)]));
        history.note(note(1, &[(2, 1_000), (1, 800), (3, 100)]));
        let known = |id, units| Known { id: MemoryId(id), key: None, weight: Weight::from_units(units).unwrap() };
        let movers = history.movers(&[known(2, 1_000), known(9, 1_000), known(3, 400)], &[known(1, 0)], 2);
        let ids = |rows: &[RankedMemory]| rows.iter().map(|row| (row.id, row.rank)).collect::<Vec<_>>();
        assert_eq!(ids(&movers.top), [(2, Some(1)), (9, Some(1))]);
        assert_eq!(ids(&movers.risen), [(9, Some(1)), (3, Some(3))]);
        assert_eq!(ids(&movers.fallen), [(1, None), (3, Some(3))]);
        let ranks: Vec<_> = movers.fallen[0].earlier.iter().map(|s| s.map(|s| s.rank)).collect();
        assert_eq!(ranks, [Some(1), Some(2)]);
        assert_eq!(history.noted(), [1, 2, 3].map(MemoryId));
        assert_eq!(RankHistory::default().movers(&[], &[], 5), Movers::default());
    }
}
