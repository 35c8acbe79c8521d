//! Differential privacy of samples (DP-SGD, Abadi et al. 2016): the gradient of each sample is clipped, and noise is added once to the sum over all
//! members, after the reduction.
//!
//! Sums are integers, so they do not depend on how samples are spread over members, and every member adds the same noise to the same sum. A step
//! that is repeated after a failure uses the same samples: it is the same release again, and is not charged a second time.

use engram_api::{ReplayPrivacy, ReplayRun, ReplaySource, TrainingPrecision};
use engram_federated::error::InvalidInput;
use engram_federated::privacy::Mechanism;
use engram_federated::privacy::budget::Budget;
use engram_federated::privacy::clipping::ClippedUpdate;
pub use engram_federated::privacy::examples::NoiseSecret;
use engram_federated::privacy::examples::part_seed;
use engram_federated::privacy::sum::{PrivateSum, ReleaseNoise};
use engram_neural::{GradientSum, LabeledBatch, Moments, RandomStep, SampleErrors};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::job::{JobError, field};
use crate::reduce::LocalGradient;
use crate::trainer::{LocalStep, TrainError, Trainer};

/// Most parameters: a release draws a number for each, and members exchange their sums as they are.
const MAX_PARAMETERS: usize = 1 << 20;
/// Parameters whose noise one task draws.
const PART: usize = 1 << 12;
/// Leaves of a member's samples.
const LEAVES: u32 = 8;

/// What is added to the sums, and what a step costs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PrivacySpec {
    /// Euclidean norm to which the gradient of a sample is clipped.
    pub clip: f64,
    /// Standard deviation of the noise over `clip`.
    pub noise_multiplier: f64,
    /// Probability with which a sample takes part in a step.
    pub sampling_rate: f64,
    /// Expected number of samples of a step, by which sums are divided.
    pub expected: f64,
    /// Budget.
    pub epsilon: f64,
    /// Probability with which epsilon may be exceeded.
    pub delta: f64,
    /// Steps that fit the budget.
    pub steps: u64,
}

impl PrivacySpec {
    /// What the accountant charges for a step.
    #[must_use]
    pub const fn mechanism(&self) -> Mechanism {
        Mechanism { sampling_rate: self.sampling_rate, noise_multiplier: self.noise_multiplier }
    }

    /// Epsilon of so many steps, by the privacy loss distribution.
    #[must_use]
    pub fn spent(&self, steps: u64) -> f64 {
        engram_federated::privacy::pld::epsilon(&[(self.mechanism(), steps)], self.delta)
    }
}

/// Steps that a checkpoint has charged to the budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PrivacyCharge {
    /// Charged steps, the one in progress included.
    pub steps: u64,
}

/// A member's sum of clipped gradients, without noise.
#[derive(Debug, Clone, PartialEq)]
pub struct PrivateGradient {
    sum: PrivateSum,
    /// Number of samples in the sum.
    pub samples: u64,
    /// Sum of their losses.
    pub loss: f64,
    step: u64,
    spec: PrivacySpec,
    secret: NoiseSecret,
}

