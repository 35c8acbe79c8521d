//! Compiles a layer list to a flat list of operations over numbered activation buffers.
//!
//! Invariant: an operation overwrites a buffer in place only if no backward step reads the old values. `Relu`, `Tanh`
//! and `Sigmoid` are differentiated from their outputs, so what follows them writes to another buffer.

use std::ops::Range;

use crate::error::SpecError;
use crate::spec::{Activation, Initializer, Layer, LayerSpec, ModelSpec};

/// One parameter tensor within the flat parameter buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    /// Name as in PyTorch's state dict, such as `layers.0.weight`.
    pub name: String,
    /// Shape, row-major.
    pub shape: Vec<usize>,
    /// Place in the flat buffer.
    pub range: Range<usize>,
    /// Whether the tensor keeps its values: its gradient is 0 and no optimizer changes it.
    pub frozen: bool,
}

/// How a tensor is initialized.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Fill {
    Constant(f32),
    Uniform { initializer: Initializer, inputs: usize, outputs: usize },
}

/// Number of an activation buffer; 0 is the model's input.
pub(crate) type Slot = usize;

/// Sizes and parameter places of a dense layer: weight `outputs x inputs`, bias `outputs`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DenseShape {
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    pub(crate) weight: Range<usize>,
    pub(crate) bias: Option<Range<usize>>,
}

/// Sizes and parameter places of a feature bag: weight `features x width`, bias `width`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct BagShape {
    pub(crate) features: usize,
    pub(crate) width: usize,
    pub(crate) weight: Range<usize>,
    pub(crate) bias: Option<Range<usize>>,
}

/// Sizes and parameter places of a tropical layer: weight `inputs x outputs`, bias `outputs`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TropicalShape {
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    pub(crate) weight: Range<usize>,
    pub(crate) bias: Option<Range<usize>>,
}

/// Parameter places of layer normalization.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NormShape {
    pub(crate) width: usize,
    pub(crate) epsilon: f32,
    pub(crate) weight: Range<usize>,
    pub(crate) bias: Range<usize>,
}

/// Sizes and parameter places of feature attention.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct AttentionShape {
    pub(crate) features: usize,
    pub(crate) width: usize,
    pub(crate) heads: usize,
    pub(crate) embedding: Range<usize>,
    pub(crate) embedding_bias: Range<usize>,
    pub(crate) in_weight: Range<usize>,
    pub(crate) in_bias: Range<usize>,
    pub(crate) out_weight: Range<usize>,
    pub(crate) out_bias: Range<usize>,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum OpKind {
    Dense(DenseShape),
    Activation(Activation),
    Dropout {
        probability: f32,
        layer: u16,
    },
    LayerNorm(NormShape),
    /// Start of a residual block: the input of the block is kept for [`OpKind::Add`].
    Fork,
    /// End of a residual block: adds the buffer `skip`.
    Add {
        skip: Slot,
    },
    FeatureBag(BagShape),
    FeatureAttention(Box<AttentionShape>),
    Tropical(TropicalShape),
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Op {
    pub(crate) kind: OpKind,
    pub(crate) input: Slot,
    pub(crate) output: Slot,
    /// Values per row of the output.
    pub(crate) width: usize,
    /// Parameters of the operation, contiguous in the flat buffer. Empty for those without.
    pub(crate) parameters: Range<usize>,
    pub(crate) frozen: bool,
}

impl Op {
    /// Whether the operation has parameters that are trained.
    pub(crate) fn trains(&self) -> bool {
        !self.frozen && !self.parameters.is_empty()
    }

    /// The buffer that the backward step reads.
    pub(crate) fn backward_slot(&self) -> Option<Slot> {
        match &self.kind {
            OpKind::Dense(_) | OpKind::LayerNorm(_) | OpKind::Activation(Activation::Gelu) => Some(self.input),
            OpKind::Activation(_) => Some(self.output),
            _ => None,
        }
    }
}

/// What a model executes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Plan {
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    /// Whether the first layer reads feature indices.
    pub(crate) jagged: bool,
    pub(crate) ops: Vec<Op>,
    /// Values per row of each buffer; entry 0 is the input.
    pub(crate) widths: Vec<usize>,
    /// Last operation of the forward pass that reads or writes each buffer. The number of operations for the outputs.
    pub(crate) last_uses: Vec<usize>,
    pub(crate) views: Vec<View>,
    pub(crate) fills: Vec<Fill>,
    pub(crate) parameter_count: usize,
}

