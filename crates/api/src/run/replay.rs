//! `kind: Replay`: data-parallel training on the workers of a cluster.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{BufferSource, DataFile, SampleExample};
use crate::manifest_enum::words;
use crate::quantity::Duration;
use crate::snapshot::SnapshotLocation;

/// Default steps between two checkpoints.
pub const CHECKPOINT_STEPS: u64 = 1_000;
/// Default number of updates after which predictions use new weights.
pub const SERVE_STEPS: u64 = 10;
/// Default time after which a silent member of the group is removed.
pub const DETECT_AFTER: Duration = Duration::from_millis(2_000);

/// Data-parallel training on the workers: every worker computes its part of each batch, the gradient sums are reduced over all
/// workers, and each step is committed on all of them or on none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReplayRun {
    /// Training data.
    pub source: ReplaySource,

    /// The model.
    pub model: ReplayModel,

    /// How parameters change.
    pub optimizer: ReplayOptimizer,

    /// Samples of the group per reduction, 1 to 1,048,576, split evenly over the workers.
    #[schemars(range(min = 1, max = 1_048_576), example = &256)]
    pub batch: u64,

    /// Steps until the run is complete, 1 to 1,000,000,000. A step is one reduction over the workers: `syncEvery` updates of `accumulate` batches.
    #[schemars(range(min = 1, max = 1_000_000_000), example = &1000)]
    pub steps: u64,

    /// Batches whose gradients are added before one update, 1 to 1,024.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 1_024))]
    pub accumulate: u64,

    /// How gradient sums are reduced over the workers.
    #[serde(default)]
    pub sync: ReplaySync,

    /// Updates that each worker makes alone before the workers average parameters and optimizer state by their samples, 1 to 1,024. With 1 gradients
    /// are reduced at every update.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 1_024))]
    pub sync_every: u64,

    /// Compression of gradient sums between workers; absent means none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<ReplayCompression>,

    /// Sizes of the workers' parts of a batch by their measured speed; absent means equal parts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balance: Option<ReplayBalance>,

    /// Order in which gradients are added.
    #[serde(default)]
    pub order: SumOrder,

    /// Type of stored activations and of gradients between layers. Parameters and sums are always 32 bits.
    #[serde(default)]
    pub precision: TrainingPrecision,

    /// Seed of sampling and dropout.
    #[serde(default = "default_seed")]
    pub seed: u64,

    /// Independent models that are trained together, 1 to 16. Each has its own initial parameters, dropout and batches, which follow from `seed` and
    /// its number; predictions are the mean over all, with their standard deviation.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 16))]
    pub ensemble: u64,

    /// Pipelines: logical devices that share a worker's part of a batch, or workers that share the layers of the model; absent means none.
    /// Results have the same bits with the same `microBatches`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parallelism: Option<ReplayParallelism>,

    /// Differential privacy of the samples; absent means none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub privacy: Option<ReplayPrivacy>,

    /// Layers whose parameters keep their values, such as `layers.0` for the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64), inner(length(min = 1, max = 64)), extend("uniqueItems" = true))]
    pub freeze: Option<Vec<String>>,

    /// Checkpoints.
    #[serde(default)]
    pub checkpoint: ReplayCheckpoint,

    /// Updates after which predictions use new weights, 1 to 1,000,000.
    #[serde(default = "default_serve")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub serve_every: u64,

    /// Number of workers below which the run pauses, 1 to 1,000.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 1_000))]
    pub min_workers: u64,

    /// TCP connections between each two workers, 1 to 8: one does not fill a link above 10 Gbit/s.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 8))]
    pub streams: u64,

    /// Whether workers of one host exchange gradients through shared memory; otherwise over TCP, as workers of different hosts do.
    #[serde(default = "shared_memory")]
    pub shared_memory: bool,

    /// Time after which a worker that sends nothing leaves the group, 100ms to 60s. A worker whose process died leaves at once.
    #[serde(default = "default_detection")]
    #[schemars(extend("x-minimum" = "100ms", "x-maximum" = "60s"))]
    pub detect_after: Duration,
}

