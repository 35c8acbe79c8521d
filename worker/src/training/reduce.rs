//! Reductions of a training step over the connections of one generation.

use engram_collective::cost::Link;
use engram_collective::executor::{Executor, Plan, Reduction};
use engram_collective::group::{Cause, MemberId, Suspicion};
use engram_collective::message::Tag;
use engram_collective::transport::{Error, Tcp, Transport, Wait};
use engram_neural::tree::{Node, TreeError, combine, subtrees};
use engram_neural::{GradientSum, Moments};
use engram_train::job::{Job, LEAVES};
use engram_train::{LocalGradient, Reduce};
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Reductions of a step, which are part of the tags of messages.
const GRADIENT: u32 = 0;
const COUNTS: u32 = 1;
const MOMENTS: u32 = 2;
const FLAGS: u32 = 3;
/// Bytes of the moments of one leaf.
const MOMENT_BYTES: usize = 6 * 8;
/// Bytes of a count and a loss.
const COUNT_BYTES: usize = 2 * 8;

/// Why a reduction failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReduceError {
    /// A peer failed, or the reduction was cancelled.
    #[error("failed to reduce over the group")]
    Transport(#[from] Error),
    /// Subtrees do not cover the leaves.
    #[error("failed to add subtrees")]
    Tree(#[from] TreeError),
}

/// The members of a generation, and the connections to them.
pub(super) struct Connections {
    pub(super) generation: u64,
    pub(super) members: Vec<MemberId>,
    pub(super) rank: usize,
    /// `None` for a group of one.
    pub(super) transport: Option<Tcp>,
}

/// One step's reductions.
pub(super) struct GroupReduce<'a> {
    pub(super) connections: &'a mut Connections,
    pub(super) executor: &'a mut Executor,
    pub(super) step: u64,
    /// Leaves whose moments each rank sends.
    pub(super) leaves: &'a dyn Fn(usize) -> usize,
    pub(super) cancel: &'a AtomicBool,
    pub(super) limit: Duration,
    /// Receives suspicions of peers that make no progress.
    pub(super) suspect: &'a mut dyn FnMut(Suspicion),
}

impl GroupReduce<'_> {
    /// Sends `own` to all ranks; returns what all ranks sent, in rank order. `length` is the length of each rank's message.
    fn exchange(
        &mut self,
        bucket: u32,
        own: &[u8],
        length: impl Fn(usize) -> usize,
    ) -> Result<Vec<Vec<u8>>, ReduceError> {
        let Connections { generation, members, rank, transport } = &mut *self.connections;
        let Some(transport) = transport else { return Ok(vec![own.to_vec()]) };
        let suspect = &mut self.suspect;
        let mut keep_waiting = |peer: usize| {
            suspect(Suspicion { peer: members[peer], cause: Cause::Stalled });
            true
        };
        let mut wait = Wait::new(self.limit, self.cancel, &mut keep_waiting);
        let tag = |from: usize| Tag {
            generation: *generation,
            step: self.step,
            bucket,
            phase: 0,
            chunk: 0,
            from: from as u16,
        };
        for to in (0..members.len()).filter(|to| to != rank) {
            transport.send(to, tag(*rank), own, &mut wait)?;
        }
        let mut all = Vec::with_capacity(members.len());
        for from in 0..members.len() {
            if from == *rank {
                all.push(own.to_vec());
                continue;
            }
            let mut bytes = vec![0; length(from)];
            transport.receive(tag(from), &mut bytes, &mut wait)?;
            all.push(bytes);
        }
        Ok(all)
    }

    /// Exchanges the flags of a commit; returns those of all ranks.
    pub(super) fn flags(&mut self, valid: bool) -> Result<Vec<bool>, ReduceError> {
        let all = self.exchange(FLAGS, &[u8::from(valid)], |_| 1)?;
        Ok(all.into_iter().map(|flag| flag[0] == 1).collect())
    }

    /// Adds vectors of all ranks element by element.
    fn sum(&mut self, input: &[f32]) -> Result<Vec<f32>, ReduceError> {
        let mut output = vec![0.0; input.len()];
        let Connections { generation, members, rank, transport } = &mut *self.connections;
        let Some(transport) = transport else { return Ok(input.to_vec()) };
        let ranks = members.len();
        let algorithm = Link::LOOPBACK.choose(ranks, size_of_val(input), true);
        let plan = Plan::new(algorithm, *rank, input.len(), &vec![1.0; ranks]);
        let suspect = &mut self.suspect;
        let mut keep_waiting = |peer: usize| {
            suspect(Suspicion { peer: members[peer], cause: Cause::Stalled });
            true
        };
        let mut wait = Wait::new(self.limit, self.cancel, &mut keep_waiting);
        let reduction = Reduction { generation: *generation, step: self.step, bucket: GRADIENT };
        self.executor.all_reduce(transport, reduction, &plan, input, &mut output, &mut wait)?;
        Ok(output)
    }

    /// Adds subtree sums of all ranks along the tree of leaves.
    fn sum_invariant(&mut self, sums: &[Vec<f32>]) -> Result<Vec<f32>, ReduceError> {
        let Connections { generation, members, rank, transport } = &mut *self.connections;
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
        let own: Vec<u8> = local.iter().flat_map(encode_moments).collect();
        let leaves = self.leaves;
        let all = self.exchange(MOMENTS, &own, |rank| leaves(rank) * MOMENT_BYTES)?;
        let mut total = Moments::default();
        for leaf in all.iter().flat_map(|bytes| bytes.chunks_exact(MOMENT_BYTES)) {
            total.add(&decode_moments(leaf));
        }
        Ok(total)
    }

    fn gradient(&mut self, local: &LocalGradient) -> Result<GradientSum, ReduceError> {
        let ranks = self.connections.members.len();
        match local {
            LocalGradient::Sum(sum) => {
                let counts = self.exchange(COUNTS, &encode_count(sum), |_| COUNT_BYTES)?;
                let values = self.sum(&sum.values)?;
                let mut total = GradientSum { values, ..GradientSum::default() };
                for (samples, loss) in counts.iter().map(|bytes| decode_count(bytes)) {
                    total.samples += samples;
                    total.loss += loss;
                }
                Ok(total)
            }
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

fn encode_count(sum: &GradientSum) -> [u8; COUNT_BYTES] {
    let mut bytes = [0; COUNT_BYTES];
    bytes[..8].copy_from_slice(&sum.samples.to_le_bytes());
    bytes[8..].copy_from_slice(&sum.loss.to_le_bytes());
    bytes
}

fn word(bytes: &[u8], at: usize) -> [u8; 8] {
    bytes[8 * at..8 * at + 8].try_into().expect("the range has eight bytes")
}

fn decode_count(bytes: &[u8]) -> (u64, f64) {
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
