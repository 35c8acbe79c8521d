//! Differential privacy: clipping, noise, participation, accounting, and a budget that is enforced before each round.
//!
//! The unit of privacy is a client (or a sample, for `PrivateSum` over gradients). Every client takes part in a round independently with
//! probability q; the noisy sum is divided by the fixed expected number of participants; an empty round adds noise and is charged.

#[cfg(test)]
mod audit;
pub mod budget;
pub mod clipping;
pub mod discrete;
pub mod examples;
pub mod pld;
pub mod rdp;
pub mod sum;

use serde::{Deserialize, Serialize};

use crate::error::{InvalidInput, require};
use crate::strategy::Strategy;

/// One step of the Gaussian mechanism with Poisson sampling.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Mechanism {
    /// Probability that a client takes part, above 0 and at most 1.
    pub sampling_rate: f64,
    /// Standard deviation of the noise over the clipping norm.
    pub noise_multiplier: f64,
}

impl Mechanism {
    /// Checks the ranges.
    ///
    /// # Errors
    /// When a number is outside the range that the accountants and the sampler cover.
    pub fn validate(&self) -> Result<(), InvalidInput> {
        let (rate, noise) = (self.sampling_rate, self.noise_multiplier);
        require(rate > 0.0 && rate <= 1.0, "samplingRate", rate, "above 0, at most 1")?;
        require((0.1..=64.0).contains(&noise), "noiseMultiplier", noise, "0.1 to 64")
    }
}

/// How the participants of a round are chosen, as far as privacy depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sampling {
    /// Each client independently with a fixed probability.
    Poisson,
    /// A fixed number of clients, or whichever check in: charged without amplification by sampling.
    FixedSize,
    /// By priority or by a value that depends on private data.
    Prioritized,
}

/// What a run combines.
#[derive(Debug, Clone, Copy)]
pub struct Combination<'a> {
    /// The strategy.
    pub strategy: &'a Strategy,
    /// The choice of participants.
    pub sampling: Sampling,
    /// The mechanism that is charged per round; `None` without privacy.
    pub mechanism: Option<Mechanism>,
    /// Whether updates are aggregated under masks.
    pub secure_aggregation: bool,
    /// Whether training stops on a loss that is computed from private data without noise.
    pub stops_on_private_loss: bool,
}

