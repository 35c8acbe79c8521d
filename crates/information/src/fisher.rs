//! The Fisher matrix of scores, summed over leaves and shards.

use std::ops::Range;

use crate::Error;
use crate::kernel::{outer_products, packed_rows, row_start, triangle};

/// Leaves of the fixed binary tree. More would allow more workers; 64 keeps a worker's message at most 12 subtrees.
pub const LEAVES: usize = 64;

/// Which order of additions a result promises.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mode {
    /// The same bits for any number of threads, devices and workers.
    #[default]
    PartitionInvariant,
    /// Any split and order; entries agree within 1e-6 relative to the diagonal.
    Fast,
}

/// Returns the samples of one leaf: those with `64 i / N = leaf`.
///
/// # Panics
/// `leaf` is not below [`LEAVES`].
pub const fn leaf_range(leaf: usize, samples: usize) -> Range<usize> {
    assert!(leaf < LEAVES, "a leaf of the tree");
    // The smallest i with 64 i >= leaf N.
    (leaf * samples).div_ceil(LEAVES)..((leaf + 1) * samples).div_ceil(LEAVES)
}

/// The sum over an aligned subtree of leaves: `2^level` leaves from `2^level * index` on.
#[derive(Debug, Clone, PartialEq)]
pub struct PartialSum {
    /// Height of the subtree, 0 for a leaf to 6 for all.
    pub level: u32,
    /// Position of the subtree among those of its level.
    pub index: usize,
    /// Packed upper triangle, row by row: P (P + 1) / 2 entries; of a [band](bands), its part of them.
    pub sums: Vec<f64>,
}

/// A symmetric P x P matrix with the number of samples behind it.
#[derive(Debug, Clone, PartialEq)]
pub struct FisherMatrix {
    parameters: usize,
    samples: u64,
    mode: Mode,
    /// Packed upper triangle.
    entries: Vec<f64>,
}

/// Divides the rows of the upper triangle of a matrix into bands of about as many entries each, and at most `entries`, or one row.
///
/// A band is a consecutive part of the packed triangle: the sums of all bands, one after the other, are those of the matrix.
pub fn bands(parameters: usize, entries: usize) -> Vec<Range<usize>> {
    let whole = triangle(parameters);
    let share = whole / whole.div_ceil(entries.max(1)).max(1);
    let mut bands: Vec<Range<usize>> = Vec::new();
    for row in 0..parameters {
        let extended = bands.last().map_or(row, |band| band.start)..row + 1;
        let before = packed_rows(&(extended.start..row), parameters).len();
        match bands.last_mut() {
            Some(band) if before < share && packed_rows(&extended, parameters).len() <= entries => *band = extended,
            _ => bands.push(row..row + 1),
        }
    }
    bands
}

/// Returns the maximal aligned subtree sums of consecutive leaves: at most 12.
///
/// `scores` holds the samples of `leaves` (see [`leaf_range`]), samples x `parameters`, row-major; `samples` is the number of all samples of
/// all shards.
///
/// # Errors
/// A score that is not finite; a number of scores that does not fit; leaves out of range.
pub fn partial_sums(
    scores: &[f32],
    parameters: usize,
    leaves: Range<usize>,
    samples: usize,
) -> Result<Vec<PartialSum>, Error> {
    partial_sums_of_rows(scores, parameters, &(0..parameters), leaves, samples)
}

/// Returns what [`partial_sums`] returns, for some rows of the matrix only, with the same bits.
///
/// # Errors
/// As [`partial_sums`]; rows out of range.
pub fn partial_sums_of_rows(
    scores: &[f32],
    parameters: usize,
    rows: &Range<usize>,
    leaves: Range<usize>,
    samples: usize,
) -> Result<Vec<PartialSum>, Error> {
    if rows.end > parameters || rows.start > rows.end {
        return Err(Error::Dimension { what: "end of the rows", found: rows.end, expected: parameters });
    }
    if leaves.end > LEAVES || leaves.start > leaves.end {
        return Err(Error::Dimension { what: "end of the leaves", found: leaves.end, expected: LEAVES });
    }
    if leaves.is_empty() {
        return Ok(Vec::new());
    }
    let (first, end) = (leaf_range(leaves.start, samples).start, leaf_range(leaves.end - 1, samples).end);
    Error::dimension("number of scores", scores.len(), (end - first) * parameters)?;
    Error::finite("scores", scores.iter().map(|&it| f64::from(it)))?;
    let mut subtrees: Vec<PartialSum> = Vec::new();
    for leaf in leaves {
        let range = leaf_range(leaf, samples);
        let scores = &scores[(range.start - first) * parameters..(range.end - first) * parameters];
        push(&mut subtrees, PartialSum { level: 0, index: leaf, sums: outer_products(scores, parameters, rows) });
    }
    Ok(subtrees)
}

