//! The experiment with two populations: half of the memories is rewarded every epoch, the other half punished.
//!
//! Without noise an epoch is two group signals, whatever the number of memories. With noise every memory has its own quality. The
//! noise of (seed, epoch, id) is a pure function, so any worker can generate any part of an epoch, and a resumed run sees the same
//! numbers. It uses only integers, additions and one product in double precision, without functions that math libraries could round
//! differently.

use super::{Content, Epoch, Event, Signal, Source, SourceError};
use engram_memory::{Group, MemoryId, mix64};
use std::ops::Range;

/// The experiment.
#[derive(Debug, Clone, PartialEq)]
pub struct SyntheticOptions {
    /// Number of memories, even.
    pub memories: u64,
    /// Weight at the start, in [0, 1].
    pub initial_weight: f32,
    /// Quality of the rewarded group, in [0, 1].
    pub rewarded: f32,
    /// Quality of the punished group, in [0, 1].
    pub punished: f32,
    /// Standard deviation of what is added to a quality before it is clamped to [0, 1]; 0 = no noise.
    pub noise: f32,
    /// Seed of the noise.
    pub seed: u64,
}

impl Default for SyntheticOptions {
    fn default() -> Self {
        Self { memories: 100_000, initial_weight: 0.5, rewarded: 0.8, punished: 0.2, noise: 0.0, seed: 42 }
    }
}

/// The memories of the experiment: what has to be inserted before the first epoch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Population {
    /// Ids 0 to `memories` - 1.
    pub memories: u64,
    /// Weight of each.
    pub initial_weight: f32,
}

impl Population {
    /// The rewarded group.
    pub const REWARDED: Group = Group(0);
    /// The punished group.
    pub const PUNISHED: Group = Group(1);

    /// The group of a memory: even ids are rewarded, odd ones punished.
    pub const fn group_of(id: MemoryId) -> Group {
        if id.0.is_multiple_of(2) { Self::REWARDED } else { Self::PUNISHED }
    }

    /// All ids, ascending.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = MemoryId> + use<> {
        let end = usize::try_from(self.memories).expect("ids of a population fit in memory");
        (0..end).map(|id| MemoryId(id as u64))
    }
}

impl SyntheticOptions {
    /// The memories to insert.
    pub const fn population(&self) -> Population {
        Population { memories: self.memories, initial_weight: self.initial_weight }
    }

    fn quality(&self, id: MemoryId) -> f32 {
        if Population::group_of(id) == Population::REWARDED { self.rewarded } else { self.punished }
    }
}

/// One epoch of the experiment with noise: a quality for every memory, made where it is wanted.
#[derive(Debug, Clone, PartialEq)]
pub struct NoisyEpoch {
    options: SyntheticOptions,
    epoch: u64,
}

impl NoisyEpoch {
    /// Number of memories; every one is reinforced once.
    pub const fn memories(&self) -> u64 {
        self.options.memories
    }

    /// The quality of one memory, in [0, 1].
    pub fn quality(&self, id: MemoryId) -> f32 {
        let base = f64::from(self.options.quality(id));
        let noise = f64::from(self.options.noise) * normal(self.options.seed, self.epoch, id.0);
        (base + noise).clamp(0.0, 1.0) as f32
    }

    /// The events of a range of ids, ascending.
    pub fn events(&self, ids: Range<u64>) -> impl Iterator<Item = Event> + '_ {
        let end = ids.end.min(self.options.memories);
        (ids.start..end).map(|id| {
            let id = MemoryId(id);
            Event { id, key: None, signal: Signal::Quality(self.quality(id)) }
        })
    }
}

/// A number that is as good as normally distributed, mean 0 and standard deviation 1: the sum of twelve uniform numbers
/// less its mean (the variance of one is 1/12). It never leaves [-6, 6]; of a true normal distribution two in a thousand
/// million would.
fn normal(seed: u64, epoch: u64, id: u64) -> f64 {
    /// 2^64 over the golden ratio: steps of it never fall into a short cycle.
    const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
    const MEAN: i64 = 6 * (u32::MAX as i64);
    let mut state = mix64(mix64(mix64(seed.wrapping_add(STEP)) ^ epoch.wrapping_add(STEP)) ^ id.wrapping_add(STEP));
    let mut sum = 0_i64;
    for _ in 0..6 {
        state = state.wrapping_add(STEP);
        let drawn = mix64(state);
        sum += i64::from(drawn as u32) + i64::from((drawn >> 32) as u32);
    }
    // Twelve numbers below 2^32: the difference is exact in double precision, and so is the division.
    (sum - MEAN) as f64 / 4_294_967_296.0
}

pub(super) struct Synthetic {
    options: SyntheticOptions,
    next: u64,
}

impl Synthetic {
    pub(super) const fn new(options: SyntheticOptions, from: u64) -> Self {
        Self { options, next: from }
    }
}

impl Source for Synthetic {
    fn next_epoch(&mut self) -> Result<Option<Epoch>, SourceError> {
        let number = self.next;
        self.next += 1;
        let content = if self.options.noise == 0.0 {
            Content::Groups(vec![
                (Population::REWARDED, Signal::Quality(self.options.rewarded)),
                (Population::PUNISHED, Signal::Quality(self.options.punished)),
            ])
        } else {
            Content::Noise(NoisyEpoch { options: self.options.clone(), epoch: number })
        };
        Ok(Some(Epoch { number, label: None, content }))
    }

    /// Unlimited; the run sets the number.
    fn epochs(&self) -> Option<u64> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_is_nearly_normal_and_reproducible() {
        let draws = 200_000;
        let (mut sum, mut squares, mut within) = (0.0, 0.0, 0);
        for id in 0..draws {
            let x = normal(42, 7, id);
            sum += x;
            squares += x * x;
            within += u32::from(x.abs() < 1.0);
        }
        let (mean, variance, within) = (sum / draws as f64, squares / draws as f64, f64::from(within) / draws as f64);
        assert!(mean.abs() < 0.01, "mean {mean}");
        assert!((variance - 1.0).abs() < 0.02, "variance {variance}");
        assert!((within - 0.6827).abs() < 0.01, "within one deviation {within}");
        // Committed bits: another platform, or another version, that draws other numbers fails here.
        let options = SyntheticOptions { noise: 0.15, ..SyntheticOptions::default() };
        let epoch = NoisyEpoch { options, epoch: 3 };
        let bits: Vec<u32> = (0..4).map(|id| epoch.quality(MemoryId(id)).to_bits()).collect();
        assert_eq!(bits, BITS);
        assert!((0..10_000).all(|id| (0.0..=1.0).contains(&epoch.quality(MemoryId(id)))));
    }

    const BITS: [u32; 4] = [1_063_982_598, 1_049_612_948, 1_063_742_561, 1_041_303_502];

    #[test]
    fn parts_of_an_epoch_equal_the_epoch() {
        let options = SyntheticOptions { memories: 100, noise: 0.3, ..SyntheticOptions::default() };
        let mut source = Synthetic::new(options.clone(), 5);
        let epoch = source.next_epoch().unwrap().unwrap();
        let Content::Noise(noise) = epoch.content else { panic!("noise is drawn for each memory") };
        let whole: Vec<Event> = noise.events(0..100).collect();
        let pieces: Vec<Event> = [0..33, 33..34, 34..200].into_iter().flat_map(|ids| noise.events(ids)).collect();
        assert_eq!(whole, pieces);
        assert_eq!((epoch.number, whole.len(), options.population().ids().len()), (5, 100, 100));
    }
}
