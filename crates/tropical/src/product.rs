//! The max-plus product `C[i][j] = max over k of (A[i][k] + B[k][j])`.

use std::ops::Range;

use crate::vector::{larger, widest};
use crate::{Error, Matrix, Semiring};

/// Rows of a tile: with [`TILE_COLUMNS`], its accumulators and operands fit the 32 vector registers of AVX-512.
const TILE_ROWS: usize = 6;
/// Columns of a tile: four vectors of 16.
const TILE_COLUMNS: usize = 64;
/// Steps of k per block: a packed block of the right matrix (64 KiB) stays in the second-level cache.
const BLOCK: usize = 256;
/// Work below which a second thread costs more than it saves, in additions.
const THREAD_WORK: usize = 1 << 22;

/// Returns the product of `left` (n x k) and `right` (k x m) on at most `threads` threads.
///
/// For [`Semiring::MinPlus`] both matrices hold negated values, and so does the result.
///
/// # Errors
/// The columns of `left` differ from the rows of `right`.
pub fn product(left: &Matrix, right: &Matrix, threads: usize) -> Result<Matrix, Error> {
    product_rows(left, right, 0..left.rows(), threads)
}

/// Returns the given rows of the product: the share of one device or worker. Any split gives the same bits.
///
/// # Errors
/// As [`product`]; or `rows` exceeds the rows of `left`.
pub fn product_rows(left: &Matrix, right: &Matrix, rows: Range<usize>, threads: usize) -> Result<Matrix, Error> {
    Error::dimension("rows of the right matrix", right.rows(), left.columns())?;
    if rows.end > left.rows() || rows.start > rows.end {
        return Err(Error::Dimension { what: "end of the row range", found: rows.end, expected: left.rows() });
    }
    let columns = right.columns();
    let mut entries = vec![f32::NEG_INFINITY; rows.len() * columns];
    let work = rows.len().saturating_mul(columns).saturating_mul(left.columns());
    let threads = threads.clamp(1, (work / THREAD_WORK).max(1));
    let share = rows.len().div_ceil(threads).max(1);
    if columns > 0 {
        std::thread::scope(|scope| {
            let mut parts = entries.chunks_mut(share * columns).enumerate();
            // The first part runs on this thread.
            let first = parts.next();
            for (index, part) in parts {
                let start = rows.start + index * share;
                scope.spawn(move || fill(left, right, start, part));
            }
            if let Some((_, part)) = first {
                fill(left, right, rows.start, part);
            }
        });
    }
    Ok(Matrix::from_entries(rows.len(), columns, entries))
}

/// Returns the `exponent`-th power of a square matrix: `A^k[i][j]` is the heaviest walk of exactly k edges, missing if there is none.
///
/// # Errors
/// The matrix is not square.
pub fn power(matrix: &Matrix, exponent: u32, threads: usize) -> Result<Matrix, Error> {
    Error::dimension("columns of a square matrix", matrix.columns(), matrix.rows())?;
    let mut result = Matrix::identity(matrix.rows());
    let mut square = matrix.clone();
    let mut left = exponent;
    while left > 0 {
        if left & 1 == 1 {
            result = product(&result, &square, threads)?;
        }
        left >>= 1;
        if left > 0 {
            square = product(&square, &square, threads)?;
        }
    }
    Ok(result)
}

impl Matrix {
    /// Returns the matrix with negated entries: converts between the two semirings. Missing entries stay missing.
    #[must_use]
    pub fn negated(&self, semiring: Semiring) -> Self {
        match semiring {
            Semiring::MaxPlus => self.clone(),
            Semiring::MinPlus => {
                let negate = |&entry: &f32| if entry == f32::NEG_INFINITY { entry } else { 0.0 - entry };
                Self::from_entries(self.rows(), self.columns(), self.entries().iter().map(negate).collect())
            }
        }
    }
}

/// Computes the rows of the product from `start` on into `out`.
fn fill(left: &Matrix, right: &Matrix, start: usize, out: &mut [f32]) {
    let (depth, columns) = (left.columns(), right.columns());
    let mut packed = vec![f32::NEG_INFINITY; BLOCK * TILE_COLUMNS];
    for panel in (0..columns).step_by(TILE_COLUMNS) {
        let width = TILE_COLUMNS.min(columns - panel);
        for block in (0..depth).step_by(BLOCK) {
            let steps = BLOCK.min(depth - block);
            // Columns beyond the width keep negative infinity, which never wins.
            for (step, target) in packed.chunks_exact_mut(TILE_COLUMNS).take(steps).enumerate() {
                target[..width].copy_from_slice(&right.row(block + step)[panel..panel + width]);
                target[width..].fill(f32::NEG_INFINITY);
            }
            rows_of_panel(left, start, block, &packed[..steps * TILE_COLUMNS], out, columns, panel);
        }
    }
}