/// Appends a subtree and merges siblings: a left and a right half become their parent.
fn push(subtrees: &mut Vec<PartialSum>, mut subtree: PartialSum) {
    while subtree.index % 2 == 1
        && subtrees.last().is_some_and(|it| it.level == subtree.level && it.index + 1 == subtree.index)
    {
        let mut left = subtrees.pop().expect("it was there a moment ago");
        left.sums.iter_mut().zip(&subtree.sums).for_each(|(left, right)| *left += right);
        subtree = PartialSum { level: left.level + 1, index: left.index / 2, sums: left.sums };
    }
    subtrees.push(subtree);
}

/// Merges the sums of consecutive subtrees, in any order, into the maximal ones: what one worker returns for the blocks of its devices.
pub fn merge_subtrees(mut parts: Vec<PartialSum>) -> Vec<PartialSum> {
    parts.sort_by_key(|part| part.index << part.level);
    let mut subtrees = Vec::new();
    parts.into_iter().for_each(|part| push(&mut subtrees, part));
    subtrees
}

/// Combines the partial sums of all workers, in any order, into the Fisher matrix: the last step divides by the number of samples.
///
/// # Errors
/// No samples; sums of another size; leaves that are missing or covered twice.
pub fn combine(parts: Vec<PartialSum>, parameters: usize, samples: u64) -> Result<FisherMatrix, Error> {
    if samples == 0 {
        return Err(Error::Range { name: "samples", value: 0.0, allowed: "at least 1" });
    }
    let mut covered = [0_usize; LEAVES];
    for part in &parts {
        Error::dimension("number of sums", part.sums.len(), triangle(parameters))?;
        let width = 1_usize.checked_shl(part.level).filter(|width| *width <= LEAVES).unwrap_or(0);
        let leaves = covered.get_mut(part.index.saturating_mul(width)..(part.index + 1).saturating_mul(width));
        let leaves = leaves.filter(|it| !it.is_empty());
        leaves
            .ok_or(Error::Dimension { what: "leaf of a partial sum", found: part.index, expected: LEAVES })?
            .iter_mut()
            .for_each(|it| *it += 1);
    }
    if let Some(leaf) = covered.iter().position(|&times| times != 1) {
        return Err(Error::Coverage { leaf, times: covered[leaf] });
    }
    let mut subtrees = merge_subtrees(parts);
    let root = subtrees.pop().filter(|root| root.level == LEAVES.trailing_zeros() && subtrees.is_empty());
    let mut entries = root.expect("aligned subtrees that cover every leaf once merge into the root").sums;
    entries.iter_mut().for_each(|entry| *entry /= samples as f64);
    Ok(FisherMatrix { parameters, samples, mode: Mode::PartitionInvariant, entries })
}

/// Returns the matrix of one shard without the tree: [`Mode::Fast`].
///
/// # Errors
/// A score that is not finite; no sample; scores that are not whole samples.
pub fn fast_sum(scores: &[f32], parameters: usize) -> Result<FisherMatrix, Error> {
    let samples = scores.len().checked_div(parameters).unwrap_or(0);
    Error::dimension("number of scores", scores.len(), samples * parameters)?;
    if samples == 0 {
        return Err(Error::Range { name: "samples", value: 0.0, allowed: "at least 1" });
    }
    Error::finite("scores", scores.iter().map(|&it| f64::from(it)))?;
    let mut entries = outer_products(scores, parameters, &(0..parameters));
    entries.iter_mut().for_each(|entry| *entry /= samples as f64);
    Ok(FisherMatrix { parameters, samples: samples as u64, mode: Mode::Fast, entries })
}