impl Combination<'_> {
    /// Refuses combinations that the accountants do not cover, or that need single updates where the server may see sums only.
    ///
    /// # Errors
    /// With the reason.
    pub fn validate(&self) -> Result<(), InvalidInput> {
        let single = self.strategy.needs_single_updates();
        let refuse = |refused: bool, field, value: &str, allowed: &str| require(!refused, field, value, allowed);
        refuse(
            single && self.secure_aggregation,
            "secureAggregation",
            "with a robust strategy",
            "without: a robust strategy has to see single updates, which secure aggregation hides",
        )?;
        refuse(
            self.strategy.has_control() && self.secure_aggregation,
            "secureAggregation",
            "with Scaffold",
            "without: the control variate of a client follows from its single update",
        )?;
        let Some(mechanism) = self.mechanism else { return Ok(()) };
        mechanism.validate()?;
        refuse(single, "privacy", "with a robust strategy", "a mean: medians and Krum are outside the accountants")?;
        refuse(
            self.strategy.has_control(),
            "privacy",
            "with Scaffold",
            "strategies without control variates: they would be a second release",
        )?;
        refuse(
            self.sampling == Sampling::Prioritized,
            "privacy",
            "with prioritized sampling",
            "Poisson sampling, or a fixed size with samplingRate 1",
        )?;
        let amplified = mechanism.sampling_rate < 1.0;
        refuse(
            amplified && self.sampling != Sampling::Poisson,
            "samplingRate",
            "below 1 without Poisson sampling",
            "1: the choice of a fixed number of clients is outside the accountants",
        )?;
        refuse(
            amplified && matches!(self.strategy, Strategy::FedBuff { .. }),
            "samplingRate",
            "below 1 with FedBuff",
            "1: clients join a buffer when they check in, not independently",
        )?;
        refuse(self.stops_on_private_loss, "stop", "on a private loss", "a number of rounds, or a loss on public data")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// q, s, steps, delta, RDP with all orders, RDP with integer orders, PLD of Google's dp-accounting (issue 39).
    const TABLE: [(f64, f64, u64, f64, f64, f64, f64); 7] = [
        (0.01, 1.0, 1000, 1e-5, 2.101365, 2.107753, 1.828244),
        (0.01, 0.7, 5000, 1e-5, 10.804941, 10.904128, 9.769758),
        (0.05, 1.1, 2000, 1e-6, 16.252246, 16.421600, 15.179406),
        (256.0 / 60000.0, 1.1, 14062, 1e-5, 2.596556, 2.596981, 2.381686),
        (1.0, 8.0, 100, 1e-5, 6.122758, 6.158978, 5.679587),
        (0.1, 2.0, 100, 1e-6, 2.914173, 2.915593, 2.675036),
        (0.001, 0.5, 10000, 1e-7, 8.710617, 8.720952, 7.444505),
    ];

    #[test]
    fn renyi_accountant_reproduces_the_reference_values() {
        for (q, s, steps, delta, all, integers, _) in TABLE {
            let composition = [(Mechanism { sampling_rate: q, noise_multiplier: s }, steps)];
            let (epsilon, order) = rdp::epsilon(&composition, delta, rdp::orders());
            assert!((epsilon - all).abs() < 1e-6, "q {q}, s {s}: {epsilon} at {order}, expected {all}");
            let whole = rdp::epsilon(&composition, delta, (2..=63).map(f64::from)).0;
            assert!((whole - integers).abs() < 1e-6, "q {q}, s {s}: {whole}, expected {integers}");
        }
    }

    #[test]
    fn loss_distribution_lies_between_the_reference_and_a_hundredth_above() {
        for (q, s, steps, delta, _, _, google) in TABLE {
            let epsilon = pld::epsilon(&[(Mechanism { sampling_rate: q, noise_multiplier: s }, steps)], delta);
            assert!((google..=google + 0.01).contains(&epsilon), "q {q}, s {s}: {epsilon}, reference {google}");
        }
    }

    #[test]
    fn combinations_outside_the_accountants_are_refused() {
        let mechanism = Mechanism { sampling_rate: 0.1, noise_multiplier: 1.0 };
        let base = Combination {
            strategy: &Strategy::FedAvg,
            sampling: Sampling::Poisson,
            mechanism: Some(mechanism),
            secure_aggregation: true,
            stops_on_private_loss: false,
        };
        assert_eq!(base.validate(), Ok(()));
        let field = |combination: Combination<'_>| combination.validate().unwrap_err().field;
        let scaffold = Strategy::Scaffold { server_rate: 1.0, population: 10 };
        let buffered = Strategy::FedBuff { server_rate: 1.0 };
        assert_eq!(field(Combination { strategy: &Strategy::Median, mechanism: None, ..base }), "secureAggregation");
        assert_eq!(field(Combination { strategy: &Strategy::Median, secure_aggregation: false, ..base }), "privacy");
        assert_eq!(field(Combination { strategy: &scaffold, secure_aggregation: false, ..base }), "privacy");
        assert_eq!(field(Combination { strategy: &scaffold, mechanism: None, ..base }), "secureAggregation");
        assert_eq!(field(Combination { strategy: &buffered, ..base }), "samplingRate");
        assert_eq!(field(Combination { sampling: Sampling::FixedSize, ..base }), "samplingRate");
        assert_eq!(field(Combination { sampling: Sampling::Prioritized, ..base }), "privacy");
        assert_eq!(field(Combination { stops_on_private_loss: true, ..base }), "stop");
        for sampling_rate in [0.0, 1.1, f64::NAN] {
            let mechanism = Some(Mechanism { sampling_rate, ..mechanism });
            assert_eq!(field(Combination { mechanism, ..base }), "samplingRate");
        }
        for noise_multiplier in [0.09, 65.0, f64::NAN] {
            let mechanism = Some(Mechanism { noise_multiplier, ..mechanism });
            assert_eq!(field(Combination { mechanism, ..base }), "noiseMultiplier");
        }
        let whole = Mechanism { sampling_rate: 1.0, ..mechanism };
        let buffer = Combination { strategy: &buffered, sampling: Sampling::FixedSize, mechanism: Some(whole), ..base };
        assert_eq!(buffer.validate(), Ok(()));
    }
}
