//! From start to stop of a worker: bootstrap, activation of partitions, drain, exit status, supervision.

pub(crate) mod activation;
pub(crate) mod bootstrap;
pub(crate) mod drain;
pub mod exit;
pub(crate) mod phase;
pub(crate) mod services;
pub mod supervise;
mod watch;
pub(crate) mod worker;
