//! A network of two hidden tanh layers with exact derivatives along its first input, and their reverse mode.
//!
//! A row of a batch is evaluated as a jet of order 1 to 3: the value, its first and its second derivative with respect
//! to the first input. Row `b * order + k` of every buffer holds derivative `k` of sample `b`.

use crate::error::Error;
use crate::random::Stream;
use crate::vector::{Matrix, add_rows, add_scaled_rows, last_layer_adjoint, multiply, tanh, tanh_adjoint};

/// Width of the first hidden layer.
pub const HIDDEN_1: usize = 64;
/// Width of the second hidden layer.
pub const HIDDEN_2: usize = 128;
/// Samples per pass: the activations of a chunk stay in the second-level cache.
const CHUNK: usize = 256;
/// Standard deviation of the initial biases.
const BIAS_DEVIATION: f64 = 0.01;

/// Parameters of `inputs -> 64 tanh -> 128 tanh -> 1`, in one flat buffer: W1 [inputs, 64], b1, W2 [64, 128], b2, W3 [128], b3.
#[derive(Debug, Clone, PartialEq)]
pub struct Network {
    inputs: usize,
    parameters: Vec<f64>,
}

/// The activations of a forward pass, for its backward pass.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tape {
    order: usize,
    inputs: Vec<f64>,
    /// Derivatives before the activation; empty for order 1.
    z1: Vec<f64>,
    z2: Vec<f64>,
    y1: Vec<f64>,
    y2: Vec<f64>,
}

struct Offsets {
    b1: usize,
    w2: usize,
    b2: usize,
    w3: usize,
    b3: usize,
    end: usize,
}

const fn offsets(inputs: usize) -> Offsets {
    let b1 = inputs * HIDDEN_1;
    let w2 = b1 + HIDDEN_1;
    let b2 = w2 + HIDDEN_1 * HIDDEN_2;
    let w3 = b2 + HIDDEN_2;
    let b3 = w3 + HIDDEN_2;
    Offsets { b1, w2, b2, w3, b3, end: b3 + 1 }
}

impl Network {
    /// Number of parameters of a network with `inputs` inputs: 8,641 for 2 and 8,833 for 5.
    pub const fn parameter_count(inputs: usize) -> usize {
        offsets(inputs).end
    }

    /// Xavier normal weights and biases of deviation 0.01, as a function of `seed` alone.
    pub fn xavier(inputs: usize, seed: u64) -> Self {
        let o = offsets(inputs);
        let mut parameters = vec![0.0; o.end];
        let deviation = |fan_in: usize, fan_out: usize| (2.0 / (fan_in + fan_out) as f64).sqrt();
        let draws = Stream::new(seed, 0);
        for (i, p) in parameters.iter_mut().enumerate() {
            let scale = match i {
                i if i < o.b1 => deviation(inputs, HIDDEN_1),
                i if i < o.w2 => BIAS_DEVIATION,
                i if i < o.b2 => deviation(HIDDEN_1, HIDDEN_2),
                i if i < o.w3 => BIAS_DEVIATION,
                i if i < o.b3 => deviation(HIDDEN_2, 1),
                _ => BIAS_DEVIATION,
            };
            *p = scale * draws.normal(i as u64);
        }
        Self { inputs, parameters }
    }

    /// A network with the given parameters.
    ///
    /// # Errors
    /// [`Error::Length`] if their number is not [`parameter_count`](Self::parameter_count), [`Error::Range`] if one is not finite.
    pub fn from_parameters(inputs: usize, parameters: Vec<f64>) -> Result<Self, Error> {
        let expected = Self::parameter_count(inputs);
        if parameters.len() != expected {
            return Err(Error::Length { field: "parameters", actual: parameters.len(), expected });
        }
        if let Some(&value) = parameters.iter().find(|p| !p.is_finite()) {
            return Err(Error::Range { field: "parameters", value, allowed: "finite" });
        }
        Ok(Self { inputs, parameters })
    }

    /// Number of inputs.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// All parameters, in the order of the type's documentation.
    pub fn parameters(&self) -> &[f64] {
        &self.parameters
    }

    /// All parameters, to be changed in place.
    pub fn parameters_mut(&mut self) -> &mut [f64] {
        &mut self.parameters
    }

