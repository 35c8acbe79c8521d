//! Reductions of a training step over the connections of one generation.

use crate::training::step::stages::Stages;
use crate::training::transport::network::wire_algorithm;
use engram_api::SumOrder;
use engram_collective::cost::Algorithm;
use engram_collective::executor::{Executor, Reduction};
use engram_collective::group::{Cause, MemberId, Suspicion};
use engram_collective::library::Accelerator;
use engram_collective::measure::Network;
use engram_collective::message::Tag;
use engram_collective::transport::{Error, Tcp, Transport, Wait};
use engram_neural::StageLink;
use engram_neural::tree::{Node, TreeError, combine, subtrees};
use engram_neural::{GradientSum, Moments};
use engram_proto::v1::ReduceAlgorithm;
use engram_train::job::{Job, LEAVES};
use engram_train::sharing::{Planner, Shares};
use engram_train::{CompressedSum, LocalGradient, PrivateGradient, Reduce, Round, StagePlace, StepTimes};
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Reductions of a step, which are part of the tags of messages.
pub(super) const GRADIENT: u32 = 0;
pub(super) const COUNTS: u32 = 1;
const MOMENTS: u32 = 2;
const FLAGS: u32 = 3;
const COMPRESSED: u32 = 4;
const RIGHT_FACTORS: u32 = 5;
/// Bytes of the moments of one leaf.
const MOMENT_BYTES: usize = 6 * 8;
/// Bytes of a count and a loss.
pub(super) const COUNT_BYTES: usize = 2 * 8;
/// Bytes of [`OwnWork`] and of the length of a compressed sum.
const WORK_BYTES: usize = 5 * 8;
/// Bytes of a compressed sum per message.
const CHUNK_BYTES: usize = 256 << 10;
/// Largest compressed sum: that of the largest model, and a margin for positions.
const MAX_COMPRESSED_BYTES: usize = 512 << 20;

