//! Training of networks: the gradient of a batch in one sequence of launches.
//!
//! `engram-neural` defines what is computed. Sums are in f32 and in an order that follows from the sizes alone, so a batch has the same bits at
//! every execution. The CPU adds in another order, so results of both agree to rounding.

use super::algebra::size;
use super::driver::{Argument, Driver, THREADS};
use super::{Gpu, Memory};
use crate::Error;

/// Rows and columns of a product that one block computes.
const SIDE: usize = 64;
/// Columns that one block of a gradient of layer normalization adds.
const BAND: usize = 32;
/// Rows that one block of a row-wise kernel computes: one per warp.
const ROWS: usize = THREADS / 32;
/// Blocks from which a sum over rows is not divided further: two for each of the 132 multiprocessors of an H100.
const ENOUGH_BLOCKS: usize = 264;
/// Least rows of a part of a sum: a part costs a read and a write of all its sums.
const LEAST_ROWS: usize = 128;
const FLOAT: usize = size_of::<f32>();

/// An element-wise function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `max(0, x)`.
    Relu = 1,
    /// `x * Phi(x)`.
    Gelu = 2,
    /// Hyperbolic tangent.
    Tanh = 3,
    /// `1 / (1 + exp(-x))`.
    Sigmoid = 4,
}

/// What an operation computes. Parameters are places in the array of all parameters.
#[derive(Debug, Clone, PartialEq)]
pub enum Layer {
    /// `x W^T + b` with W [outputs, inputs], and b after it.
    Dense {
        /// Values per row of the input.
        inputs: usize,
        /// Values per row of the output.
        outputs: usize,
        /// Place of W.
        weight: usize,
        /// Whether there is a bias.
        bias: bool,
    },
    /// An element-wise function. Those but `Gelu` may overwrite their input.
    Activation(Activation),
    /// Drops units by Philox numbers.
    Dropout {
        /// Probability that a unit is dropped.
        probability: f32,
        /// Number of the layer, part of the key.
        layer: u16,
    },
    /// Normalizes each row.
    Norm {
        /// Added to the variance.
        epsilon: f32,
        /// Place of the weight; the bias is after it.
        weight: usize,
    },
    /// Start of a residual block.
    Fork,
    /// End of a residual block: adds the values at its start.
    Add {
        /// Buffer with the values at the start.
        skip: usize,
    },
}

/// A layer between two buffers.
#[derive(Debug, Clone, PartialEq)]
pub struct Operation {
    /// What it computes.
    pub layer: Layer,
    /// Buffer that it reads; 0 is the batch.
    pub input: usize,
    /// Buffer that it writes: its input, if no backward pass needs the values that it overwrites.
    pub output: usize,
    /// Whether its parameters are trained.
    pub trains: bool,
}

/// A network. Every operation reads what the one before writes.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainedNetwork {
    /// Values per row of each buffer.
    pub widths: Vec<usize>,
    /// Its operations, in order.
    pub operations: Vec<Operation>,
    /// Number of parameters.
    pub parameters: usize,
}

