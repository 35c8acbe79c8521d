//! Fisher matrices: pattern batch over the leaves of the fixed tree of additions.

use super::Division;
use crate::blocks::run_blocks_on;
use crate::{ComputeDevice, Error, Load};
use engram_information::{FisherMatrix, LEAVES, combine, leaf_range};

/// Returns the Fisher matrix of `scores` (samples x `parameters`, row-major), in mode
/// [`PartitionInvariant`](engram_information::Mode::PartitionInvariant). A block is a number of the 64 leaves.
///
/// # Errors
/// Scores that are not finite or not whole samples; those of [`run_blocks`](crate::run_blocks).
pub fn fisher_matrix(
    devices: &[ComputeDevice],
    scores: &[f32],
    parameters: usize,
    division: &Division,
) -> Result<(FisherMatrix, Vec<Load>), Error> {
    if parameters == 0 || scores.is_empty() || !scores.len().is_multiple_of(parameters) {
        let value = format!("{} for {parameters} parameters", scores.len());
        return Err(Error::argument("number of scores", value, "whole samples, at least one"));
    }
    let samples = scores.len() / parameters;
    let first = |leaf: usize| if leaf == LEAVES { samples } else { leaf_range(leaf, samples).start };
    // Scores and sums of a leaf.
    let bytes = samples.div_ceil(LEAVES) * parameters * 4 + parameters * (parameters + 1) / 2 * 8;
    let distribution = division.distribute(devices, "fisher sums", LEAVES, bytes as u64)?;
    let blocks = run_blocks_on(devices, distribution, division.limit, |device, leaves| {
        let own = &scores[first(leaves.start) * parameters..first(leaves.end) * parameters];
        device.partial_sums(own, parameters, &(0..parameters), leaves, samples)
    })?;
    let parts = blocks.results.into_iter().flatten().collect();
    let matrix = combine(parts, parameters, samples as u64);
    let matrix = matrix.map_err(|error| Error::argument("scores", error, "finite numbers"))?;
    Ok((matrix, blocks.loads))
}
