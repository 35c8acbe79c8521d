//! Gradients of a batch: by the engine or a GPU as a whole, or by logical devices of the worker that share it.

use engram_neural::tree::{Node, subtrees};
use engram_neural::{
    BatchError, DeviceEngine, GradientDevice, GradientSum, LabeledBatch, Moments, Parallelism, PipelinedEngine,
    Precision, RandomStep, SampleErrors, StagedEngine,
};

use crate::trainer::{SummationOrder, Trainer, split};

/// Gradient sums of subtrees, and losses and errors of the samples.
type BatchSums = (Vec<(Node, GradientSum)>, SampleErrors);

impl Trainer {
    /// Lets logical devices of the worker share each batch. Results have the same bits. Not for losses that need moments.
    ///
    /// # Panics
    /// The loss needs moments, or there are more stages than operations.
    pub fn set_parallelism(&mut self, parallelism: Parallelism) {
        assert!(!self.loss.needs_moments(), "pipelines know no sums over the batch");
        self.pipelines = Some(PipelinedEngine::new(&self.model, parallelism, self.spec.precision));
    }

    /// Share of the time of all stages in the last step in which they had nothing to do; `None` without pipelines.
    pub fn bubble(&self) -> Option<f64> {
        let staged = self.staged.as_ref().filter(|_| self.place.is_some());
        staged.map(StagedEngine::bubble).or_else(|| self.pipelines.as_ref().map(PipelinedEngine::bubble))
    }

    /// Lets a device compute the gradients of whole batches, with order `Rank`. They agree with those of the CPU to rounding.
    ///
    /// # Errors
    /// Why the gradients are computed on the CPU.
    pub fn set_device(&mut self, device: Box<dyn GradientDevice>) -> Result<(), String> {
        let spec = &self.spec;
        let reason = if spec.precision != Precision::F32 {
            Some("only with precision F32")
        } else if self.loss.needs_moments() {
            Some("not with loss.correlation")
        } else if spec.privacy.is_some() {
            Some("not with privacy, which clips the gradient of each sample")
        } else if self.pipelines.is_some() {
            Some("not with parallelism")
        } else {
            None
        };
        if let Some(reason) = reason {
            return Err(reason.to_owned());
        }
        let engine = DeviceEngine::new(&self.model, device);
        self.device = Some(engine.map_err(|layer| format!("{layer} has no kernels"))?);
        Ok(())
    }

    /// Whether a device computes gradients.
    pub fn has_device(&self) -> bool {
        self.device.is_some()
    }

    /// Returns why the CPU computed a batch since the last call; `None` if the device computed all, or there is none.
    pub fn take_declined(&mut self) -> Option<String> {
        self.device.as_mut()?.take_declined()
    }

    /// The sums of one batch by the device; `None` where the CPU must compute them.
    pub(crate) fn device_gradient(
        &mut self,
        data: &LabeledBatch<'_>,
        order: &SummationOrder,
        random: RandomStep,
    ) -> Result<Option<BatchSums>, BatchError> {
        let (Some(device), SummationOrder::Rank { .. }) = (&mut self.device, order) else { return Ok(None) };
        let computed = device.batch_gradient(&self.model, data, &self.loss, random, self.scaler.scale())?;
        Ok(computed.map(|(sum, samples)| (vec![(subtrees(0..1)[0], sum)], samples)))
    }

    /// The sums of one batch. `is_forwarded`: the forward pass for the moments is still in the engine's buffers.
    pub(crate) fn gradient(
        &mut self,
        data: &LabeledBatch<'_>,
        order: &SummationOrder,
        random: RandomStep,
        moments: &Moments,
        is_forwarded: bool,
    ) -> Result<BatchSums, BatchError> {
        if let Some(computed) = self.device_gradient(data, order, random)? {
            return Ok(computed);
        }
        let (split, scale) = (split(order, data.batch.len()), self.scaler.scale());
        if let Some(pipelines) = &mut self.pipelines {
            return pipelines.gradient(&self.model, data, &self.loss, &split, random, scale);
        }
        if !is_forwarded {
            self.engine.forward(&self.model, data, &self.loss, &split, random)?;
        }
        Ok(self.engine.backward(&self.model, data, &self.loss, moments, scale))
    }

    /// Takes back a buffer, so that the next step needs no new one.
    pub(crate) fn recycle(&mut self, sum: GradientSum) {
        match (&mut self.pipelines, &mut self.staged) {
            // Only sums of its last batch have values for its parameters alone.
            (_, Some(staged)) if self.place.is_some_and(|place| !place.is_idle()) => staged.recycle(sum),
            (Some(pipelines), _) => pipelines.recycle(sum),
            (None, _) => self.engine.recycle(sum),
        }
    }
}

#[cfg(test)]
mod tests {
    use engram_neural::{Batch, DeviceBatch, DeviceGradient, DeviceNetwork, Targets};
    use serde_json::{Value, json};