/// What the outputs should be.
#[derive(Debug, Clone, Copy)]
pub enum TrainingLoss<'a> {
    /// Squared errors, averaged over the outputs.
    Mse(&'a [f32]),
    /// Huber losses that turn linear at this error.
    Huber(&'a [f32], f32),
    /// Binary cross-entropy of logits.
    Bce(&'a [f32]),
    /// Cross-entropy of logits with one class per row.
    CrossEntropy(&'a [u32]),
}

/// A batch and the parameters for which its gradient is computed.
#[derive(Debug, Clone, Copy)]
pub struct TrainingBatch<'a> {
    /// All parameters. They are uploaded only if they differ from those of the call before.
    pub parameters: &'a [f32],
    /// [row, input].
    pub rows: &'a [f32],
    /// Position in the global batch of each row, from which dropout follows.
    pub positions: &'a [u32],
    /// Loss and targets.
    pub loss: TrainingLoss<'a>,
    /// Weight of each row; `None`: 1.
    pub weights: Option<&'a [f32]>,
    /// Factor of the gradient.
    pub scale: f32,
    /// Key of dropout, without the number of the layer.
    pub key: u64,
    /// Number of the step.
    pub step: u64,
}

/// The gradient of a batch, as a sum over rows.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainingGradient {
    /// One value per parameter; 0 for those that are not trained.
    pub parameters: Vec<f32>,
    /// Loss of each row without its weight.
    pub losses: Vec<f32>,
    /// Error of each row.
    pub errors: Vec<f32>,
}

/// A device that computes gradients of networks. Errors are [`Error::Full`] and [`Error::Failed`].
pub trait TrainingKernels: Send {
    /// Returns the gradient of the sum over rows of weight times loss, times the scale.
    ///
    /// # Errors
    /// Those of the device.
    ///
    /// # Panics
    /// Lengths, places or classes do not fit the network, or a size exceeds 2^31 - 1.
    fn training_gradient(
        &mut self,
        network: &TrainedNetwork,
        batch: &TrainingBatch<'_>,
    ) -> Result<TrainingGradient, Error>;
}

impl TrainedNetwork {
    fn output(&self) -> usize {
        self.operations.last().expect("a network has an operation").output
    }

    /// First operation whose parameters are trained; those before need no gradient.
    fn first_trained(&self) -> Option<usize> {
        self.operations.iter().position(|operation| operation.trains)
    }

    /// Checks everything that a kernel reads; returns the number of rows.
    fn check(&self, batch: &TrainingBatch<'_>) -> usize {
        let rows = batch.positions.len();
        let outputs = self.widths[self.output()];
        assert_eq!(batch.parameters.len(), self.parameters, "a value per parameter");
        assert_eq!(batch.rows.len(), rows * self.widths[0], "values of {rows} rows");
        match batch.loss {
            TrainingLoss::Mse(values) | TrainingLoss::Huber(values, _) | TrainingLoss::Bce(values) => {
                assert_eq!(values.len(), rows * outputs, "targets of {rows} rows");
            }
            TrainingLoss::CrossEntropy(classes) => {
                assert!(classes.len() == rows && classes.iter().all(|&it| (it as usize) < outputs), "classes of rows");
            }
        }
        assert!(batch.weights.is_none_or(|weights| weights.len() == rows), "a weight per row");
        let mut forks = 0_usize;
        for (place, Operation { layer, input, output, .. }) in self.operations.iter().enumerate() {
            let (width, wide) = (self.widths[*input], self.widths[*output]);
            assert!(place == 0 || *input == self.operations[place - 1].output, "operations follow each other");
            assert!(*output > 0 || matches!(layer, Layer::Fork), "the batch is not overwritten");
            match layer {
                Layer::Dense { inputs, outputs, weight, bias } => {
                    let end = weight + inputs * outputs + if *bias { *outputs } else { 0 };
                    assert!((width, wide) == (*inputs, *outputs) && input != output && end <= self.parameters);
                }
                Layer::Norm { weight, .. } => {
                    assert!(width == wide && input != output && weight + 2 * width <= self.parameters);
                }
                Layer::Activation(kind) => assert!(width == wide && (*kind != Activation::Gelu || input != output)),
                Layer::Dropout { .. } => assert_eq!(width, wide, "dropout keeps the width"),
                Layer::Fork => forks += 1,
                Layer::Add { skip } => {
                    assert!(width == wide && self.widths[*skip] == wide && forks > 0, "a block has a start");
                    forks -= 1;
                }
            }
        }
        rows
    }
}

impl TrainingLoss<'_> {
    /// Number of the loss in the kernel, and where Huber's turns linear.
    const fn kind(&self) -> (u32, f32) {
        match self {
            Self::Mse(_) => (0, 0.0),
            Self::Huber(_, delta) => (1, *delta),
            Self::Bce(_) => (2, 0.0),
            Self::CrossEntropy(_) => (3, 0.0),
        }
    }
}

