//! Labeled samples in memory, tables, the generator of the reference data, and the deterministic order of samples.

use engram_neural::philox;

use crate::table::TableColumns;

/// Keeps the streams of random numbers of this module apart from those of other users of the same seed.
const DOMAIN: u64 = 0x6461_7461_0000_0000;
/// Rounds of the permutation of samples; four are enough for a shuffle.
const ROUNDS: u32 = 4;
/// One of this many samples is held out.
const HELD_OUT: usize = 10;

/// Samples with sparse 0/1 inputs, or numbers, and one target each.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Dataset {
    /// Number of features.
    pub features: usize,
    /// Features of sample i: `indices[offsets[i]..offsets[i + 1]]`, ascending.
    pub offsets: Vec<u32>,
    /// See `offsets`.
    pub indices: Vec<u32>,
    /// Numbers of sample i: `values[i * features..(i + 1) * features]`; empty where inputs are sparse.
    pub values: Vec<f32>,
    /// One target per sample; a class where there are classes.
    pub targets: Vec<f32>,
    /// Number of classes; 0 where targets are numbers.
    pub classes: usize,
    /// Names and scale of the columns, where the samples are a table.
    pub table: Option<TableColumns>,
}

/// Settings of [`Dataset::subsets`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Subsets {
    /// Number of features, at least 30.
    pub features: usize,
    /// Number of samples.
    pub samples: usize,
    /// Fewest and most features of a subset.
    pub sizes: (usize, usize),
    /// Standard deviation of noise added to each score.
    pub noise: f64,
    /// Seed.
    pub seed: u64,
}

impl Dataset {
    /// Scores of random feature subsets.
    ///
    /// The features are those of the reference model: a third `x` is informative, a third redundant,
    /// `0.7 x_a + 0.3 x_b + 0.2 noise`, a third noise, and the target of the underlying regression is
    /// `sum x_1..5 + sum sin(pi x_6..10) + 0.5 sum x_1..3 * x_4..6 + 0.3 noise` with independent standard normal `x`.
    /// The score of a subset is the share of that target's variance that it can explain, in closed form: a feature is
    /// known fully if it is in the subset, and otherwise by the squared correlations of its redundant copies; a product
    /// is known as far as both factors are. Noise features cost a small share each, as overfitting does.
    pub fn subsets(settings: &Subsets) -> Self {
        let generator = Generator::new(settings);
        let mut data = Self { features: settings.features, offsets: vec![0], ..Self::default() };
        for sample in 0..settings.samples {
            let subset = generator.subset(sample as u32);
            data.targets.push(generator.score(sample as u32, &subset));
            data.indices.extend(subset);
            data.offsets.push(data.indices.len() as u32);
        }
        data
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.targets.len()
    }

    /// Whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.targets.is_empty()
    }

    /// Number of samples to train on: the first ones; the rest is held out.
    pub fn training_len(&self) -> usize {
        training_len(self.len())
    }

    /// Numbers of a sample.
    pub fn row(&self, sample: usize) -> &[f32] {
        &self.values[sample * self.features..(sample + 1) * self.features]
    }

    /// Inputs of a sample that are not 0, with their values.
    pub(crate) fn nonzero(&self, sample: usize) -> Vec<(usize, f64)> {
        if self.values.is_empty() {
            return self.subset(sample).iter().map(|feature| (*feature as usize, 1.0)).collect();
        }
        let row = self.row(sample).iter().enumerate();
        row.filter(|(_, value)| **value != 0.0).map(|(feature, value)| (feature, f64::from(*value))).collect()
    }

    /// Features of a sample.
    pub fn subset(&self, sample: usize) -> &[u32] {
        &self.indices[self.offsets[sample] as usize..self.offsets[sample + 1] as usize]
    }
}

/// Number of samples to train on of so many.
pub(crate) const fn training_len(samples: usize) -> usize {
    samples - samples / HELD_OUT
}

struct Generator {
    settings: Subsets,
    informative: usize,
    /// For each of the ten relevant features, its redundant copies and their squared correlations.
    copies: Vec<Vec<(u32, f64)>>,
}

/// Features in the target of the regression.
const RELEVANT: usize = 10;

impl Generator {
    fn new(settings: &Subsets) -> Self {
        let third = settings.features / 3;
        let mut copies = vec![Vec::new(); RELEVANT];
        let variance = 0.7 * 0.7 + 0.3 * 0.3 + 0.2 * 0.2;
        for copy in 0..third {
            let words = philox(settings.seed ^ DOMAIN, [copy as u32, 0, 0, 1]);
            for (word, factor) in [(words[0], 0.7), (words[1], 0.3)] {
                let source = word as usize % third;
                if source < RELEVANT {
                    copies[source].push(((third + copy) as u32, factor * factor / variance));
                }
            }
        }
        Self { settings: *settings, informative: third, copies }
    }

