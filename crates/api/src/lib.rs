//! What a user writes: the kinds `LearnerCluster` and `LearnerRun`, the file of the operator, and every error that a user can read.
//!
//! The crate decides what a manifest may say: fields, defaults, ranges, rules between fields, and the sentences that
//! explain what is wrong. It talks to nobody and reads no file. The same types serve a laptop and, later, Kubernetes.
//!
//! Invariants:
//! - A field is described once, by the attributes of the types; JSON Schema, checks and documentation come from there.
//! - A [`Manifest`] holds no value outside its range, and nothing in it was ignored in silence.
//! - All problems of a file are found at once, in its order, each with its place.
//! - Error codes and exit codes never change their meaning.
//!
//! ```
//! let text = "
//! apiVersion: engram.dev/v1alpha1
//! kind: LearnerCluster
//! metadata: { name: demo }
//! spec: { workers: 5 }
//! ";
//! let manifest = engram_api::parse(text, "demo.yaml", engram_api::Needs::Cluster)?;
//! assert_eq!(manifest.cluster.unwrap().spec.partitions, 256);
//!
//! let wrong = text.replace("workers", "worker");
//! let problems = engram_api::parse(&wrong, "demo.yaml", engram_api::Needs::Cluster).unwrap_err();
//! assert_eq!(problems[0].code().id(), "ENG-0101");
//! println!("{}", problems.render(false));
//! # Ok::<(), engram_api::Problems>(())
//! ```

#![forbid(unsafe_code)]

mod access;
mod cluster;
mod code;
pub mod crd;
mod exit;
mod kubernetes;
mod later;
mod manifest;
mod object;
mod objects;
pub mod operator;
mod problem;
mod quantity;
mod run;
mod schema;
mod snapshot;
pub mod status;
mod word;

pub use access::{AccessList, Missing, Need};
pub use cluster::{
    Bootstrap, Capacity, CapacityPolicy, Durability, DurabilityMode, FeatureType, Features, Gpu, GpuMode,
    GpuPartitioner, Law, LearnerCluster, LearnerClusterSpec, Learning, Maintenance, SMALLEST_SETTING, SoloPolicy,
};
pub use code::{Code, explain};
pub use exit::ExitCode;
pub use manifest::{Manifest, Needs, check_immutable, parse, parse_object, parse_operator_configuration};
pub use object::{API_VERSION, Kind, MANAGED_BY, MAX_NAME_LENGTH, Metadata, Object, is_name};
pub use objects::{ObjectPlace, SecretRef};
pub use problem::{Place, Problem, Problems};
pub use quantity::{Duration, Rate, Size};
pub use run::{
    Clock, ClusterRef, Columns, ConfigMapKey, EPOCH_SPAN, EVENT_QUALITY, EventFormat, Events, Example, ExampleName,
    Git, Identity, Inversion, LearnerRun, LearnerRunSpec, MemoryRun, OnMissing, Report, RunKind, SKIP,
    SYNTHETIC_EPOCHS, Signal, Source, Synthetic, TOP_K, Until,
};
pub use schema::{operator_schema, schema};
pub use snapshot::SnapshotPlace;
pub use word::Word;

/// Settings that mean something in Kubernetes only.
pub mod kubernetes_only {
    pub use crate::kubernetes::*;
}
