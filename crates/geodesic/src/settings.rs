//! Settings of the training of one (metric, decoder) pair.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use crate::error::{Error, in_range};

/// What turns a path into a difference of absorbances.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Decoder {
    /// The mean slope along the path from its features, 5 inputs, times its length.
    #[default]
    Slope,
    /// The integral over time of a flow of (c, velocity, l) along the path.
    Flow,
}

/// What solves the geodesics of a prediction. Training uses the closed form, whose gradients are exact and cheap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Engine {
    /// [`Closed1D`](crate::Closed1D).
    #[default]
    ClosedForm,
    /// [`ShootingEngine`](crate::ShootingEngine).
    BatchedShooting,
    /// [`GridEngine`](crate::GridEngine).
    ChristoffelGrid,
}

/// How a pair is trained.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub struct Settings {
    /// Seed of all starts.
    pub seed: u64,
    /// What predicts from a path. Default [`Decoder::Slope`]; a step of [`Decoder::Flow`] costs about 10 times as much.
    pub decoder: Decoder,
    /// What solves the geodesics of predictions, of [`Decoder::Slope`] only. Default [`Engine::ClosedForm`].
    pub engine: Engine,
    /// Quadrature nodes per interval, 1 to 64. Default 8.
    pub nodes: usize,
    /// Most optimizer steps, 1 to 1,000,000. Default 1,200.
    pub steps: u64,
    /// One of how many wavelengths a step uses, 1 to 1,000; the others come in later steps. Default 8.
    pub stride: usize,
    /// One of how many wavelengths belongs to the inner validation split, 2 to 1,000. Default 10.
    pub validation_stride: usize,
    /// Steps between evaluations of the inner validation split, at least 1. Default 50.
    pub evaluate_every: u64,
    /// Evaluations without a better validation loss before training stops, at least 1. Default 8.
    pub patience: u32,
    /// Learning rate of the metric, in (0, 1]. Default 2e-3.
    pub metric_rate: f64,
    /// Learning rate of the decoder, in (0, 1]. Default 4e-3.
    pub decoder_rate: f64,
    /// Largest norm of a gradient, positive. Default 1.
    pub clip: f64,
    /// Decoupled weight decay of the decoder, in [0, 1]. Default 1e-5.
    pub weight_decay: f64,
    /// Weight of the mean of (d2g/dc2)^2, in [0, 1000]. Default 0.01.
    pub smoothness: f64,
    /// Weight of the squared distance of g from [0.01, 100], in [0, 1000]. Default 0.001.
    pub range: f64,
    /// Weight of the mean path length, in [0, 1000]. Default 0.001.
    pub length: f64,
}

impl Engine {
    /// Name of the setting.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ClosedForm => "ClosedForm",
            Self::BatchedShooting => "BatchedShooting",
            Self::ChristoffelGrid => "ChristoffelGrid",
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            seed: 0,
            decoder: Decoder::Slope,
            engine: Engine::ClosedForm,
            nodes: 8,
            steps: 1_200,
            stride: 8,
            validation_stride: 10,
            evaluate_every: 50,
            patience: 8,
            metric_rate: 2e-3,
            decoder_rate: 4e-3,
            clip: 1.0,
            weight_decay: 1e-5,
            smoothness: 0.01,
            range: 0.001,
            length: 0.001,
        }
    }
}

impl Settings {
    /// Refuses values out of range.
    ///
    /// # Errors
    /// [`Error::Range`] with the name of the field; [`Error::Unsupported`] for a flow with another engine than the closed form.
    pub fn check(&self) -> Result<(), Error> {
        if self.decoder == Decoder::Flow && self.engine != Engine::ClosedForm {
            return Err(Error::Unsupported { engine: self.engine.name(), operation: "decoder Flow" });
        }
        in_range("nodes", self.nodes as f64, 1.0, 64.0, "1 to 64")?;
        in_range("steps", self.steps as f64, 1.0, 1e6, "1 to 1,000,000")?;
        in_range("stride", self.stride as f64, 1.0, 1e3, "1 to 1,000")?;
        in_range("validationStride", self.validation_stride as f64, 2.0, 1e3, "2 to 1,000")?;
        in_range("evaluateEvery", self.evaluate_every as f64, 1.0, 1e6, "1 to 1,000,000")?;
        in_range("patience", f64::from(self.patience), 1.0, 1e6, "1 to 1,000,000")?;
        in_range("metricRate", self.metric_rate, f64::MIN_POSITIVE, 1.0, "in (0, 1]")?;
        in_range("decoderRate", self.decoder_rate, f64::MIN_POSITIVE, 1.0, "in (0, 1]")?;
        in_range("clip", self.clip, f64::MIN_POSITIVE, 1e6, "in (0, 1e6]")?;
        in_range("weightDecay", self.weight_decay, 0.0, 1.0, "in [0, 1]")?;
        in_range("smoothness", self.smoothness, 0.0, 1e3, "in [0, 1000]")?;
        in_range("range", self.range, 0.0, 1e3, "in [0, 1000]")?;
        in_range("length", self.length, 0.0, 1e3, "in [0, 1000]")
    }

    /// Hash of all settings: results with different hashes do not belong to one report.
    pub fn hash(&self) -> u128 {
        xxh3_128(serde_json::to_string(self).expect("numbers have a JSON form").as_bytes())
    }
}