    /// A subset of random size: a partial shuffle, ascending.
    fn subset(&self, sample: u32) -> Vec<u32> {
        let Subsets { features, sizes: (smallest, largest), seed, .. } = self.settings;
        let (smallest, largest) = (smallest.min(features), largest.min(features).max(smallest.min(features)));
        let word = |at: u32| philox(seed ^ DOMAIN, [at, sample, 0, 2])[0];
        let size = smallest + word(u32::MAX) as usize % (largest - smallest + 1);
        let mut all: Vec<u32> = (0..features as u32).collect();
        for at in 0..size {
            let other = at + word(at as u32) as usize % (features - at);
            all.swap(at, other);
        }
        all.truncate(size);
        all.sort_unstable();
        all
    }

    fn score(&self, sample: u32, subset: &[u32]) -> f32 {
        let has = |feature: usize| subset.binary_search(&(feature as u32)).is_ok();
        let known = |feature: usize| {
            if has(feature) {
                return 1.0;
            }
            let present = self.copies[feature].iter().filter(|(copy, _)| has(*copy as usize));
            1.0 - present.map(|(_, share)| 1.0 - share).product::<f64>()
        };
        // Variances: 1 of x, (1 - exp(-2 pi^2)) / 2 of sin(pi x), 0.25 of 0.5 x x', 0.09 of the noise.
        let sine = 0.5 * (1.0 - (-2.0 * std::f64::consts::PI.powi(2)).exp());
        let linear: f64 = (0..5).map(known).sum();
        let periodic: f64 = (5..RELEVANT).map(|feature| sine * known(feature)).sum();
        let products: f64 = (0..3).map(|feature| 0.25 * known(feature) * known(feature + 3)).sum();
        let total = 5.0 + 5.0 * sine + 3.0 * 0.25 + 0.09;
        let noisy = subset.iter().filter(|feature| **feature as usize >= 2 * self.informative).count();
        let words = philox(self.settings.seed ^ DOMAIN, [sample, 0, 0, 3]);
        let explained = (linear + periodic + products) / total * (1.0 - 0.002 * noisy as f64);
        (explained + self.settings.noise * normal(words[0], words[1])).clamp(0.0, 1.0) as f32
    }
}

/// A standard normal number from two words (Box and Muller, 1958).
fn normal(a: u32, b: u32) -> f64 {
    let unit = |word: u32| (f64::from(word) + 0.5) / 4_294_967_296.0;
    (-2.0 * unit(a).ln()).sqrt() * (2.0 * std::f64::consts::PI * unit(b)).cos()
}

/// Sample at `position` of an endless sequence in which every pass over `samples` samples visits each once, in an order
/// of its own: a Feistel permutation of the next power of four, walked until it is within range.
pub fn sample_at(seed: u64, samples: usize, position: u64) -> usize {
    let pass = position / samples as u64;
    let half = (samples.max(2) - 1).ilog2() / 2 + 1;
    let mask = (1u32 << half) - 1;
    let mut at = position % samples as u64;
    loop {
        let (mut left, mut right) = ((at >> half) as u32, at as u32 & mask);
        for round in 0..ROUNDS {
            let word = philox(seed ^ DOMAIN, [right, round, pass as u32, (pass >> 32) as u32])[0];
            (left, right) = (right, left ^ (word & mask));
        }
        at = u64::from(left) << half | u64::from(right);
        if at < samples as u64 {
            return at as usize;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pass_visits_every_sample_once_in_another_order() {
        for samples in [1, 2, 3, 10, 64, 100, 257] {
            let pass = |number: u64| -> Vec<usize> {
                let n = samples as u64;
                (0..n).map(|i| sample_at(7, samples, number * n + i)).collect()
            };
            for number in 0..3 {
                let mut order = pass(number);
                order.sort_unstable();
                assert_eq!(order, (0..samples).collect::<Vec<_>>());
            }
            assert!(samples < 10 || pass(0) != pass(1));
        }
    }

    #[test]
    fn scores_rise_with_relevant_features_and_fall_with_noise() {
        let settings = Subsets { features: 90, samples: 500, sizes: (5, 40), noise: 0.0, seed: 1 };
        let generator = Generator::new(&settings);
        let score = |subset: &[u32]| generator.score(0, subset);
        assert_eq!(score(&[]), 0.0);
        let all: Vec<u32> = (0..30).collect();
        assert!(score(&all) > 0.98, "{}", score(&all));
        assert!(score(&[0]) > score(&[5]) && score(&[0, 3]) > 2.0 * score(&[1]));
        let noisy: Vec<u32> = (0..30).chain(60..90).collect();
        assert!(score(&noisy) < score(&all));
        let data = Dataset::subsets(&settings);
        assert_eq!((data.len(), data.training_len()), (500, 450));
        assert!((0..500).all(|i| (5..=40).contains(&data.subset(i).len())));
        assert_eq!(data, Dataset::subsets(&settings));
        assert_ne!(data, Dataset::subsets(&Subsets { seed: 2, ..settings }));
    }
}