impl PrivateGradient {
    /// The sum in bytes, for other members.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        self.sum.steps().iter().flat_map(|step| step.to_le_bytes()).collect()
    }

    /// The sum of another member of the same step.
    ///
    /// # Errors
    /// It has another length, or a value is out of range.
    pub fn other(&self, bytes: &[u8], samples: u64, loss: f64) -> Result<Self, InvalidInput> {
        let expected = 8 * self.sum.steps().len();
        if bytes.len() != expected {
            return Err(InvalidInput::new("sum", bytes.len(), format!("{expected} bytes, 8 per parameter")));
        }
        let steps = bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect();
        Ok(Self { sum: PrivateSum::from_steps(steps)?, samples, loss, ..*self })
    }

    /// Adds the sums of all members, then the noise, once. The values are the noisy sum over the expected number of samples.
    ///
    /// # Errors
    /// Sums differ in length, or the noise is out of range.
    ///
    /// # Panics
    /// There are no sums.
    pub fn release(parts: &[&Self]) -> Result<GradientSum, InvalidInput> {
        let (first, others) = parts.split_first().expect("a group has a member");
        let mut total = first.sum.clone();
        others.iter().try_for_each(|part| total.merge(&part.sum))?;
        let seed = first.secret.release_seed(first.step, &total);
        let PrivacySpec { clip, noise_multiplier, expected, .. } = first.spec;
        let noise = ReleaseNoise { multiplier: noise_multiplier, share_sigma: None };
        let noisy = total.steps().par_chunks(PART).enumerate().map(|(part, steps)| {
            let sum = PrivateSum::from_steps(steps.to_vec())?;
            Ok(sum.release(clip, expected, noise, &part_seed(&seed, part as u64))?.mean)
        });
        let means: Vec<Vec<f64>> = noisy.collect::<Result<_, InvalidInput>>()?;
        Ok(GradientSum {
            values: means.into_iter().flatten().map(|mean| mean as f32).collect(),
            samples: parts.iter().map(|part| part.samples).sum(),
            loss: parts.iter().map(|part| part.loss).sum(),
        })
    }
}

/// Sum of a leaf; an error if a gradient is not finite.
type LeafSum = Result<PrivateSum, InvalidInput>;

fn add(sum: &mut LeafSum, gradient: &[f32], clip: f64) {
    let Ok(total) = sum else { return };
    let added = ClippedUpdate::new(gradient, clip).and_then(|clipped| total.add(&clipped));
    if let Err(error) = added {
        *sum = Err(error);
    }
}

impl Trainer {
    /// Sets the secret from which noise follows, the same on all members.
    pub fn set_noise_secret(&mut self, secret: NoiseSecret) {
        self.noise_secret = Some(secret);
    }

    /// Steps that were charged to the privacy budget.
    pub fn charged_steps(&self) -> u64 {
        self.charged
    }

    /// Charges the next step, then computes the sum of clipped gradients of a member.
    pub(crate) fn prepare_private<E: std::error::Error + 'static>(
        &mut self,
        spec: PrivacySpec,
        batches: &[LabeledBatch<'_>],
    ) -> Result<LocalStep, TrainError<E>> {
        let step = self.counters.step;
        let secret = self.noise_secret.ok_or(TrainError::NoiseSecret)?;
        let charged = self.charged.max(step + 1);
        if charged > spec.steps {
            return Err(TrainError::Budget { step, epsilon: spec.epsilon, delta: spec.delta });
        }
        self.charged = charged;
        let random = RandomStep { seed: self.spec.seed, step };
        let parameters = self.model.parameter_count();
        let mut gradient =
            PrivateGradient { sum: PrivateSum::new(parameters), samples: 0, loss: 0.0, step, spec, secret };
        let mut samples = SampleErrors::default();
        for data in batches.iter().filter(|data| !data.batch.is_empty()) {
            let start = || Ok(PrivateSum::new(parameters));
            let clip = |sum: &mut LeafSum, values: &[f32]| add(sum, values, spec.clip);
            let (sums, errors, loss) =
                self.engine.sample_gradients(&self.model, data, &self.loss, (LEAVES, random), start, clip)?;
            sums.into_iter().try_for_each(|sum| gradient.sum.merge(&sum?)).map_err(TrainError::Private)?;
            gradient.samples += data.batch.len() as u64;
            gradient.loss += loss;
            samples.losses.extend(errors.losses);
            samples.errors.extend(errors.errors);
        }
        let gradient = LocalGradient::Private(Box::new(gradient));
        Ok(LocalStep { step, gradient, moments: Moments::default(), samples, feedback: None })
    }
}

