//! One (metric, decoder) pair: predictions, losses and their gradients.

use crate::closed::{FeatureAdjoint, Features, Lattice};
use crate::engine::{GeodesicBvp, path_features};
use crate::error::Error;
use crate::flow::{self, FLOW_INPUTS};
use crate::metric::MetricNetwork;
use crate::network::Network;
use crate::random::Stream;
use crate::settings::{Decoder, Settings};

/// Inputs of the decoder: c_final, c_mean, path length, largest velocity, l.
pub const DECODER_INPUTS: usize = 5;
/// Points (c, l) per step at which the metric's regularisers are evaluated.
const REGULARISER_POINTS: usize = 64;
/// Factor of l in the decoder's input: bands are narrow in [-1, 1], and initial weights of 0.2 are too small for them.
pub(crate) const WAVELENGTH_SCALE: f64 = 6.0;
/// Where the penalty on g begins.
const G_RANGE: (f64, f64) = (0.01, 100.0);

/// A metric and its decoder.
///
/// The decoder predicts the mean slope of the absorbance along the path: the difference between target and source is
/// `displacement * decoder(...)`. It vanishes with the path, and a constant decoder is linear extrapolation in s. A decoder with 3 inputs
/// is a flow: the difference is its integral over time along the path.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// The metric.
    pub metric: MetricNetwork,
    /// The decoder, 5 inputs, or 3 for a flow.
    pub decoder: Network,
}

/// The terms of the loss of one step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Loss {
    /// Mean squared error of the standardised differences.
    pub reconstruction: f64,
    /// Mean of (d2g/dc2)^2, before its weight.
    pub smoothness: f64,
    /// Mean squared distance of g from its range, before its weight.
    pub range: f64,
    /// Mean path length, before its weight.
    pub length: f64,
}

impl Loss {
    /// The weighted sum.
    pub fn total(&self, settings: &Settings) -> f64 {
        self.reconstruction
            + settings.smoothness * self.smoothness
            + settings.range * self.range
            + settings.length * self.length
    }
}

impl Model {
    /// Xavier initial parameters, as a function of `seed` alone.
    pub fn xavier(seed: u64, decoder: Decoder) -> Self {
        let inputs = match decoder {
            Decoder::Slope => DECODER_INPUTS,
            Decoder::Flow => FLOW_INPUTS,
        };
        Self { metric: MetricNetwork::xavier(seed), decoder: Network::xavier(inputs, !seed) }
    }

    pub(crate) fn is_flow(&self) -> bool {
        self.decoder.inputs() == FLOW_INPUTS
    }

    /// Rows of the decoder's input, [pair, wavelength].
    pub(crate) fn decoder_inputs(lattice: &Lattice, pairs: &[(usize, usize)], features: &Features) -> Vec<f64> {
        let mut rows = Vec::with_capacity(features.mean.len() * DECODER_INPUTS);
        for (p, &(_, target)) in pairs.iter().enumerate() {
            for (w, &l) in lattice.wavelengths().iter().enumerate() {
                let at = p * lattice.wavelengths().len() + w;
                let length = features.displacement[at].abs();
                rows.extend([
                    lattice.breaks()[target],
                    features.mean[at],
                    length,
                    features.velocity[at],
                    WAVELENGTH_SCALE * l,
                ]);
            }
        }
        rows
    }

    /// Predicted standardised differences target - source, [pair, wavelength].
    pub fn differences(&self, lattice: &Lattice, pairs: &[(usize, usize)]) -> Vec<f64> {
        if self.is_flow() {
            return flow::differences(lattice, &self.metric, &self.decoder, pairs);
        }
        self.decoded(lattice, pairs, &lattice.features(&self.metric, pairs))
    }

    /// What [`differences`](Self::differences) predicts with geodesics from `engine`; not for a flow.
    ///
    /// # Errors
    /// [`Error::NotSolved`] for a geodesic that the engine does not find.
    pub(crate) fn differences_by(
        &self,
        engine: &dyn GeodesicBvp,
        lattice: &Lattice,
        pairs: &[(usize, usize)],
    ) -> Result<Vec<f64>, Error> {
        let features = path_features(engine, &self.metric, lattice, pairs)?;
        Ok(self.decoded(lattice, pairs, &features))
    }

