//! Executes the schedule of an all-reduce over a transport.
//!
//! Ranges travel as chunks. A rank sends a few chunks ahead of those that it receives, so that one travels while another is added. Additions of
//! an element happen in the order of the schedule, whatever arrives first.

use std::ops::Range;

use crate::cost::Algorithm;
use crate::message::{MAX_PAYLOAD_BYTES, Tag};
use crate::schedule::{Operation, Phase, phases};
use crate::split;
use crate::transport::{Error, Transport, Wait};
use crate::tree;

/// Chunks that are sent before the first is received: more of them overflow the rings of shared memory, and are copied once more.
const AHEAD: usize = 2;
/// Usual elements of a chunk: 256 KiB, measured as the best compromise between system calls and what the cache of a processor holds.
const CHUNK: usize = 64 << 10;
const _: () = assert!(CHUNK * size_of::<f32>() <= MAX_PAYLOAD_BYTES);
#[cfg(target_endian = "big")]
compile_error!("messages carry the f32 of the processor, which must be little-endian");

/// Names a reduction within a generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reduction {
    /// Generation of the group.
    pub generation: u64,
    /// Training step.
    pub step: u64,
    /// Bucket of the step.
    pub bucket: u32,
}

impl Reduction {
    fn tag(self, phase: usize, chunk: usize, from: usize) -> Tag {
        let Self { generation, step, bucket } = self;
        Tag { generation, step, bucket, phase: phase as u16, chunk: chunk as u16, from: from as u16 }
    }
}

/// The schedule of one rank for one size, computed once.
#[derive(Debug, Clone)]
pub struct Plan {
    algorithm: Algorithm,
    elements: usize,
    phases: Vec<Phase>,
}

impl Plan {
    /// Computes the schedule, see [`phases`].
    ///
    /// # Panics
    /// As [`phases`].
    pub fn new(algorithm: Algorithm, rank: usize, elements: usize, weights: &[f64]) -> Self {
        Self { algorithm, elements, phases: phases(algorithm, rank, elements, weights) }
    }
}

/// Elements of a chunk of a range; both ends compute the same.
fn chunk_elements(range: usize) -> usize {
    // The number of a chunk has 16 bits; one chunk has at most 1 MiB: together 64 GiB.
    CHUNK.max(range.div_ceil(usize::from(u16::MAX))).min(MAX_PAYLOAD_BYTES / size_of::<f32>())
}

fn chunk(range: &Range<usize>, index: usize) -> Option<Range<usize>> {
    let size = chunk_elements(range.len());
    let start = range.start + index * size;
    (start < range.end).then(|| start..range.end.min(start + size))
}

fn chunks(range: &Range<usize>) -> usize {
    range.len().div_ceil(chunk_elements(range.len()))
}

fn most_chunks(phase: &Phase) -> usize {
    let sends = phase.sends.iter().map(|it| chunks(&it.range));
    let receives = phase.receives.iter().map(|it| chunks(&it.range));
    sends.chain(receives).max().unwrap_or(0)
}

/// Sends one chunk of each range of a phase.
fn send_chunk(
    transport: &mut dyn Transport,
    tag: Tag,
    phase: &Phase,
    source: &[f32],
    wait: &mut Wait<'_>,
) -> Result<(), Error> {
    let tag = Tag { from: transport.rank() as u16, ..tag };
    for send in &phase.sends {
        if let Some(range) = chunk(&send.range, usize::from(tag.chunk)) {
            transport.send(send.to, tag, bytemuck::cast_slice(&source[range]), wait)?;
        }
    }
    Ok(())
}

/// Adds element by element.
fn add(target: &mut [f32], values: &[f32]) {
    target.iter_mut().zip(values).for_each(|(target, value)| *target += value);
}

/// Sets each element to the sum of two.
fn sum(target: &mut [f32], left: &[f32], right: &[f32]) {
    target.iter_mut().zip(left.iter().zip(right)).for_each(|(target, (left, right))| *target = left + right);
}