/// Returns the privacy of a run with so many training samples, if it has any; the budget is not checked while their number is unknown.
///
/// # Errors
/// A number is out of its range, the steps exceed the budget, or a setting is outside the accountants.
pub(crate) fn privacy_spec(run: &ReplayRun, population: Option<usize>) -> Result<Option<PrivacySpec>, JobError> {
    let Some(privacy) = &run.privacy else { return Ok(None) };
    check_settings(run)?;
    let ReplayPrivacy { epsilon, delta, noise_multiplier, clip } = *privacy;
    if !(clip.is_finite() && clip > 0.0) {
        return Err(field("spec.replay.privacy.clip", clip, "above 0"));
    }
    let expected = run.batch * run.accumulate;
    let population_size = population.map_or(expected, |it| it as u64);
    if expected > population_size {
        let allowed =
            format!("at most {} with accumulate {} and privacy", population_size / run.accumulate, run.accumulate);
        return Err(field("spec.replay.batch", run.batch, allowed));
    }
    let sampling_rate = expected as f64 / population_size as f64;
    let mechanism = Mechanism { sampling_rate, noise_multiplier };
    let known = population.map_or(1, |it| it as u64);
    let budget = mechanism.validate().and_then(|()| Budget::new(epsilon, delta, known));
    let budget = budget.map_err(|error| match error.field {
        "epsilon" => field("spec.replay.privacy.epsilon", error.value, error.allowed),
        "delta" => field("spec.replay.privacy.delta", error.value, error.allowed),
        _ => field("spec.replay.privacy.noiseMultiplier", error.value, error.allowed),
    })?;
    let steps = if population.is_some() { budget.affordable(mechanism, run.steps) } else { run.steps };
    if steps < run.steps {
        let allowed = format!(
            "at most {steps} with privacy: {steps} steps of batch {} at noiseMultiplier {noise_multiplier} spend the budget, epsilon {epsilon} at delta {delta:e}",
            run.batch
        );
        return Err(field("spec.replay.steps", run.steps, allowed));
    }
    Ok(Some(PrivacySpec { clip, noise_multiplier, sampling_rate, expected: expected as f64, epsilon, delta, steps }))
}

/// Refuses settings that the accountants do not cover.
fn check_settings(run: &ReplayRun) -> Result<(), JobError> {
    let settings: [(bool, &'static str, &str, &str); 9] = [
        (
            matches!(run.source, ReplaySource::Buffer(_)),
            "spec.replay.source.buffer",
            "set",
            "another source with privacy: the accountants require that every sample takes part independently",
        ),
        (
            run.ensemble > 1,
            "spec.replay.ensemble",
            "above 1",
            "1 with privacy: every model would be a release of its own",
        ),
        (run.sync_every > 1, "spec.replay.syncEvery", "above 1", "1 with privacy: workers would update without noise"),
        (
            run.compression.is_some(),
            "spec.replay.compression",
            "set",
            "absent with privacy: what it loses is added without noise",
        ),
        (
            run.parallelism.is_some(),
            "spec.replay.parallelism",
            "set",
            "absent with privacy: gradients are of single samples",
        ),
        (
            run.precision == TrainingPrecision::F16,
            "spec.replay.precision",
            "F16",
            "F32 or Bf16 with privacy: steps are not skipped",
        ),
        (
            run.model.loss.correlation.is_some(),
            "spec.replay.model.loss.correlation",
            "set",
            "absent with privacy: the gradient of a sample would depend on others",
        ),
        (
            run.model.init.run.is_some(),
            "spec.replay.model.init.run",
            "set",
            "absent with privacy: what the other run learned is not charged to this budget",
        ),
        (
            run.checkpoint.location.is_some(),
            "spec.replay.checkpoint.location",
            "set",
            "absent with privacy: another run that continues there would not know what was released since",
        ),
    ];
    match settings.into_iter().find(|(is_refused, ..)| *is_refused) {
        Some((_, name, value, allowed)) => Err(field(name, value, allowed)),
        None => Ok(()),
    }
}

/// Refuses models that are too large.
pub(crate) fn check_size(run: &ReplayRun, parameters: usize) -> Result<(), JobError> {
    if run.privacy.is_some() && parameters > MAX_PARAMETERS {
        let allowed = format!("at most {MAX_PARAMETERS} parameters with privacy");
        return Err(field("spec.replay.model.layers", format!("{parameters} parameters"), allowed));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
