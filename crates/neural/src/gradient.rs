//! Gradients of a labeled batch as sums over samples, computed leaf by leaf on the threads of the current rayon pool.
//!
//! Invariant: results depend on the batch and its split into leaves, not on the number of threads. A leaf is computed
//! on one thread in a fixed order, and leaf sums are added along the tree of [`crate::tree`].

use std::ops::Range;
use std::sync::Mutex;

use rayon::prelude::*;

use crate::batch::LabeledBatch;
use crate::error::BatchError;
use crate::loss::{Loss, Moments, SampleErrors};
use crate::model::Model;
use crate::pass::{RandomStep, Workspace, backward, backward_range, forward};
use crate::plan::{Op, Plan};
use crate::precision::Precision;
use crate::tree::{Node, subtrees};

/// Values that one task adds: a multiple of the cache line, small enough to share the work among cores.
const ADD_CHUNK: usize = 1 << 15;

/// A gradient as a sum over samples.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GradientSum {
    /// One value per parameter; 0 for frozen ones.
    pub values: Vec<f32>,
    /// Number of samples in the sum.
    pub samples: u64,
    /// Weighted sum of the per-sample losses, without the correlation penalty.
    pub loss: f64,
}

impl GradientSum {
    /// Adds the sum over other samples.
    ///
    /// # Panics
    /// The gradients have different lengths.
    pub fn add(&mut self, other: &Self) {
        assert_eq!(self.values.len(), other.values.len(), "gradients of different models");
        add_values(&mut self.values, &other.values);
        self.add_counts(other);
    }

    fn add_counts(&mut self, other: &Self) {
        self.samples += other.samples;
        self.loss += other.loss;
    }
}

fn add_values(target: &mut [f32], values: &[f32]) {
    let chunks = target.par_chunks_mut(ADD_CHUNK).zip(values.par_chunks(ADD_CHUNK));
    chunks.for_each(|(a, b)| a.iter_mut().zip(b).for_each(|(a, b)| *a += b));
}

/// Adds the sums of all leaves of a tree to that of the first, in the order of [`BackwardTask::sum`].
fn add_leaves(sums: &mut [GradientSum], add: &(impl Fn(&mut GradientSum, &GradientSum) + Sync)) {
    if sums.len() > 1 {
        let (left, right) = sums.split_at_mut(sums.len() / 2);
        rayon::join(|| add_leaves(left, add), || add_leaves(right, add));
        add(&mut left[0], &right[0]);
    }
}

/// Returns the first operation of the backward pass of a bucket; operations without parameters belong to the layer after them, those at the start of the
/// model to the first one.
fn first_operation(plan: &Plan, bucket: &Range<usize>) -> usize {
    let is_first = |op: &Op| !op.parameters.is_empty() && op.parameters.start == bucket.start;
    if bucket.start == 0 { 0 } else { plan.ops.iter().position(is_first).expect("a bucket begins with a layer") }
}

/// How the rows of a worker's batch belong to the leaves of the global batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeafSplit {
    /// Number of the first leaf.
    first: u32,
    /// Row boundaries: leaf `first + i` has rows `bounds[i]..bounds[i + 1]`.
    bounds: Vec<usize>,
}

impl LeafSplit {
    /// Splits `rows` rows evenly into `leaves` leaves of their own tree. The number of leaves is rounded up to a power
    /// of two. Two per core are enough; fewer leaves mean larger, more efficient products.
    pub fn local(rows: usize, leaves: u32) -> Self {
        let leaves = leaves.clamp(1, 1 << 16).next_power_of_two();
        Self::partition(rows, leaves, 0..leaves)
    }

    /// The leaves `owned` of a global batch of `global_rows` rows that is split evenly into `leaves` leaves.
    pub fn partition(global_rows: usize, leaves: u32, owned: Range<u32>) -> Self {
        let bound = |leaf: u32| (global_rows as u64 * u64::from(leaf) / u64::from(leaves)) as usize;
        let start = bound(owned.start);
        let bounds = (owned.start..=owned.end).map(|leaf| bound(leaf) - start).collect();
        Self { first: owned.start, bounds }
    }