fn one() -> u64 {
    1
}

fn default_seed() -> u64 {
    42
}

fn default_serve() -> u64 {
    SERVE_STEPS
}

fn shared_memory() -> bool {
    true
}

fn default_detection() -> Duration {
    DETECT_AFTER
}

/// Training data: exactly one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum ReplaySource {
    /// Generated scores of random feature subsets, as a search over feature sets would produce them. Fields: `mask` and `score`.
    Synthetic(FeatureSubsets),
    /// Items of a replay buffer.
    Buffer(BufferSource),
    /// A built-in data set. Fields of `Digits`: `pixels`, 64 numbers, and `digit`, a class from 0 to 9.
    Example(SampleExample),
    /// A table with a header line and a number in every cell. Fields: `features`, all columns but the target, and the column that `loss.target` names.
    Csv(ReplayTable),
}

/// A table of samples, one per line. Features are shifted and scaled to mean 0 and variance 1 of the samples that are trained on; a tenth of the
/// samples is held out to measure the result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReplayTable {
    /// The file, of at most 3 MiB.
    #[schemars(example = serde_json::json!({ "path": "samples.csv" }))]
    pub file: DataFile,
}

impl ReplaySource {
    /// Returns the file, if the samples are in one.
    pub const fn csv_file(&self) -> Option<&DataFile> {
        match self {
            Self::Csv(table) => Some(&table.file),
            _ => None,
        }
    }

    /// See [`Self::csv_file`].
    pub const fn csv_file_mut(&mut self) -> Option<&mut DataFile> {
        match self {
            Self::Csv(table) => Some(&mut table.file),
            _ => None,
        }
    }
}

/// Generated scores of random feature subsets: a third of the features is informative, a third redundant, a third noise. The score is the share of
/// the target's variance that a subset explains, between 0 and 1, less a penalty for features that are noise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct FeatureSubsets {
    /// Number of features, 30 to 100,000.
    #[schemars(range(min = 30, max = 100_000))]
    pub features: u64,
    /// Number of subsets, 10 to 10,000,000. A tenth of them is held out to measure the result.
    #[schemars(range(min = 10, max = 10_000_000))]
    pub samples: u64,
    /// Fewest features of a subset, at least 1.
    #[schemars(range(min = 1, max = 100_000))]
    pub smallest: u64,
    /// Most features of a subset, at most `features`.
    #[schemars(range(min = 1, max = 100_000))]
    pub largest: u64,
    /// Standard deviation of noise added to each score, 0 to 1.
    #[schemars(range(min = 0, max = 1))]
    pub noise: f64,
    /// Seed of the data.
    pub seed: u64,
}

impl Default for FeatureSubsets {
    fn default() -> Self {
        Self { features: 500, samples: 10_000, smallest: 10, largest: 100, noise: 0.01, seed: 42 }
    }
}

/// A model: inputs, layers, loss and initial parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReplayModel {
    /// Inputs: one field of the source.
    #[schemars(length(min = 1, max = 1), example = serde_json::json!([{ "field": "mask", "dim": 500 }]))]
    pub inputs: Vec<ReplayInput>,

    /// Layers from input to output, 1 to 256.
    #[schemars(length(min = 1, max = 256), example = serde_json::json!([{ "dense": 64, "activation": "Relu" }, { "dense": 1 }]))]
    pub layers: Vec<ReplayLayer>,

    /// The loss.
    #[schemars(example = serde_json::json!({ "kind": "Mse", "target": "score" }))]
    pub loss: ReplayLoss,

    /// Initial parameters.
    #[serde(default)]
    pub init: ReplayInit,
}

/// An input of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReplayInput {
    /// Field of the source.
    #[schemars(length(min = 1, max = 64), example = &"mask")]
    pub field: String,
    /// Values per sample, or number of features where the first layer is `featureBag` or `featureAttention`; 1 to 1,048,576.
    #[schemars(range(min = 1, max = 1_048_576), example = &500)]
    pub dim: u64,
}