    fn decoded(&self, lattice: &Lattice, pairs: &[(usize, usize)], features: &Features) -> Vec<f64> {
        let mut out = self.decoder.values(&Self::decoder_inputs(lattice, pairs, features));
        out.iter_mut().zip(&features.displacement).for_each(|(o, k)| *o *= k);
        out
    }

    /// Loss against standardised differences `targets` [pair, wavelength], and its gradient with respect to the
    /// metric's and the decoder's parameters.
    ///
    /// The regularisers are evaluated at random points, a function of `draws`.
    ///
    /// # Errors
    /// [`Error::Length`] if `targets` does not fit the lattice and the pairs.
    pub fn gradient(
        &self,
        lattice: &Lattice,
        pairs: &[(usize, usize)],
        targets: &[f64],
        settings: &Settings,
        draws: u64,
    ) -> Result<(Loss, Vec<f64>, Vec<f64>), Error> {
        let expected = pairs.len() * lattice.wavelengths().len();
        if targets.len() != expected {
            return Err(Error::Length { field: "targets", actual: targets.len(), expected });
        }
        let mut to_metric = vec![0.0; self.metric.network().parameters().len()];
        let mut to_decoder = vec![0.0; self.decoder.parameters().len()];
        let mut loss = self.regularisers(settings, draws, &mut to_metric);
        if self.is_flow() {
            let pass = flow::forward(lattice, &self.metric, &self.decoder, pairs);
            let n = expected as f64;
            let errors = pass.differences.iter().zip(targets).map(|(d, t)| d - t);
            loss.reconstruction = errors.clone().map(|error| error * error / n).sum();
            loss.length = pass.length.iter().sum::<f64>() / n;
            let adjoint: Vec<f64> = errors.map(|error| 2.0 * error / n).collect();
            let (networks, gradients) = ((&self.metric, &self.decoder), (&mut to_metric[..], &mut to_decoder[..]));
            flow::backward(lattice, networks, pairs, &pass, (&adjoint, settings.length / n), gradients);
            return Ok((loss, to_metric, to_decoder));
        }

        let pass = lattice.forward(&self.metric, pairs);
        let (slope, tape) = self.decoder.forward(1, Self::decoder_inputs(lattice, pairs, &pass.features));
        let errors = SlopeErrors::new(&pass.features.displacement, &slope, targets, &mut loss);
        let mut to_inputs = vec![0.0; expected * DECODER_INPUTS];
        self.decoder.backward(&tape, &errors.to_slope, &mut to_decoder, Some(&mut to_inputs));
        let adjoint = errors.adjoint(&pass.features.displacement, &to_inputs, settings);
        lattice.backward(&self.metric, &pass, &adjoint, &mut to_metric);
        Ok((loss, to_metric, to_decoder))
    }

    /// Smoothness and range of the metric at random points of [-1, 1]^2; adds their weighted gradient.
    pub(crate) fn regularisers(&self, settings: &Settings, draws: u64, gradient: &mut [f64]) -> Loss {
        let stream = Stream::new(draws, 1);
        let inputs = (0..2 * REGULARISER_POINTS as u64).map(|i| 2.0 * stream.uniform(i) - 1.0).collect();
        let pass = self.metric.forward(3, inputs);
        let n = REGULARISER_POINTS as f64;
        let mut loss = Loss::default();
        let mut adjoint = vec![0.0; pass.g.len()];
        for (g, a) in pass.g.chunks_exact(3).zip(adjoint.chunks_exact_mut(3)) {
            let outside = (g[0] - G_RANGE.1).max(0.0) + (g[0] - G_RANGE.0).min(0.0);
            loss.smoothness += g[2] * g[2] / n;
            loss.range += outside * outside / n;
            a[0] = 2.0 * settings.range * outside / n;
            a[2] = 2.0 * settings.smoothness * g[2] / n;
        }
        self.metric.backward(&pass, &adjoint, gradient);
        loss
    }
}

/// Gradients of the mean squared error of `displacement * slope`, each [pair, wavelength].
pub(crate) struct SlopeErrors {
    /// With respect to the decoder's output.
    pub(crate) to_slope: Vec<f64>,
    to_displacement: Vec<f64>,
}

