//! The layer over borrowed slices, for callers that keep parameters and activations of several layers in buffers of their own.

use crate::vector::widest;

/// A tropical layer over borrowed parameters: `y[j] = max(max over i of (x[i] + W[i][j]), b[j])`.
#[derive(Debug, Clone, Copy)]
pub struct LayerView<'a> {
    weights: &'a [f32],
    biases: Option<&'a [f32]>,
    inputs: usize,
    outputs: usize,
}

impl<'a> LayerView<'a> {
    /// Creates a view of weights (inputs x outputs, row-major) and of biases (outputs), if the layer has some. No parameter may be NaN.
    ///
    /// # Panics
    /// The lengths do not fit.
    pub fn new(weights: &'a [f32], biases: Option<&'a [f32]>, inputs: usize) -> Self {
        let outputs = biases.map_or_else(|| weights.len().checked_div(inputs).unwrap_or(0), <[f32]>::len);
        assert_eq!(weights.len(), inputs * outputs, "weights are inputs x outputs");
        Self { weights, biases, inputs, outputs }
    }

    /// Writes outputs and winners (samples x outputs, row-major) of a batch (samples x inputs, row-major). The winner is the input whose edge won,
    /// lowest on ties; the number of inputs where the bias won or no edge exists. All outputs of a sample with a NaN are NaN.
    ///
    /// # Panics
    /// The lengths do not fit.
    pub fn forward(&self, batch: &[f32], values: &mut [f32], winners: &mut [u32]) {
        let Self { weights, biases, inputs, outputs } = *self;
        assert_eq!(values.len(), winners.len(), "an output has a winner");
        if outputs == 0 {
            return;
        }
        let rows = values.chunks_exact_mut(outputs).zip(winners.chunks_exact_mut(outputs));
        for (sample, (values, winners)) in rows.enumerate() {
            let sample = &batch[sample * inputs..][..inputs];
            winners.fill(inputs as u32);
            if sample.iter().any(|x| x.is_nan()) {
                values.fill(f32::NAN);
                continue;
            }
            values.fill(f32::NEG_INFINITY);
            raise_by_edges(sample, weights, values, winners);
            for ((value, winner), &bias) in values.iter_mut().zip(winners).zip(biases.unwrap_or_default()) {
                if bias > *value {
                    (*value, *winner) = (bias, inputs as u32);
                }
            }
        }
    }
}

/// Adds the gradient of the weights (inputs x outputs) and of the biases (outputs), if there are some, for `upstream`, the gradient of the outputs.
/// Samples are added in order. The winner of an output alone receives its gradient.
pub fn add_parameter_gradient(
    winners: &[u32],
    upstream: &[f32],
    outputs: usize,
    weights: &mut [f32],
    mut biases: Option<&mut [f32]>,
) {
    let inputs = weights.len().checked_div(outputs).unwrap_or(0);
    for (index, (&winner, &upstream)) in winners.iter().zip(upstream).enumerate() {
        let (input, output) = (winner as usize, index % outputs);
        if input < inputs {
            weights[input * outputs + output] += upstream;
        } else if let Some(biases) = &mut biases {
            biases[output] += upstream;
        }
    }
}

/// Adds the gradient of the inputs (samples x inputs) for `upstream`, the gradient of the outputs.
pub fn add_input_gradient(winners: &[u32], upstream: &[f32], outputs: usize, inputs: usize, to_inputs: &mut [f32]) {
    for (index, (&winner, &upstream)) in winners.iter().zip(upstream).enumerate() {
        if (winner as usize) < inputs {
            to_inputs[index / outputs * inputs + winner as usize] += upstream;
        }
    }
}

widest! {
    /// Raises `values` by the edges of one sample and records the winning inputs.
    fn raise_by_edges(sample: &[f32], weights: &[f32], values: &mut [f32], winners: &mut [u32]) {
        for (&x, (input, weights)) in sample.iter().zip((0..).zip(weights.chunks_exact(values.len()))) {
            let edges = values.iter_mut().zip(winners.iter_mut()).zip(weights);
            for ((value, winner), weight) in edges {
                let candidate = x + weight;
                let wins = candidate > *value;
                *value = if wins { candidate } else { *value };
                *winner = if wins { input } else { *winner };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sample_with_a_nan_has_no_number_as_output_and_the_others_keep_theirs() {
        let (mut values, mut winners) = ([0.0; 4], [9; 4]);
        let view = LayerView::new(&[1.0, -1.0, 2.0, 0.5], Some(&[0.0, 0.0]), 2);
        view.forward(&[0.0, 0.0, f32::NAN, 5.0], &mut values, &mut winners);
        assert_eq!((&values[..2], &winners[..2]), (&[2.0, 0.5][..], &[1, 1][..]));
        assert!(values[2..].iter().all(|value| value.is_nan()), "{values:?}");
    }

    #[test]
    fn output_without_bias_and_edge_passes_no_gradient_on() {
        let missing = [f32::NEG_INFINITY; 2];
        let (mut values, mut winners) = ([0.0; 1], [9; 1]);
        LayerView::new(&[1.0, 2.0], None, 2).forward(&missing, &mut values, &mut winners);
        assert_eq!((values, winners), ([f32::NEG_INFINITY], [2]));
        let (mut weights, mut to_inputs) = ([0.0; 2], [0.0; 2]);
        add_parameter_gradient(&winners, &[1.0], 1, &mut weights, None);
        add_input_gradient(&winners, &[1.0], 1, 2, &mut to_inputs);
        assert_eq!((weights, to_inputs), ([0.0; 2], [0.0; 2]));
    }
}
