//! Forward and backward over a plan for the rows of one leaf.

use crate::batch::{Batch, Input};
use crate::layers::{activation, attention, bag, dense, dropout, norm, tropical};
use crate::matrix::add;
use crate::plan::{Op, OpKind, Plan, Slot};
use crate::precision::Precision;
use crate::spec::Activation;
use std::ops::Range;
use std::time::Instant;

pub use crate::layers::dropout::RandomStep;

/// What the forward pass of an operation keeps for its backward pass.
#[derive(Debug, Default)]
struct Kept {
    /// Dropout masks, or statistics of layer normalization.
    values: Vec<f32>,
    /// Winners of tropical layers.
    winners: Vec<u32>,
}

/// Buffers of a pass. They grow to the largest leaf and are reused.
#[derive(Debug, Default)]
pub(crate) struct Workspace {
    rows: usize,
    pub(crate) precision: Precision,
    /// Activation buffers; entry 0 stays empty since the input is borrowed. With 16 bits, only those in use are filled.
    slots: Vec<Vec<f32>>,
    /// With 16 bits: buffers that no later forward operation reads.
    parked: Vec<Vec<u16>>,
    /// Buffers to be reused for the next unparked slot.
    spare: Vec<Vec<f32>>,
    /// Per operation.
    kept: Vec<Kept>,
    attention: attention::State,
    /// Gradient with respect to the current buffer.
    pub(crate) delta: Vec<f32>,
    other: Vec<f32>,
    skips: Vec<Vec<f32>>,
    /// Seconds of each operation since they were taken; `None` does not measure.
    pub(crate) seconds: Option<Vec<f64>>,
}

impl Workspace {
    fn prepare(&mut self, plan: &Plan, rows: usize) {
        self.rows = rows;
        self.slots.resize_with(plan.widths.len(), Vec::new);
        self.parked.resize_with(plan.widths.len(), Vec::new);
        self.kept.resize_with(plan.ops.len(), Kept::default);
        if let Some(seconds) = &mut self.seconds {
            seconds.resize(plan.ops.len(), 0.0);
        }
    }

    /// Adds the time since `started` to that of an operation.
    fn note(&mut self, op: usize, started: Option<Instant>) {
        if let (Some(seconds), Some(started)) = (&mut self.seconds, started) {
            seconds[op] += started.elapsed().as_secs_f64();
        }
    }

    fn start(&self) -> Option<Instant> {
        self.seconds.as_ref().map(|_| Instant::now())
    }

    /// Outputs of the last forward pass, `rows x outputs`.
    pub(crate) fn outputs(&self, plan: &Plan) -> &[f32] {
        let last = plan.ops.last().expect("a plan has at least one operation");
        &self.slots[last.output]
    }

    /// Bytes of stored activations.
    pub(crate) fn activation_bytes(&self) -> usize {
        let full: usize = self.slots.iter().map(Vec::len).sum();
        let half: usize = self.parked.iter().map(Vec::len).sum();
        4 * full + 2 * half
    }

    /// Appends the buffers `slots` to a message for the next stage.
    pub(crate) fn export(&self, slots: &[Slot], message: &mut Vec<f32>) {
        slots.iter().for_each(|slot| message.extend_from_slice(&self.slots[*slot]));
    }

    /// Fills the buffers `slots` for a forward pass of `rows` rows from the message of the stage before.
    pub(crate) fn import(&mut self, plan: &Plan, slots: &[Slot], rows: usize, mut message: &[f32]) {
        self.prepare(plan, rows);
        for &slot in slots {
            let (values, rest) = message.split_at(rows * plan.widths[slot]);
            if self.slots[slot].capacity() == 0 {
                self.slots[slot] = self.spare.pop().unwrap_or_default();
            }
            self.slots[slot].clear();
            self.slots[slot].extend_from_slice(values);
            message = rest;
        }
    }

    /// Appends the gradient of the current buffer, and those kept for residual blocks, to a message for the stage before.
    pub(crate) fn export_gradients(&mut self, message: &mut Vec<f32>) {
        message.extend_from_slice(&self.delta);
        self.skips.drain(..).for_each(|skip| message.extend_from_slice(&skip));
    }

    /// Takes the gradient of the current buffer of so many values per row, and those of residual blocks, from the message of the stage after.
    pub(crate) fn import_gradients(&mut self, width: usize, skips: &[usize], message: &[f32]) {
        let (delta, mut rest) = message.split_at(self.rows * width);
        self.delta.clear();
        self.delta.extend_from_slice(delta);
        self.skips.clear();
        for width in skips {
            let (skip, after) = rest.split_at(self.rows * width);
            self.skips.push(skip.to_vec());
            rest = after;
        }
    }

