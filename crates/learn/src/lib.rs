//! Learning runs: where epochs come from, how well the memory predicts them, and what is reported.
//!
//! [`source`] yields learning epochs; [`prediction`] scores the ranking before each against two baselines;
//! [`statistics`] holds what is computed from weights; [`report`] is what a run leaves behind, as data, as text and as a
//! page; [`tune`] searches settings that predict better. Nothing here serves requests or knows Kubernetes.
#![forbid(unsafe_code)]

pub mod gradients;
pub mod prediction;
pub mod report;
pub mod run;
pub mod source;
pub mod statistics;
pub mod task_run;
pub mod tune;
