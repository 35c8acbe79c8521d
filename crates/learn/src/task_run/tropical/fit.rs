//! Training of one candidate: a tropical network or a logistic regression.

use crate::task_run::fit::{Adam, Batches, Classifier, Score, failed, gather, on_threads, predictions, score};
use crate::task_run::{TaskContext, TaskError};
use engram_api::TropicalClassify;
use engram_tropical::{Network, NetworkShape};
use serde::{Deserialize, Serialize};

/// Temperature below which the exact maximum is used: less than the differences that decide a class.
const COLD: f32 = 0.02;

/// The two models that are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ModelKind {
    /// A dense layer and a tropical layer.
    Tropical,
    /// One dense layer.
    Logistic,
}

/// Settings of a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Candidate {
    pub(super) model: ModelKind,
    pub(super) rate: f64,
    /// Weight decay of the logistic regression; 0 for the network.
    pub(super) decay: f64,
    /// Number of the random start.
    pub(super) start: u32,
}

/// Training and evaluation samples.
pub(super) struct Parts {
    pub(super) width: usize,
    pub(super) classes: usize,
    pub(super) training: (Vec<f32>, Vec<u32>),
    pub(super) evaluation: (Vec<f32>, Vec<u32>),
}

/// What a candidate reached.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Fit {
    pub(super) candidate: Candidate,
    /// On the samples that it was trained on.
    pub(super) training: Score,
    /// On the others.
    pub(super) evaluation: Score,
    /// Class of each evaluated sample.
    pub(super) predicted: Vec<u32>,
    /// Loss on the evaluated samples after each epoch.
    pub(super) curve: Vec<f64>,
}

/// Trains a candidate.
pub(super) fn fit(
    candidate: Candidate,
    parts: &Parts,
    settings: &TropicalClassify,
    context: &dyn TaskContext,
) -> Result<Fit, TaskError> {
    match candidate.model {
        ModelKind::Tropical => tropical(candidate, parts, settings, context),
        ModelKind::Logistic => on_threads(context.threads(), || logistic(candidate, parts, settings, context)),
    }
}

fn seed_of(candidate: Candidate, settings: &TropicalClassify) -> u64 {
    settings.seed.wrapping_mul(1_000).wrapping_add(u64::from(candidate.start))
}

fn tropical(
    candidate: Candidate,
    parts: &Parts,
    settings: &TropicalClassify,
    context: &dyn TaskContext,
) -> Result<Fit, TaskError> {
    let shape = NetworkShape { inputs: parts.width, hidden: settings.hidden as usize, classes: parts.classes };
    let seed = seed_of(candidate, settings);
    let mut network = Network::new(shape, seed);
    let mut adam = Adam::new(shape.parameters(), 0.0)?;
    let (values, labels) = &parts.training;
    let batches = Batches::new(labels.len(), settings.batch, settings.epochs, seed);
    let mut curve = Vec::new();
    for epoch in 0..settings.epochs as usize {
        for (index, samples) in batches.of_epoch(epoch).iter().enumerate() {
            let step = epoch * batches.per_epoch() + index;
            let (values, labels) = gather(values, labels, parts.width, samples);
            let temperature = temperature(settings.temperature as f32, step, batches.steps());
            let gradient = network.gradient(&values, &labels, temperature).map_err(failed)?;
            let rate = candidate.rate as f32 * batches.rate_share(step);
            adam.step(network.parameters_mut(), &gradient.values, gradient.samples, rate);
        }
        batches.after(epoch, context)?;
        let logits = network.logits(&parts.evaluation.0).map_err(failed)?;
        curve.push(score(logits.entries(), &parts.evaluation.1).loss);
    }
    let logits = |values: &[f32]| network.logits(values).map(|it| it.entries().to_vec()).map_err(failed);
    fitted(candidate, parts, curve, logits)
}

/// Returns the temperature of a step: it falls linearly to the exact maximum in the middle of the training.
fn temperature(first: f32, step: usize, steps: usize) -> f32 {
    let temperature = first * (1.0 - 2.0 * step as f32 / steps as f32);
    if temperature < COLD { 0.0 } else { temperature }
}

fn logistic(
    candidate: Candidate,
    parts: &Parts,
    settings: &TropicalClassify,
    context: &dyn TaskContext,
) -> Result<Fit, TaskError> {
    let seed = seed_of(candidate, settings);
    let mut classifier = Classifier::new(parts.width, 0, parts.classes, seed)?;
    let mut adam = Adam::new(classifier.model.parameter_count(), candidate.decay as f32)?;
    let (values, labels) = &parts.training;
    let batches = Batches::new(labels.len(), settings.batch, settings.epochs, seed);
    let mut curve = Vec::new();
    for epoch in 0..settings.epochs as usize {
        for (index, samples) in batches.of_epoch(epoch).iter().enumerate() {
            let (values, labels) = gather(values, labels, parts.width, samples);
            let sum = classifier.gradient(&values, &labels)?;
            let rate = candidate.rate as f32 * batches.rate_share(epoch * batches.per_epoch() + index);
            adam.step(classifier.model.parameters_mut(), &sum.values, labels.len(), rate);
            classifier.recycle(sum);
        }
        batches.after(epoch, context)?;
        curve.push(score(&classifier.logits(&parts.evaluation.0)?, &parts.evaluation.1).loss);
    }
    fitted(candidate, parts, curve, |values| classifier.logits(values))
}

fn fitted(
    candidate: Candidate,
    parts: &Parts,
    curve: Vec<f64>,
    logits: impl Fn(&[f32]) -> Result<Vec<f32>, TaskError>,
) -> Result<Fit, TaskError> {
    let evaluated = logits(&parts.evaluation.0)?;
    Ok(Fit {
        candidate,
        training: score(&logits(&parts.training.0)?, &parts.training.1),
        evaluation: score(&evaluated, &parts.evaluation.1),
        predicted: predictions(&evaluated, parts.classes),
        curve,
    })
}
