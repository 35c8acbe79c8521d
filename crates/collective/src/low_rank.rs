//! PowerSGD (Vogels, Karimireddy and Jaggi, 2019): matrices of a gradient travel as products of two thin matrices.
//!
//! With a basis Q (b x r) that all ranks have, a matrix M (a x b) takes two sums over the ranks: of the left factors P = M Q, whose columns are then made
//! orthonormal, and of the right factors Q' = M^T P. The sum of the matrices is taken as P Q'^T, and Q' is the basis of the next step. What a rank loses is
//! M - P P^T M. Tensors that are too small travel as they are, with the left factors.
//!
//! The functions use the same order of additions everywhere, so that equal sums give equal bits on all ranks.

use std::ops::Range;

/// Largest rank of an approximation.
pub const MAX_RANK: usize = 64;
/// Norm of a column relative to its norm before the others were subtracted, below which it depends on them.
const DEPENDENT: f64 = 1e-5;

/// A matrix within a flat gradient, and the places of its factors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Matrix {
    start: usize,
    rows: usize,
    columns: usize,
    rank: usize,
    left: usize,
    right: usize,
}

/// Which parts of a flat gradient are approximated, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LowRank {
    matrices: Vec<Matrix>,
    /// Parts that travel as they are, in the left factors after those of the matrices.
    rest: Vec<Range<usize>>,
    /// Values of the left factors of all matrices.
    left: usize,
    right: usize,
    elements: usize,
}

impl LowRank {
    /// Plans the approximation of tensors by rank `rank`, from 1 to [`MAX_RANK`]. A tensor has its place and its shape; dimensions from the second on are
    /// one. A matrix a x b is approximated if `2 r (a + b) < a b`.
    ///
    /// # Panics
    /// The tensors do not follow each other, or the rank is out of range.
    pub fn new<'a>(tensors: impl IntoIterator<Item = (Range<usize>, &'a [usize])>, rank: usize) -> Self {
        assert!((1..=MAX_RANK).contains(&rank), "rank {rank}");
        let mut plan = Self { matrices: Vec::new(), rest: Vec::new(), left: 0, right: 0, elements: 0 };
        for (range, shape) in tensors {
            assert_eq!(range.start, plan.elements, "tensors follow each other");
            plan.elements = range.end;
            let rows = shape.first().copied().unwrap_or(1);
            let columns = range.len() / rows.max(1);
            if 2 * rank * (rows + columns) >= range.len() {
                plan.rest.push(range);
                continue;
            }
            plan.matrices.push(Matrix { start: range.start, rows, columns, rank, left: plan.left, right: plan.right });
            plan.left += rows * rank;
            plan.right += columns * rank;
        }
        plan
    }

    /// Values of a gradient.
    pub const fn elements(&self) -> usize {
        self.elements
    }

    /// Values of the right factors, and of a basis. 0 where nothing is approximated.
    pub const fn right_elements(&self) -> usize {
        self.right
    }

    /// Values that travel in both sums.
    pub fn sent_elements(&self) -> usize {
        self.left + self.rest.iter().map(Range::len).sum::<usize>() + self.right
    }

    /// Returns the basis of the first step, which depends on the shapes alone.
    pub fn first_basis(&self) -> Vec<f32> {
        let mut basis: Vec<f32> = (0..self.right).map(|index| unit(index as u64)).collect();
        for matrix in &self.matrices {
            matrix.orthonormalize(&mut basis[matrix.right..], matrix.columns);
        }
        basis
    }

    /// Returns the left factors of a gradient, and the parts that travel as they are: what the ranks add first.
    ///
    /// # Panics
    /// The gradient or the basis has another length.
    pub fn left(&self, gradient: &[f32], basis: &[f32]) -> Vec<f32> {
        assert_eq!((gradient.len(), basis.len()), (self.elements, self.right), "gradient and basis");
        let mut left = vec![0.0; self.left];
        for matrix in &self.matrices {
            matrix.multiply(gradient, basis, &mut left);
        }
        left.extend(self.rest.iter().flat_map(|range| &gradient[range.clone()]));
        left
    }

    /// Makes the columns of the added left factors orthonormal. A column that depends on others becomes 0.
    pub fn orthonormalize(&self, left: &mut [f32]) {
        for matrix in &self.matrices {
            matrix.orthonormalize(&mut left[matrix.left..], matrix.rows);
        }
    }

    /// Returns the right factors of a gradient for orthonormal left factors: what the ranks add second.
    pub fn right(&self, gradient: &[f32], left: &[f32]) -> Vec<f32> {
        let mut right = vec![0.0; self.right];
        for matrix in &self.matrices {
            matrix.multiply_transposed(gradient, left, &mut right);
        }
        right
    }

    /// Returns the gradient that both sums stand for.
    pub fn expand(&self, left: &[f32], right: &[f32]) -> Vec<f32> {
        let mut gradient = vec![0.0; self.elements];
        for matrix in &self.matrices {
            matrix.expand(left, right, &mut gradient);
        }
        let mut at = self.left;
        for range in &self.rest {
            gradient[range.clone()].copy_from_slice(&left[at..at + range.len()]);
            at += range.len();
        }
        gradient
    }

    /// Returns the basis of the next step, and what this rank lost of its gradient, from the added gradient and the basis of this step alone: they
    /// determine the factors. Every rank returns the same basis.
    pub fn finish(&self, gradient: &[f32], sum: &[f32], basis: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let mut left = self.left(sum, basis);
        self.orthonormalize(&mut left);
        let mut next = self.right(sum, &left);
        let first = self.first_basis();
        for matrix in &self.matrices {
            let range = matrix.right..matrix.right + matrix.columns * matrix.rank;
            matrix.complete(&mut next[range.clone()], &first[range]);
        }
        // What travels as it is loses nothing.
        let sent = self.expand(&left, &self.right(gradient, &left));
        let mut lost: Vec<f32> = gradient.iter().zip(&sent).map(|(exact, sent)| exact - sent).collect();
        self.rest.iter().for_each(|range| lost[range.clone()].fill(0.0));
        (next, lost)
    }
}