/// Why a reduction failed.
#[derive(Debug, thiserror::Error)]
pub(in crate::training) enum ReduceError {
    /// A peer failed, or the reduction was cancelled.
    #[error("failed to reduce over the group")]
    Transport(#[from] Error),
    /// Subtrees do not cover the leaves.
    #[error("failed to add subtrees")]
    Tree(#[from] TreeError),
    /// A member sent a sum that is malformed.
    #[error("failed to add compressed sums")]
    Compressed(#[from] engram_collective::compress::Error),
    /// A member sent a private sum that is malformed.
    #[error("failed to add private sums")]
    Private(#[from] engram_federated::error::InvalidInput),
}

/// Rows of a member in a step and the time of their computation, and the times of its last step.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::training) struct OwnWork {
    pub(in crate::training) rows: u64,
    pub(in crate::training) nanoseconds: u64,
    pub(in crate::training) last_step: StepTimes,
}

/// What every member sends with its sum.
struct Counts {
    samples: u64,
    loss: f64,
    /// Length of its compressed sum.
    length: usize,
}

/// The members of a generation, and the connections to them.
pub(in crate::training) struct Connections {
    pub(in crate::training) generation: u64,
    pub(in crate::training) members: Vec<MemberId>,
    pub(in crate::training) rank: usize,
    /// `None` for a group of one.
    pub(in crate::training) transport: Option<Tcp>,
    /// The links between them, the same on all members.
    pub(in crate::training) network: Network,
    /// A library that sums over the members' GPUs, if all have it; with `order: Fast`.
    pub(in crate::training) accelerator: Option<Accelerator>,
    /// Whether NCCL is that library, or why there is none; empty in a group of one.
    pub(in crate::training) nccl: String,
}

/// One step's reductions: what they borrow of the engine and what they found, as one argument of the reductions, therefore more than a dozen fields.
pub(in crate::training) struct GroupReduce<'a> {
    pub(in crate::training) connections: &'a mut Connections,
    pub(in crate::training) executor: &'a mut Executor,
    pub(in crate::training) step: u64,
    /// Leaves whose moments each rank sends.
    pub(in crate::training) leaves: &'a dyn Fn(usize) -> usize,
    pub(in crate::training) job: &'a Job,
    /// Of this member, before its sum is reduced.
    pub(in crate::training) own: OwnWork,
    /// On the first rank, if parts follow the speed of members.
    pub(in crate::training) planner: Option<&'a mut Planner>,
    /// Parts of the next steps, as the first rank planned them.
    pub(in crate::training) planned: Option<Shares>,
    /// Times of the last step of all members, which they sent with their sums.
    pub(in crate::training) times: Vec<StepTimes>,
    /// Reductions of moments so far: one per member of an ensemble.
    pub(in crate::training) moments: u16,
    /// Of a member that is a stage of a pipeline.
    pub(in crate::training) stages: Stages,
    /// Ranges of a gradient that are reduced one by one, the same on all members; empty: as a whole.
    pub(in crate::training) buckets: Vec<Range<usize>>,
    /// The sum of all buckets, or why it failed, where they were reduced during the backward pass.
    pub(in crate::training) overlapped: Option<Result<Vec<f32>, ReduceError>>,
    /// Time of reductions during the backward pass.
    pub(in crate::training) hidden: Duration,
    /// Time spent in reductions of moments, in waits for other stages, and in reductions of buckets after the backward pass.
    pub(in crate::training) waited: Duration,
    pub(in crate::training) cancel: &'a AtomicBool,
    pub(in crate::training) limit: Duration,
    /// Algorithm of the last sum of gradients.
    pub(in crate::training) algorithm: ReduceAlgorithm,
    /// Receives whether gradient sums are computed during the reduction.
    pub(in crate::training) computes: &'a dyn Fn(bool),
    /// Receives suspicions of peers that make no progress.
    pub(in crate::training) suspect: &'a mut (dyn FnMut(Suspicion) + Send),
}

impl GroupReduce<'_> {
    /// Sends `own` to all ranks; returns what all ranks sent, in rank order. `length` is the length of each rank's message.
    pub(super) fn exchange(
        &mut self,
        bucket: u32,
        own: &[u8],
        length: impl Fn(usize) -> usize,
    ) -> Result<Vec<Vec<u8>>, ReduceError> {
        self.exchange_chunk((bucket, 0), own, length)
    }

    fn exchange_chunk(
        &mut self,
        (bucket, chunk): (u32, u16),
        own: &[u8],
        length: impl Fn(usize) -> usize,
    ) -> Result<Vec<Vec<u8>>, ReduceError> {
        let Connections { generation, members, transport, .. } = &mut *self.connections;
        let Some(transport) = transport else { return Ok(vec![own.to_vec()]) };
        let suspect = &mut self.suspect;
        let mut keep_waiting = |peer: usize| {
            suspect(Suspicion { peer: members[peer], cause: Cause::Stalled });
            true
        };
        let mut wait = Wait::new(self.limit, self.cancel, &mut keep_waiting);
        let tag =
            |from: usize| Tag { generation: *generation, step: self.step, bucket, phase: 0, chunk, from: from as u16 };
        Ok(exchange_all(transport, tag, own, length, &mut wait)?)
    }

    /// Exchanges the flags of a commit; returns those of all ranks.
    pub(in crate::training) fn flags(&mut self, valid: bool) -> Result<Vec<bool>, ReduceError> {
        let all = self.exchange(FLAGS, &[u8::from(valid)], |_| 1)?;
        Ok(all.into_iter().map(|flag| flag[0] == 1).collect())
    }

    /// Exchanges what every member sends with its sum, and the plan of the first rank.
    fn counts(&mut self, samples: u64, loss: f64, length: usize) -> Result<Vec<Counts>, ReduceError> {
        let members = self.connections.members.len();
        let mut own = [samples.to_le_bytes(), loss.to_le_bytes(), (length as u64).to_le_bytes()].concat();
        own.extend_from_slice(&self.own.rows.to_le_bytes());
        let StepTimes { step, reduction } = self.own.last_step;
        for number in [self.own.nanoseconds, step, reduction] {
            own.extend_from_slice(&number.to_le_bytes());
        }
        if let Some(planner) = &self.planner {
            own.extend(planner.sizes().iter().flat_map(|size| size.to_le_bytes()));
        }
        let is_planned = self.job.balance.is_some() && members > 1;
        let fixed = COUNT_BYTES + WORK_BYTES;
        let plan = |rank: usize| if is_planned && rank == 0 { 4 * members } else { 0 };
        let all = self.exchange(COUNTS, &own, |rank| fixed + plan(rank))?;
        if is_planned {
            let sizes: Vec<u32> = all[0][fixed..].as_chunks().0.iter().map(|it| u32::from_le_bytes(*it)).collect();
            self.planned = Shares::of(&sizes, self.job.batch, members);
        }
        let number = |bytes: &[u8], at: usize| u64::from_le_bytes(word(bytes, at));
        self.times = all.iter().map(|it| StepTimes { step: number(it, 5), reduction: number(it, 6) }).collect();
        if let Some(planner) = &mut self.planner {
            let time = |bytes: &Vec<u8>| (number(bytes, 3) as usize, number(bytes, 4) as f64 * 1e-9);
            planner.observe(&all.iter().map(time).collect::<Vec<_>>());
        }
        let counts = |bytes: &Vec<u8>| {
            let (samples, loss) = decode_count(bytes);
            Counts { samples, loss, length: u64::from_le_bytes(word(bytes, 2)) as usize }
        };
        Ok(all.iter().map(counts).collect())
    }

    /// Adds compressed sums of all ranks in rank order.
    fn sum_compressed(&mut self, sum: &CompressedSum) -> Result<GradientSum, ReduceError> {
        let counts = self.counts(sum.samples, sum.loss, sum.bytes.len())?;
        let mut parts: Vec<CompressedSum> = Vec::with_capacity(counts.len());
        let lengths: Vec<usize> = counts.iter().map(|it| it.length).collect();
        for (bytes, Counts { samples, loss, .. }) in self.gather(&sum.bytes, &lengths)?.into_iter().zip(counts) {
            parts.push(CompressedSum { bytes, samples, loss, ..*sum });
        }
        Ok(CompressedSum::add_all(&parts)?)
    }

    /// Adds the sums of clipped gradients of all ranks, then the noise: every rank adds the same noise to the same sum.
    fn sum_private(&mut self, own: &PrivateGradient) -> Result<GradientSum, ReduceError> {
        let bytes = own.to_bytes();
        let counts = self.counts(own.samples, own.loss, bytes.len())?;
        let lengths: Vec<usize> = counts.iter().map(|it| it.length).collect();
        let mut parts = Vec::with_capacity(counts.len());
        for (bytes, Counts { samples, loss, .. }) in self.gather(&bytes, &lengths)?.into_iter().zip(counts) {
            parts.push(own.other(&bytes, samples, loss)?);
        }
        Ok(PrivateGradient::release(&parts.iter().collect::<Vec<_>>())?)
    }

    /// Sends `own` to all ranks; returns the bytes of all ranks. Chunk by chunk, so that no rank is far ahead of another.
    fn gather(&mut self, own: &[u8], lengths: &[usize]) -> Result<Vec<Vec<u8>>, ReduceError> {
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if let Some(length) = lengths.iter().find(|length| **length > MAX_COMPRESSED_BYTES) {
            return Err(engram_collective::compress::Error::Malformed(*length).into());
        }
        let mut all: Vec<Vec<u8>> = lengths.iter().map(|length| Vec::with_capacity(*length)).collect();
        for (chunk, start) in (0..longest).step_by(CHUNK_BYTES).enumerate() {
            let part = |length: usize| start.min(length)..(start + CHUNK_BYTES).min(length);
            let own = &own[part(own.len())];
            let received = self.exchange_chunk((COMPRESSED, chunk as u16), own, |rank| part(lengths[rank]).len())?;
            all.iter_mut().zip(received).for_each(|(all, received)| all.extend(received));
        }
        Ok(all)
    }

    /// Adds vectors of all ranks element by element.
    pub(super) fn sum(&mut self, bucket: u32, input: &[f32]) -> Result<Vec<f32>, ReduceError> {
        if let Some(output) = self.sum_by_library(bucket, input)? {
            return Ok(output);
        }
        let mut output = vec![0.0; input.len()];
        let Some(mut sums) = self.vector_sums() else { return Ok(input.to_vec()) };
        let algorithm = sums.algorithm(size_of_val(input));
        sums.sum(bucket, input, &mut output)?;
        self.algorithm = wire_algorithm(algorithm);
        Ok(output)
    }

    /// Adds vectors of all ranks over their GPUs; `None` where that is not faster, or failed.
    fn sum_by_library(&mut self, bucket: u32, input: &[f32]) -> Result<Option<Vec<f32>>, ReduceError> {
        let Connections { generation, members, transport, network, accelerator, nccl, .. } = &mut *self.connections;
        let Some(transport) = transport else { return Ok(None) };
        let algorithm = algorithm(self.job.parameter_server, self.job.order, network, size_of_val(input));
        let is_faster = |it: &&mut Accelerator| it.is_faster(network, algorithm, size_of_val(input));
        let Some(own) = accelerator.as_mut().filter(is_faster) else { return Ok(None) };
        let suspect = &mut self.suspect;
        let mut keep_waiting = |peer: usize| {
            suspect(Suspicion { peer: members[peer], cause: Cause::Stalled });
            true
        };
        let mut wait = Wait::new(self.limit, self.cancel, &mut keep_waiting);
        let reduction = Reduction { generation: *generation, step: self.step, bucket };
        self.algorithm = ReduceAlgorithm::Nccl;
        let mut output = vec![0.0; input.len()];
        if own.all_reduce(transport, reduction, input, &mut output, &mut wait)? {
            return Ok(Some(output));
        }
        tracing::warn!(generation = *generation, "nccl failed: the sum is repeated over the connections");
        *accelerator = None;
        "no candidate: a sum failed".clone_into(nccl);
        Ok(None)
    }

    /// Adds subtree sums of all ranks along the tree of leaves.
    fn sum_invariant(&mut self, sums: &[Vec<f32>]) -> Result<Vec<f32>, ReduceError> {
        let Connections { generation, members, rank, transport, .. } = &mut *self.connections;
        let ranks = members.len();
        let Some(transport) = transport else {
            let nodes = subtrees(Job::leaves(*rank, ranks)).into_iter().zip(sums.iter().cloned()).collect();
            let add = |a: &mut Vec<f32>, b: Vec<f32>| a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
            return Ok(combine(LEAVES, nodes, add)?);
        };
        let mut output = vec![0.0; sums.first().map_or(0, Vec::len)];
        let leaves: Vec<Range<usize>> = (0..ranks)
            .map(|rank| {
                let leaves = Job::leaves(rank, ranks);
                leaves.start as usize..leaves.end as usize
            })
            .collect();
        let suspect = &mut self.suspect;
        let mut keep_waiting = |peer: usize| {
            suspect(Suspicion { peer: members[peer], cause: Cause::Stalled });
            true
        };
        let mut wait = Wait::new(self.limit, self.cancel, &mut keep_waiting);
        let reduction = Reduction { generation: *generation, step: self.step, bucket: GRADIENT };
        self.executor.all_reduce_invariant(transport, reduction, &leaves, sums, &mut output, &mut wait)?;
        Ok(output)
    }
}

impl Reduce for GroupReduce<'_> {
    type Error = ReduceError;

