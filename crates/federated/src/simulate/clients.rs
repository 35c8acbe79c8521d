//! Synthetic clients.

use chacha20::ChaCha20Rng;

use super::SimulationSettings;
use crate::model::{ClientId, Update};
use crate::random::{stream, unit};

/// Draws a standard normal number (Box, Muller).
pub(super) fn normal(rng: &mut ChaCha20Rng) -> f64 {
    let radius = (-2.0 * (1.0 - unit(rng)).ln()).sqrt();
    radius * (std::f64::consts::TAU * unit(rng)).cos()
}

/// Draws the absolute value of a normal number with mean 1.
pub(super) fn half_normal(rng: &mut ChaCha20Rng) -> f64 {
    normal(rng).abs() / std::f64::consts::FRAC_2_PI.sqrt()
}

/// Curvatures, optima and samples of all clients, and the sums that give the global loss.
pub(super) struct Population {
    curvatures: Vec<f32>,
    samples: Vec<u32>,
    /// Client by client, one value per parameter.
    optima: Vec<f32>,
    parameters: usize,
    /// Weighted mean of the curvature.
    curvature: f64,
    /// The global minimum.
    minimum: Vec<f64>,
}

impl Population {
    pub(super) fn new(settings: &SimulationSettings) -> Self {
        let (clients, parameters) = (settings.clients as usize, settings.parameters);
        let mut rng = stream(&settings.seed, "population", 0);
        let (mut curvatures, mut samples) = (Vec::with_capacity(clients), Vec::with_capacity(clients));
        let mut optima = Vec::with_capacity(clients * parameters);
        let (mut curvature, mut weighted, mut total) = (0.0, vec![0.0; parameters], 0.0);
        for _ in 0..clients {
            let (a, n) = (0.5 + unit(&mut rng) as f32, 10 + (unit(&mut rng) * 90.0) as u32);
            for weighted in &mut weighted {
                let optimum = (1.0 + settings.heterogeneity * normal(&mut rng)) as f32;
                *weighted += f64::from(n) * f64::from(a) * f64::from(optimum);
                optima.push(optimum);
            }
            curvature += f64::from(n) * f64::from(a);
            total += f64::from(n);
            curvatures.push(a);
            samples.push(n);
        }
        let minimum = weighted.iter().map(|sum| sum / curvature).collect();
        Self { curvatures, samples, optima, parameters, curvature: curvature / total, minimum }
    }

    /// The global loss above its minimum.
    pub(super) fn excess_loss(&self, model: &[f32]) -> f64 {
        let distances = model.iter().zip(&self.minimum).map(|(x, minimum)| (f64::from(*x) - minimum).powi(2));
        self.curvature / 2.0 * distances.sum::<f64>()
    }

    fn optimum(&self, client: usize) -> &[f32] {
        &self.optima[client * self.parameters..][..self.parameters]
    }

    /// The 10th, 50th and 90th percentile of the clients' own losses.
    pub(super) fn loss_percentiles(&self, model: &[f32]) -> [f64; 3] {
        let loss = |client: usize| {
            let distance = model.iter().zip(self.optimum(client)).map(|(x, t)| f64::from(x - t).powi(2)).sum::<f64>();
            f64::from(self.curvatures[client]) / 2.0 * distance
        };
        let mut losses: Vec<f64> = (0..self.curvatures.len()).map(loss).collect();
        losses.sort_by(f64::total_cmp);
        [1, 5, 9].map(|tenth| losses[(losses.len() - 1) * tenth / 10])
    }

    /// Trains locally: after s steps of rate r the distance to the optimum has shrunk by `(1 - r a)^s`.
    pub(super) fn train(
        &self,
        client: ClientId,
        version: u64,
        model: &[f32],
        settings: &SimulationSettings,
        rng: &mut ChaCha20Rng,
    ) -> Update {
        let index = client as usize;
        let (a, mu) = (f64::from(self.curvatures[index]), proximal_weight(settings));
        let shrunk = (1.0 - settings.local_rate * (a + mu)).clamp(-1.0, 1.0).powf(f64::from(settings.local_steps));
        let delta = model.iter().zip(self.optimum(index)).map(|(x, t)| {
            // The optimum of the local loss with the proximal term is (a t + mu x)/(a + mu).
            let distance = a * f64::from(t - x) / (a + mu);
            ((1.0 - shrunk) * distance + settings.gradient_noise * normal(rng)) as f32
        });
        let delta = delta.collect();
        Update { client, version, samples: u64::from(self.samples[index]), delta, control: None }
    }
}

const fn proximal_weight(settings: &SimulationSettings) -> f64 {
    if let crate::strategy::Strategy::FedProx { mu } = settings.strategy { mu } else { 0.0 }
}
