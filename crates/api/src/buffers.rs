//! Replay buffers that a cluster declares: `spec.buffers`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::manifest_enum::{ManifestEnum, words};

/// Most buffers of a cluster.
pub(crate) const MAX_BUFFERS: usize = 64;
/// Most fields of a buffer.
pub(crate) const MAX_BUFFER_FIELDS: usize = 64;
/// Longest name of a buffer, in bytes.
pub(crate) const MAX_BUFFER_NAME: usize = 128;
/// Longest name of a field, in bytes.
pub(crate) const MAX_FIELD_NAME: usize = 64;

/// A replay buffer that the workers create when the cluster starts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeclaredBuffer {
    /// Name: letters, digits, `_`, `.` and `-`, 1 to 128 bytes.
    #[schemars(extend("format" = "engram-buffer-name", "maxLength" = MAX_BUFFER_NAME), example = &"train")]
    pub name: String,

    /// Most items, at least 1. They count towards `spec.capacity.memories`.
    #[schemars(range(min = 1, max = 1_000_000_000), example = 100_000)]
    pub capacity: u64,

    /// Fields of an item, 1 to 64.
    #[schemars(
        length(min = 1, max = MAX_BUFFER_FIELDS),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]),
        example = serde_json::json!([{ "name": "obs", "dtype": "float32", "shape": [4] }])
    )]
    pub fields: Vec<DeclaredField>,

    /// Sampler of requests that name none; absent means that every request names one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampler: Option<DeclaredSampler>,

    /// Which item makes room in a full buffer.
    #[serde(default)]
    pub remover: DeclaredRemover,

    /// Batches that may contain an item before it is removed; absent means unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub max_reuse: Option<u32>,

    /// Policy versions that a sampled item may be behind the learner; absent means unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub max_age: Option<u64>,

    /// Priority that is stored as weight 1, above 0: larger priorities count as this one. The resolution is 2^-30 of it.
    #[serde(default = "default_max_priority")]
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub max_priority: f64,

    /// Priority of items appended without one, above 0 and at most `maxPriority`.
    #[serde(default = "default_initial_priority")]
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub initial_priority: f64,

    /// Keeps samples and appends in a ratio; absent means that neither waits for the other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limiter: Option<DeclaredLimiter>,
}

/// A field of an item.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeclaredField {
    /// Name: letters, digits, `_`, `.` and `-`, 1 to 64 bytes.
    #[schemars(extend("format" = "engram-field-name", "maxLength" = MAX_FIELD_NAME), example = &"obs")]
    pub name: String,

    /// Type of the elements.
    #[schemars(example = &"float32")]
    pub dtype: ElementType,

    /// Fixed dimensions; empty means a scalar.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "shape", example = serde_json::json!([84, 84]))]
    pub shape: Vec<u32>,

    /// Whether a first dimension of any length precedes the fixed ones.
    #[serde(default)]
    pub jagged: bool,
}

/// Schema of the fixed dimensions of a field.
fn shape(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "array",
        "maxItems": 8,
        "items": { "type": "integer", "minimum": 1, "maximum": 4_194_304 },
    })
}

/// Type of the elements of a field, as in NumPy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ElementType {
    /// One byte, 0 or 1.
    Bool,
    /// Signed, 1 byte.
    Int8,
    /// Signed, 2 bytes.
    Int16,
    /// Signed, 4 bytes.
    Int32,
    /// Signed, 8 bytes.
    Int64,
    /// Unsigned, 1 byte.
    UInt8,
    /// Unsigned, 2 bytes.
    UInt16,
    /// Unsigned, 4 bytes.
    UInt32,
    /// Unsigned, 8 bytes.
    UInt64,
    /// Half precision, 2 bytes.
    Float16,
    /// The upper half of float32, 2 bytes.
    BFloat16,
    /// Single precision, 4 bytes.
    Float32,
    /// Double precision, 8 bytes.
    Float64,
    /// Two float32.
    Complex64,
    /// Two float64.
    Complex128,
}

impl ManifestEnum for ElementType {
    const ALL: &'static [Self] = &[
        Self::Bool,
        Self::Int8,
        Self::Int16,
        Self::Int32,
        Self::Int64,
        Self::UInt8,
        Self::UInt16,
        Self::UInt32,
        Self::UInt64,
        Self::Float16,
        Self::BFloat16,
        Self::Float32,
        Self::Float64,
        Self::Complex64,
        Self::Complex128,
    ];

    fn as_str(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::Int8 => "int8",
            Self::Int16 => "int16",
            Self::Int32 => "int32",
            Self::Int64 => "int64",
            Self::UInt8 => "uint8",
            Self::UInt16 => "uint16",
            Self::UInt32 => "uint32",
            Self::UInt64 => "uint64",
            Self::Float16 => "float16",
            Self::BFloat16 => "bfloat16",
            Self::Float32 => "float32",
            Self::Float64 => "float64",
            Self::Complex64 => "complex64",
            Self::Complex128 => "complex128",
        }
    }
}

/// How items are drawn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeclaredSampler {
    /// The sampler.
    #[schemars(example = &"Prioritized")]
    pub kind: SamplerKind,

    /// With `Prioritized`: exponent of the priorities, 0 to 1; absent means 0.6.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1))]
    pub alpha: Option<f64>,

    /// With `Prioritized`: exponent of the importance weights, 0 to 1; absent means 0.4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1))]
    pub beta: Option<f64>,

    /// With `Slices`: items per slice; with `Groups`: items per group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65_536))]
    pub length: Option<u32>,
}

words! {
    /// How items of a buffer are drawn.
    pub enum SamplerKind {
        /// In proportion to the priority to the power `alpha`, with importance weights.
        Prioritized,
        /// Every item alike.
        Uniform,
        /// The oldest.
        Fifo,
        /// The newest.
        Lifo,
        /// Consecutive items of one trajectory.
        Slices,
        /// The oldest complete groups of items with the same prompt.
        Groups,
    }
}

words! {
    /// Which item makes room in a full buffer.
    #[derive(Default)]
    pub enum DeclaredRemover {
        /// The oldest.
        #[default]
        Fifo,
        /// The newest.
        Lifo,
        /// The one with the lowest priority.
        LowestPriority,
        /// The one with the highest priority.
        HighestPriority,
        /// None: the append is refused.
        Refuse,
    }
}

/// Keeps samples and appends in a ratio: `appended * samplesPerInsert - sampled` stays within `tolerance` of its value after `minSize` appends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeclaredLimiter {
    /// Samples per appended item, above 0.
    #[schemars(extend("exclusiveMinimum" = 0), example = &4.0)]
    pub samples_per_insert: f64,

    /// Items that must exist before the first sample, 1 to `capacity`.
    #[serde(default = "default_min_size")]
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub min_size: u64,

    /// Samples by which either side may be ahead, at least 1 and at least `samplesPerInsert`: with less, appends and samples could block each
    /// other.
    #[schemars(range(min = 1), example = &100.0)]
    pub tolerance: f64,
}

const fn default_max_priority() -> f64 {
    1_024.0
}

const fn default_initial_priority() -> f64 {
    1.0
}

const fn default_min_size() -> u64 {
    1
}

/// Whether `text` is a name of a buffer or field of at most `longest` bytes.
pub(crate) fn is_item_name(text: &str, longest: usize) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    (1..=longest).contains(&text.len()) && text.bytes().all(allowed)
}

/// Pattern of names of buffers and fields.
pub(crate) const NAME_PATTERN: &str = "^[A-Za-z0-9_.-]+$";
