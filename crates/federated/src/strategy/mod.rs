//! How the server turns the updates of a round into the next model (reference: issue 39; McMahan 2017, Reddi 2021, Karimireddy 2020,
//! Nguyen 2022, Yin 2018, Blanchard 2017).
//!
//! The server model always moves by an aggregate of deltas; it is never replaced by one. All updates are checked before the first is used,
//! and they are added in the order of the clients' numbers, in f64: the result does not depend on the order of arrival.

mod adaptive;
mod blocks;
pub mod local;
mod robust;
#[cfg(test)]
mod toys;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

pub use self::adaptive::AdaptiveSettings;
use self::adaptive::Moments;
pub use self::blocks::{BlockAggregator, BlockSum, UpdateHead};
use crate::error::{InvalidInput, require};
use crate::model::{ClientId, Update, check_vector};
use crate::privacy::clipping::AdaptiveClip;

/// Updates staler than this are dropped, and the client downloads the model again.
pub const MAX_STALENESS: u64 = 20;

/// The rule by which updates are aggregated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Strategy {
    /// Mean delta, weighted by samples.
    FedAvg,
    /// As `FedAvg`; clients add the proximal term (`local::proximal_gradient`).
    FedProx {
        /// Weight of the proximal term, above 0; 0.001 to 1 is usual.
        mu: f64,
    },
    /// Adam on the mean delta.
    FedAdam(AdaptiveSettings),
    /// Yogi on the mean delta.
    FedYogi(AdaptiveSettings),
    /// Adagrad on the mean delta.
    FedAdagrad(AdaptiveSettings),
    /// Control variates against client drift; clients take `local::Scaffold` steps.
    Scaffold {
        /// Server rate, 1 by default.
        server_rate: f64,
        /// Number of clients of the run.
        population: u64,
    },
    /// Mean of deltas weighted by `1/sqrt(1 + staleness)`, over a buffer.
    FedBuff {
        /// Server rate.
        server_rate: f64,
    },
    /// Median per coordinate.
    Median,
    /// Mean per coordinate without the `floor(beta n)` smallest and largest values.
    TrimmedMean {
        /// Share cut on each side, from 0 to below 0.5.
        beta: f64,
    },
    /// Mean of the `keep` updates that lie closest to their neighbours.
    Krum {
        /// Hostile clients that are tolerated: f of n >= 2 f + 3.
        byzantine: usize,
        /// Updates that are kept; 1 is Krum, more is multi-Krum.
        keep: usize,
    },
}

impl Strategy {
    /// Says whether the server has to see single updates: not possible with secure aggregation.
    #[must_use]
    pub const fn needs_single_updates(&self) -> bool {
        matches!(self, Self::Median | Self::TrimmedMean { .. } | Self::Krum { .. })
    }

    /// Says whether updates carry a change of the control variate.
    #[must_use]
    pub const fn has_control(&self) -> bool {
        matches!(self, Self::Scaffold { .. })
    }

    /// Says whether the server remembers two moments per parameter.
    #[must_use]
    pub const fn has_moments(&self) -> bool {
        matches!(self, Self::FedAdam(_) | Self::FedYogi(_) | Self::FedAdagrad(_))
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// When a number is out of its range.
    pub fn validate(&self) -> Result<(), InvalidInput> {
        let positive = |field, value: f64| require(value > 0.0 && value.is_finite(), field, value, "above 0");
        match *self {
            Self::FedAvg | Self::Median => Ok(()),
            Self::FedProx { mu } => positive("mu", mu),
            Self::FedAdam(settings) | Self::FedYogi(settings) | Self::FedAdagrad(settings) => settings.validate(),
            Self::Scaffold { server_rate, population } => {
                require(population > 0, "population", population, "at least 1")?;
                positive("serverRate", server_rate)
            }
            Self::FedBuff { server_rate } => positive("serverRate", server_rate),
            Self::TrimmedMean { beta } => require((0.0..0.5).contains(&beta), "beta", beta, "0 to below 0.5"),
            Self::Krum { keep, .. } => require(keep > 0, "keep", keep, "at least 1"),
        }
    }
}

/// The server's model and what its strategy remembers between rounds. Serializable: it is part of the checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Aggregator {
    strategy: Strategy,
    model: Vec<f32>,
    version: u64,
    moments: Option<Moments>,
    control: Vec<f64>,
    /// Control variates of the clients; those of clients that never took part are zeros.
    client_controls: BTreeMap<ClientId, Vec<f32>>,
    /// Clipping norm that follows the updates; it belongs to the version, so that a repeated aggregation clips the same.
    adaptive_clip: Option<AdaptiveClip>,
}