    /// Rows of the global batch that belong to the leaves `owned`.
    pub fn global_rows(global_rows: usize, leaves: u32, owned: Range<u32>) -> Range<usize> {
        let bound = |leaf: u32| (global_rows as u64 * u64::from(leaf) / u64::from(leaves)) as usize;
        bound(owned.start)..bound(owned.end)
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.bounds.last().map_or(0, |last| *last)
    }

    /// Number of the first leaf.
    pub(crate) fn first(&self) -> u32 {
        self.first
    }

    /// Rows of a leaf, counted from the first one.
    pub(crate) fn leaf(&self, index: usize) -> Range<usize> {
        self.bounds[index]..self.bounds[index + 1]
    }

    pub(crate) fn leaves(&self) -> usize {
        self.bounds.len() - 1
    }
}

#[derive(Debug, Default)]
struct Leaf {
    rows: Range<usize>,
    work: Workspace,
    moments: Moments,
    samples: SampleErrors,
}

/// Computes gradients and keeps the buffers between steps.
#[derive(Debug, Default)]
pub struct GradientEngine {
    leaves: Vec<Leaf>,
    split: Option<LeafSplit>,
    precision: Precision,
    pool: Mutex<Vec<Vec<f32>>>,
}

impl GradientEngine {
    /// An engine in f32 without buffers; the first step allocates them.
    pub fn new() -> Self {
        Self::default()
    }

    /// An engine that stores activations, and rounds the gradients between layers, in the given type.
    pub fn with_precision(precision: Precision) -> Self {
        Self { precision, ..Self::default() }
    }

    /// Bytes of the activations that are stored between the forward and the backward pass.
    pub fn activation_bytes(&self) -> usize {
        self.leaves.iter().map(|leaf| leaf.work.activation_bytes()).sum()
    }

    /// First half of a step: the forward pass with dropout. Returns the moments of each leaf, in leaf order; their sum
    /// over all members of the group is what [`GradientEngine::backward`] needs.
    ///
    /// # Errors
    /// The batch does not fit the model, the loss or the split.
    pub fn forward(
        &mut self,
        model: &Model,
        data: &LabeledBatch<'_>,
        loss: &Loss,
        split: &LeafSplit,
        random: RandomStep,
    ) -> Result<Vec<Moments>, BatchError> {
        let plan = &model.plan;
        data.batch.check(plan.inputs, plan.jagged)?;
        loss.check(data, plan.outputs)?;
        crate::batch::length("rows of the split", split.rows(), data.batch.len())?;
        self.leaves.resize_with(split.leaves(), Leaf::default);
        for (leaf, bounds) in self.leaves.iter_mut().zip(split.bounds.windows(2)) {
            leaf.rows = bounds[0]..bounds[1];
            leaf.work.precision = self.precision;
        }
        self.leaves.par_iter_mut().for_each(|leaf| {
            let rows = data.slice(leaf.rows.clone(), plan.outputs);
            forward(plan, &model.parameters, &rows.batch, Some(random), &mut leaf.work);
            leaf.moments = loss.moments(leaf.work.outputs(plan), rows.targets, leaf.rows.len());
        });
        self.split = Some(split.clone());
        Ok(self.leaves.iter().map(|l| l.moments).collect())
    }

    /// Second half of a step: the gradient of `scale` times the summed objective, as sums of the maximal subtrees of
    /// the split's leaves. A local split gives one sum. `moments` are those of the whole group.
    ///
    /// Pass the same `model`, `data` and `loss` as to [`GradientEngine::forward`].
    ///
    /// # Panics
    /// There was no forward pass for a batch of this length.
    pub fn backward(
        &mut self,
        model: &Model,
        data: &LabeledBatch<'_>,
        loss: &Loss,
        moments: &Moments,
        scale: f32,
    ) -> (Vec<(Node, GradientSum)>, SampleErrors) {
        let split = self.split.take().expect("backward follows a forward pass");
        assert_eq!(split.rows(), data.batch.len(), "backward needs the batch of the forward pass");
        let task = BackwardTask { model, data, loss, moments, scale, pool: &self.pool };
        let mut sums = Vec::new();
        let mut rest = &mut self.leaves[..];
        for node in subtrees(split.first..split.first + split.leaves() as u32) {
            let (own, others) = rest.split_at_mut(node.leaves().len());
            sums.push((node, task.sum(own)));
            rest = others;
        }
        (sums, self.samples())
    }

