//! Statistics of weights: separation of two groups, convergence factor, inversion ratio.
//!
//! Sums and pair counts are integers, so that they may be added over partitions in any order; one division at the end
//! makes the number that people read.

use engram_memory::{GroupQuality, ONE};

/// Difference of two groups' mean weights, as an exact fraction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Separation {
    /// `sum_r * n_p - sum_p * n_r`, in units of weight.
    difference: i128,
    /// `n_r * n_p`.
    pairs: u128,
}

impl Separation {
    /// Separation of a rewarded and a punished group; `None` where one of them has no memory.
    pub fn of(rewarded: &GroupQuality, punished: &GroupQuality) -> Option<Self> {
        if rewarded.count == 0 || punished.count == 0 {
            return None;
        }
        // Sums are below 2^94 and the counts that made them below 2^64, for up to 2^64 memories; real ones are far below.
        let scaled = |sum: u128, count: u64| (sum * u128::from(count)).cast_signed();
        let difference = scaled(rewarded.sum, punished.count) - scaled(punished.sum, rewarded.count);
        Some(Self { difference, pairs: u128::from(rewarded.count) * u128::from(punished.count) })
    }

    /// The separation in [-1, 1].
    pub fn to_f64(self) -> f64 {
        self.difference as f64 / (self.pairs as f64 * f64::from(ONE))
    }

    /// The separation in units of weight where the groups are such that it is a whole number.
    pub fn units(self) -> Option<i64> {
        let pairs = self.pairs.cast_signed();
        (self.difference % pairs == 0).then(|| i64::try_from(self.difference / pairs).ok())?
    }

    /// How many times larger it is than after the first epoch: the convergence factor. `None` where that was zero.
    pub fn factor(self, first: Self) -> Option<f64> {
        let counts = first.pairs as f64 / self.pairs as f64;
        (first.difference != 0).then(|| self.difference as f64 / first.difference as f64 * counts)
    }
}

/// Share of the pairs (rewarded, punished) in the right order: 1 is perfect, one half is chance. A tie counts one half.
///
/// Counts are doubled so that they stay whole, and may be added over anything that splits the *ranking*; weights of
/// different partitions have to be merged first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Inversion {
    /// Twice the inverted pairs, plus once the tied ones.
    doubled: u128,
    /// Pairs without an order, counted half: ties, or pairs inside one bin of a histogram.
    undecided: u128,
    pairs: u128,
}

impl Inversion {
    /// Counts from histograms of the two groups, by ascending weight and with equal bins. Pairs inside a bin are counted
    /// half; [`Inversion::error`] bounds what that may be wrong by.
    ///
    /// # Panics
    /// When the histograms have different numbers of bins.
    pub fn of_histograms(rewarded: &[u64], punished: &[u64]) -> Self {
        assert_eq!(rewarded.len(), punished.len(), "histograms of different widths cannot be compared");
        let mut inversion = Self::default();
        // Ascending: every rewarded memory of lower bins lies below this bin's punished ones.
        let (mut rewarded_below, mut punished_total) = (0_u128, 0_u128);
        for (&r, &p) in rewarded.iter().zip(punished) {
            let (r, p) = (u128::from(r), u128::from(p));
            inversion.doubled += 2 * rewarded_below * p + r * p;
            inversion.undecided += r * p;
            rewarded_below += r;
            punished_total += p;
        }
        inversion.pairs = rewarded_below * punished_total;
        inversion
    }

    /// Counts exactly, from one pass over the full rank: (weight in units, whether rewarded), by descending weight.
    /// Memories of other groups are left out by the caller.
    ///
    /// # Panics
    /// When the weights ascend somewhere.
    pub fn of_rank(rank: impl IntoIterator<Item = (u32, bool)>) -> Self {
        let mut inversion = Self::default();
        let (mut rewarded, mut punished_above) = (0_u128, 0_u128);
        let (mut tied_rewarded, mut tied_punished) = (0_u128, 0_u128);
        let mut weight = u32::MAX;
        let mut close = |rewarded_tied: u128, punished_tied: u128, above: &mut u128| {
            inversion.doubled += 2 * *above * rewarded_tied + rewarded_tied * punished_tied;
            inversion.undecided += rewarded_tied * punished_tied;
            *above += punished_tied;
        };
        for (units, is_rewarded) in rank {
            assert!(units <= weight, "a rank descends by weight");
            if units < weight {
                close(tied_rewarded, tied_punished, &mut punished_above);
                (weight, tied_rewarded, tied_punished) = (units, 0, 0);
            }
            if is_rewarded {
                tied_rewarded += 1;
                rewarded += 1;
            } else {
                tied_punished += 1;
            }
        }
        close(tied_rewarded, tied_punished, &mut punished_above);
        inversion.pairs = rewarded * punished_above;
        inversion
    }

