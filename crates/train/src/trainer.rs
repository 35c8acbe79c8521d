//! One data-parallel training step: local sums, reduction, decision, update.

use std::ops::Range;

use engram_federated::error::InvalidInput;
use engram_neural::tree::Node;
use engram_neural::{
    BatchError, DeviceEngine, GradientEngine, GradientSum, LabeledBatch, LeafSplit, Loss, LossScaler, LossSpec, Model,
    ModelSpec, Moments, Optimizer, OptimizerSpec, PipelinedEngine, Precision, RandomStep, SampleErrors, ScalerDecision,
    ScalerSpec, Schedule, ScheduleSpec, SettingError, SpecError, StagedEngine, clip_factor, global_norm,
};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use xxhash_rust::xxh3::Xxh3;

use crate::automatic::AutomaticCompression;
use crate::compression::{Factors, GradientCompression, GradientEncoding};
use crate::one_bit::OneBit;
use crate::private::{NoiseSecret, PrivacySpec};
use crate::reduce::{LocalGradient, Reduce};
use crate::stages::StagePlace;

/// What is trained and how.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TrainerSpec {
    /// The model.
    pub model: ModelSpec,
    /// The loss.
    pub loss: LossSpec,
    /// The optimizer. Default: AdamW with PyTorch's defaults.
    #[serde(default)]
    pub optimizer: OptimizerSpec,
    /// The learning rate.
    pub schedule: ScheduleSpec,
    /// Largest norm of the mean gradient; positive. Absent: no clipping.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f32>,
    /// Type of stored activations and of the gradients between layers. Default `F32`.
    #[serde(default)]
    pub precision: Precision,
    /// Dynamic loss scaling. Absent: with `F16` the defaults of the scaler; otherwise scale 1, and a step that is not
    /// finite is an error. The scale applies to per-sample gradients, which are not divided by the batch: with the
    /// default scale the first few steps may be skipped until it has adapted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaler: Option<ScalerSpec>,
    /// By what the reduced sum is divided. Default `Samples`.
    #[serde(default)]
    pub normalization: Normalization,
    /// Updates that a member makes alone before parameters and optimizer state are averaged by samples, at least 1. Default 1: gradients are
    /// reduced at every update.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub local_updates: u32,
    /// Compression of gradient sums between members. Absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<GradientCompression>,
    /// Differential privacy of samples. Absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub privacy: Option<PrivacySpec>,
    /// Seed of initial parameters and dropout. Default 42.
    #[serde(default = "default_seed")]
    pub seed: u64,
}

fn default_seed() -> u64 {
    42
}

const fn one() -> u32 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde calls")]
const fn is_one(number: &u32) -> bool {
    *number == 1
}

/// By what the reduced gradient sum is divided.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Normalization {
    /// The number of samples of the group: uniform sampling, and prioritized sampling over the whole buffer.
    #[default]
    Samples,
    /// Nothing: the weights already hold the factor `T_k / (T b_k)` of prioritized sampling per member.
    Weights,
}

/// A specification that cannot be trained.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TrainerError {
    /// The model.
    #[error(transparent)]
    Model(#[from] SpecError),
    /// A setting.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// The correlation penalty is defined on means over samples.
    #[error("normalization is Weights, allowed with loss.correlation: Samples")]
    Normalization,
    /// Members that update alone would have different loss scales, and send no gradients.
    #[error("localUpdates is {0}; allowed: 1 with loss scaling, compression or precision F16, otherwise 1 or more")]
    LocalUpdates(u32),
    /// Means of gradients are neither clipped nor scaled, and are divided by samples.
    #[error(
        "compression.kind is OneBitAdam, allowed with AdamW, normalization Samples, no clipNorm and no loss scaling"
    )]
    OneBitAdam,
}

