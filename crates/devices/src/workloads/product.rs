//! Max-plus products: pattern rows.

use super::Division;
use crate::blocks::run_rows_on;
use crate::{ComputeDevice, Error, Load, accelerator};
use engram_tropical::{Matrix, product_rows};

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
    if left.columns() != right.rows() {
        let value = format!("{} for {} columns of the left matrix", right.rows(), left.columns());
        return Err(Error::argument("rows of the right matrix", value, "the columns of the left matrix"));
    }
    let bytes = (left.columns() + right.columns()) * size_of::<f32>();
    let distribution = division.distribute(devices, "max-plus product", left.rows(), bytes as u64)?;
    let kernel = |device: &ComputeDevice, rows: std::ops::Range<usize>, out: &mut [f32]| {
        if let Some(part) = device.on_gpu(|gpu| accelerator::product_rows(gpu, left, right, rows.clone())) {
            // Empty if the GPU has failed: another device writes the rows again.
            out.iter_mut().zip(part).for_each(|(entry, value)| *entry = value);
            return Ok(());
        }
        product_rows(left, right, rows, 1).map(|part| out.copy_from_slice(part.entries()))
    };
    let (entries, blocks) = run_rows_on(devices, distribution, division.limit, right.columns(), kernel)?;
    let product = Matrix::new("product", left.rows(), right.columns(), entries);
    let product = product.map_err(|error| Error::argument("product", error, "sums that do not overflow"))?;
    Ok((product, blocks.loads))
}