/// A layer: one of dense, dropout, layerNorm, residual, featureBag, featureAttention and tropical, or an activation alone.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReplayLayer {
    /// Fully connected layer with this many outputs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub dense: Option<u64>,
    /// Dropout with this probability, 0 to below 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1))]
    pub dropout: Option<f64>,
    /// Layer normalization over the values of a sample.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_norm: Option<ReplayLayerNorm>,
    /// Residual block: its input plus the output of these layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64))]
    pub residual: Option<Vec<ResidualLayer>>,
    /// Sum of embeddings of this width over the features of a sample. First layer only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub feature_bag: Option<u64>,
    /// Attention over embeddings of this width of the features of a sample. First layer only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65_536))]
    pub feature_attention: Option<u64>,
    /// Heads of `featureAttention`, a divisor of its width; absent means 8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_024))]
    pub heads: Option<u64>,
    /// Max-plus layer with this many outputs: `y[j] = max(max over i of (x[i] + weight[i][j]), bias[j])`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub tropical: Option<u64>,
    /// Activation: alone, or of the outputs of `dense`, `tropical`, `featureBag` and `featureAttention`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activation: Option<LayerActivation>,
    /// Number of inputs, which must be that of the layer below; absent means it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub inputs: Option<u64>,
}

/// A layer of a residual block: one of dense, dropout, layerNorm and tropical, or an activation alone.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ResidualLayer {
    /// Fully connected layer with this many outputs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub dense: Option<u64>,
    /// Dropout with this probability, 0 to below 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1))]
    pub dropout: Option<f64>,
    /// Layer normalization over the values of a sample.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_norm: Option<ReplayLayerNorm>,
    /// Max-plus layer with this many outputs: `y[j] = max(max over i of (x[i] + weight[i][j]), bias[j])`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub tropical: Option<u64>,
    /// Activation: alone, or of the outputs of `dense` and `tropical`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activation: Option<LayerActivation>,
    /// Number of inputs, which must be that of the layer below; absent means it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub inputs: Option<u64>,
}

/// Options of layer normalization.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReplayLayerNorm {
    /// Added to the variance, above 0; absent means 1e-5.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 1), extend("exclusiveMinimum" = 0))]
    pub epsilon: Option<f64>,
}

words! {
    /// An element-wise function.
    pub enum LayerActivation {
        /// The larger of 0 and x.
        Relu,
        /// x times the normal distribution function of x.
        Gelu,
        /// Hyperbolic tangent.
        Tanh,
        /// 1 / (1 + exp(-x)).
        Sigmoid,
    }
}

/// What is minimized.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReplayLoss {
    /// The loss of a sample.
    #[schemars(example = &"Mse")]
    pub kind: LossFunction,
    /// Field of the source that is predicted.
    #[schemars(length(min = 1, max = 64), example = &"score")]
    pub target: String,
    /// With `Huber`: error from which the loss is linear, above 0; absent means 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub delta: Option<f64>,
    /// With `Mse` and `Huber`: penalty for a low correlation of predictions and targets over the batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub correlation: Option<CorrelationPenalty>,
}

words! {
    /// Loss of a sample.
    pub enum LossFunction {
        /// Squared error.
        Mse,
        /// Squared error for small errors, absolute error for large ones.
        Huber,
        /// Binary cross-entropy of a logit.
        Bce,
        /// Cross-entropy of one logit per class; the target is a class from 0 on.
        CrossEntropy,
    }
}

/// The penalty `weight * max(0, target - correlation)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CorrelationPenalty {
    /// Factor of the penalty, at least 0.
    #[schemars(range(min = 0), example = &0.1)]
    pub weight: f64,
    /// Correlation without a penalty, -1 to 1.
    #[schemars(range(min = -1, max = 1), example = &0.9)]
    pub target: f64,
}