    /// As [`GradientEngine::backward`] of a local split, with the same bits, bucket by bucket: calls `on_final` with the range of each bucket and its
    /// sum as soon as the backward pass has left its layers. `buckets` are ranges of parameters that follow each other in
    /// [`Model::backward_order`] and are cut between layers.
    ///
    /// # Panics
    /// As [`GradientEngine::backward`], or the split is not local, or a bucket does not begin with a layer.
    pub fn backward_by_bucket(
        &mut self,
        model: &Model,
        data: &LabeledBatch<'_>,
        loss: &Loss,
        (moments, scale): (&Moments, f32),
        buckets: &[Range<usize>],
        on_final: &mut dyn FnMut(Range<usize>, &[f32]),
    ) -> (Vec<(Node, GradientSum)>, SampleErrors) {
        let split = self.split.take().expect("backward follows a forward pass");
        assert_eq!(split.rows(), data.batch.len(), "backward needs the batch of the forward pass");
        let nodes = subtrees(split.first..split.first + split.leaves() as u32);
        assert_eq!(nodes.len(), 1, "a local split is one tree");
        let task = BackwardTask { model, data, loss, moments, scale, pool: &self.pool };
        let mut sums: Vec<GradientSum> = self.leaves.par_iter_mut().map(|leaf| task.begin(leaf)).collect();
        let plan = &model.plan;
        let mut end = plan.ops.len();
        for bucket in buckets {
            let ops = first_operation(plan, bucket)..end;
            end = ops.start;
            self.leaves.par_iter_mut().zip(&mut sums).for_each(|(leaf, sum)| {
                let batch = data.slice(leaf.rows.clone(), plan.outputs).batch;
                backward_range(plan, &model.parameters, &batch, ops.clone(), &mut leaf.work, &mut sum.values);
            });
            add_leaves(&mut sums, &|sum, other| {
                add_values(&mut sum.values[bucket.clone()], &other.values[bucket.clone()]);
            });
            on_final(bucket.clone(), &sums[0].values[bucket.clone()]);
        }
        assert_eq!(end, 0, "buckets cover all layers");
        add_leaves(&mut sums, &GradientSum::add_counts);
        let mut sums = sums.into_iter();
        let sum = sums.next().expect("a split has a leaf");
        sums.for_each(|sum| self.recycle(sum));
        (vec![(nodes[0], sum)], self.samples())
    }

    /// Losses and errors of the samples of all leaves.
    fn samples(&self) -> SampleErrors {
        let mut samples = SampleErrors::default();
        for leaf in &self.leaves {
            samples.losses.extend_from_slice(&leaf.samples.losses);
            samples.errors.extend_from_slice(&leaf.samples.errors);
        }
        samples
    }

    /// Both halves for a batch that is the whole group's: forward, moments, backward.
    ///
    /// # Errors
    /// The batch does not fit the model or the loss.
    pub fn gradient(
        &mut self,
        model: &Model,
        data: &LabeledBatch<'_>,
        loss: &Loss,
        leaves: u32,
        random: RandomStep,
        scale: f32,
    ) -> Result<(GradientSum, Moments, SampleErrors), BatchError> {
        let split = LeafSplit::local(data.batch.len(), leaves);
        let mut moments = Moments::default();
        self.forward(model, data, loss, &split, random)?.iter().for_each(|m| moments.add(m));
        let (mut sums, samples) = self.backward(model, data, loss, &moments, scale);
        let (_, sum) = sums.pop().expect("a local split is one tree");
        Ok((sum, moments, samples))
    }