/// Returns in how many parts a sum over rows is divided for so many blocks per part, and the rows of a part.
fn parts(rows: usize, blocks: usize) -> (usize, usize) {
    let most = ENOUGH_BLOCKS.div_ceil(blocks).min(rows / LEAST_ROWS).max(1);
    let each = rows.div_ceil(most);
    (rows.div_ceil(each), each)
}

fn products(rows: usize, columns: usize) -> usize {
    rows.div_ceil(SIDE) * columns.div_ceil(SIDE)
}

/// A batch on the device.
struct Pass<'a, D: Driver> {
    memory: &'a mut Memory<D>,
    network: &'a TrainedNetwork,
    parameters: &'a D::Buffer,
    rows: usize,
    /// Values of each buffer of the network.
    values: Vec<D::Buffer>,
    /// Statistics of layer normalization, per operation.
    statistics: Vec<Option<D::Buffer>>,
    positions: D::Buffer,
    key: u64,
    step: u64,
    /// Gradient of all parameters, then losses and errors of the rows.
    results: D::Buffer,
}

impl<'a, D: Driver> Pass<'a, D> {
    fn new(
        memory: &'a mut Memory<D>,
        network: &'a TrainedNetwork,
        parameters: &'a D::Buffer,
        batch: &TrainingBatch<'_>,
    ) -> Result<Self, Error> {
        let rows = batch.positions.len();
        let mut values = vec![memory.uploaded(batch.rows)?];
        for width in &network.widths[1..] {
            values.push(memory.undefined::<f32>(rows * width)?);
        }
        let mut statistics = Vec::new();
        for operation in &network.operations {
            let is_norm = matches!(operation.layer, Layer::Norm { .. });
            statistics.push(if is_norm { Some(memory.undefined::<f32>(2 * rows)?) } else { None });
        }
        let results = memory.zeroed::<f32>(network.parameters + 2 * rows)?;
        let positions = memory.uploaded(batch.positions)?;
        let (key, step) = (batch.key, batch.step);
        Ok(Self { memory, network, parameters, rows, values, statistics, positions, key, step, results })
    }

    fn forward(&mut self) -> Result<(), Error> {
        let operations = &self.network.operations;
        let mut next = 0;
        while let Some(operation) = operations.get(next) {
            // An activation after a dense layer is part of its launch.
            let fused = match (&operation.layer, operations.get(next + 1)) {
                (Layer::Dense { .. }, Some(after)) => match after.layer {
                    Layer::Activation(kind) => Some((kind, after.output)),
                    _ => None,
                },
                _ => None,
            };
            self.forward_operation(next, operation, fused)?;
            next += if fused.is_some() { 2 } else { 1 };
        }
        Ok(())
    }