    /// Multiplies the weights of the first and the last layer by `factor`: the stress metric uses 4.
    pub fn scale_outer_layers(&mut self, factor: f64) {
        let o = offsets(self.inputs);
        self.parameters[..o.b1].iter_mut().for_each(|p| *p *= factor);
        self.parameters[o.w3..o.b3].iter_mut().for_each(|p| *p *= factor);
    }

    fn weight(&self, rows: usize, columns: usize, start: usize) -> Matrix<'_> {
        Matrix::new(&self.parameters[start..start + rows * columns], rows, columns)
    }

    /// Values of a batch, `inputs` [samples, inputs] row-major; nothing is kept.
    pub(crate) fn values(&self, inputs: &[f64]) -> Vec<f64> {
        let mut out = vec![0.0; inputs.len() / self.inputs];
        let mut y1 = vec![0.0; CHUNK * HIDDEN_1];
        let mut y2 = vec![0.0; CHUNK * HIDDEN_2];
        for (x, out) in inputs.chunks(CHUNK * self.inputs).zip(out.chunks_mut(CHUNK)) {
            let n = out.len();
            let (y1, y2) = (&mut y1[..n * HIDDEN_1], &mut y2[..n * HIDDEN_2]);
            self.forward_chunk(1, x, (&mut [], &mut []), (y1, y2), out);
        }
        out
    }

    /// Jets [samples, order] of a batch, and the tape for [`backward`](Self::backward).
    pub(crate) fn forward(&self, order: usize, inputs: Vec<f64>) -> (Vec<f64>, Tape) {
        let rows = inputs.len() / self.inputs * order;
        let kept = if order > 1 { rows } else { 0 };
        let mut tape = Tape {
            order,
            inputs,
            z1: vec![0.0; kept * HIDDEN_1],
            z2: vec![0.0; kept * HIDDEN_2],
            y1: vec![0.0; rows * HIDDEN_1],
            y2: vec![0.0; rows * HIDDEN_2],
        };
        let mut out = vec![0.0; rows];
        let chunk = CHUNK * order;
        for (i, out) in out.chunks_mut(chunk).enumerate() {
            let (a, b) = (i * chunk, i * chunk + out.len());
            let x = &tape.inputs[a / order * self.inputs..b / order * self.inputs];
            let z = if order > 1 {
                (&mut tape.z1[a * HIDDEN_1..b * HIDDEN_1], &mut tape.z2[a * HIDDEN_2..b * HIDDEN_2])
            } else {
                (&mut [][..], &mut [][..])
            };
            let y = (&mut tape.y1[a * HIDDEN_1..b * HIDDEN_1], &mut tape.y2[a * HIDDEN_2..b * HIDDEN_2]);
            self.forward_chunk(order, x, z, y, out);
        }
        (out, tape)
    }

    fn forward_chunk(
        &self,
        order: usize,
        x: &[f64],
        z: (&mut [f64], &mut [f64]),
        y: (&mut [f64], &mut [f64]),
        out: &mut [f64],
    ) {
        let o = offsets(self.inputs);
        let p = &self.parameters;
        let (y1, y2) = y;
        let (z1, z2) = z;
        // The derivative of the first layer's argument is a row of its weights; that of its second is 0.
        for (x, rows) in x.chunks_exact(self.inputs).zip(y1.chunks_exact_mut(order * HIDDEN_1)) {
            rows[..HIDDEN_1].copy_from_slice(&p[o.b1..o.w2]);
            for (i, &x) in x.iter().enumerate() {
                add_scaled_row(&mut rows[..HIDDEN_1], &p[i * HIDDEN_1..(i + 1) * HIDDEN_1], x);
            }
            if order > 1 {
                rows[HIDDEN_1..2 * HIDDEN_1].copy_from_slice(&p[..HIDDEN_1]);
                rows[2 * HIDDEN_1..].fill(0.0);
            }
        }
        activate(order, HIDDEN_1, y1, z1);
        for rows in y2.chunks_exact_mut(order * HIDDEN_2) {
            rows[..HIDDEN_2].copy_from_slice(&p[o.b2..o.w3]);
            rows[HIDDEN_2..].fill(0.0);
        }
        let rows = out.len();
        multiply(y2, Matrix::new(y1, rows, HIDDEN_1), self.weight(HIDDEN_1, HIDDEN_2, o.w2), true);
        activate(order, HIDDEN_2, y2, z2);
        multiply(out, Matrix::new(y2, rows, HIDDEN_2), self.weight(HIDDEN_2, 1, o.w3), false);
        out.iter_mut().step_by(order).for_each(|v| *v += p[o.b3]);
    }

    /// Adds the gradient of `sum adjoint[r] * jet[r]` to `gradient`, and to `input_gradient` [samples, inputs] if it is given.
    pub(crate) fn backward(
        &self,
        tape: &Tape,
        adjoint: &[f64],
        gradient: &mut [f64],
        mut input_gradient: Option<&mut [f64]>,
    ) {
        let o = offsets(self.inputs);
        let order = tape.order;
        let p = &self.parameters;
        let chunk = CHUNK * order;
        let mut d1 = vec![0.0; chunk.min(adjoint.len()) * HIDDEN_1];
        let mut d2 = vec![0.0; chunk.min(adjoint.len()) * HIDDEN_2];
        for (i, adjoint) in adjoint.chunks(chunk).enumerate() {
            let rows = adjoint.len();
            let (a, b) = (i * chunk, i * chunk + rows);
            let (y1, y2) = (&tape.y1[a * HIDDEN_1..b * HIDDEN_1], &tape.y2[a * HIDDEN_2..b * HIDDEN_2]);
            let (d1, d2) = (&mut d1[..rows * HIDDEN_1], &mut d2[..rows * HIDDEN_2]);
            add_scaled_rows(&mut gradient[o.w3..o.b3], y2, adjoint);
            gradient[o.b3] += adjoint.iter().step_by(order).sum::<f64>();
            if order == 1 {
                last_layer_adjoint(d2, adjoint, &p[o.w3..o.b3], y2);
            } else {
                for (row, &a) in d2.chunks_exact_mut(HIDDEN_2).zip(adjoint) {
                    row.iter_mut().zip(&p[o.w3..o.b3]).for_each(|(d, w)| *d = a * w);
                }
                jet_adjoint(order, HIDDEN_2, d2, y2, &tape.z2[a * HIDDEN_2..b * HIDDEN_2]);
            }
            add_value_rows(order, HIDDEN_2, &mut gradient[o.b2..o.w3], d2);
            let d2 = Matrix::new(d2, rows, HIDDEN_2);
            multiply(&mut gradient[o.w2..o.b2], Matrix::new(y1, rows, HIDDEN_1).transposed(), d2, true);
            multiply(d1, d2, self.weight(HIDDEN_1, HIDDEN_2, o.w2).transposed(), false);
            if order == 1 {
                tanh_adjoint(d1, y1);
            } else {
                jet_adjoint(order, HIDDEN_1, d1, y1, &tape.z1[a * HIDDEN_1..b * HIDDEN_1]);
            }
            add_value_rows(order, HIDDEN_1, &mut gradient[o.b1..o.w2], d1);
            let x = &tape.inputs[a / order * self.inputs..b / order * self.inputs];
            for (x, rows) in x.chunks_exact(self.inputs).zip(d1.chunks_exact(order * HIDDEN_1)) {
                for (i, &x) in x.iter().enumerate() {
                    add_scaled_row(&mut gradient[i * HIDDEN_1..(i + 1) * HIDDEN_1], &rows[..HIDDEN_1], x);
                }
                if order > 1 {
                    add_scaled_row(&mut gradient[..HIDDEN_1], &rows[HIDDEN_1..2 * HIDDEN_1], 1.0);
                }
            }
            if let Some(out) = input_gradient.as_deref_mut() {
                assert_eq!(order, 1, "gradients to inputs exist for order 1");
                let out = &mut out[a * self.inputs..b * self.inputs];
                let w1 = self.weight(self.inputs, HIDDEN_1, 0).transposed();
                multiply(out, Matrix::new(d1, rows, HIDDEN_1), w1, true);
            }
        }
    }
}

