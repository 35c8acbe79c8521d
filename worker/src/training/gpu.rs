//! The GPU of this worker that computes the gradients of a training.

use crate::shared::Shared;
use engram_api::SumOrder;
use engram_learn::gradients::{GpuGradients, is_worth_a_gpu};
use engram_train::job::Job;
use engram_train::{Ensemble, Trainer};
use std::sync::Arc;

/// Decides whether a training uses a GPU.
pub(in crate::training) struct TrainingGpu {
    shared: Arc<Shared>,
    /// Name of the GPU, or why the CPU computes the gradients; `None` without a GPU, or before the first step.
    decision: Option<Result<String, String>>,
}

impl TrainingGpu {
    pub(in crate::training) const fn new(shared: Arc<Shared>) -> Self {
        Self { shared, decision: None }
    }

    /// Lets a GPU compute the gradients of models that do not use one yet, if the worker has one and the training allows it.
    pub(in crate::training) fn attach(&mut self, job: &Job, trained: &mut Ensemble) {
        if self.shared.setup.device.task_gpus.is_empty() || trained.first().has_device() {
            return;
        }
        let decision = self.attached(job, trained);
        if self.decision.as_ref() != Some(&decision) {
            match &decision {
                Ok(gpu) => tracing::info!(gpu, "the gradients of a training are computed on a GPU"),
                Err(reason) => tracing::info!(reason, "the gradients of a training are computed on the CPU"),
            }
        }
        self.decision = Some(decision);
    }

    /// Returns the device that computed the gradients since the last call, with the reason where the CPU did so on a worker with a GPU, and whether it is
    /// a GPU.
    pub(in crate::training) fn used(&self, trained: &mut Ensemble) -> (String, bool) {
        match &self.decision {
            None => ("CPU".to_owned(), false),
            Some(Err(reason)) => (format!("CPU: {reason}"), false),
            Some(Ok(gpu)) => {
                let reasons: Vec<String> =
                    trained.members_mut().iter_mut().filter_map(Trainer::take_declined).collect();
                reasons.first().map_or_else(|| (gpu.clone(), true), |reason| (format!("CPU: {reason}"), false))
            }
        }
    }

    fn attached(&self, job: &Job, trained: &mut Ensemble) -> Result<String, String> {
        if job.order == SumOrder::PartitionInvariant {
            return Err("order is PartitionInvariant: the same bits on any workers".to_owned());
        }
        if job.parallelism.is_some() || job.stages.is_some() {
            return Err("not with parallelism".to_owned());
        }
        let (setup, parameters) = (&self.shared.setup, trained.first().model().parameter_count());
        // A cluster whose passes always use the GPU does the same with trainings.
        let always = setup.options.spec.gpu.threshold == Some(0);
        if !always && !is_worth_a_gpu(parameters, job.batch) {
            return Err(format!(
                "a batch of {} samples of a model of {parameters} parameters is too small for a GPU",
                job.batch
            ));
        }
        let gpus = self.shared.runs.task_gpus(&setup.options, &setup.device);
        let gpu = gpus.iter().find(|gpu| gpu.resource().healthy).ok_or("no GPU could be opened, or it has failed")?;
        for trainer in trained.members_mut() {
            trainer.set_device(Box::new(GpuGradients::new(gpu.with_own_usage(), always)))?;
        }
        Ok(gpu.name().to_owned())
    }
}