/// Returns a number from -1 to 1 that looks random: splitmix64.
fn unit(index: u64) -> f32 {
    let mut word = index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((word ^ word >> 31) >> 40) as f32 / f32::from(1_u16 << 15) / 256.0 - 1.0
}

impl Matrix {
    fn row<'a>(&self, gradient: &'a [f32], row: usize) -> &'a [f32] {
        let start = self.start + row * self.columns;
        &gradient[start..start + self.columns]
    }

    /// Adds `M basis` to the left factor.
    fn multiply(&self, gradient: &[f32], basis: &[f32], left: &mut [f32]) {
        for row in 0..self.rows {
            let to = &mut left[self.left + row * self.rank..self.left + (row + 1) * self.rank];
            let factors = basis[self.right..].chunks_exact(self.rank);
            for (value, factors) in self.row(gradient, row).iter().zip(factors) {
                to.iter_mut().zip(factors).for_each(|(to, factor)| *to += value * factor);
            }
        }
    }

    /// Adds `M^T left` to the right factor.
    fn multiply_transposed(&self, gradient: &[f32], left: &[f32], right: &mut [f32]) {
        for row in 0..self.rows {
            let factors = &left[self.left + row * self.rank..self.left + (row + 1) * self.rank];
            let to = right[self.right..].chunks_exact_mut(self.rank);
            for (value, to) in self.row(gradient, row).iter().zip(to) {
                to.iter_mut().zip(factors).for_each(|(to, factor)| *to += value * factor);
            }
        }
    }

    /// Sets the matrix to `left right^T`.
    fn expand(&self, left: &[f32], right: &[f32], gradient: &mut [f32]) {
        for row in 0..self.rows {
            let factors = &left[self.left + row * self.rank..self.left + (row + 1) * self.rank];
            let start = self.start + row * self.columns;
            let columns = right[self.right..].chunks_exact(self.rank);
            for (value, column) in gradient[start..start + self.columns].iter_mut().zip(columns) {
                *value = factors.iter().zip(column).map(|(a, b)| a * b).sum();
            }
        }
    }

    /// Makes the columns of the first `length` rows orthonormal (Gram and Schmidt, twice).
    fn orthonormalize(&self, values: &mut [f32], length: usize) {
        let rank = self.rank;
        let values = &mut values[..length * rank];
        for column in 0..rank {
            let before = dot(values, rank, column, column).sqrt();
            for other in (0..2).flat_map(|_| 0..column) {
                let along = dot(values, rank, column, other);
                values.chunks_exact_mut(rank).for_each(|row| row[column] -= (along * f64::from(row[other])) as f32);
            }
            let norm = dot(values, rank, column, column).sqrt();
            let factor = if norm > DEPENDENT * before { 1.0 / norm } else { 0.0 };
            values.chunks_exact_mut(rank).for_each(|row| row[column] = (f64::from(row[column]) * factor) as f32);
        }
    }

    /// Makes the columns of a basis orthonormal; columns that became 0 are those of the first basis, so that no direction is lost for good.
    fn complete(&self, basis: &mut [f32], first: &[f32]) {
        self.orthonormalize(basis, self.columns);
        for column in 0..self.rank {
            if dot(basis, self.rank, column, column) == 0.0 {
                let rows = basis.chunks_exact_mut(self.rank).zip(first.chunks_exact(self.rank));
                rows.for_each(|(row, first)| row[column] = first[column]);
            }
        }
        self.orthonormalize(basis, self.columns);
    }
}

