//! Max-plus products: pattern rows.

use super::Division;
use crate::{ComputeDevice, Error, Load, run_rows};
use engram_tropical::{Matrix, product_rows};

/// Returns the max-plus product of `left` and `right`. A block is a number of rows of the result.
///
/// # Errors
/// Shapes that do not fit; those of [`run_rows`].
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
    let kernel = |rows: std::ops::Range<usize>, out: &mut [f32]| {
        product_rows(left, right, rows, 1).map(|part| out.copy_from_slice(part.entries()))
    };
    let (entries, blocks) = run_rows(devices, distribution, division.limit, right.columns(), kernel)?;
    let product = Matrix::new("product", left.rows(), right.columns(), entries);
    let product = product.map_err(|error| Error::argument("product", error, "sums that do not overflow"))?;
    Ok((product, blocks.loads))
}