    fn values<'a>(&'a self, slot: Slot, batch: &Batch<'a>) -> &'a [f32] {
        match batch.input {
            Input::Rows { values, .. } if slot == 0 => values,
            _ => &self.slots[slot],
        }
    }

    /// Stores a buffer in 16 bits and frees it.
    fn park(&mut self, slot: Slot) {
        let values = std::mem::take(&mut self.slots[slot]);
        self.parked[slot].resize(values.len(), 0);
        self.precision.encode(&values, &mut self.parked[slot]);
        self.spare.push(values);
    }

    /// Fills a buffer from its 16 bits, if that is where it is.
    fn unpark(&mut self, slot: Slot) {
        if self.precision == Precision::F32 || slot == 0 || !self.slots[slot].is_empty() {
            return;
        }
        let mut values = self.spare.pop().unwrap_or_default();
        values.resize(self.parked[slot].len(), 0.0);
        self.precision.decode(&self.parked[slot], &mut values);
        self.slots[slot] = values;
    }

    /// Frees a buffer that [`Workspace::unpark`] filled.
    fn release(&mut self, slot: Slot, plan: &Plan) {
        if self.precision != Precision::F32 && slot != 0 && plan.last_uses[slot] < plan.ops.len() {
            self.spare.push(std::mem::take(&mut self.slots[slot]));
        }
    }
}

/// Computes the outputs for `batch`. With `random`, dropout is active.
pub(crate) fn forward(
    plan: &Plan,
    parameters: &[f32],
    batch: &Batch<'_>,
    random: Option<RandomStep>,
    work: &mut Workspace,
) {
    forward_range(plan, parameters, batch, random, 0..plan.ops.len(), work);
}

/// The part of [`forward`] that the operations `ops` are. Those before must have run on the same workspace.
pub(crate) fn forward_range(
    plan: &Plan,
    parameters: &[f32],
    batch: &Batch<'_>,
    random: Option<RandomStep>,
    ops: Range<usize>,
    work: &mut Workspace,
) {
    work.prepare(plan, batch.rows);
    let precision = work.precision;
    for (i, op) in plan.ops.iter().enumerate().take(ops.end).skip(ops.start) {
        if matches!(op.kind, OpKind::Fork) {
            continue;
        }
        let started = work.start();
        let mut output = std::mem::take(&mut work.slots[op.output]);
        if output.capacity() == 0 {
            output = work.spare.pop().unwrap_or_default();
        }
        output.resize(batch.rows * op.width, 0.0);
        let mut kept = std::mem::take(&mut work.kept[i]);
        forward_op(op, parameters, batch, random, work, &mut output, &mut kept);
        precision.round(&mut output);
        work.slots[op.output] = output;
        work.kept[i] = kept;
        if precision != Precision::F32 {
            (1..plan.widths.len()).filter(|&slot| plan.last_uses[slot] == i).for_each(|slot| work.park(slot));
        }
        work.note(i, started);
    }
}

fn forward_op(
    op: &Op,
    parameters: &[f32],
    batch: &Batch<'_>,
    random: Option<RandomStep>,
    work: &mut Workspace,
    output: &mut [f32],
    kept: &mut Kept,
) {
    let in_place = op.input == op.output;
    match &op.kind {
        OpKind::Dense(shape) => {
            dense::forward(shape, batch.rows, parameters, work.values(op.input, batch), output);
        }
        OpKind::Activation(kind) => {
            if !in_place {
                output.copy_from_slice(work.values(op.input, batch));
            }
            activation::forward_in_place(*kind, output);
        }
        OpKind::Dropout { probability, layer } => {
            let input = work.values(op.input, batch);
            match random {
                Some(random) => {
                    let mask = &mut kept.values;
                    mask.resize(output.len(), 0.0);
                    dropout::fill_mask(*probability, *layer, random, batch, op.width, mask);
                    dropout::apply(input, mask, output);
                }
                None => output.copy_from_slice(input),
            }
        }
        OpKind::LayerNorm(shape) => {
            kept.values.resize(2 * batch.rows, 0.0);
            norm::forward(shape, parameters, work.values(op.input, batch), output, &mut kept.values);
        }
        OpKind::Tropical(shape) => {
            tropical::forward(shape, parameters, work.values(op.input, batch), output, &mut kept.winners);
        }
        OpKind::Fork => {}
        OpKind::Add { skip } => {
            if !in_place {
                output.copy_from_slice(work.values(op.input, batch));
            }
            add(output, work.values(*skip, batch));
        }
        OpKind::FeatureBag(shape) => {
            if let Input::Features { offsets, indices } = batch.input {
                bag::forward(shape, parameters, offsets, indices, output);
            }
        }
        OpKind::FeatureAttention(shape) => {
            if let Input::Features { offsets, indices } = batch.input {
                attention::forward(shape, parameters, offsets, indices, output, &mut work.attention);
            }
        }
    }
}

