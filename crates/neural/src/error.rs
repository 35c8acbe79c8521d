//! Errors of this crate: what a caller can get wrong, with the place, the value and what is allowed.

use thiserror::Error;

/// A model specification that cannot be built.
///
/// `layer` is the position in the list, such as `2`, or `2.0` for the first layer within the residual block at 2.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SpecError {
    /// The model has no inputs or no layers.
    #[error("model: {field} is empty, at least one is required")]
    Empty {
        /// `inputs` or `layers`.
        field: &'static str,
    },
    /// The model has too many parameters.
    #[error("model: has {actual} parameters, allowed: at most {limit}")]
    TooLarge {
        /// Number of parameters.
        actual: usize,
        /// Largest number.
        limit: usize,
    },
    /// An item names no layer, or more than one.
    #[error("layer {layer}: names {found}, exactly one of {allowed} is required")]
    Kind {
        /// Position of the layer.
        layer: String,
        /// What the item names.
        found: String,
        /// Names of all layers.
        allowed: &'static str,
    },
    /// An option that the layer does not have.
    #[error("layer {layer}: {option} does not apply to {kind}")]
    Option {
        /// Position of the layer.
        layer: String,
        /// The option.
        option: &'static str,
        /// The kind of the layer.
        kind: &'static str,
    },
    /// Declared inputs differ from the outputs of the layer below.
    #[error("layer {layer}: inputs is {declared}, but the layer below gives {actual}")]
    Inputs {
        /// Position of the layer.
        layer: String,
        /// What the specification declares.
        declared: usize,
        /// What the layer below, or the model's input, gives.
        actual: usize,
    },
    /// The body of a residual block changes the width.
    #[error("layer {layer}: residual takes {inputs} values, but its last layer gives {outputs}: both must be equal")]
    Residual {
        /// Position of the layer.
        layer: String,
        /// Width before the block.
        inputs: usize,
        /// Width after the last layer of the block.
        outputs: usize,
    },
    /// The width of an attention layer is not a multiple of its heads.
    #[error("layer {layer}: width {width} is not a multiple of heads {heads}")]
    Heads {
        /// Position of the layer.
        layer: String,
        /// Width of a token.
        width: usize,
        /// Number of heads.
        heads: usize,
    },
    /// A layer over feature indices that is not the first one.
    #[error("layer {layer}: {kind} reads feature indices and must be the first layer")]
    NotFirst {
        /// Position of the layer.
        layer: String,
        /// The kind of the layer.
        kind: &'static str,
    },
    /// A number outside its range.
    #[error("layer {layer}: {field} is {value}, allowed: {allowed}")]
    Range {
        /// Position of the layer.
        layer: String,
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// The allowed range.
        allowed: &'static str,
    },
}

/// An input, target or weight that does not fit the model.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BatchError {
    /// A buffer has the wrong length.
    #[error("{field}: length is {actual}, expected {expected}")]
    Length {
        /// The buffer.
        field: &'static str,
        /// Its length.
        actual: usize,
        /// The length that fits.
        expected: usize,
    },
    /// Dense rows for a model over feature indices, or the reverse.
    #[error("input: the model reads {expected}, the batch has {actual}")]
    Kind {
        /// What the first layer reads.
        expected: &'static str,
        /// What the batch has.
        actual: &'static str,
    },
    /// Offsets of a jagged list that do not start at 0, decrease, or do not end at the number of indices.
    #[error("offsets: entry {at} is {value}, expected {expected}")]
    Offsets {
        /// Position in the offsets.
        at: usize,
        /// The value there.
        value: u32,
        /// What is allowed.
        expected: String,
    },
    /// A feature index outside the model's inputs.
    #[error("sample {sample}: feature index is {value}, allowed: 0 to {limit} exclusive")]
    Feature {
        /// Row in the batch.
        sample: usize,
        /// The index.
        value: u32,
        /// Number of features of the model.
        limit: usize,
    },
    /// A class outside the model's outputs.
    #[error("sample {sample}: class is {value}, allowed: 0 to {limit} exclusive")]
    Class {
        /// Row in the batch.
        sample: usize,
        /// The class.
        value: u32,
        /// Number of outputs of the model.
        limit: usize,
    },
    /// The loss needs the other kind of target.
    #[error("targets: loss {loss} needs {expected}")]
    Targets {
        /// Name of the loss.
        loss: &'static str,
        /// The kind of targets that it needs.
        expected: &'static str,
    },
    /// A target or a weight that is not finite, or a negative weight.
    #[error("sample {sample}: {field} is {value}, allowed: {allowed}")]
    Value {
        /// Row in the batch.
        sample: usize,
        /// `target` or `weight`.
        field: &'static str,
        /// The value.
        value: String,
        /// What is allowed.
        allowed: &'static str,
    },
}

/// A file of weights that does not belong to the model, or cannot be read.
#[derive(Debug, Error)]
pub enum WeightsError {
    /// Not a safetensors file.
    #[error("failed to read safetensors")]
    Format(#[from] safetensors::SafeTensorError),
    /// A tensor is missing.
    #[error("tensor {name}: missing from the file, expected shape {expected:?}")]
    Missing {
        /// Name of the tensor.
        name: String,
        /// Its shape in the model.
        expected: Vec<usize>,
    },
    /// A tensor that the model does not have.
    #[error("tensor {name}: in the file, but not in the model")]
    Unknown {
        /// Name of the tensor.
        name: String,
    },
    /// A tensor of another shape or type.
    #[error("tensor {name}: has type {dtype} and shape {actual:?}, expected F32 and {expected:?}")]
    Shape {
        /// Name of the tensor.
        name: String,
        /// Type in the file.
        dtype: String,
        /// Shape in the file.
        actual: Vec<usize>,
        /// Shape in the model.
        expected: Vec<usize>,
    },
    /// A value that is not finite.
    #[error("tensor {name}: value {index} is not finite")]
    NotFinite {
        /// Name of the tensor.
        name: String,
        /// Position in the tensor.
        index: usize,
    },
}

/// A setting of an optimizer, schedule or scaler outside its range.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{field} is {value}, allowed: {allowed}")]
pub struct SettingError {
    /// The field.
    pub field: &'static str,
    /// Its value.
    pub value: String,
    /// The allowed range.
    pub allowed: &'static str,
}

impl SettingError {
    /// Error unless `valid`.
    #[expect(clippy::needless_pass_by_value, reason = "callers pass numbers and fresh strings")]
    pub fn unless(valid: bool, field: &'static str, value: impl ToString, allowed: &'static str) -> Result<(), Self> {
        if valid { Ok(()) } else { Err(Self { field, value: shorten(value.to_string()), allowed }) }
    }
}

/// Shortens the text of a very large or small float, which has hundreds of digits.
pub(crate) fn shorten(text: String) -> String {
    match text.parse::<f64>() {
        Ok(value) if text.len() > 24 => format!("{value:e}"),
        _ => text,
    }
}
