//! Gradient-boosted regression trees on the training samples: a lower bound for what a model should reach.
//!
//! Least-squares boosting (Friedman, 2001) of shallow trees over binned features. The same data give the same trees: sums are in sample order, and
//! of equal splits the first one is taken.

use std::ops::Range;

use crate::dataset::Dataset;
use crate::rows::{Evaluation, measure};

/// Most features, as for the ridge regression.
const MAX_FEATURES: usize = 1_024;
/// Most samples to fit: more change a baseline little.
const MAX_SAMPLES: usize = 20_000;
/// Samples that determine the bins.
const BIN_SAMPLES: usize = 4_096;
/// Most bins per feature.
const BINS: usize = 32;
/// Splits from the root to a leaf.
const DEPTH: usize = 4;
/// Most trees per output, and the fewest that are a baseline.
const ROUNDS: Range<usize> = 10..300;
/// Rounds without a smaller error after which boosting stops.
const PATIENCE: usize = 20;
/// Factor of each tree.
const RATE: f64 = 0.15;
/// Fewest samples of a leaf.
const LEAST: u32 = 5;
/// Most entries that are read: bounds the time to about a second.
const WORK: usize = 200_000_000;
/// One of this many training samples decides when to stop.
const VALIDATION: usize = 10;

/// Fits boosted trees, for classes one against all others each, and measures them on the held-out samples; `None` with more than 1,024 features, without
/// held-out samples, or with so many classes that the time does not suffice.
///
/// The number of trees is the one with the smallest error on the last tenth of the training samples, which is not fitted.
pub fn boosted_trees(data: &Dataset) -> Option<Evaluation> {
    let training = data.training_len();
    let fitted = (training - training / VALIDATION).min(MAX_SAMPLES);
    if data.features > MAX_FEATURES || training == data.len() || fitted == training || fitted == 0 {
        return None;
    }
    let binned = Binned::of(data, fitted);
    let outputs = data.classes.max(1);
    let cost = (binned.offsets[fitted] * DEPTH * outputs).max(1);
    let rounds = (WORK / cost).min(ROUNDS.end);
    if rounds < ROUNDS.start {
        return None;
    }
    let mut forest = Forest::new(data, fitted, outputs);
    let validation = fitted..training;
    let (mut best, mut least, mut since) = (forest.predicted.clone(), forest.error(&validation), 0);
    for _ in 0..rounds {
        (0..outputs).for_each(|output| forest.grow(&binned, output));
        let error = forest.error(&validation);
        since += 1;
        if error < least {
            (best, least, since) = (forest.predicted.clone(), error, 0);
        } else if since == PATIENCE {
            break;
        }
    }
    let predicted: Vec<f32> = best[training * outputs..].iter().map(|value| *value as f32).collect();
    Some(measure(&predicted, &data.targets[training..], data.classes))
}

/// Features as small integers. Bins of all features are numbered one after another.
struct Binned {
    /// First bin of each feature, and the number of all bins.
    first: Vec<u32>,
    /// Bin of the value 0 of each feature.
    zero: Vec<u32>,
    /// Bins of sample i that are not those of 0: `entries[offsets[i]..offsets[i + 1]]`, ascending.
    entries: Vec<u32>,
    offsets: Vec<usize>,
}

impl Binned {
    fn of(data: &Dataset, fitted: usize) -> Self {
        let count = fitted.min(BIN_SAMPLES);
        let mut columns = vec![vec![0.0; count]; data.features];
        let values = |sample| data.nonzero(sample).into_iter().map(move |(feature, value)| (feature, sample, value));
        (0..count).flat_map(values).for_each(|(feature, sample, value)| columns[feature][sample] = value);
        let bounds: Vec<Vec<f64>> = columns.iter_mut().map(|column| quantiles(column)).collect();
        let mut binned = Self { first: vec![0], zero: Vec::new(), entries: Vec::new(), offsets: vec![0] };
        for bounds in &bounds {
            let first = *binned.first.last().expect("there is a first one");
            binned.zero.push(first + bin(bounds, 0.0));
            binned.first.push(first + bounds.len() as u32 + 1);
        }
        for sample in 0..data.len() {
            for (feature, value) in data.nonzero(sample) {
                let at = binned.first[feature] + bin(&bounds[feature], value);
                if at != binned.zero[feature] {
                    binned.entries.push(at);
                }
            }
            binned.offsets.push(binned.entries.len());
        }
        binned
    }

    fn entries(&self, sample: usize) -> &[u32] {
        &self.entries[self.offsets[sample]..self.offsets[sample + 1]]
    }

