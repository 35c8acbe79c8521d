//! Gradients computed by a pipeline whose stages are processes: each computes some consecutive operations of the model, and sends activations to the
//! next one and gradients to the one before.
//!
//! Micro-batches are the leaves of the batch. A stage works on them in the order of [`crate::pipeline::schedule`], and adds the gradients of its
//! parameters along the tree of leaves. So the sums of all stages together have the bits of [`crate::GradientEngine`] with the same leaves, wherever
//! the operations are cut.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use thiserror::Error;

use crate::batch::LabeledBatch;
use crate::error::BatchError;
use crate::gradient::{GradientSum, LeafSplit};
use crate::loss::{Loss, Moments, SampleErrors};
use crate::model::Model;
use crate::pass::{RandomStep, Workspace, backward_range, forward_range};
use crate::pipeline::{StageWork, cut, schedule};
use crate::pipelined::{estimates, parameters, push};
use crate::plan::Plan;
use crate::precision::Precision;
use crate::tree::Node;

/// What no sum changes, with the sign of zero: the gradient of parameters of other stages.
const IDENTITY: f32 = -0.0;

/// Buffers that are kept for the next batch: more than the sums of 64 leaves that exist at a time.
const MAX_FREE: usize = 16;

/// Names a message between two stages of a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StageMessage {
    /// Stage of the other end.
    pub stage: usize,
    /// Number of the micro-batch within the batch.
    pub micro_batch: usize,
    /// Whether it has gradients, and not activations.
    pub is_gradient: bool,
}

/// Moves values between the stages of a pipeline.
pub trait StageLink {
    /// Why a message did not pass.
    type Error;

    /// Sends values to a stage. May wait for it, while it receives.
    ///
    /// # Errors
    /// The other end failed.
    fn send(&mut self, message: StageMessage, values: &[f32]) -> Result<(), Self::Error>;

    /// Waits for the values of a message, whose number is known to both ends.
    ///
    /// # Errors
    /// The other end failed.
    fn receive(&mut self, message: StageMessage, values: &mut [f32]) -> Result<(), Self::Error>;
}

/// Why a stage has no gradient.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum StagedError<E> {
    /// The batch does not fit the model, the loss or the split.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// Another stage failed.
    #[error("failed to exchange values with another stage")]
    Link(E),
}

/// Gradient sums of a stage by node of the sum over the batch, and the errors of the samples, of the last stage only.
pub type StageGradient = (Vec<(Node, GradientSum)>, SampleErrors);

/// Computes one stage, and keeps its buffers between steps.
#[derive(Debug)]
pub struct StagedEngine {
    precision: Precision,
    /// Cost of each operation, the same on all stages.
    costs: Vec<f64>,
    /// Measured by this stage since they were taken.
    seconds: Vec<f64>,
    work: Vec<Workspace>,
    /// Buffers that have values for the parameters of the operations `ops` only.
    free: Vec<Vec<f32>>,
    ops: Range<usize>,
    message: Vec<f32>,
    bubble: f64,
}

/// What a stage works on.
struct Task<'a> {
    model: &'a Model,
    data: &'a LabeledBatch<'a>,
    loss: &'a Loss,
    split: &'a LeafSplit,
    random: RandomStep,
    scale: f32,
    ops: Range<usize>,
    at: usize,
    stages: usize,
}

/// What a stage has computed so far.
#[derive(Default)]
struct Progress {
    /// Micro-batches between their two passes, the oldest first.
    in_flight: VecDeque<Workspace>,
    sums: Vec<(Node, GradientSum)>,
    samples: SampleErrors,
    busy: f64,
}

impl StagedEngine {
    /// An engine for `model`, whose stages are cut by the number of operations until other costs are set.
    pub fn new(model: &Model, precision: Precision) -> Self {
        Self {
            precision,
            costs: estimates(&model.plan),
            seconds: vec![0.0; model.plan.ops.len()],
            work: Vec::new(),
            free: Vec::new(),
            ops: 0..0,
            message: Vec::new(),
            bubble: 0.0,
        }
    }

    /// Cuts the stages by these costs from now on, one per operation; the same on all stages. `None`: by the number of operations.
    pub fn set_costs(&mut self, model: &Model, costs: Option<Vec<f64>>) {
        self.costs = costs.filter(|it| it.len() == model.plan.ops.len()).unwrap_or_else(|| estimates(&model.plan));
    }

    /// Seconds that this stage needed for each operation since the last call; 0 for those of other stages.
    pub fn take_seconds(&mut self) -> Vec<f64> {
        let empty = vec![0.0; self.seconds.len()];
        std::mem::replace(&mut self.seconds, empty)
    }

    /// Share of the time of the last batch in which this stage waited for others.
    pub fn bubble(&self) -> f64 {
        self.bubble
    }