/// Executes reductions; its buffers are allocated once.
#[derive(Debug, Default)]
pub struct Executor {
    staging: Vec<f32>,
}

impl Executor {
    /// Creates an executor.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sums `input` over all ranks into `output`. The input is only read: after an error the reduction can be repeated over another transport.
    ///
    /// # Errors
    /// The failed peer; the transport must be dropped.
    ///
    /// # Panics
    /// Input or output has another length than the plan.
    pub fn all_reduce(
        &mut self,
        transport: &mut dyn Transport,
        reduction: Reduction,
        plan: &Plan,
        input: &[f32],
        output: &mut [f32],
        wait: &mut Wait<'_>,
    ) -> Result<(), Error> {
        assert_eq!((input.len(), output.len()), (plan.elements, plan.elements), "elements of input, output and plan");
        // Algorithms in rank order name the own contribution in their schedule; the others add to it.
        let explicit = plan.algorithm.adds_in_rank_order() && !plan.phases.is_empty();
        if !explicit {
            output.copy_from_slice(input);
        }
        self.staging.resize(MAX_PAYLOAD_BYTES / size_of::<f32>(), 0.0);
        if let (Algorithm::Direct, [scatter, gather]) = (plan.algorithm, &plan.phases[..]) {
            // The own part is sent on chunk by chunk while the rest is still added: both phases cut it into the same chunks.
            for index in 0..most_chunks(scatter).max(most_chunks(gather)) + 2 * AHEAD {
                send_chunk(transport, reduction.tag(0, index, 0), scatter, input, wait)?;
                if let Some(index) = index.checked_sub(AHEAD) {
                    self.receive_chunk(transport, reduction.tag(0, index, 0), scatter, Some(input), output, wait)?;
                    send_chunk(transport, reduction.tag(1, index, 0), gather, output, wait)?;
                }
                if let Some(index) = index.checked_sub(2 * AHEAD) {
                    self.receive_chunk(transport, reduction.tag(1, index, 0), gather, None, output, wait)?;
                }
            }
            return Ok(());
        }
        for (number, phase) in plan.phases.iter().enumerate() {
            let own = (explicit && number == 0).then_some(input);
            for index in 0..most_chunks(phase) + AHEAD {
                send_chunk(transport, reduction.tag(number, index, 0), phase, own.unwrap_or(output), wait)?;
                if let Some(index) = index.checked_sub(AHEAD) {
                    self.receive_chunk(transport, reduction.tag(number, index, 0), phase, own, output, wait)?;
                }
            }
        }
        Ok(())
    }

    /// Receives one chunk of each range of a phase, and applies it in the listed order. `own` has the own contributions of the phase.
    fn receive_chunk(
        &mut self,
        transport: &mut dyn Transport,
        tag: Tag,
        phase: &Phase,
        own: Option<&[f32]>,
        output: &mut [f32],
        wait: &mut Wait<'_>,
    ) -> Result<(), Error> {
        let rank = transport.rank();
        // The own contribution, if it is the first of a sum: it is added together with the second, in one pass.
        let mut first: Option<&[f32]> = None;
        for (position, receive) in phase.receives.iter().enumerate() {
            let Some(range) = chunk(&receive.range, usize::from(tag.chunk)) else { continue };
            let tag = Tag { from: receive.from as u16, ..tag };
            let next = phase.receives.get(position + 1);
            let added = next.is_some_and(|it| it.operation == Operation::Add && it.range == receive.range);
            match (receive.operation, own.filter(|_| receive.from == rank)) {
                (Operation::Copy, Some(own)) if added => first = Some(&own[range]),
                (Operation::Copy, Some(own)) => output[range.clone()].copy_from_slice(&own[range]),
                (Operation::Add, Some(own)) => add(&mut output[range.clone()], &own[range]),
                (Operation::Copy, None) => {
                    transport.receive(tag, bytemuck::cast_slice_mut(&mut output[range]), wait)?;
                }
                (Operation::Add, None) => {
                    let staging = &mut self.staging[..range.len()];
                    transport.receive(tag, bytemuck::cast_slice_mut(staging), wait)?;
                    match first.take() {
                        Some(own) => sum(&mut output[range], own, staging),
                        None => add(&mut output[range], staging),
                    }
                }
            }
        }
        Ok(())
    }

