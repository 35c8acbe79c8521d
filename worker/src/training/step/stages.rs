//! Messages between members that are stages of a pipeline, and where the stages are cut.

use crate::training::engine::{Engine, Part};
use crate::training::step::reduce::{
    COUNT_BYTES, COUNTS, Connections, GRADIENT, GroupReduce, ReduceError, decode_count, encode_count,
};
use engram_collective::group::{Cause, Suspicion};
use engram_collective::message::{MAX_PAYLOAD_BYTES, Tag};
use engram_collective::transport::{Transport as _, Wait};
use engram_neural::tree::{Node, combine};
use engram_neural::{GradientSum, StageLink, StageMessage};
use engram_train::{Ensemble, StagePlace};
use std::time::Instant;

/// First bucket of messages between stages: one per batch of a step.
const STAGES: u32 = 1 << 16;
/// Bucket of measured times.
const COSTS: u32 = 6;
/// Steps between two cuts by measured times, and the step of the first one.
const CUT_EVERY: u64 = 64;
const FIRST_CUT: u64 = 8;

/// Names the messages of a member that is a stage.
#[derive(Debug, Default)]
pub(in crate::training) struct Stages {
    /// Batches of the step so far.
    batches: u32,
    /// Rank of the first stage of the pipeline.
    first_rank: usize,
}

impl Stages {
    /// Begins the next batch.
    pub(super) const fn begin(&mut self, place: StagePlace) {
        self.batches += 1;
        self.first_rank = place.first_rank;
    }
}

impl GroupReduce<'_> {
    /// Passes the chunks of a message to `pass`, with the rank of the other end.
    fn with_stage(
        &mut self,
        message: StageMessage,
        is_sender: bool,
        mut pass: impl FnMut(&mut Connections, usize, Tag, &mut Wait<'_>) -> Result<(), ReduceError>,
    ) -> Result<(), ReduceError> {
        let started = Instant::now();
        let other = self.stages.first_rank + message.stage;
        let (step, bucket) = (self.step, STAGES + self.stages.batches);
        let members = self.connections.members.clone();
        let suspect = &mut self.suspect;
        let mut keep_waiting = |peer: usize| {
            suspect(Suspicion { peer: members[peer], cause: Cause::Stalled });
            true
        };
        let mut wait = Wait::new(self.limit, self.cancel, &mut keep_waiting);
        let from = if is_sender { self.connections.rank } else { other };
        let phase = 2 * message.micro_batch as u16 + u16::from(message.is_gradient);
        let generation = self.connections.generation;
        let tag = Tag { generation, step, bucket, phase, chunk: 0, from: from as u16 };
        let result = pass(self.connections, other, tag, &mut wait);
        self.waited += started.elapsed();
        result
    }

    /// Adds the sums of subtrees whose parameters are computed by several members: each subtree over the members, which is exact, then along the tree.
    pub(super) fn sum_stages(&mut self, leaves: u32, sums: &[(Node, GradientSum)]) -> Result<GradientSum, ReduceError> {
        let own: Vec<u8> = sums.iter().flat_map(|(_, sum)| encode_count(sum)).collect();
        let all = self.exchange(COUNTS, &own, |_| sums.len() * COUNT_BYTES)?;
        let values: Vec<f32> = sums.iter().flat_map(|(_, sum)| &sum.values).copied().collect();
        let values = self.sum(GRADIENT, &values)?;
        let length = values.len() / sums.len().max(1);
        let total = |(at, (node, _)): (usize, &(Node, GradientSum))| {
            let mut total = GradientSum { values: values[at * length..][..length].to_vec(), ..GradientSum::default() };
            for counts in &all {
                let (samples, loss) = decode_count(&counts[at * COUNT_BYTES..][..COUNT_BYTES]);
                total.samples += samples;
                total.loss += loss;
            }
            (*node, total)
        };
        Ok(combine(leaves, sums.iter().enumerate().map(total).collect(), |a, b| a.add(&b))?)
    }
}

impl StageLink for GroupReduce<'_> {
    type Error = ReduceError;

    fn send(&mut self, message: StageMessage, values: &[f32]) -> Result<(), ReduceError> {
        self.with_stage(message, true, |connections, to, tag, wait| {
            let Some(transport) = &mut connections.transport else { return Ok(()) };
            for (chunk, part) in bytemuck::cast_slice::<f32, u8>(values).chunks(MAX_PAYLOAD_BYTES).enumerate() {
                transport.send(to, Tag { chunk: chunk as u16, ..tag }, part, wait)?;
            }
            Ok(())
        })
    }

    fn receive(&mut self, message: StageMessage, values: &mut [f32]) -> Result<(), ReduceError> {
        self.with_stage(message, false, |connections, _, tag, wait| {
            let Some(transport) = &mut connections.transport else { return Ok(()) };
            let parts = bytemuck::cast_slice_mut::<f32, u8>(values).chunks_mut(MAX_PAYLOAD_BYTES);
            for (chunk, part) in parts.enumerate() {
                transport.receive(Tag { chunk: chunk as u16, ..tag }, part, wait)?;
            }
            Ok(())
        })
    }
}

impl Engine {
    /// Samples of the present step that count for this member: those of its part, divided by the stages that share them.
    pub(in crate::training) fn own_samples(&self, part: Part, samples: usize) -> u64 {
        let shared = |place: StagePlace| {
            let bound = |stage: usize| samples * stage / place.stages;
            if place.is_idle() { 0 } else { bound(place.stage + 1) - bound(place.stage) }
        };
        self.job.place(part.rank, part.members).map_or(samples, shared) as u64
    }

    /// Cuts stages by the number of operations until the members of a new generation have measured them.
    pub(super) fn reset_stages(&mut self) {
        self.trained.take_stage_seconds();
        self.trained.set_stage_costs(None);
    }
}

/// Cuts the stages by the times that the members measured, from time to time. All members do so at the same steps of a generation, and get the same
/// cuts. Results do not depend on them.
pub(super) fn cut_by_measured_costs(
    trained: &mut Ensemble,
    reduce: &mut GroupReduce<'_>,
    step: u64,
) -> Result<(), ReduceError> {
    if step % CUT_EVERY != FIRST_CUT {
        return Ok(());
    }
    let own = trained.take_stage_seconds();
    let bytes: Vec<u8> = own.iter().flat_map(|seconds| seconds.to_le_bytes()).collect();
    let all = reduce.exchange(COSTS, &bytes, |_| bytes.len())?;
    let mut total = vec![0.0; own.len()];
    for seconds in &all {
        let seconds = seconds.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes));
        total.iter_mut().zip(seconds).for_each(|(total, seconds)| *total += seconds);
    }
    // Nothing is measured in the first step of a generation.
    if total.iter().sum::<f64>() > 0.0 {
        trained.set_stage_costs(Some(&total));
    }
    Ok(())
}
