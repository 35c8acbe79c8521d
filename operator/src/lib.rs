//! The operator: what a `LearnerCluster` asks for, kept on Kubernetes.
//!
//! ```text
//! observe (I/O) -> validate (pure) -> plan (pure) -> apply (I/O) -> status (pure, one write)
//! ```
//!
//! The pure part decides: [`validate`] turns an object into a [`ValidatedCluster`] or says what is wrong with it, [`plan`]
//! compares it with what is [`Observed`] and answers with a [`Plan`], [`steer`] says what the cluster's coordinator is told.
//! [`sign`] says which pod gets a certificate, `succession` how one authority follows another, `given` whether one that somebody else signed is of use,
//! `cert_manager` why there is none yet, [`options`] how flags and a file go together,
//! and [`run`](run::run) is the rest: it talks to the API server and to workers, and decides nothing.
//!
//! Invariants:
//! - A plan takes a pod away only while every partition that it holds is in sync on all its other copies.
//! - What loses something (a pod, a claim, an object) is an [`Action`] that names the UID it is meant for.
//! - The plan of an applied plan is empty: a cluster at rest costs no writes.
//! - Where nobody knows whose data a disk holds, nothing is started and nothing deleted.

#![forbid(unsafe_code)]

pub mod build;
mod cert_manager;
mod evidence;
mod given;
pub mod learner_run;
pub mod lease;
pub mod names;
mod observed;
pub mod options;
mod plan;
pub mod queue;
mod read;
mod recall;
mod report;
mod revision;
pub mod run;
pub mod sign;
mod steer;
mod succession;
mod validate;

pub use observed::{Claim, MapView, Observed, PartitionView, PodView, SetView};
pub use plan::{Action, Plan, plan};
pub use read::Unreadable;
pub use recall::recall;
pub use report::refused;
pub use revision::Offer;
pub use steer::{Steering, steer, steer_on};
pub use validate::{Refused, ValidatedCluster, validate};