/// Initial parameters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ReplayInit {
    /// Distribution of weights; biases start at 0.
    pub scheme: InitScheme,
    /// A finished Replay run of the cluster whose parameters of the same names and shapes are taken over (warm start).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "engram-name"))]
    pub run: Option<String>,
}

words! {
    /// Distribution of initial weights.
    #[derive(Default)]
    pub enum InitScheme {
        /// Uniform within sqrt(6 / (inputs + outputs)).
        #[default]
        GlorotUniform,
        /// Uniform within sqrt(6 / inputs).
        HeUniform,
    }
}

/// How parameters change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReplayOptimizer {
    /// The optimizer.
    #[serde(default)]
    pub kind: OptimizerKind,
    /// Learning rate, above 0.
    #[schemars(extend("exclusiveMinimum" = 0), example = &0.001)]
    pub rate: f64,
    /// Weight decay, at least 0; absent means 0.01 with AdamW and 0 with Sgd.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub weight_decay: Option<f64>,
    /// With `Sgd`: momentum, 0 to below 1; absent means 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1))]
    pub momentum: Option<f64>,
    /// Largest norm of the mean gradient, above 0; absent means no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub clip: Option<f64>,
    /// Steps over which the learning rate rises to `rate`.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub warmup_steps: u64,
    /// Course of the learning rate after that.
    #[serde(default)]
    pub schedule: RateSchedule,
}

words! {
    /// An optimizer.
    #[derive(Default)]
    pub enum OptimizerKind {
        /// Adam with decoupled weight decay.
        #[default]
        AdamW,
        /// Stochastic gradient descent.
        Sgd,
    }
}

words! {
    /// Course of the learning rate.
    #[derive(Default)]
    pub enum RateSchedule {
        /// The same rate until the end.
        #[default]
        Constant,
        /// Cosine decay to 0 at the last step.
        Cosine,
    }
}

words! {
    /// Order in which gradients are added.
    #[derive(Default)]
    pub enum SumOrder {
        /// By rank: the same bits for the same workers.
        #[default]
        Rank,
        /// Along a fixed tree of 64 leaves: the same bits for any number of workers, and after any failure.
        PartitionInvariant,
        /// By the fastest algorithm, also one that does not add by rank: all workers have the same bits, another execution can have others.
        Fast,
    }
}

words! {
    /// How gradient sums are reduced.
    #[derive(Default)]
    pub enum ReplaySync {
        /// Every worker adds a part of the sums; the algorithm follows from size and number of workers.
        #[default]
        AllReduce,
        /// The first worker of the group receives all sums, adds them by rank and sends the result to all.
        ParameterServer,
    }
}

/// Compression of gradient sums. What is lost in a step is added to the next one and is part of checkpoints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReplayCompression {
    /// The encoding.
    #[schemars(example = &"Bf16")]
    pub kind: CompressionKind,
    /// With `TopK`: share of the values that is sent, above 0, at most 1; absent means 0.01.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 1), extend("exclusiveMinimum" = 0))]
    pub share: Option<f64>,
    /// With `PowerSgd` and `Automatic`: rank of the approximation of each matrix, 1 to 64; absent means 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64))]
    pub rank: Option<u64>,
    /// With `OneBitAdam`: updates with whole gradients before, at least 1 and fewer than the run has; absent means a fifth of `steps`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub warmup_steps: Option<u64>,
}

words! {
    /// Encoding of gradient sums.
    pub enum CompressionKind {
        /// 16 bits with the range of 32.
        Bf16,
        /// 16 bits, of the mean over the batch.
        F16,
        /// The largest values by magnitude.
        TopK,
        /// Matrices as products of two thin matrices, in two sums.
        PowerSgd,
        /// After a warm-up one bit per parameter of the means of gradients that AdamW keeps, whose means of squares stay as they are.
        OneBitAdam,
        /// None, `Bf16` or `PowerSgd`, one level at a time by the share of the time of steps in which reductions are exposed.
        Automatic,
    }
}

