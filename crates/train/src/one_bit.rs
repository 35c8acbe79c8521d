//! 1-bit Adam (Tang et al., 2021): after a warm-up with whole gradients AdamW keeps its means of squares, so that its update is linear in the mean of
//! gradients, of which members then send one bit per parameter.
//!
//! A member sends the sign of each value of `n * beta1 * mean + (1 - beta1) * gradient` plus what was lost before, where `n` is its number of samples, so
//! that the sum over members divided by all samples is the new mean. Values are sent relative to the denominator of AdamW, and share one magnitude: then a
//! step moves every parameter by about the same, as steps of Adam do. A parameter whose gradient was 0 throughout the warm-up is not sent, and keeps its
//! value but for weight decay.

use engram_collective::compress::{Compression, Compressor};
use engram_neural::{GradientSum, Optimizer, OptimizerSpec, Precision};

use crate::compression::GradientEncoding;
use crate::reduce::{CompressedSum, LocalGradient};
use crate::trainer::{Normalization, TrainerError, TrainerSpec};

/// State of `OneBitAdam` that follows from that of the optimizer, equal on all members.
#[derive(Debug)]
pub(crate) struct OneBit {
    /// Updates with whole sums.
    warmup: u64,
    /// Denominators of the update of each parameter, 0 of one that is not sent; empty during the warm-up.
    denominators: Vec<f32>,
}

impl OneBit {
    /// Creates the state of a specification; `None` with another compression.
    ///
    /// # Errors
    /// [`TrainerError::OneBitAdam`].
    pub(crate) fn of(spec: &TrainerSpec) -> Result<Option<Self>, TrainerError> {
        let compression = spec.compression.filter(|it| it.kind == GradientEncoding::OneBitAdam);
        let Some(compression) = compression else { return Ok(None) };
        let is_scaled = spec.scaler.is_some() || spec.precision == Precision::F16;
        let is_adam = matches!(spec.optimizer, OptimizerSpec::AdamW { .. });
        if !is_adam || is_scaled || spec.clip_norm.is_some() || spec.normalization != Normalization::Samples {
            return Err(TrainerError::OneBitAdam);
        }
        Ok(Some(Self { warmup: compression.warmup_steps.unwrap_or_default(), denominators: Vec::new() }))
    }

    /// Returns the number of updates after which the means of squares stay as they are.
    pub(crate) const fn warmup(&self) -> u64 {
        self.warmup
    }

    /// Encodes a sum plus what was lost before; returns it with what is lost then, of which there is nothing during the warm-up.
    pub(crate) fn encode(
        &mut self,
        optimizer: &Optimizer,
        sum: GradientSum,
        feedback: &[f32],
    ) -> (LocalGradient, Option<Vec<f32>>) {
        let state = optimizer.state();
        let (OptimizerSpec::AdamW { beta1, .. }, [(_, mean), ..]) = (optimizer.spec(), &state[..]) else {
            unreachable!("other optimizers were refused");
        };
        if optimizer.steps() < self.warmup {
            return (LocalGradient::Sum(sum), None);
        }
        if self.denominators.is_empty() {
            self.denominators = optimizer.denominators(self.warmup);
        }
        let kept = beta1 * sum.samples as f32;
        let value = |at: usize| (kept * mean[at] + (1.0 - beta1) * sum.values[at]) / self.denominators[at];
        let values: Vec<f32> = self.sent().map(value).collect();
        let lost_before = self.sent().map(|at| feedback[at]).collect();
        let mut compressor =
            Compressor::restore(Compression::OneBit, lost_before).expect("this encoding has no setting");
        let bytes = compressor.encode(&values, 1).expect("the feedback has a value per parameter");
        let mut lost = vec![0.0; feedback.len()];
        self.sent().zip(compressor.error()).for_each(|(at, error)| lost[at] = *error);
        let GradientSum { samples, loss, .. } = sum;
        let elements = values.len();
        let sum = CompressedSum { compression: Compression::OneBit, divisor: 1, bytes, elements, samples, loss };
        (LocalGradient::Compressed(sum), Some(lost))
    }

    /// Returns the new mean of gradients, times the samples of all members, of the sum of what they sent.
    pub(crate) fn expand(&self, reduced: &GradientSum) -> GradientSum {
        let mut values = vec![0.0; self.denominators.len()];
        self.sent().zip(&reduced.values).for_each(|(at, value)| values[at] = value * self.denominators[at]);
        GradientSum { values, ..*reduced }
    }