impl Plan {
    /// First operation that trains; those before need no gradient.
    pub(crate) fn first_trained(&self) -> Option<usize> {
        self.ops.iter().position(Op::trains)
    }

    /// Buffers that operations before `cut` write and operations from it on read, in ascending order.
    pub(crate) fn live(&self, cut: usize) -> Vec<Slot> {
        let (before, after) = self.ops.split_at(cut);
        let is_read = |slot: Slot| {
            after.iter().any(|op| op.input == slot || matches!(op.kind, OpKind::Add { skip } if skip == slot))
        };
        let mut slots: Vec<Slot> = before.iter().map(|op| op.output).filter(|slot| *slot != 0).collect();
        slots.sort_unstable();
        slots.dedup();
        slots.retain(|slot| is_read(*slot));
        slots
    }

    /// Widths of the gradients that the backward pass keeps at `cut` for residual blocks around it, in the order in which it met them.
    pub(crate) fn open_skips(&self, cut: usize) -> Vec<usize> {
        let (mut inner, mut widths) = (0usize, Vec::new());
        for op in &self.ops[cut..] {
            match op.kind {
                OpKind::Fork => inner += 1,
                OpKind::Add { .. } if inner > 0 => inner -= 1,
                OpKind::Add { .. } => widths.push(op.width),
                _ => {}
            }
        }
        widths.reverse();
        widths
    }
}

/// Largest number of parameters: 8 GiB in f32. A specification comes from a user, so it is checked before memory is
/// allocated for it.
const MAX_PARAMETERS: usize = 1 << 31;

/// Initial bias of tropical layers, below most edges: a bias that wins everywhere would leave its output without gradients.
const TROPICAL_BIAS: f32 = -1.0;

struct Compiler {
    plan: Plan,
    current: Slot,
    width: usize,
    /// Whether the current buffer may be overwritten.
    writable: bool,
    dropouts: u16,
}

/// Builds the plan of a specification.
pub(crate) fn compile(spec: &ModelSpec) -> Result<Plan, SpecError> {
    if spec.inputs == 0 {
        return Err(SpecError::Empty { field: "inputs" });
    }
    if spec.layers.is_empty() {
        return Err(SpecError::Empty { field: "layers" });
    }
    let plan = Plan {
        inputs: spec.inputs,
        outputs: 0,
        jagged: false,
        ops: Vec::new(),
        widths: vec![spec.inputs],
        last_uses: Vec::new(),
        views: Vec::new(),
        fills: Vec::new(),
        parameter_count: 0,
    };
    let mut compiler = Compiler { plan, current: 0, width: spec.inputs, writable: false, dropouts: 0 };
    compiler.list(&spec.layers, "")?;
    if compiler.plan.parameter_count > MAX_PARAMETERS {
        return Err(SpecError::TooLarge { actual: compiler.plan.parameter_count, limit: MAX_PARAMETERS });
    }
    let mut plan = compiler.plan;
    plan.outputs = compiler.width;
    plan.last_uses = vec![0; plan.widths.len()];
    for (i, op) in plan.ops.iter().enumerate() {
        for slot in [op.input, op.output] {
            plan.last_uses[slot] = i;
        }
        if let OpKind::Add { skip } = op.kind {
            plan.last_uses[skip] = i;
        }
    }
    plan.last_uses[compiler.current] = plan.ops.len();
    Ok(plan)
}

impl Compiler {
    fn list(&mut self, layers: &[LayerSpec], prefix: &str) -> Result<(), SpecError> {
        for (i, spec) in layers.iter().enumerate() {
            let at = if prefix.is_empty() { i.to_string() } else { format!("{prefix}.{i}") };
            self.item(spec, &at)?;
        }
        Ok(())
    }

