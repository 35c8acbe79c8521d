//! `LearnerRun`: a learning job on a cluster.
//!
//! As in `cluster`, the attributes are the single source of truth. A field whose default depends on other fields (the
//! source, the cluster) is an `Option`; [`LearnerRunSpec::effective`] fills it in.

mod data_file;
mod dependency;
mod experience;
mod federated;
mod fisher;
mod geodesic;
mod job;
mod replay;
mod samples;
mod tropical;

pub(crate) use data_file::DATA_FILES;
pub use data_file::{DataFile, MAX_DATA_BYTES};
pub use dependency::{
    DependencyCondition, DependencyState, Readiness, RunDependency, find_cycle, readiness, retry_delay_seconds,
};
pub use experience::{BetaSchedule, BufferSampler, BufferSource, PRIORITY_ALPHA, PRIORITY_BETA};
pub use federated::{
    FederatedClients, FederatedEncoding, FederatedInit, FederatedLayer, FederatedModel, FederatedPrivacy, FederatedRun,
    FederatedStrategy, FederatedStrategyKind, SecureAggregation,
};
pub use fisher::{FisherForm, FisherRun};
pub use geodesic::{
    GeodesicRun, SpectraDecoder, SpectraEngine, SpectraName, SpectraSource, SpectraTraining, SyntheticSpectra,
};
pub use job::{JOB_GRACE_SECONDS, JOB_VARIABLES, JobRun, JobVariable};
pub use replay::{
    CHECKPOINT_STEPS, CompressionKind, CorrelationPenalty, DETECT_AFTER, FeatureSubsets, InitScheme, LayerActivation,
    LossFunction, OptimizerKind, PipelineDevices, RateSchedule, ReplayBalance, ReplayCheckpoint, ReplayCompression,
    ReplayInit, ReplayInput, ReplayLayer, ReplayLayerNorm, ReplayLoss, ReplayModel, ReplayOptimizer, ReplayPrivacy,
    ReplayRun, ReplaySource, ReplaySync, ReplayTable, ResidualLayer, SERVE_STEPS, SumOrder, TrainingPrecision,
};
pub use samples::{SampleExample, SampleExampleName, SampleFile, Samples};
pub use tropical::{
    Decode, DecodeSource, Graph, GraphSemiring, MarkovModel, MarkovSynthetic, TropicalClassify, TropicalRun,
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cluster::{LearnerClusterSpec, setting};
use crate::manifest_enum::words;
use crate::object::{Kind, Object};
use crate::objects::ObjectLocation;
use crate::quantity::Duration;
use crate::snapshot::SnapshotLocation;

/// A learning job on a cluster.
pub type LearnerRun = Object<LearnerRunSpec>;

impl Kind for LearnerRunSpec {
    const KIND: &'static str = "LearnerRun";
}

/// Default number of epochs of a synthetic run; its two groups separate completely well before.
pub const SYNTHETIC_EPOCHS: u64 = 50;
/// Default quality of an event: a mostly positive signal.
pub const EVENT_QUALITY: f64 = 0.9;
/// Default length of an epoch where events carry a time.
pub const EPOCH_SPAN: Duration = Duration::from_millis(86_400_000);
/// Default K of the top-K hit report.
pub const TOP_K: u64 = 500;
/// Event sources that pods can read, for messages.
pub(crate) const KUBERNETES_EVENTS: &str = "configMap, s3, or input and path";
/// Data files that pods can read, for messages.
pub(crate) const KUBERNETES_FILES: &str = "configMap, or input and path";
/// Default number of epochs before the first prediction; earlier ones are made from too little data.
pub const SKIP: u64 = 21;

/// Desired state of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LearnerRunSpec {
    /// Cluster that the run belongs to: one in the same file, else in the context.
    #[schemars(example = serde_json::json!({ "name": "words" }))]
    pub cluster_ref: ClusterRef,

    /// Kind of the run. Exactly the block of that name must be set.
    #[schemars(example = &"Memory")]
    pub kind: RunKind,

    /// Settings of `kind: Memory`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryRun>,

    /// Settings of `kind: Snapshot`: destination, which must be empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotLocation>,

    /// Settings of `kind: Geodesic`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub geodesic: Option<GeodesicRun>,

    /// Settings of `kind: Tropical`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tropical: Option<TropicalRun>,

    /// Settings of `kind: Fisher`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fisher: Option<FisherRun>,

    /// Settings of `kind: Replay`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replay: Option<ReplayRun>,

    /// Settings of `kind: Federated`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub federated: Option<FederatedRun>,

    /// Settings of `kind: Job`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<JobRun>,

    /// With a synthetic source: conditions that end the run, whichever holds first; absent means all epochs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until: Option<Until>,

    /// Runs that must reach a condition before this one starts. `engram run`, `engram up` and the operator carry it out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), example = serde_json::json!([{ "run": "train" }]))]
    pub depends_on: Vec<RunDependency>,

    /// Number of retries of a failed run, 0 to 100; the delay before a retry doubles, from 1 s to 6 min. A run of kind `Memory`
    /// continues with the epoch that failed, others start again. Of a run of kind `Job` it is the number of processes that are started
    /// again after a failure.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schemars(range(min = 0, max = 100))]
    pub backoff_limit: u32,

    /// Suspends the run after its current epoch; `false` resumes it from there, or restarts a snapshot.
    #[serde(default)]
    pub suspend: bool,

    /// Seconds after which a finished run is deleted; absent means never.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub ttl_seconds_after_finished: Option<u64>,

    /// Controller that reconciles the object.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub managed_by: Option<String>,
}

