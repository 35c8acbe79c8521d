//! Runs of kind `Geodesic`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::DataFile;
use crate::manifest_enum::words;

/// Leave-one-out validation of the geodesic spectral model: for each concentration a model is trained on the spectra at the others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GeodesicRun {
    /// Source of the spectra.
    pub source: SpectraSource,

    /// Random starts per held-out concentration, 1 to 32. Their mean is the prediction, their spread its uncertainty.
    #[serde(default = "default_starts")]
    #[schemars(range(min = 1, max = 32))]
    pub starts: u32,

    /// Also trains a model per start on all spectra, the held-out ones included. Its scores are reported next to the clean ones,
    /// labelled as leaking.
    #[serde(default)]
    pub leaking_variant: bool,

    /// Also trains models without two spectra, which calibrate a 90 % band around each prediction: 9 models for 6 concentrations.
    /// Requires at least 5 concentrations.
    #[serde(default)]
    pub calibrated_bands: bool,

    /// Trains on the GPUs of the workers: up to three starts of a fold are one task. With and without a GPU, results agree to rounding
    /// instead of bit for bit. Models with `decoder: Flow` are trained on the CPU.
    #[serde(default)]
    pub use_gpus: bool,

    /// Solves the geodesics of the predictions of held-out spectra. Training and estimates of concentrations use the closed form. The report
    /// compares all engines. Only `ClosedForm` with `decoder: Flow`.
    #[serde(default)]
    pub engine: SpectraEngine,

    /// Settings of the training.
    #[serde(default)]
    pub training: SpectraTraining,
}

const fn default_starts() -> u32 {
    2
}

/// Source of absorbance spectra: exactly one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum SpectraSource {
    /// Generated spectra at 0, 10, 20, 30, 40 and 60 ppb, from 200 to 800 nm.
    Synthetic(SyntheticSpectra),
    /// A CSV file. The first line holds a label and the wavelengths in nm, each further line a concentration in ppb and the absorbances.
    /// A line that starts with a question mark, with or without a name after it, is a sample whose concentration is estimated.
    Csv(DataFile),
}

/// Generated spectra. A value depends on the seed and its position only.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct SyntheticSpectra {
    /// Generator.
    pub name: SpectraName,
    /// Number of wavelengths, evenly spaced, 61 to 601.
    #[schemars(range(min = 61, max = 601))]
    pub wavelengths: u32,
    /// Standard deviation of additive noise, 0 to 1.
    #[schemars(range(min = 0, max = 1))]
    pub noise: f64,
    /// Standard deviation of the gain of a spectrum, 0 to 1.
    #[schemars(range(min = 0, max = 1))]
    pub gain: f64,
    /// Standard deviation of the offset of a spectrum, 0 to 1.
    #[schemars(range(min = 0, max = 1))]
    pub offset: f64,
    /// Standard deviation of the slope of a spectrum's baseline over the whole range, 0 to 1.
    #[schemars(range(min = 0, max = 1))]
    pub slope: f64,
    /// Largest shift of a spectrum's wavelengths in nm, 0 to 10.
    #[schemars(range(min = 0, max = 10))]
    pub shift_nm: f64,
    /// Relative standard deviation of a concentration from its label, 0 to 1.
    #[schemars(range(min = 0, max = 1))]
    pub concentration: f64,
    /// Seed of the noise.
    pub seed: u64,
}

impl Default for SyntheticSpectra {
    fn default() -> Self {
        Self {
            name: SpectraName::S4,
            wavelengths: 601,
            noise: 0.005,
            gain: 0.0,
            offset: 0.0,
            slope: 0.0,
            shift_nm: 0.0,
            concentration: 0.0,
            seed: 42,
        }
    }
}

words! {
    /// Generator of spectra.
    pub enum SpectraName {
        /// Linear in concentration.
        S1,
        /// Not monotone, with a kink; flat at 0 and 60 ppb.
        S2,
        /// Monotone and separable.
        S3,
        /// Shifting peak, hump, convex band and short-wave edge.
        S4,
    }
}

words! {
    /// What solves a geodesic.
    #[derive(Default)]
    pub enum SpectraEngine {
        /// Quadrature of the conserved quantity, exact in one dimension.
        #[default]
        ClosedForm,
        /// Shooting with a step size per problem and Newton's method. Hundreds of times slower.
        BatchedShooting,
        /// Shooting over Christoffel symbols on a grid, which is built for each prediction.
        ChristoffelGrid,
    }
}

words! {
    /// What turns a path into a difference of absorbances.
    pub enum SpectraDecoder {
        /// The mean slope along the path from its features, times its length.
        Slope,
        /// The integral over time of a flow of concentration, velocity and wavelength along the path. A step costs about 10 times as much.
        Flow,
    }
}

/// Training of one (metric, decoder) pair. Early stopping uses an inner split of the training spectra, never the held-out one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct SpectraTraining {
    /// What predicts from a path.
    pub decoder: SpectraDecoder,
    /// Maximum number of optimizer steps, 1 to 1,000,000.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub steps: u64,
    /// Steps between evaluations of the inner validation split, 1 to 1,000,000.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub evaluate_every: u64,
    /// Evaluations without a lower validation loss before training stops, 1 to 1,000,000.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub patience: u32,
    /// Wavelengths per step, as one of how many, 1 to 1,000. Higher makes steps cheaper and noisier.
    #[schemars(range(min = 1, max = 1_000))]
    pub stride: u32,
    /// Wavelengths of the inner validation split, as one of how many, 2 to 1,000.
    #[schemars(range(min = 2, max = 1_000))]
    pub validation_stride: u32,
    /// Quadrature nodes between two concentrations, 1 to 64.
    #[schemars(range(min = 1, max = 64))]
    pub nodes: u32,
    /// Learning rate of the metric, above 0 and at most 1.
    #[schemars(range(max = 1), extend("exclusiveMinimum" = 0))]
    pub metric_rate: f64,
    /// Learning rate of the decoder, above 0 and at most 1.
    #[schemars(range(max = 1), extend("exclusiveMinimum" = 0))]
    pub decoder_rate: f64,
    /// Largest norm of a gradient, above 0 and at most 1,000,000.
    #[schemars(range(max = 1_000_000), extend("exclusiveMinimum" = 0))]
    pub clip: f64,
    /// Decoupled weight decay of the decoder, 0 to 1.
    #[schemars(range(min = 0, max = 1))]
    pub weight_decay: f64,
    /// Weight of the metric's curvature in the loss, 0 to 1,000.
    #[schemars(range(min = 0, max = 1_000))]
    pub smoothness: f64,
    /// Weight of the metric's distance from 0.01 to 100 in the loss, 0 to 1,000.
    #[schemars(range(min = 0, max = 1_000))]
    pub range: f64,
    /// Weight of the mean path length in the loss, 0 to 1,000.
    #[schemars(range(min = 0, max = 1_000))]
    pub length: f64,
    /// Seed of all starts.
    pub seed: u64,
}

impl Default for SpectraTraining {
    fn default() -> Self {
        Self {
            decoder: SpectraDecoder::Slope,
            steps: 1_200,
            evaluate_every: 50,
            patience: 8,
            stride: 8,
            validation_stride: 10,
            nodes: 8,
            metric_rate: 0.002,
            decoder_rate: 0.004,
            clip: 1.0,
            weight_decay: 0.000_01,
            smoothness: 0.01,
            range: 0.001,
            length: 0.001,
            seed: 0,
        }
    }
}
