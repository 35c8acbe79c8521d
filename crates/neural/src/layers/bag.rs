//! Feature bag: the sum of the embeddings of a sample's features plus a bias. Equal to a dense layer on the 0/1 mask of
//! the features, at a cost proportional to the number of features that are set.

use crate::matrix::{add, column_sums};
use crate::plan::BagShape;

pub(crate) fn forward(shape: &BagShape, parameters: &[f32], offsets: &[u32], indices: &[u32], output: &mut [f32]) {
    let n = shape.width;
    let weight = &parameters[shape.weight.clone()];
    for (row, bounds) in output.chunks_exact_mut(n).zip(offsets.windows(2)) {
        match &shape.bias {
            Some(bias) => row.copy_from_slice(&parameters[bias.clone()]),
            None => row.fill(0.0),
        }
        for &feature in &indices[bounds[0] as usize..bounds[1] as usize] {
            let start = feature as usize * n;
            add(row, &weight[start..start + n]);
        }
    }
}

/// Gradient of the embeddings and the bias.
pub(crate) fn backward(shape: &BagShape, offsets: &[u32], indices: &[u32], delta: &[f32], gradient: &mut [f32]) {
    let n = shape.width;
    let weight = &mut gradient[shape.weight.clone()];
    weight.fill(0.0);
    for (row, bounds) in delta.chunks_exact(n).zip(offsets.windows(2)) {
        for &feature in &indices[bounds[0] as usize..bounds[1] as usize] {
            let start = feature as usize * n;
            add(&mut weight[start..start + n], row);
        }
    }
    if let Some(bias) = &shape.bias {
        column_sums(&mut gradient[bias.clone()], delta);
    }
}
