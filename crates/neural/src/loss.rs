//! Losses with per-sample weights and per-sample errors. Every gradient is that of the SUM over samples: the caller
//! divides by the number of samples of the whole group once, after the reduction.
//!
//! With n samples of the global batch, weights w, and per-sample losses l, the objective is
//! `(1/n) sum w_i l_i + c * max(0, target - corr(p, a))`. The second, optional term couples all samples, so it needs
//! the [`Moments`] of the global batch between forward and backward.

use serde::{Deserialize, Serialize};

use crate::batch::{LabeledBatch, Targets, length};
use crate::error::{BatchError, SettingError};
use crate::layers::activation::sigmoid;

/// Which loss a model is trained with.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LossSpec {
    /// The per-sample loss.
    pub kind: LossKind,
    /// Where `Huber` turns from quadratic to linear; positive, default 1. Only for `Huber`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta: Option<f32>,
    /// Adds a penalty for a correlation of predictions and targets below a target. Only for `Mse` and `Huber` with one
    /// output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub correlation: Option<CorrelationSpec>,
}

/// A per-sample loss. Those over several outputs take the mean over the outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LossKind {
    /// `(p - y)^2`. Error: `|p - y|`.
    Mse,
    /// `0.5 (p - y)^2` up to `delta`, `delta (|p - y| - 0.5 delta)` beyond. Error: `|p - y|`.
    Huber,
    /// Binary cross-entropy of logits, targets in [0, 1]. Error: `|sigmoid(z) - y|`.
    Bce,
    /// Cross-entropy of logits with one class per sample. Error: `1 - probability of the class`.
    CrossEntropy,
}

/// The penalty `weight * max(0, target - corr(p, a))`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CorrelationSpec {
    /// Factor of the penalty, >= 0. The reference model uses 0.1.
    pub weight: f32,
    /// Correlation from which there is no penalty, in [-1, 1]. The reference model uses 0.9.
    pub target: f32,
}

/// Sums over samples from which the correlation of predictions and targets follows. Add those of all members of a
/// group in rank order, or leaf order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Moments {
    /// Number of samples.
    pub samples: u64,
    /// Sum of predictions.
    pub predicted: f64,
    /// Sum of targets.
    pub actual: f64,
    /// Sum of squared predictions.
    pub predicted_squared: f64,
    /// Sum of squared targets.
    pub actual_squared: f64,
    /// Sum of products.
    pub product: f64,
}

/// Relative variance below which predictions or targets count as constant: their correlation is defined as 0.
const CONSTANT: f64 = 1e-12;

impl Moments {
    /// Adds the sums of other samples.
    pub fn add(&mut self, other: &Self) {
        self.samples += other.samples;
        self.predicted += other.predicted;
        self.actual += other.actual;
        self.predicted_squared += other.predicted_squared;
        self.actual_squared += other.actual_squared;
        self.product += other.product;
    }

    /// Sums of squared deviations of predictions and targets, and of their products.
    fn deviations(&self) -> (f64, f64, f64) {
        let n = (self.samples as f64).max(1.0);
        let p = self.predicted_squared - self.predicted * self.predicted / n;
        let a = self.actual_squared - self.actual * self.actual / n;
        (p, a, self.product - self.predicted * self.actual / n)
    }

    /// Pearson correlation in [-1, 1]; 0 where predictions or targets are constant.
    pub fn correlation(&self) -> f64 {
        let (p, a, product) = self.deviations();
        if p <= CONSTANT * self.predicted_squared || a <= CONSTANT * self.actual_squared {
            return 0.0;
        }
        (product / (p * a).sqrt()).clamp(-1.0, 1.0)
    }

    /// Standard deviation of the predictions divided by that of the targets: near 0 where outputs have collapsed to a
    /// constant. `None` where the targets are constant.
    pub fn spread_ratio(&self) -> Option<f64> {
        let (p, a, _) = self.deviations();
        (a > CONSTANT * self.actual_squared).then(|| (p.max(0.0) / a).sqrt())
    }
}

/// Per-sample results of a loss, in row order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SampleErrors {
    /// Loss without the sample's weight.
    pub losses: Vec<f32>,
    /// Absolute error, from which priorities are computed. See [`LossKind`].
    pub errors: Vec<f32>,
}

/// A validated loss.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Loss {
    kind: LossKind,
    delta: f32,
    correlation: Option<CorrelationSpec>,
}

