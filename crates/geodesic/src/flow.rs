//! The flow decoder: the absorbance changes along the path at the rate `f(c, v, l)`, so that the difference between target and source
//! is the integral of f over time.
//!
//! f does not contain the absorbance, so no differential equation is solved: with `dt = sqrt(g) dc / K` the integral over time
//! is a sum over the quadrature nodes of the closed form.

use crate::closed::Lattice;
use crate::metric::{MetricNetwork, MetricPass};
use crate::model::WAVELENGTH_SCALE;
use crate::network::{Network, Tape};

/// Inputs of the flow: c, velocity, l.
pub(crate) const FLOW_INPUTS: usize = 3;

/// A forward pass, for its backward pass.
pub(crate) struct FlowPass {
    metric: MetricPass,
    /// sqrt(g) [wavelength, point].
    root: Vec<f64>,
    rate: Vec<f64>,
    /// f at the nodes of each path [pair, wavelength, node].
    flow: Vec<f64>,
    tape: Tape,
    /// Length of each path [pair, wavelength].
    pub(crate) length: Vec<f64>,
    /// Integral of f over time [pair, wavelength].
    pub(crate) differences: Vec<f64>,
}

/// The nodes of a pair, and the direction in which they are passed.
fn nodes(lattice: &Lattice, (i, j): (usize, usize)) -> (std::ops::Range<usize>, f64) {
    (i.min(j) * lattice.nodes()..i.max(j) * lattice.nodes(), if i < j { 1.0 } else { -1.0 })
}

/// Rows of the flow's input, and the length of each path.
fn inputs(lattice: &Lattice, pairs: &[(usize, usize)], root: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (points, weights) = (lattice.points(), lattice.weights());
    let (mut rows, mut lengths) = (Vec::new(), Vec::new());
    for &pair in pairs {
        let (range, direction) = nodes(lattice, pair);
        for (root, l) in root.chunks_exact(points.len()).zip(lattice.wavelengths()) {
            let length: f64 = range.clone().map(|q| weights[q] * root[q]).sum();
            lengths.push(length);
            for q in range.clone() {
                rows.extend([points[q], direction * length / root[q], WAVELENGTH_SCALE * l]);
            }
        }
    }
    (rows, lengths)
}

/// Integrals of `flow` over time, [pair, wavelength].
fn integrals(lattice: &Lattice, pairs: &[(usize, usize)], root: &[f64], flow: &[f64], lengths: &[f64]) -> Vec<f64> {
    let (weights, mut flow, mut lengths) = (lattice.weights(), flow.iter(), lengths.iter());
    let mut out = Vec::new();
    for &pair in pairs {
        let (range, _) = nodes(lattice, pair);
        for root in root.chunks_exact(lattice.points().len()) {
            let sum: f64 = range.clone().zip(&mut flow).map(|(q, f)| weights[q] * root[q] * f).sum();
            out.push(sum / lengths.next().expect("a length per path"));
        }
    }
    out
}

/// Differences between target and source, [pair, wavelength]; nothing is kept.
pub(crate) fn differences(
    lattice: &Lattice,
    metric: &MetricNetwork,
    flow: &Network,
    pairs: &[(usize, usize)],
) -> Vec<f64> {
    let root = lattice.root(metric);
    let (rows, lengths) = inputs(lattice, pairs, &root);
    integrals(lattice, pairs, &root, &flow.values(&rows), &lengths)
}

/// As [`differences`], keeping what [`backward`] needs.
pub(crate) fn forward(lattice: &Lattice, metric: &MetricNetwork, flow: &Network, pairs: &[(usize, usize)]) -> FlowPass {
    let pass = lattice.metric_pass(metric);
    let root: Vec<f64> = pass.g.iter().map(|g| g.sqrt()).collect();
    let (rows, length) = inputs(lattice, pairs, &root);
    let rate = rows.iter().skip(1).step_by(FLOW_INPUTS).copied().collect();
    let (values, tape) = flow.forward(1, rows);
    let differences = integrals(lattice, pairs, &root, &values, &length);
    FlowPass { metric: pass, root, rate, flow: values, tape, length, differences }
}