impl FisherMatrix {
    /// Returns the number of parameters P.
    pub const fn parameters(&self) -> usize {
        self.parameters
    }

    /// Returns the number of samples.
    pub const fn samples(&self) -> u64 {
        self.samples
    }

    /// Returns which order of additions the entries promise.
    pub const fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns one entry.
    ///
    /// # Panics
    /// An index is out of range.
    pub fn get(&self, row: usize, column: usize) -> f64 {
        let (low, high) = (row.min(column), row.max(column));
        assert!(high < self.parameters, "a parameter");
        self.entries[row_start(low, self.parameters) + high - low]
    }

    /// Returns the packed upper triangle, row by row.
    pub fn packed(&self) -> &[f64] {
        &self.entries
    }

    /// Returns the full matrix.
    pub(crate) fn dense(&self) -> nalgebra::DMatrix<f64> {
        nalgebra::DMatrix::from_fn(self.parameters, self.parameters, |row, column| self.get(row, column))
    }

    /// Returns the eigenvalues in ascending order.
    pub fn spectrum(&self) -> Vec<f64> {
        let mut values: Vec<f64> = self.dense().symmetric_eigenvalues().iter().copied().collect();
        values.sort_by(f64::total_cmp);
        values
    }

    /// Returns the sum of the diagonal.
    pub fn trace(&self) -> f64 {
        (0..self.parameters).map(|index| self.get(index, index)).sum()
    }

