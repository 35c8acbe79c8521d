//! Training curves: natural gradients and SGD with the same samples in the same order.

use super::{FisherTasks, information};
use crate::task_run::fit::{Batches, Classifier, Score, gather, score, softmax};
use crate::task_run::random::Random;
use crate::task_run::{TaskContext, TaskError};
use engram_api::FisherForm;
use engram_information::natural_gradient;
use serde::{Deserialize, Serialize};

/// First stream of random numbers of the drawn labels.
const LABELS: u64 = 1 << 32;

/// How a step follows from the gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Method {
    /// `(F + d I)^-1 g` with the Fisher matrix of the samples of the step.
    Natural,
    /// The gradient itself.
    Sgd,
}

impl Method {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Natural => "natural gradient",
            Self::Sgd => "SGD",
        }
    }
}

/// A training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Curve {
    pub(super) method: Method,
    pub(super) rate: f64,
    /// Loss on the training samples before the first step and after each.
    pub(super) losses: Vec<f64>,
    /// After the last step.
    pub(super) validation: Score,
    /// After the last step.
    pub(super) test: Score,
}

impl FisherTasks {
    /// Trains on the training samples for the steps of the specification. Ends early once the loss is not finite.
    pub(super) fn curve(&self, method: Method, rate: f64, context: &dyn TaskContext) -> Result<Curve, TaskError> {
        let mut classifier = self.classifier()?;
        let (values, labels) = self.data.select(&self.split.training);
        let batches = Batches::new(labels.len(), self.spec.batch, self.spec.steps, self.spec.seed);
        let mut losses = vec![score(&classifier.logits(&values)?, &labels).loss];
        let order = (0..).flat_map(|epoch| batches.of_epoch(epoch));
        for (step, samples) in order.take(self.spec.steps as usize).enumerate() {
            let (batch, truth) = gather(&values, &labels, self.data.width, &samples);
            let gradient = mean_gradient(&mut classifier, &batch, &truth)?;
            let direction = match method {
                Method::Sgd => gradient,
                Method::Natural => {
                    let scores = self.step_scores(&mut classifier, &batch, &truth, step)?;
                    natural_gradient(&scores, &gradient, self.spec.damping).map_err(information)?
                }
            };
            let parameters = classifier.model.parameters_mut();
            parameters.iter_mut().zip(&direction).for_each(|(it, change)| *it -= (rate * change) as f32);
            let loss = score(&classifier.logits(&values)?, &labels).loss;
            if !loss.is_finite() {
                break;
            }
            losses.push(loss);
            if context.stop().is_set() {
                return Err(TaskError::Stopped);
            }
            context.progress((step + 1) as f64 / f64::from(self.spec.steps));
        }
        let on = |samples: &[usize]| -> Result<Score, TaskError> {
            let (values, labels) = self.data.select(samples);
            Ok(finite(score(&classifier.logits(&values)?, &labels)))
        };
        let (validation, test) = (on(&self.split.validation)?, on(&self.split.test)?);
        Ok(Curve { method, rate, losses, validation, test })
    }

    /// Returns one row of scores per sample: of observed labels, or of labels drawn from the model.
    fn step_scores(
        &self,
        classifier: &mut Classifier,
        batch: &[f32],
        truth: &[u32],
        step: usize,
    ) -> Result<Vec<f32>, TaskError> {
        let mut random = Random::new(self.spec.seed, LABELS + step as u64);
        let mut scores = Vec::with_capacity(truth.len() * self.parameters);
        for (values, &label) in batch.chunks_exact(self.data.width).zip(truth) {
            let label = match self.spec.form {
                FisherForm::Empirical => label,
                FisherForm::Model => random.draw(&softmax(&classifier.logits(values)?)) as u32,
            };
            let sum = classifier.gradient(values, &[label])?;
            scores.extend_from_slice(&sum.values);
            classifier.recycle(sum);
        }
        Ok(scores)
    }
}

fn mean_gradient(classifier: &mut Classifier, batch: &[f32], truth: &[u32]) -> Result<Vec<f64>, TaskError> {
    let sum = classifier.gradient(batch, truth)?;
    let mean = sum.values.iter().map(|&it| f64::from(it) / truth.len() as f64).collect();
    classifier.recycle(sum);
    Ok(mean)
}

/// A training that diverged has the worst score instead of one that JSON cannot hold.
fn finite(score: Score) -> Score {
    if score.loss.is_finite() { score } else { Score { loss: f64::MAX, accuracy: 0.0 } }
}