    /// Computes the gradient of the loss of each sample alone and passes it to `add`, on as many threads as there are leaves. Returns what `add` made of
    /// the samples of each leaf, beginning with `start`, and the sum of the losses. The gradient of a sample has the same bits in any batch. Not for
    /// losses that need moments.
    ///
    /// # Errors
    /// The batch does not fit the model or the loss.
    pub fn sample_gradients<S: Send>(
        &mut self,
        model: &Model,
        data: &LabeledBatch<'_>,
        loss: &Loss,
        (leaves, random): (u32, RandomStep),
        start: impl Fn() -> S + Sync,
        add: impl Fn(&mut S, &[f32]) + Sync,
    ) -> Result<(Vec<S>, SampleErrors, f64), BatchError> {
        let plan = &model.plan;
        data.batch.check(plan.inputs, plan.jagged)?;
        loss.check(data, plan.outputs)?;
        let split = LeafSplit::local(data.batch.len(), leaves);
        self.leaves.resize_with(split.leaves(), Leaf::default);
        let precision = self.precision;
        let parts = self.leaves.par_iter_mut().zip(split.bounds.par_windows(2)).map(|(leaf, bounds)| {
            leaf.work.precision = precision;
            let (mut part, mut samples, mut total) = (start(), SampleErrors::default(), 0.0);
            let mut values = vec![0.0; plan.parameter_count];
            for row in bounds[0]..bounds[1] {
                total += leaf.sample(model, &data.slice(row..row + 1, plan.outputs), loss, random, &mut values);
                add(&mut part, &values);
                samples.losses.append(&mut leaf.samples.losses);
                samples.errors.append(&mut leaf.samples.errors);
            }
            (part, samples, total)
        });
        let (mut all, mut samples, mut total) = (Vec::new(), SampleErrors::default(), 0.0);
        for (part, errors, loss) in parts.collect::<Vec<_>>() {
            all.push(part);
            samples.losses.extend(errors.losses);
            samples.errors.extend(errors.errors);
            total += loss;
        }
        Ok((all, samples, total))
    }

    /// Takes back a buffer, so that the next step needs no new one.
    pub fn recycle(&mut self, sum: GradientSum) {
        self.pool.get_mut().expect("no thread panics while it holds the lock").push(sum.values);
    }
}

impl Leaf {
    /// Writes the gradient of the loss of one sample to `values`; returns its loss.
    fn sample(
        &mut self,
        model: &Model,
        sample: &LabeledBatch<'_>,
        loss: &Loss,
        random: RandomStep,
        values: &mut [f32],
    ) -> f64 {
        let plan = &model.plan;
        forward(plan, &model.parameters, &sample.batch, Some(random), &mut self.work);
        let mut delta = std::mem::take(&mut self.work.delta);
        let outputs = self.work.outputs(plan);
        let value = loss.evaluate(outputs, sample, &Moments::default(), 1.0, &mut delta, &mut self.samples);
        self.work.delta = delta;
        values.fill(0.0);
        backward(plan, &model.parameters, &sample.batch, &mut self.work, values);
        value
    }
}

struct BackwardTask<'a> {
    model: &'a Model,
    data: &'a LabeledBatch<'a>,
    loss: &'a Loss,
    moments: &'a Moments,
    scale: f32,
    pool: &'a Mutex<Vec<Vec<f32>>>,
}

impl BackwardTask<'_> {
    /// Sum over a subtree: its left half plus its right half.
    fn sum(&self, leaves: &mut [Leaf]) -> GradientSum {
        if let [leaf] = leaves {
            return self.leaf(leaf);
        }
        let (left, right) = leaves.split_at_mut(leaves.len() / 2);
        let (mut sum, right) = rayon::join(|| self.sum(left), || self.sum(right));
        sum.add(&right);
        self.pool.lock().expect("no thread panics while it holds the lock").push(right.values);
        sum
    }

    fn leaf(&self, leaf: &mut Leaf) -> GradientSum {
        let mut sum = self.begin(leaf);
        let plan = &self.model.plan;
        let batch = self.data.slice(leaf.rows.clone(), plan.outputs).batch;
        backward(plan, &self.model.parameters, &batch, &mut leaf.work, &mut sum.values);
        sum
    }

    /// Computes the loss of a leaf and the gradient of its outputs; returns a sum whose values are not computed.
    fn begin(&self, leaf: &mut Leaf) -> GradientSum {
        let plan = &self.model.plan;
        let rows = self.data.slice(leaf.rows.clone(), plan.outputs);
        let samples = leaf.rows.len() as u64;
        let mut delta = std::mem::take(&mut leaf.work.delta);
        let outputs = leaf.work.outputs(plan);
        let loss = self.loss.evaluate(outputs, &rows, self.moments, self.scale, &mut delta, &mut leaf.samples);
        leaf.work.delta = delta;
        let mut values = self.pool.lock().expect("no thread panics while it holds the lock").pop().unwrap_or_default();
        values.resize(plan.parameter_count, 0.0);
        GradientSum { values, samples, loss }
    }
}
