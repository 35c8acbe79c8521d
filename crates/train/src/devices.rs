//! Gradients of a batch: by the engine as a whole, or by logical devices of the worker that share it.

use engram_neural::tree::Node;
use engram_neural::{
    BatchError, GradientSum, LabeledBatch, Moments, Parallelism, PipelinedEngine, RandomStep, SampleErrors,
};

use crate::trainer::{SummationOrder, Trainer, split};

impl Trainer {
    /// Lets logical devices of the worker share each batch. Results have the same bits. Not for losses that need moments.
    ///
    /// # Panics
    /// The loss needs moments, or there are more stages than operations.
    pub fn set_parallelism(&mut self, parallelism: Parallelism) {
        assert!(!self.loss.needs_moments(), "pipelines know no sums over the batch");
        self.pipelines = Some(PipelinedEngine::new(&self.model, parallelism, self.spec.precision));
    }

    /// Share of the time of all stages in the last step in which they had nothing to do; `None` without pipelines.
    pub fn bubble(&self) -> Option<f64> {
        self.pipelines.as_ref().map(PipelinedEngine::bubble)
    }

    /// The sums of one batch. `is_forwarded`: the forward pass for the moments is still in the engine's buffers.
    pub(crate) fn gradient(
        &mut self,
        data: &LabeledBatch<'_>,
        order: &SummationOrder,
        random: RandomStep,
        moments: &Moments,
        is_forwarded: bool,
    ) -> Result<(Vec<(Node, GradientSum)>, SampleErrors), BatchError> {
        let (split, scale) = (split(order, data.batch.len()), self.scaler.scale());
        if let Some(pipelines) = &mut self.pipelines {
            return pipelines.gradient(&self.model, data, &self.loss, &split, random, scale);
        }
        if !is_forwarded {
            self.engine.forward(&self.model, data, &self.loss, &split, random)?;
        }
        Ok(self.engine.backward(&self.model, data, &self.loss, moments, scale))
    }

    /// Takes back a buffer, so that the next step needs no new one.
    pub(crate) fn recycle(&mut self, sum: GradientSum) {
        match &mut self.pipelines {
            Some(pipelines) => pipelines.recycle(sum),
            None => self.engine.recycle(sum),
        }
    }
}