impl Aggregator {
    /// Creates version 0 from the initial shared parameters.
    ///
    /// # Errors
    /// When the settings are invalid or a parameter is not finite.
    pub fn new(strategy: Strategy, model: Vec<f32>) -> Result<Self, InvalidInput> {
        strategy.validate()?;
        require(!model.is_empty(), "model", "0 values", "at least 1 value")?;
        check_vector("model", &model, model.len())?;
        let control = if strategy.has_control() { vec![0.0; model.len()] } else { Vec::new() };
        let moments = strategy.has_moments().then(|| Moments::new(model.len()));
        let client_controls = BTreeMap::new();
        Ok(Self { strategy, model, version: 0, moments, control, client_controls, adaptive_clip: None })
    }

    /// Lets the clipping norm follow the updates.
    #[must_use]
    pub const fn with_adaptive_clip(mut self, clip: AdaptiveClip) -> Self {
        self.adaptive_clip = Some(clip);
        self
    }

    /// The clipping norm of the next aggregation, if it follows the updates.
    #[must_use]
    pub const fn adaptive_clip(&self) -> Option<&AdaptiveClip> {
        self.adaptive_clip.as_ref()
    }

    /// Moves the clipping norm after a release.
    pub fn advance_clip(&mut self, noisy_share_sum: f64) {
        if let Some(clip) = &mut self.adaptive_clip {
            clip.advance(noisy_share_sum);
        }
    }

    /// The shared parameters.
    #[must_use]
    pub fn model(&self) -> &[f32] {
        &self.model
    }

    /// The number of aggregations so far.
    #[must_use]
    pub const fn version(&self) -> u64 {
        self.version
    }

    /// The strategy.
    #[must_use]
    pub const fn strategy(&self) -> &Strategy {
        &self.strategy
    }

    /// The server's control variate; empty without SCAFFOLD.
    #[must_use]
    pub fn control(&self) -> &[f64] {
        &self.control
    }

    /// SCAFFOLD: the server's control variate minus that of a client, which each local step adds to its gradient.
    #[must_use]
    pub fn correction(&self, client: ClientId) -> Vec<f32> {
        let own = self.client_controls.get(&client);
        let own = |place: usize| own.map_or(0.0, |own| f64::from(own[place]));
        self.control.iter().enumerate().map(|(place, server)| (server - own(place)) as f32).collect()
    }

    /// SCAFFOLD: the change of a client's control variate, `(x - y)/(K eta) - c`, by its update `y - x`. `rate_sum` is `K eta`, the sum of
    /// its local step sizes.
    #[must_use]
    pub fn control_change(&self, delta: &[f32], rate_sum: f64) -> Vec<f32> {
        delta.iter().zip(&self.control).map(|(delta, server)| (-f64::from(*delta) / rate_sum - server) as f32).collect()
    }

    /// Aggregates the updates of a round into the next version.
    ///
    /// # Errors
    /// When there are no updates, one is invalid, a client occurs twice, or there are too few for the strategy. Nothing changes then.
    pub fn aggregate(&mut self, updates: &[Update]) -> Result<(), InvalidInput> {
        let updates = self.checked(updates)?;
        let delta = self.delta(&updates)?;
        self.advance(&delta)?;
        if let Strategy::Scaffold { population, .. } = self.strategy {
            self.advance_control(&updates, population);
        }
        Ok(())
    }