    /// Adds the matrix of another shard, weighted by samples: `F = sum (N_k / N) F_k`. The result has [`Mode::Fast`].
    ///
    /// # Errors
    /// Another number of parameters.
    pub fn merge(&mut self, other: &Self) -> Result<(), Error> {
        Error::dimension("parameters of the other matrix", other.parameters, self.parameters)?;
        let total = (self.samples + other.samples) as f64;
        let (mine, theirs) = (self.samples as f64 / total, other.samples as f64 / total);
        self.entries.iter_mut().zip(&other.entries).for_each(|(entry, other)| *entry = mine * *entry + theirs * other);
        self.samples += other.samples;
        self.mode = Mode::Fast;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn scores(samples: usize, parameters: usize, seed: u32) -> Vec<f32> {
        let mix = |index: u32| (index ^ seed).wrapping_mul(2_654_435_761).rotate_left(9).wrapping_mul(0x85eb_ca6b);
        (0..(samples * parameters) as u32).map(|index| mix(index) as f32 / 2e9 - 1.0).collect()
    }

    fn of_split(samples: usize, parameters: usize, cuts: &[usize]) -> FisherMatrix {
        let all = scores(samples, parameters, 5);
        let mut borders: Vec<usize> = cuts.iter().map(|cut| cut % LEAVES).chain([0, LEAVES]).collect();
        borders.sort_unstable();
        let mut parts = Vec::new();
        for pair in borders.windows(2) {
            let samples_of = |leaf: usize| if leaf == LEAVES { samples } else { leaf_range(leaf, samples).start };
            let range = samples_of(pair[0]) * parameters..samples_of(pair[1]) * parameters;
            let sums = partial_sums(&all[range], parameters, pair[0]..pair[1], samples).unwrap();
            assert!(sums.len() <= 12, "{} subtrees", sums.len());
            parts.extend(sums);
        }
        parts.reverse();
        combine(parts, parameters, samples as u64).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn any_split_at_leaf_borders_gives_the_same_bits(samples in 1_usize..400, cuts in proptest::collection::vec(0_usize..64, 0..6)) {
            prop_assert_eq!(of_split(samples, 5, &cuts), of_split(samples, 5, &[]));
        }
    }

    #[test]
    fn bands_give_the_matrix_of_whole_sums() {
        const PARAMETERS: usize = 41;
        let all = scores(130, PARAMETERS, 5);
        let whole = partial_sums(&all, PARAMETERS, 0..64, 130).unwrap().pop().unwrap().sums;
        for entries in [1, 41, 100, 300, 860, 861, 5_000] {
            let bands = bands(PARAMETERS, entries);
            let sums = |rows: &Range<usize>| {
                let sums = partial_sums_of_rows(&all, PARAMETERS, rows, 0..64, 130).unwrap().pop().unwrap().sums;
                assert!(sums.len() <= entries.max(PARAMETERS) && !sums.is_empty(), "{} of {entries}", sums.len());
                sums
            };
            assert_eq!(bands.iter().flat_map(sums).collect::<Vec<f64>>(), whole, "{entries} entries, {bands:?}");
        }
        assert_eq!(bands(PARAMETERS, 861).len(), 1);
        assert_eq!(bands(1_000, 393_216).len(), 2);
        let refused = partial_sums_of_rows(&all, PARAMETERS, &(3..42), 0..64, 130).unwrap_err();
        assert_eq!(refused.to_string(), "end of the rows: 42 is not allowed; allowed: 41");
    }

    #[test]
    fn leaves_partition_the_samples() {
        for samples in [0, 1, 63, 64, 65, 1797, 10_000] {
            let mut next = 0;
            for leaf in 0..LEAVES {
                let range = leaf_range(leaf, samples);
                assert_eq!(range.start, next);
                assert!(range.clone().all(|sample| sample * LEAVES / samples == leaf));
                next = range.end;
            }
            assert_eq!(next, samples);
        }
    }

    #[test]
    fn matrix_is_symmetric_positive_and_equal_to_the_definition() {
        let matrix = of_split(300, 6, &[10, 40]);
        let all = scores(300, 6, 5);
        for row in 0..6 {
            for column in 0..6 {
                let sum: f64 = all.chunks(6).map(|s| f64::from(s[row]) * f64::from(s[column])).sum();
                assert!((matrix.get(row, column) - sum / 300.0).abs() < 1e-12);
                assert_eq!(matrix.get(row, column), matrix.get(column, row));
            }
        }
        let spectrum = matrix.spectrum();
        assert!(spectrum[0] >= -1e-6 * matrix.trace() / 6.0, "{spectrum:?}");
        assert!((spectrum.iter().sum::<f64>() - matrix.trace()).abs() < 1e-9);
    }

    #[test]
    fn mean_of_outer_products_does_not_vanish_at_the_optimum() {
        // Scores that cancel: the outer product of the mean is zero, the Fisher matrix is not.
        let matrix = fast_sum(&[1.0, 2.0, -1.0, -2.0], 2).unwrap();
        assert_eq!(matrix.packed(), [1.0, 2.0, 4.0]);
    }

    #[test]
    fn shards_of_1_and_999_samples_combine_by_count() {
        let all = scores(1000, 3, 8);
        let mut merged = fast_sum(&all[..3], 3).unwrap();
        merged.merge(&fast_sum(&all[3..], 3).unwrap()).unwrap();
        let whole = fast_sum(&all, 3).unwrap();
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-6 * whole.trace();
        assert!(merged.packed().iter().zip(whole.packed()).all(|(&a, &b)| close(a, b)));
        let equal_weights =
            (fast_sum(&all[..3], 3).unwrap().get(0, 0) + fast_sum(&all[3..], 3).unwrap().get(0, 0)) / 2.0;
        assert!(!close(equal_weights, whole.get(0, 0)), "a mean of shards differs");
    }

    #[test]
    fn incomplete_or_doubled_leaves_are_refused() {
        let parts = partial_sums(&scores(64, 2, 1), 2, 0..64, 64).unwrap();
        assert_eq!(parts.len(), 1);
        assert_eq!(combine(Vec::new(), 2, 64).unwrap_err(), Error::Coverage { leaf: 0, times: 0 });
        let doubled = [parts.clone(), parts].concat();
        assert_eq!(combine(doubled, 2, 64).unwrap_err(), Error::Coverage { leaf: 0, times: 2 });
        assert!(partial_sums(&[f32::NAN, 0.0], 2, 0..64, 1).unwrap_err().to_string().starts_with("scores[0]: NaN"));
    }
}