    fn forward_operation(
        &mut self,
        place: usize,
        operation: &Operation,
        fused: Option<(Activation, usize)>,
    ) -> Result<(), Error> {
        let (input, output) = (Argument::Buffer(&self.values[operation.input]), &self.values[operation.output]);
        let (rows, width) = (self.rows, self.network.widths[operation.output]);
        let parameter = |place: usize| Argument::Inside(self.parameters, FLOAT * place);
        match operation.layer {
            Layer::Dense { inputs, outputs, weight, bias } => {
                let bias = if bias { parameter(weight + inputs * outputs) } else { Argument::Null };
                let (kind, out) = fused.map_or((0, operation.output), |(kind, out)| (kind as u32, out));
                let before = if out == operation.output { Argument::Null } else { Argument::Buffer(output) };
                let arguments = [
                    input,
                    parameter(weight),
                    bias,
                    size(rows),
                    size(inputs),
                    size(outputs),
                    Argument::U32(kind),
                    before,
                    Argument::Buffer(&self.values[out]),
                ];
                self.memory.launch("dense_forward", products(rows, outputs), 1, &arguments)
            }
            Layer::Activation(kind) => {
                let count = rows * width;
                let arguments = [input, size(count), Argument::U32(kind as u32), Argument::Buffer(output)];
                self.memory.launch("activation_forward", count, THREADS, &arguments)
            }
            Layer::Dropout { probability, layer } => {
                let arguments = [
                    input,
                    Argument::Buffer(&self.positions),
                    size(rows),
                    size(width),
                    Argument::F32(probability),
                    Argument::U64(self.key ^ u64::from(layer)),
                    Argument::U64(self.step),
                    Argument::Buffer(output),
                ];
                self.memory.launch("dropout", rows * width.div_ceil(4), THREADS, &arguments)
            }
            Layer::Norm { epsilon, weight } => {
                let statistics = self.statistics[place].as_ref().expect("a normalization has statistics");
                let arguments = [
                    input,
                    parameter(weight),
                    parameter(weight + width),
                    size(rows),
                    size(width),
                    Argument::F32(epsilon),
                    Argument::Buffer(statistics),
                    Argument::Buffer(output),
                ];
                self.memory.launch("norm_forward", rows, ROWS, &arguments)
            }
            Layer::Fork => Ok(()),
            Layer::Add { skip } => {
                let skip = Argument::Buffer(&self.values[skip]);
                let arguments = [input, skip, size(rows * width), Argument::Buffer(output)];
                self.memory.launch("add_values", rows * width, THREADS, &arguments)
            }
        }
    }

    /// Computes losses and errors; returns the gradient of the outputs.
    fn losses(&mut self, batch: &TrainingBatch<'_>) -> Result<D::Buffer, Error> {
        let output = self.network.output();
        let width = self.network.widths[output];
        let delta = self.memory.undefined::<f32>(self.rows * width)?;
        let targets = match batch.loss {
            TrainingLoss::Mse(values) | TrainingLoss::Huber(values, _) | TrainingLoss::Bce(values) => {
                self.memory.uploaded(values)?
            }
            TrainingLoss::CrossEntropy(classes) => self.memory.uploaded(classes)?,
        };
        let weights = batch.weights.map(|weights| self.memory.uploaded(weights)).transpose()?;
        let (kind, huber) = batch.loss.kind();
        let is_class = matches!(batch.loss, TrainingLoss::CrossEntropy(_));
        let (values, classes) = match Argument::Buffer(&targets) {
            targets if is_class => (Argument::Null, targets),
            targets => (targets, Argument::Null),
        };
        let arguments = [
            Argument::Buffer(&self.values[output]),
            values,
            classes,
            weights.as_ref().map_or(Argument::Null, Argument::Buffer),
            size(self.rows),
            size(width),
            Argument::U32(kind),
            Argument::F32(huber),
            Argument::F32(batch.scale),
            Argument::Buffer(&delta),
            Argument::Inside(&self.results, FLOAT * self.network.parameters),
            Argument::Inside(&self.results, FLOAT * (self.network.parameters + self.rows)),
        ];
        self.memory.launch("row_losses", self.rows, ROWS, &arguments)?;
        Ok(delta)
    }

