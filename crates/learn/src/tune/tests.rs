use super::*;
use crate::source::{self, Content, Epoch, Event, ExampleName, Limits, Signal, Source, SourceError, SourceOptions};
use engram_memory::law::{delta, rank_order};
use engram_memory::{MemoryId, Weight, edge};
use std::collections::BTreeMap;

/// Epochs given as lists of ids.
struct Listed(std::vec::IntoIter<Vec<u64>>, u64);

impl Source for Listed {
    fn next_epoch(&mut self) -> Result<Option<Epoch>, SourceError> {
        let Some(ids) = self.0.next() else { return Ok(None) };
        let event = |id| Event { id: MemoryId(id), key: None, signal: Signal::Quality(0.9) };
        self.1 += 1;
        let mut ids = ids;
        ids.sort_unstable();
        Ok(Some(Epoch {
            number: self.1 - 1,
            label: None,
            content: Content::Events(ids.into_iter().map(event).collect()),
        }))
    }

    fn epochs(&self) -> Option<u64> {
        None
    }
}

fn history(epochs: Vec<Vec<u64>>) -> History {
    History::read(&mut Listed(epochs.into_iter(), 0), MAX_EVENTS, |_, _| {}).unwrap().unwrap()
}

const DEFAULT: Candidate = Candidate { decay: 0.01, rate: 0.05, initial_weight: 0.5 };

fn options(top_k: &[u32]) -> TuneOptions {
    TuneOptions { top_k: top_k.to_vec(), held_out: 0.3, skip: 21, current: DEFAULT, fixed_decay: None }
}

/// Epochs of 40 memories from a fixed congruential generator: a few are touched often, many once.
fn noise(epochs: usize) -> Vec<Vec<u64>> {
    let mut state = 7_u64;
    let mut next = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut skewed = || {
        let most = next(40);
        next(1 + most)
    };
    (0..epochs).map(|_| (0..3).map(|_| skewed()).collect()).collect()
}

/// Hits by the definition: eager decay, all memories sorted before each epoch.
fn slow_hits(epochs: &[Vec<u64>], scored: usize, candidate: Candidate, k: usize) -> u64 {
    let (decay, rate) = (edge::setting(candidate.decay).unwrap(), edge::rate(candidate.rate).unwrap());
    let initial = edge::weight(candidate.initial_weight as f32).unwrap();
    let change = delta(rate, edge::quality(0.9).unwrap());
    let (mut weights, mut hits): (BTreeMap<MemoryId, Weight>, u64) = (BTreeMap::new(), 0);
    for (index, epoch) in epochs.iter().enumerate() {
        if index >= scored {
            let mut rank: Vec<(Weight, MemoryId)> = weights.iter().map(|(id, weight)| (*weight, *id)).collect();
            rank.sort_by(|a, b| rank_order(*a, *b));
            hits += rank.iter().take(k).filter(|(_, id)| epoch.contains(&id.0)).count() as u64;
        }
        weights.values_mut().for_each(|weight| *weight = weight.decayed(decay));
        for id in epoch {
            let weight = weights.entry(MemoryId(*id)).or_insert(initial);
            *weight = weight.updated(change);
        }
    }
    hits
}

#[test]
fn a_candidate_learns_by_the_law_of_the_store() {
    let epochs = noise(300);
    let history = history(epochs.clone());
    for (decay, rate, initial_weight) in
        [(0.01, 0.05, 0.5), (0.0, 0.2, 0.0), (0.2, 0.5, 0.0), (0.05, 1.0, 0.25), (1.0, 0.05, 0.5)]
    {
        let candidate = Candidate { decay, rate, initial_weight };
        let expected = [3, 10].map(|k| slow_hits(&epochs, 20, candidate, k));
        assert_eq!(simulate::hits(&history, 0..300, 20, candidate, &[3, 10]), expected, "{candidate:?}");
        assert!(expected[1] > 0);
    }
}

#[test]
fn the_newest_epochs_are_kept_within_the_limit_of_events() {
    let epochs = noise(100);
    let mut read = 0;
    let mut source = Listed(epochs.into_iter(), 0);
    let history = History::read(&mut source, 30, |done, _| read = done).unwrap().unwrap();
    assert_eq!((history.len(), history.events(), history.skipped_epochs(), read), (10, 30, 90, 100));
    let last: Vec<usize> = history.epochs().iter().map(Vec::len).collect();
    assert_eq!(last, [3; 10]);
}

#[test]
fn a_tuned_memory_is_better_than_both_baselines_where_the_law_fits() {
    // Two kinds of memories: some come back for a while and never again, so that neither all counts nor the last touch predict.
    let mut epochs = Vec::new();
    for phase in 0..40_u64 {
        for step in 0..10_u64 {
            let popular = (0..4).filter(|offset| (step + offset) % 3 != 0).map(|offset| phase * 4 + offset);
            let once = (0..4).map(|offset| 10_000 + (phase * 10 + step) * 4 + offset);
            epochs.push(popular.chain(once).collect());
        }
    }
    let history = history(epochs);
    let tuning = tune(&history, &options(&[4]), |_, _| {}).unwrap();
    let judgement = tuning.held_out[0];
    assert!(tuning.holds() && judgement.tuned > 1.05 * judgement.frequent.max(judgement.recent), "{tuning:?}");
    assert!(judgement.tuned > judgement.current, "{tuning:?}");
    // The same on one thread.
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    assert_eq!(one.install(|| tune(&history, &options(&[4]), |_, _| {}).unwrap()), tuning);
}

#[test]
fn settings_without_an_effect_are_not_searched_and_short_histories_are_rejected() {
    let short = history(noise(8));
    assert_eq!(tune(&short, &options(&[5]), |_, _| {}), Err(TuneError::TooShort { epochs: 8 }));
    let fixed = TuneOptions { fixed_decay: Some(0.02), ..options(&[5]) };
    let tuning = tune(&history(noise(200)), &fixed, |_, _| {}).unwrap();
    assert_eq!((tuning.tuned.decay - 0.02).abs().min((tuning.tuned.decay - 0.01).abs()), 0.0, "{tuning:?}");
}

#[test]
fn the_judgement_is_that_of_a_run_over_the_built_in_example() {
    let mut source = source::open(&SourceOptions::Example(ExampleName::StateOfTheUnion), Limits::default(), 0).unwrap();
    let history = History::read(&mut *source, MAX_EVENTS, |_, _| {}).unwrap().unwrap();
    assert_eq!(history.len(), 233);
    // The settings of examples/cluster.yaml, whose run reports these hits.
    let example = Candidate { decay: 0.02, rate: 0.05, initial_weight: 0.0 };
    assert_eq!(simulate::hits(&history, 0..233, 21, example, &[500, 1_000]), [82_767, 134_694]);
}
