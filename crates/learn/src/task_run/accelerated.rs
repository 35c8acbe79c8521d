//! Products and sums of tasks on the threads and the GPUs of a worker, with the bits of the CPU.

use super::fit::failed;
use super::{TaskContext, TaskError};
use engram_devices::ComputeDevice;
use engram_devices::workloads::{Division, max_plus_product_rows};
use engram_kernels::partitioner::Strategy;
use engram_tropical::{Matrix, product_rows};
use std::ops::Range;
use std::time::Duration;

/// Time limit of a part of a task, which ends a task that would block its worker permanently.
pub(super) const LIMIT: Duration = Duration::from_secs(24 * 3_600);
/// Blocks per device: a device that is faster than the others takes over blocks of theirs.
const BLOCKS_PER_DEVICE: usize = 4;

/// Returns the devices for a computation of this many additions or multiplications: the GPUs if it is worth their transfers, then a
/// thread of the CPU for each that the task may use.
pub(super) fn devices(context: &dyn TaskContext, operations: u64) -> Vec<ComputeDevice> {
    let threads = (0..context.threads().max(1)).map(|number| ComputeDevice::new(format!("thread {number}")));
    let gpus = context.gpus(operations).iter().filter(|gpu| gpu.resource().healthy).cloned();
    gpus.chain(threads).collect()
}

/// Returns some rows of a max-plus product.
///
/// # Errors
/// Sums that overflow.
pub(super) fn product_on_devices(
    left: &Matrix,
    right: &Matrix,
    rows: Range<usize>,
    context: &dyn TaskContext,
) -> Result<Matrix, TaskError> {
    let operations = [rows.len(), left.columns(), right.columns()].iter().map(|&it| it as u64).product();
    if context.gpus(operations).is_empty() {
        return product_rows(left, right, rows, context.threads()).map_err(failed);
    }
    let devices = devices(context, operations);
    let block = rows.len().div_ceil(BLOCKS_PER_DEVICE * devices.len()).max(1);
    let division = Division { strategy: Strategy::Balanced, block, limit: LIMIT };
    max_plus_product_rows(&devices, left, right, rows, &division).map(|(product, _)| product).map_err(failed)
}
