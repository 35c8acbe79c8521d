//! `LearnerCluster` objects: observe, validate, plan, coordinate, apply, report.

pub(crate) mod apply;
pub mod autoscaling;
pub mod build;
pub(crate) mod controller;
pub(crate) mod coordinator_goal;
pub(crate) mod coordinators;
pub(crate) mod last_valid_spec;
pub(crate) mod observe;
pub(crate) mod plan;
pub(crate) mod reconcile;
pub(crate) mod report;
pub(crate) mod rival;
pub(crate) mod state;
pub(crate) mod status;
pub(crate) mod trust;
pub(crate) mod validate;
