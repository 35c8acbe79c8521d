//! Pipelines whose stages are members of the group: which member computes which stage of which part of a batch.
//!
//! All members keep all parameters. A member computes the gradients of its stage, and the group adds those of all stages, so that checkpoints, joins and
//! digests are those of any other run. Where members are missing, a pipeline has fewer, longer stages; with fewer members than pipelines there are none,
//! and each member computes all stages of a part of the batch.

use engram_neural::tree::{Node, subtrees};
use engram_neural::{
    GradientSum, LabeledBatch, Model, Parallelism, RandomStep, StageGradient, StagedEngine, StagedError,
};

use crate::ensemble::Ensemble;
use crate::job::{Job, JobError, field};
use crate::reduce::{LocalGradient, Reduce};
use crate::sharing::Shares;
use crate::trainer::{SummationOrder, TrainError, Trainer, split};

/// Largest message between two stages: a rank keeps 16 MiB of messages of a peer that it does not wait for yet.
const MAX_MESSAGE_BYTES: usize = 8 << 20;

/// What a member computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StagePlace {
    /// Pipeline, which has a part of each batch.
    pub pipeline: usize,
    /// Number of pipelines.
    pub pipelines: usize,
    /// Stage in the pipeline; a member of a larger number has nothing to compute.
    pub stage: usize,
    /// Stages of the pipeline.
    pub stages: usize,
    /// Rank of its first stage; the others follow.
    pub first_rank: usize,
}

impl StagePlace {
    /// Returns the place of a rank; `None` where no pipeline has two members, so that members compute parts of a batch as without pipelines.
    pub fn of(parallelism: Parallelism, rank: usize, members: usize) -> Option<Self> {
        let Parallelism { data, pipeline } = parallelism;
        if members <= data || pipeline == 1 {
            return None;
        }
        let first = |number: usize| members * number / data;
        let number = (0..data).rev().find(|number| first(*number) <= rank)?;
        let first_rank = first(number);
        let stages = pipeline.min(first(number + 1) - first_rank);
        Some(Self { pipeline: number, pipelines: data, stage: rank - first_rank, stages, first_rank })
    }

    /// Whether the member has nothing to compute.
    pub const fn is_idle(&self) -> bool {
        self.stage >= self.stages
    }

    /// Whether the member has the errors of the samples of its pipeline.
    pub const fn is_last(&self) -> bool {
        self.stage + 1 == self.stages
    }
}

impl Job {
    /// Returns the stage of a rank among so many members; `None` without pipelines over them.
    pub fn place(&self, rank: usize, members: usize) -> Option<StagePlace> {
        StagePlace::of(self.stages?, rank, members)
    }

    /// Rows of each batch for a place, and the order in which the group adds.
    pub(crate) fn part_of_place(&self, place: StagePlace) -> (std::ops::Range<usize>, SummationOrder) {
        let (rows, order) = self.part_of_shares(place.pipeline, &Shares::even(self.batch, place.pipelines));
        if place.is_idle() { (rows.start..rows.start, order) } else { (rows, order) }
    }

    /// Checks that messages between stages are not too large.
    pub(crate) fn check_stages(&self, model: &Model) -> Result<(), JobError> {
        let Some(stages) = self.stages.filter(|it| it.pipeline > 1) else { return Ok(()) };
        // With fewer members than pipelines there are no stages: a pipeline has at most its part of a batch.
        let rows = self.batch.div_ceil(stages.data).div_ceil(self.micro_batches(stages.data));
        let bytes = size_of::<f32>() * StagedEngine::largest_message(model, rows);
        if bytes > MAX_MESSAGE_BYTES {
            let most = self.batch * MAX_MESSAGE_BYTES / bytes;
            let allowed = format!(
                "at most {most}, or more microBatches: activations of {rows} samples take {bytes} bytes, a message between workers {MAX_MESSAGE_BYTES}"
            );
            return Err(field("spec.replay.batch", self.batch, allowed));
        }
        Ok(())
    }
}

impl Ensemble {
    /// Sets which stage all models compute from the next step on.
    pub fn set_place(&mut self, place: Option<StagePlace>) {
        self.members_mut().iter_mut().for_each(|trainer| trainer.set_place(place));
    }

    /// Seconds that this member needed for each operation since the last call.
    pub fn take_stage_seconds(&mut self) -> Vec<f64> {
        let mut total = Vec::new();
        for trainer in self.members_mut() {
            let own = trainer.staged.as_mut().map(StagedEngine::take_seconds).unwrap_or_default();
            total.resize(own.len(), 0.0);
            total.iter_mut().zip(own).for_each(|(total, own)| *total += own);
        }
        total
    }

    /// Cuts the stages by these costs, which must be the same on all members. `None`: by the number of operations.
    pub fn set_stage_costs(&mut self, costs: Option<&[f64]>) {
        for trainer in self.members_mut() {
            if let Some(staged) = &mut trainer.staged {
                staged.set_costs(&trainer.model, costs.map(<[f64]>::to_vec));
            }
        }
    }
}

impl Trainer {
    /// Sets which stage this member computes from the next step on.
    pub(crate) fn set_place(&mut self, place: Option<StagePlace>) {
        if place.is_some() && self.staged.is_none() {
            self.staged = Some(StagedEngine::new(&self.model, self.spec.precision));
        }
        self.place = place;
    }

    /// The sums of a stage over one batch.
    pub(crate) fn stage_gradient<R: Reduce>(
        &mut self,
        data: &LabeledBatch<'_>,
        order: &SummationOrder,
        random: RandomStep,
        place: StagePlace,
        reduce: &mut R,
    ) -> Result<StageGradient, TrainError<R::Error>>
    where
        R::Error: std::error::Error + 'static,
    {
        if place.is_idle() {
            return Ok(Default::default());
        }
        let (split, scale) = (split(order, data.batch.len()), self.scaler.scale());
        let staged = self.staged.as_mut().expect("a place comes with an engine");
        let link = reduce.stage_link(place).expect("members with stages have links");
        let task = (&split, random, scale);
        let at = (place.stage, place.stages);
        staged.gradient(&self.model, data, &self.loss, task, at, link).map_err(|error| match error {
            StagedError::Batch(error) => TrainError::Batch(error),
            StagedError::Link(error) => TrainError::Reduce(error),
        })
    }

    /// What the group reduces of the sums of a stage.
    pub(crate) fn stage_part(
        &self,
        mut sums: Vec<(Node, GradientSum)>,
        order: &SummationOrder,
        place: StagePlace,
    ) -> LocalGradient {
        match order {
            SummationOrder::Rank { .. } => {
                LocalGradient::Sum(sums.pop().map_or_else(|| StagedEngine::nothing(&self.model), |(_, sum)| sum))
            }
            SummationOrder::PartitionInvariant { leaves, .. } => {
                let nodes = (0..place.pipelines).flat_map(|number| subtrees(Job::leaves(number, place.pipelines)));
                let mut own = |node: Node| {
                    let at = sums.iter().position(|(own, _)| *own == node);
                    at.map_or_else(|| StagedEngine::nothing(&self.model), |at| std::mem::take(&mut sums[at].1))
                };
                let sums = nodes.map(|node| (node, own(node))).collect();
                LocalGradient::Stages { leaves: *leaves, sums }
            }
        }
    }
}

#[cfg(test)]
mod tests;
