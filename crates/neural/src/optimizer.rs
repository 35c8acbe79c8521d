//! Optimizers over the flat parameter buffer.
//!
//! The step takes a gradient sum and one factor that divides by the number of samples, undoes the loss scale and clips.
//! Every parameter is updated on its own, so the result does not depend on the number of threads.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::error::SettingError;
use crate::plan::View;

/// Which optimizer trains a model.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all_fields = "camelCase", deny_unknown_fields)]
pub enum OptimizerSpec {
    /// Stochastic gradient descent as `torch.optim.SGD`.
    Sgd {
        /// Momentum in [0, 1). Default 0.
        #[serde(default)]
        momentum: f32,
        /// Whether to use Nesterov's momentum; needs a momentum above 0. Default false.
        #[serde(default)]
        nesterov: bool,
        /// Added to the gradient times the parameter, >= 0. Default 0.
        #[serde(default)]
        weight_decay: f32,
    },
    /// Adam with decoupled weight decay as `torch.optim.AdamW` (Loshchilov and Hutter, 2019).
    AdamW {
        /// Decay of the mean of gradients, in [0, 1). Default 0.9.
        #[serde(default = "default_beta1")]
        beta1: f32,
        /// Decay of the mean of squared gradients, in [0, 1). Default 0.999.
        #[serde(default = "default_beta2")]
        beta2: f32,
        /// Added to the denominator, positive. Default 1e-8.
        #[serde(default = "default_epsilon")]
        epsilon: f32,
        /// Decoupled weight decay, >= 0. Default 0.01.
        #[serde(default = "default_weight_decay")]
        weight_decay: f32,
    },
}

fn default_beta1() -> f32 {
    0.9
}

fn default_beta2() -> f32 {
    0.999
}

fn default_epsilon() -> f32 {
    1e-8
}

fn default_weight_decay() -> f32 {
    0.01
}

impl Default for OptimizerSpec {
    fn default() -> Self {
        Self::AdamW {
            beta1: default_beta1(),
            beta2: default_beta2(),
            epsilon: default_epsilon(),
            weight_decay: default_weight_decay(),
        }
    }
}

/// Parameters per task.
const CHUNK: usize = 1 << 15;

/// An optimizer with its state.
#[derive(Debug, Clone, PartialEq)]
pub struct Optimizer {
    spec: OptimizerSpec,
    steps: u64,
    /// Momentum of SGD, or mean of gradients of AdamW. Empty for SGD without momentum.
    first: Vec<f32>,
    /// Mean of squared gradients of AdamW. Empty for SGD.
    second: Vec<f32>,
}

impl Optimizer {
    /// An optimizer for `parameters` parameters, with state 0.
    ///
    /// # Errors
    /// A setting is out of range.
    pub fn new(spec: OptimizerSpec, parameters: usize) -> Result<Self, SettingError> {
        let unit =
            |field, value: f32| SettingError::unless((0.0..1.0).contains(&value), field, value, "0 to 1 exclusive");
        let decay = |value: f32| {
            let valid = value.is_finite() && value >= 0.0;
            SettingError::unless(valid, "optimizer.weightDecay", value, "a number >= 0")
        };
        let (first, second) = match spec {
            OptimizerSpec::Sgd { momentum, nesterov, weight_decay } => {
                unit("optimizer.momentum", momentum)?;
                decay(weight_decay)?;
                let valid = !nesterov || momentum > 0.0;
                SettingError::unless(valid, "optimizer.nesterov", nesterov, "true only with a momentum above 0")?;
                (if momentum > 0.0 { parameters } else { 0 }, 0)
            }
            OptimizerSpec::AdamW { beta1, beta2, epsilon, weight_decay } => {
                unit("optimizer.beta1", beta1)?;
                unit("optimizer.beta2", beta2)?;
                decay(weight_decay)?;
                let valid = epsilon.is_finite() && epsilon > 0.0;
                SettingError::unless(valid, "optimizer.epsilon", epsilon, "a positive number")?;
                (parameters, parameters)
            }
        };
        Ok(Self { spec, steps: 0, first: vec![0.0; first], second: vec![0.0; second] })
    }

    /// The settings.
    pub fn spec(&self) -> OptimizerSpec {
        self.spec
    }

