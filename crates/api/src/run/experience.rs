//! A replay buffer as the source of a `Replay` run.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::manifest_enum::words;

/// Default exponent of priorities.
pub const PRIORITY_ALPHA: f64 = 0.6;
/// Default exponent of importance weights at the first step; it rises to 1.
pub const PRIORITY_BETA: f64 = 0.4;

/// Items of a replay buffer of the cluster, which must exist when the run begins. Each step draws one batch for the whole group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BufferSource {
    /// Name of the buffer.
    #[schemars(length(min = 1, max = 128), example = &"experience")]
    pub name: String,

    /// How items are drawn.
    #[serde(default)]
    pub sampler: BufferSampler,

    /// With `Prioritized`: exponent of the priorities, 0 to 1; absent means 0.6.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1))]
    pub alpha: Option<f64>,

    /// With `Prioritized`: exponent of the importance weights; absent means a rise from 0.4 to 1 over the steps of the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beta: Option<BetaSchedule>,

    /// Fields of the buffer by the names that the model uses in `inputs` and `loss.target`; a name that is absent is that of the
    /// field.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(example = serde_json::json!({ "mask": "subset", "score": "reward" }))]
    pub fields: BTreeMap<String, String>,

    /// Whether the error of a sample becomes the priority of its item after each step; absent means true with `Prioritized`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update_priorities: Option<bool>,

    /// Steps whose items are drawn ahead while a step is computed, 0 to 16; absent means 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 16))]
    pub prefetch: Option<u64>,

    /// Another buffer with the same fields, whose items are not trained on: the result is measured on up to 4,096 of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 128), example = &"validation")]
    pub held_out: Option<String>,

    /// Items that the buffer must have before the first step, at least 1; absent means `batch`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub min_size: Option<u64>,
}

words! {
    /// How items of a buffer are drawn.
    #[derive(Default)]
    pub enum BufferSampler {
        /// In proportion to the priority to the power `alpha`, with importance weights.
        #[default]
        Prioritized,
        /// Every item alike.
        Uniform,
    }
}

/// Linear change of an exponent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BetaSchedule {
    /// Value at the first step, 0 to 1.
    #[schemars(range(min = 0, max = 1), example = &0.4)]
    pub start: f64,
    /// Value from `steps` on, 0 to 1.
    #[schemars(range(min = 0, max = 1), example = &1.0)]
    pub end: f64,
    /// Steps of the change; absent means those of the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub steps: Option<u64>,
}
