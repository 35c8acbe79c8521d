//! `kind: Federated`: training over clients outside the cluster, which keep their data.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::manifest_enum::words;
use crate::quantity::Duration;

/// Default time within which a client trains and uploads.
const LEASE: Duration = Duration::from_millis(60_000);
/// Default time within which a round ends.
const ROUND_DEADLINE: Duration = Duration::from_millis(60_000);

/// Training over clients outside the cluster: a client downloads the model, trains on its own data and uploads the change of the parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FederatedRun {
    /// The model.
    pub model: FederatedModel,

    /// How updates become the next model.
    #[serde(default)]
    pub strategy: FederatedStrategy,

    /// Aggregations until the run is complete, 1 to 100,000.
    #[schemars(range(min = 1, max = 100_000), example = &20)]
    pub rounds: u64,

    /// The clients of a round.
    pub clients: FederatedClients,

    /// How clients receive the model.
    #[serde(default)]
    pub model_encoding: FederatedEncoding,

    /// Time after which a round ends with the updates that it has, 1s to 168h. `FedBuff` uses it with `secureAggregation` only, for a cohort.
    #[serde(default = "default_deadline")]
    #[schemars(extend("x-minimum" = "1s", "x-maximum" = "168h"))]
    pub deadline: Duration,

    /// Time within which a client trains and uploads, 1s to 168h; no longer than the rest of the round.
    #[serde(default = "default_lease")]
    #[schemars(extend("x-minimum" = "1s", "x-maximum" = "168h"))]
    pub lease: Duration,

    /// Differential privacy of the clients; absent means none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub privacy: Option<FederatedPrivacy>,

    /// Secure aggregation: the workers see the sum of the updates of a round, or of a cohort with `FedBuff`, no single update. Absent means off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secure_aggregation: Option<SecureAggregation>,

    /// Settings that clients receive with each task, by name: learning rate, local epochs, ...
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(example = serde_json::json!({ "learningRate": 0.1 }))]
    pub settings: BTreeMap<String, f64>,

    /// Seed of the initial parameters. The choice of clients and the noise have secret seeds.
    #[serde(default = "default_seed")]
    pub seed: u64,
}

fn default_deadline() -> Duration {
    ROUND_DEADLINE
}

fn default_lease() -> Duration {
    LEASE
}

fn default_seed() -> u64 {
    42
}

/// A model as named layers of 32-bit numbers, at most 268,435,456 in all. More than 4,194,304 shared ones are on the disks of the workers: with
/// `FedAvg`, `FedProx` and `FedBuff`, without `privacy`, `secureAggregation` and `Int8`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FederatedModel {
    /// Layers, in the order in which clients receive them.
    #[schemars(length(min = 1, max = 256), example = serde_json::json!([{ "name": "weights", "shape": [8, 1] }, { "name": "bias", "shape": [1] }]))]
    pub layers: Vec<FederatedLayer>,
}

/// A layer of a federated model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FederatedLayer {
    /// Name, unique in the model.
    #[schemars(length(min = 1, max = 64), example = &"weights")]
    pub name: String,
    /// Dimensions, each at least 1.
    #[schemars(length(min = 1, max = 8), inner(range(min = 1, max = 4_194_304)), example = serde_json::json!([8, 1]))]
    pub shape: Vec<u64>,
    /// Initial parameters.
    #[serde(default)]
    pub init: FederatedInit,
    /// Stays on the client and is never uploaded (personalised layer).
    #[serde(default)]
    pub local: bool,
}

words! {
    /// Initial parameters of a layer.
    #[derive(Default)]
    pub enum FederatedInit {
        /// Zeros.
        #[default]
        Zeros,
        /// Uniform within sqrt(6 / (inputs + outputs)): the last dimension is that of the outputs.
        GlorotUniform,
    }
}

words! {
    /// Encoding of a model that clients download. Updates are always 32-bit numbers.
    #[derive(Default)]
    pub enum FederatedEncoding {
        /// 32-bit floating-point numbers.
        #[default]
        Float32,
        /// 8-bit integers with one scale per 256 parameters: about a quarter of the bytes. Clients train from the rounded model.
        Int8,
    }
}

/// The rule by which updates are aggregated.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FederatedStrategy {
    /// Name of the rule.
    #[serde(default)]
    pub kind: FederatedStrategyKind,
    /// With `FedProx`: weight of the proximal term of the clients, above 0; absent means 0.01.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub mu: Option<f64>,
    /// With `FedAdam`, `FedYogi`, `FedAdagrad`, `Scaffold` and `FedBuff`: rate of the server, above 0; absent means 0.1, and 1 with the last two.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub rate: Option<f64>,
    /// With `FedAdam`, `FedYogi` and `FedAdagrad`: decay of the first moment, 0 to below 1; absent means 0.9.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1))]
    pub beta1: Option<f64>,
    /// With `FedAdam` and `FedYogi`: decay of the second moment, 0 to below 1; absent means 0.99.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1))]
    pub beta2: Option<f64>,
    /// With `FedAdam`, `FedYogi` and `FedAdagrad`: added to the root of the second moment, above 0; absent means 0.001.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub tau: Option<f64>,
    /// With `TrimmedMean`: share that is cut on each side, 0 to below 0.5; absent means 0.1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1))]
    pub trim: Option<f64>,
    /// With `Krum`: hostile clients that are tolerated; absent means 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100_000))]
    pub byzantine: Option<u64>,
    /// With `Krum`: updates that are kept; absent means 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100_000))]
    pub keep: Option<u64>,
}

