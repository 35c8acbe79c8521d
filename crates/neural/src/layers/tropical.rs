//! Tropical layer: `y[j] = max(max over i of (x[i] + W[i][j]), b[j])` with weight `W` of `inputs x outputs`. The winner of each output receives its
//! gradient alone; ties go to the lowest input, and to an input before the bias.

use engram_tropical::{LayerView, add_input_gradient, add_parameter_gradient};

use crate::plan::TropicalShape;

/// `winners` receives the input that won each output.
pub(crate) fn forward(
    shape: &TropicalShape,
    parameters: &[f32],
    input: &[f32],
    output: &mut [f32],
    winners: &mut Vec<u32>,
) {
    winners.resize(output.len(), 0);
    let bias = shape.bias.clone().map(|bias| &parameters[bias]);
    LayerView::new(&parameters[shape.weight.clone()], bias, shape.inputs).forward(input, output, winners);
}

/// Gradient of weight and bias from `delta`, the gradient of the outputs.
pub(crate) fn backward_parameters(shape: &TropicalShape, winners: &[u32], delta: &[f32], gradient: &mut [f32]) {
    let end = shape.bias.as_ref().map_or(shape.weight.end, |bias| bias.end);
    let own = &mut gradient[shape.weight.start..end];
    own.fill(0.0);
    let (weight, bias) = own.split_at_mut(shape.weight.len());
    add_parameter_gradient(winners, delta, shape.outputs, weight, shape.bias.as_ref().map(|_| bias));
}

/// Gradient of the inputs.
pub(crate) fn backward_input(shape: &TropicalShape, winners: &[u32], delta: &[f32], input: &mut [f32]) {
    input.fill(0.0);
    add_input_gradient(winners, delta, shape.outputs, shape.inputs, input);
}