    use super::*;
    use crate::{Alone, TrainerSpec};

    /// Computes a gradient of ones in the steps below `steps`, and fails in the others.
    #[derive(Debug)]
    struct Ones {
        steps: u64,
    }

    impl GradientDevice for Ones {
        fn compute(&mut self, network: &DeviceNetwork, batch: &DeviceBatch<'_>) -> Result<DeviceGradient, String> {
            if batch.step >= self.steps {
                return Err(format!("step {}: the device failed", batch.step));
            }
            let rows = batch.positions.len();
            Ok(DeviceGradient {
                parameters: vec![1.0; network.parameters],
                losses: vec![0.5; rows],
                errors: vec![0.25; rows],
            })
        }
    }

    fn trainer(more: &[(&str, Value)]) -> Trainer {
        let mut spec = json!({
            "model": { "inputs": 3, "layers": [{ "dense": 4, "activation": "Relu" }, { "dropout": 0.2 }, { "dense": 1 }] },
            "loss": { "kind": "Mse" },
            "schedule": { "rate": 0.01 },
        });
        more.iter().for_each(|(name, value)| spec[*name] = value.clone());
        Trainer::new(&serde_json::from_value::<TrainerSpec>(spec).unwrap()).unwrap()
    }

    fn step(trainer: &mut Trainer, order: &SummationOrder) -> (f64, f64, Vec<f32>) {
        let values: Vec<f32> = (0..30_u8).map(|n| f32::from(n % 7) - 3.0).collect();
        let targets = [1.0; 10];
        let batch = Batch::rows(&values, 10, 3).unwrap();
        let data = LabeledBatch { batch, targets: Targets::Values(&targets), weights: None };
        let (report, samples) = trainer.step(&[data], order, &mut Alone).unwrap();
        (report.loss, report.gradient_norm, samples.errors)
    }

    const BY_RANK: SummationOrder = SummationOrder::Rank { leaves: 2 };

    #[test]
    fn steps_use_the_gradient_of_the_device_and_the_cpu_computes_those_in_which_it_fails() {
        let (mut on_device, mut on_cpu) = (trainer(&[]), trainer(&[]));
        on_device.set_device(Box::new(Ones { steps: 1 })).unwrap();
        let (loss, norm, errors) = step(&mut on_device, &BY_RANK);
        let parameters = on_device.model().parameter_count() as f64;
        assert!((norm - parameters.sqrt() / 10.0).abs() < 1e-6 && (loss - 0.5).abs() < 1e-9, "{norm} {loss}");
        assert_eq!((errors, on_device.take_declined()), (vec![0.25; 10], None));
        // Dropout and sums of the failed step are those of a trainer without a device.
        on_cpu.set_device(Box::new(Ones { steps: 1 })).unwrap();
        step(&mut on_cpu, &BY_RANK);
        on_cpu.device = None;
        assert_eq!(step(&mut on_device, &BY_RANK), step(&mut on_cpu, &BY_RANK));
        assert_eq!(on_device.digest(), on_cpu.digest());
        assert_eq!(on_device.take_declined().as_deref(), Some("step 1: the device failed"));
        assert_eq!(on_device.take_declined(), None);
    }

    #[test]
    fn order_with_the_same_bits_on_any_workers_uses_no_device() {
        let (mut on_device, mut on_cpu) = (trainer(&[]), trainer(&[]));
        on_device.set_device(Box::new(Ones { steps: 9 })).unwrap();
        let order = SummationOrder::PartitionInvariant { leaves: 4, owned: 0..4, global_rows: 10 };
        assert_eq!(step(&mut on_device, &order), step(&mut on_cpu, &order));
        assert_eq!(on_device.digest(), on_cpu.digest());
    }

    #[test]
    fn settings_without_kernels_are_refused_with_the_reason() {
        let refused = |more: &[(&str, Value)]| {
            let mut trainer = trainer(more);
            let reason = trainer.set_device(Box::new(Ones { steps: 9 })).unwrap_err();
            assert!(!trainer.has_device());
            reason
        };
        assert_eq!(refused(&[("precision", "Bf16".into())]), "only with precision F32");
        let correlation = json!({ "kind": "Mse", "correlation": { "weight": 0.1, "target": 0.9 } });
        assert_eq!(refused(&[("loss", correlation)]), "not with loss.correlation");
        let tropical = json!({ "inputs": 3, "layers": [{ "dense": 4 }, { "tropical": 1 }] });
        assert_eq!(refused(&[("model", tropical)]), "layer 1 (tropical) has no kernels");
        let mut shared = trainer(&[]);
        shared.set_parallelism(Parallelism { data: 2, pipeline: 1 });
        assert_eq!(shared.set_device(Box::new(Ones { steps: 9 })).unwrap_err(), "not with parallelism");
    }
}