words! {
    /// Name of an aggregation rule.
    #[derive(Default)]
    pub enum FederatedStrategyKind {
        /// Mean of the updates, weighted by samples.
        #[default]
        FedAvg,
        /// As `FedAvg`; clients stay close to the model by a proximal term.
        FedProx,
        /// Adam on the mean update.
        FedAdam,
        /// Yogi on the mean update.
        FedYogi,
        /// Adagrad on the mean update.
        FedAdagrad,
        /// Mean of the updates; clients correct their steps by control variates, so that unequal clients reach the common optimum.
        Scaffold,
        /// Asynchronous: each `perRound` updates are aggregated, whatever model version they are from.
        FedBuff,
        /// Median per parameter.
        Median,
        /// Mean per parameter without the smallest and largest values.
        TrimmedMean,
        /// Mean of the updates that lie closest to their neighbours.
        Krum,
    }
}

/// The clients of a run, and of a round.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FederatedClients {
    /// Most clients of the run, 1 to 10,000. A client is enrolled when it checks in first.
    #[schemars(range(min = 1, max = 10_000), example = &20)]
    pub population: u64,
    /// Updates that end a round, 1 to `population`; not used with `privacy.samplingRate`.
    #[schemars(range(min = 1, max = 10_000), example = &10)]
    pub per_round: u64,
    /// Updates without which a round is aborted at its deadline, 1 to `perRound`; absent means half of `perRound`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 10_000))]
    pub minimum: Option<u64>,
    /// Clients that are assigned in addition to `perRound`, in percent of it, 0 to 1,000: a round does not wait for its slowest clients. With
    /// `secureAggregation` it requires `FedBuff`: a synchronous round waits for all its clients.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1_000))]
    pub over_selection: u64,
    /// With `FedBuff`: clients that train at the same time, at least `perRound`; absent means `population`. With `secureAggregation` too they are in
    /// cohorts of `perRound` and `overSelection`; absent means two cohorts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 10_000))]
    pub concurrency: Option<u64>,
    /// Names of the clients that may take part; absent means any, up to `population`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 10_000), inner(length(min = 1, max = 64)), extend("uniqueItems" = true))]
    pub allowed: Option<Vec<String>>,
}

/// Differential privacy of clients: updates are clipped, noise is added once to their sum, and no round starts beyond the budget.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FederatedPrivacy {
    /// Budget: the run ends before a round that would exceed it.
    #[schemars(extend("exclusiveMinimum" = 0), example = &8.0)]
    pub epsilon: f64,
    /// Probability with which epsilon may be exceeded, above 0 and below 1/`population`.
    #[schemars(extend("exclusiveMinimum" = 0), range(max = 1), example = &0.001)]
    pub delta: f64,
    /// Standard deviation of the noise over `clip`, 0.1 to 64.
    #[schemars(range(min = 0, max = 64), example = &1.0)]
    pub noise_multiplier: f64,
    /// Euclidean norm to which an update is clipped, above 0.
    #[schemars(extend("exclusiveMinimum" = 0), example = &1.0)]
    pub clip: f64,
    /// Lets `clip` follow the median of the norms: its value is that of the first round. The noise on the share of clients below it is part of the
    /// same charge. It needs 20 expected clients per round, and is refused with `secureAggregation`, which hides the norms.
    #[serde(default)]
    pub adaptive_clip: bool,
    /// Probability with which each client takes part in a round, above 0 and at most 1. Absent means rounds of `perRound` clients, which are
    /// charged without amplification by sampling.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("exclusiveMinimum" = 0), range(max = 1))]
    pub sampling_rate: Option<f64>,
}

/// Secure aggregation with drop-outs (SecAgg+).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SecureAggregation {
    /// Share of the clients of a round that may disappear, 0 to 0.34.
    #[serde(default = "default_drop_out")]
    #[schemars(range(min = 0, max = 1))]
    pub drop_out: f64,
    /// Values of an update are limited to -`range` to `range`, above 0; with `privacy`, `clip` is used.
    #[serde(default = "default_range")]
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub range: f64,
}

fn default_drop_out() -> f64 {
    0.2
}

fn default_range() -> f64 {
    8.0
}
