//! Gradients computed by pipelines of stages: each stage is a logical device of the worker, a thread with its own operations and parameters.
//!
//! Micro-batches are the leaves of the batch. They move from stage to stage through bounded queues in the order of [`crate::pipeline::schedule`], and
//! each stage adds the gradients of its parameters along the tree of leaves. So the bits are those of [`crate::GradientEngine`] with the same leaves,
//! wherever the operations are cut.

use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Instant;

use crate::batch::LabeledBatch;
use crate::error::BatchError;
use crate::gradient::{GradientSum, LeafSplit};
use crate::loss::{Loss, Moments, SampleErrors};
use crate::model::Model;
use crate::pass::{RandomStep, Workspace, backward_range, forward_range};
use crate::pipeline::{StageWork, cut, schedule};
use crate::plan::{OpKind, Plan};
use crate::precision::Precision;
use crate::tree::Node;

/// Steps after which the stages are cut by measured times.
const MEASURED_STEPS: u32 = 8;

/// How the devices of a worker share a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parallelism {
    /// Pipelines, each with a part of the micro-batches; at least 1.
    pub data: usize,
    /// Stages of each pipeline; at least 1.
    pub pipeline: usize,
}

/// Computes gradients by pipelines, and keeps their buffers between steps.
#[derive(Debug)]
pub struct PipelinedEngine {
    parallelism: Parallelism,
    precision: Precision,
    stages: Vec<Range<usize>>,
    /// Free buffers of each pipeline: as many as micro-batches were in flight.
    work: Vec<Vec<Workspace>>,
    /// Gradients of each stage of each pipeline.
    free: Vec<Vec<Vec<f32>>>,
    steps: u32,
    seconds: Vec<f64>,
    bubble: f64,
}

/// A micro-batch between stages.
type InFlight = Box<Workspace>;

/// The sum of a stage over some leaves: only the parameters of the stage are set.
#[derive(Debug)]
struct StageSum {
    values: Vec<f32>,
    samples: u64,
    loss: f64,
}

/// What a stage returns.
#[derive(Debug, Default)]
struct StageResult {
    sums: Vec<(Node, StageSum)>,
    samples: SampleErrors,
    busy: f64,
    free: Vec<Vec<f32>>,
    work: Vec<Workspace>,
}

/// What all stages of a step read.
#[derive(Clone, Copy)]
struct Task<'a> {
    model: &'a Model,
    data: &'a LabeledBatch<'a>,
    loss: &'a Loss,
    split: &'a LeafSplit,
    random: RandomStep,
    scale: f32,
    precision: Precision,
    measures: bool,
}

/// One stage of a pipeline, with its queues.
struct Stage<'a> {
    task: Task<'a>,
    ops: Range<usize>,
    /// Place in the pipeline, and the number of stages.
    at: (usize, usize),
    /// Leaves of the pipeline.
    leaves: Range<usize>,
    forward: (Option<Receiver<InFlight>>, Option<SyncSender<InFlight>>),
    backward: (Option<Receiver<InFlight>>, Option<SyncSender<InFlight>>),
    result: StageResult,
}

impl PipelinedEngine {
    /// An engine for `model`, whose stages are cut by the number of operations until their times are measured.
    ///
    /// # Panics
    /// There are more stages than operations, or a number is 0.
    pub fn new(model: &Model, parallelism: Parallelism, precision: Precision) -> Self {
        assert!(parallelism.data > 0, "at least one pipeline");
        let costs = estimates(&model.plan);
        let threads = parallelism.data * parallelism.pipeline;
        Self {
            parallelism,
            precision,
            stages: cut(&costs, parallelism.pipeline),
            work: (0..parallelism.data).map(|_| Vec::new()).collect(),
            free: (0..threads).map(|_| Vec::new()).collect(),
            steps: 0,
            seconds: vec![0.0; model.plan.ops.len()],
            bubble: 0.0,
        }
    }

    /// Most stages that a model can be cut into.
    pub fn most_stages(model: &Model) -> usize {
        model.plan.ops.len()
    }

    /// Share of the time of all stages in the last step in which they had nothing to do.
    pub fn bubble(&self) -> f64 {
        self.bubble
    }