impl LearnerRunSpec {
    /// Returns a memory run over `source` on the cluster called `cluster`, with defaults for everything else.
    pub fn memory(cluster: impl Into<String>, source: Source) -> Self {
        Self {
            cluster_ref: ClusterRef { name: cluster.into() },
            kind: RunKind::Memory,
            memory: Some(MemoryRun {
                source,
                epochs: None,
                decay: None,
                on_missing: OnMissing::default(),
                report: Report::default(),
            }),
            snapshot: None,
            geodesic: None,
            tropical: None,
            fisher: None,
            replay: None,
            federated: None,
            job: None,
            until: None,
            depends_on: Vec::new(),
            backoff_limit: 0,
            suspend: false,
            ttl_seconds_after_finished: None,
            managed_by: None,
        }
    }

    /// Returns the spec with every default filled in, including those that depend on the source and the cluster. Absent stay
    /// `epochs` of events and git (all of them) and `decay` where `cluster` is unknown.
    pub fn effective(&self, cluster: Option<&LearnerClusterSpec>) -> Self {
        let mut spec = self.clone();
        let Some(memory) = &mut spec.memory else { return spec };
        memory.decay = memory.decay.or(cluster.map(|cluster| cluster.learning.decay));
        if let Source::Synthetic(_) = memory.source {
            memory.epochs = memory.epochs.or(Some(SYNTHETIC_EPOCHS));
            memory.report.inversion = Some(memory.report.inversion.unwrap_or_default());
            memory.report.coverage = Some(memory.report.coverage());
        } else {
            memory.report.top_k = Some(memory.report.top_k().to_vec());
            memory.report.skip = Some(memory.report.skip());
        }
        if let Source::Events(events) = &mut memory.source {
            match events.signal() {
                Signal::Quality(quality) => events.quality = Some(quality),
                Signal::Delta(_) | Signal::QualityColumn(_) | Signal::DeltaColumn(_) => {}
            }
            if let Clock::Time { span, .. } = events.clock() {
                events.epoch_span = Some(span);
            }
        }
        spec
    }
}

impl RunKind {
    /// Returns whether runs of this kind are split into tasks, which are spread over the workers and change no memories.
    pub const fn has_tasks(self) -> bool {
        matches!(self, Self::Geodesic | Self::Tropical | Self::Fisher)
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the shape that serde wants")]
const fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// Reference to the cluster of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ClusterRef {
    /// Name of the cluster, in the same namespace.
    #[schemars(extend("format" = "engram-name"), example = &"words")]
    pub name: String,
}

words! {
    /// Kind of a run.
    pub enum RunKind {
        /// Learning epochs over a source: decay, then reinforcement, then aggregation.
        Memory,
        /// A snapshot of the whole cluster, to object storage or a volume. It is read-only and does not queue behind other runs.
        Snapshot,
        /// Leave-one-out validation of the geodesic spectral model. It changes no memories.
        Geodesic,
        /// Max-plus workloads. It changes no memories.
        Tropical,
        /// Fisher information of a classifier. It changes no memories.
        Fisher,
        /// Data-parallel training of a model on the workers. It changes no memories.
        Replay,
        /// Training over clients outside the cluster, which keep their data. It changes no memories.
        Federated,
        /// The user's own program, as processes or as a Kubernetes Job. It changes no memories itself.
        Job,
    }
}

/// Learning epochs over a source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MemoryRun {
    /// Source of the reinforcements.
    pub source: Source,