fn add_scaled_row(out: &mut [f64], row: &[f64], scale: f64) {
    out.iter_mut().zip(row).for_each(|(o, r)| *o += scale * r);
}

/// Adds the rows that hold values, not derivatives.
fn add_value_rows(order: usize, width: usize, out: &mut [f64], delta: &[f64]) {
    if order == 1 {
        return add_rows(out, delta);
    }
    for rows in delta.chunks_exact(order * width) {
        add_scaled_row(out, &rows[..width], 1.0);
    }
}

/// Replaces arguments by tanh of them, as jets; keeps the arguments in `z` if the order is above 1.
fn activate(order: usize, width: usize, values: &mut [f64], z: &mut [f64]) {
    if order == 1 {
        return tanh(values);
    }
    z.copy_from_slice(values);
    for (y, z) in values.chunks_exact_mut(order * width).zip(z.chunks_exact(order * width)) {
        tanh(&mut y[..width]);
        for j in 0..width {
            let s = 1.0 - y[j] * y[j];
            let z1 = z[width + j];
            if order > 2 {
                y[2 * width + j] = s * z[2 * width + j] - 2.0 * y[j] * s * z1 * z1;
            }
            y[width + j] = s * z1;
        }
    }
}

/// Turns adjoints of a layer's outputs into adjoints of its arguments.
fn jet_adjoint(order: usize, width: usize, delta: &mut [f64], y: &[f64], z: &[f64]) {
    let stride = order * width;
    for ((d, y), z) in delta.chunks_exact_mut(stride).zip(y.chunks_exact(stride)).zip(z.chunks_exact(stride)) {
        for j in 0..width {
            let (y, z1) = (y[j], z[width + j]);
            let s = 1.0 - y * y;
            let second = -2.0 * y * s;
            let (d0, d1) = (d[j], d[width + j]);
            d[j] = s * d0 + second * z1 * d1;
            d[width + j] = s * d1;
            if order > 2 {
                let (d2, z2) = (d[2 * width + j], z[2 * width + j]);
                let third = s * (6.0 * y * y - 2.0);
                d[j] += (second * z2 + third * z1 * z1) * d2;
                d[width + j] += 2.0 * second * z1 * d2;
                d[2 * width + j] = s * d2;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs() -> Vec<f64> {
        (0..600).map(|i| Stream::new(3, 9).uniform(i) * 2.0 - 1.0).collect()
    }

    #[test]
    fn jets_equal_central_differences_along_the_first_input() {
        let network = Network::xavier(2, 5);
        let (jets, _) = network.forward(3, inputs());
        for (jet, value) in jets.chunks(3).zip(network.values(&inputs())) {
            assert!((jet[0] - value).abs() < 1e-14);
        }
        let shifted = |h: f64| {
            let mut x = inputs();
            x.iter_mut().step_by(2).for_each(|c| *c += h);
            network.forward(3, x).0
        };
        let h = 1e-5;
        let (up, down) = (shifted(h), shifted(-h));
        for b in 0..300 {
            for k in 0..2 {
                let difference = (up[b * 3 + k] - down[b * 3 + k]) / (2.0 * h);
                assert!((difference - jets[b * 3 + k + 1]).abs() < 1e-8, "derivative {} of sample {b}", k + 1);
            }
        }
    }

    #[test]
    fn gradients_of_all_jets_equal_central_differences() {
        for (order, width) in [(1, 5), (2, 2), (3, 2)] {
            let mut network = Network::xavier(width, 11);
            network.scale_outer_layers(2.0);
            let x = inputs()[..width * 60].to_vec();
            let adjoint: Vec<f64> = (0..60 * order).map(|i| Stream::new(8, 1).normal(i as u64)).collect();
            let loss = |network: &Network, x: &[f64]| -> f64 {
                network.forward(order, x.to_vec()).0.iter().zip(&adjoint).map(|(a, b)| a * b).sum()
            };
            let (_, tape) = network.forward(order, x.clone());
            let mut gradient = vec![0.0; network.parameters().len()];
            let mut to_inputs = vec![0.0; x.len()];
            network.backward(&tape, &adjoint, &mut gradient, (order == 1).then_some(&mut to_inputs));
            let h = 1e-5;
            let count = gradient.len();
            for i in (0..count).step_by(97).chain([count - 1, count - 2, 0, 65]) {
                let mut shifted = |h: f64| {
                    let kept = network.parameters()[i];
                    network.parameters_mut()[i] = kept + h;
                    let value = loss(&network, &x);
                    network.parameters_mut()[i] = kept;
                    value
                };
                let difference = (shifted(h) - shifted(-h)) / (2.0 * h);
                assert!(
                    (difference - gradient[i]).abs() < 1e-6,
                    "order {order}, parameter {i}: {difference} {}",
                    gradient[i]
                );
            }
            for i in (0..x.len()).step_by(17).filter(|_| order == 1) {
                let shifted = |h: f64| {
                    let mut x = x.clone();
                    x[i] += h;
                    loss(&network, &x)
                };
                let difference = (shifted(h) - shifted(-h)) / (2.0 * h);
                assert!((difference - to_inputs[i]).abs() < 1e-7, "input {i}");
            }
        }
    }
}