widest! {
    /// Raises the columns of one panel for all rows of `out` by one packed block.
    #[allow(clippy::too_many_arguments)]
    fn rows_of_panel(
        left: &Matrix,
        start: usize,
        block: usize,
        packed: &[f32],
        out: &mut [f32],
        columns: usize,
        panel: usize,
    ) {
        let width = TILE_COLUMNS.min(columns - panel);
        let steps = packed.len() / TILE_COLUMNS;
        for (tile, rows) in out.chunks_mut(TILE_ROWS * columns).enumerate() {
            let first = start + tile * TILE_ROWS;
            let count = rows.len() / columns;
            // A short last tile repeats its last row, whose extra results are dropped.
            let source: [&[f32]; TILE_ROWS] =
                std::array::from_fn(|row| &left.row(first + row.min(count - 1))[block..block + steps]);
            let mut best = [[f32::NEG_INFINITY; TILE_COLUMNS]; TILE_ROWS];
            for (step, values) in packed.chunks_exact(TILE_COLUMNS).enumerate() {
                for row in 0..TILE_ROWS {
                    let weight = source[row][step];
                    for column in 0..TILE_COLUMNS {
                        best[row][column] = larger(best[row][column], weight + values[column]);
                    }
                }
            }
            for (row, best) in best.iter().enumerate().take(count) {
                let target = &mut rows[row * columns + panel..][..width];
                for (target, best) in target.iter_mut().zip(best) {
                    *target = larger(*target, *best);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn naive(left: &Matrix, right: &Matrix) -> Vec<f32> {
        let mut out = Vec::new();
        for row in 0..left.rows() {
            for column in 0..right.columns() {
                let mut best = f32::NEG_INFINITY;
                for step in 0..left.columns() {
                    best = best.max(left.row(row)[step] + right.row(step)[column]);
                }
                out.push(best);
            }
        }
        out
    }

    fn entry() -> impl Strategy<Value = f32> {
        prop_oneof![4 => -50.0_f32..0.0, 1 => Just(f32::NEG_INFINITY), 1 => Just(-0.0)]
    }

    fn matrix(rows: usize, columns: usize) -> impl Strategy<Value = Matrix> {
        proptest::collection::vec(entry(), rows * columns)
            .prop_map(move |entries| Matrix::new("a", rows, columns, entries).unwrap())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn product_equals_the_definition_for_every_split(
            (left, right) in (1_usize..20, 0_usize..300, 1_usize..140)
                .prop_flat_map(|(n, k, m)| (matrix(n, k), matrix(k, m))),
            cut in 0_usize..20,
            threads in 1_usize..4,
        ) {
            let expected = naive(&left, &right);
            let whole = product(&left, &right, threads).unwrap();
            prop_assert_eq!(whole.entries(), &expected[..]);
            let cut = cut.min(left.rows());
            let mut parts = product_rows(&left, &right, 0..cut, threads).unwrap().entries().to_vec();
            parts.extend(product_rows(&left, &right, cut..left.rows(), 1).unwrap().entries());
            let bits = |values: &[f32]| values.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&parts), bits(&expected));
        }
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        let entries = |seed: u32| -> Vec<f32> {
            (0..200 * 200_u32).map(|index| (index.wrapping_mul(2_654_435_761 ^ seed) >> 8) as f32 * -1e-5).collect()
        };
        let left = Matrix::new("left", 200, 200, entries(1)).unwrap();
        let right = Matrix::new("right", 200, 200, entries(2)).unwrap();
        let one = product(&left, &right, 1).unwrap();
        assert_eq!(product(&left, &right, 2).unwrap(), one);
        assert_eq!(one.entries(), naive(&left, &right));
    }

    #[test]
    fn missing_edge_stays_missing_in_every_power() {
        // 0 -> 1 -> 2, and no way back.
        let none = f32::NEG_INFINITY;
        let edges = vec![none, 1.0, none, none, none, -3.0, none, none, none];
        let matrix = Matrix::new("edges", 3, 3, edges).unwrap();
        let squared = power(&matrix, 2, 1).unwrap();
        assert_eq!(squared.row(0), [none, none, -2.0]);
        assert!(power(&matrix, 3, 1).unwrap().entries().iter().all(|&it| it == none));
        assert_eq!(power(&matrix, 0, 1).unwrap(), Matrix::identity(3));
    }

    #[test]
    fn min_plus_gives_shortest_paths() {
        let none = f32::NEG_INFINITY;
        // Weights negated: 0 -> 1 costs 4, 0 -> 2 costs 1, 2 -> 1 costs 2, and 0 at each node.
        let costs = Matrix::new("costs", 3, 3, vec![0.0, 4.0, 1.0, none, 0.0, none, none, 2.0, 0.0]).unwrap();
        let negated = costs.negated(Semiring::MinPlus);
        let paths = power(&negated, 2, 1).unwrap().negated(Semiring::MinPlus);
        assert_eq!(paths.row(0), [0.0, 3.0, 1.0]);
        assert_eq!(paths.row(1), [none, 0.0, none], "unreachable nodes stay missing");
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused_with_both_numbers() {
        let refused = product(&Matrix::missing(2, 3), &Matrix::missing(4, 2), 1).unwrap_err();
        assert_eq!(refused.to_string(), "rows of the right matrix: 4 is not allowed; allowed: 3");
    }
}
