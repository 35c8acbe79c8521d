//! User-facing types: the kinds `LearnerCluster` and `LearnerRun`, the operator's configuration file, and error codes.
//!
//! The crate defines what a manifest may contain: fields, defaults, ranges, rules between fields, and error messages. It does
//! no I/O. The same types serve local mode and Kubernetes.
//!
//! Invariants:
//! - A field is described once, by the attributes of the types; JSON Schema, validation and documentation are generated.
//! - A [`Manifest`] holds no value outside its range, and no field of it is silently ignored.
//! - All problems of a file are reported at once, in its order, each with its location.
//! - Error codes and exit codes never change their meaning.
//!
//! ```
//! let text = "
//! apiVersion: engram.dev/v1alpha1
//! kind: LearnerCluster
//! metadata: { name: demo }
//! spec: { workers: 5 }
//! ";
//! let manifest = engram_api::parse(text, "demo.yaml", engram_api::Requirement::Cluster)?;
//! assert_eq!(manifest.cluster.unwrap().spec.partitions, 256);
//!
//! let wrong = text.replace("workers", "worker");
//! let problems = engram_api::parse(&wrong, "demo.yaml", engram_api::Requirement::Cluster).unwrap_err();
//! assert_eq!(problems[0].code().id(), "ENG-0101");
//! println!("{}", problems.render(false));
//! # Ok::<(), engram_api::Problems>(())
//! ```

#![forbid(unsafe_code)]

mod access;
mod autoscaling;
mod buffers;
mod cluster;
mod code;
pub mod crd;
mod exit;
mod kubernetes;
mod manifest;
mod manifest_enum;
pub mod metrics;
mod object;
mod objects;
pub mod operator;
mod printable;
mod problem;
mod quantity;
mod run;
mod schema;
mod snapshot;
pub mod status;
mod unsupported;

pub use access::{AccessDenied, AccessList, RequiredRight};
pub use autoscaling::{Autoscaling, AutoscalingMode, AutoscalingStatus};
pub use buffers::{
    DeclaredBuffer, DeclaredField, DeclaredLimiter, DeclaredRemover, DeclaredSampler, ElementType, SamplerKind,
};
pub use cluster::{
    Bootstrap, Capacity, CapacityPolicy, Durability, DurabilityMode, FeatureType, Features, Gpu, GpuMode,
    GpuPartitioner, Law, LearnerCluster, LearnerClusterSpec, Learning, Maintenance, SMALLEST_SETTING, SoloPolicy,
};
pub use code::{Code, explain};
pub use exit::ExitCode;
pub use manifest::{Manifest, Requirement, check_immutable, parse, parse_object, parse_operator_configuration};
pub use manifest_enum::ManifestEnum;
pub use object::{API_VERSION, Kind, MANAGED_BY, MAX_NAME_LENGTH, Metadata, Object, is_name};
pub use objects::{ObjectLocation, SecretRef};
pub use printable::{printable, printable_line};
pub use problem::{Location, Problem, Problems};
pub use quantity::{Duration, Rate, Size};
pub use run::{
    BetaSchedule, BufferSampler, BufferSource, CHECKPOINT_STEPS, Clock, ClusterRef, Columns, CompressionKind,
    ConfigMapKey, CorrelationPenalty, DETECT_AFTER, DataFile, Decode, DecodeSource, DependencyCondition,
    DependencyState, EPOCH_SPAN, EVENT_QUALITY, EventFormat, EventSeparator, Events, Example, ExampleName,
    FeatureSubsets, FederatedClients, FederatedEncoding, FederatedInit, FederatedLayer, FederatedModel,
    FederatedPrivacy, FederatedRun, FederatedStrategy, FederatedStrategyKind, FisherForm, FisherRun, GeodesicRun, Git,
    Graph, GraphSemiring, Identity, InitScheme, Inversion, JOB_GRACE_SECONDS, JOB_VARIABLES, JobRun, JobVariable,
    LayerActivation, LearnerRun, LearnerRunSpec, LossFunction, MAX_DATA_BYTES, MarkovModel, MarkovSynthetic, MemoryRun,
    OnMissing, OptimizerKind, PRIORITY_ALPHA, PRIORITY_BETA, PipelineDevices, RateSchedule, Readiness, ReplayBalance,
    ReplayCheckpoint, ReplayCompression, ReplayInit, ReplayInput, ReplayLayer, ReplayLayerNorm, ReplayLoss,
    ReplayModel, ReplayOptimizer, ReplayPrivacy, ReplayRun, ReplaySource, ReplaySync, ReplayTable, Report,
    ResidualLayer, RunDependency, RunKind, SERVE_STEPS, SKIP, SYNTHETIC_EPOCHS, SampleExample, SampleExampleName,
    SampleFile, Samples, SecureAggregation, Signal, Source, SpectraDecoder, SpectraEngine, SpectraName, SpectraSource,
    SpectraTraining, SumOrder, Synthetic, SyntheticSpectra, TOP_K, TrainingPrecision, TropicalClassify, TropicalRun,
    Until, find_cycle, readiness, retry_delay_seconds,
};
pub use schema::{operator_schema, schema};
pub use snapshot::SnapshotLocation;

/// Settings that apply to Kubernetes only.
pub mod kubernetes_only {
    pub use crate::kubernetes::*;
}