    fn moments(&mut self, local: &[Moments]) -> Result<Moments, ReduceError> {
        let started = Instant::now();
        let own: Vec<u8> = local.iter().flat_map(encode_moments).collect();
        let leaves = self.leaves;
        let all = self.exchange_chunk((MOMENTS, self.moments), &own, |rank| leaves(rank) * MOMENT_BYTES)?;
        self.moments += 1;
        let mut total = Moments::default();
        for leaf in all.iter().flat_map(|bytes| bytes.chunks_exact(MOMENT_BYTES)) {
            total.add(&decode_moments(leaf));
        }
        self.waited += started.elapsed();
        Ok(total)
    }

    fn buckets(&self) -> &[Range<usize>] {
        &self.buckets
    }

    fn overlap<T>(&mut self, compute: impl FnOnce(&mut dyn FnMut(&[f32])) -> T) -> T {
        self.sum_during(compute)
    }

    fn stage_link(&mut self, place: StagePlace) -> Option<&mut dyn StageLink<Error = ReduceError>> {
        self.stages.begin(place);
        Some(self)
    }

    fn gradient(&mut self, local: &LocalGradient) -> Result<GradientSum, ReduceError> {
        let ranks = self.connections.members.len();
        match local {
            LocalGradient::Sum(sum) if !self.buckets.is_empty() => {
                // The counts are the last: those of a member are complete when its backward pass has ended.
                let values = self.sum_buckets(&sum.values)?;
                let counts = self.counts(sum.samples, sum.loss, 0)?;
                Ok(counted(values, &counts))
            }
            LocalGradient::Sum(sum) => {
                let counts = self.counts(sum.samples, sum.loss, 0)?;
                let values = self.sum(GRADIENT, &sum.values)?;
                Ok(counted(values, &counts))
            }
            LocalGradient::Compressed(sum) => self.sum_compressed(sum),
            LocalGradient::Private(sum) => self.sum_private(sum),
            LocalGradient::LowRank(sum) => {
                let counts = self.counts(sum.samples, sum.loss, 0)?;
                let bucket = |round| if round == Round::Left { GRADIENT } else { RIGHT_FACTORS };
                let values = sum.reduce(|round, values| self.sum(bucket(round), values))?;
                Ok(counted(values, &counts))
            }
            LocalGradient::Stages { leaves, sums } => self.sum_stages(*leaves, sums),
            LocalGradient::Subtrees { sums, .. } => {
                let own: Vec<u8> = sums.iter().flat_map(|(_, sum)| encode_count(sum)).collect();
                let nodes = |rank: usize| subtrees(Job::leaves(rank, ranks));
                let counts = self.exchange(COUNTS, &own, |rank| nodes(rank).len() * COUNT_BYTES)?;
                let counts: Vec<(Node, (u64, f64))> = counts
                    .iter()
                    .enumerate()
                    .flat_map(|(rank, bytes)| nodes(rank).into_iter().zip(bytes.chunks_exact(COUNT_BYTES)))
                    .map(|(node, bytes)| (node, decode_count(bytes)))
                    .collect();
                let (samples, loss) = combine(LEAVES, counts, |a, b| (a.0, a.1) = (a.0 + b.0, a.1 + b.1))?;
                let sums: Vec<Vec<f32>> = sums.iter().map(|(_, sum)| sum.values.clone()).collect();
                Ok(GradientSum { values: self.sum_invariant(&sums)?, samples, loss })
            }
        }
    }
}