    fn item(&mut self, spec: &LayerSpec, at: &str) -> Result<(), SpecError> {
        let layer = spec.layer(at)?;
        if let Some(declared) = spec.inputs
            && declared != self.width
        {
            return Err(SpecError::Inputs { layer: at.to_owned(), declared, actual: self.width });
        }
        let jagged = matches!(layer, Layer::FeatureBag { .. } | Layer::FeatureAttention { .. });
        if jagged && at != "0" {
            return Err(SpecError::NotFirst { layer: at.to_owned(), kind: layer.kind() });
        }
        self.plan.jagged |= jagged;
        let only_activation = matches!(layer, Layer::Activation(_));
        self.layer(layer, at)?;
        if let Some(op) = self.plan.ops.last_mut() {
            op.frozen = spec.frozen.unwrap_or(false) && !op.parameters.is_empty();
            for view in self.plan.views.iter_mut().filter(|v| op.parameters.contains(&v.range.start)) {
                view.frozen = op.frozen;
            }
        }
        match spec.activation {
            Some(activation) if !only_activation => self.activation(activation),
            _ => {}
        }
        Ok(())
    }

    fn layer(&mut self, layer: Layer, at: &str) -> Result<(), SpecError> {
        match layer {
            Layer::Dense { outputs, bias, initializer } => self.dense(at, outputs, bias, initializer),
            Layer::Activation(activation) => self.activation(activation),
            Layer::Dropout { probability } => {
                let layer = self.dropouts;
                self.dropouts += 1;
                self.push(OpKind::Dropout { probability, layer }, self.width, 0..0);
            }
            Layer::Norm { epsilon } => self.layer_norm(at, epsilon),
            Layer::Residual(body) => self.residual(at, &body)?,
            Layer::FeatureBag { width, bias, initializer } => self.bag(at, width, bias, initializer),
            Layer::FeatureAttention { width, heads, initializer } => self.attention(at, width, heads, initializer),
            Layer::Tropical { outputs, bias, initializer } => self.tropical(at, outputs, bias, initializer),
        }
        Ok(())
    }

    /// Appends an operation that writes to a new buffer.
    fn push(&mut self, kind: OpKind, width: usize, parameters: Range<usize>) {
        self.plan.widths.push(width);
        let output = self.plan.widths.len() - 1;
        self.plan.ops.push(Op { kind, input: self.current, output, width, parameters, frozen: false });
        (self.current, self.width, self.writable) = (output, width, true);
    }

    /// Appends an operation that overwrites the current buffer.
    fn push_in_place(&mut self, kind: OpKind) {
        let (input, output, width) = (self.current, self.current, self.width);
        self.plan.ops.push(Op { kind, input, output, width, parameters: 0..0, frozen: false });
    }

    fn tensor(&mut self, name: String, shape: Vec<usize>, fill: Fill) -> Range<usize> {
        let start = self.plan.parameter_count;
        let size = shape.iter().fold(1usize, |a, b| a.saturating_mul(*b));
        let range = start..start.saturating_add(size);
        self.plan.parameter_count = range.end;
        self.plan.views.push(View { name, shape, range: range.clone(), frozen: false });
        self.plan.fills.push(fill);
        range
    }

    fn dense(&mut self, at: &str, outputs: usize, bias: bool, initializer: Initializer) {
        let inputs = self.width;
        let fill = Fill::Uniform { initializer, inputs, outputs };
        let weight = self.tensor(format!("{}.weight", path(at)), vec![outputs, inputs], fill);
        let bias = bias.then(|| self.tensor(format!("{}.bias", path(at)), vec![outputs], Fill::Constant(0.0)));
        let all = weight.start..bias.as_ref().map_or(weight.end, |b| b.end);
        self.push(OpKind::Dense(DenseShape { inputs, outputs, weight, bias }), outputs, all);
    }