/// Adds the gradients of `sum adjoint * difference + to_length * length` to those of the metric and of the flow.
pub(crate) fn backward(
    lattice: &Lattice,
    (metric, flow): (&MetricNetwork, &Network),
    pairs: &[(usize, usize)],
    pass: &FlowPass,
    (adjoint, to_length): (&[f64], f64),
    (to_metric, to_flow): (&mut [f64], &mut [f64]),
) {
    let (weights, stride) = (lattice.weights(), lattice.points().len());
    let count = lattice.wavelengths().len();
    let mut to_root = vec![0.0; pass.root.len()];
    let mut to_values = Vec::with_capacity(pass.flow.len());
    for (p, &pair) in pairs.iter().enumerate() {
        let (range, _) = nodes(lattice, pair);
        for w in 0..count {
            let (at, root) = (p * count + w, &pass.root[w * stride..]);
            to_values.extend(range.clone().map(|q| adjoint[at] * weights[q] * root[q] / pass.length[at]));
        }
    }
    let mut to_inputs = vec![0.0; pass.flow.len() * FLOW_INPUTS];
    flow.backward(&pass.tape, &to_values, to_flow, Some(&mut to_inputs));
    let mut row = 0;
    for (p, &pair) in pairs.iter().enumerate() {
        let (range, _) = nodes(lattice, pair);
        for w in 0..count {
            let (at, root) = (p * count + w, &pass.root[w * stride..(w + 1) * stride]);
            let (length, out) = (pass.length[at], &mut to_root[w * stride..(w + 1) * stride]);
            let mut from_length = to_length - adjoint[at] * pass.differences[at] / length;
            for (k, q) in range.clone().enumerate() {
                // The velocity is the length over sqrt(g).
                let through_rate = to_inputs[(row + k) * FLOW_INPUTS + 1] * pass.rate[row + k];
                out[q] += adjoint[at] * weights[q] * pass.flow[row + k] / length - through_rate / root[q];
                from_length += through_rate / length;
            }
            range.clone().for_each(|q| out[q] += weights[q] * from_length);
            row += range.len();
        }
    }
    to_root.iter_mut().zip(&pass.root).for_each(|(a, f)| *a /= 2.0 * f);
    metric.backward(&pass.metric, &to_root, to_metric);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quadrature::gauss_legendre;
    use crate::trajectory::{Problem, trajectory};

    #[test]
    fn differences_are_integrals_of_the_flow_over_time() {
        let (metric, flow) = (MetricNetwork::stress(3), Network::xavier(FLOW_INPUTS, 4));
        let lattice = Lattice::new(&[-1.0, -0.2, 1.0], &[0.4], 16).unwrap();
        let found = differences(&lattice, &metric, &flow, &[(0, 2), (2, 0), (1, 2)]);
        for (found, (start, end)) in found.iter().zip([(-1.0, 1.0), (1.0, -1.0), (-0.2, 1.0)]) {
            let (times, weights): (Vec<f64>, Vec<f64>) =
                gauss_legendre(48).iter().map(|(x, w)| (0.5 * (x + 1.0), 0.5 * w)).unzip();
            let path = trajectory(&metric, Problem { start, end, wavelength: 0.4 }, &times).unwrap();
            let rows: Vec<f64> =
                path.c.iter().zip(&path.velocity).flat_map(|(c, v)| [*c, *v, WAVELENGTH_SCALE * 0.4]).collect();
            let exact: f64 = flow.values(&rows).iter().zip(&weights).map(|(f, w)| f * w).sum();
            assert!((found - exact).abs() < 1e-9, "{start} to {end}: {found} {exact}");
        }
    }
}
