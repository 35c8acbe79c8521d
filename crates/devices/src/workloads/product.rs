//! Max-plus products: pattern rows.

use super::Division;
use crate::blocks::run_rows_on;
use crate::{ComputeDevice, Error, Load, accelerator};
use engram_tropical::{Matrix, product_rows};
use std::ops::Range;

/// Returns the max-plus product of `left` and `right`. A block is a number of rows of the result.
///
/// # Errors
/// Shapes that do not fit; those of [`run_rows`](crate::run_rows).
pub fn max_plus_product(
    devices: &[ComputeDevice],
    left: &Matrix,
    right: &Matrix,
    division: &Division,
) -> Result<(Matrix, Vec<Load>), Error> {
    max_plus_product_rows(devices, left, right, 0..left.rows(), division)
}

/// Returns some rows of the max-plus product of `left` and `right`. A block is a number of these rows.
///
/// # Errors
/// As [`max_plus_product`]; or `rows` exceeds the rows of `left`.
pub fn max_plus_product_rows(
    devices: &[ComputeDevice],
    left: &Matrix,
    right: &Matrix,
    rows: Range<usize>,
    division: &Division,
) -> Result<(Matrix, Vec<Load>), Error> {
    if rows.end > left.rows() || rows.start > rows.end {
        return Err(Error::argument("end of the rows", rows.end, "at most the rows of the left matrix"));
    }
    if left.columns() != right.rows() {
        let value = format!("{} for {} columns of the left matrix", right.rows(), left.columns());
        return Err(Error::argument("rows of the right matrix", value, "the columns of the left matrix"));
    }
    let bytes = (left.columns() + right.columns()) * size_of::<f32>();
    let distribution = division.distribute(devices, "max-plus product", rows.len(), bytes as u64)?;
    let kernel = |device: &ComputeDevice, part: Range<usize>, out: &mut [f32]| {
        let rows = rows.start + part.start..rows.start + part.end;
        if let Some(part) = device.on_gpu(|gpu| accelerator::product_rows(gpu, left, right, rows.clone())) {
            // Empty if the GPU has failed: another device writes the rows again.
            out.iter_mut().zip(part).for_each(|(entry, value)| *entry = value);
            return Ok(());
        }
        product_rows(left, right, rows, 1).map(|part| out.copy_from_slice(part.entries()))
    };
    let (entries, blocks) = run_rows_on(devices, distribution, division.limit, right.columns(), kernel)?;
    let product = Matrix::new("product", rows.len(), right.columns(), entries);
    let product = product.map_err(|error| Error::argument("product", error, "sums that do not overflow"))?;
    Ok((product, blocks.loads))
}
