//! Metrics `ds^2 = g(c, l) dc^2` of one dimension, with the wavelength l as a parameter.

use xxhash_rust::xxh3::Xxh3;

use crate::network::{Network, Tape};

/// Added to the softplus of the network, so that g >= 0.1 and a geodesic exists for every pair.
pub const FLOOR: f64 = 0.1;

/// g and its derivatives with respect to c at one point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MetricJet {
    /// g, positive.
    pub g: f64,
    /// dg/dc.
    pub first: f64,
    /// d2g/dc2.
    pub second: f64,
}

impl MetricJet {
    /// The Christoffel symbol `Gamma = g_c / (2 g)`.
    pub fn gamma(self) -> f64 {
        self.first / (2.0 * self.g)
    }

    /// dGamma/dc.
    pub fn gamma_derivative(self) -> f64 {
        (self.second * self.g - self.first * self.first) / (2.0 * self.g * self.g)
    }
}

/// A positive function g(c, l).
pub trait Metric {
    /// Jets at points (c, l).
    fn jets(&self, points: &[(f64, f64)]) -> Vec<MetricJet>;

    /// g at points (c, l).
    fn values(&self, points: &[(f64, f64)]) -> Vec<f64> {
        self.jets(points).into_iter().map(|jet| jet.g).collect()
    }

    /// Identity of the function: grids and solutions computed for another version are stale.
    fn version(&self) -> u128;
}

/// `g = softplus(network(c, l)) + 0.1`, 8,641 parameters.
#[derive(Debug, Clone, PartialEq)]
pub struct MetricNetwork {
    network: Network,
}

/// A forward pass of a [`MetricNetwork`], for its backward pass.
#[derive(Debug)]
pub(crate) struct MetricPass {
    tape: Tape,
    order: usize,
    /// Network outputs [samples, order].
    z: Vec<f64>,
    /// g and its derivatives [samples, order].
    pub(crate) g: Vec<f64>,
}

/// `max(z, 0) + ln(1 + exp(-|z|))`.
pub(crate) fn softplus(z: f64) -> f64 {
    z.max(0.0) + (-z.abs()).exp().ln_1p()
}

fn sigmoid(z: f64) -> f64 {
    1.0 / (1.0 + (-z).exp())
}

/// Flattens points to rows of a network's input.
fn rows(points: &[(f64, f64)]) -> Vec<f64> {
    points.iter().flat_map(|&(c, l)| [c, l]).collect()
}

impl MetricNetwork {
    /// Xavier initial parameters, as a function of `seed` alone.
    pub fn xavier(seed: u64) -> Self {
        Self { network: Network::xavier(2, seed) }
    }

    /// The metric of a network with 2 inputs.
    ///
    /// # Panics
    /// If the network has another number of inputs.
    pub fn new(network: Network) -> Self {
        assert_eq!(network.inputs(), 2, "a metric network has the inputs c and l");
        Self { network }
    }

    /// The stress metric: Xavier with the first and the last layer multiplied by 4.
    pub fn stress(seed: u64) -> Self {
        let mut network = Network::xavier(2, seed);
        network.scale_outer_layers(4.0);
        Self { network }
    }

    /// Its network.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Its parameters, to be changed in place.
    pub fn parameters_mut(&mut self) -> &mut [f64] {
        self.network.parameters_mut()
    }

    /// Jets of the given order at `inputs`, rows of (c, l), and what the backward pass needs.
    pub(crate) fn forward(&self, order: usize, inputs: Vec<f64>) -> MetricPass {
        let (z, tape) = self.network.forward(order, inputs);
        let mut g = vec![0.0; z.len()];
        for (g, z) in g.chunks_exact_mut(order).zip(z.chunks_exact(order)) {
            let s = sigmoid(z[0]);
            g[0] = softplus(z[0]) + FLOOR;
            if order > 1 {
                g[1] = s * z[1];
            }
            if order > 2 {
                g[2] = s * z[2] + s * (1.0 - s) * z[1] * z[1];
            }
        }
        MetricPass { tape, order, z, g }
    }

    /// Adds the gradient of `sum adjoint[r] * g[r]` to `gradient`; `adjoint` is [samples, order].
    pub(crate) fn backward(&self, pass: &MetricPass, adjoint: &[f64], gradient: &mut [f64]) {
        let order = pass.order;
        let mut to_network = vec![0.0; adjoint.len()];
        for ((out, a), z) in
            to_network.chunks_exact_mut(order).zip(adjoint.chunks_exact(order)).zip(pass.z.chunks_exact(order))
        {
            let s = sigmoid(z[0]);
            let first = s * (1.0 - s);
            out[0] = a[0] * s;
            if order > 1 {
                out[0] += a[1] * first * z[1];
                out[1] = a[1] * s;
            }
            if order > 2 {
                let second = first * (1.0 - 2.0 * s);
                out[0] += a[2] * (first * z[2] + second * z[1] * z[1]);
                out[1] += a[2] * 2.0 * first * z[1];
                out[2] = a[2] * s;
            }
        }
        self.network.backward(&pass.tape, &to_network, gradient, None);
    }
}

impl Metric for MetricNetwork {
    fn jets(&self, points: &[(f64, f64)]) -> Vec<MetricJet> {
        let pass = self.forward(3, rows(points));
        pass.g.chunks_exact(3).map(|g| MetricJet { g: g[0], first: g[1], second: g[2] }).collect()
    }

    fn values(&self, points: &[(f64, f64)]) -> Vec<f64> {
        let mut z = self.network.values(&rows(points));
        z.iter_mut().for_each(|z| *z = softplus(*z) + FLOOR);
        z
    }

    fn version(&self) -> u128 {
        let mut hash = Xxh3::new();
        for p in self.network.parameters() {
            hash.update(&p.to_bits().to_le_bytes());
        }
        hash.digest128()
    }
}

/// The analytic test metric `sqrt(g) = 1 + depth * c * cos(pi l)`, with known closed form.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinearRootMetric {
    /// In [0, 1): the largest slope of sqrt(g). The reference uses 0.8.
    pub depth: f64,
}

impl Metric for LinearRootMetric {
    fn jets(&self, points: &[(f64, f64)]) -> Vec<MetricJet> {
        let jet = |&(c, l): &(f64, f64)| {
            let a = self.depth * (std::f64::consts::PI * l).cos();
            let root = 1.0 + a * c;
            MetricJet { g: root * root, first: 2.0 * a * root, second: 2.0 * a * a }
        };
        points.iter().map(jet).collect()
    }

    fn version(&self) -> u128 {
        u128::from(self.depth.to_bits())
    }
}