    fn tropical(&mut self, at: &str, outputs: usize, bias: bool, initializer: Initializer) {
        let inputs = self.width;
        let fill = Fill::Uniform { initializer, inputs, outputs };
        let weight = self.tensor(format!("{}.weight", path(at)), vec![inputs, outputs], fill);
        let fill = Fill::Constant(TROPICAL_BIAS);
        let bias = bias.then(|| self.tensor(format!("{}.bias", path(at)), vec![outputs], fill));
        let all = weight.start..bias.as_ref().map_or(weight.end, |b| b.end);
        self.push(OpKind::Tropical(TropicalShape { inputs, outputs, weight, bias }), outputs, all);
    }

    fn activation(&mut self, activation: Activation) {
        let from_input = activation == Activation::Gelu;
        if self.writable && !from_input {
            self.push_in_place(OpKind::Activation(activation));
        } else {
            self.push(OpKind::Activation(activation), self.width, 0..0);
        }
        self.writable = from_input;
    }

    fn layer_norm(&mut self, at: &str, epsilon: f32) {
        let width = self.width;
        let weight = self.tensor(format!("{}.weight", path(at)), vec![width], Fill::Constant(1.0));
        let bias = self.tensor(format!("{}.bias", path(at)), vec![width], Fill::Constant(0.0));
        let all = weight.start..bias.end;
        self.push(OpKind::LayerNorm(NormShape { width, epsilon, weight, bias }), width, all);
    }

    fn residual(&mut self, at: &str, body: &[LayerSpec]) -> Result<(), SpecError> {
        let (skip, inputs) = (self.current, self.width);
        self.push_in_place(OpKind::Fork);
        self.writable = false;
        self.list(body, at)?;
        if self.width != inputs {
            return Err(SpecError::Residual { layer: at.to_owned(), inputs, outputs: self.width });
        }
        if self.writable {
            self.push_in_place(OpKind::Add { skip });
        } else {
            self.push(OpKind::Add { skip }, inputs, 0..0);
        }
        Ok(())
    }

    fn bag(&mut self, at: &str, width: usize, bias: bool, initializer: Initializer) {
        let features = self.width;
        let fill = Fill::Uniform { initializer, inputs: features, outputs: width };
        let weight = self.tensor(format!("{}.weight", path(at)), vec![features, width], fill);
        let bias = bias.then(|| self.tensor(format!("{}.bias", path(at)), vec![width], Fill::Constant(0.0)));
        let all = weight.start..bias.as_ref().map_or(weight.end, |b| b.end);
        self.push(OpKind::FeatureBag(BagShape { features, width, weight, bias }), width, all);
    }

    fn attention(&mut self, at: &str, width: usize, heads: usize, initializer: Initializer) {
        let (features, path) = (self.width, path(at));
        let uniform = |inputs, outputs| Fill::Uniform { initializer, inputs, outputs };
        let embedding =
            self.tensor(format!("{path}.embedding.weight"), vec![features, width], uniform(features, width));
        let embedding_bias = self.tensor(format!("{path}.embedding_bias"), vec![width], Fill::Constant(0.0));
        let in_weight =
            self.tensor(format!("{path}.attention.in_proj_weight"), vec![3 * width, width], uniform(width, 3 * width));
        let in_bias = self.tensor(format!("{path}.attention.in_proj_bias"), vec![3 * width], Fill::Constant(0.0));
        let out_weight =
            self.tensor(format!("{path}.attention.out_proj.weight"), vec![width, width], uniform(width, width));
        let out_bias = self.tensor(format!("{path}.attention.out_proj.bias"), vec![width], Fill::Constant(0.0));
        let all = embedding.start..out_bias.end;
        let shape = AttentionShape {
            features,
            width,
            heads,
            embedding,
            embedding_bias,
            in_weight,
            in_bias,
            out_weight,
            out_bias,
        };
        self.push(OpKind::FeatureAttention(Box::new(shape)), width, all);
    }
}

/// Name of the layer at a position: `layers.2.layers.0` for `2.0`.
fn path(at: &str) -> String {
    at.split('.').map(|i| format!("layers.{i}")).collect::<Vec<_>>().join(".")
}