impl Loss {
    /// Validates a specification for a model with `outputs` outputs.
    ///
    /// # Errors
    /// A setting is out of range or does not apply to the kind.
    pub fn new(spec: &LossSpec, outputs: usize) -> Result<Self, SettingError> {
        let unset_or_huber = spec.delta.is_none() || spec.kind == LossKind::Huber;
        let delta = spec.delta.unwrap_or(1.0);
        SettingError::unless(unset_or_huber, "loss.delta", delta, "only with kind Huber")?;
        SettingError::unless(delta.is_finite() && delta > 0.0, "loss.delta", delta, "a positive number")?;
        if spec.kind == LossKind::CrossEntropy {
            SettingError::unless(outputs >= 2, "outputs of the model", outputs, "at least 2 with loss CrossEntropy")?;
        }
        if let Some(term) = spec.correlation {
            let applies = matches!(spec.kind, LossKind::Mse | LossKind::Huber);
            SettingError::unless(applies, "loss.correlation", format!("{term:?}"), "only with kinds Mse and Huber")?;
            SettingError::unless(outputs == 1, "outputs of the model", outputs, "1 with loss.correlation")?;
            let valid = term.weight.is_finite() && term.weight >= 0.0;
            SettingError::unless(valid, "loss.correlation.weight", term.weight, "a number >= 0")?;
            let valid = (-1.0..=1.0).contains(&term.target);
            SettingError::unless(valid, "loss.correlation.target", term.target, "-1 to 1")?;
        }
        Ok(Self { kind: spec.kind, delta, correlation: spec.correlation })
    }

    /// Whether the loss needs the moments of the global batch before the backward pass.
    pub fn needs_moments(&self) -> bool {
        self.correlation.is_some()
    }

    /// The per-sample loss, and where `Huber` turns linear.
    pub(crate) fn settings(&self) -> (LossKind, f32) {
        (self.kind, self.delta)
    }

    /// Value of the correlation penalty for the moments of the global batch; 0 without one.
    pub fn penalty(&self, moments: &Moments) -> f64 {
        self.correlation
            .map_or(0.0, |term| f64::from(term.weight) * (f64::from(term.target) - moments.correlation()).max(0.0))
    }

    /// Checks targets and weights against the batch and the number of outputs.
    pub(crate) fn check(&self, data: &LabeledBatch<'_>, outputs: usize) -> Result<(), BatchError> {
        let rows = data.batch.len();
        match (data.targets, self.kind) {
            (Targets::Classes(classes), LossKind::CrossEntropy) => {
                length("targets", classes.len(), rows)?;
                if let Some(sample) = classes.iter().position(|&c| c as usize >= outputs) {
                    return Err(BatchError::Class { sample, value: classes[sample], limit: outputs });
                }
            }
            (_, LossKind::CrossEntropy) => {
                return Err(BatchError::Targets { loss: "CrossEntropy", expected: "classes" });
            }
            (Targets::Classes(_), kind) => {
                let loss = match kind {
                    LossKind::Mse => "Mse",
                    LossKind::Huber => "Huber",
                    _ => "Bce",
                };
                return Err(BatchError::Targets { loss, expected: "values" });
            }
            (Targets::Values(values), kind) => {
                length("targets", values.len(), rows * outputs)?;
                let unit = kind == LossKind::Bce;
                let valid = |v: f32| if unit { (0.0..=1.0).contains(&v) } else { v.is_finite() };
                if let Some(at) = values.iter().position(|&v| !valid(v)) {
                    let allowed = if unit { "0 to 1" } else { "finite numbers" };
                    let value = values[at].to_string();
                    return Err(BatchError::Value { sample: at / outputs, field: "target", value, allowed });
                }
            }
        }
        if let Some(weights) = data.weights {
            length("weights", weights.len(), rows)?;
            if let Some(sample) = weights.iter().position(|w| !w.is_finite() || *w < 0.0) {
                let value = weights[sample].to_string();
                return Err(BatchError::Value { sample, field: "weight", value, allowed: "finite numbers >= 0" });
            }
        }
        Ok(())
    }

    /// Moments of predictions and targets; only the count where the loss has no correlation term.
    pub(crate) fn moments(&self, predictions: &[f32], targets: Targets<'_>, rows: usize) -> Moments {
        let mut m = Moments { samples: rows as u64, ..Moments::default() };
        if let (Some(_), Targets::Values(values)) = (self.correlation, targets) {
            for (&p, &a) in predictions.iter().zip(values) {
                let (p, a) = (f64::from(p), f64::from(a));
                m.predicted += p;
                m.actual += a;
                m.predicted_squared += p * p;
                m.actual_squared += a * a;
                m.product += p * a;
            }
        }
        m
    }

