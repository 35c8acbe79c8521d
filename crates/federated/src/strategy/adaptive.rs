//! Adaptive server optimizers (Reddi et al. 2021).

use serde::{Deserialize, Serialize};

use crate::error::{InvalidInput, require};

/// Settings of `FedAdam`, `FedYogi` and `FedAdagrad`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AdaptiveSettings {
    /// Server rate, above 0.
    pub eta: f64,
    /// Decay of the first moment, 0 to below 1.
    pub beta1: f64,
    /// Decay of the second moment, 0 to below 1; not used by Adagrad.
    pub beta2: f64,
    /// Added to the root of the second moment, above 0.
    pub tau: f64,
}

impl Default for AdaptiveSettings {
    fn default() -> Self {
        Self { eta: 0.1, beta1: 0.9, beta2: 0.99, tau: 1e-3 }
    }
}

impl AdaptiveSettings {
    pub(super) fn validate(&self) -> Result<(), InvalidInput> {
        require(self.eta > 0.0 && self.eta.is_finite(), "eta", self.eta, "above 0")?;
        require((0.0..1.0).contains(&self.beta1), "beta1", self.beta1, "0 to below 1")?;
        require((0.0..1.0).contains(&self.beta2), "beta2", self.beta2, "0 to below 1")?;
        require(self.tau > 0.0 && self.tau.is_finite(), "tau", self.tau, "above 0")
    }

    /// The rate of round `version`, with the correction of the moments' bias.
    fn rate(&self, version: u64) -> f64 {
        let rounds = (version + 1) as f64;
        self.eta * (1.0 - self.beta2.powf(rounds)).sqrt() / (1.0 - self.beta1.powf(rounds))
    }
}

/// First and second moments of the mean delta.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Moments {
    first: Vec<f64>,
    second: Vec<f64>,
}

impl Moments {
    pub(super) fn new(parameters: usize) -> Self {
        Self { first: vec![0.0; parameters], second: vec![0.0; parameters] }
    }

    pub(super) fn adam(&mut self, settings: &AdaptiveSettings, version: u64, delta: &[f64]) -> Vec<f64> {
        let beta2 = settings.beta2;
        self.step(settings, settings.rate(version), delta, |v, d| beta2 * v + (1.0 - beta2) * d * d)
    }

    pub(super) fn yogi(&mut self, settings: &AdaptiveSettings, version: u64, delta: &[f64]) -> Vec<f64> {
        let beta2 = settings.beta2;
        // The sign of zero is zero here.
        let sign = |value: f64| if value == 0.0 { 0.0 } else { value.signum() };
        self.step(settings, settings.rate(version), delta, |v, d| v - (1.0 - beta2) * d * d * sign(v - d * d))
    }

    pub(super) fn adagrad(&mut self, settings: &AdaptiveSettings, delta: &[f64]) -> Vec<f64> {
        self.step(settings, settings.eta, delta, |v, d| v + d * d)
    }

    fn step(
        &mut self,
        settings: &AdaptiveSettings,
        rate: f64,
        delta: &[f64],
        second: impl Fn(f64, f64) -> f64,
    ) -> Vec<f64> {
        let moments = self.first.iter_mut().zip(&mut self.second);
        let moved = moments.zip(delta).map(|((m, v), delta)| {
            *m = settings.beta1 * *m + (1.0 - settings.beta1) * delta;
            *v = second(*v, *delta);
            rate * *m / (v.sqrt() + settings.tau)
        });
        moved.collect()
    }
}