    /// Whether a member's sum has the means of gradients instead of gradients.
    pub(crate) fn encoded(gradient: &LocalGradient) -> bool {
        matches!(gradient, LocalGradient::Compressed(sum) if sum.compression == Compression::OneBit)
    }

    /// Parameters that are sent, in ascending order.
    fn sent(&self) -> impl Iterator<Item = usize> + '_ {
        self.denominators.iter().enumerate().filter(|(_, it)| **it > 0.0).map(|(at, _)| at)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use super::*;
    use crate::job::tests::job;
    use crate::job::{Job, Rows};
    use crate::{Checkpoint, InProcess, Reduce, Trainer, TrainerSpec};

    const WARMUP: u64 = 10;

    /// A run of 60 steps with 500 parameters, of which all have a gradient.
    fn training(compression: &str) -> Job {
        let layers = serde_json::json!([{ "dense": 8, "activation": "Tanh" }, { "dense": 1 }]);
        let mut changes = vec![("/model/layers", layers), ("/steps", 60.into())];
        if !compression.is_empty() {
            changes.push(("/compression", serde_json::from_str(compression).unwrap()));
        }
        job(&changes).unwrap()
    }

    fn one_bit() -> Job {
        training("{ \"kind\": \"OneBitAdam\", \"warmupSteps\": 10 }")
    }

    fn fresh(job: &Job, members: usize) -> Vec<Trainer> {
        (0..members).map(|_| job.trainer().unwrap()).collect()
    }

    /// Trains on all members; returns them with the bytes of the last sum of the first one.
    fn train(job: &Job, mut members: Vec<Trainer>, steps: u64) -> (Vec<Trainer>, usize) {
        let data = job.dataset().unwrap();
        let count = members.len();
        let group = InProcess::group(count, Duration::from_secs(60));
        let bytes = std::thread::scope(|scope| {
            let threads: Vec<_> = (members.iter_mut().zip(group).enumerate())
                .map(|(rank, (trainer, mut reduce))| {
                    let data = &data;
                    scope.spawn(move || {
                        let mut bytes = 0;
                        for _ in 0..steps {
                            let (rows, order) = job.part(rank, count);
                            let samples = job.samples(0, data, trainer.counters().step, &rows);
                            let batch = Rows::of(trainer.model(), data, &samples[0]);
                            let labeled = [batch.labeled(rows.start).unwrap()];
                            let local = trainer.prepare(&labeled, &order, &mut reduce).unwrap();
                            bytes = size(&local.gradient);
                            let reduced = reduce.gradient(&local.gradient).unwrap();
                            trainer.commit::<crate::InProcessError>(local, &reduced).unwrap();
                        }
                        bytes
                    })
                })
                .collect();
            threads.into_iter().map(|it| it.join().unwrap()).next().unwrap()
        });
        (members, bytes)
    }

    fn size(gradient: &LocalGradient) -> usize {
        match gradient {
            LocalGradient::Sum(sum) => size_of_val(&sum.values[..]),
            LocalGradient::Compressed(sum) => sum.bytes.len(),
            other => panic!("{other:?}"),
        }
    }

    fn distance(a: &Trainer, b: &Trainer) -> f64 {
        let pairs = a.model().parameters().iter().zip(b.model().parameters());
        pairs.map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt()
    }

    #[test]
    fn members_send_a_bit_per_parameter_after_the_warm_up_and_train_alike() {
        let (exact, one_bit) = (training(""), one_bit());
        let (same, whole) = train(&one_bit, fresh(&one_bit, 3), WARMUP);
        let (expected, _) = train(&exact, fresh(&exact, 3), WARMUP);
        assert_eq!(same[0].digest(), expected[0].digest(), "the warm-up is AdamW");
        let (members, bytes) = train(&one_bit, same, 50);
        let parameters = members[0].model().parameter_count();
        assert_eq!((whole, bytes), (4 * parameters, 4 + parameters.div_ceil(8)));
        assert!(members.iter().all(|it| it.digest() == members[0].digest()), "members differ");
        let squares = |trainer: &Trainer| trainer.optimizer.state()[1].1.to_vec();
        assert_eq!(squares(&members[0]), squares(&expected[0]), "means of squares change after the warm-up");
        let (exact_end, _) = train(&exact, expected, 50);
        let start = exact.trainer().unwrap();
        let (moved, off) = (distance(&exact_end[0], &start), distance(&members[0], &exact_end[0]));
        assert!(off > 0.0 && off < 0.5 * moved, "{off} of {moved}");
    }