    /// Largest number of values of a message, for micro-batches of so many rows and any cut.
    pub fn largest_message(model: &Model, rows: usize) -> usize {
        let plan = &model.plan;
        let values = |at: usize| {
            let forward: usize = plan.live(at).iter().map(|slot| plan.widths[*slot]).sum();
            forward.max(gradient_width(plan, at))
        };
        rows * (1..plan.ops.len()).map(values).max().unwrap_or(0)
    }

    /// The sums of stage `at` of `stages`, a gradient of `scale` times the summed loss: -0 for parameters of other stages, so that the sum over the
    /// stages has the bits of [`crate::GradientEngine`]. Losses and samples are counted by the last stage. Not for losses that need moments.
    ///
    /// # Errors
    /// The batch does not fit, or another stage failed.
    ///
    /// # Panics
    /// There is no such stage, or more stages than operations.
    pub fn gradient<E>(
        &mut self,
        model: &Model,
        data: &LabeledBatch<'_>,
        loss: &Loss,
        (split, random, scale): (&LeafSplit, RandomStep, f32),
        (at, stages): (usize, usize),
        link: &mut dyn StageLink<Error = E>,
    ) -> Result<StageGradient, StagedError<E>> {
        let plan = &model.plan;
        data.batch.check(plan.inputs, plan.jagged)?;
        loss.check(data, plan.outputs)?;
        crate::batch::length("rows of the split", split.rows(), data.batch.len())?;
        let ops = cut(&self.costs, stages)[at].clone();
        if self.ops != ops {
            self.free.clear();
            self.ops = ops.clone();
        }
        let task = Task { model, data, loss, split, random, scale, ops, at, stages };
        let (started, mut progress) = (Instant::now(), Progress::default());
        for piece in schedule(stages, at, split.leaves()) {
            match piece {
                StageWork::Forward(number) => self.forward(&task, number, &mut progress, link),
                StageWork::Backward(number) => self.backward(&task, number, &mut progress, link),
            }
            .map_err(StagedError::Link)?;
        }
        self.bubble = (1.0 - progress.busy / started.elapsed().as_secs_f64()).max(0.0);
        Ok((progress.sums, progress.samples))
    }

    /// The forward pass of a micro-batch, with the activations of the stage before.
    fn forward<E>(
        &mut self,
        task: &Task<'_>,
        number: usize,
        progress: &mut Progress,
        link: &mut dyn StageLink<Error = E>,
    ) -> Result<(), E> {
        let (plan, rows) = (&task.model.plan, task.rows(number));
        let mut work = self.work.pop().unwrap_or_default();
        work.precision = self.precision;
        work.seconds.get_or_insert_default().clear();
        if task.at > 0 {
            let live = plan.live(task.ops.start);
            let values = live.iter().map(|slot| plan.widths[*slot]).sum::<usize>() * rows.batch.len();
            self.receive(task.at - 1, (number, false), values, link)?;
            work.import(plan, &live, rows.batch.len(), &self.message);
        }
        let started = Instant::now();
        forward_range(plan, task.model.parameters(), &rows.batch, Some(task.random), task.ops.clone(), &mut work);
        progress.busy += started.elapsed().as_secs_f64();
        if task.at + 1 < task.stages {
            self.message.clear();
            work.export(&plan.live(task.ops.end), &mut self.message);
            let message = StageMessage { stage: task.at + 1, micro_batch: number, is_gradient: false };
            link.send(message, &self.message)?;
        }
        progress.in_flight.push_back(work);
        Ok(())
    }

    /// The backward pass of a micro-batch, with the gradients of the stage after.
    fn backward<E>(
        &mut self,
        task: &Task<'_>,
        number: usize,
        progress: &mut Progress,
        link: &mut dyn StageLink<Error = E>,
    ) -> Result<(), E> {
        let (plan, rows, ops) = (&task.model.plan, task.rows(number), &task.ops);
        let mut work = progress.in_flight.pop_front().expect("the backward pass follows the forward pass");
        let (mut loss, mut samples) = (0.0, 0);
        if task.at + 1 < task.stages {
            let width = gradient_width(plan, ops.end);
            if width > 0 {
                self.receive(task.at + 1, (number, true), width * rows.batch.len(), link)?;
                work.import_gradients(plan.ops[ops.end - 1].width, &plan.open_skips(ops.end), &self.message);
            }
        }
        let started = Instant::now();
        if task.at + 1 == task.stages {
            (loss, samples) = (task.evaluate(&rows, &mut work, &mut progress.samples), rows.batch.len() as u64);
        }
        let mut values = self.free.pop().unwrap_or_else(|| vec![IDENTITY; plan.parameter_count]);
        backward_range(plan, task.model.parameters(), &rows.batch, ops.clone(), &mut work, &mut values);
        let node = Node { level: 0, index: task.split.first() + number as u32 };
        let (own, free) = (parameters(plan, ops), &mut self.free);
        push(&mut progress.sums, node, GradientSum { values, samples, loss }, |left, right| {
            left.values[own.clone()].iter_mut().zip(&right.values[own.clone()]).for_each(|(a, b)| *a += b);
            left.samples += right.samples;
            left.loss += right.loss;
            free.push(right.values);
        });
        progress.busy += started.elapsed().as_secs_f64();
        if task.at > 0 && gradient_width(plan, ops.start) > 0 {
            self.message.clear();
            work.export_gradients(&mut self.message);
            let message = StageMessage { stage: task.at - 1, micro_batch: number, is_gradient: true };
            link.send(message, &self.message)?;
        }
        work.seconds.iter().flatten().zip(&mut self.seconds).for_each(|(own, all)| *all += own);
        self.work.push(work);
        Ok(())
    }