    /// Number of steps taken.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// State tensors by name, for checkpoints and digests: `momentum`, or `mean` and `square`.
    pub fn state(&self) -> Vec<(&'static str, &[f32])> {
        match self.spec {
            OptimizerSpec::Sgd { .. } if self.first.is_empty() => Vec::new(),
            OptimizerSpec::Sgd { .. } => vec![("momentum", &self.first)],
            OptimizerSpec::AdamW { .. } => vec![("mean", &self.first), ("square", &self.second)],
        }
    }

    /// Restores the number of steps and the state tensors, in the order of [`Optimizer::state`].
    ///
    /// # Errors
    /// The number or the lengths of the tensors differ.
    pub fn restore(&mut self, steps: u64, state: &[&[f32]]) -> Result<(), SettingError> {
        let lengths = self.state().iter().map(|(_, t)| t.len()).collect::<Vec<_>>();
        let actual = state.iter().map(|t| t.len()).collect::<Vec<_>>();
        let valid = lengths == actual;
        let value = format!("{actual:?}");
        SettingError::unless(valid, "lengths of optimizer state", value, "the lengths of this optimizer's state")?;
        self.steps = steps;
        for (own, saved) in [&mut self.first, &mut self.second].into_iter().zip(state) {
            own.copy_from_slice(saved);
        }
        Ok(())
    }

    /// Updates the parameters that are not frozen with the gradient `factor * sum`.
    ///
    /// # Panics
    /// `parameters` or `sum` has another length than the model.
    pub fn step(&mut self, parameters: &mut [f32], sum: &[f32], views: &[View], factor: f32, rate: f32) {
        assert_eq!(parameters.len(), sum.len(), "gradient of another model");
        self.steps += 1;
        for range in trained(views) {
            self.update(&mut parameters[range.clone()], &sum[range.clone()], range.start, factor, rate);
        }
    }

    /// Makes the step of AdamW whose mean of gradients is `factor * sum`, for the parameters that are not frozen. The means of squares are those of the
    /// first `frozen_at` steps.
    ///
    /// # Panics
    /// `parameters` or `sum` has another length than the model, or this is not AdamW.
    pub fn step_to_mean(
        &mut self,
        parameters: &mut [f32],
        (sum, factor): (&[f32], f32),
        views: &[View],
        frozen_at: u64,
        rate: f32,
    ) {
        assert_eq!(parameters.len(), sum.len(), "means of another model");
        let OptimizerSpec::AdamW { beta1, beta2, epsilon, weight_decay } = self.spec else {
            panic!("SGD has no mean of gradients");
        };
        self.steps += 1;
        let adam = AdamStep {
            root: root(beta2, frozen_at),
            ..AdamStep::new(self.steps, beta1, beta2, epsilon, weight_decay, rate, factor)
        };
        for range in trained(views) {
            let chunks = parameters[range.clone()].par_chunks_mut(CHUNK).zip(sum[range.clone()].par_chunks(CHUNK));
            let first = self.first[range.clone()].par_chunks_mut(CHUNK);
            let second = self.second[range].par_chunks(CHUNK);
            chunks.zip(first).zip(second).for_each(|(((p, sum), m), v)| adam.apply_mean(p, sum, m, v));
        }
    }

    /// Returns the denominators of AdamW's update after `steps` steps, and 0 where all gradients were 0; nothing of SGD.
    pub fn denominators(&self, steps: u64) -> Vec<f32> {
        let OptimizerSpec::AdamW { beta2, epsilon, .. } = self.spec else { return Vec::new() };
        let root = root(beta2, steps);
        let denominator = |square: &f32| if *square > 0.0 { square.sqrt() * root + epsilon } else { 0.0 };
        self.second.iter().map(denominator).collect()
    }