/// A step that failed. The trainer is unchanged.
#[derive(Debug, Error)]
pub enum TrainError<E: std::error::Error + 'static> {
    /// A batch does not fit the model.
    #[error("batch does not fit the model")]
    Batch(#[from] BatchError),
    /// The reduction failed; the local step can be reduced again.
    #[error("failed to reduce")]
    Reduce(#[source] E),
    /// The gradient of a sample cannot be clipped.
    #[error("failed to clip the gradient of a sample")]
    Private(#[source] InvalidInput),
    /// The next step does not fit the privacy budget.
    #[error("privacy budget exhausted: step {step} does not fit epsilon {epsilon} at delta {delta:e}")]
    Budget {
        /// Number of the step.
        step: u64,
        /// The budget.
        epsilon: f64,
        /// The fixed delta.
        delta: f64,
    },
    /// There is no secret from which noise follows.
    #[error("training with privacy needs the noise secret of the run")]
    NoiseSecret,
    /// The reduced loss or gradient is not finite, and there is no loss scaling.
    #[error("step {step}: loss {loss:?} or gradient norm {norm:?} is not finite")]
    NotFinite {
        /// Number of the step.
        step: u64,
        /// Mean loss over the group's samples.
        loss: f64,
        /// Norm of the mean gradient.
        norm: f64,
    },
}

/// In which order the samples' gradients are added.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SummationOrder {
    /// By rank: the same bits for the same members and batches.
    Rank {
        /// Parts into which a member splits its batch; about one per core.
        leaves: u32,
    },
    /// Along a fixed tree: the same bits for every number of members.
    PartitionInvariant {
        /// Leaves of the global batch; a power of two, by convention 64.
        leaves: u32,
        /// Leaves of this member.
        owned: Range<u32>,
        /// Rows of the global batch.
        global_rows: usize,
    },
}

/// Numbers that only grow, part of a checkpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Counters {
    /// Steps committed, skipped ones included.
    pub step: u64,
    /// Steps that changed the parameters.
    pub updates: u64,
    /// Samples of all committed steps.
    pub samples: u64,
}

/// A member's part of a step, kept until the step is committed.
#[derive(Debug, Clone, PartialEq)]
pub struct LocalStep {
    /// Number of the step.
    pub step: u64,
    /// What the group reduces.
    pub gradient: LocalGradient,
    /// Moments of the whole group, where the loss needs them. They bind the local step to the members that took part.
    pub moments: Moments,
    /// Losses and errors of the member's samples, in order.
    pub samples: SampleErrors,
    /// With compression of values one by one: what the next steps of this member make up for once this one is committed.
    pub feedback: Option<Vec<f32>>,
}

/// Whether a committed step changed the parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepOutcome {
    /// The gradient was applied.
    Applied,
    /// The gradient was not finite; the loss scale was lowered.
    SkippedOverflow,
    /// No member had a sample.
    SkippedEmpty,
}

/// What a committed step did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepReport {
    /// Number of the step, from 0.
    pub step: u64,
    /// Whether the parameters changed.
    pub outcome: StepOutcome,
    /// Samples of the whole group.
    pub samples: u64,
    /// Objective: weighted mean loss plus the correlation penalty.
    pub loss: f64,
    /// Norm of the mean gradient before clipping.
    pub gradient_norm: f64,
    /// Learning rate.
    pub rate: f32,
    /// Loss scale of the step.
    pub scale: f32,
}

/// A model in training.
#[derive(Debug)]
pub struct Trainer {
    pub(crate) spec: TrainerSpec,
    pub(crate) model: Model,
    pub(crate) optimizer: Optimizer,
    pub(crate) scaler: LossScaler,
    pub(crate) counters: Counters,
    /// Lost by the compression of this member's sums so far; empty without compression. It differs between members.
    pub(crate) feedback: Vec<f32>,
    /// With `PowerSgd` and `Automatic`: the approximation of gradients, equal on all members.
    pub(crate) factors: Option<Factors>,
    /// With `Automatic`: its level, and what the next one follows from.
    pub(crate) automatic: Option<AutomaticCompression>,
    /// With `OneBitAdam`: when it begins, and what follows from the optimizer then.
    pub(crate) one_bit: Option<OneBit>,
    /// With privacy: what noise follows from.
    pub(crate) noise_secret: Option<NoiseSecret>,
    /// With privacy: steps charged to the budget, the one in progress included.
    pub(crate) charged: u64,
    /// Update within a step, of a member that updates alone.
    pub(crate) update: u32,
    /// Whether a step that is not finite is skipped rather than an error.
    scaled: bool,
    pub(crate) loss: Loss,
    pub(crate) schedule: Schedule,
    pub(crate) engine: GradientEngine,
    /// Computes instead of the engine what its device can, with order `Rank`.
    pub(crate) device: Option<DeviceEngine>,
    /// Computes instead of the engine where the devices of the worker share a batch.
    pub(crate) pipelines: Option<PipelinedEngine>,
    /// Computes instead of the engine where members are stages of pipelines, while there is a place.
    pub(crate) staged: Option<StagedEngine>,
    pub(crate) place: Option<StagePlace>,
}