    /// Writes the gradient of `scale` times the summed objective with respect to the predictions to `delta`, and
    /// per-sample results to `samples`. Returns the weighted sum of losses. `moments` are global.
    pub(crate) fn evaluate(
        &self,
        predictions: &[f32],
        data: &LabeledBatch<'_>,
        moments: &Moments,
        scale: f32,
        delta: &mut Vec<f32>,
        samples: &mut SampleErrors,
    ) -> f64 {
        let rows = data.batch.len();
        delta.resize(predictions.len(), 0.0);
        samples.losses.clear();
        samples.errors.clear();
        let outputs = predictions.len() / rows.max(1);
        let mut total = 0.0;
        for i in 0..rows {
            let weight = data.weights.map_or(1.0, |w| w[i]);
            let (p, d) = (&predictions[i * outputs..][..outputs], &mut delta[i * outputs..][..outputs]);
            let (loss, error) = match data.targets {
                Targets::Classes(classes) => cross_entropy(p, classes[i] as usize, d),
                Targets::Values(values) => self.values(p, &values[i * outputs..][..outputs], d),
            };
            d.iter_mut().for_each(|x| *x *= weight * scale);
            total += f64::from(weight) * f64::from(loss);
            samples.losses.push(loss);
            samples.errors.push(error);
        }
        if let (Some(term), Targets::Values(values)) = (self.correlation, data.targets) {
            correlation_gradient(&term, moments, predictions, values, scale, delta);
        }
        total
    }

    fn values(&self, p: &[f32], y: &[f32], d: &mut [f32]) -> (f32, f32) {
        let n = p.len() as f32;
        let (mut loss, mut error) = (0.0, 0.0);
        for ((&p, &y), d) in p.iter().zip(y).zip(d) {
            let (l, g, e) = match self.kind {
                LossKind::Bce => bce(p, y),
                LossKind::Huber => huber(p - y, self.delta),
                LossKind::Mse | LossKind::CrossEntropy => ((p - y) * (p - y), 2.0 * (p - y), (p - y).abs()),
            };
            loss += l;
            error += e;
            *d = g / n;
        }
        (loss / n, error / n)
    }
}

/// Loss, derivative, error.
fn huber(e: f32, delta: f32) -> (f32, f32, f32) {
    let size = e.abs();
    if size <= delta { (0.5 * e * e, e, size) } else { (delta * (size - 0.5 * delta), delta.copysign(e), size) }
}

/// Loss, derivative, error. `max(z, 0) - z y + ln(1 + exp(-|z|))` cannot overflow.
fn bce(z: f32, y: f32) -> (f32, f32, f32) {
    let p = sigmoid(z);
    (z.max(0.0) - z * y + (-z.abs()).exp().ln_1p(), p - y, (p - y).abs())
}

fn cross_entropy(z: &[f32], class: usize, d: &mut [f32]) -> (f32, f32) {
    let top = z.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
    let sum: f32 = z.iter().map(|x| (x - top).exp()).sum();
    for (d, x) in d.iter_mut().zip(z) {
        *d = (x - top).exp() / sum;
    }
    let error = 1.0 - d[class];
    d[class] -= 1.0;
    (sum.ln() - (z[class] - top), error)
}

/// Adds the gradient of `n * weight * max(0, target - corr)`: of the sum, since the objective is divided by n later.
fn correlation_gradient(
    term: &CorrelationSpec,
    moments: &Moments,
    predictions: &[f32],
    actual: &[f32],
    scale: f32,
    delta: &mut [f32],
) {
    let correlation = moments.correlation();
    let (p_square, a_square, _) = moments.deviations();
    let constant = p_square <= CONSTANT * moments.predicted_squared || a_square <= CONSTANT * moments.actual_squared;
    if constant || correlation >= f64::from(term.target) {
        return;
    }
    let n = moments.samples as f64;
    let (p_mean, a_mean) = (moments.predicted / n, moments.actual / n);
    let factor = -n * f64::from(term.weight) * f64::from(scale) / (p_square * a_square).sqrt();
    let pull = correlation * (a_square / p_square).sqrt();
    for ((d, &p), &a) in delta.iter_mut().zip(predictions).zip(actual) {
        *d += (factor * ((f64::from(a) - a_mean) - pull * (f64::from(p) - p_mean))) as f32;
    }
}
