//! Rows of a batch in the form that a model reads, predictions, and the measure of a model on held-out samples.

use engram_neural::{Batch, BatchError, LabeledBatch, LossKind, Model, Moments, Targets};

use crate::dataset::Dataset;

/// Inputs and targets of some samples, in the form that a model reads.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rows {
    pub(crate) dense: Vec<f32>,
    pub(crate) width: usize,
    pub(crate) offsets: Vec<u32>,
    pub(crate) indices: Vec<u32>,
    pub(crate) targets: Vec<f32>,
    /// Classes instead of targets.
    pub(crate) classes: Vec<u32>,
    /// Importance weights; none = 1.
    pub(crate) weights: Vec<f32>,
}

impl Rows {
    /// Collects samples for `model`.
    pub fn of(model: &Model, data: &Dataset, samples: &[usize]) -> Self {
        let mut rows = if data.values.is_empty() {
            Self::of_features(model, samples.iter().map(|sample| data.subset(*sample)))
        } else {
            let dense = samples.iter().flat_map(|sample| data.row(*sample)).copied().collect();
            Self { dense, width: data.features, ..Self::default() }
        };
        let targets = samples.iter().map(|sample| data.targets[*sample]);
        if data.classes > 0 {
            rows.classes = targets.map(|class| class as u32).collect();
        } else {
            rows.targets = targets.collect();
        }
        rows
    }

    /// Collects feature indices, below the inputs of `model`, without targets.
    pub fn of_features<'a>(model: &Model, samples: impl Iterator<Item = &'a [u32]>) -> Self {
        Self::of_subsets(model.inputs(), model.reads_features(), samples)
    }

    /// Collects feature indices below `inputs`: as they are, or as 0/1 masks.
    pub(crate) fn of_subsets<'a>(
        inputs: usize,
        reads_features: bool,
        samples: impl Iterator<Item = &'a [u32]>,
    ) -> Self {
        let mut rows = Self { width: inputs, offsets: vec![0], ..Self::default() };
        for subset in samples {
            if reads_features {
                rows.indices.extend_from_slice(subset);
                rows.offsets.push(rows.indices.len() as u32);
            } else {
                let start = rows.dense.len();
                rows.dense.resize(start + rows.width, 0.0);
                subset.iter().for_each(|feature| rows.dense[start + *feature as usize] = 1.0);
            }
        }
        rows
    }

    /// The inputs as a batch.
    ///
    /// # Errors
    /// A feature is out of range.
    pub fn batch(&self) -> Result<Batch<'_>, BatchError> {
        if self.offsets.len() > 1 {
            Batch::features(&self.offsets, &self.indices)
        } else {
            Batch::rows(&self.dense, self.dense.len() / self.width.max(1), self.width)
        }
    }

    /// The labeled batch, whose first row has the given position in the global batch.
    ///
    /// # Errors
    /// A feature is out of range.
    pub fn labeled(&self, first: usize) -> Result<LabeledBatch<'_>, BatchError> {
        let batch = self.batch()?.starting_at(first as u32);
        let weights = (!self.weights.is_empty()).then_some(&self.weights[..]);
        let is_class = !self.classes.is_empty();
        let targets = if is_class { Targets::Classes(&self.classes) } else { Targets::Values(&self.targets) };
        Ok(LabeledBatch { batch, targets, weights })
    }
}

/// Predictions of `model` for some samples: probabilities where the loss `loss` is one of a logit, the likeliest class where it is one of classes.
///
/// # Errors
/// A feature is out of range.
pub fn predict(model: &Model, loss: LossKind, rows: &Rows) -> Result<Vec<f32>, BatchError> {
    let mut predicted = model.predict(&rows.batch()?)?;
    if loss == LossKind::CrossEntropy {
        return Ok(predicted.chunks(model.outputs()).map(|logits| likeliest(logits) as f32).collect());
    }
    if loss == LossKind::Bce {
        predicted.iter_mut().for_each(|logit| *logit = 1.0 / (1.0 + (-*logit).exp()));
    }
    Ok(predicted)
}

