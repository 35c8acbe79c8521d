//! Computations without state: max-plus products and sums of outer products, with the bits of the CPU.
//!
//! The caller splits the work: any rows of a product, any rows of a matrix of sums and any aligned leaves have the bits that they have in
//! the whole. `engram-tropical` and `engram-information` define what is computed.

use super::driver::{Argument, Driver, THREADS};
use super::{Gpu, firsts};
use crate::Error;
use std::ops::Range;

/// Rows and columns of a product that one block computes.
const PRODUCT_SIDE: usize = 128;
/// Rows and columns of a matrix of sums that one block computes.
const SUMS_SIDE: usize = 64;

/// Sizes of a product: rows of the left matrix, its columns, columns of the right one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProductShape {
    /// Rows of the left matrix.
    pub rows: usize,
    /// Columns of the left matrix, rows of the right one.
    pub depth: usize,
    /// Columns of the right matrix.
    pub columns: usize,
}

impl<D: Driver> Gpu<D> {
    /// Returns `max over k of left[i][k] + right[k][j]`, row-major. Entries are finite or negative infinity, zeros are +0.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Failed`].
    ///
    /// # Panics
    /// The lengths do not fit the shape, or a size exceeds 2^31 - 1.
    pub fn max_plus_product(&mut self, left: &[f32], right: &[f32], shape: ProductShape) -> Result<Vec<f32>, Error> {
        let ProductShape { rows, depth, columns } = shape;
        assert_eq!((left.len(), right.len()), (rows * depth, depth * columns), "{shape:?}");
        if depth == 0 {
            return Ok(vec![f32::NEG_INFINITY; rows * columns]);
        }
        let blocks = rows.div_ceil(PRODUCT_SIDE) * columns.div_ceil(PRODUCT_SIDE);
        let [left, right] = [self.memory.uploaded(left)?, self.memory.uploaded(right)?];
        let out = self.memory.undefined::<f32>(rows * columns)?;
        let arguments = [
            Argument::Buffer(&left),
            Argument::Buffer(&right),
            size(rows),
            size(depth),
            size(columns),
            Argument::Buffer(&out),
        ];
        self.memory.launch("max_plus_product", blocks, 1, &arguments)?;
        self.memory.downloaded(&out, rows * columns)
    }

    /// Returns some rows of the packed upper triangle of the sum of `s s^T` over samples (samples x `parameters`, row-major).
    ///
    /// `leaves` has the number of samples of each leaf of a fixed binary tree, a power of two of them: the samples of a leaf are added in
    /// order, then leaves and subtrees in pairs.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Failed`].
    ///
    /// # Panics
    /// The number of leaves is no power of two; lengths do not fit; rows are out of range; a size exceeds 2^31 - 1.
    pub fn outer_products(
        &mut self,
        scores: &[f32],
        parameters: usize,
        rows: &Range<usize>,
        leaves: &[u32],
    ) -> Result<Vec<f64>, Error> {
        assert!(leaves.len().is_power_of_two() && rows.start <= rows.end && rows.end <= parameters, "{rows:?}");
        let first = firsts(leaves.iter().copied());
        assert_eq!(first.last().map(|&samples| samples as usize * parameters), Some(scores.len()), "whole samples");
        let packed = |row: usize| row * parameters - row * row.saturating_sub(1) / 2;
        let entries = packed(rows.end) - packed(rows.start);
        if entries == 0 {
            return Ok(Vec::new());
        }
        let scores = self.memory.uploaded(scores)?;
        let tiles = rows.len().div_ceil(SUMS_SIDE) * (parameters - rows.start).div_ceil(SUMS_SIDE);
        // Sums of complete subtrees, with their number of leaves.
        let mut subtrees: Vec<(usize, D::Buffer)> = Vec::new();
        for (leaf, &samples) in leaves.iter().enumerate() {
            let sums = self.memory.undefined::<f64>(entries)?;
            let arguments = [
                Argument::Inside(&scores, first[leaf] as usize * parameters * size_of::<f32>()),
                Argument::U32(samples),
                size(parameters),
                size(rows.start),
                size(rows.end),
                Argument::Buffer(&sums),
            ];
            self.memory.launch("outer_products", tiles, 1, &arguments)?;
            subtrees.push((1, sums));
            while let [.., (left, into), (right, other)] = &subtrees[..]
                && left == right
            {
                let arguments = [Argument::Buffer(into), Argument::Buffer(other), size(entries)];
                self.memory.launch("add_sums", entries, THREADS, &arguments)?;
                let leaves = left + right;
                subtrees.pop();
                if let Some(last) = subtrees.last_mut() {
                    last.0 = leaves;
                }
            }
        }
        let (_, whole) = subtrees.pop().expect("a power of two of leaves is at least one");
        self.memory.downloaded(&whole, entries)
    }
}

/// Returns a size as an argument.
pub(super) fn size<'a, B>(count: usize) -> Argument<'a, B> {
    let count = u32::try_from(count).ok().filter(|&count| count <= i32::MAX as u32);
    Argument::U32(count.expect("a size is below 2^31"))
}
