//! Mixed precision: the metric's network in f32, everything after it in f64.

use crate::metric::{FLOOR, Metric, MetricJet, MetricNetwork, softplus};
use crate::network::{HIDDEN_1, HIDDEN_2};
use crate::vector::{multiply_f32, tanh_f32};

/// Points per block: its activations fit into the cache.
const BLOCK: usize = 256;

/// A metric whose values are computed in f32. Its derivatives are those of the exact metric, and so is its version.
///
/// Relative errors of path lengths are below 1e-6 on the stress metric, whose layers are scaled by 4. Integrals are sums in f64. It takes
/// part in no training.
#[derive(Debug, Clone)]
pub struct MixedPrecision<'a> {
    exact: &'a MetricNetwork,
    parameters: Vec<f32>,
}

impl<'a> MixedPrecision<'a> {
    /// Rounds the parameters of `metric`.
    pub fn new(metric: &'a MetricNetwork) -> Self {
        Self { exact: metric, parameters: metric.network().parameters().iter().map(|p| *p as f32).collect() }
    }

    /// Outputs of the network at up to [`BLOCK`] points.
    fn outputs(&self, points: &[(f64, f64)], y1: &mut [f32], y2: &mut [f32], out: &mut [f32]) {
        let (w1, rest) = self.parameters.split_at(2 * HIDDEN_1);
        let (b1, rest) = rest.split_at(HIDDEN_1);
        let (w2, rest) = rest.split_at(HIDDEN_1 * HIDDEN_2);
        let (b2, rest) = rest.split_at(HIDDEN_2);
        let (w3, b3) = rest.split_at(HIDDEN_2);
        for ((c, l), row) in points.iter().zip(y1.chunks_exact_mut(HIDDEN_1)) {
            let (c, l) = (*c as f32, *l as f32);
            for (j, y) in row.iter_mut().enumerate() {
                *y = b1[j] + c * w1[j] + l * w1[HIDDEN_1 + j];
            }
        }
        tanh_f32(y1);
        y2.chunks_exact_mut(HIDDEN_2).for_each(|row| row.copy_from_slice(b2));
        multiply_f32(y2, y1, w2, HIDDEN_1);
        tanh_f32(y2);
        out.fill(b3[0]);
        multiply_f32(out, y2, w3, HIDDEN_2);
    }
}

impl Metric for MixedPrecision<'_> {
    fn jets(&self, points: &[(f64, f64)]) -> Vec<MetricJet> {
        self.exact.jets(points)
    }

    fn values(&self, points: &[(f64, f64)]) -> Vec<f64> {
        let (mut y1, mut y2, mut out) = (vec![0.0; BLOCK * HIDDEN_1], vec![0.0; BLOCK * HIDDEN_2], vec![0.0; BLOCK]);
        let mut values = Vec::with_capacity(points.len());
        for block in points.chunks(BLOCK) {
            let n = block.len();
            self.outputs(block, &mut y1[..n * HIDDEN_1], &mut y2[..n * HIDDEN_2], &mut out[..n]);
            values.extend(out[..n].iter().map(|z| softplus(f64::from(*z)) + FLOOR));
        }
        values
    }

    fn version(&self) -> u128 {
        self.exact.version()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::closed::Lattice;

    #[test]
    fn lengths_in_mixed_precision_differ_by_less_than_a_millionth() {
        let wavelengths: Vec<f64> = (0..=60).map(|i| f64::from(i) / 30.0 - 1.0).collect();
        let lattice = Lattice::new(&[-1.0, -0.66, -0.33, 0.0, 0.33, 1.0], &wavelengths, 8).unwrap();
        for seed in 1..4 {
            let metric = MetricNetwork::stress(seed);
            let (exact, mixed) = (
                lattice.features(&metric, &lattice.all_pairs()),
                lattice.features(&MixedPrecision::new(&metric), &lattice.all_pairs()),
            );
            let worst = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| (x / y - 1.0).abs()).fold(0.0, f64::max);
            let length = worst(&mixed.displacement, &exact.displacement);
            let velocity = worst(&mixed.velocity, &exact.velocity);
            assert!(length < 1e-6 && velocity < 1e-5, "seed {seed}: {length:e} {velocity:e}");
            assert!(length > 1e-9, "the network was not evaluated in f32: {length:e}");
        }
    }

    /// Differences of values in f32 lose to rounding what they gain by a smaller step: derivatives are exact instead.
    #[test]
    fn christoffel_symbols_need_no_difference_step() {
        let metric = MetricNetwork::stress(2);
        let (mixed, points): (_, Vec<(f64, f64)>) =
            (MixedPrecision::new(&metric), (0..200).map(|i| (f64::from(i) / 100.0 - 1.0, 0.3)).collect());
        let exact: Vec<f64> = metric.jets(&points).iter().map(|jet| jet.gamma()).collect();
        let error = |gammas: &[f64]| gammas.iter().zip(&exact).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        let differences = |metric: &dyn Metric, h: f64| {
            let shifted = |h: f64| metric.values(&points.iter().map(|(c, l)| (c + h, *l)).collect::<Vec<_>>());
            let (down, at, up) = (shifted(-h), shifted(0.0), shifted(h));
            let gamma = |i: usize| (up[i] - down[i]) / (2.0 * h) / (2.0 * at[i]);
            error(&(0..points.len()).map(gamma).collect::<Vec<_>>())
        };
        let (small, tiny) = (differences(&mixed, 1e-4), differences(&mixed, 1e-6));
        assert!(small > 1e-5 && tiny > 10.0 * small, "f32: {small:e} {tiny:e}");
        let automatic: Vec<f64> = mixed.jets(&points).iter().map(|jet| jet.gamma()).collect();
        assert!(
            error(&automatic) < 1e-12 && differences(&metric, 1e-5) < 1e-8,
            "f64: {:e}",
            differences(&metric, 1e-5)
        );
    }
}