/// Smallest spread ratio that is measured.
pub(crate) const MIN_SPREAD_RATIO: f64 = 1e-6;

/// How well a model predicts the held-out samples.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Evaluation {
    /// Number of held-out samples.
    pub samples: u64,
    /// Mean squared error.
    pub squared_error: f64,
    /// Correlation of predictions and targets.
    pub correlation: f64,
    /// Standard deviation of the predictions divided by that of the targets: 1e-6 where outputs have collapsed to a constant,
    /// 0 where it is not measured, as with constant targets.
    pub spread_ratio: f64,
    /// Share of the samples whose class is predicted; 0 where targets are numbers.
    pub accuracy: f64,
    /// Number of classes; 0 where targets are numbers.
    pub classes: u64,
}

pub(crate) fn likeliest(logits: &[f32]) -> usize {
    logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(class, _)| class)
}

/// Measures a model on the held-out samples.
///
/// # Errors
/// The data do not fit the model.
pub fn evaluate(model: &Model, loss: LossKind, data: &Dataset) -> Result<Evaluation, BatchError> {
    let samples: Vec<usize> = (data.training_len()..data.len()).collect();
    evaluate_rows(model, loss, &Rows::of(model, data, &samples), data.classes)
}

/// Measures a model on rows; `classes` is 0 where targets are numbers.
///
/// # Errors
/// The data do not fit the model.
pub fn evaluate_rows(model: &Model, loss: LossKind, rows: &Rows, classes: usize) -> Result<Evaluation, BatchError> {
    if classes > 0 {
        let targets: Vec<f32> = rows.classes.iter().map(|class| *class as f32).collect();
        return Ok(measure(&model.predict(&rows.batch()?)?, &targets, model.outputs()));
    }
    Ok(measure(&predict(model, loss, rows)?, &rows.targets, 0))
}

/// Compares predictions with targets; with `classes` there is a value per class and sample.
pub(crate) fn measure(predicted: &[f32], targets: &[f32], classes: usize) -> Evaluation {
    if classes > 0 {
        let right = predicted.chunks(classes).zip(targets).filter(|(it, target)| likeliest(it) == **target as usize);
        let samples = targets.len() as u64;
        let accuracy = right.count() as f64 / samples.max(1) as f64;
        return Evaluation { samples, accuracy, classes: classes as u64, ..Evaluation::default() };
    }
    let (mut moments, mut squared) = (Moments::default(), 0.0);
    for (p, a) in predicted.iter().zip(targets) {
        let (p, a) = (f64::from(*p), f64::from(*a));
        squared += (p - a) * (p - a);
        let moment = Moments {
            samples: 1,
            predicted: p,
            actual: a,
            predicted_squared: p * p,
            actual_squared: a * a,
            product: p * a,
        };
        moments.add(&moment);
    }
    Evaluation {
        samples: moments.samples,
        squared_error: squared / moments.samples.max(1) as f64,
        correlation: moments.correlation(),
        spread_ratio: moments.spread_ratio().map_or(0.0, |ratio| ratio.max(MIN_SPREAD_RATIO)),
        ..Evaluation::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constant_predictions_are_a_measured_collapse_and_constant_targets_are_not() {
        let ratio = |predicted: &[f32], targets: &[f32]| measure(predicted, targets, 0).spread_ratio;
        assert_eq!(ratio(&[0.5; 4], &[0.0, 1.0, 2.0, 3.0]).to_bits(), MIN_SPREAD_RATIO.to_bits());
        assert_eq!(ratio(&[0.0, 1.0, 2.0, 3.0], &[0.5; 4]).to_bits(), 0.0_f64.to_bits());
        assert!((ratio(&[0.0, 1.0, 2.0, 3.0], &[0.0, 2.0, 4.0, 6.0]) - 0.5).abs() < 1e-12);
    }
}