    fn backward(&mut self, mut delta: D::Buffer) -> Result<(), Error> {
        let Some(first) = self.network.first_trained() else { return Ok(()) };
        // Gradients of the ends of residual blocks around the operation.
        let mut skips = Vec::new();
        let mut end = self.network.operations.len();
        while end > first {
            let place = end - 1;
            let operation = &self.network.operations[place];
            let width = self.network.widths[operation.output];
            let count = self.rows * width;
            end = place;
            match operation.layer {
                Layer::Dense { inputs, outputs, weight, .. } => {
                    if operation.trains {
                        self.dense_gradient(operation, &delta)?;
                    }
                    if place > first {
                        let below = self.activation_below(place);
                        let out = self.memory.undefined::<f32>(self.rows * inputs)?;
                        let kept = below.map_or(Argument::Null, |(_, kept)| Argument::Buffer(&self.values[kept]));
                        let arguments = [
                            Argument::Buffer(&delta),
                            Argument::Inside(self.parameters, FLOAT * weight),
                            kept,
                            size(self.rows),
                            size(inputs),
                            size(outputs),
                            Argument::U32(below.map_or(0, |(kind, _)| kind as u32)),
                            Argument::Buffer(&out),
                        ];
                        self.memory.launch("dense_input", products(self.rows, inputs), 1, &arguments)?;
                        delta = out;
                        end -= usize::from(below.is_some());
                    }
                }
                Layer::Activation(kind) => {
                    let kept = Argument::Buffer(&self.values[kept(operation, kind)]);
                    let arguments = [kept, size(count), Argument::U32(kind as u32), Argument::Buffer(&delta)];
                    self.memory.launch("activation_input", count, THREADS, &arguments)?;
                }
                Layer::Dropout { probability, layer } => {
                    let arguments = [
                        Argument::Buffer(&delta),
                        Argument::Buffer(&self.positions),
                        size(self.rows),
                        size(width),
                        Argument::F32(probability),
                        Argument::U64(self.key ^ u64::from(layer)),
                        Argument::U64(self.step),
                        Argument::Buffer(&delta),
                    ];
                    self.memory.launch("dropout", self.rows * width.div_ceil(4), THREADS, &arguments)?;
                }
                Layer::Norm { weight, .. } => self.norm_backward(place, weight, &delta, place > first)?,
                Layer::Add { .. } => {
                    let skip = self.memory.undefined::<f32>(count)?;
                    self.memory.0.copy(&delta, &skip, FLOAT * count)?;
                    skips.push(skip);
                }
                Layer::Fork => {
                    let skip: D::Buffer = skips.pop().expect("every start of a block has an end after it");
                    let own = Argument::Buffer(&delta);
                    let arguments = [own, Argument::Buffer(&skip), size(count), own];
                    self.memory.launch("add_values", count, THREADS, &arguments)?;
                }
            }
        }
        Ok(())
    }

    /// The activation directly below an operation, if it needs a gradient, and the buffer that its derivative reads.
    fn activation_below(&self, place: usize) -> Option<(Activation, usize)> {
        let below = &self.network.operations[place - 1];
        match below.layer {
            Layer::Activation(kind) => Some((kind, kept(below, kind))),
            _ => None,
        }
    }

    fn dense_gradient(&mut self, operation: &Operation, delta: &D::Buffer) -> Result<(), Error> {
        let Layer::Dense { inputs, outputs, weight, bias } = operation.layer else { return Ok(()) };
        let (blocks, count) = (products(outputs, inputs), inputs * outputs + if bias { outputs } else { 0 });
        let (parts, each) = parts(self.rows, blocks);
        let partial = if parts > 1 { Some(self.memory.undefined::<f32>(parts * count)?) } else { None };
        let into = Argument::Inside(&self.results, FLOAT * weight);
        let arguments = [
            Argument::Buffer(delta),
            Argument::Buffer(&self.values[operation.input]),
            size(self.rows),
            size(inputs),
            size(outputs),
            Argument::U32(bias.into()),
            size(each),
            partial.as_ref().map_or(into, Argument::Buffer),
        ];
        self.memory.launch("dense_gradient", parts * blocks, 1, &arguments)?;
        match &partial {
            Some(partial) => sum_parts(self.memory, partial, parts, count, into),
            None => Ok(()),
        }
    }