/// Sends `own` to all ranks; returns what all ranks sent, in rank order. `length` is the length of each rank's message.
pub(super) fn exchange_all(
    transport: &mut Tcp,
    tag: impl Fn(usize) -> Tag,
    own: &[u8],
    length: impl Fn(usize) -> usize,
    wait: &mut Wait<'_>,
) -> Result<Vec<Vec<u8>>, Error> {
    let (rank, ranks) = (transport.rank(), transport.ranks());
    for to in (0..ranks).filter(|to| *to != rank) {
        transport.send(to, tag(rank), own, wait)?;
    }
    let mut all = Vec::with_capacity(ranks);
    for from in 0..ranks {
        if from == rank {
            all.push(own.to_vec());
            continue;
        }
        let mut bytes = vec![0; length(from)];
        transport.receive(tag(from), &mut bytes, wait)?;
        all.push(bytes);
    }
    Ok(all)
}

/// Returns the algorithm that adds sums of so many bytes, the same on all ranks.
pub(super) fn algorithm(is_parameter_server: bool, order: SumOrder, network: &Network, bytes: usize) -> Algorithm {
    if is_parameter_server {
        return Algorithm::GatherBroadcast;
    }
    network.choose(bytes, order != SumOrder::Fast)
}

/// Returns a sum with the samples and losses of all ranks.
fn counted(values: Vec<f32>, counts: &[Counts]) -> GradientSum {
    let total = GradientSum { values, ..GradientSum::default() };
    counts.iter().fold(total, |mut total, Counts { samples, loss, .. }| {
        total.samples += samples;
        total.loss += loss;
        total
    })
}