    /// Micro-batches for whose activations there are buffers.
    pub fn buffers(&self) -> usize {
        self.work.iter().map(Vec::len).sum()
    }

    /// The gradient of `scale` times the summed loss, as [`crate::GradientEngine::forward`] and [`crate::GradientEngine::backward`] give it for a loss
    /// that needs no moments.
    ///
    /// # Errors
    /// The batch does not fit the model, the loss or the split.
    pub fn gradient(
        &mut self,
        model: &Model,
        data: &LabeledBatch<'_>,
        loss: &Loss,
        split: &LeafSplit,
        random: RandomStep,
        scale: f32,
    ) -> Result<(Vec<(Node, GradientSum)>, SampleErrors), BatchError> {
        let plan = &model.plan;
        data.batch.check(plan.inputs, plan.jagged)?;
        loss.check(data, plan.outputs)?;
        crate::batch::length("rows of the split", split.rows(), data.batch.len())?;
        let measures = self.steps < MEASURED_STEPS;
        let task = Task { model, data, loss, split, random, scale, precision: self.precision, measures };
        let started = Instant::now();
        let results = self.execute(task);
        let busy: f64 = results.iter().map(|it| it.busy).sum();
        self.bubble = (1.0 - busy / (results.len() as f64 * started.elapsed().as_secs_f64())).max(0.0);
        let (sums, samples) = self.collect(plan, results);
        self.measure();
        Ok((sums, samples))
    }

    /// Runs all stages; returns their results, those of one pipeline after the other.
    fn execute(&mut self, task: Task<'_>) -> Vec<StageResult> {
        let Parallelism { data, pipeline } = self.parallelism;
        let leaves = task.split.leaves();
        let mut stages = Vec::with_capacity(data * pipeline);
        for number in 0..data {
            let leaves = leaves * number / data..leaves * (number + 1) / data;
            let mut own = chain(task, &self.stages, &leaves);
            own[0].result.work = std::mem::take(&mut self.work[number]);
            stages.extend(own);
        }
        stages.iter_mut().zip(&mut self.free).for_each(|(stage, free)| stage.result.free = std::mem::take(free));
        if let [_] = stages[..] {
            return stages.into_iter().map(Stage::run).collect();
        }
        std::thread::scope(|scope| {
            let threads: Vec<_> = stages.into_iter().map(|stage| scope.spawn(move || stage.run())).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, StageResult>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).collect()
        })
    }

    /// Joins the parameters of the stages, and adds the sums of the pipelines along the tree.
    fn collect(&mut self, plan: &Plan, results: Vec<StageResult>) -> (Vec<(Node, GradientSum)>, SampleErrors) {
        let pipeline = self.parallelism.pipeline;
        let mut merged: Vec<(Node, GradientSum)> = Vec::new();
        let mut samples = SampleErrors::default();
        for (at, result) in results.into_iter().enumerate() {
            let (number, stage) = (at / pipeline, at % pipeline);
            let own = parameters(plan, &self.stages[stage]);
            let start = if stage == 0 { merged.len() } else { merged.len() - result.sums.len() };
            let mut free = result.free;
            for (index, (node, sum)) in result.sums.into_iter().enumerate() {
                if stage == 0 {
                    merged.push((node, GradientSum { values: sum.values, samples: sum.samples, loss: sum.loss }));
                    continue;
                }
                let total = &mut merged[start + index].1;
                total.values[own.clone()].copy_from_slice(&sum.values[own.clone()]);
                total.loss += sum.loss;
                free.push(sum.values);
            }
            samples.losses.extend(result.samples.losses);
            samples.errors.extend(result.samples.errors);
            self.free[at] = free;
            for work in result.work {
                work.seconds.iter().for_each(|own| self.seconds.iter_mut().zip(own).for_each(|(all, own)| *all += own));
                self.work[number].push(work);
            }
        }
        let mut sums: Vec<(Node, GradientSum)> = Vec::new();
        merged.into_iter().for_each(|(node, sum)| push(&mut sums, node, sum, |left, right| left.add(&right)));
        (sums, samples)
    }

    /// Cuts the stages by the times of the first steps.
    fn measure(&mut self) {
        self.steps = self.steps.saturating_add(1);
        self.work.iter_mut().flatten().for_each(|work| {
            work.seconds.iter_mut().for_each(|own| own.fill(0.0));
        });
        if self.steps == MEASURED_STEPS {
            self.stages = cut(&self.seconds, self.parallelism.pipeline);
            // The parameters of the stages are others.
            self.free.iter_mut().for_each(Vec::clear);
        }
    }

    /// Takes back a buffer, so that the next step needs no new one.
    pub fn recycle(&mut self, sum: GradientSum) {
        self.free[0].push(sum.values);
    }
}

