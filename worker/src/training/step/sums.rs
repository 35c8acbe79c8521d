//! Sums of vectors over the connections, and of the buckets of a gradient while the backward pass computes the rest.
//!
//! Whether a gradient travels in buckets follows from the run and the number of members, so that all members agree. A member that kept its sum from
//! before a failure sends the same buckets as one that computes them meanwhile.

use crate::training::step::reduce::{Connections, GroupReduce, ReduceError, algorithm};
use crate::training::transport::network::wire_algorithm;
use engram_api::SumOrder;
use engram_collective::cost::Algorithm;
use engram_collective::executor::{Executor, Plan, Reduction};
use engram_collective::group::{Cause, MemberId, Suspicion};
use engram_collective::measure::Network;
use engram_collective::overlap::{Overlap, overlap};
use engram_collective::transport::{Error, Tcp, Wait};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// First bucket of a gradient that is reduced bucket by bucket.
const BUCKETS: u32 = 1 << 24;

/// Adds vectors of all ranks over the connections, on any thread.
pub(super) struct VectorSums<'a> {
    transport: &'a mut Tcp,
    executor: &'a mut Executor,
    members: &'a [MemberId],
    rank: usize,
    network: &'a Network,
    generation: u64,
    step: u64,
    /// Whether the first rank adds all sums, and the order of additions.
    how: (bool, SumOrder),
    cancel: &'a AtomicBool,
    limit: Duration,
    suspect: &'a mut (dyn FnMut(Suspicion) + Send),
}

impl VectorSums<'_> {
    /// Returns the algorithm that adds sums of so many bytes.
    pub(super) fn algorithm(&self, bytes: usize) -> Algorithm {
        algorithm(self.how.0, self.how.1, self.network, bytes)
    }

    /// Adds vectors of all ranks element by element.
    pub(super) fn sum(&mut self, bucket: u32, input: &[f32], output: &mut [f32]) -> Result<(), Error> {
        let algorithm = self.algorithm(size_of_val(input));
        let (members, suspect) = (self.members, &mut self.suspect);
        let mut keep_waiting = |peer: usize| {
            suspect(Suspicion { peer: members[peer], cause: Cause::Stalled });
            true
        };
        let mut wait = Wait::new(self.limit, self.cancel, &mut keep_waiting);
        let reduction = Reduction { generation: self.generation, step: self.step, bucket };
        let plan = Plan::new(algorithm, self.rank, input.len(), &self.network.weights(algorithm));
        self.executor.all_reduce(self.transport, reduction, &plan, input, output, &mut wait)
    }

    /// As [`Self::sum`] for one of the buckets of a gradient, unless the generation has ended.
    fn sum_bucket(&mut self, number: usize, input: &[f32], output: &mut [f32]) -> Result<(), Error> {
        if self.cancel.load(Ordering::Relaxed) {
            return Err(Error::Cancelled);
        }
        self.sum(BUCKETS + number as u32, input, output)
    }
}

impl GroupReduce<'_> {
    /// The sums over the connections; `None` in a group of one.
    pub(super) fn vector_sums(&mut self) -> Option<VectorSums<'_>> {
        let Connections { generation, members, rank, transport, network, .. } = &mut *self.connections;
        Some(VectorSums {
            transport: transport.as_mut()?,
            executor: self.executor,
            members,
            rank: *rank,
            network,
            generation: *generation,
            step: self.step,
            how: (self.job.parameter_server, self.job.order),
            cancel: self.cancel,
            limit: self.limit,
            suspect: self.suspect,
        })
    }

    /// Adds the buckets of gradients of all ranks, unless that was done during the backward pass.
    pub(super) fn sum_buckets(&mut self, input: &[f32]) -> Result<Vec<f32>, ReduceError> {
        if let Some(overlapped) = self.overlapped.take() {
            return overlapped;
        }
        let buckets = self.buckets.clone();
        let mut output = vec![0.0; input.len()];
        let Some(mut sums) = self.vector_sums() else { return Ok(input.to_vec()) };
        for (number, range) in buckets.into_iter().enumerate() {
            sums.sum_bucket(number, &input[range.clone()], &mut output[range])?;
        }
        self.note_buckets();
        Ok(output)
    }

    /// Notes the algorithm of the largest bucket as that of the gradient.
    fn note_buckets(&mut self) {
        let bytes = size_of::<f32>() * self.buckets.iter().map(Range::len).max().unwrap_or(0);
        if let Some(sums) = self.vector_sums() {
            self.algorithm = wire_algorithm(sums.algorithm(bytes));
        }
    }

    /// Calls `compute` with a function that takes the next bucket, and adds the buckets of all ranks meanwhile.
    pub(super) fn sum_during<T>(&mut self, compute: impl FnOnce(&mut dyn FnMut(&[f32])) -> T) -> T {
        let (buckets, computes) = (self.buckets.clone(), self.computes);
        let mut output = vec![0.0; buckets.first().map_or(0, |last| last.end)];
        let Some(mut sums) = self.vector_sums() else { return compute(&mut |_| {}) };
        let compute = |announce: &mut dyn FnMut(&[f32])| {
            computes(true);
            let computed = compute(announce);
            // From now on it waits for its peers.
            computes(false);
            computed
        };
        let (computed, Overlap { reduced, hidden, exposed }) = overlap(buckets.len(), compute, |number, values| {
            sums.sum_bucket(number, values, &mut output[buckets[number].clone()])
        });
        self.overlapped = Some(reduced.map(|_| output).map_err(ReduceError::from));
        self.hidden += hidden;
        self.waited += exposed;
        self.note_buckets();
        computed
    }
}

#[cfg(test)]
mod tests;