    /// Maximum number of epochs, 1 to 1,000,000,000; absent means all of an events or git source, and 50 of a synthetic source.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub epochs: Option<u64>,

    /// Weight loss per epoch: 0, or above 2^-31 and at most 1; absent means `learning.decay` of the cluster. Higher forgets
    /// sooner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "setting")]
    pub decay: Option<f64>,

    /// Handling of a reinforcement of a memory that does not exist.
    #[serde(default)]
    pub on_missing: OnMissing,

    /// Additional measurements.
    #[serde(default, skip_serializing_if = "Report::is_empty")]
    pub report: Report,
}

words! {
    /// Handling of a reinforcement of a memory that does not exist.
    #[derive(Default)]
    pub enum OnMissing {
        /// Creates the memory with the initial weight, then reinforces it.
        #[default]
        Create,
        /// Reports the memory and applies the rest.
        Report,
    }
}

/// Source of the reinforcements of a run: exactly one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(clippy::large_enum_variant, reason = "a run has one")]
pub enum Source {
    /// A built-in data set: the same manifest runs on a laptop and on Kubernetes.
    Example(Example),
    /// A file of events, ordered by epoch.
    Events(Events),
    /// History of a git repository: commits are epochs, paths are keys.
    Git(Git),
    /// Two groups of generated memories, one rewarded and one punished.
    Synthetic(Synthetic),
}

/// A built-in data set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Example {
    /// Name of the data set.
    #[schemars(example = &"StateOfTheUnion")]
    pub name: ExampleName,
}

words! {
    /// A built-in data set.
    pub enum ExampleName {
        /// State of the Union addresses, 1790 to 2021: each address is an epoch, the words it uses are reinforced.
        StateOfTheUnion,
    }
}

/// A file of events, ordered by epoch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Events {
    /// Path of the file, relative to the manifest or to `input`. On Kubernetes only with `input`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 4096), example = &"events.csv")]
    pub path: Option<String>,

    /// On Kubernetes: a ConfigMap in the run's namespace that holds the file, instead of `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_map: Option<ConfigMapKey>,

    /// A file in object storage, instead of `path`. The driver of the run downloads all of it to its disk before the first epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(example = serde_json::json!({ "url": "s3://events/2026/sales.csv.zst" }))]
    pub s3: Option<ObjectLocation>,

    /// On Kubernetes: entry of the cluster's `spec.inputs` that holds the file at `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "engram-name"))]
    pub input: Option<String>,

    /// Format of the file. Files that end with `.zst` or `.gz` are decompressed.
    #[serde(default)]
    pub format: EventFormat,

    /// Separator of the columns of a CSV file; absent means `Comma`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub separator: Option<EventSeparator>,

    /// Column names.
    #[schemars(example = serde_json::json!({ "key": "word", "epoch": "day" }))]
    pub columns: Columns,

    /// Quality of every event, 0 to 1; default 0.9 where neither `delta` nor a column is set. Above 0.5 reinforces, below
    /// weakens.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1))]
    pub quality: Option<f64>,

    /// Weight change of every event, -1 to 1, instead of a quality.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = -1, max = 1))]
    pub delta: Option<f64>,

    /// With `columns.time`: length of an epoch, at least 1ms; absent means 1d. Longer makes fewer, larger epochs and hence less
    /// decay.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-minimum" = "1ms"))]
    pub epoch_span: Option<Duration>,
}

/// A file in a ConfigMap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ConfigMapKey {
    /// Name of the ConfigMap.
    #[schemars(length(min = 1), example = &"sales")]
    pub name: String,
    /// Key, which is the name of the file: `events.csv`.
    #[schemars(length(min = 1), example = &"events.csv")]
    pub key: String,
}