/// Multiplications of each operation per row, forward and backward.
pub(crate) fn estimates(plan: &Plan) -> Vec<f64> {
    plan.ops.iter().map(|op| estimate(&op.kind, op.width)).collect()
}

/// Multiplications of an operation per row, forward and backward.
fn estimate(kind: &OpKind, width: usize) -> f64 {
    /// Features of a sample, where their number is not known.
    const FEATURES: f64 = 32.0;
    let width = width as f64;
    match kind {
        OpKind::Dense(shape) => 3.0 * shape.inputs as f64 * shape.outputs as f64,
        // One addition and one comparison per edge forward, one addition per output backward.
        OpKind::Tropical(shape) => (2.0 * shape.inputs as f64 + 2.0) * shape.outputs as f64,
        OpKind::FeatureBag(_) => 2.0 * FEATURES * width,
        OpKind::FeatureAttention(_) => 3.0 * FEATURES * width * (4.0 * width + FEATURES),
        OpKind::Fork => 0.0,
        OpKind::Activation(_) | OpKind::Dropout { .. } | OpKind::LayerNorm(_) | OpKind::Add { .. } => 4.0 * width,
    }
}

/// Range of the parameters of the operations `ops`.
pub(crate) fn parameters(plan: &Plan, ops: &Range<usize>) -> Range<usize> {
    let mut own = plan.ops[ops.clone()].iter().map(|op| op.parameters.clone()).filter(|it| !it.is_empty());
    let Some(first) = own.next() else { return 0..0 };
    first.start..own.next_back().map_or(first.end, |last| last.end)
}

/// Appends a sum to those of the leaves before it: a right child is added to its left sibling.
pub(crate) fn push<T>(sums: &mut Vec<(Node, T)>, mut node: Node, mut sum: T, mut add: impl FnMut(&mut T, T)) {
    while node.index % 2 == 1 && sums.last().is_some_and(|(top, _)| top.level == node.level) {
        let (_, mut left) = sums.pop().expect("the condition checked it");
        add(&mut left, sum);
        (node, sum) = (node.parent(), left);
    }
    sums.push((node, sum));
}

/// The stages of a pipeline, connected by queues. A queue has room for all micro-batches that can be in flight: no send ever waits.
fn chain<'a>(task: Task<'a>, cuts: &[Range<usize>], leaves: &Range<usize>) -> Vec<Stage<'a>> {
    let count = cuts.len();
    let stage = |(at, ops): (usize, &Range<usize>)| Stage {
        task,
        ops: ops.clone(),
        at: (at, count),
        leaves: leaves.clone(),
        forward: (None, None),
        backward: (None, None),
        result: StageResult::default(),
    };
    let mut stages: Vec<Stage<'a>> = cuts.iter().enumerate().map(stage).collect();
    for at in 1..count {
        let (sender, receiver) = sync_channel(count);
        (stages[at - 1].forward.1, stages[at].forward.0) = (Some(sender), Some(receiver));
        let (sender, receiver) = sync_channel(count);
        (stages[at].backward.1, stages[at - 1].backward.0) = (Some(sender), Some(receiver));
    }
    stages
}

