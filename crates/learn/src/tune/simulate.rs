//! The memory of one candidate over a history: the law of the store on one thread, with the ranking kept in order.

use super::history::{Change, History};
use engram_memory::law::{self, ONE};
use engram_memory::{Weight, edge};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Range;

/// Settings of a memory.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Candidate {
    /// Weight loss per epoch.
    pub decay: f64,
    /// Learning rate.
    pub rate: f64,
    /// Weight of a new memory.
    pub initial_weight: f64,
}

impl Candidate {
    /// Returns decay, rate and initial weight in units; `None` if one is out of its range.
    fn units(self) -> Option<(u32, u32, u32)> {
        let setting = |value| edge::setting(value).ok();
        Some((setting(self.decay)?, edge::rate(self.rate).ok()?, setting(self.initial_weight)?))
    }

    /// Returns whether all settings are in their ranges.
    pub(super) fn is_valid(self) -> bool {
        self.units().is_some()
    }
}

/// A memory that has not been touched yet.
const UNTOUCHED: u64 = u64::MAX;

/// Ranking of all memories by (weight descending, number ascending). As in the store, decay moves a clock; a potential is a weight plus
/// the clock of its last change.
struct Memory {
    clock: u64,
    /// Potential by number.
    potentials: Vec<u64>,
    /// Memories with a weight above 0.
    weighted: BTreeSet<(Reverse<u64>, u32)>,
    /// Memories with weight 0, which rank last, by number.
    faded: BTreeSet<u32>,
}

impl Memory {
    fn new(memories: usize) -> Self {
        let (weighted, faded) = (BTreeSet::new(), BTreeSet::new());
        Self { clock: 0, potentials: vec![UNTOUCHED; memories], weighted, faded }
    }

    fn decay(&mut self, amount: u32) {
        self.clock += u64::from(amount);
        while let Some((Reverse(potential), memory)) = self.weighted.last().copied()
            && potential <= self.clock
        {
            self.weighted.pop_last();
            self.faded.insert(memory);
        }
    }

    fn change(&mut self, memory: u32, initial_weight: u32, delta: i32) {
        let slot = &mut self.potentials[memory as usize];
        let before = *slot;
        let weight = match before {
            UNTOUCHED => initial_weight,
            potential => u32::try_from(potential.saturating_sub(self.clock)).expect("a weight is at most ONE"),
        };
        let weight = Weight::from_units(weight.min(ONE)).expect("a weight is at most ONE").updated(delta);
        let potential = self.clock + u64::from(weight.units());
        *slot = potential;
        if before != UNTOUCHED && before == potential {
            return;
        }
        match before {
            UNTOUCHED => {}
            before if before > self.clock => drop(self.weighted.remove(&(Reverse(before), memory))),
            _ => drop(self.faded.remove(&memory)),
        }
        if potential > self.clock {
            self.weighted.insert((Reverse(potential), memory));
        } else {
            self.faded.insert(memory);
        }
    }

    fn ranking(&self) -> impl Iterator<Item = u32> + '_ {
        self.weighted.iter().map(|(_, memory)| *memory).chain(self.faded.iter().copied())
    }
}

/// Returns the hits of the first k of the ranking before each epoch from `scored` on, summed, for each of `top_k`, which ascend. The memory
/// is empty before `epochs`, of which it learns all.
///
/// # Panics
/// When a setting of `candidate` is out of range.
pub(super) fn hits(
    history: &History,
    epochs: Range<usize>,
    scored: usize,
    candidate: Candidate,
    top_k: &[u32],
) -> Vec<u64> {
    let (decay, rate, initial_weight) = candidate.units().expect("the search has checked the settings");
    let mut memory = Memory::new(history.distinct_memories());
    let mut sums = vec![0; top_k.len()];
    for index in epochs {
        let epoch = &history.epochs()[index];
        if index >= scored && !epoch.is_empty() {
            add_hits(&memory, epoch, top_k, &mut sums);
        }
        memory.decay(decay);
        for (number, change) in epoch {
            let delta = match change {
                Change::Quality(quality) => law::delta(rate, *quality),
                Change::Delta(delta) => *delta,
            };
            memory.change(*number, initial_weight, delta);
        }
    }
    sums
}

/// Adds the hits of one epoch, whose events ascend by memory.
fn add_hits(memory: &Memory, epoch: &[(u32, Change)], top_k: &[u32], sums: &mut [u64]) {
    let (mut ranking, mut at, mut hits) = (memory.ranking(), 0, 0);
    for (&k, sum) in top_k.iter().zip(sums) {
        for number in ranking.by_ref().take(k as usize - at) {
            hits += u64::from(epoch.binary_search_by_key(&number, |(touched, _)| *touched).is_ok());
        }
        at = k as usize;
        *sum += hits;
    }
}