/// Sizes of the workers' parts of a batch by their measured speed. Every sample keeps the same weight.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ReplayBalance {
    /// Steps between two adjustments, 1 to 1,000,000.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub every: u64,
    /// Largest part divided by the smallest, 1 to 100.
    #[schemars(range(min = 1, max = 100))]
    pub max_ratio: f64,
}

impl Default for ReplayBalance {
    fn default() -> Self {
        Self { every: 100, max_ratio: 2.0 }
    }
}

/// Pipelines of stages. A stage is a thread, or a worker, with some of the operations of the model, cut by measured time; micro-batches move
/// through the stages, one forward, one backward.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ReplayParallelism {
    /// Pipelines of each worker, or of the workers, 1 to 16. Each computes a part of the micro-batches, or of the batch.
    #[schemars(range(min = 1, max = 16))]
    pub data: u64,
    /// Stages of each pipeline, 1 to 16, at most the layers of the model.
    #[schemars(range(min = 1, max = 16))]
    pub pipeline: u64,
    /// Parts of each batch of a worker, or of a pipeline of workers, a power of two from 1 to 256; absent means 4, and 64 for the whole batch with `order: PartitionInvariant`, which
    /// allows no other number.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 256))]
    pub micro_batches: Option<u64>,
    /// Whether each worker has all pipelines, or the workers are the stages of pipelines.
    pub over: PipelineDevices,
}

words! {
    /// What the stages of pipelines are.
    #[derive(Default)]
    pub enum PipelineDevices {
        /// Threads of each worker.
        #[default]
        Devices,
        /// Workers: `data` times `pipeline` of them. The stages of a lost worker are moved to the others of its pipeline.
        Workers,
    }
}

impl Default for ReplayParallelism {
    fn default() -> Self {
        Self { data: 1, pipeline: 1, micro_batches: None, over: PipelineDevices::Devices }
    }
}

/// Differential privacy of samples (DP-SGD): a step uses each sample independently with probability `batch` * `accumulate` / samples, clips the gradient of
/// each, and adds noise once to the sum over all workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReplayPrivacy {
    /// Budget, above 0. A run whose `steps` would exceed it does not start.
    #[schemars(extend("exclusiveMinimum" = 0), example = &8.0)]
    pub epsilon: f64,
    /// Probability with which epsilon may be exceeded, above 0 and below 1 / training samples.
    #[schemars(extend("exclusiveMinimum" = 0), range(max = 1), example = &0.00001)]
    pub delta: f64,
    /// Standard deviation of the noise over `clip`, 0.1 to 64.
    #[schemars(range(min = 0, max = 64), example = &1.0)]
    pub noise_multiplier: f64,
    /// Euclidean norm to which the gradient of a sample is clipped, above 0.
    #[schemars(extend("exclusiveMinimum" = 0), example = &1.0)]
    pub clip: f64,
}

words! {
    /// Type of stored activations.
    #[derive(Default)]
    pub enum TrainingPrecision {
        /// 32 bits.
        #[default]
        F32,
        /// 16 bits with the range of 32.
        Bf16,
        /// 16 bits with loss scaling.
        F16,
    }
}

/// Checkpoints: written to the disk of every worker of the group, without stopping the training.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ReplayCheckpoint {
    /// Steps between two checkpoints, 1 to 1,000,000,000. One is always written at the end.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub every: u64,
    /// Number of checkpoints kept on each worker, 1 to 100.
    #[schemars(range(min = 1, max = 100))]
    pub keep: u64,
    /// Object storage or a volume to which the first worker of the group copies each checkpoint. A run that starts without a checkpoint on the
    /// workers continues with the newest one there, also on another cluster. Workers use the credentials of their environment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub location: Option<SnapshotLocation>,
}

impl Default for ReplayCheckpoint {
    fn default() -> Self {
        Self { every: CHECKPOINT_STEPS, keep: 2, location: None }
    }
}