    fn update(&mut self, parameters: &mut [f32], sum: &[f32], start: usize, factor: f32, rate: f32) {
        let end = start + parameters.len();
        let chunks = parameters.par_chunks_mut(CHUNK).zip(sum.par_chunks(CHUNK));
        match self.spec {
            OptimizerSpec::Sgd { momentum: 0.0, weight_decay, .. } => chunks.for_each(|(p, g)| {
                p.iter_mut().zip(g).for_each(|(p, g)| *p -= rate * (g * factor + weight_decay * *p));
            }),
            OptimizerSpec::Sgd { momentum, nesterov, weight_decay } => {
                let first_step = self.steps == 1;
                let state = self.first[start..end].par_chunks_mut(CHUNK);
                chunks.zip(state).for_each(|((p, g), m)| {
                    for ((p, g), m) in p.iter_mut().zip(g).zip(m) {
                        let g = g * factor + weight_decay * *p;
                        *m = if first_step { g } else { momentum * *m + g };
                        *p -= rate * if nesterov { g + momentum * *m } else { *m };
                    }
                });
            }
            OptimizerSpec::AdamW { beta1, beta2, epsilon, weight_decay } => {
                let adam = AdamStep::new(self.steps, beta1, beta2, epsilon, weight_decay, rate, factor);
                let first = self.first[start..end].par_chunks_mut(CHUNK);
                let second = self.second[start..end].par_chunks_mut(CHUNK);
                chunks.zip(first).zip(second).for_each(|(((p, g), m), v)| adam.apply(p, g, m, v));
            }
        }
    }
}

/// Factors of one AdamW step; bias corrections in f64.
struct AdamStep {
    factor: f32,
    keep: f32,
    mean_share: f32,
    square_keep: f32,
    square_share: f32,
    size: f32,
    root: f32,
    epsilon: f32,
}

impl AdamStep {
    fn new(steps: u64, beta1: f32, beta2: f32, epsilon: f32, weight_decay: f32, rate: f32, factor: f32) -> Self {
        let (b1, b2, rate) = (decimal(beta1), decimal(beta2), decimal(rate));
        let exponent = i32::try_from(steps).unwrap_or(i32::MAX);
        Self {
            factor,
            keep: (1.0 - rate * decimal(weight_decay)) as f32,
            mean_share: (1.0 - b1) as f32,
            square_keep: b2 as f32,
            square_share: (1.0 - b2) as f32,
            size: (rate / (1.0 - b1.powi(exponent))) as f32,
            root: root(beta2, steps),
            epsilon,
        }
    }

    fn apply(&self, parameters: &mut [f32], sum: &[f32], mean: &mut [f32], square: &mut [f32]) {
        for (((p, g), m), v) in parameters.iter_mut().zip(sum).zip(mean).zip(square) {
            let g = g * self.factor;
            *m += self.mean_share * (g - *m);
            *v = self.square_keep * *v + self.square_share * (g * g);
            *p = *p * self.keep - self.size * *m / (v.sqrt() * self.root + self.epsilon);
        }
    }

    fn apply_mean(&self, parameters: &mut [f32], sum: &[f32], mean: &mut [f32], square: &[f32]) {
        for (((p, sum), m), v) in parameters.iter_mut().zip(sum).zip(mean).zip(square) {
            *m = sum * self.factor;
            *p = *p * self.keep - self.size * *m / (v.sqrt() * self.root + self.epsilon);
        }
    }
}

/// Bias correction of the root of the mean of squares after so many steps.
fn root(beta2: f32, steps: u64) -> f32 {
    let exponent = i32::try_from(steps).unwrap_or(i32::MAX);
    (1.0 / (1.0 - decimal(beta2).powi(exponent)).sqrt()) as f32
}

/// The f64 nearest to the shortest decimal of an f32, so that 0.9 means 0.9 as in Python, not 0.899999976.
fn decimal(value: f32) -> f64 {
    value.to_string().parse().expect("a finite f32 prints as a number")
}

/// Ranges of the parameters that are trained, neighbours merged.
fn trained(views: &[View]) -> Vec<std::ops::Range<usize>> {
    let mut ranges: Vec<std::ops::Range<usize>> = Vec::new();
    for view in views.iter().filter(|v| !v.frozen) {
        match ranges.last_mut() {
            Some(last) if last.end == view.range.start => last.end = view.range.end,
            _ => ranges.push(view.range.clone()),
        }
    }
    ranges
}

/// Euclidean norm of a gradient, summed in f64 over chunks in order. Not finite if any value is not finite.
pub fn global_norm(values: &[f32]) -> f64 {
    let sums: Vec<f64> =
        values.par_chunks(CHUNK).map(|c| c.iter().map(|&x| f64::from(x) * f64::from(x)).sum()).collect();
    sums.iter().sum::<f64>().sqrt()
}

/// Factor that limits a gradient of norm `norm` to `max_norm`, as `torch.nn.utils.clip_grad_norm_`: at most 1.
pub fn clip_factor(norm: f64, max_norm: f64) -> f64 {
    (max_norm / (norm + 1e-6)).min(1.0)
}