    /// Returns the bin of a sample's feature.
    fn bin(&self, sample: usize, feature: usize) -> u32 {
        let entries = self.entries(sample);
        let at = entries.partition_point(|bin| *bin < self.first[feature]);
        entries.get(at).copied().filter(|bin| *bin < self.first[feature + 1]).unwrap_or(self.zero[feature])
    }

    fn features(&self) -> usize {
        self.zero.len()
    }
}

/// Returns the upper bounds of all bins but the last.
fn quantiles(column: &mut [f64]) -> Vec<f64> {
    column.sort_unstable_by(f64::total_cmp);
    let last = column[column.len() - 1];
    let mut bounds: Vec<f64> = (1..BINS).map(|part| column[part * column.len() / BINS]).collect();
    bounds.insert(0, column[0]);
    bounds.retain(|bound| *bound < last);
    bounds.dedup();
    bounds.truncate(BINS - 1);
    bounds
}

fn bin(bounds: &[f64], value: f64) -> u32 {
    bounds.partition_point(|bound| *bound < value) as u32
}

/// A part of the fitted samples.
struct Node {
    samples: Vec<u32>,
    /// Sum of the residuals.
    sum: f64,
}

/// Samples whose bin of the feature is at most `bin` go left.
#[derive(Clone, Copy)]
struct Split {
    feature: usize,
    bin: u32,
    gain: f64,
}

/// A tree: the split at `nodes[i]` leads to `2 i + 1` or `2 i + 2`.
struct Tree {
    splits: Vec<Option<Split>>,
    values: Vec<f64>,
}

impl Tree {
    fn value(&self, binned: &Binned, sample: usize) -> f64 {
        let mut at = 0;
        while let Some(split) = self.splits.get(at).copied().flatten() {
            at = 2 * at + if binned.bin(sample, split.feature) <= split.bin { 1 } else { 2 };
        }
        self.values[at]
    }
}

/// What the trees so far predict: a value per sample and output.
struct Forest {
    targets: Vec<f64>,
    predicted: Vec<f64>,
    outputs: usize,
    fitted: usize,
}

impl Forest {
    /// Starts with the mean of each output.
    fn new(data: &Dataset, fitted: usize, outputs: usize) -> Self {
        let wanted = |target: f32, output: usize| {
            if data.classes == 0 { f64::from(target) } else { f64::from(u8::from(target as usize == output)) }
        };
        let targets: Vec<f64> =
            data.targets.iter().flat_map(|target| (0..outputs).map(|output| wanted(*target, output))).collect();
        let mean = |output: usize| targets[..fitted * outputs].iter().skip(output).step_by(outputs).sum::<f64>();
        let means: Vec<f64> = (0..outputs).map(|output| mean(output) / fitted as f64).collect();
        Self { predicted: means.repeat(data.len()), targets, outputs, fitted }
    }

    /// Mean squared error over all outputs of some samples.
    fn error(&self, samples: &Range<usize>) -> f64 {
        let all = samples.start * self.outputs..samples.end * self.outputs;
        let squared = |at: usize| (self.targets[at] - self.predicted[at]).powi(2);
        all.clone().map(squared).sum::<f64>() / all.len().max(1) as f64
    }

    /// Adds a tree to an output.
    fn grow(&mut self, binned: &Binned, output: usize) {
        let at = |sample: usize| sample * self.outputs + output;
        let residuals: Vec<f64> =
            (0..self.fitted).map(|sample| self.targets[at(sample)] - self.predicted[at(sample)]).collect();
        let tree = fit(binned, &residuals);
        for sample in 0..self.predicted.len() / self.outputs {
            self.predicted[sample * self.outputs + output] += tree.value(binned, sample);
        }
    }
}

/// Fits a tree to the residuals of the first samples.
fn fit(binned: &Binned, residuals: &[f64]) -> Tree {
    let size = (2 << DEPTH) - 1;
    let mut tree = Tree { splits: vec![None; size], values: vec![0.0; size] };
    let root = Node { samples: (0..residuals.len() as u32).collect(), sum: residuals.iter().sum() };
    let mut level = vec![(0, root)];
    for depth in 0..=DEPTH {
        let mut next = Vec::new();
        for (at, node) in level {
            let split = if depth < DEPTH { best_split(binned, residuals, &node) } else { None };
            let Some(split) = split else {
                tree.values[at] = RATE * node.sum / node.samples.len() as f64;
                continue;
            };
            tree.splits[at] = Some(split);
            let is_left = |sample: &u32| binned.bin(*sample as usize, split.feature) <= split.bin;
            let (left, right): (Vec<u32>, Vec<u32>) = node.samples.into_iter().partition(is_left);
            for (side, samples) in [left, right].into_iter().enumerate() {
                let sum = samples.iter().map(|sample| residuals[*sample as usize]).sum();
                next.push((2 * at + 1 + side, Node { samples, sum }));
            }
        }
        level = next;
    }
    tree
}

