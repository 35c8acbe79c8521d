//! Dense layer: `y = x W^T + b` with weight `W` of `outputs x inputs`.

use crate::matrix::{Matrix, add, column_sums, multiply};
use crate::plan::DenseShape;

pub(crate) fn forward(shape: &DenseShape, rows: usize, parameters: &[f32], input: &[f32], output: &mut [f32]) {
    let (k, n) = (shape.inputs, shape.outputs);
    let weight = Matrix::new(&parameters[shape.weight.clone()], n, k);
    multiply(output, n, Matrix::new(input, rows, k), weight.transposed(), 1.0);
    if let Some(bias) = &shape.bias {
        let bias = &parameters[bias.clone()];
        output.chunks_exact_mut(n).for_each(|row| add(row, bias));
    }
}

/// Gradient of weight and bias from `delta`, the gradient of the outputs.
pub(crate) fn backward_parameters(shape: &DenseShape, rows: usize, input: &[f32], delta: &[f32], gradient: &mut [f32]) {
    let (k, n) = (shape.inputs, shape.outputs);
    let weight = &mut gradient[shape.weight.clone()];
    multiply(weight, k, Matrix::new(delta, rows, n).transposed(), Matrix::new(input, rows, k), 1.0);
    if let Some(bias) = &shape.bias {
        column_sums(&mut gradient[bias.clone()], delta);
    }
}

/// Gradient of the inputs.
pub(crate) fn backward_input(shape: &DenseShape, rows: usize, parameters: &[f32], delta: &[f32], input: &mut [f32]) {
    let (k, n) = (shape.inputs, shape.outputs);
    let weight = Matrix::new(&parameters[shape.weight.clone()], n, k);
    multiply(input, k, Matrix::new(delta, rows, n), weight, 1.0);
}
