//! Steps of several local updates: each member updates alone, then parameters and optimizer state are averaged by samples.
//!
//! The group reduces `n (start - end)` of every parameter and `n s` of every value of the optimizer's state, where n are the samples of a member.
//! Nothing of the trainer changes before the step is committed, so that the sums can be reduced again with other members.

use engram_neural::{GradientSum, LabeledBatch, Moments, SampleErrors, global_norm};

use crate::reduce::{Alone, LocalGradient, Reduce as _};
use crate::trainer::{LocalStep, StepOutcome, StepReport, SummationOrder, TrainError, Trainer};

impl Trainer {
    /// Updates alone and returns the weighted differences; the trainer is as before.
    pub(crate) fn prepare_average<E: std::error::Error + 'static>(
        &mut self,
        batches: &[LabeledBatch<'_>],
        order: &SummationOrder,
    ) -> Result<LocalStep, TrainError<E>> {
        let start = (self.model.parameters().to_vec(), self.optimizer.clone(), self.counters);
        let updated = self.update_alone(batches, order);
        let sum = updated.map(|(samples, total, loss)| (samples, self.weighted(&start.0, total, loss)));
        let step = start.2.step;
        self.model.parameters_mut().copy_from_slice(&start.0);
        (self.optimizer, self.counters, self.update) = (start.1, start.2, 0);
        let (samples, sum) = sum?;
        Ok(LocalStep { step, gradient: LocalGradient::Sum(sum), moments: Moments::default(), samples, feedback: None })
    }

    /// Makes the local updates; returns the errors of samples, their number and the sum of their losses.
    fn update_alone<E: std::error::Error + 'static>(
        &mut self,
        batches: &[LabeledBatch<'_>],
        order: &SummationOrder,
    ) -> Result<(SampleErrors, u64, f64), TrainError<E>> {
        let (mut samples, mut total, mut loss) = (SampleErrors::default(), 0, 0.0);
        let step = self.counters.step;
        for part in batches.chunks(batches.len().div_ceil(self.spec.local_updates as usize).max(1)) {
            let local = self.prepare_update(part, order, &mut Alone).map_err(|error| alone(error, step))?;
            let sum = Alone.gradient(&local.gradient).expect("the sums of one member cover its leaves");
            samples.losses.extend_from_slice(&local.samples.losses);
            samples.errors.extend_from_slice(&local.samples.errors);
            let report = self.commit_update::<E>(local, &sum)?;
            self.counters.step = step;
            self.update += 1;
            total += report.samples;
            loss += report.loss * report.samples as f64;
        }
        Ok((samples, total, loss))
    }

    /// Differences of the parameters to `start` and the optimizer's state, times the number of samples.
    fn weighted(&self, start: &[f32], samples: u64, loss: f64) -> GradientSum {
        let factor = samples as f32;
        let moved = start.iter().zip(self.model.parameters()).map(|(start, end)| factor * (start - end));
        let state = self.optimizer.state();
        let state = state.iter().flat_map(|(_, values)| values.iter().map(|value| factor * value));
        GradientSum { values: moved.chain(state).collect(), samples, loss }
    }

    /// Moves to the averages over the samples of all members.
    pub(crate) fn commit_average<E: std::error::Error + 'static>(
        &mut self,
        reduced: &GradientSum,
    ) -> Result<StepReport, TrainError<E>> {
        let step = self.counters.step;
        let samples = reduced.samples.max(1) as f64;
        let rate = self.schedule.rate(self.counters.updates);
        let (moved, state) = reduced.values.split_at(self.model.parameter_count());
        let norm = global_norm(moved) / samples;
        let loss = reduced.loss / samples;
        if !(norm.is_finite() && loss.is_finite() && state.iter().all(|value| value.is_finite())) {
            return Err(TrainError::NotFinite { step, loss, norm });
        }
        let mut outcome = StepOutcome::SkippedEmpty;
        if reduced.samples > 0 {
            let share = (1.0 / samples) as f32;
            self.model.parameters_mut().iter_mut().zip(moved).for_each(|(value, moved)| *value -= share * moved);
            let state: Vec<f32> = state.iter().map(|value| share * value).collect();
            let parts: Vec<&[f32]> = state.chunks(self.model.parameter_count().max(1)).collect();
            let updates = u64::from(self.spec.local_updates);
            let steps = self.optimizer.steps() + updates;
            self.optimizer.restore(steps, &parts).expect("every state has a value per parameter");
            self.counters.updates += updates;
            outcome = StepOutcome::Applied;
        }
        self.counters.step += 1;
        self.counters.samples += reduced.samples;
        let scale = self.scaler.scale();
        Ok(StepReport { step, outcome, samples: reduced.samples, loss, gradient_norm: norm, rate, scale })
    }
}

/// The error of a step that a member computes alone.
fn alone<E: std::error::Error + 'static>(error: TrainError<crate::SumError>, step: u64) -> TrainError<E> {
    match error {
        TrainError::Batch(error) => TrainError::Batch(error),
        TrainError::NotFinite { step, loss, norm } => TrainError::NotFinite { step, loss, norm },
        // Sums of a single member are complete; a number that is not finite is the only way to fail.
        TrainError::Reduce(_) => TrainError::NotFinite { step, loss: f64::NAN, norm: f64::NAN },
        TrainError::Private(error) => TrainError::Private(error),
        TrainError::Budget { step, epsilon, delta } => TrainError::Budget { step, epsilon, delta },
        TrainError::NoiseSecret => TrainError::NoiseSecret,
    }
}