/// Returns the split that lowers the squared error most; `None` if none does.
fn best_split(binned: &Binned, residuals: &[f64], node: &Node) -> Option<Split> {
    let bins = binned.first[binned.features()] as usize;
    let (mut sums, mut counts) = (vec![0.0; bins], vec![0_u32; bins]);
    for sample in &node.samples {
        let residual = residuals[*sample as usize];
        for bin in binned.entries(*sample as usize) {
            sums[*bin as usize] += residual;
            counts[*bin as usize] += 1;
        }
    }
    let total = node.samples.len() as u32;
    let share = |sum: f64, count: u32| sum * sum / f64::from(count);
    let mut best: Option<Split> = None;
    for feature in 0..binned.features() {
        let own = binned.first[feature] as usize..binned.first[feature + 1] as usize;
        // Entries leave out the bin of 0, which has the rest.
        let zero = binned.zero[feature] as usize;
        sums[zero] = node.sum - sums[own.clone()].iter().sum::<f64>();
        counts[zero] = total - counts[own.clone()].iter().sum::<u32>();
        let (mut sum, mut count) = (0.0, 0);
        for bin in own.start..own.end - 1 {
            sum += sums[bin];
            count += counts[bin];
            if count < LEAST || total - count < LEAST {
                continue;
            }
            let gain = share(sum, count) + share(node.sum - sum, total - count) - share(node.sum, total);
            if gain > best.map_or(1e-12, |it| it.gain) {
                best = Some(Split { feature, bin: bin as u32, gain });
            }
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::baseline::ridge;
    use crate::dataset::Subsets;

    fn table(count: u32, is_class: bool, target: impl Fn(f64, f64) -> f64) -> Dataset {
        let line = |i: u32| {
            let (a, b) = (f64::from(i * 37 % 101) / 50.0 - 1.0, f64::from(i * 53 % 97) / 48.0 - 1.0);
            format!("{a},{b},{}\n", target(a, b))
        };
        let text = (0..count).map(line).fold("a,b,y\n".to_owned(), |text, line| text + &line);
        Dataset::table(text.as_bytes(), "y", is_class, 1).unwrap()
    }

    #[test]
    fn boosted_trees_find_a_product_that_a_ridge_cannot_and_separate_quadrants() {
        let data = table(1_000, false, |a, b| a * b);
        let (trees, line) = (boosted_trees(&data).unwrap(), ridge(&data).unwrap());
        assert!(trees.correlation > 0.95 && line.correlation < 0.5, "{trees:?} {line:?}");
        assert_eq!(boosted_trees(&data), Some(trees), "the same data give the same trees");
        let quadrant = |a: f64, b: f64| f64::from(u8::from(a > 0.0) + 2 * u8::from(b > 0.0));
        let found = boosted_trees(&table(1_000, true, quadrant)).unwrap();
        assert!(found.accuracy > 0.95, "{found:?}");
    }

    #[test]
    fn boosted_trees_read_sets_of_features() {
        let settings = Subsets { features: 60, samples: 2_000, sizes: (5, 20), noise: 0.01, seed: 3 };
        let found = boosted_trees(&Dataset::subsets(&settings)).unwrap();
        assert!(found.correlation > 0.8 && found.spread_ratio > 0.3, "{found:?}");
    }

    #[test]
    fn data_that_are_too_wide_or_too_few_have_no_baseline() {
        let data = table(200, false, |a, _| a);
        assert!(boosted_trees(&Dataset { features: 2_000, ..data }).is_none());
        assert!(
            boosted_trees(&Dataset { features: 1, targets: vec![1.0], values: vec![1.0], ..Dataset::default() })
                .is_none()
        );
    }

    #[test]
    fn bins_follow_the_quantiles_and_keep_rare_values_apart() {
        let mut column: Vec<f64> = vec![0.0; 1_000];
        column[7] = 1.0;
        assert_eq!(quantiles(&mut column), [0.0]);
        assert_eq!((bin(&[0.0], 0.0), bin(&[0.0], 1.0)), (0, 1));
        let mut column: Vec<f64> = (0..3_200).map(f64::from).collect();
        assert_eq!(quantiles(&mut column).len(), BINS - 1);
        assert!(quantiles(&mut [2.0; 10]).is_empty());
    }
}