    #[test]
    fn what_is_sent_and_what_is_lost_are_the_new_mean_of_gradients() {
        let job = one_bit();
        let mut trainer = train(&job, fresh(&job, 1), WARMUP + 3).0.remove(0);
        let mean = trainer.optimizer.state()[0].1.to_vec();
        let lost_before = trainer.feedback.clone();
        let values: Vec<f32> = (0..mean.len()).map(|at| (at as f32).sin()).collect();
        let sum = GradientSum { values: values.clone(), samples: 64, loss: 1.0 };
        let one_bit = trainer.one_bit.as_mut().unwrap();
        let (gradient, lost) = one_bit.encode(&trainer.optimizer, sum, &trainer.feedback);
        let (LocalGradient::Compressed(sent), Some(lost)) = (gradient, lost) else { panic!("whole sums") };
        let sent = one_bit.expand(&CompressedSum::add_all([&sent]).unwrap());
        assert_eq!((sent.samples, sent.loss), (64, 1.0));
        for at in 0..mean.len() {
            let new = 0.9 * 64.0 * mean[at] + 0.1 * values[at];
            let found = sent.values[at] + (lost[at] - lost_before[at]) * one_bit.denominators[at];
            assert!((found - new).abs() < 1e-3, "parameter {at}: {found} {new}");
        }
    }

    #[test]
    fn restored_trainer_continues_with_the_same_bits_before_and_after_the_warm_up() {
        let job = one_bit();
        let (undisturbed, _) = train(&job, fresh(&job, 1), 30);
        let restore = |spec: &TrainerSpec, saved: &Checkpoint| Trainer::restore(spec, saved).unwrap().0;
        for at in [4, WARMUP, 20] {
            let (half, _) = train(&job, fresh(&job, 1), at);
            let saved = half[0].checkpoint(1, 1, BTreeMap::new()).unwrap();
            let (continued, _) = train(&job, vec![restore(&job.spec, &saved)], 30 - at);
            assert_eq!(continued[0].digest(), undisturbed[0].digest(), "checkpoint of step {at}");
            let mut forgetful = restore(&job.spec, &saved);
            forgetful.forget_feedback();
            let (forgetful, _) = train(&job, vec![forgetful], 30 - at);
            let is_equal = forgetful[0].digest() == undisturbed[0].digest();
            assert_eq!(is_equal, at <= WARMUP, "what was lost by step {at} counts");
        }
    }

    #[test]
    fn parameters_without_gradient_in_the_warm_up_keep_their_value() {
        let mut job = one_bit();
        job.spec.optimizer = OptimizerSpec::AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0 };
        let mut trainer = job.trainer().unwrap();
        trainer.model_mut().set_frozen("layers.0", true);
        let before = trainer.model().parameters().to_vec();
        let (trained, bytes) = train(&job, vec![trainer], WARMUP + 10);
        let after = trained[0].model().parameters();
        let moved = before.iter().zip(after).filter(|(before, after)| before != after).count();
        assert!(moved > 0 && moved <= 9, "{moved} of the 9 parameters of the last layer");
        assert_eq!(bytes, 4 + 2, "frozen parameters are not sent");
    }

    #[test]
    fn trainers_that_clip_or_scale_are_refused() {
        let spec = one_bit().spec;
        let refused = |spec: TrainerSpec| Trainer::new(&spec).unwrap_err().to_string();
        let text = refused(TrainerSpec { clip_norm: Some(1.0), ..spec.clone() });
        assert!(text.starts_with("compression.kind is OneBitAdam, allowed with AdamW"), "{text}");
        assert!(refused(TrainerSpec { precision: Precision::F16, ..spec.clone() }).contains("no loss scaling"));
        let mut without = spec;
        without.compression.as_mut().unwrap().warmup_steps = None;
        assert!(refused(without).starts_with("compression.warmupSteps is 0"));
    }
}
