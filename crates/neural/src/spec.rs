//! The layer list as users write it in YAML, and its conversion to typed layers.

use serde::{Deserialize, Serialize};

use crate::error::{SpecError, shorten};

/// A model: the number of inputs and the layers in order.
///
/// ```yaml
/// inputs: 500
/// layers:
///   - { dense: 256, activation: Relu }
///   - { dropout: 0.2 }
///   - { residual: [{ dense: 256, activation: Relu }, { dense: 256 }] }
///   - { dense: 1, activation: Sigmoid }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ModelSpec {
    /// Values per row, or the number of features where the first layer reads feature indices. At least 1.
    pub inputs: usize,
    /// Layers from input to output.
    pub layers: Vec<LayerSpec>,
}

/// One item of the layer list: exactly one of the layer fields, or `activation` alone, plus the options of that layer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct LayerSpec {
    /// Dense layer with this many outputs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dense: Option<usize>,
    /// Dropout with this probability in [0, 1).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropout: Option<f32>,
    /// Layer normalization over the values of a row.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_norm: Option<LayerNormSpec>,
    /// Residual block: `x + layers(x)`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub residual: Option<Vec<LayerSpec>>,
    /// Sum of the embeddings of a sample's features, of this width. Must be the first layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub feature_bag: Option<usize>,
    /// Multi-head attention over the embeddings, of this width, of a sample's features. Must be the first layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub feature_attention: Option<usize>,
    /// Tropical (max-plus) layer with this many outputs: `y[j] = max(max over i of (x[i] + weight[i][j]), bias[j])`. Only the winner of each output
    /// receives a gradient.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tropical: Option<usize>,
    /// Activation: alone, or applied to the outputs of `dense`, `tropical`, `featureBag` or `featureAttention`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub activation: Option<Activation>,
    /// Number of inputs. Optional: it is known from the layer below and checked where it is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inputs: Option<usize>,
    /// Heads of `featureAttention`, a divisor of its width. Default 8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heads: Option<usize>,
    /// Whether `dense`, `tropical` or `featureBag` has a bias. Default true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bias: Option<bool>,
    /// Distribution of the initial weights. Default `GlorotUniform`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initializer: Option<Initializer>,
    /// Whether the parameters keep their values (no gradient, no weight decay). Default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frozen: Option<bool>,
}

/// Options of layer normalization.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct LayerNormSpec {
    /// Added to the variance; positive. Default 1e-5, as in PyTorch.
    pub epsilon: f32,
}

impl Default for LayerNormSpec {
    fn default() -> Self {
        Self { epsilon: 1e-5 }
    }
}

/// An element-wise function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Activation {
    /// `max(0, x)`; its derivative at 0 is 0.
    Relu,
    /// `x * Phi(x)` with the exact normal distribution function.
    Gelu,
    /// Hyperbolic tangent.
    Tanh,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
}

/// Distribution of initial weights. Biases start at 0, those of tropical layers at -1: a bias that wins everywhere would leave its output without gradients.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Initializer {
    /// Uniform in `+-sqrt(6 / (inputs + outputs))` (Glorot and Bengio, 2010).
    #[default]
    GlorotUniform,
    /// Uniform in `+-sqrt(6 / inputs)` (He and others, 2015).
    HeUniform,
}

/// A layer after validation of its own fields.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Layer {
    Dense { outputs: usize, bias: bool, initializer: Initializer },
    Activation(Activation),
    Dropout { probability: f32 },
    Norm { epsilon: f32 },
    Residual(Vec<LayerSpec>),
    FeatureBag { width: usize, bias: bool, initializer: Initializer },
    FeatureAttention { width: usize, heads: usize, initializer: Initializer },
    Tropical { outputs: usize, bias: bool, initializer: Initializer },
}

const KINDS: &str = "dense, dropout, layerNorm, residual, featureBag, featureAttention, tropical, activation";

/// Largest width of a layer: 2^20 values, so that sizes in bytes cannot overflow.
const MAX_WIDTH: usize = 1 << 20;

impl Layer {
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Dense { .. } => "dense",
            Self::Activation(_) => "activation",
            Self::Dropout { .. } => "dropout",
            Self::Norm { .. } => "layerNorm",
            Self::Residual(_) => "residual",
            Self::FeatureBag { .. } => "featureBag",
            Self::FeatureAttention { .. } => "featureAttention",
            Self::Tropical { .. } => "tropical",
        }
    }

    fn allows(&self, option: &str) -> bool {
        match self {
            Self::Dense { .. } | Self::Tropical { .. } | Self::FeatureBag { .. } => option != "heads",
            Self::FeatureAttention { .. } => option != "bias",
            Self::Norm { .. } => matches!(option, "inputs" | "frozen"),
            Self::Residual(_) | Self::Dropout { .. } | Self::Activation(_) => option == "inputs",
        }
    }
}

