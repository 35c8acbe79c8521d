//! Gradients of whole batches by a device, such as a GPU: what it is given, and what is made of its results.
//!
//! A [`GradientDevice`] knows nothing of layer lists: it executes the operations of a [`DeviceNetwork`] over numbered buffers. Its sums have another
//! order than those of [`crate::GradientEngine`], so both agree to rounding.

use std::fmt;

use crate::batch::{Input, LabeledBatch, Targets};
use crate::error::BatchError;
use crate::gradient::GradientSum;
use crate::loss::{Loss, LossKind, SampleErrors};
use crate::model::Model;
use crate::pass::RandomStep;
use crate::philox::dropout_key;
use crate::plan::{Op, OpKind, Slot};
use crate::spec::{Activation, LayerSpec};

/// Layers that a device computes.
const KINDS: [&str; 5] = ["dense", "activation", "dropout", "layerNorm", "residual"];

/// What an operation of a device computes. Parameters are places in the flat buffer of [`Model::parameters`].
#[derive(Debug, Clone, PartialEq)]
pub enum DeviceLayer {
    /// `x W^T + b`: weight of `outputs x inputs`, and the bias after it.
    Dense {
        /// Values per row of the input.
        inputs: usize,
        /// Values per row of the output.
        outputs: usize,
        /// Place of the weight.
        weight: usize,
        /// Whether there is a bias.
        bias: bool,
    },
    /// An element-wise function.
    Activation(Activation),
    /// Dropout of a layer with this number.
    Dropout {
        /// Probability that a unit is dropped.
        probability: f32,
        /// Part of the key of its random numbers.
        layer: u16,
    },
    /// Layer normalization: the weight, and the bias after it.
    LayerNorm {
        /// Added to the variance.
        epsilon: f32,
        /// Place of the weight.
        weight: usize,
    },
    /// Start of a residual block.
    Fork,
    /// End of a residual block: adds the buffer `skip`.
    Add {
        /// Buffer of the start of the block.
        skip: Slot,
    },
}

/// An operation between two buffers.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceOperation {
    /// What it computes.
    pub layer: DeviceLayer,
    /// Buffer that it reads; 0 is the batch.
    pub input: Slot,
    /// Buffer that it writes.
    pub output: Slot,
    /// Whether its parameters are trained.
    pub trains: bool,
}

/// The operations of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceNetwork {
    /// Values per row of each buffer; entry 0 is the batch.
    pub widths: Vec<usize>,
    /// In order: each reads what the one before writes.
    pub operations: Vec<DeviceOperation>,
    /// Number of parameters.
    pub parameters: usize,
}

/// A checked batch.
#[derive(Debug, Clone, Copy)]
pub struct DeviceBatch<'a> {
    /// All parameters.
    pub parameters: &'a [f32],
    /// Inputs, row-major.
    pub rows: &'a [f32],
    /// Position in the global batch of each row.
    pub positions: &'a [u32],
    /// Targets.
    pub targets: Targets<'a>,
    /// One weight per row; `None` means 1.
    pub weights: Option<&'a [f32]>,
    /// Loss of a row.
    pub loss: LossKind,
    /// Where `Huber` turns linear.
    pub huber_delta: f32,
    /// Factor of the gradient.
    pub scale: f32,
    /// Key of the random numbers of dropout; that of a layer is this xor its number.
    pub dropout_key: u64,
    /// Number of the step.
    pub step: u64,
}

/// The gradient of a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceGradient {
    /// Sum over the rows: one value per parameter, 0 for those that are not trained.
    pub parameters: Vec<f32>,
    /// Loss of each row without its weight.
    pub losses: Vec<f32>,
    /// Error of each row, see [`LossKind`].
    pub errors: Vec<f32>,
}