words! {
    /// Format of a file of events.
    #[derive(Default)]
    pub enum EventFormat {
        /// By the extension: `.jsonl`, `.ndjson`, `.csv`, `.parquet`.
        #[default]
        Auto,
        /// One JSON object per line.
        Jsonl,
        /// Comma-separated values with a header line.
        Csv,
        /// Apache Parquet.
        Parquet,
    }
}

words! {
    /// Separator of the columns of a CSV file.
    pub enum EventSeparator {
        /// `,`
        Comma,
        /// `;`
        Semicolon,
        /// A tab.
        Tab,
        /// `|`
        Pipe,
    }
}

impl EventSeparator {
    /// Returns the byte.
    pub const fn as_byte(self) -> u8 {
        match self {
            Self::Comma => b',',
            Self::Semicolon => b';',
            Self::Tab => b'\t',
            Self::Pipe => b'|',
        }
    }
}

impl EventFormat {
    /// Returns the format of the file at `path` by its extension, ignoring `.zst` and `.gz`; `None` if unknown.
    pub fn of_path(path: &str) -> Option<Self> {
        let lower = path.to_ascii_lowercase();
        let bare = lower.strip_suffix(".zst").or(lower.strip_suffix(".gz")).unwrap_or(&lower);
        match bare.rsplit_once('.')?.1 {
            "jsonl" | "ndjson" => Some(Self::Jsonl),
            "csv" => Some(Self::Csv),
            "parquet" => Some(Self::Parquet),
            _ => None,
        }
    }
}

/// Names of columns in a file of events.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Columns {
    /// Column of numeric ids (u64), instead of `key`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1))]
    pub id: Option<String>,
    /// Column of string keys, 1 to 1,024 bytes each, instead of `id`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1))]
    pub key: Option<String>,
    /// Column of epoch numbers, non-decreasing, instead of `time`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1))]
    pub epoch: Option<String>,
    /// Column of times, RFC 3339 or Unix milliseconds, non-decreasing, instead of `epoch`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1))]
    pub time: Option<String>,
    /// Column of qualities, 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1))]
    pub quality: Option<String>,
    /// Column of weight changes, -1 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1))]
    pub delta: Option<String>,
}

/// Column that identifies the memory of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identity<'a> {
    /// Numeric ids.
    Id(&'a str),
    /// String keys.
    Key(&'a str),
}

/// Column that determines the epoch of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock<'a> {
    /// Epoch numbers.
    Epoch(&'a str),
    /// Times; an epoch is `span` long.
    Time {
        /// The column.
        column: &'a str,
        /// Length of an epoch.
        span: Duration,
    },
}

/// Reinforcement signal of an event.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Signal<'a> {
    /// One quality for every event.
    Quality(f64),
    /// One weight change for every event.
    Delta(f64),
    /// A column of qualities.
    QualityColumn(&'a str),
    /// A column of weight changes.
    DeltaColumn(&'a str),
}

impl Events {
    /// Returns the name of the file, which determines its format: the path, the key of the ConfigMap, or the URL.
    pub fn file_name(&self) -> &str {
        let key = self.config_map.as_ref().map(|file| file.key.as_str());
        let address = self.s3.as_ref().map(|place| place.url.as_str());
        self.path.as_deref().or(key).or(address).unwrap_or_default()
    }

    /// Returns the identity column. A validated manifest has exactly one; of two the key wins, of none it is `id`.
    pub fn identity(&self) -> Identity<'_> {
        match (&self.columns.key, &self.columns.id) {
            (Some(key), _) => Identity::Key(key),
            (None, Some(id)) => Identity::Id(id),
            (None, None) => Identity::Id("id"),
        }
    }

    /// Returns the epoch column. A validated manifest has exactly one; of two the time wins, of none it is `epoch`.
    pub fn clock(&self) -> Clock<'_> {
        match (&self.columns.time, &self.columns.epoch) {
            (Some(column), _) => Clock::Time { column, span: self.epoch_span.unwrap_or(EPOCH_SPAN) },
            (None, Some(column)) => Clock::Epoch(column),
            (None, None) => Clock::Epoch("epoch"),
        }
    }

    /// Returns the signal. A validated manifest has at most one source of it; of several a column wins.
    pub fn signal(&self) -> Signal<'_> {
        match (&self.columns.quality, &self.columns.delta, self.delta) {
            (Some(column), _, _) => Signal::QualityColumn(column),
            (None, Some(column), _) => Signal::DeltaColumn(column),
            (None, None, Some(delta)) => Signal::Delta(delta),
            (None, None, None) => Signal::Quality(self.quality.unwrap_or(EVENT_QUALITY)),
        }
    }
}

