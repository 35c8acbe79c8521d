//! Runs of kind `Tropical`: max-plus algebra over the workers of a cluster.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{DataFile, Samples};
use crate::manifest_enum::words;

/// Max-plus workloads: at least one of `decode`, `classify` and `graph`. A run reads one file, so that `graph` excludes samples from a
/// file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TropicalRun {
    /// Decodes a hidden Markov model: the most probable state sequence, by max-plus products of blocks of the observations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode: Option<Decode>,

    /// Trains a tropical network and a logistic regression on the same samples and compares them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub classify: Option<TropicalClassify>,

    /// Analyses a weighted graph: cycle mean, closure, power.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub graph: Option<Graph>,
}

impl TropicalRun {
    /// Returns the data file, if the run reads one: that of `graph`, else that of `classify`.
    pub fn input_file(&self) -> Option<&DataFile> {
        let graph = self.graph.as_ref().map(|graph| &graph.file);
        graph.or_else(|| self.classify.as_ref()?.data.csv_file())
    }

    /// See [`Self::input_file`].
    pub fn input_file_mut(&mut self) -> Option<&mut DataFile> {
        let graph = self.graph.as_mut().map(|graph| &mut graph.file);
        graph.or_else(|| self.classify.as_mut()?.data.csv_file_mut())
    }
}

/// Decoding of a hidden Markov model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Decode {
    /// Model and observations; absent means generated ones.
    pub source: DecodeSource,
}

/// Model and observations of a decoding: exactly one source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum DecodeSource {
    /// A model and observations in the manifest.
    Model(MarkovModel),
    /// A generated model, and observations drawn from it, so that the true states are known.
    Synthetic(MarkovSynthetic),
}

impl Default for DecodeSource {
    fn default() -> Self {
        Self::Synthetic(MarkovSynthetic::default())
    }
}

/// A hidden Markov model of n states and m symbols, and a sequence of observed symbols.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MarkovModel {
    /// Probabilities of the first state, n values from 0 to 1 that sum to 1.
    #[schemars(length(min = 1, max = 128), inner(range(min = 0, max = 1)))]
    pub prior: Vec<f64>,

    /// Transition probabilities, n rows (from) of n values (to); each row sums to 1.
    #[schemars(length(min = 1, max = 128))]
    pub transition: Vec<Vec<f64>>,

    /// Emission probabilities, n rows (state) of m values (symbol); each row sums to 1.
    #[schemars(length(min = 1, max = 128))]
    pub emission: Vec<Vec<f64>>,

    /// Observed symbols, numbers from 0 to m - 1.
    #[schemars(length(min = 1, max = 100_000))]
    pub observations: Vec<u32>,
}

/// A generated hidden Markov model with sticky states, and a sequence drawn from it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct MarkovSynthetic {
    /// Number of states. The products cost the third power of it.
    #[schemars(range(min = 2, max = 128))]
    pub states: u32,
    /// Number of symbols.
    #[schemars(range(min = 2, max = 1_024))]
    pub symbols: u32,
    /// Number of observations.
    #[schemars(range(min = 1, max = 200_000))]
    pub length: u32,
    /// Seed of model and observations.
    pub seed: u64,
}

impl Default for MarkovSynthetic {
    fn default() -> Self {
        Self { states: 24, symbols: 32, length: 20_000, seed: 42 }
    }
}

/// Training of a tropical network, compared with logistic regression on the same samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct TropicalClassify {
    /// Labelled samples; absent means the built-in digits.
    pub data: Samples,
    /// Width of the dense layer below the tropical layer.
    #[schemars(range(min = 1, max = 1_024))]
    pub hidden: u32,
    /// Passes over the training samples.
    #[schemars(range(min = 1, max = 10_000))]
    pub epochs: u32,
    /// Samples per step.
    #[schemars(range(min = 1, max = 4_096))]
    pub batch: u32,
    /// Step sizes to try; the best on the validation samples is used.
    #[schemars(length(min = 1, max = 8), inner(range(min = 0.000_001, max = 10)))]
    pub learning_rates: Vec<f64>,
    /// Random starts per step size.
    #[schemars(range(min = 1, max = 64))]
    pub starts: u32,
    /// Temperature of the smooth maximum in the first step; it falls to the exact maximum over the first half of the epochs. 0
    /// uses the exact maximum throughout.
    #[schemars(range(min = 0, max = 100))]
    pub temperature: f64,
    /// Fraction of the samples that are only used for the reported accuracy, 0.05 to 0.5.
    #[schemars(range(min = 0.05, max = 0.5))]
    pub test: f64,
    /// Seed of split, initial weights and order of samples.
    pub seed: u64,
}

impl Default for TropicalClassify {
    fn default() -> Self {
        Self {
            data: Samples::default(),
            hidden: 64,
            epochs: 60,
            batch: 32,
            learning_rates: vec![0.003, 0.01],
            starts: 2,
            temperature: 1.0,
            test: 0.25,
            seed: 42,
        }
    }
}

/// A weighted graph as a square CSV matrix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Graph {
    /// A CSV file without a header: row i, column j is the weight of the edge from i to j; `-inf` (with `MinPlus` `inf`) or an empty
    /// cell is a missing edge. At most 512 nodes, weights of at most 1e30.
    #[schemars(example = serde_json::json!({ "path": "graph.csv" }))]
    pub file: DataFile,

    /// Whether walks are maximized or minimized.
    #[serde(default)]
    pub semiring: GraphSemiring,

    /// Number of edges of the walks of the reported matrix power; absent means the closure over walks of any length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub power: Option<u32>,
}

words! {
    /// Whether walks are maximized or minimized.
    #[derive(Default)]
    pub enum GraphSemiring {
        /// Heaviest walks.
        #[default]
        MaxPlus,
        /// Lightest walks, that is shortest paths.
        MinPlus,
    }
}