/// A device that computes gradients of batches.
pub trait GradientDevice: fmt::Debug + Send {
    /// Returns the gradient of `scale` times the weighted sum of losses, of at least one row. The same batch has the same bits at every call.
    ///
    /// # Errors
    /// Why the CPU must compute it: the batch is too small to be worth a device, or the device is full or failed.
    fn compute(&mut self, network: &DeviceNetwork, batch: &DeviceBatch<'_>) -> Result<DeviceGradient, String>;
}

/// A model on a device.
#[derive(Debug)]
pub struct DeviceEngine {
    network: DeviceNetwork,
    device: Box<dyn GradientDevice>,
    /// First reason of the batches that the device left to the CPU since it was last taken.
    declined: Option<String>,
}

impl Model {
    /// The operations of the model for a device. Freeze layers before.
    ///
    /// # Errors
    /// The first layer that a device cannot compute: `layer 0 (featureBag)`.
    pub fn device_network(&self) -> Result<DeviceNetwork, String> {
        if let Some(layer) = unsupported(&self.spec.layers, "") {
            return Err(layer);
        }
        let operations: Option<Vec<_>> = self.plan.ops.iter().map(operation).collect();
        let operations = operations.ok_or("a layer of an unknown kind")?;
        Ok(DeviceNetwork { widths: self.plan.widths.clone(), operations, parameters: self.parameters.len() })
    }
}

/// The first layer that a device cannot compute.
fn unsupported(layers: &[LayerSpec], prefix: &str) -> Option<String> {
    layers.iter().enumerate().find_map(|(number, spec)| {
        let at = if prefix.is_empty() { number.to_string() } else { format!("{prefix}.{number}") };
        if let Some(body) = &spec.residual {
            return unsupported(body, &at);
        }
        let kind = spec.layer(&at).ok()?.kind();
        (!KINDS.contains(&kind)).then(|| format!("layer {at} ({kind})"))
    })
}

fn operation(op: &Op) -> Option<DeviceOperation> {
    let layer = match &op.kind {
        OpKind::Dense(shape) => DeviceLayer::Dense {
            inputs: shape.inputs,
            outputs: shape.outputs,
            weight: shape.weight.start,
            bias: shape.bias.is_some(),
        },
        OpKind::Activation(kind) => DeviceLayer::Activation(*kind),
        OpKind::Dropout { probability, layer } => DeviceLayer::Dropout { probability: *probability, layer: *layer },
        OpKind::LayerNorm(shape) => DeviceLayer::LayerNorm { epsilon: shape.epsilon, weight: shape.weight.start },
        OpKind::Fork => DeviceLayer::Fork,
        OpKind::Add { skip } => DeviceLayer::Add { skip: *skip },
        _ => return None,
    };
    Some(DeviceOperation { layer, input: op.input, output: op.output, trains: op.trains() })
}

impl DeviceEngine {
    /// Puts a model on a device.
    ///
    /// # Errors
    /// As [`Model::device_network`].
    pub fn new(model: &Model, device: Box<dyn GradientDevice>) -> Result<Self, String> {
        Ok(Self { network: model.device_network()?, device, declined: None })
    }

    /// The gradient of `scale` times the summed objective, for a loss without moments; `None` where the CPU must compute it.
    ///
    /// # Errors
    /// The batch does not fit the model or the loss.
    ///
    /// # Panics
    /// The loss needs moments.
    pub fn batch_gradient(
        &mut self,
        model: &Model,
        data: &LabeledBatch<'_>,
        loss: &Loss,
        random: RandomStep,
        scale: f32,
    ) -> Result<Option<(GradientSum, SampleErrors)>, BatchError> {
        assert!(!loss.needs_moments(), "a device knows no sums over the batch");
        data.batch.check(model.plan.inputs, model.plan.jagged)?;
        loss.check(data, model.plan.outputs)?;
        let Input::Rows { values, .. } = data.batch.input else { return Ok(None) };
        let rows = data.batch.len();
        if rows == 0 {
            return Ok(None);
        }
        let positions: Vec<u32> = (0..rows).map(|row| data.batch.position(row)).collect();
        let (kind, huber_delta) = loss.settings();
        let batch = DeviceBatch {
            parameters: &model.parameters,
            rows: values,
            positions: &positions,
            targets: data.targets,
            weights: data.weights,
            loss: kind,
            huber_delta,
            scale,
            dropout_key: dropout_key(random.seed),
            step: random.step,
        };
        let DeviceGradient { parameters, losses, errors } = match self.device.compute(&self.network, &batch) {
            Ok(gradient) => gradient,
            Err(reason) => {
                self.declined.get_or_insert(reason);
                return Ok(None);
            }
        };
        let weight = |row: usize| data.weights.map_or(1.0, |weights| f64::from(weights[row]));
        let total = losses.iter().enumerate().map(|(row, loss)| weight(row) * f64::from(*loss)).sum();
        let sum = GradientSum { values: parameters, samples: rows as u64, loss: total };
        Ok(Some((sum, SampleErrors { losses, errors })))
    }

    /// Returns why the CPU computed a batch since the last call; `None` if the device computed all.
    pub fn take_declined(&mut self) -> Option<String> {
        self.declined.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::ModelSpec;

    fn compiled(layers: &str) -> Result<DeviceNetwork, String> {
        let spec: ModelSpec = serde_saphyr::from_str(&format!("{{inputs: 6, layers: [{layers}]}}")).unwrap();
        Model::new(&spec, 1).unwrap().device_network()
    }

    #[test]
    fn network_names_the_first_layer_that_has_no_kernels() {
        let network =
            compiled("{dense: 4, activation: Gelu}, {residual: [{layerNorm: {}}, {dropout: 0.1}]}, {dense: 1}")
                .unwrap();
        assert_eq!((network.operations.len(), network.parameters), (7, 28 + 8 + 5));
        assert!(network.operations[0].trains && !network.operations[1].trains);
        assert_eq!(compiled("{featureBag: 4}, {dense: 1}").unwrap_err(), "layer 0 (featureBag)");
        let nested = compiled("{featureAttention: 8}, {residual: [{dense: 8}]}, {dense: 1}");
        assert_eq!(nested.unwrap_err(), "layer 0 (featureAttention)");
    }
}
