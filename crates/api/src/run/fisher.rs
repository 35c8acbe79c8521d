//! Runs of kind `Fisher`: the Fisher information of a classifier over the workers of a cluster.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Samples;
use crate::manifest_enum::words;

/// Trains a classifier, computes its Fisher matrix and spectrum, and compares natural-gradient training with SGD.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct FisherRun {
    /// Labelled samples; absent means the built-in digits.
    pub data: Samples,

    /// Width of the hidden layer; 0 means none, which is softmax regression. The model may have at most 1,773 parameters, so that
    /// the matrix fits into one message.
    #[schemars(range(min = 0, max = 256))]
    pub hidden: u32,

    /// Which labels the Fisher matrix is the expectation over.
    pub form: FisherForm,

    /// Passes over the training samples.
    #[schemars(range(min = 1, max = 10_000))]
    pub epochs: u32,

    /// Damping d of the natural gradient `(F + d I)^-1 g` and of the effective dimension. 0 is an error where the Fisher matrix is
    /// singular. Higher values make natural gradients more like plain ones.
    #[schemars(range(min = 0, max = 1_000))]
    pub damping: f64,

    /// Steps of each training curve.
    #[schemars(range(min = 1, max = 10_000))]
    pub steps: u32,

    /// Samples per step of the training curves.
    #[schemars(range(min = 1, max = 1_024))]
    pub batch: u32,

    /// Step sizes to try for natural gradients; the best on the validation samples is shown.
    #[schemars(length(min = 1, max = 8), inner(range(min = 0.000_001, max = 100)))]
    pub natural_rates: Vec<f64>,

    /// Step sizes to try for SGD; the best on the validation samples is shown.
    #[schemars(length(min = 1, max = 8), inner(range(min = 0.000_001, max = 100)))]
    pub sgd_rates: Vec<f64>,

    /// Fraction of the samples that are only used for the reported accuracy, 0.05 to 0.5.
    #[schemars(range(min = 0.05, max = 0.5))]
    pub test: f64,

    /// Seed of split, initial weights, order of samples and drawn labels.
    pub seed: u64,
}

impl Default for FisherRun {
    fn default() -> Self {
        Self {
            data: Samples::default(),
            hidden: 0,
            form: FisherForm::default(),
            epochs: 60,
            damping: 0.01,
            steps: 60,
            batch: 128,
            natural_rates: vec![0.03, 0.1, 0.3],
            sgd_rates: vec![0.3, 1.0, 3.0, 10.0],
            test: 0.25,
            seed: 42,
        }
    }
}

words! {
    /// Which labels the Fisher matrix is the expectation over.
    #[derive(Default)]
    pub enum FisherForm {
        /// Labels drawn from the model: the Fisher information proper.
        #[default]
        Model,
        /// The observed labels.
        Empirical,
    }
}