    /// Sums the leaves of a global batch by a fixed tree: the result has the same bits for any assignment of leaves to ranks.
    ///
    /// `leaves` has the range of leaves of each rank; together they are 0..[`tree::LEAVES`] in order. `sums` are the own subtree sums in the order of
    /// [`tree::subtrees`], each with the elements of `output`.
    ///
    /// # Errors
    /// As [`Executor::all_reduce`].
    ///
    /// # Panics
    /// The number or the length of the sums does not fit.
    pub fn all_reduce_invariant(
        &mut self,
        transport: &mut dyn Transport,
        reduction: Reduction,
        leaves: &[Range<usize>],
        sums: &[Vec<f32>],
        output: &mut [f32],
        wait: &mut Wait<'_>,
    ) -> Result<(), Error> {
        let (rank, ranks) = (transport.rank(), transport.ranks());
        let nodes: Vec<Vec<tree::Subtree>> = leaves.iter().map(|range| tree::subtrees(range.clone())).collect();
        assert_eq!((leaves.len(), sums.len()), (ranks, nodes[rank].len()), "ranks and own subtrees");
        assert!(sums.iter().all(|it| it.len() == output.len()), "elements of all sums and the output");
        let parts = split::ranges(&split::shares(output.len(), &vec![1.0; ranks]));
        let most = parts.iter().map(chunks).max().unwrap_or(0);
        // The phase of a message is the number of the sender's subtree; sums travel in the phase after the last possible one.
        let distribute = tree::LEAVES;
        let mut contributions: Vec<(tree::Subtree, Vec<f32>)> = Vec::new();
        for index in 0..most + AHEAD {
            for to in (0..ranks).filter(|to| *to != rank) {
                let Some(range) = chunk(&parts[to], index) else { continue };
                for (number, sum) in sums.iter().enumerate() {
                    let tag = reduction.tag(number, index, rank);
                    transport.send(to, tag, bytemuck::cast_slice(&sum[range.clone()]), wait)?;
                }
            }
            let Some(index) = index.checked_sub(AHEAD) else { continue };
            let Some(range) = chunk(&parts[rank], index) else { continue };
            contributions.clear();
            for (from, subtrees) in nodes.iter().enumerate() {
                for (number, subtree) in subtrees.iter().enumerate() {
                    let mut values = vec![0.0; range.len()];
                    if from == rank {
                        values.copy_from_slice(&sums[number][range.clone()]);
                    } else {
                        let tag = reduction.tag(number, index, from);
                        transport.receive(tag, bytemuck::cast_slice_mut(&mut values), wait)?;
                    }
                    contributions.push((*subtree, values));
                }
            }
            output[range].copy_from_slice(&tree::combine(&mut contributions));
        }
        for index in 0..most + AHEAD {
            if let Some(range) = chunk(&parts[rank], index) {
                for to in (0..ranks).filter(|to| *to != rank) {
                    let tag = reduction.tag(distribute, index, rank);
                    transport.send(to, tag, bytemuck::cast_slice(&output[range.clone()]), wait)?;
                }
            }
            let Some(index) = index.checked_sub(AHEAD) else { continue };
            for from in (0..ranks).filter(|from| *from != rank) {
                let Some(range) = chunk(&parts[from], index) else { continue };
                let tag = reduction.tag(distribute, index, from);
                transport.receive(tag, bytemuck::cast_slice_mut(&mut output[range]), wait)?;
            }
        }
        Ok(())
    }
}