impl Trainer {
    /// A trainer at step 0.
    ///
    /// # Errors
    /// The specification is not valid.
    pub fn new(spec: &TrainerSpec) -> Result<Self, TrainerError> {
        let model = Model::new(&spec.model, spec.seed)?;
        let loss = Loss::new(&spec.loss, model.outputs())?;
        if loss.needs_moments() && spec.normalization == Normalization::Weights {
            return Err(TrainerError::Normalization);
        }
        if let Some(clip) = spec.clip_norm
            && !(clip.is_finite() && clip > 0.0)
        {
            let error = SettingError { field: "clipNorm", value: clip.to_string(), allowed: "a positive number" };
            return Err(error.into());
        }
        if let Some(compression) = &spec.compression {
            compression.check()?;
        }
        let one_bit = OneBit::of(spec)?;
        let is_local = spec.local_updates > 1;
        let has_scale = spec.scaler.is_some() || spec.precision == Precision::F16;
        if spec.local_updates == 0 || is_local && (has_scale || spec.compression.is_some()) {
            return Err(TrainerError::LocalUpdates(spec.local_updates));
        }
        let feedback = if spec.compression.is_some() { model.parameter_count() } else { 0 };
        let scaler = spec.scaler.or_else(|| (spec.precision == Precision::F16).then(ScalerSpec::default));
        Ok(Self {
            optimizer: Optimizer::new(spec.optimizer, model.parameter_count())?,
            scaler: scaler.map_or_else(|| Ok(LossScaler::off()), LossScaler::dynamic)?,
            scaled: scaler.is_some(),
            counters: Counters::default(),
            feedback: vec![0.0; feedback],
            factors: spec.compression.as_ref().and_then(|it| it.factors(model.views())),
            automatic: spec.compression.filter(|it| it.kind == GradientEncoding::Automatic).map(|_| Default::default()),
            one_bit,
            noise_secret: None,
            charged: 0,
            update: 0,
            schedule: Schedule::new(spec.schedule)?,
            engine: GradientEngine::with_precision(spec.precision),
            device: None,
            pipelines: None,
            staged: None,
            place: None,
            spec: spec.clone(),
            model,
            loss,
        })
    }