impl SlopeErrors {
    /// Adds reconstruction and length to `loss`.
    pub(crate) fn new(displacement: &[f64], slope: &[f64], targets: &[f64], loss: &mut Loss) -> Self {
        let n = targets.len() as f64;
        let mut own = Self { to_slope: vec![0.0; targets.len()], to_displacement: vec![0.0; targets.len()] };
        for i in 0..targets.len() {
            let error = displacement[i] * slope[i] - targets[i];
            loss.reconstruction += error * error / n;
            loss.length += displacement[i].abs() / n;
            own.to_slope[i] = 2.0 * error / n * displacement[i];
            own.to_displacement[i] = 2.0 * error / n * slope[i];
        }
        own
    }

    /// Gradients with respect to the features, given those with respect to the decoder's inputs.
    pub(crate) fn adjoint(&self, displacement: &[f64], to_inputs: &[f64], settings: &Settings) -> FeatureAdjoint {
        let n = displacement.len() as f64;
        let column = |c: usize| to_inputs.iter().skip(c).step_by(DECODER_INPUTS).copied();
        let length = column(2)
            .zip(displacement.iter().zip(&self.to_displacement))
            .map(|(a, (k, d))| a + d * k.signum() + settings.length / n)
            .collect();
        FeatureAdjoint { length, mean: column(1).collect(), velocity: column(3).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_of_the_whole_loss_equal_central_differences() {
        for inputs in [DECODER_INPUTS, FLOW_INPUTS] {
            check_gradient(&Network::xavier(inputs, 4));
        }
    }

    fn check_gradient(decoder: &Network) {
        let lattice = Lattice::new(&[-1.0, -0.2, 1.0], &[-0.5, 0.0, 0.5], 8).unwrap().soft_minimum(1e-3).unwrap();
        let pairs = lattice.all_pairs();
        let targets: Vec<f64> = (0..18).map(|i| Stream::new(5, 5).normal(i)).collect();
        let settings = Settings { length: 0.3, smoothness: 2.0, ..Settings::default() };
        let mut model = Model { metric: MetricNetwork::stress(3), decoder: decoder.clone() };
        let (loss, to_metric, to_decoder) = model.gradient(&lattice, &pairs, &targets, &settings, 9).unwrap();
        assert!(loss.smoothness > 0.0 && to_metric.iter().map(|g| g * g).sum::<f64>() > 1e-6);
        let total =
            |model: &Model| model.gradient(&lattice, &pairs, &targets, &settings, 9).unwrap().0.total(&settings);
        for i in (0..to_metric.len()).step_by(401) {
            let mut shifted = |h: f64| {
                model.metric.parameters_mut()[i] += h;
                let value = total(&model);
                model.metric.parameters_mut()[i] -= h;
                value
            };
            let difference = (shifted(1e-6) - shifted(-1e-6)) / 2e-6;
            assert!((difference - to_metric[i]).abs() < 1e-6, "metric {i}: {difference} {}", to_metric[i]);
        }
        for i in (0..to_decoder.len()).step_by(401) {
            let mut shifted = |h: f64| {
                model.decoder.parameters_mut()[i] += h;
                let value = total(&model);
                model.decoder.parameters_mut()[i] -= h;
                value
            };
            let difference = (shifted(1e-6) - shifted(-1e-6)) / 2e-6;
            assert!((difference - to_decoder[i]).abs() < 1e-6, "decoder {i}: {difference} {}", to_decoder[i]);
        }
    }

    #[test]
    fn smoothness_is_positive_and_changes_with_the_weights() {
        let smoothness = |model: &Model| {
            let mut gradient = vec![0.0; Network::parameter_count(2)];
            let loss = model.regularisers(&Settings::default(), 1, &mut gradient);
            (loss.smoothness, gradient.iter().map(|g| g * g).sum::<f64>())
        };
        let mut model = Model { metric: MetricNetwork::stress(3), decoder: Network::xavier(DECODER_INPUTS, 4) };
        let first = smoothness(&model);
        model.metric.parameters_mut()[10] += 0.1;
        let second = smoothness(&model);
        assert!(first.0 > 0.0 && first.1 > 0.0 && first.0 != second.0);
    }
}