    /// 1 - inversions / pairs; `None` where a group has no memory.
    pub fn ratio(self) -> Option<f64> {
        // Subtracted in integers: near 1 the difference of two rounded numbers would lose digits.
        (self.pairs > 0).then(|| (2 * self.pairs - self.doubled) as f64 / (2 * self.pairs) as f64)
    }

    /// By how much the ratio of a histogram may differ from the exact one, at most.
    pub fn error(self) -> f64 {
        if self.pairs == 0 { 0.0 } else { self.undecided as f64 / (2 * self.pairs) as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_memory::{Group, Histogram, QualityVector, Weight};
    use proptest::prelude::*;

    const REWARDED: Group = Group(0);
    const PUNISHED: Group = Group(1);

    /// Decay 0.01 and qualities 0.8 / 0.2 at rate 0.05, from weight one half.
    #[test]
    fn the_standard_experiment_gives_the_separations_of_the_law() {
        let mut weights = [(REWARDED, Weight::HALF, 42_949_673), (PUNISHED, Weight::HALF, -42_949_672)];
        let mut separations = Vec::new();
        for _ in 0..20 {
            let mut quality = QualityVector::default();
            for (group, weight, delta) in &mut weights {
                *weight = weight.decayed(10_737_418).updated(*delta);
                (0..500).for_each(|_| quality.add(*group, *weight));
            }
            separations.push(Separation::of(&quality.group(REWARDED), &quality.group(PUNISHED)).unwrap());
        }
        let units: Vec<i64> = separations.iter().map(|s| s.units().unwrap()).collect();
        assert_eq!((units[0], units[9], units[15], units[19]), (85_899_345, 858_993_450, 1_052_266_992, 1_073_741_824));
        let factor = separations[19].factor(separations[0]).unwrap();
        assert!((factor - 12.500_000_133_878).abs() < 1e-12, "{factor}");
        assert_eq!(separations[19].to_f64(), 1.0);
    }

    #[test]
    fn separation_of_unequal_groups_is_the_difference_of_their_means() {
        let mut quality = QualityVector::default();
        for (group, units) in [(REWARDED, 3), (REWARDED, 5), (PUNISHED, 1), (PUNISHED, 1), (PUNISHED, 2)] {
            quality.add(group, Weight::from_units(units).unwrap());
        }
        let separation = Separation::of(&quality.group(REWARDED), &quality.group(PUNISHED)).unwrap();
        assert!((separation.to_f64() * f64::from(ONE) - (4.0 - 4.0 / 3.0)).abs() < 1e-12);
        assert_eq!(separation.units(), None);
        assert_eq!(Separation::of(&quality.group(REWARDED), &GroupQuality::EMPTY), None);
    }

    proptest! {
        #[test]
        fn inversions_equal_the_double_loop_and_lie_within_the_error_of_the_histogram(
            rewarded in prop::collection::vec(0..=ONE, 1..40),
            punished in prop::collection::vec(0..=ONE, 1..40),
            coarse in 0_u32..31,
        ) {
            let cut = |weights: Vec<u32>| -> Vec<u32> { weights.into_iter().map(|w| w >> coarse << coarse).collect() };
            let (rewarded, punished) = (cut(rewarded), cut(punished));
            let mut doubled = 0;
            for r in &rewarded {
                for p in &punished {
                    doubled += match r.cmp(p) { std::cmp::Ordering::Less => 2, std::cmp::Ordering::Equal => 1, _ => 0 };
                }
            }
            let pairs = rewarded.len() * punished.len();
            let loops = 1.0 - f64::from(doubled) / (2 * pairs) as f64;
            let mut rank: Vec<(u32, bool)> = rewarded.iter().map(|&w| (w, true)).chain(punished.iter().map(|&w| (w, false))).collect();
            rank.sort_by_key(|entry| std::cmp::Reverse(entry.0));
            let exact = Inversion::of_rank(rank).ratio().unwrap();
            prop_assert!((exact - loops).abs() < 1e-12, "{exact} against {loops}");

            let mut histogram = Histogram::new(12).unwrap();
            rewarded.iter().for_each(|&w| histogram.add(REWARDED, Weight::from_units(w).unwrap()));
            punished.iter().for_each(|&w| histogram.add(PUNISHED, Weight::from_units(w).unwrap()));
            let [(_, r), (_, p)] = histogram.groups() else { panic!("two groups") };
            let binned = Inversion::of_histograms(r, p);
            prop_assert!((binned.ratio().unwrap() - exact).abs() <= binned.error() + 1e-12);
        }
    }
}
