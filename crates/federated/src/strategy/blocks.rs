//! Aggregation of models that do not fit into memory: block by block, with one block of the model and one of an update at a time.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::{MAX_STALENESS, Strategy, staleness_weight};
use crate::error::{InvalidInput, require};
use crate::model::{ClientId, check_vector};

/// What is known of an update without its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UpdateHead {
    /// The client.
    pub client: ClientId,
    /// Model version that it trained from.
    pub version: u64,
    /// Samples it trained on, at least 1.
    pub samples: u64,
}

/// What the server of a large model remembers between rounds; the model is stored in blocks elsewhere. Gives the same models as
/// [`super::Aggregator`], bit for bit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BlockAggregator {
    strategy: Strategy,
    version: u64,
}

/// The weighted sum of one block over the updates of a round.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockSum {
    values: Vec<f64>,
}

impl BlockAggregator {
    /// Creates version 0.
    ///
    /// # Errors
    /// The strategy is no weighted mean, or its settings are invalid.
    pub fn new(strategy: Strategy) -> Result<Self, InvalidInput> {
        strategy.validate()?;
        let allowed = "FedAvg, FedProx or FedBuff";
        require(Self::supports(&strategy), "strategy.kind", format!("{strategy:?}"), allowed)?;
        Ok(Self { strategy, version: 0 })
    }

    /// Whether a strategy is a weighted mean, which needs nothing but one pass over the updates.
    #[must_use]
    pub const fn supports(strategy: &Strategy) -> bool {
        matches!(strategy, Strategy::FedAvg | Strategy::FedProx { .. } | Strategy::FedBuff { .. })
    }

    /// The number of aggregations so far.
    #[must_use]
    pub const fn version(&self) -> u64 {
        self.version
    }

    /// Returns the order in which the updates are added, by their place in `updates`, and their weights.
    ///
    /// # Errors
    /// There are no updates, a client occurs twice, or an update is too old or without samples.
    pub fn weights(&self, updates: &[UpdateHead]) -> Result<Vec<(usize, f64)>, InvalidInput> {
        require(!updates.is_empty(), "updates", 0, "at least 1")?;
        let is_buffered = matches!(self.strategy, Strategy::FedBuff { .. });
        let limit = if is_buffered { MAX_STALENESS } else { 0 };
        let mut clients = BTreeSet::new();
        for update in updates {
            require(update.samples > 0, "samples", update.samples, "at least 1")?;
            require(clients.insert(update.client), "client", update.client, "each client once per round")?;
            let is_recent = update.version <= self.version && self.version - update.version <= limit;
            let allowed = format!("at most {limit} versions old, the current one is {}", self.version);
            require(is_recent, "version", update.version, &allowed)?;
        }
        let mut places: Vec<usize> = (0..updates.len()).collect();
        places.sort_by_key(|place| updates[*place].client);
        let count = updates.len() as f64;
        let samples: f64 = places.iter().map(|place| updates[*place].samples as f64).sum();
        let weight = |update: &UpdateHead| match is_buffered {
            true => staleness_weight(self.version - update.version) / count,
            false => update.samples as f64 / samples,
        };
        Ok(places.into_iter().map(|place| (place, weight(&updates[place]))).collect())
    }

    /// Moves a block of the model by the sum of the updates of the block.
    ///
    /// # Errors
    /// The block has another length than the sum, or a parameter leaves the range of f32.
    pub fn move_block(&self, block: &[f32], sum: &BlockSum) -> Result<Vec<f32>, InvalidInput> {
        require(block.len() == sum.values.len(), "aggregate", sum.values.len(), "one value per parameter")?;
        let rate = if let Strategy::FedBuff { server_rate } = self.strategy { server_rate } else { 1.0 };
        let moved: Vec<f32> =
            block.iter().zip(&sum.values).map(|(value, step)| (f64::from(*value) + rate * step) as f32).collect();
        check_vector("aggregate", &moved, block.len())?;
        Ok(moved)
    }

    /// Ends the aggregation: all blocks were moved.
    pub const fn end_version(&mut self) {
        self.version += 1;
    }
}

impl BlockSum {
    /// Creates a sum over `parameters` parameters.
    #[must_use]
    pub fn new(parameters: usize) -> Self {
        Self { values: vec![0.0; parameters] }
    }

