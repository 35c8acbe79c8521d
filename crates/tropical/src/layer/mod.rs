//! A tropical layer: `y[j] = max(max over i of (x[i] + W[i][j]), b[j])`, with gradients for winners only.

mod smooth;
mod view;

pub use smooth::{SmoothOutput, smooth_backward, smooth_forward};
pub use view::{LayerView, add_input_gradient, add_parameter_gradient};

use crate::{Error, Matrix};

/// Weights (inputs x outputs) and biases (outputs) of a layer. A missing weight is an absent edge.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    weights: Matrix,
    biases: Vec<f32>,
}

/// Outputs of a batch with the winner of each.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerOutput {
    /// Samples x outputs.
    pub values: Matrix,
    /// Samples x outputs, row-major: the input whose edge won, lowest on ties; the number of inputs where the bias won.
    pub winners: Vec<u32>,
}

/// Gradient of a batch: sums over its samples, never means, so that shards of any size add up.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradient {
    /// Nonzero entries of `dW` by ascending flat index `i * outputs + j`: at most samples x outputs.
    pub weights: Vec<(u32, f32)>,
    /// `db`, one per output.
    pub biases: Vec<f32>,
    /// `dx`, samples x inputs, row-major.
    pub inputs: Vec<f32>,
    /// Number of samples in the sums.
    pub samples: usize,
}

impl Layer {
    /// Creates a layer.
    ///
    /// # Errors
    /// The number of biases differs from the columns of the weights; a bias is NaN or positive infinity.
    pub fn new(weights: Matrix, biases: Vec<f32>) -> Result<Self, Error> {
        Error::dimension("number of biases", biases.len(), weights.columns())?;
        let biases = Matrix::new("biases", 1, weights.columns(), biases)?.entries().to_vec();
        Ok(Self { weights, biases })
    }

    /// Returns the weights.
    pub const fn weights(&self) -> &Matrix {
        &self.weights
    }

    /// Returns the biases.
    pub fn biases(&self) -> &[f32] {
        &self.biases
    }

    /// Returns outputs and winners of a batch (samples x inputs).
    ///
    /// # Errors
    /// The columns of `batch` differ from the inputs of the layer.
    pub fn forward(&self, batch: &Matrix) -> Result<LayerOutput, Error> {
        Error::dimension("columns of the batch", batch.columns(), self.weights.rows())?;
        let outputs = self.weights.columns();
        let mut values = vec![0.0; batch.rows() * outputs];
        let mut winners = vec![0; batch.rows() * outputs];
        let view = LayerView::new(self.weights.entries(), Some(&self.biases), self.weights.rows());
        view.forward(batch.entries(), &mut values, &mut winners);
        Ok(LayerOutput { values: Matrix::from_entries(batch.rows(), outputs, values), winners })
    }

    /// Returns the gradient for `upstream`, the gradient of the outputs (samples x outputs, row-major). Samples are added in order.
    ///
    /// # Errors
    /// The number of upstream entries differs from the number of outputs of the batch.
    pub fn backward(&self, output: &LayerOutput, upstream: &[f32]) -> Result<Gradient, Error> {
        Error::dimension("number of upstream gradients", upstream.len(), output.winners.len())?;
        let (inputs, outputs) = (self.weights.rows(), self.weights.columns());
        let samples = output.values.rows();
        let mut gradient = vec![0.0; inputs * outputs];
        let mut touched = vec![false; inputs * outputs];
        let mut biases = vec![0.0; outputs];
        let mut to_inputs = vec![0.0; samples * inputs];
        add_parameter_gradient(&output.winners, upstream, outputs, &mut gradient, Some(&mut biases));
        add_input_gradient(&output.winners, upstream, outputs, inputs, &mut to_inputs);
        for (index, &winner) in output.winners.iter().enumerate().filter(|(_, winner)| (**winner as usize) < inputs) {
            touched[winner as usize * outputs + index % outputs] = true;
        }
        let entries = (0..).zip(gradient).zip(touched).filter(|(_, touched)| *touched).map(|(entry, _)| entry);
        Ok(Gradient { weights: entries.collect(), biases, inputs: to_inputs, samples })
    }
}