    /// The specification.
    pub fn spec(&self) -> &TrainerSpec {
        &self.spec
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The model, to freeze layers or to load weights before training.
    pub fn model_mut(&mut self) -> &mut Model {
        &mut self.model
    }

    /// Steps, updates and samples so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Loss scaler, for its scale and number of skipped steps.
    pub fn scaler(&self) -> &LossScaler {
        &self.scaler
    }

    /// Fingerprint of parameters, optimizer state, scaler and counters: equal on all members after each step.
    pub fn digest(&self) -> u128 {
        let mut hash = Xxh3::new();
        let mut floats = |values: &[f32]| hash.update(bytemuck::cast_slice(values));
        floats(self.model.parameters());
        self.optimizer.state().iter().for_each(|(_, values)| floats(values));
        if let Some(factors) = &self.factors {
            floats(&factors.basis);
        }
        let scaler = self.scaler.state();
        floats(&[scaler.scale]);
        let counters = self.counters;
        for number in [
            self.optimizer.steps(),
            counters.step,
            counters.updates,
            counters.samples,
            scaler.skipped,
            u64::from(scaler.finite_steps),
            u64::from(scaler.overflow_steps),
        ] {
            hash.update(&number.to_le_bytes());
        }
        let automatic = self.automatic.iter().flat_map(AutomaticCompression::numbers);
        automatic.for_each(|number| hash.update(&number.to_le_bytes()));
        hash.digest128()
    }

    /// Computes this member's sums of the next step from its micro-batches, all of which count as one batch, or, with several local updates, as one
    /// batch per update. Where the loss needs the moments of the group, they are reduced on the way; with several local updates it uses those of the
    /// member. Changes no parameter.
    ///
    /// # Errors
    /// A batch does not fit, or the reduction of moments failed.
    pub fn prepare<R: Reduce>(
        &mut self,
        batches: &[LabeledBatch<'_>],
        order: &SummationOrder,
        reduce: &mut R,
    ) -> Result<LocalStep, TrainError<R::Error>>
    where
        R::Error: std::error::Error + 'static,
    {
        if let Some(privacy) = self.spec.privacy {
            return self.prepare_private(privacy, batches);
        }
        if self.spec.local_updates > 1 {
            return self.prepare_average(batches, order);
        }
        self.prepare_update(batches, order, reduce)
    }

    /// The sums of one update.
    pub(crate) fn prepare_update<R: Reduce>(
        &mut self,
        batches: &[LabeledBatch<'_>],
        order: &SummationOrder,
        reduce: &mut R,
    ) -> Result<LocalStep, TrainError<R::Error>>
    where
        R::Error: std::error::Error + 'static,
    {
        let number = self.counters.step * u64::from(self.spec.local_updates) + u64::from(self.update);
        let random = RandomStep { seed: self.spec.seed, step: number };
        let mut moments = Moments::default();
        if self.loss.needs_moments() {
            let mut local = Vec::new();
            for data in batches {
                let split = split(order, data.batch.len());
                local.extend(self.engine.forward(&self.model, data, &self.loss, &split, random)?);
            }
            moments = reduce.moments(&local).map_err(TrainError::Reduce)?;
        }
        let mut samples = SampleErrors::default();
        let mut sums: Vec<(Node, GradientSum)> = Vec::new();
        let buckets = reduce.buckets().to_vec();
        for (number, data) in batches.iter().enumerate() {
            let is_forwarded = self.loss.needs_moments() && batches.len() == 1;
            let is_final = number + 1 == batches.len() && !buckets.is_empty();
            let (parts, errors) = match self.place {
                Some(place) => self.stage_gradient(data, order, random, place, reduce)?,
                None if is_final => {
                    let (how, of_group) = ((order, random), (&moments, is_forwarded));
                    let earlier = sums.first().map(|(_, sum)| sum);
                    reduce
                        .overlap(|on_final| self.gradient_by_bucket(data, how, of_group, &buckets, earlier, on_final))?
                }
                None => self.gradient(data, order, random, &moments, is_forwarded)?,
            };
            samples.losses.extend(errors.losses);
            samples.errors.extend(errors.errors);
            self.accumulate(&mut sums, parts);
        }
        if let Some(place) = self.place {
            let gradient = self.stage_part(sums, order, place);
            return Ok(LocalStep { step: self.counters.step, gradient, moments, samples, feedback: None });
        }
        let mut feedback = None;
        let gradient = match order {
            SummationOrder::Rank { .. } => {
                let zero = || GradientSum { values: vec![0.0; self.model.parameter_count()], ..GradientSum::default() };
                let sum = sums.pop().map_or_else(zero, |(_, sum)| sum);
                let (gradient, lost) = self.encode(sum);
                feedback = lost;
                gradient
            }
            SummationOrder::PartitionInvariant { leaves, .. } => LocalGradient::Subtrees { leaves: *leaves, sums },
        };
        Ok(LocalStep { step: self.counters.step, gradient, moments, samples, feedback })
    }

    /// Encodes a sum as it travels; returns it with what the next sums of this member make up for.
    fn encode(&mut self, mut sum: GradientSum) -> (LocalGradient, Option<Vec<f32>>) {
        if let Some(one_bit) = &mut self.one_bit {
            return one_bit.encode(&self.optimizer, sum, &self.feedback);
        }
        match (self.encoding(), &self.spec.compression, &self.factors) {
            (Some(GradientEncoding::PowerSgd), _, Some(factors)) => {
                (LocalGradient::LowRank(factors.correct(&sum, &self.feedback)), None)
            }
            (Some(kind), Some(compression), _) => {
                let compression = GradientCompression { kind, ..*compression };
                let (sum, lost) = compression.compress(&sum, &self.feedback);
                (LocalGradient::Compressed(sum), Some(lost))
            }
            _ => {
                if self.is_flushing() {
                    sum.values.iter_mut().zip(&self.feedback).for_each(|(value, lost)| *value += lost);
                }
                (LocalGradient::Sum(sum), None)
            }
        }
    }

    fn accumulate(&mut self, sums: &mut Vec<(Node, GradientSum)>, parts: Vec<(Node, GradientSum)>) {
        if sums.is_empty() {
            *sums = parts;
            return;
        }
        for ((_, sum), (_, part)) in sums.iter_mut().zip(parts) {
            sum.add(&part);
            self.recycle(part);
        }
    }

    /// Applies or skips the reduced gradient of a step. `reduced` and `local.moments` are the same on every member, so
    /// every member takes the same decision.
    ///
    /// # Errors
    /// The gradient is not finite and there is no loss scaling. The trainer is unchanged.
    ///
    /// # Panics
    /// `local` belongs to another step.
    pub fn commit<E: std::error::Error + 'static>(
        &mut self,
        local: LocalStep,
        reduced: &GradientSum,
    ) -> Result<StepReport, TrainError<E>> {
        assert_eq!(local.step, self.counters.step, "local sums of another step");
        if self.spec.local_updates > 1 {
            return self.commit_average(reduced);
        }
        self.commit_update(local, reduced)
    }

    /// Applies or skips the gradient of one update.
    pub(crate) fn commit_update<E: std::error::Error + 'static>(
        &mut self,
        local: LocalStep,
        reduced: &GradientSum,
    ) -> Result<StepReport, TrainError<E>> {
        let step = local.step;
        let one_bit = self.one_bit.as_ref().filter(|_| OneBit::encoded(&local.gradient));
        let mean = one_bit.map(|it| (it.expand(reduced), it.warmup()));
        let reduced = mean.as_ref().map_or(reduced, |(sum, _)| sum);
        let scale = self.scaler.scale();
        let rate = self.schedule.rate(self.counters.updates);
        let divisor = match self.spec.normalization {
            Normalization::Samples => reduced.samples.max(1) as f64,
            Normalization::Weights => 1.0,
        };
        let is_private = self.spec.privacy.is_some();
        // A private sum is divided by the expected number of samples already.
        let unscale = if is_private { 1.0 } else { 1.0 / (divisor * f64::from(scale)) };
        let gradient_norm = global_norm(&reduced.values) * unscale;
        let loss = reduced.loss / divisor + self.loss.penalty(&local.moments);
        let finite = gradient_norm.is_finite() && loss.is_finite();
        if !finite && !self.scaled {
            return Err(TrainError::NotFinite { step, loss, norm: gradient_norm });
        }
        let outcome = if reduced.samples == 0 && !is_private {
            StepOutcome::SkippedEmpty
        } else if self.scaler.step(finite) == ScalerDecision::Skip {
            StepOutcome::SkippedOverflow
        } else {
            let clip = self.spec.clip_norm.map_or(1.0, |max| clip_factor(gradient_norm, f64::from(max)));
            let views = self.model.views().to_vec();
            let factor = (unscale * clip) as f32;
            let parameters = self.model.parameters_mut();
            match &mean {
                Some((_, frozen_at)) => {
                    self.optimizer.step_to_mean(parameters, (&reduced.values, factor), &views, *frozen_at, rate);
                }
                None => self.optimizer.step(parameters, &reduced.values, &views, factor, rate),
            }
            self.counters.updates += 1;
            StepOutcome::Applied
        };
        self.counters.step += 1;
        self.counters.samples += reduced.samples;
        if let Some(feedback) = local.feedback {
            self.feedback = feedback;
        }
        // A step that is skipped does not apply what was lost.
        if let Some(automatic) = self.automatic.as_mut().filter(|it| it.is_flushing && outcome == StepOutcome::Applied)
        {
            automatic.is_flushing = false;
            self.feedback.fill(0.0);
        }
        if let (LocalGradient::LowRank(own), Some(factors), true) = (&local.gradient, &mut self.factors, finite) {
            self.feedback = factors.finish(own, reduced);
        }
        match local.gradient {
            LocalGradient::Sum(sum) => self.recycle(sum),
            LocalGradient::Subtrees { sums, .. } | LocalGradient::Stages { sums, .. } => {
                sums.into_iter().for_each(|(_, sum)| self.recycle(sum));
            }
            LocalGradient::Compressed(_) | LocalGradient::LowRank(_) | LocalGradient::Private(_) => {}
        }
        Ok(StepReport { step, outcome, samples: reduced.samples, loss, gradient_norm, rate, scale })
    }

    /// A whole step: [`Trainer::prepare`], the reduction, [`Trainer::commit`]. Returns the report and the losses and
    /// errors of this member's samples.
    ///
    /// # Errors
    /// As the three parts. The trainer is unchanged.
    pub fn step<R: Reduce>(
        &mut self,
        batches: &[LabeledBatch<'_>],
        order: &SummationOrder,
        reduce: &mut R,
    ) -> Result<(StepReport, SampleErrors), TrainError<R::Error>>
    where
        R::Error: std::error::Error + 'static,
    {
        let mut local = self.prepare(batches, order, reduce)?;
        let reduced = reduce.gradient(&local.gradient).map_err(TrainError::Reduce)?;
        let samples = std::mem::take(&mut local.samples);
        Ok((self.commit(local, &reduced)?, samples))
    }
}

pub(crate) fn split(order: &SummationOrder, rows: usize) -> LeafSplit {
    match order {
        SummationOrder::Rank { leaves } => LeafSplit::local(rows, *leaves),
        SummationOrder::PartitionInvariant { leaves, owned, global_rows } => {
            LeafSplit::partition(*global_rows, *leaves, owned.clone())
        }
    }
}