/// Computes the gradient of all parameters as a sum over the rows of the last forward pass, which ran with dropout.
/// `work.delta` holds the gradient of the outputs. Overwrites `gradient`; frozen parameters get 0.
pub(crate) fn backward(plan: &Plan, parameters: &[f32], batch: &Batch<'_>, work: &mut Workspace, gradient: &mut [f32]) {
    backward_range(plan, parameters, batch, 0..plan.ops.len(), work, gradient);
}

/// The part of [`backward`] that the operations `ops` are. Those after must have run on the same workspace.
pub(crate) fn backward_range(
    plan: &Plan,
    parameters: &[f32],
    batch: &Batch<'_>,
    ops: Range<usize>,
    work: &mut Workspace,
    gradient: &mut [f32],
) {
    for op in plan.ops[ops.clone()].iter().filter(|op| op.frozen) {
        gradient[op.parameters.clone()].fill(0.0);
    }
    // No layer below the first one that trains needs a gradient.
    let Some(first) = plan.first_trained() else { return };
    let precision = work.precision;
    if ops.end == plan.ops.len() {
        precision.round(&mut work.delta);
    }
    for (i, op) in plan.ops.iter().enumerate().take(ops.end).skip(first.max(ops.start)).rev() {
        let started = work.start();
        let slot = op.backward_slot();
        slot.into_iter().for_each(|slot| work.unpark(slot));
        backward_op(op, i, i > first, parameters, batch, work, gradient);
        precision.round(&mut work.delta);
        slot.into_iter().for_each(|slot| work.release(slot, plan));
        work.note(i, started);
    }
    if ops.start <= first {
        work.skips.clear();
    }
}

fn backward_op(
    op: &Op,
    index: usize,
    want_input: bool,
    parameters: &[f32],
    batch: &Batch<'_>,
    work: &mut Workspace,
    gradient: &mut [f32],
) {
    let mut delta = std::mem::take(&mut work.delta);
    match &op.kind {
        OpKind::Dense(shape) => {
            if op.trains() {
                dense::backward_parameters(shape, work.rows, work.values(op.input, batch), &delta, gradient);
            }
            if want_input {
                let mut other = std::mem::take(&mut work.other);
                other.resize(work.rows * shape.inputs, 0.0);
                dense::backward_input(shape, work.rows, parameters, &delta, &mut other);
                work.other = std::mem::replace(&mut delta, other);
            }
        }
        OpKind::Activation(kind) => {
            let slot = if *kind == Activation::Gelu { op.input } else { op.output };
            activation::backward(*kind, work.values(slot, batch), &mut delta);
        }
        OpKind::Dropout { .. } => dropout::backward(&work.kept[index].values, &mut delta),
        OpKind::LayerNorm(shape) => {
            let (input, statistics) = (work.values(op.input, batch), &work.kept[index].values);
            if op.trains() {
                norm::backward_parameters(shape, input, statistics, &delta, gradient);
            }
            if want_input {
                norm::backward_input(shape, parameters, input, statistics, &mut delta);
            }
        }
        OpKind::Tropical(shape) => {
            if op.trains() {
                tropical::backward_parameters(shape, &work.kept[index].winners, &delta, gradient);
            }
            if want_input {
                let mut other = std::mem::take(&mut work.other);
                other.resize(work.rows * shape.inputs, 0.0);
                tropical::backward_input(shape, &work.kept[index].winners, &delta, &mut other);
                work.other = std::mem::replace(&mut delta, other);
            }
        }
        OpKind::Add { .. } => work.skips.push(delta.clone()),
        OpKind::Fork => {
            let skip = work.skips.pop().expect("every fork has an add after it");
            add(&mut delta, &skip);
        }
        OpKind::FeatureBag(shape) => {
            if let (Input::Features { offsets, indices }, true) = (batch.input, op.trains()) {
                bag::backward(shape, offsets, indices, &delta, gradient);
            }
        }
        OpKind::FeatureAttention(shape) => {
            if let (Input::Features { offsets, .. }, true) = (batch.input, op.trains()) {
                attention::backward(shape, parameters, offsets, &delta, gradient, &mut work.attention);
            }
        }
    }
    work.delta = delta;
}