impl Gradient {
    /// Adds the sums of another shard of the same batch; `inputs` stay those of this shard. Exact: no entry is dropped.
    pub fn add(&mut self, other: &Self) {
        let mut merged = Vec::with_capacity(self.weights.len() + other.weights.len());
        let (mut left, mut right) = (self.weights.iter().peekable(), other.weights.iter().peekable());
        while let (Some(a), Some(b)) = (left.peek(), right.peek()) {
            match a.0.cmp(&b.0) {
                std::cmp::Ordering::Less => merged.extend(left.next()),
                std::cmp::Ordering::Greater => merged.extend(right.next()),
                std::cmp::Ordering::Equal => {
                    merged.push((a.0, a.1 + b.1));
                    left.next();
                    right.next();
                }
            }
        }
        merged.extend(left);
        merged.extend(right);
        self.weights = merged;
        self.biases.iter_mut().zip(&other.biases).for_each(|(sum, other)| *sum += other);
        self.samples += other.samples;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::product;

    fn values(count: usize, seed: u32) -> Vec<f32> {
        let mix = |index: u32| (index ^ seed).wrapping_mul(2_654_435_761).rotate_left(13).wrapping_mul(0x85eb_ca6b);
        (0..count as u32).map(|index| (mix(index) >> 8) as f32 / (1 << 22) as f32 - 2.0).collect()
    }

    fn layer(inputs: usize, outputs: usize) -> Layer {
        let weights = Matrix::new("weights", inputs, outputs, values(inputs * outputs, 7)).unwrap();
        Layer::new(weights, values(outputs, 9)).unwrap()
    }

    #[test]
    fn forward_is_the_product_raised_by_the_bias() {
        let layer = layer(37, 21);
        let batch = Matrix::new("batch", 5, 37, values(5 * 37, 3)).unwrap();
        let output = layer.forward(&batch).unwrap();
        let product = product(&batch, layer.weights(), 1).unwrap();
        for (index, (&value, &edge)) in output.values.entries().iter().zip(product.entries()).enumerate() {
            assert_eq!(value, edge.max(layer.biases()[index % 21]));
            let (winner, sample, column) = (output.winners[index] as usize, index / 21, index % 21);
            let won = if winner == 37 {
                layer.biases()[column]
            } else {
                batch.row(sample)[winner] + layer.weights().row(winner)[column]
            };
            assert_eq!(won, value);
        }
    }

    #[test]
    fn all_negative_inputs_are_not_raised_to_zero() {
        let weights = Matrix::new("weights", 2, 1, vec![-1.0, -2.0]).unwrap();
        let layer = Layer::new(weights, vec![f32::NEG_INFINITY]).unwrap();
        let output = layer.forward(&Matrix::new("batch", 1, 2, vec![-5.0, -7.0]).unwrap()).unwrap();
        assert_eq!((output.values.entries(), &output.winners[..]), (&[-6.0][..], &[0][..]));
    }

    #[test]
    fn tied_edges_give_the_gradient_to_the_lowest_alone() {
        let layer = Layer::new(Matrix::new("weights", 3, 1, vec![0.0; 3]).unwrap(), vec![1.0]).unwrap();
        let output = layer.forward(&Matrix::new("batch", 1, 3, vec![0.5, 1.0, 1.0]).unwrap()).unwrap();
        let gradient = layer.backward(&output, &[2.0]).unwrap();
        assert_eq!(gradient.weights, [(1, 2.0)], "input 1 wins over input 2 and the bias");
        assert_eq!((&gradient.biases[..], &gradient.inputs[..]), (&[0.0][..], &[0.0, 2.0, 0.0][..]));
    }

    #[test]
    fn gradient_equals_finite_differences_away_from_ties() {
        let layer = layer(6, 4);
        let batch = Matrix::new("batch", 3, 6, values(18, 5)).unwrap();
        let upstream = values(12, 11);
        let loss = |layer: &Layer, batch: &Matrix| -> f64 {
            let output = layer.forward(batch).unwrap();
            output.values.entries().iter().zip(&upstream).map(|(y, u)| f64::from(*y) * f64::from(*u)).sum()
        };
        let gradient = layer.backward(&layer.forward(&batch).unwrap(), &upstream).unwrap();
        let step = 1e-3_f32;
        for index in 0..24 {
            let shifted = |by: f32| {
                let mut entries = layer.weights().entries().to_vec();
                entries[index] += by;
                let weights = Matrix::new("weights", 6, 4, entries).unwrap();
                loss(&Layer::new(weights, layer.biases().to_vec()).unwrap(), &batch)
            };
            let numeric = (shifted(step) - shifted(-step)) / f64::from(2.0 * step);
            let exact = gradient.weights.iter().find(|entry| entry.0 as usize == index).map_or(0.0, |entry| entry.1);
            assert!((numeric - f64::from(exact)).abs() < 2e-3, "weight {index}: {numeric} {exact}");
        }
        for index in 0..18 {
            let shifted = |by: f32| {
                let mut entries = batch.entries().to_vec();
                entries[index] += by;
                loss(&layer, &Matrix::new("batch", 3, 6, entries).unwrap())
            };
            let numeric = (shifted(step) - shifted(-step)) / f64::from(2.0 * step);
            assert!((numeric - f64::from(gradient.inputs[index])).abs() < 2e-3, "input {index}: {numeric}");
        }
    }

    #[test]
    fn shards_of_different_size_add_up_to_the_whole_batch() {
        let layer = layer(8, 5);
        let entries: Vec<f32> = values(8 * 10, 21);
        // Multiples of 1/1024: sums are exact in any order.
        let upstream: Vec<f32> = values(50, 22).iter().map(|it| (it * 1024.0).round() / 1024.0).collect();
        let part = |from: usize, to: usize| {
            let batch = Matrix::new("batch", to - from, 8, entries[from * 8..to * 8].to_vec()).unwrap();
            layer.backward(&layer.forward(&batch).unwrap(), &upstream[from * 5..to * 5]).unwrap()
        };
        let whole = part(0, 10);
        let mut sum = part(0, 1);
        sum.add(&part(1, 10));
        assert_eq!((&sum.weights, &sum.biases, sum.samples), (&whole.weights, &whole.biases, 10));
        assert!(whole.weights.len() <= 50, "at most samples x outputs");
    }
}