/// Product of two columns.
fn dot(values: &[f32], rank: usize, a: usize, b: usize) -> f64 {
    values.chunks_exact(rank).map(|row| f64::from(row[a]) * f64::from(row[b])).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: usize = 30;
    const COLUMNS: usize = 40;
    const BIAS: usize = 7;
    const ELEMENTS: usize = ROWS * COLUMNS + BIAS;

    fn plan(rank: usize) -> LowRank {
        LowRank::new([(0..ROWS * COLUMNS, &[ROWS, COLUMNS][..]), (ROWS * COLUMNS..ELEMENTS, &[BIAS])], rank)
    }

    fn noise(count: usize, key: u64) -> Vec<f32> {
        (0..count as u64).map(|index| unit(key * 1_000_003 + index)).collect()
    }

    /// A gradient whose matrix has a rank.
    fn gradient(rank: usize, key: u64) -> Vec<f32> {
        let (a, b) = (noise(ROWS * rank, 2 * key), noise(COLUMNS * rank, 2 * key + 1));
        let value =
            |row: usize, column: usize| (0..rank).map(|k| a[row * rank + k] * b[column * rank + k]).sum::<f32>();
        let matrix = (0..ROWS).flat_map(|row| (0..COLUMNS).map(move |column| (row, column)));
        matrix.map(|(row, column)| value(row, column)).chain(noise(BIAS, key + 50)).collect()
    }

    fn add(gradients: &[Vec<f32>]) -> Vec<f32> {
        (0..gradients[0].len()).map(|at| gradients.iter().map(|it| it[at]).sum()).collect()
    }

    /// What the ranks have after both sums.
    fn reduce(plan: &LowRank, gradients: &[Vec<f32>], basis: &[f32]) -> Vec<f32> {
        let mut left = add(&gradients.iter().map(|it| plan.left(it, basis)).collect::<Vec<_>>());
        plan.orthonormalize(&mut left);
        let right = add(&gradients.iter().map(|it| plan.right(it, &left)).collect::<Vec<_>>());
        plan.expand(&left, &right)
    }

    fn distance(a: &[f32], b: &[f32]) -> f32 {
        a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    }

    #[test]
    fn sums_of_matrices_of_low_rank_are_reproduced_and_lose_nothing() {
        for (rank, parts) in [(1, vec![1]), (2, vec![1, 1]), (4, vec![2, 1, 1]), (4, vec![1])] {
            let plan = plan(rank);
            let gradients: Vec<Vec<f32>> = (1..).zip(&parts).map(|(key, rank)| gradient(*rank, key)).collect();
            let basis = plan.first_basis();
            let sum = reduce(&plan, &gradients, &basis);
            assert!(distance(&sum, &add(&gradients)) < 1e-5, "rank {rank} of parts {parts:?}");
            for own in &gradients {
                let (next, lost) = plan.finish(own, &sum, &basis);
                assert!(distance(&lost, &[0.0; ELEMENTS]) < 1e-5, "rank {rank} of parts {parts:?}");
                assert_eq!(next.len(), COLUMNS * rank);
            }
        }
    }

    #[test]
    fn what_is_sent_over_time_plus_what_was_lost_is_the_sum_of_the_gradients() {
        let plan = plan(2);
        let mut basis = plan.first_basis();
        let mut lost = vec![vec![0.0; ELEMENTS]; 2];
        let (mut sent, mut exact) = (vec![0.0; ELEMENTS], vec![0.0; ELEMENTS]);
        for step in 0..30 {
            let gradients: Vec<Vec<f32>> = (0..2).map(|rank| gradient(20, 3 + 2 * step + rank)).collect();
            let corrected: Vec<Vec<f32>> =
                gradients.iter().zip(&lost).map(|(own, lost)| add(&[own.clone(), lost.clone()])).collect();
            let sum = reduce(&plan, &corrected, &basis);
            (sent, exact) = (add(&[sent, sum.clone()]), add(&[exact, add(&gradients)]));
            let done: Vec<_> = corrected.iter().map(|own| plan.finish(own, &sum, &basis)).collect();
            assert_eq!(done[0].0, done[1].0, "all ranks have the same basis");
            basis = done[0].0.clone();
            lost = done.into_iter().map(|it| it.1).collect();
        }
        let total = add(&[sent.clone(), lost[0].clone(), lost[1].clone()]);
        assert!(distance(&total, &exact) < 2e-3, "{}", distance(&total, &exact));
        assert!(distance(&sent, &exact) > 0.1, "an approximation by rank 2 loses something");
    }

    #[test]
    fn the_basis_turns_to_the_largest_directions() {
        let (plan, fixed) = (plan(2), gradient(20, 9));
        let mut basis = plan.first_basis();
        let mut errors = Vec::new();
        for _ in 0..8 {
            let sum = reduce(&plan, std::slice::from_ref(&fixed), &basis);
            errors.push(fixed.iter().zip(&sum).map(|(a, b)| (a - b) * (a - b)).sum::<f32>());
            basis = plan.finish(&fixed, &sum, &basis).0;
        }
        assert!(errors[7] < 0.95 * errors[0] && errors.is_sorted_by(|a, b| a >= &(b - 1e-3)), "{errors:?}");
    }

    #[test]
    fn small_tensors_travel_as_they_are_and_a_lost_direction_returns() {
        assert_eq!(plan(1).sent_elements(), ROWS + COLUMNS + BIAS);
        let whole = LowRank::new([(0..12, &[3, 4][..])], 1);
        assert_eq!((whole.right_elements(), whole.sent_elements(), whole.elements()), (0, 12, 12));
        let plan = plan(2);
        let zero = vec![0.0; ELEMENTS];
        let (basis, lost) = plan.finish(&zero, &zero, &plan.first_basis());
        assert_eq!(lost, zero);
        assert!(distance(&reduce(&plan, &[gradient(2, 5)], &basis), &gradient(2, 5)) < 1e-5);
    }
}
