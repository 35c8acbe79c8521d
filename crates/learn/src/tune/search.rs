//! The search: a grid, successive halving, a refinement, and the judgement on the part that the search has not seen.

use super::history::History;
use super::simulate::{Candidate, hits};
use crate::prediction::{HitRate, Prediction};
use rayon::prelude::*;
use serde::Serialize;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Decays of the grid.
const DECAYS: [f64; 10] = [0.0, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2];
/// Learning rates of the grid.
const RATES: [f64; 6] = [0.02, 0.05, 0.1, 0.2, 0.5, 1.0];
/// Initial weights of the grid.
const INITIAL_WEIGHTS: [f64; 3] = [0.0, 0.25, 0.5];
/// Share of the candidates that a round keeps; the next one learns as many times more epochs.
const HALVING: usize = 3;
/// Rounds on a part of the epochs, before the one on all of them.
const ROUNDS: u32 = 3;
/// Fewest epochs of a round: a shorter end of the history is noise.
const FEWEST_EPOCHS: usize = 60;
/// Factors of decay and rate around the best candidate in the refinement.
const REFINEMENT: [f64; 4] = [0.5, 0.7, 1.4, 2.0];
/// Fewest epochs of a history: with fewer there is nothing to judge by.
const FEWEST: usize = 10;

/// Settings of a search.
#[derive(Debug, Clone, PartialEq)]
pub struct TuneOptions {
    /// Lengths of the rankings; the score is the mean of the hit rates, each relative to that of the better baseline.
    pub top_k: Vec<u32>,
    /// Share of the epochs at the end that only judge, above 0 and at most 0.9.
    pub held_out: f64,
    /// Epochs at the beginning that are not scored.
    pub skip: u64,
    /// Settings to compare with, which are a candidate as well.
    pub current: Candidate,
    /// Decay and initial weight that are given, which the search does not change.
    pub fixed_decay: Option<f64>,
}

/// A history cannot be searched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TuneError {
    /// Too short.
    #[error("the history has {epochs} epochs with events to score; needed: at least {FEWEST}")]
    TooShort {
        /// Number of its epochs.
        epochs: usize,
    },
}

/// Hit rates of a ranking length on one part of the history.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Judgement {
    /// Length of the rankings.
    pub k: u32,
    /// Scored epochs.
    pub epochs: u64,
    /// Of the tuned memory.
    pub tuned: f64,
    /// Of the memory with the current settings.
    pub current: f64,
    /// Of the most often touched memories.
    pub frequent: f64,
    /// Of the most recently touched memories.
    pub recent: f64,
}

impl Judgement {
    /// Returns whether the tuned memory predicts at least as well as the better baseline.
    pub fn holds(&self) -> bool {
        self.tuned >= self.frequent.max(self.recent)
    }
}

/// Result of a search.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Tuning {
    /// The best settings.
    pub tuned: Candidate,
    /// The settings that it is compared with.
    pub current: Candidate,
    /// Number of candidates that were tried.
    pub candidates: usize,
    /// Epochs that the search has used.
    pub searched_epochs: usize,
    /// Hit rates on the epochs that the search has used.
    pub searched: Vec<Judgement>,
    /// Hit rates on the epochs that it has not seen.
    pub held_out: Vec<Judgement>,
}

impl Tuning {
    /// Returns whether the tuned memory predicts the held-out part at least as well as the better baseline, for every length.
    pub fn holds(&self) -> bool {
        self.held_out.iter().all(Judgement::holds)
    }
}

/// Searches the settings that predict `history` best. `progress` receives the work done and its total, in events learned.
///
/// # Errors
/// The history is too short.
pub fn tune(history: &History, options: &TuneOptions, progress: impl Fn(u64, u64) + Sync) -> Result<Tuning, TuneError> {
    let split = ((history.len() as f64) * (1.0 - options.held_out)).floor() as usize;
    let skip = usize::try_from(options.skip).unwrap_or(usize::MAX).min(split / 3);
    if split < FEWEST || history.len() - split < FEWEST / 3 {
        return Err(TuneError::TooShort { epochs: history.len() });
    }
    let search = Search::new(history, options, (skip, split), progress);
    let mut candidates = grid(history, options);
    let tried = candidates.len();
    for round in (1..=ROUNDS).rev() {
        let length = (split / HALVING.pow(round)).max(FEWEST_EPOCHS);
        // Every candidate learns the whole first part where that is as short.
        if length < split {
            let part = split - length..split;
            candidates = search.best(&candidates, part.clone(), part.start + length / 3, HALVING);
        }
    }
    candidates = search.best(&candidates, 0..split, skip, usize::MAX);
    let refined = refine(candidates[0], history, options);
    let tried = tried + refined.len();
    let near: Vec<Candidate> = [candidates[0], options.current].into_iter().chain(refined).collect();
    let tuned = search.best(&near, 0..split, skip, usize::MAX)[0];
    let (tuned_hits, current_hits) =
        (|range, from| search.rates(tuned, range, from), |range, from| search.rates(options.current, range, from));
    let judge = |range: Range<usize>, from: usize| {
        let baselines = search.baselines(from..range.end);
        let rates = tuned_hits(range.clone(), from).into_iter().zip(current_hits(range, from));
        let each = baselines.into_iter().zip(rates);
        each.map(|(base, (tuned, current))| Judgement {
            k: base.hits.k,
            epochs: base.epochs,
            tuned: ratio(tuned, base),
            current: ratio(current, base),
            frequent: base.frequent(),
            recent: base.recent(),
        })
        .collect::<Vec<_>>()
    };
    let (searched, held_out) = (judge(0..split, skip), judge(0..history.len(), split));
    let current = options.current;
    Ok(Tuning { tuned, current, candidates: tried, searched_epochs: split, searched, held_out })
}

