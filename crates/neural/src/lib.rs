//! Neural networks for data-parallel replay training: the computation on the CPU, and its description for a [`GradientDevice`].
//!
//! Decides how a layer list becomes a model ([`ModelSpec`], [`Model`]), how predictions and gradients are computed
//! ([`GradientEngine`]), what a loss and its per-sample errors are ([`Loss`]), and how parameters change
//! ([`Optimizer`], [`Schedule`], [`LossScaler`]). It does no I/O, reads no clock, and knows nothing of workers: random
//! numbers are functions of (seed, step, layer, sample, unit), and weights are saved to and loaded from bytes.
//!
//! Invariants:
//! - Gradients are sums over samples with their count, never means. The caller divides once, after the reduction.
//! - A sample's prediction and gradient do not depend on the other samples, except through the correlation term, which
//!   reads sums over the global batch ([`Moments`]).
//! - Results have the same bits for the same batch and the same split into leaves on processors with the same
//!   instruction set, whatever the number of threads. Across processor kinds they agree to rounding.

mod batch;
mod device;
mod error;
mod gradient;
mod layers;
mod loss;
mod matrix;
mod model;
mod optimizer;
mod pass;
mod philox;
pub mod pipeline;
mod pipelined;
mod plan;
mod precision;
mod python;
mod scaler;
mod schedule;
mod spec;
mod staged;
pub mod tree;
mod weights;

pub use batch::{Batch, LabeledBatch, Targets};
pub use device::{
    DeviceBatch, DeviceEngine, DeviceGradient, DeviceLayer, DeviceNetwork, DeviceOperation, GradientDevice,
};
pub use error::{BatchError, SettingError, SpecError, WeightsError};
pub use gradient::{GradientEngine, GradientSum, LeafSplit};
pub use loss::{CorrelationSpec, Loss, LossKind, LossSpec, Moments, SampleErrors};
pub use model::Model;
pub use optimizer::{Optimizer, OptimizerSpec, clip_factor, global_norm};
pub use pass::RandomStep;
pub use philox::philox;
pub use pipelined::{Parallelism, PipelinedEngine};
pub use plan::View;
pub use precision::Precision;
pub use scaler::{LossScaler, ScalerDecision, ScalerSpec, ScalerState};
pub use schedule::{CosineSpec, Schedule, ScheduleSpec};
pub use spec::{Activation, Initializer, LayerNormSpec, LayerSpec, ModelSpec};
pub use staged::{StageGradient, StageLink, StageMessage, StagedEngine, StagedError};
pub use weights::Coverage;