pub(super) fn encode_count(sum: &GradientSum) -> [u8; COUNT_BYTES] {
    let mut bytes = [0; COUNT_BYTES];
    bytes[..8].copy_from_slice(&sum.samples.to_le_bytes());
    bytes[8..].copy_from_slice(&sum.loss.to_le_bytes());
    bytes
}

fn word(bytes: &[u8], at: usize) -> [u8; 8] {
    bytes[8 * at..8 * at + 8].try_into().expect("the range has eight bytes")
}

pub(super) fn decode_count(bytes: &[u8]) -> (u64, f64) {
    (u64::from_le_bytes(word(bytes, 0)), f64::from_le_bytes(word(bytes, 1)))
}

fn encode_moments(moments: &Moments) -> Vec<u8> {
    let Moments { samples, predicted, actual, predicted_squared, actual_squared, product } = *moments;
    let sums = [predicted, actual, predicted_squared, actual_squared, product];
    samples.to_le_bytes().into_iter().chain(sums.into_iter().flat_map(f64::to_le_bytes)).collect()
}

fn decode_moments(bytes: &[u8]) -> Moments {
    let sum = |at: usize| f64::from_le_bytes(word(bytes, at));
    Moments {
        samples: u64::from_le_bytes(word(bytes, 0)),
        predicted: sum(1),
        actual: sum(2),
        predicted_squared: sum(3),
        actual_squared: sum(4),
        product: sum(5),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_collective::cost::Link;

    #[test]
    fn only_order_fast_adds_in_another_order_than_that_of_the_ranks() {
        for (ranks, bytes) in [(2, 1 << 20), (4, 64 << 10), (8, 16 << 20)] {
            let network = Network::assumed(Link::SHARED_MEMORY, ranks);
            let chosen = |order| algorithm(false, order, &network, bytes);
            assert!(chosen(SumOrder::Rank).adds_in_rank_order(), "{ranks} ranks");
            let fast = chosen(SumOrder::Fast);
            assert!(!fast.adds_in_rank_order(), "{ranks} ranks: {fast:?}");
            assert!(network.seconds(fast, bytes) <= network.seconds(chosen(SumOrder::Rank), bytes));
            assert_eq!(algorithm(true, SumOrder::Fast, &network, bytes), Algorithm::GatherBroadcast);
        }
    }
}
