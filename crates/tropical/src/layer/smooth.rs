//! The smooth layer: `y[j] = T ln(sum over i of exp((x[i] + W[i][j]) / T) + exp(b[j] / T))`, which approaches the tropical layer from above
//! as the temperature T goes to 0: `max <= y <= max + T ln(inputs + 1)`. Its gradient is the softmax of the edges.

use crate::{Error, Gradient, Layer, Matrix};

/// Outputs of a batch with what the backward pass needs.
#[derive(Debug, Clone, PartialEq)]
pub struct SmoothOutput {
    /// Samples x outputs.
    pub values: Matrix,
    temperature: f32,
}

/// Returns the outputs of a batch (samples x inputs) at a temperature above 0.
///
/// # Errors
/// A temperature that is not positive and finite; columns of `batch` that differ from the inputs of the layer.
pub fn smooth_forward(layer: &Layer, batch: &Matrix, temperature: f32) -> Result<SmoothOutput, Error> {
    if !(temperature.is_finite() && temperature > 0.0) {
        return Err(Error::Temperature(temperature));
    }
    let hard = layer.forward(batch)?;
    let outputs = layer.biases().len();
    let mut values = Vec::with_capacity(batch.rows() * outputs);
    for sample in 0..batch.rows() {
        for (output, &largest) in hard.values.row(sample).iter().enumerate() {
            // Relative to the maximum, so that no exponential overflows.
            let excess = |value: f32| f64::from((value - largest) / temperature).exp();
            let edges = batch.row(sample).iter().zip(0..).map(|(x, input)| x + layer.weights().row(input)[output]);
            let sum: f64 = edges.chain([layer.biases()[output]]).map(excess).sum();
            let missing = largest == f32::NEG_INFINITY;
            values.push(if missing { largest } else { largest + temperature * sum.ln() as f32 });
        }
    }
    Ok(SmoothOutput { values: Matrix::from_entries(batch.rows(), outputs, values), temperature })
}

/// Returns the gradient for `upstream` (samples x outputs, row-major) as sums over the samples; every edge has an entry.
///
/// # Errors
/// The number of upstream entries differs from the number of outputs of the batch.
pub fn smooth_backward(
    layer: &Layer,
    batch: &Matrix,
    output: &SmoothOutput,
    upstream: &[f32],
) -> Result<Gradient, Error> {
    Error::dimension("number of upstream gradients", upstream.len(), output.values.entries().len())?;
    let (inputs, outputs) = (layer.weights().rows(), layer.weights().columns());
    let mut weights = vec![0.0_f32; inputs * outputs];
    let mut biases = vec![0.0; outputs];
    let mut to_inputs = vec![0.0; batch.rows() * inputs];
    for sample in 0..batch.rows() {
        for column in 0..outputs {
            let value = output.values.row(sample)[column];
            if value == f32::NEG_INFINITY {
                continue;
            }
            let upstream = upstream[sample * outputs + column];
            let share = |edge: f32| ((edge - value) / output.temperature).exp() * upstream;
            for (input, x) in batch.row(sample).iter().enumerate() {
                let part = share(x + layer.weights().row(input)[column]);
                weights[input * outputs + column] += part;
                to_inputs[sample * inputs + input] += part;
            }
            biases[column] += share(layer.biases()[column]);
        }
    }
    Ok(Gradient { weights: (0..).zip(weights).collect(), biases, inputs: to_inputs, samples: batch.rows() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer() -> (Layer, Matrix) {
        let weights = Matrix::new("weights", 3, 2, vec![0.3, -1.0, 0.1, 0.8, -0.5, 0.2]).unwrap();
        (
            Layer::new(weights, vec![-0.4, 0.6]).unwrap(),
            Matrix::new("batch", 2, 3, vec![1.0, -0.2, 0.4, 0.3, 0.9, -1.5]).unwrap(),
        )
    }

    #[test]
    fn smooth_output_lies_between_the_maximum_and_its_bound() {
        let (layer, batch) = layer();
        let hard = layer.forward(&batch).unwrap();
        for temperature in [1.0, 0.1, 1e-3] {
            let smooth = smooth_forward(&layer, &batch, temperature).unwrap();
            for (soft, hard) in smooth.values.entries().iter().zip(hard.values.entries()) {
                assert!(soft >= hard && *soft <= hard + temperature * 4.0_f32.ln() + 1e-6, "{soft} {hard}");
            }
        }
        assert_eq!(smooth_forward(&layer, &batch, 0.0).unwrap_err(), Error::Temperature(0.0));
        assert!(smooth_forward(&layer, &batch, f32::NAN).is_err());
    }

    #[test]
    fn gradient_is_the_softmax_by_finite_differences() {
        let (layer, batch) = layer();
        let upstream = [0.7, -0.3, 1.1, 0.4];
        let loss = |weights: Vec<f32>| -> f64 {
            let layer = Layer::new(Matrix::new("weights", 3, 2, weights).unwrap(), layer.biases().to_vec()).unwrap();
            let output = smooth_forward(&layer, &batch, 0.5).unwrap();
            output.values.entries().iter().zip(upstream).map(|(y, u)| f64::from(*y) * f64::from(u)).sum()
        };
        let output = smooth_forward(&layer, &batch, 0.5).unwrap();
        let gradient = smooth_backward(&layer, &batch, &output, &upstream).unwrap();
        for (index, exact) in &gradient.weights {
            let shifted = |by: f32| {
                let mut weights = layer.weights().entries().to_vec();
                weights[*index as usize] += by;
                loss(weights)
            };
            let numeric = (shifted(1e-2) - shifted(-1e-2)) / 2e-2;
            assert!((numeric - f64::from(*exact)).abs() < 2e-4, "weight {index}: {numeric} {exact}");
        }
        // Per output the shares of all edges and the bias add up to the upstream gradient.
        let total: f32 = gradient.weights.iter().map(|it| it.1).sum::<f32>() + gradient.biases.iter().sum::<f32>();
        assert!((total - upstream.iter().sum::<f32>()).abs() < 1e-5);
    }
}