    /// Receives a message of so many values.
    fn receive<E>(
        &mut self,
        stage: usize,
        (micro_batch, is_gradient): (usize, bool),
        values: usize,
        link: &mut dyn StageLink<Error = E>,
    ) -> Result<(), E> {
        self.message.resize(values, 0.0);
        link.receive(StageMessage { stage, micro_batch, is_gradient }, &mut self.message)
    }

    /// Takes back a buffer of the last batch, so that the next one needs no new one.
    pub fn recycle(&mut self, sum: GradientSum) {
        if self.free.len() < MAX_FREE {
            self.free.push(sum.values);
        }
    }

    /// A sum for a member without a stage.
    pub fn nothing(model: &Model) -> GradientSum {
        GradientSum { values: vec![IDENTITY; model.plan.parameter_count], ..GradientSum::default() }
    }
}

/// Values per row of the gradients that pass a cut; 0 where no operation before it trains.
fn gradient_width(plan: &Plan, cut: usize) -> usize {
    if plan.first_trained().is_none_or(|first| cut <= first) {
        return 0;
    }
    plan.ops[cut - 1].width + plan.open_skips(cut).iter().sum::<usize>()
}

impl Task<'_> {
    /// Rows of a micro-batch.
    fn rows(&self, number: usize) -> LabeledBatch<'_> {
        self.data.slice(self.split.leaf(number), self.model.plan.outputs)
    }

    /// Evaluates the loss at the last stage; the gradient of the outputs is in the workspace then.
    fn evaluate(&self, rows: &LabeledBatch<'_>, work: &mut Workspace, all: &mut SampleErrors) -> f64 {
        let mut samples = SampleErrors::default();
        let mut delta = std::mem::take(&mut work.delta);
        let outputs = work.outputs(&self.model.plan);
        let loss = self.loss.evaluate(outputs, rows, &Moments::default(), self.scale, &mut delta, &mut samples);
        work.delta = delta;
        all.losses.extend(samples.losses);
        all.errors.extend(samples.errors);
        loss
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;
    use crate::batch::{Batch, Targets};
    use crate::gradient::GradientEngine;
    use crate::loss::LossSpec;
    use crate::philox::philox;
    use crate::spec::ModelSpec;

    const ROWS: usize = 37;
    const INPUTS: usize = 12;

    type Bits = (Node, Vec<u32>, u64, u64, Vec<u32>);

    /// Queues between the stages of a test.
    struct Queues {
        senders: Vec<Sender<(StageMessage, Vec<f32>)>>,
        receiver: Receiver<(StageMessage, Vec<f32>)>,
        early: HashMap<StageMessage, VecDeque<Vec<f32>>>,
        at: usize,
    }

    impl Queues {
        fn of(stages: usize) -> Vec<Self> {
            let (senders, receivers): (Vec<_>, Vec<_>) = (0..stages).map(|_| channel()).unzip();
            let queues = |(at, receiver)| Self { senders: senders.clone(), receiver, early: HashMap::new(), at };
            receivers.into_iter().enumerate().map(queues).collect()
        }
    }

    impl StageLink for Queues {
        type Error = std::convert::Infallible;

        fn send(&mut self, message: StageMessage, values: &[f32]) -> Result<(), Self::Error> {
            let own = StageMessage { stage: self.at, ..message };
            self.senders[message.stage].send((own, values.to_vec())).unwrap();
            Ok(())
        }

        fn receive(&mut self, message: StageMessage, into: &mut [f32]) -> Result<(), Self::Error> {
            let values = loop {
                if let Some(values) = self.early.entry(message).or_default().pop_front() {
                    break values;
                }
                let (found, values) = self.receiver.recv_timeout(std::time::Duration::from_secs(30)).unwrap();
                self.early.entry(found).or_default().push_back(values);
            };
            into.copy_from_slice(&values);
            Ok(())
        }
    }

    fn model(first: &serde_json::Value) -> Model {
        let spec: ModelSpec = serde_json::from_value(serde_json::json!({
            "inputs": INPUTS,
            "layers": [
                first,
                { "dropout": 0.2 },
                { "residual": [{ "dense": 8, "activation": "Gelu" }, { "residual": [{ "dense": 8 }, { "layerNorm": {} }] }, { "dense": 8 }] },
                { "tropical": 8, "activation": "Tanh" },
                { "dense": 1 },
            ],
        }))
        .unwrap();
        Model::new(&spec, 7).unwrap()
    }

    fn values(count: usize, stream: u32) -> Vec<f32> {
        (0..count as u32).map(|at| (philox(3, [at, stream, 0, 0])[0] % 1_000) as f32 / 500.0 - 1.0).collect()
    }

    /// Bits of the gradient and of the per-sample errors.
    fn bits(sums: &[(Node, GradientSum)], errors: &SampleErrors) -> Vec<Bits> {
        let of = |(node, sum): &(Node, GradientSum)| {
            let values = sum.values.iter().map(|value| value.to_bits()).collect();
            let errors = errors.errors.iter().map(|error| error.to_bits()).collect();
            (*node, values, sum.samples, sum.loss.to_bits(), errors)
        };
        sums.iter().map(of).collect()
    }

    /// Compares every number of stages with the engine that is not split.
    fn compare(model: &Model, data: &LabeledBatch<'_>, split: &LeafSplit, precision: Precision) {
        let spec: LossSpec = serde_json::from_value(serde_json::json!({ "kind": "Huber" })).unwrap();
        let (loss, random) = (Loss::new(&spec, 1).unwrap(), RandomStep { seed: 5, step: 3 });
        let mut engine = GradientEngine::with_precision(precision);
        engine.forward(model, data, &loss, split, random).unwrap();
        let (sums, errors) = engine.backward(model, data, &loss, &Moments::default(), 2.0);
        let expected = bits(&sums, &errors);
        for stages in 1..=model.plan.ops.len() {
            let run = |(at, mut queues): (usize, Queues)| {
                let (mut engine, loss) = (StagedEngine::new(model, precision), &loss);
                move || {
                    let mut gradient = || {
                        let task = (split, random, 2.0);
                        engine.gradient(model, data, loss, task, (at, stages), &mut queues).unwrap()
                    };
                    // The second time with used buffers.
                    let first = gradient();
                    assert_eq!(gradient(), first);
                    // The last stage has a layer; others may have nothing to compute.
                    assert!(at + 1 < stages || engine.take_seconds().iter().any(|seconds| *seconds > 0.0));
                    first
                }
            };
            let results: Vec<_> = std::thread::scope(|scope| {
                let threads: Vec<_> =
                    Queues::of(stages).into_iter().enumerate().map(|it| scope.spawn(run(it))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let (mut total, mut errors) = results[0].clone();
            for (sums, others) in &results[1..] {
                total.iter_mut().zip(sums).for_each(|((_, total), (_, sum))| total.add(sum));
                errors.errors.extend(&others.errors);
            }
            assert_eq!(bits(&total, &errors), expected, "{stages} stages");
        }
    }

    #[test]
    fn stages_of_processes_have_the_bits_of_the_unsplit_model() {
        let mut dense = model(&serde_json::json!({ "dense": 8, "activation": "Relu" }));
        let (inputs, targets, weights) = (values(ROWS * INPUTS, 1), values(ROWS, 2), vec![0.5; ROWS]);
        let batch = Batch::rows(&inputs, ROWS, INPUTS).unwrap().starting_at(11);
        let data = LabeledBatch { batch, targets: Targets::Values(&targets), weights: Some(&weights) };
        for precision in [Precision::F32, Precision::F16] {
            compare(&dense, &data, &LeafSplit::local(ROWS, 8), precision);
            compare(&dense, &data, &LeafSplit::partition(98, 64, 7..31), precision);
        }
        // No gradient passes operations before the first one that trains.
        assert!(dense.set_frozen("layers.0", true) > 0 && dense.set_frozen("layers.3", true) > 0);
        compare(&dense, &data, &LeafSplit::local(ROWS, 4), Precision::F32);

        let features = model(&serde_json::json!({ "featureAttention": 8, "heads": 2 }));
        let offsets: Vec<u32> = (0..=ROWS as u32).map(|at| 3 * at).collect();
        let indices: Vec<u32> = (0..3 * ROWS as u32).map(|at| at * 7 % INPUTS as u32).collect();
        let batch = Batch::features(&offsets, &indices).unwrap();
        let data = LabeledBatch { batch, targets: Targets::Values(&targets), weights: None };
        compare(&features, &data, &LeafSplit::local(ROWS, 4), Precision::F32);
    }
}