impl Stage<'_> {
    fn run(mut self) -> StageResult {
        let (at, count) = self.at;
        // Of the last stage, between the two passes of a micro-batch.
        let mut kept: Option<InFlight> = None;
        for piece in schedule(count, at, self.leaves.len()) {
            let is_running = match piece {
                StageWork::Forward(number) => self.forward(number, &mut kept),
                StageWork::Backward(number) => self.backward(number, &mut kept),
            };
            if !is_running {
                // A neighbour has panicked, which the caller passes on.
                break;
            }
        }
        self.result
    }

    fn forward(&mut self, number: usize, kept: &mut Option<InFlight>) -> bool {
        let received = match &self.forward.0 {
            Some(queue) => queue.recv().ok(),
            None => Some(Box::new(self.result.work.pop().unwrap_or_default())),
        };
        let Some(mut work) = received else { return false };
        let (started, task) = (Instant::now(), self.task);
        if self.at.0 == 0 {
            work.precision = task.precision;
            work.seconds = task.measures.then(|| work.seconds.take().unwrap_or_default());
        }
        let rows = task.data.slice(task.split.leaf(self.leaves.start + number), task.model.plan.outputs);
        let (plan, parameters) = (&task.model.plan, task.model.parameters());
        forward_range(plan, parameters, &rows.batch, Some(task.random), self.ops.clone(), &mut work);
        self.result.busy += started.elapsed().as_secs_f64();
        match &self.forward.1 {
            Some(queue) => queue.send(work).is_ok(),
            None => {
                *kept = Some(work);
                true
            }
        }
    }

    fn backward(&mut self, number: usize, kept: &mut Option<InFlight>) -> bool {
        let received = match &self.backward.0 {
            Some(queue) => queue.recv().ok(),
            None => kept.take(),
        };
        let Some(mut work) = received else { return false };
        let (started, task, leaf) = (Instant::now(), self.task, self.leaves.start + number);
        let plan = &task.model.plan;
        let rows = task.data.slice(task.split.leaf(leaf), plan.outputs);
        let loss = if self.backward.0.is_none() { self.evaluate(&rows, &mut work) } else { 0.0 };
        // Pages that the stage does not write take no memory.
        let mut values = self.result.free.pop().unwrap_or_else(|| vec![0.0; plan.parameter_count]);
        backward_range(plan, task.model.parameters(), &rows.batch, self.ops.clone(), &mut work, &mut values);
        let sum = StageSum { values, samples: rows.batch.len() as u64, loss };
        let (own, free) = (parameters(plan, &self.ops), &mut self.result.free);
        let node = Node { level: 0, index: task.split.first() + leaf as u32 };
        push(&mut self.result.sums, node, sum, |left, right| {
            left.values[own.clone()].iter_mut().zip(&right.values[own.clone()]).for_each(|(a, b)| *a += b);
            left.samples += right.samples;
            left.loss += right.loss;
            free.push(right.values);
        });
        self.result.busy += started.elapsed().as_secs_f64();
        match &self.backward.1 {
            Some(queue) => queue.send(work).is_ok(),
            None => {
                self.result.work.push(*work);
                true
            }
        }
    }

    /// Evaluates the loss at the last stage; the gradient of the outputs is in the workspace then.
    fn evaluate(&mut self, rows: &LabeledBatch<'_>, work: &mut Workspace) -> f64 {
        let (task, mut samples) = (self.task, SampleErrors::default());
        let mut delta = std::mem::take(&mut work.delta);
        let outputs = work.outputs(&task.model.plan);
        let loss = task.loss.evaluate(outputs, rows, &Moments::default(), task.scale, &mut delta, &mut samples);
        work.delta = delta;
        self.result.samples.losses.extend(samples.losses);
        self.result.samples.errors.extend(samples.errors);
        loss
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::{Batch, Targets};
    use crate::gradient::GradientEngine;
    use crate::loss::LossSpec;
    use crate::philox::philox;
    use crate::spec::ModelSpec;

    const ROWS: usize = 50;
    const INPUTS: usize = 12;

    fn model(first: &serde_json::Value) -> Model {
        let spec: ModelSpec = serde_json::from_value(serde_json::json!({
            "inputs": INPUTS,
            "layers": [
                first,
                { "dropout": 0.2 },
                { "residual": [{ "dense": 16, "activation": "Gelu" }, { "layerNorm": {} }, { "dense": 16 }] },
                { "tropical": 8, "activation": "Tanh" },
                { "dense": 1 },
            ],
        }))
        .unwrap();
        Model::new(&spec, 3).unwrap()
    }

    /// Values between -1 and 1.
    fn values(key: u64, count: usize) -> Vec<f32> {
        (0..count as u32).map(|at| philox(key, [at, 0, 0, 0])[0] as f32 / 2f32.powi(31) - 1.0).collect()
    }

    fn bits(sums: &[(Node, GradientSum)]) -> Vec<(Node, u64, u64, Vec<u32>)> {
        let of = |(node, sum): &(Node, GradientSum)| {
            (*node, sum.samples, sum.loss.to_bits(), sum.values.iter().map(|it| it.to_bits()).collect())
        };
        sums.iter().map(of).collect()
    }

    /// Compares pipelines with the engine that computes whole leaves, over more steps than the stages are measured for.
    fn compare(model: &Model, data: &LabeledBatch<'_>, split: &LeafSplit, precision: Precision) {
        let spec: LossSpec = serde_json::from_value(serde_json::json!({ "kind": "Huber" })).unwrap();
        let loss = Loss::new(&spec, 1).unwrap();
        let mut whole = GradientEngine::with_precision(precision);
        for parallelism in [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 4), (3, 2)] {
            let parallelism = Parallelism { data: parallelism.0, pipeline: parallelism.1 };
            let mut pipelines = PipelinedEngine::new(model, parallelism, precision);
            for step in 0..u64::from(MEASURED_STEPS) + 2 {
                let random = RandomStep { seed: 5, step };
                whole.forward(model, data, &loss, split, random).unwrap();
                let (expected, errors) = whole.backward(model, data, &loss, &Moments::default(), 4.0);
                let (found, own) = pipelines.gradient(model, data, &loss, split, random, 4.0).unwrap();
                assert_eq!(bits(&found), bits(&expected), "{parallelism:?} step {step} {precision:?}");
                assert_eq!((own.losses, own.errors), (errors.losses, errors.errors));
                found.into_iter().for_each(|(_, sum)| pipelines.recycle(sum));
                let flying = parallelism.data * parallelism.pipeline;
                assert!(pipelines.buffers() <= flying, "{} of {flying} micro-batches", pipelines.buffers());
                assert!((0.0..1.0).contains(&pipelines.bubble()), "{}", pipelines.bubble());
            }
        }
    }

    #[test]
    fn pipelines_have_the_bits_of_the_engine_without_stages() {
        let targets = values(1, ROWS);
        let weights: Vec<f32> = values(2, ROWS).iter().map(|it| it.abs()).collect();
        let dense = values(3, ROWS * INPUTS);
        let offsets: Vec<u32> = (0..=ROWS as u32).map(|row| row * 3).collect();
        let indices: Vec<u32> = (0..3 * ROWS as u32).map(|at| philox(4, [at, 0, 0, 0])[0] % INPUTS as u32).collect();
        let labeled = |batch| LabeledBatch { batch, targets: Targets::Values(&targets), weights: Some(&weights) };
        let rows = labeled(Batch::rows(&dense, ROWS, INPUTS).unwrap().starting_at(100));
        let features = labeled(Batch::features(&offsets, &indices).unwrap());
        let plain = model(&serde_json::json!({ "dense": 16, "activation": "Relu" }));
        let attention = model(&serde_json::json!({ "featureAttention": 16, "heads": 4 }));
        let mut frozen = plain.clone();
        frozen.set_frozen("layers.0", true);
        frozen.set_frozen("layers.3", true);
        for leaves in [1, 4, 16] {
            compare(&plain, &rows, &LeafSplit::local(ROWS, leaves), Precision::F32);
        }
        let local = LeafSplit::local(ROWS, 8);
        compare(&frozen, &rows, &local, Precision::F32);
        compare(&plain, &rows, &local, Precision::Bf16);
        compare(&attention, &features, &local, Precision::F16);
        // Subtrees of a member in partition-invariant order: 64 leaves of 300 rows, of which the member has 5 to 16.
        let range = LeafSplit::global_rows(300, 64, 5..16);
        assert_eq!(range.len(), 52);
        let split = LeafSplit::partition(300, 64, 5..16);
        let (more, targets) = (values(7, 52 * INPUTS), values(8, 52));
        let batch = Batch::rows(&more, 52, INPUTS).unwrap();
        let data = LabeledBatch { batch, targets: Targets::Values(&targets), weights: None };
        compare(&plain, &data, &split, Precision::F32);
    }
}