    fn norm_backward(
        &mut self,
        place: usize,
        weight: usize,
        delta: &D::Buffer,
        wants_input: bool,
    ) -> Result<(), Error> {
        let operation = &self.network.operations[place];
        let width = self.network.widths[operation.output];
        let input = Argument::Buffer(&self.values[operation.input]);
        let statistics = Argument::Buffer(self.statistics[place].as_ref().expect("a normalization has statistics"));
        if operation.trains {
            let (blocks, count) = (width.div_ceil(BAND), 2 * width);
            let (parts, each) = parts(self.rows, blocks);
            let partial = if parts > 1 { Some(self.memory.undefined::<f32>(parts * count)?) } else { None };
            let into = Argument::Inside(&self.results, FLOAT * weight);
            let arguments = [
                Argument::Buffer(delta),
                input,
                statistics,
                size(self.rows),
                size(width),
                size(each),
                partial.as_ref().map_or(into, Argument::Buffer),
            ];
            self.memory.launch("norm_gradient", parts * blocks, 1, &arguments)?;
            if let Some(partial) = &partial {
                sum_parts(self.memory, partial, parts, count, into)?;
            }
        }
        if wants_input {
            let weight = Argument::Inside(self.parameters, FLOAT * weight);
            let arguments = [input, weight, statistics, size(self.rows), size(width), Argument::Buffer(delta)];
            self.memory.launch("norm_input", self.rows, ROWS, &arguments)?;
        }
        Ok(())
    }

    fn finish(self) -> Result<TrainingGradient, Error> {
        let (count, rows) = (self.network.parameters, self.rows);
        let mut parameters = self.memory.downloaded::<f32>(&self.results, count + 2 * rows)?;
        let errors = parameters.split_off(count + rows);
        let losses = parameters.split_off(count);
        Ok(TrainingGradient { parameters, losses, errors })
    }
}

/// The buffer that the derivative of an activation reads.
fn kept(operation: &Operation, kind: Activation) -> usize {
    if kind == Activation::Gelu { operation.input } else { operation.output }
}

fn sum_parts<D: Driver>(
    memory: &mut Memory<D>,
    partial: &D::Buffer,
    parts: usize,
    count: usize,
    into: Argument<'_, D::Buffer>,
) -> Result<(), Error> {
    let arguments = [Argument::Buffer(partial), size(parts), size(count), into];
    memory.launch("sum_parts", count, THREADS, &arguments)
}

/// Parameters on the device.
pub(super) struct TrainedParameters<B> {
    /// What was uploaded.
    values: Vec<f32>,
    buffer: B,
}

impl<D: Driver> Gpu<D> {
    /// Uploads parameters, unless the device has these.
    fn update_parameters(&mut self, parameters: &[f32]) -> Result<(), Error> {
        let bits = |values: &[f32], others: &[f32]| {
            values.len() == others.len() && values.iter().zip(others).all(|(a, b)| a.to_bits() == b.to_bits())
        };
        match &mut self.trained {
            Some(trained) if bits(&trained.values, parameters) => Ok(()),
            Some(TrainedParameters { values, buffer }) if values.len() == parameters.len() => {
                // An upload that fails leaves nothing that counts as uploaded.
                values.fill(f32::NAN);
                self.memory.0.upload(buffer, 0, super::bytes(parameters))?;
                values.copy_from_slice(parameters);
                Ok(())
            }
            trained => {
                *trained = None;
                let buffer = self.memory.uploaded(parameters)?;
                *trained = Some(TrainedParameters { values: parameters.to_vec(), buffer });
                Ok(())
            }
        }
    }
}

impl<D: Driver> TrainingKernels for Gpu<D> {
    fn training_gradient(
        &mut self,
        network: &TrainedNetwork,
        batch: &TrainingBatch<'_>,
    ) -> Result<TrainingGradient, Error> {
        let rows = network.check(batch);
        if rows == 0 {
            let parameters = vec![0.0; network.parameters];
            return Ok(TrainingGradient { parameters, losses: Vec::new(), errors: Vec::new() });
        }
        self.update_parameters(batch.parameters)?;
        let trained = self.trained.as_ref().expect("they were uploaded above");
        let mut pass = Pass::new(&mut self.memory, network, &trained.buffer, batch)?;
        pass.forward()?;
        let delta = pass.losses(batch)?;
        pass.backward(delta)?;
        pass.finish()
    }
}
