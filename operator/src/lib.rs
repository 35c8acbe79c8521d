//! The Kubernetes operator: reconciles `LearnerCluster` and `LearnerRun` objects.
//!
//! ```text
//! validate (pure) -> observe (I/O) -> plan (pure) -> steer, apply, autoscale (I/O) -> report (one write)
//! ```
//!
//! Folders by subject: [`cluster`] and [`learner_run`] with the decisions about an object and its reconcile, [`pki`] with certificates,
//! [`kube`] with access to the API server, [`telemetry`] with metrics, events and spans. All decisions are pure functions: [`validate`]
//! checks an object, [`plan`] compares it with an [`Observation`] and returns a [`Plan`], [`coordinator_goal()`] derives the settings of
//! the cluster's coordinator, [`certificate_approval`] approves certificate requests of pods, [`options`] merges flags and configuration
//! file.
//!
//! Invariants:
//! - A plan deletes a running pod only while every partition that it holds is in sync on all its other replicas.
//! - A destructive change (of a pod, a claim, an object) is an [`Action`] with the UID of its target.
//! - Planning after an applied plan returns an empty plan: an idle cluster causes no writes.
//! - A volume with data of unknown origin is neither used nor deleted.

#![forbid(unsafe_code)]

pub mod cluster;
mod context;
pub mod kube;
pub mod learner_run;
pub mod names;
pub mod options;
pub mod pki;
pub mod run;
pub mod telemetry;

pub use cluster::coordination::goal::{CoordinatorGoal, coordinator_goal, coordinator_goal_of_invalid_spec};
pub use cluster::coordination::last_valid_spec::last_valid_spec;
pub use cluster::object::ClusterObject;
pub use cluster::observe::observation::{
    ClaimView, MapView, Observation, PartitionView, PodView, SetView, StartFailure, StartFailureCause,
};
pub use cluster::plan::revision::Offer;
pub use cluster::plan::{Action, Plan, Prepared, plan};
pub use cluster::status::invalid_spec_status;
pub use cluster::validate::{InvalidSpec, ValidatedCluster, validate};
pub use cluster::{autoscaling, build, plan::lifecycle};
pub use kube::api_object::{ApiObject, InvalidObject};
pub use kube::lease;
pub use learner_run::jobs::{object as job_object, status as job_status};
pub use learner_run::queue;
pub use pki::certificate_approval;
