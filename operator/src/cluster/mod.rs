//! `LearnerCluster` objects: validate, observe, plan, steer, apply, autoscale, report.

pub(crate) mod apply;
pub mod autoscaling;
pub mod build;
pub(crate) mod controller;
pub(crate) mod coordination;
pub mod object;
pub(crate) mod observe;
pub(crate) mod operator_conflict;
pub(crate) mod pass;
pub(crate) mod plan;
pub(crate) mod reconcile;
pub(crate) mod report;
pub(crate) mod state;
pub(crate) mod status;
pub(crate) mod validate;