fn ratio(hits: u64, base: HitRate) -> f64 {
    let most = u64::from(base.hits.k) * base.epochs;
    if most == 0 { 0.0 } else { hits as f64 / most as f64 }
}

/// Returns the candidates of the first round, the current settings among them.
fn grid(history: &History, options: &TuneOptions) -> Vec<Candidate> {
    let decays = options.fixed_decay.map_or_else(|| DECAYS.to_vec(), |decay| vec![decay]);
    // Without qualities the learning rate has no effect.
    let rates = if history.depends_on_rate() { RATES.to_vec() } else { vec![options.current.rate] };
    let mut candidates = vec![options.current];
    for &decay in &decays {
        for &rate in &rates {
            candidates.extend(INITIAL_WEIGHTS.map(|initial_weight| Candidate { decay, rate, initial_weight }));
        }
    }
    candidates
}

/// Returns candidates near `best`.
fn refine(best: Candidate, history: &History, options: &TuneOptions) -> Vec<Candidate> {
    let round = |value: f64| (value * 1e6).round() / 1e6;
    let factors = || REFINEMENT.into_iter().chain([1.0]);
    let mut refined = Vec::new();
    for decay in factors() {
        for rate in factors() {
            let is_free = (decay == 1.0 || options.fixed_decay.is_none()) && (rate == 1.0 || history.depends_on_rate());
            let near = Candidate { decay: round(best.decay * decay), rate: round(best.rate * rate).min(1.0), ..best };
            if is_free && near != best && near.is_valid() && !refined.contains(&near) {
                refined.push(near);
            }
        }
    }
    let weights = [0.05, 0.1, 0.2, 0.35, 0.75].map(|initial_weight| Candidate { initial_weight, ..best });
    refined.extend(weights.into_iter().filter(|near| *near != best));
    refined
}

/// A history with what all rounds share.
struct Search<'a, P> {
    history: &'a History,
    top_k: Vec<u32>,
    /// Hit rate of the better baseline on the first part, by length.
    better: Vec<f64>,
    progress: P,
    done: AtomicU64,
    /// Estimate of all work, in events.
    total: u64,
}

impl<'a, P: Fn(u64, u64) + Sync> Search<'a, P> {
    fn new(history: &'a History, options: &TuneOptions, (skip, split): (usize, usize), progress: P) -> Self {
        let mut top_k = options.top_k.clone();
        top_k.sort_unstable();
        top_k.dedup();
        let (grid, near) = (grid(history, options).len() as u64, REFINEMENT.len().pow(2) as u64 + 16);
        // Each round does about the same work: a third of the candidates on three times the epochs.
        let rounds = u64::from(ROUNDS + 1) * grid.div_ceil((HALVING as u64).pow(ROUNDS)) + near;
        let total = rounds * history.events() as u64;
        let search = Self { history, top_k, better: Vec::new(), progress, done: AtomicU64::new(0), total };
        let better = search.baselines(skip..split).iter().map(|base| base.frequent().max(base.recent())).collect();
        Self { better, ..search }
    }

    /// Returns the best candidates first, one of `keep` of them, at least three; ties keep their order. The first candidate, the current
    /// settings, is always kept.
    fn best(&self, candidates: &[Candidate], epochs: Range<usize>, scored: usize, keep: usize) -> Vec<Candidate> {
        let score = |candidate: &Candidate| {
            let hits = hits(self.history, epochs.clone(), scored, *candidate, &self.top_k);
            let events: usize = self.history.epochs()[epochs.clone()].iter().map(Vec::len).sum();
            let done = self.done.fetch_add(events as u64, Ordering::Relaxed) + events as u64;
            (self.progress)(done.min(self.total), self.total);
            self.relative_score(&hits)
        };
        let scores: Vec<f64> = candidates.par_iter().map(score).collect();
        let mut order: Vec<usize> = (0..candidates.len()).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
        order.truncate(if keep == usize::MAX { candidates.len() } else { (candidates.len() / keep).max(3) });
        order.into_iter().map(|index| candidates[index]).collect()
    }

    /// Returns the mean over the lengths of the hits per place of the ranking, relative to the better baseline.
    fn relative_score(&self, hits: &[u64]) -> f64 {
        let each = hits.iter().zip(&self.top_k).zip(&self.better);
        // A baseline without a hit weighs like one with a hit in a million places.
        each.map(|((hits, k), better)| *hits as f64 / f64::from(*k) / better.max(1e-6)).sum()
    }

    fn rates(&self, candidate: Candidate, epochs: Range<usize>, scored: usize) -> Vec<u64> {
        hits(self.history, epochs, scored, candidate, &self.top_k)
    }

    /// Returns the hit rates of the baselines on the epochs of `scored`, having seen all before. The hits of the memory are 0.
    fn baselines(&self, scored: Range<usize>) -> Vec<HitRate> {
        let mut prediction = Prediction::new(&self.top_k, scored.start as u64);
        let rows: Vec<_> =
            (0..scored.end).map(|index| prediction.score(&self.history.epoch(index), Some(&[]))).collect();
        let rates = HitRate::over(rows.iter().map(Vec::as_slice));
        // Without a scored epoch there are no rates.
        if rates.is_empty() { self.top_k.iter().map(|k| HitRate::none(*k)).collect() } else { rates }
    }
}
