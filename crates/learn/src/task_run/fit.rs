//! Training of classifiers that runs share: order of samples, the rate of a step, evaluation.

use super::random::Random;
use super::{TaskContext, TaskError};
use engram_neural::{
    Activation, Batch, GradientEngine, GradientSum, LabeledBatch, LayerSpec, Loss, LossKind, LossSpec, Model,
    ModelSpec, Optimizer, OptimizerSpec, RandomStep, Targets, View,
};
use serde::{Deserialize, Serialize};

/// Fraction of the step size that is left in the last step.
const FINAL_RATE: f32 = 0.1;

/// Loss and accuracy on some samples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Score {
    /// Mean cross-entropy in nats.
    pub(super) loss: f64,
    /// Fraction of correct classes.
    pub(super) accuracy: f64,
}

/// Returns the class of the largest logit of each sample; the lowest on ties.
pub(super) fn predictions(logits: &[f32], classes: usize) -> Vec<u32> {
    let best = |row: &[f32]| (0..row.len()).reduce(|best, at| if row[at] > row[best] { at } else { best });
    logits.chunks_exact(classes).map(|row| best(row).unwrap_or(0) as u32).collect()
}

/// Scores logits (samples x classes) against labels.
pub(super) fn score(logits: &[f32], labels: &[u32]) -> Score {
    let classes = logits.len() / labels.len().max(1);
    let predicted = predictions(logits, classes);
    let hits = predicted.iter().zip(labels).filter(|(a, b)| a == b).count();
    let losses = logits.chunks_exact(classes).zip(labels).map(|(row, &label)| {
        let probabilities = softmax(row);
        -probabilities[label as usize].max(f64::MIN_POSITIVE).ln()
    });
    let count = labels.len() as f64;
    Score { loss: losses.sum::<f64>() / count, accuracy: hits as f64 / count }
}

/// Returns the probabilities of one row of logits.
pub(super) fn softmax(logits: &[f32]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f64> = logits.iter().map(|&logit| f64::from(logit - largest).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.into_iter().map(|power| power / sum).collect()
}

/// Batches of all epochs of a training, in an order that follows from the seed.
pub(super) struct Batches {
    samples: usize,
    batch: usize,
    epochs: usize,
    seed: u64,
}

impl Batches {
    pub(super) const fn new(samples: usize, batch: u32, epochs: u32, seed: u64) -> Self {
        Self { samples, batch: batch as usize, epochs: epochs as usize, seed }
    }

    pub(super) const fn steps(&self) -> usize {
        self.per_epoch() * self.epochs
    }

    /// Returns the samples of each step of an epoch.
    pub(super) fn of_epoch(&self, epoch: usize) -> Vec<Vec<usize>> {
        let order = Random::new(self.seed, 100 + epoch as u64).permutation(self.samples);
        order.chunks(self.batch).map(<[usize]>::to_vec).collect()
    }

    /// Returns the share of the step size in a step: it falls linearly.
    pub(super) fn rate_share(&self, step: usize) -> f32 {
        1.0 - (1.0 - FINAL_RATE) * step as f32 / self.steps() as f32
    }

    /// Returns the steps of an epoch.
    pub(super) const fn per_epoch(&self) -> usize {
        self.samples.div_ceil(self.batch)
    }

    /// Reports the progress after an epoch.
    ///
    /// # Errors
    /// The task must stop.
    pub(super) fn after(&self, epoch: usize, context: &dyn TaskContext) -> Result<(), TaskError> {
        context.progress((epoch + 1) as f64 / self.epochs as f64);
        if context.stop().is_set() { Err(TaskError::Stopped) } else { Ok(()) }
    }
}

/// Returns values and labels of some samples.
pub(super) fn gather(values: &[f32], labels: &[u32], width: usize, samples: &[usize]) -> (Vec<f32>, Vec<u32>) {
    let rows = samples.iter().flat_map(|&it| &values[it * width..][..width]).copied().collect();
    (rows, samples.iter().map(|&it| labels[it]).collect())
}

/// A softmax classifier with at most one hidden layer, its loss and the buffers of its gradient.
pub(super) struct Classifier {
    pub(super) model: Model,
    loss: Loss,
    engine: GradientEngine,
}

impl Classifier {
    /// Creates a classifier; `hidden` 0 is softmax regression.
    pub(super) fn new(inputs: usize, hidden: usize, classes: usize, seed: u64) -> Result<Self, TaskError> {
        let dense = |outputs: usize| LayerSpec { dense: Some(outputs), ..LayerSpec::default() };
        let mut layers = vec![dense(classes)];
        if hidden > 0 {
            layers.insert(0, LayerSpec { activation: Some(Activation::Tanh), ..dense(hidden) });
        }
        let model = Model::new(&ModelSpec { inputs, layers }, seed).map_err(failed)?;
        let spec = LossSpec { kind: LossKind::CrossEntropy, delta: None, correlation: None };
        let loss = Loss::new(&spec, classes).map_err(failed)?;
        Ok(Self { model, loss, engine: GradientEngine::new() })
    }

    /// Returns the gradient of the summed cross-entropy of some samples.
    pub(super) fn gradient(&mut self, values: &[f32], labels: &[u32]) -> Result<GradientSum, TaskError> {
        let batch = Batch::rows(values, labels.len(), self.model.inputs()).map_err(failed)?;
        let data = LabeledBatch { batch, targets: Targets::Classes(labels), weights: None };
        let random = RandomStep { seed: 0, step: 0 };
        let sum = self.engine.gradient(&self.model, &data, &self.loss, 1, random, 1.0).map_err(failed)?;
        Ok(sum.0)
    }

    /// Gives a gradient's buffer back.
    pub(super) fn recycle(&mut self, sum: GradientSum) {
        self.engine.recycle(sum);
    }

    /// Returns the logits of some samples.
    pub(super) fn logits(&self, values: &[f32]) -> Result<Vec<f32>, TaskError> {
        let width = self.model.inputs();
        let batch = Batch::rows(values, values.len() / width, width).map_err(failed)?;
        self.model.predict(&batch).map_err(failed)
    }
}

/// AdamW over one flat buffer.
pub(super) struct Adam {
    optimizer: Optimizer,
    view: [View; 1],
}

impl Adam {
    pub(super) fn new(parameters: usize, weight_decay: f32) -> Result<Self, TaskError> {
        let spec = OptimizerSpec::AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay };
        let optimizer = Optimizer::new(spec, parameters).map_err(failed)?;
        let view = View { name: "all".to_owned(), shape: vec![parameters], range: 0..parameters, frozen: false };
        Ok(Self { optimizer, view: [view] })
    }

    /// Changes the parameters by a gradient that is a sum over `samples` samples.
    pub(super) fn step(&mut self, parameters: &mut [f32], sum: &[f32], samples: usize, rate: f32) {
        self.optimizer.step(parameters, sum, &self.view, 1.0 / samples as f32, rate);
    }
}

/// Runs `work` on a pool of as many threads as the task may use.
pub(super) fn on_threads<T: Send>(
    threads: usize,
    work: impl FnOnce() -> Result<T, TaskError> + Send,
) -> Result<T, TaskError> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().map_err(failed)?;
    pool.install(work)
}

/// A failed computation.
pub(super) fn failed(error: impl std::error::Error) -> TaskError {
    TaskError::Failed(error.to_string())
}
