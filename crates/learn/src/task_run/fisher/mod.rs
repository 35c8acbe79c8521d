//! `kind: Fisher`: trains a classifier, computes its Fisher matrix and spectrum, compares natural-gradient training with SGD.
//!
//! Stage 0 trains the classifier, and one training curve per method and step size. Stage 1 computes the sums of scores in shards whose
//! borders follow from the number of samples, never from the number of workers; each shard is one subtree of the fixed tree of additions,
//! so the matrix has the same bits for any number of shards. The sums of a large matrix exceed a message: then a task computes a band of
//! rows of a shard. Stage 2 computes the eigenvalues.

mod curve;
mod matrix;
mod report;
#[cfg(test)]
mod tests;

use super::fit::{Adam, Batches, Classifier, Score, gather, on_threads, predictions, score};
use super::samples::{Dataset, Split};
use super::wire::{decode, encode, get_f32, get_f64, put_f32, put_f64};
use super::{MAX_INPUT_BYTES, MAX_RESULT_BYTES, StageResults, Task, TaskContext, TaskError, TaskFindings, TaskRun};
use curve::{Curve, Method};
use engram_api::FisherRun;
use engram_information::{FisherMatrix, LEAVES, PartialSum, bands, combine};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Step size of AdamW for the classifier.
const RATE: f32 = 0.01;
/// Samples per step of the classifier.
const BATCH: u32 = 32;
/// Samples of a shard that are worth a task.
const SHARD_SAMPLES: usize = 128;
/// Largest size of all partial sums together, which the record of the run keeps.
const MAX_SUMS: usize = 24 << 20;
/// Most scores of a shard: 512 MiB.
const MAX_SCORES: usize = 1 << 27;

const CLASSIFIER: u8 = 0;
const CURVE: u8 = 1;
const SHARD: u8 = 2;
const SPECTRUM: u8 = 3;

/// The trained classifier.
#[derive(Serialize, Deserialize)]
struct Trained {
    parameters: Vec<f32>,
    training: Score,
    test: Score,
    /// Class of each test sample.
    predicted: Vec<u32>,
}

/// A run of kind `Fisher`.
pub struct FisherTasks {
    spec: FisherRun,
    data: Dataset,
    split: Split,
    /// Number of parameters of the classifier.
    parameters: usize,
    /// Number of shards, a power of two.
    shards: usize,
    /// Rows of the matrix whose sums are one result.
    bands: Vec<Range<usize>>,
}

impl FisherTasks {
    /// Creates the run. `samples` is the content of the file that `data` names.
    ///
    /// # Errors
    /// The specification or the file cannot be used; the error names the field, or line and column.
    pub fn new(spec: &FisherRun, samples: Option<&[u8]>) -> Result<Self, TaskError> {
        let mut data = Dataset::load(&spec.data, samples, "spec.fisher.data")?;
        let split = Split::of(&mut data, spec.test, spec.seed)?;
        let parameters = parameters_of(data.width, spec.hidden as usize, data.classes.len());
        let bytes = sum_bytes(parameters);
        // One byte of the input of the last stage is the kind of the task.
        if bytes >= MAX_INPUT_BYTES {
            let largest = (1..).take_while(|&it| sum_bytes(it) < MAX_INPUT_BYTES).last().unwrap_or(0);
            return Err(TaskError::Invalid(format!(
                "spec.fisher.hidden: {} gives {parameters} parameters for {} inputs and {} classes, and a matrix of {bytes} bytes; \
                 allowed: at most {largest} parameters, so that the matrix fits into one message of {MAX_INPUT_BYTES} bytes",
                spec.hidden,
                data.width,
                data.classes.len()
            )));
        }
        let useful = split.all_but_test().len().div_ceil(SHARD_SAMPLES).min(MAX_SUMS / bytes).min(LEAVES);
        let shards = 1 << useful.max(1).ilog2();
        let bands = bands(parameters, MAX_RESULT_BYTES / size_of::<f64>());
        let run = Self { spec: spec.clone(), data, split, parameters, shards, bands };
        let scores = run.scores().div_ceil(shards) * parameters;
        if scores > MAX_SCORES {
            return Err(TaskError::Invalid(format!(
                "spec.fisher.data: {scores} scores per shard; allowed: {MAX_SCORES}; use fewer samples, or form: Empirical"
            )));
        }
        Ok(run)
    }

    fn classifier(&self) -> Result<Classifier, TaskError> {
        Classifier::new(self.data.width, self.spec.hidden as usize, self.data.classes.len(), self.spec.seed)
    }

    /// Trains the classifier on all samples but the test samples.
    fn train(&self, context: &dyn TaskContext) -> Result<Trained, TaskError> {
        let (values, labels) = self.data.select(&self.split.all_but_test());
        let mut classifier = self.classifier()?;
        let mut adam = Adam::new(self.parameters, 0.0)?;
        let batches = Batches::new(labels.len(), BATCH, self.spec.epochs, self.spec.seed);
        for epoch in 0..self.spec.epochs as usize {
            for (index, samples) in batches.of_epoch(epoch).iter().enumerate() {
                let (values, labels) = gather(&values, &labels, self.data.width, samples);
                let sum = classifier.gradient(&values, &labels)?;
                let rate = RATE * batches.rate_share(epoch * batches.per_epoch() + index);
                adam.step(classifier.model.parameters_mut(), &sum.values, labels.len(), rate);
                classifier.recycle(sum);
            }
            batches.after(epoch, context)?;
        }
        let (test, truth) = self.data.select(&self.split.test);
        let logits = classifier.logits(&test)?;
        Ok(Trained {
            parameters: classifier.model.parameters().to_vec(),
            training: score(&classifier.logits(&values)?, &labels),
            test: score(&logits, &truth),
            predicted: predictions(&logits, self.data.classes.len()),
        })
    }