    /// Moves the model by an aggregate that was computed elsewhere: an unmasked sum, or a private mean.
    ///
    /// # Errors
    /// When the aggregate has another length, a value that is not finite, or moves a parameter out of the range of f32. Nothing changes then.
    pub fn advance(&mut self, delta: &[f64]) -> Result<(), InvalidInput> {
        require(delta.len() == self.model.len(), "aggregate", delta.len(), "one value per parameter")?;
        require(delta.iter().all(|value| value.is_finite()), "aggregate", "not finite", "finite numbers")?;
        let mut moments = self.moments.clone();
        let step = match (&self.strategy, &mut moments) {
            (Strategy::Scaffold { server_rate, .. } | Strategy::FedBuff { server_rate }, _) => {
                delta.iter().map(|value| server_rate * value).collect()
            }
            (Strategy::FedAdam(settings), Some(moments)) => moments.adam(settings, self.version, delta),
            (Strategy::FedYogi(settings), Some(moments)) => moments.yogi(settings, self.version, delta),
            (Strategy::FedAdagrad(settings), Some(moments)) => moments.adagrad(settings, delta),
            _ => delta.to_vec(),
        };
        let model: Vec<f32> =
            self.model.iter().zip(&step).map(|(parameter, step)| (f64::from(*parameter) + step) as f32).collect();
        check_vector("aggregate", &model, self.model.len())?;
        (self.model, self.moments) = (model, moments);
        self.version += 1;
        Ok(())
    }

    /// Checks all updates and sorts them by client.
    fn checked<'a>(&self, updates: &'a [Update]) -> Result<Vec<&'a Update>, InvalidInput> {
        require(!updates.is_empty(), "updates", 0, "at least 1")?;
        let mut clients = BTreeSet::new();
        for update in updates {
            update.check(self.model.len(), self.version, self.strategy.has_control())?;
            require(clients.insert(update.client), "client", update.client, "each client once per round")?;
            let staleness = self.version - update.version;
            let limit = if matches!(self.strategy, Strategy::FedBuff { .. }) { MAX_STALENESS } else { 0 };
            if staleness > limit {
                let allowed = format!("at most {limit} versions old, the current one is {}", self.version);
                return Err(InvalidInput::new("version", update.version, allowed));
            }
        }
        let mut sorted: Vec<&Update> = updates.iter().collect();
        sorted.sort_by_key(|update| update.client);
        Ok(sorted)
    }

    fn delta(&self, updates: &[&Update]) -> Result<Vec<f64>, InvalidInput> {
        match self.strategy {
            Strategy::Scaffold { .. } => Ok(weighted_sum(updates, |_| 1.0 / updates.len() as f64)),
            Strategy::FedBuff { .. } => {
                let count = updates.len() as f64;
                Ok(weighted_sum(updates, |update| staleness_weight(self.version - update.version) / count))
            }
            Strategy::Median => Ok(robust::median(updates)),
            Strategy::TrimmedMean { beta } => Ok(robust::trimmed_mean(updates, beta)),
            Strategy::Krum { byzantine, keep } => robust::krum(updates, byzantine, keep),
            _ => {
                let samples: f64 = updates.iter().map(|update| update.samples as f64).sum();
                Ok(weighted_sum(updates, |update| update.samples as f64 / samples))
            }
        }
    }

    /// `c += (participants/population) * mean(change of the client's control variate)`.
    fn advance_control(&mut self, updates: &[&Update], population: u64) {
        for update in updates {
            let changes = update.control.as_deref().unwrap_or_default();
            for (control, change) in self.control.iter_mut().zip(changes) {
                *control += f64::from(*change) / population as f64;
            }
            let own = self.client_controls.entry(update.client).or_insert_with(|| vec![0.0; changes.len()]);
            own.iter_mut().zip(changes).for_each(|(own, change)| *own += change);
        }
    }
}

/// The weight of an update that is `staleness` versions old.
#[must_use]
pub fn staleness_weight(staleness: u64) -> f64 {
    1.0 / ((1 + staleness) as f64).sqrt()
}

fn weighted_sum(updates: &[&Update], weight: impl Fn(&Update) -> f64) -> Vec<f64> {
    let mut sum = vec![0.0; updates.first().map_or(0, |update| update.delta.len())];
    for update in updates {
        let weight = weight(update);
        for (sum, delta) in sum.iter_mut().zip(&update.delta) {
            *sum += weight * f64::from(*delta);
        }
    }
    sum
}
