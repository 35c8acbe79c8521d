//! The Kubernetes operator: reconciles `LearnerCluster` and `LearnerRun` objects.
//!
//! ```text
//! observe (I/O) -> validate (pure) -> plan (pure) -> apply (I/O) -> status (pure, one write)
//! ```
//!
//! All decisions are pure functions: [`validate`] checks an object, [`plan`] compares it with an [`Observation`] and returns a
//! [`Plan`], [`coordinator_goal()`] derives the settings of the cluster's coordinator, [`certificate_approval`] approves certificate
//! requests of pods, `ca_rotation` rotates the CA, `provided_certificate` and `cert_manager` check certificates that the operator does
//! not sign, [`options`] merges flags and configuration file. [`run`](run::run) does all I/O with the API server and workers and makes
//! no decisions.
//!
//! Invariants:
//! - A plan deletes a running pod only while every partition that it holds is in sync on all its other replicas.
//! - A destructive change (of a pod, a claim, an object) is an [`Action`] with the UID of its target.
//! - Planning after an applied plan returns an empty plan: an idle cluster causes no writes.
//! - A volume with data of unknown origin is neither used nor deleted.

#![forbid(unsafe_code)]

pub mod autoscaling;
pub mod build;
mod ca_rotation;
mod cert_manager;
pub mod certificate_approval;
mod cluster_progress;
mod cluster_status;
mod coordinator_goal;
mod dependency;
pub mod job_status;
mod last_valid_spec;
pub mod learner_run;
pub mod lease;
pub mod lifecycle;
pub mod names;
mod object_views;
mod observation;
pub mod options;
mod plan;
mod provided_certificate;
pub mod queue;
mod revision;
pub mod run;
mod safety;
mod validate;

pub use cluster_status::invalid_spec_status;
pub use coordinator_goal::{CoordinatorGoal, coordinator_goal, coordinator_goal_of_invalid_spec};
pub use last_valid_spec::last_valid_spec;
pub use object_views::InvalidObject;
pub use observation::{
    ClaimView, MapView, Observation, PartitionView, PodView, SetView, StartFailure, StartFailureCause,
};
pub use plan::{Action, Plan, plan};
pub use revision::Offer;
pub use validate::{InvalidSpec, ValidatedCluster, validate};
