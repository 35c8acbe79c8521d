//! A model: a plan and its parameters in one flat buffer.

use std::ops::Range;

use rayon::prelude::*;

use crate::batch::Batch;
use crate::error::{BatchError, SpecError};
use crate::pass::{Workspace, forward};
use crate::philox::initial_uniform;
use crate::plan::{Fill, Plan, View, compile};
use crate::spec::{Initializer, ModelSpec};

/// Rows that one task predicts: enough for efficient products, few enough for all cores to take part.
const PREDICT_ROWS: usize = 128;

/// A model with its parameters.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    pub(crate) spec: ModelSpec,
    pub(crate) plan: Plan,
    pub(crate) parameters: Vec<f32>,
}

impl Model {
    /// Builds a model and initializes its parameters from `seed`: the same seed gives the same bits everywhere.
    ///
    /// # Errors
    /// The specification is not valid; the error names the layer and the dimensions.
    pub fn new(spec: &ModelSpec, seed: u64) -> Result<Self, SpecError> {
        let plan = compile(spec)?;
        let mut parameters = vec![0.0; plan.parameter_count];
        for (tensor, (view, fill)) in plan.views.iter().zip(&plan.fills).enumerate() {
            initialize(*fill, seed, tensor as u32, &mut parameters[view.range.clone()]);
        }
        Ok(Self { spec: spec.clone(), plan, parameters })
    }

    /// The specification.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Inputs per row, or number of features.
    pub fn inputs(&self) -> usize {
        self.plan.inputs
    }

    /// Outputs per row.
    pub fn outputs(&self) -> usize {
        self.plan.outputs
    }

    /// Whether batches are feature indices rather than dense rows.
    pub fn reads_features(&self) -> bool {
        self.plan.jagged
    }

    /// Number of parameters, frozen ones included.
    pub fn parameter_count(&self) -> usize {
        self.parameters.len()
    }

    /// All parameters, in the order of [`Model::views`].
    pub fn parameters(&self) -> &[f32] {
        &self.parameters
    }

    /// All parameters, to be changed.
    pub fn parameters_mut(&mut self) -> &mut [f32] {
        &mut self.parameters
    }

    /// Names, shapes and places of the parameter tensors, in ascending order of their place.
    pub fn views(&self) -> &[View] {
        &self.plan.views
    }

    /// Places of the parameters of each layer that has some, in the order in which the backward pass completes their gradients: from the last layer to
    /// the first.
    pub fn backward_order(&self) -> Vec<Range<usize>> {
        self.plan.ops.iter().rev().map(|op| op.parameters.clone()).filter(|it| !it.is_empty()).collect()
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&[f32]> {
        let view = self.plan.views.iter().find(|v| v.name == name)?;
        Some(&self.parameters[view.range.clone()])
    }

    /// Freezes or unfreezes the layers at and below `path`, such as `layers.0`. Returns the number of tensors concerned.
    pub fn set_frozen(&mut self, path: &str, frozen: bool) -> usize {
        let mut count = 0;
        for view in &mut self.plan.views {
            let below = view.name.strip_prefix(path).is_some_and(|rest| rest.starts_with('.'));
            // A layer is the smallest unit: `layers.0.weight` alone does not match.
            if below {
                view.frozen = frozen;
                count += 1;
                let start = view.range.start;
                self.plan.ops.iter_mut().filter(|op| op.parameters.contains(&start)).for_each(|op| op.frozen = frozen);
            }
        }
        // A path within a layer, such as `layers.0.attention`, covers the whole layer.
        for op in &self.plan.ops {
            let own = self.plan.views.iter_mut().filter(|v| op.parameters.contains(&v.range.start));
            own.for_each(|v| v.frozen = op.frozen);
        }
        count
    }

    /// Outputs for each row, row-major, without dropout. A row's outputs do not depend on the other rows.
    ///
    /// # Errors
    /// The batch does not fit the model.
    pub fn predict(&self, batch: &Batch<'_>) -> Result<Vec<f32>, BatchError> {
        batch.check(self.plan.inputs, self.plan.jagged)?;
        let mut out = vec![0.0; batch.len() * self.plan.outputs];
        out.par_chunks_mut(PREDICT_ROWS * self.plan.outputs).enumerate().for_each_init(
            Workspace::default,
            |work, (i, out)| {
                let start = i * PREDICT_ROWS;
                let rows = batch.slice(start..start + out.len() / self.plan.outputs);
                forward(&self.plan, &self.parameters, &rows, None, work);
                out.copy_from_slice(work.outputs(&self.plan));
            },
        );
        Ok(out)
    }
}

fn initialize(fill: Fill, seed: u64, tensor: u32, values: &mut [f32]) {
    match fill {
        Fill::Constant(value) => values.fill(value),
        Fill::Uniform { initializer, inputs, outputs } => {
            let fan = match initializer {
                Initializer::GlorotUniform => inputs + outputs,
                Initializer::HeUniform => inputs,
            };
            let limit = (6.0 / fan as f64).sqrt() as f32;
            for (i, value) in values.iter_mut().enumerate() {
                *value = limit * (2.0 * initial_uniform(seed, tensor, i as u64) - 1.0);
            }
        }
    }
}