    /// Adds the block of an update with its weight.
    ///
    /// # Errors
    /// The block has another length, or a value that is not finite.
    pub fn add(&mut self, weight: f64, block: &[f32]) -> Result<(), InvalidInput> {
        check_vector("delta", block, self.values.len())?;
        for (sum, value) in self.values.iter_mut().zip(block) {
            *sum += weight * f64::from(*value);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Update;
    use crate::strategy::Aggregator;

    /// Aggregates version 3 in blocks of `block` parameters.
    fn in_blocks(strategy: Strategy, model: &[f32], updates: &[Update], block: usize) -> Vec<f32> {
        let mut aggregator = BlockAggregator::new(strategy).unwrap();
        (0..3).for_each(|_| aggregator.end_version());
        let head =
            |update: &Update| UpdateHead { client: update.client, version: update.version, samples: update.samples };
        let weights = aggregator.weights(&updates.iter().map(head).collect::<Vec<_>>()).unwrap();
        let mut next = Vec::new();
        for (index, part) in model.chunks(block).enumerate() {
            let mut sum = BlockSum::new(part.len());
            for (place, weight) in &weights {
                sum.add(*weight, &updates[*place].delta[index * block..][..part.len()]).unwrap();
            }
            next.extend(aggregator.move_block(part, &sum).unwrap());
        }
        next
    }

    #[test]
    fn blocks_give_the_model_of_a_whole_aggregation_bit_for_bit() {
        let model: Vec<f32> = (0..101).map(|value| (value as f32 * 0.37).sin()).collect();
        // Clients 1 and 3 cancel, and hide what is added between them: the order is visible.
        let value = |client: u64, place: u64| match client {
            1 => 1e25,
            3 => -1e25,
            _ => ((place * client) as f32 * 0.11).cos(),
        };
        let update = |client: u64| Update {
            client,
            version: client / 4,
            samples: 3 + client / 4 * client,
            delta: (0..101).map(|place| value(client, place)).collect(),
            control: None,
        };
        for strategy in [Strategy::FedAvg, Strategy::FedProx { mu: 0.1 }, Strategy::FedBuff { server_rate: 0.7 }] {
            let is_buffered = matches!(strategy, Strategy::FedBuff { .. });
            let newest = |update: Update| Update { version: if is_buffered { update.version } else { 3 }, ..update };
            let updates: Vec<Update> = [5, 1, 4, 3].into_iter().map(update).map(newest).collect();
            let mut whole = Aggregator::new(strategy.clone(), model.clone()).unwrap();
            (0..3).for_each(|_| whole.advance(&vec![0.0; model.len()]).unwrap());
            whole.aggregate(&updates).unwrap();
            for block in [1, 16, 101] {
                assert_eq!(in_blocks(strategy.clone(), &model, &updates, block), whole.model(), "{strategy:?}");
            }
        }
    }

    #[test]
    fn strategies_and_updates_that_blocks_cannot_take_are_refused() {
        assert_eq!(BlockAggregator::new(Strategy::Median).unwrap_err().field, "strategy.kind");
        let mut aggregator = BlockAggregator::new(Strategy::FedAvg).unwrap();
        let head = |client, version, samples| UpdateHead { client, version, samples };
        let field = |aggregator: &BlockAggregator, heads: &[UpdateHead]| aggregator.weights(heads).unwrap_err().field;
        assert_eq!(field(&aggregator, &[]), "updates");
        assert_eq!(field(&aggregator, &[head(1, 0, 0)]), "samples");
        assert_eq!(field(&aggregator, &[head(1, 0, 1), head(1, 0, 1)]), "client");
        aggregator.end_version();
        assert_eq!(field(&aggregator, &[head(1, 0, 1)]), "version");
        assert_eq!(field(&aggregator, &[head(1, 2, 1)]), "version", "of the future");
        let mut buffered = BlockAggregator::new(Strategy::FedBuff { server_rate: 1.0 }).unwrap();
        (0..21).for_each(|_| buffered.end_version());
        assert!(buffered.weights(&[head(1, 1, 1)]).is_ok());
        assert_eq!(field(&buffered, &[head(1, 0, 1)]), "version", "21 versions old");
        assert_eq!(BlockAggregator::new(Strategy::FedBuff { server_rate: 0.0 }).unwrap_err().field, "serverRate");
        assert_eq!(aggregator.move_block(&[0.0], &BlockSum::new(2)).unwrap_err().field, "aggregate");
        let mut sum = BlockSum::new(2);
        assert!(sum.add(1.0, &[0.0, f32::NAN]).is_err() && sum.add(1.0, &[0.0]).is_err());
        sum.add(1.0, &[f32::MAX, 0.0]).unwrap();
        assert!(aggregator.move_block(&[f32::MAX, 0.0], &sum).is_err());
    }
}
