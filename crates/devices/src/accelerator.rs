//! GPUs that compute the workloads of this crate.

use engram_information::{LEAVES, PartialSum, leaf_range};
use engram_kernels::gpu::{Driver, GeodesicKernels, ProductShape, TrainingKernels};
use engram_kernels::{Error, Gpu};
use engram_tropical::Matrix;
use std::ops::Range;

/// Kernels of a GPU, with the bits of the CPU.
pub trait Accelerator: Send {
    /// Returns a max-plus product; see [`Gpu::max_plus_product`].
    ///
    /// # Errors
    /// Those of the device.
    fn max_plus_product(&mut self, left: &[f32], right: &[f32], shape: ProductShape) -> Result<Vec<f32>, Error>;

    /// Returns rows of a matrix of sums; see [`Gpu::outer_products`].
    ///
    /// # Errors
    /// Those of the device.
    fn outer_products(
        &mut self,
        scores: &[f32],
        parameters: usize,
        rows: &Range<usize>,
        leaves: &[u32],
    ) -> Result<Vec<f64>, Error>;

    /// Returns the kernels of the geodesic model, which agree with the CPU to rounding; `None` if the device has none.
    fn geodesic(&mut self) -> Option<&mut dyn GeodesicKernels> {
        None
    }

    /// Returns the kernels of trainings, which agree with the CPU to rounding; `None` if the device has none.
    fn training(&mut self) -> Option<&mut dyn TrainingKernels> {
        None
    }
}

impl<D: Driver> Accelerator for Gpu<D> {
    fn max_plus_product(&mut self, left: &[f32], right: &[f32], shape: ProductShape) -> Result<Vec<f32>, Error> {
        Self::max_plus_product(self, left, right, shape)
    }

    fn outer_products(
        &mut self,
        scores: &[f32],
        parameters: usize,
        rows: &Range<usize>,
        leaves: &[u32],
    ) -> Result<Vec<f64>, Error> {
        Self::outer_products(self, scores, parameters, rows, leaves)
    }

    fn geodesic(&mut self) -> Option<&mut dyn GeodesicKernels> {
        Some(self)
    }

    fn training(&mut self) -> Option<&mut dyn TrainingKernels> {
        Some(self)
    }
}

/// Returns the given rows of a max-plus product.
///
/// # Errors
/// Those of the device.
pub(crate) fn product_rows(
    gpu: &mut dyn Accelerator,
    left: &Matrix,
    right: &Matrix,
    rows: Range<usize>,
) -> Result<Vec<f32>, Error> {
    let (depth, columns) = (left.columns(), right.columns());
    let own = &left.entries()[rows.start * depth..rows.end * depth];
    gpu.max_plus_product(own, right.entries(), ProductShape { rows: rows.len(), depth, columns })
}

/// Returns what [`engram_information::partial_sums_of_rows`] returns: the sums of the maximal aligned subtrees of some leaves.
///
/// # Errors
/// Those of the device.
pub(crate) fn partial_sums(
    gpu: &mut dyn Accelerator,
    scores: &[f32],
    parameters: usize,
    rows: &Range<usize>,
    leaves: Range<usize>,
    samples: usize,
) -> Result<Vec<PartialSum>, Error> {
    let begin = leaf_range(leaves.start, samples).start;
    let mut sums = Vec::new();
    let mut leaf = leaves.start;
    while leaf < leaves.end {
        let level = (0..=LEAVES.ilog2())
            .rev()
            .find(|level| leaf.is_multiple_of(1 << level) && leaf + (1 << level) <= leaves.end)
            .expect("every leaf is a subtree of its own");
        let end = leaf + (1 << level);
        let counts: Vec<u32> = (leaf..end).map(|leaf| leaf_range(leaf, samples).len() as u32).collect();
        let first = leaf_range(leaf, samples).start - begin;
        let count = counts.iter().sum::<u32>() as usize;
        let own = &scores[first * parameters..(first + count) * parameters];
        let packed = gpu.outer_products(own, parameters, rows, &counts)?;
        sums.push(PartialSum { level, index: leaf >> level, sums: packed });
        leaf = end;
    }
    Ok(sums)
}