/// History of a git repository: commits are epochs, the paths they touch are reinforced.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Git {
    /// Path of the repository, relative to the manifest.
    #[schemars(length(min = 1))]
    pub path: String,
    /// End of the history: a branch, tag or commit.
    #[schemars(length(min = 1))]
    pub revision: String,
    /// Maximum number of commits, newest first; 0 means all.
    pub max_commits: u64,
    /// Quality of every touched path, 0 to 1.
    #[schemars(range(min = 0, max = 1))]
    pub quality: f64,
}

impl Default for Git {
    fn default() -> Self {
        Self { path: ".".into(), revision: "HEAD".into(), max_commits: 0, quality: EVENT_QUALITY }
    }
}

/// Two groups of generated memories: ids 0 to `memories - 1`, even ones in group 0, rewarded, odd ones in group 1,
/// punished. Groups 0 and 1 of the cluster must hold no other memories.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Synthetic {
    /// Number of memories, even, 2 to 1,000,000,000, at most the cluster's capacity.
    #[schemars(range(min = 2, max = 1_000_000_000), extend("multipleOf" = 2))]
    pub memories: u64,
    /// Initial weight, regardless of the cluster's setting.
    #[schemars(range(min = 0, max = 1))]
    pub initial_weight: f64,
    /// Quality of the rewarded group.
    #[schemars(range(min = 0, max = 1))]
    pub rewarded: f64,
    /// Quality of the punished group.
    #[schemars(range(min = 0, max = 1))]
    pub punished: f64,
    /// Standard deviation of noise added to each quality, 0 to 1; with 0 each group has one weight change per epoch.
    #[schemars(range(min = 0, max = 1))]
    pub noise: f64,
    /// Seed of the noise.
    pub seed: u64,
}

impl Default for Synthetic {
    fn default() -> Self {
        Self { memories: 100_000, initial_weight: 0.5, rewarded: 0.8, punished: 0.2, noise: 0.0, seed: 42 }
    }
}

/// Additional measurements of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Report {
    /// With events and git: values of K for which hits of the top-K memories in the next epoch are counted, compared with two
    /// baselines; 1 to 8 distinct values of 1 to 10,000; absent means [500].
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 8), inner(range(min = 1, max = 10_000)), extend("uniqueItems" = true))]
    pub top_k: Option<Vec<u64>>,
    /// With events and git: epochs before the first prediction; absent means 21. Lower includes predictions made from little
    /// data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skip: Option<u64>,
    /// With a synthetic source: how the fraction of wrongly ordered pairs is computed; absent means `Histogram`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inversion: Option<Inversion>,
    /// With a synthetic source: whether updates per memory are counted, at 4 bytes per memory during the run; absent means
    /// `true`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub coverage: Option<bool>,
}

impl Report {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the values of K for which hits are counted.
    pub fn top_k(&self) -> &[u64] {
        self.top_k.as_deref().unwrap_or(&[TOP_K])
    }

    /// Returns the epochs before the first prediction.
    pub fn skip(&self) -> u64 {
        self.skip.unwrap_or(SKIP)
    }

    /// Returns how wrongly ordered pairs are counted.
    pub fn inversion(&self) -> Inversion {
        self.inversion.unwrap_or_default()
    }

    /// Returns whether updates per memory are counted.
    pub fn coverage(&self) -> bool {
        self.coverage.unwrap_or(true)
    }
}

words! {
    /// How the fraction of wrongly ordered pairs is computed.
    #[derive(Default)]
    pub enum Inversion {
        /// From histograms of the weights: fast, exact to the bin width.
        #[default]
        Histogram,
        /// From the weights themselves.
        Exact,
    }
}

/// Conditions that end a synthetic run, whichever holds first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Until {
    /// Difference of the groups' mean weights at which to stop, above 0 and at most 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 1), extend("exclusiveMinimum" = 0))]
    pub separation: Option<f64>,
    /// Ratio of that difference to its value after the first epoch at which to stop, above 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("exclusiveMinimum" = 1))]
    pub convergence: Option<f64>,
}
