//! Rank history: a few past rankings, evenly spread over the run, and from them the top, rising and falling memories.
//!
//! A rank is 1 plus the number of heavier memories: equal weights share it. (The store breaks ties by id, which is meaningless to
//! readers when many memories have weight 1.)

use super::{EpochName, RankedMemory, Standing};
use engram_memory::{MemoryId, Weight};
use hashbrown::{HashMap, HashSet};
use serde::{Deserialize, Serialize};

/// Maximum number of rankings kept. Beyond it the step doubles and every second one is dropped.
const MAX_NOTES: usize = 8;

/// The head of a ranking as it stood after an epoch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RankNote {
    /// The epoch.
    pub epoch: EpochName,
    /// Ids and weights in units, in rank order.
    pub ranking: Vec<(u64, u32)>,
}

/// A memory with its current weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankEntry {
    /// Its id.
    pub id: MemoryId,
    /// Its key, where it has one.
    pub key: Option<String>,
    /// Its weight.
    pub weight: Weight,
}

/// Rankings noted along a run, bounded in number.
///
/// Which ones are kept depends only on epoch numbers: a driver that resumes a run replays the recorded notes in order and gets the
/// same history.
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

    /// Returns whether the ranking after this epoch must be noted.
    pub fn needs_note(&self, epoch: u64) -> bool {
        (epoch + 1).is_multiple_of(self.step) && self.notes.last().is_none_or(|note| note.epoch.number < epoch)
    }

    /// Records a note if it is needed.
    pub fn note(&mut self, note: RankNote) {
        if !self.needs_note(note.epoch.number) {
            return;
        }
        self.notes.push(note);
        if self.notes.len() > MAX_NOTES {
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

    /// Returns every noted memory, by id: [`RankHistory::movers`] needs their current state.
    pub fn noted_ids(&self) -> Vec<MemoryId> {
        let ids: HashSet<u64> = self.notes.iter().flat_map(|note| &note.ranking).map(|&(id, _)| id).collect();
        let mut ids: Vec<MemoryId> = ids.into_iter().map(MemoryId).collect();
        ids.sort_unstable();
        ids
    }

    /// The tables of a report, of at most `most` rows each, from the head of the ranking now, in rank order, and the
    /// present state of the other memories that were noted. A memory that is in neither was removed and is left out.
    pub fn movers(&self, now: &[RankEntry], others: &[RankEntry], most: usize) -> Movers {
        let past: Vec<HashMap<u64, Standing>> = self.notes.iter().map(|note| standings(&note.ranking)).collect();
        let head: Vec<(u64, u32)> = now.iter().map(|entry| (entry.id.0, entry.weight.units())).collect();
        let present = standings(&head);
        let row = |entry: &RankEntry| RankedMemory {
            id: entry.id.0,
            key: entry.key.clone(),
            weight: entry.weight.to_f64(),
            rank: present.get(&entry.id.0).map(|standing| standing.rank),
            earlier: past.iter().map(|note| note.get(&entry.id.0).copied()).collect(),
        };
        let best = |change: &dyn Fn(&RankEntry) -> f64, candidates: &mut dyn Iterator<Item = &RankEntry>| {
            let mut ranked: Vec<(f64, &RankEntry)> = candidates.map(|entry| (change(entry), entry)).collect();
            ranked.retain(|(change, _)| *change > 0.0);
            ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.id.cmp(&b.1.id)));
            ranked.into_iter().take(most).map(|(_, entry)| row(entry)).collect::<Vec<_>>()
        };
        // A memory that is not in a note weighed at most as much as the last one in it.
        let middle = past.len() / 2;
        let floor = self.notes.get(middle).and_then(|note| note.ranking.last()).map_or(0, |&(_, units)| units);
        let floor = Weight::from_units(floor).unwrap_or(Weight::ONE).to_f64();
        let gain = |entry: &RankEntry| {
            let then = past.get(middle).map_or(f64::INFINITY, |note| note.get(&entry.id.0).map_or(floor, |s| s.weight));
            entry.weight.to_f64() - then
        };
        let loss = |entry: &RankEntry| {
            let heaviest = past.iter().filter_map(|note| note.get(&entry.id.0)).map(|s| s.weight).fold(0.0, f64::max);
            heaviest - entry.weight.to_f64()
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
    fn notes_are_bounded_evenly_spread_and_reproducible() {
        let mut history = RankHistory::default();
        let mut taken = Vec::new();
        for epoch in 0..1_000 {
            if history.needs_note(epoch) {
                taken.push(note(epoch, &[]));
                history.note(note(epoch, &[]));
            }
            assert!(history.notes.len() <= MAX_NOTES);
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
    fn equal_weights_share_a_rank_and_movers_change_in_weight() {
        let mut history = RankHistory::default();
        history.note(note(0, &[(1, 900), (2, 900), (3, 500)]));
        history.note(note(1, &[(2, 1_000), (1, 800), (3, 100)]));
        let entry = |id, units| RankEntry { id: MemoryId(id), key: None, weight: Weight::from_units(units).unwrap() };
        let movers = history.movers(&[entry(2, 1_000), entry(9, 1_000), entry(3, 400)], &[entry(1, 0)], 2);
        let ids = |rows: &[RankedMemory]| rows.iter().map(|row| (row.id, row.rank)).collect::<Vec<_>>();
        assert_eq!(ids(&movers.top), [(2, Some(1)), (9, Some(1))]);
        assert_eq!(ids(&movers.risen), [(9, Some(1)), (3, Some(3))]);
        assert_eq!(ids(&movers.fallen), [(1, None), (3, Some(3))]);
        let ranks: Vec<_> = movers.fallen[0].earlier.iter().map(|s| s.map(|s| s.rank)).collect();
        assert_eq!(ranks, [Some(1), Some(2)]);
        assert_eq!(history.noted_ids(), [1, 2, 3].map(MemoryId));
        assert_eq!(RankHistory::default().movers(&[], &[], 5), Movers::default());
    }
}
