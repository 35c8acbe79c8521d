//! Prediction quality: before each epoch the top k of three rankings are compared with the memories that the epoch then touches:
//! the memory's own order, the most often touched, the most recently touched.
//!
//! Ties are broken by ascending id in all three, so that no ranking benefits by accident. Hits are integers; a rate is hits over k,
//! and over all epochs the mean of the rates. An epoch that touches nothing is not scored.
//!
//! The baselines keep their top k in order and never sort: a touch can only improve a memory's rank in either ranking, so a memory
//! that drops out returns only by its own touch. An epoch of m touches costs O(m log k) plus one walk over the top k, whatever the
//! number of memories.

use crate::source::{Content, Epoch};
use engram_memory::MemoryId;
use hashbrown::HashMap;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Hits of the three rankings in one epoch, or summed over epochs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hits {
    /// Length of the rankings that were compared.
    pub k: u32,
    /// Of the top k by weight, how many the epoch touched.
    pub memory: u64,
    /// Of the k most often touched.
    pub frequent: u64,
    /// Of the k most recently touched.
    pub recent: u64,
}

/// Scores rankings epoch by epoch.
#[derive(Debug, Clone)]
pub struct Prediction {
    /// Ascending, distinct.
    top_k: Vec<u32>,
    skip: u64,
    frequent: TopRanking,
    recent: TopRanking,
    /// Touches so far, and number of the last epoch that touched it.
    touches: HashMap<MemoryId, (u64, u64)>,
}

impl Prediction {
    /// Scores the given lengths from epoch `skip` on; before it there is little data.
    pub fn new(top_k: &[u32], skip: u64) -> Self {
        let mut top_k = top_k.to_vec();
        top_k.sort_unstable();
        top_k.dedup();
        let depth = top_k.last().map_or(0, |&k| k as usize);
        Self { top_k, skip, frequent: TopRanking::new(depth), recent: TopRanking::new(depth), touches: HashMap::new() }
    }

    /// Returns how many ids of the memory's ranking are needed.
    pub fn depth(&self) -> usize {
        self.recent.most
    }

    /// Returns whether this epoch is scored, so that the ranking must be fetched before it is applied.
    pub fn is_scored(&self, epoch: &Epoch) -> bool {
        epoch.number >= self.skip && self.depth() > 0 && matches!(&epoch.content, Content::Events(e) if !e.is_empty())
    }

    /// Scores the epoch against `ranking`, the ids of the memory's top [`Prediction::depth`] in rank order before it, then records
    /// the touches of the epoch. Without a ranking it only records them, so that a driver that resumes a run catches up. The hits
    /// are by ascending k, empty if not scored.
    pub fn score(&mut self, epoch: &Epoch, ranking: Option<&[MemoryId]>) -> Vec<Hits> {
        let Content::Events(events) = &epoch.content else { return Vec::new() };
        let mut touched: Vec<MemoryId> = events.iter().map(|event| event.id).collect();
        touched.sort_unstable();
        touched.dedup();
        let hits = match ranking {
            Some(ranking) if self.is_scored(epoch) => self.hits(&touched, ranking),
            _ => Vec::new(),
        };
        for id in touched {
            self.record_touch(id, epoch.number);
        }
        hits
    }

    fn hits(&self, touched: &[MemoryId], ranking: &[MemoryId]) -> Vec<Hits> {
        let memory = count(&self.top_k, ranking.iter().copied(), touched);
        let frequent = count(&self.top_k, self.frequent.ids(), touched);
        let recent = count(&self.top_k, self.recent.ids(), touched);
        let each = self.top_k.iter().zip(memory).zip(frequent).zip(recent);
        each.map(|(((&k, memory), frequent), recent)| Hits { k, memory, frequent, recent }).collect()
    }

    fn record_touch(&mut self, id: MemoryId, epoch: u64) {
        let touched = self.touches.entry(id).or_insert((0, 0));
        let (count, last) = *touched;
        *touched = (count + 1, epoch);
        self.frequent.improve(id, (count > 0).then_some(count), count + 1);
        self.recent.improve(id, (count > 0).then_some(last), epoch);
    }
}

/// For each k, how many of the first k of `ranking` were touched. `touched` ascends.
fn count(top_k: &[u32], ranking: impl Iterator<Item = MemoryId>, touched: &[MemoryId]) -> Vec<u64> {
    let mut counts = Vec::with_capacity(top_k.len());
    let (mut ranking, mut hits, mut at) = (ranking, 0, 0);
    for &k in top_k {
        for id in ranking.by_ref().take(k as usize - at) {
            hits += u64::from(touched.binary_search(&id).is_ok());
        }
        at = k as usize;
        counts.push(hits);
    }
    counts
}

/// The best of a ranking by (score descending, id ascending) in which scores never fall.
#[derive(Debug, Clone)]
struct TopRanking {
    most: usize,
    order: BTreeSet<(Reverse<u64>, MemoryId)>,
}

impl TopRanking {
    const fn new(most: usize) -> Self {
        Self { most, order: BTreeSet::new() }
    }

    fn improve(&mut self, id: MemoryId, before: Option<u64>, score: u64) {
        if let Some(before) = before {
            self.order.remove(&(Reverse(before), id));
        }
        self.order.insert((Reverse(score), id));
        if self.order.len() > self.most {
            self.order.pop_last();
        }
    }

    fn ids(&self) -> impl Iterator<Item = MemoryId> + '_ {
        self.order.iter().map(|&(_, id)| id)
    }
}

/// Hit rates over the scored epochs of a run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HitRate {
    /// Hits summed over the epochs.
    #[serde(flatten)]
    pub hits: Hits,
    /// How many epochs were scored.
    pub epochs: u64,
}

impl HitRate {
    /// Sums the hits of epochs, by ascending k.
    pub fn over<'a>(epochs: impl IntoIterator<Item = &'a [Hits]>) -> Vec<Self> {
        let mut rates: Vec<Self> = Vec::new();
        for hits in epochs.into_iter().flatten() {
            let at = match rates.binary_search_by_key(&hits.k, |rate| rate.hits.k) {
                Ok(at) => at,
                Err(at) => {
                    rates.insert(at, Self { hits: Hits { k: hits.k, ..Hits::default() }, epochs: 0 });
                    at
                }
            };
            let rate = &mut rates[at];
            rate.hits.memory += hits.memory;
            rate.hits.frequent += hits.frequent;
            rate.hits.recent += hits.recent;
            rate.epochs += 1;
        }
        rates
    }

    /// Returns the rate of a length without a scored epoch.
    pub(crate) const fn none(k: u32) -> Self {
        Self { hits: Hits { k, memory: 0, frequent: 0, recent: 0 }, epochs: 0 }
    }

    fn rate(&self, hits: u64) -> f64 {
        let most = u64::from(self.hits.k) * self.epochs;
        if most == 0 { 0.0 } else { hits as f64 / most as f64 }
    }

    /// Mean over the epochs of (hits of the memory / k).
    pub fn memory(&self) -> f64 {
        self.rate(self.hits.memory)
    }

    /// Mean over the epochs of (hits of the most frequent / k).
    pub fn frequent(&self) -> f64 {
        self.rate(self.hits.frequent)
    }

    /// Mean over the epochs of (hits of the most recent / k).
    pub fn recent(&self) -> f64 {
        self.rate(self.hits.recent)
    }
}

#[cfg(test)]
mod tests;