impl LayerSpec {
    /// The typed layer. `at` is its position, for errors.
    pub(crate) fn layer(&self, at: &str) -> Result<Layer, SpecError> {
        let named = self.named();
        let only_activation = named.is_empty() && self.activation.is_some();
        if named.len() != 1 && !only_activation {
            let found = if named.is_empty() { "no layer".to_owned() } else { named.join(" and ") };
            return Err(SpecError::Kind { layer: at.to_owned(), found, allowed: KINDS });
        }
        let layer = self.typed(only_activation);
        self.check_options(&layer, only_activation, at)?;
        check_ranges(&layer, at)?;
        Ok(layer)
    }

    fn named(&self) -> Vec<&'static str> {
        [
            ("dense", self.dense.is_some()),
            ("dropout", self.dropout.is_some()),
            ("layerNorm", self.layer_norm.is_some()),
            ("residual", self.residual.is_some()),
            ("featureBag", self.feature_bag.is_some()),
            ("featureAttention", self.feature_attention.is_some()),
            ("tropical", self.tropical.is_some()),
        ]
        .into_iter()
        .filter_map(|(name, set)| set.then_some(name))
        .collect()
    }

    fn typed(&self, only_activation: bool) -> Layer {
        let bias = self.bias.unwrap_or(true);
        let initializer = self.initializer.unwrap_or_default();
        if let Some(activation) = self.activation.filter(|_| only_activation) {
            Layer::Activation(activation)
        } else if let Some(outputs) = self.dense {
            Layer::Dense { outputs, bias, initializer }
        } else if let Some(probability) = self.dropout {
            Layer::Dropout { probability }
        } else if let Some(norm) = self.layer_norm {
            Layer::Norm { epsilon: norm.epsilon }
        } else if let Some(body) = &self.residual {
            Layer::Residual(body.clone())
        } else if let Some(outputs) = self.tropical {
            Layer::Tropical { outputs, bias, initializer }
        } else if let Some(width) = self.feature_bag {
            Layer::FeatureBag { width, bias, initializer }
        } else {
            let width = self.feature_attention.expect("the caller checked that one layer is named");
            Layer::FeatureAttention { width, heads: self.heads.unwrap_or(8), initializer }
        }
    }

    fn check_options(&self, layer: &Layer, only_activation: bool, at: &str) -> Result<(), SpecError> {
        let options = [
            ("activation", self.activation.is_some() && !only_activation),
            ("inputs", self.inputs.is_some()),
            ("heads", self.heads.is_some()),
            ("bias", self.bias.is_some()),
            ("initializer", self.initializer.is_some()),
            ("frozen", self.frozen.is_some()),
        ];
        for (option, set) in options {
            if set && !layer.allows(option) {
                return Err(SpecError::Option { layer: at.to_owned(), option, kind: layer.kind() });
            }
        }
        Ok(())
    }
}

fn check_ranges(layer: &Layer, at: &str) -> Result<(), SpecError> {
    let range = |valid: bool, field: &'static str, value: String, allowed: &'static str| {
        if valid { Ok(()) } else { Err(SpecError::Range { layer: at.to_owned(), field, value, allowed }) }
    };
    match layer {
        Layer::Dense { outputs: width, .. }
        | Layer::Tropical { outputs: width, .. }
        | Layer::FeatureBag { width, .. }
        | Layer::FeatureAttention { width, .. } => {
            range((1..=MAX_WIDTH).contains(width), layer.kind(), width.to_string(), "1 to 1048576")?;
        }
        Layer::Dropout { probability } => {
            range((0.0..1.0).contains(probability), "dropout", shorten(probability.to_string()), "0 to 1 exclusive")?;
        }
        Layer::Norm { epsilon } => {
            let valid = epsilon.is_finite() && *epsilon > 0.0;
            range(valid, "epsilon", shorten(epsilon.to_string()), "a positive number")?;
        }
        Layer::Residual(body) => range(!body.is_empty(), "residual", "[]".to_owned(), "at least one layer")?,
        Layer::Activation(_) => {}
    }
    if let Layer::FeatureAttention { width, heads, .. } = layer
        && (*heads == 0 || width % heads != 0)
    {
        return Err(SpecError::Heads { layer: at.to_owned(), width: *width, heads: *heads });
    }
    Ok(())
}