    /// Returns method and step size of each training curve.
    fn methods(&self) -> Vec<(Method, f64)> {
        let natural = self.spec.natural_rates.iter().map(|&rate| (Method::Natural, rate));
        natural.chain(self.spec.sgd_rates.iter().map(|&rate| (Method::Sgd, rate))).collect()
    }

    /// Combines the partial sums of all shards.
    fn fisher(&self, stage: &StageResults) -> Result<FisherMatrix, TaskError> {
        let level = (LEAVES / self.shards).ilog2();
        let of_bands = |bands: &[Vec<u8>]| bands.iter().flat_map(|bytes| get_f64(bytes)).collect();
        let part = |(index, bands)| PartialSum { level, index, sums: of_bands(bands) };
        let parts = stage.chunks(self.bands.len()).enumerate().map(part).collect();
        combine(parts, self.parameters, self.split.all_but_test().len() as u64).map_err(information)
    }
}

/// Returns the number of parameters of a classifier.
const fn parameters_of(inputs: usize, hidden: usize, classes: usize) -> usize {
    match hidden {
        0 => (inputs + 1) * classes,
        _ => (inputs + 1) * hidden + (hidden + 1) * classes,
    }
}

/// Returns the size of a packed upper triangle.
const fn sum_bytes(parameters: usize) -> usize {
    parameters.saturating_mul(parameters + 1) / 2 * 8
}

impl TaskRun for FisherTasks {
    fn plan(&self, results: &[StageResults]) -> Result<Vec<Task>, TaskError> {
        let (samples, parameters) = (self.split.all_but_test().len() as u64, self.parameters as u64);
        match results {
            [] => {
                let cost = u64::from(self.spec.epochs) * samples * parameters;
                let train = Task { name: "train the classifier".to_owned(), input: vec![CLASSIFIER], cost };
                let curve = |(index, (method, rate)): (usize, (Method, f64))| Task {
                    name: format!("curve of {}, rate {rate}", method.name()),
                    input: vec![CURVE, index as u8],
                    cost: u64::from(self.spec.steps) * u64::from(self.spec.batch).pow(2) * parameters,
                };
                Ok([train].into_iter().chain(self.methods().into_iter().enumerate().map(curve)).collect())
            }
            [first] => {
                let trained: Trained = decode(&first[0])?;
                let (shards, bands) = (self.shards, self.bands.len());
                let shard = |index: usize| {
                    let mut input = vec![SHARD, index as u8];
                    put_f32(&mut input, &trained.parameters);
                    let cost = self.scores() as u64 * parameters * parameters / (shards * bands) as u64;
                    let mut name = format!("Fisher sums, shard {} of {shards}", index / bands + 1);
                    if bands > 1 {
                        name += &format!(", rows {} of {bands}", index % bands + 1);
                    }
                    Task { name, input, cost }
                };
                Ok((0..shards * bands).map(shard).collect())
            }
            [_, sums] => {
                let mut input = vec![SPECTRUM];
                put_f64(&mut input, self.fisher(sums)?.packed());
                Ok(vec![Task { name: "spectrum".to_owned(), input, cost: parameters.pow(3) }])
            }
            _ => Ok(Vec::new()),
        }
    }

    fn execute(&self, task: &Task, context: &dyn TaskContext) -> Result<Vec<u8>, TaskError> {
        let damaged = || TaskError::Failed(format!("failed to decode the input of task {}", task.name));
        let (&kind, rest) = task.input.split_first().ok_or_else(damaged)?;
        match kind {
            CLASSIFIER => on_threads(context.threads(), || Ok(encode(&self.train(context)?))),
            CURVE => {
                let index = *rest.first().ok_or_else(damaged)? as usize;
                let (method, rate) = *self.methods().get(index).ok_or_else(damaged)?;
                on_threads(context.threads(), || Ok(encode(&self.curve(method, rate, context)?)))
            }
            SHARD => {
                let (&index, parameters) = rest.split_first().ok_or_else(damaged)?;
                let parameters = get_f32(parameters);
                on_threads(context.threads(), || self.shard(index as usize, &parameters, context))
            }
            SPECTRUM => {
                let whole = PartialSum { level: LEAVES.ilog2(), index: 0, sums: get_f64(rest) };
                let matrix = combine(vec![whole], self.parameters, 1).map_err(information)?;
                let mut bytes = Vec::new();
                put_f64(&mut bytes, &matrix.spectrum());
                Ok(bytes)
            }
            _ => Err(damaged()),
        }
    }

    fn finish(&self, results: &[StageResults]) -> Result<TaskFindings, TaskError> {
        let trained: Trained = decode(&results[0][0])?;
        let curves: Vec<Curve> = results[0][1..].iter().map(|it| decode(it)).collect::<Result<_, _>>()?;
        self.summarize(&trained, &curves, &self.fisher(&results[1])?, &get_f64(&results[2][0]))
    }
}

/// An error of the information geometry, with the place in the manifest.
fn information(error: engram_information::Error) -> TaskError {
    match error {
        engram_information::Error::Singular { .. } => TaskError::Failed(format!("spec.fisher.{error}")),
        error => TaskError::Failed(error.to_string()),
    }
}
