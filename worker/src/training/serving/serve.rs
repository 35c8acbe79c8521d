//! Weights for predictions: a copy that is replaced every few updates, while calls in progress finish with the old one.

use engram_neural::{BatchError, LossKind, Model};
use engram_train::job::Rows;
use engram_train::table::TableColumns;
use engram_train::{Ensemble, Prediction, predict_all};
use parking_lot::RwLock;
use std::sync::Arc;

/// The served weights of a run.
#[derive(Debug, Default)]
pub(in crate::training) struct Served {
    current: RwLock<Option<Arc<ServedModel>>>,
    every: u64,
    /// Columns that the model reads, if not features.
    pub(in crate::training) table: Option<TableColumns>,
}

/// Weights at one step.
#[derive(Debug)]
pub(in crate::training) struct ServedModel {
    /// One, or the members of an ensemble.
    pub(in crate::training) models: Vec<Model>,
    pub(in crate::training) loss: LossKind,
    /// Updates that the weights have seen.
    pub(in crate::training) updates: u64,
}

impl Served {
    /// Creates it without weights; [`Self::update`] replaces them after `every` updates.
    pub(in crate::training) const fn new(every: u64, table: Option<TableColumns>) -> Self {
        Self { current: RwLock::new(None), every, table }
    }

    pub(in crate::training) fn set(&self, trained: &Ensemble, loss: LossKind) {
        let models = trained.members().iter().map(|member| member.model().clone()).collect();
        let served = ServedModel { models, loss, updates: trained.counters().updates };
        *self.current.write() = Some(Arc::new(served));
    }

    /// Replaces the weights if enough updates have passed.
    pub(in crate::training) fn update(&self, trained: &Ensemble, loss: LossKind) {
        let served = self.current.read().as_ref().map_or(0, |served| served.updates);
        if trained.counters().updates >= served + self.every {
            self.set(trained, loss);
        }
    }

    pub(in crate::training) fn model(&self) -> Option<Arc<ServedModel>> {
        self.current.read().clone()
    }
}

impl ServedModel {
    /// Predicts samples.
    ///
    /// # Errors
    /// A feature is out of range.
    pub(in crate::training) fn predict(&self, rows: &Rows) -> Result<Prediction, BatchError> {
        predict_all(&self.models.iter().collect::<Vec<_>>(), self.loss, rows)
    }
}
