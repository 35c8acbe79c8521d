//! A manifest's model, loss and optimizer as those of a trainer.

use engram_api::{
    CompressionKind, InitScheme, LayerActivation, LossFunction, OptimizerKind, RateSchedule, ReplayLayer, ReplayRun,
    ResidualLayer, TrainingPrecision,
};
use engram_neural::{
    Activation, CorrelationSpec, CosineSpec, Initializer, LayerNormSpec, LayerSpec, LossKind, LossSpec, ModelSpec,
    OptimizerSpec, Precision, ScheduleSpec,
};

use crate::compression::{GradientCompression, GradientEncoding};
use crate::trainer::{Normalization, TrainerSpec};

/// Returns what is trained and how; it is not validated.
pub(crate) fn trainer_spec(run: &ReplayRun) -> TrainerSpec {
    let initializer = match run.model.init.scheme {
        InitScheme::GlorotUniform => Initializer::GlorotUniform,
        InitScheme::HeUniform => Initializer::HeUniform,
    };
    let optimizer = &run.optimizer;
    let decay = optimizer.weight_decay.map(|decay| decay as f32);
    let loss = &run.model.loss;
    TrainerSpec {
        model: ModelSpec {
            inputs: run.model.inputs.first().map_or(0, |input| input.dim as usize),
            layers: run.model.layers.iter().map(|it| layer(it, initializer)).collect(),
        },
        loss: LossSpec {
            kind: match loss.kind {
                LossFunction::Mse => LossKind::Mse,
                LossFunction::Huber => LossKind::Huber,
                LossFunction::Bce => LossKind::Bce,
                LossFunction::CrossEntropy => LossKind::CrossEntropy,
            },
            delta: loss.delta.map(|delta| delta as f32),
            correlation: loss
                .correlation
                .as_ref()
                .map(|term| CorrelationSpec { weight: term.weight as f32, target: term.target as f32 }),
        },
        optimizer: match optimizer.kind {
            OptimizerKind::AdamW => {
                OptimizerSpec::AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: decay.unwrap_or(0.01) }
            }
            OptimizerKind::Sgd => OptimizerSpec::Sgd {
                momentum: optimizer.momentum.unwrap_or_default() as f32,
                nesterov: false,
                weight_decay: decay.unwrap_or_default(),
            },
        },
        schedule: ScheduleSpec {
            rate: optimizer.rate as f32,
            warmup_steps: optimizer.warmup_steps,
            cosine: (optimizer.schedule == RateSchedule::Cosine)
                .then_some(CosineSpec { total_steps: run.steps, floor: 0.0 }),
        },
        clip_norm: optimizer.clip.map(|clip| clip as f32),
        precision: match run.precision {
            TrainingPrecision::F32 => Precision::F32,
            TrainingPrecision::Bf16 => Precision::Bf16,
            TrainingPrecision::F16 => Precision::F16,
        },
        scaler: None,
        normalization: Normalization::Samples,
        local_updates: run.sync_every as u32,
        compression: run.compression.as_ref().map(|it| GradientCompression {
            kind: match it.kind {
                CompressionKind::Bf16 => GradientEncoding::Bf16,
                CompressionKind::F16 => GradientEncoding::F16,
                CompressionKind::TopK => GradientEncoding::TopK,
                CompressionKind::PowerSgd => GradientEncoding::PowerSgd,
                CompressionKind::OneBitAdam => GradientEncoding::OneBitAdam,
                CompressionKind::Automatic => GradientEncoding::Automatic,
            },
            share: it.share,
            rank: it.rank.map(|rank| rank as usize),
            warmup_steps: it.warmup_steps.or_else(|| default_warmup(it.kind, run.steps)),
            samples: (run.batch * run.accumulate) as usize,
        }),
        privacy: None,
        seed: run.seed,
    }
}

/// A fifth of the steps, with `OneBitAdam`.
fn default_warmup(kind: CompressionKind, steps: u64) -> Option<u64> {
    (kind == CompressionKind::OneBitAdam).then(|| (steps / 5).max(1))
}

fn layer(layer: &ReplayLayer, initializer: Initializer) -> LayerSpec {
    let has_weights = layer.dense.or(layer.feature_bag).or(layer.feature_attention).or(layer.tropical).is_some();
    LayerSpec {
        dense: layer.dense.map(|width| width as usize),
        dropout: layer.dropout.map(|probability| probability as f32),
        layer_norm: layer.layer_norm.as_ref().map(norm),
        residual: layer.residual.as_ref().map(|body| body.iter().map(|it| inner(it, initializer)).collect()),
        feature_bag: layer.feature_bag.map(|width| width as usize),
        feature_attention: layer.feature_attention.map(|width| width as usize),
        tropical: layer.tropical.map(|width| width as usize),
        activation: layer.activation.map(activation),
        inputs: layer.inputs.map(|inputs| inputs as usize),
        heads: layer.heads.map(|heads| heads as usize),
        initializer: has_weights.then_some(initializer),
        ..LayerSpec::default()
    }
}

fn inner(layer: &ResidualLayer, initializer: Initializer) -> LayerSpec {
    LayerSpec {
        dense: layer.dense.map(|width| width as usize),
        dropout: layer.dropout.map(|probability| probability as f32),
        layer_norm: layer.layer_norm.as_ref().map(norm),
        tropical: layer.tropical.map(|width| width as usize),
        activation: layer.activation.map(activation),
        inputs: layer.inputs.map(|inputs| inputs as usize),
        initializer: layer.dense.or(layer.tropical).map(|_| initializer),
        ..LayerSpec::default()
    }
}

fn norm(norm: &engram_api::ReplayLayerNorm) -> LayerNormSpec {
    norm.epsilon.map_or_else(LayerNormSpec::default, |epsilon| LayerNormSpec { epsilon: epsilon as f32 })
}

const fn activation(activation: LayerActivation) -> Activation {
    match activation {
        LayerActivation::Relu => Activation::Relu,
        LayerActivation::Gelu => Activation::Gelu,
        LayerActivation::Tanh => Activation::Tanh,
        LayerActivation::Sigmoid => Activation::Sigmoid,
    }
}
