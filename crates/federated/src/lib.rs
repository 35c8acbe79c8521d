//! Federated learning as values in and decisions out: what a server aggregates, when a round starts and ends, what it costs in privacy, and how
//! updates are hidden from the server.
//!
//! - [`model`], [`strategy`]: layouts, checked updates, and the rules that turn them into the next model.
//! - [`quantized`], [`model_signature`]: models as clients download them: 8-bit values, and the signature that they check.
//! - [`round`], [`selection`]: the state machine of rounds, the choice of clients.
//! - [`privacy`]: clipping, exact noise, accountants, the budget.
//! - [`secure`]: secure aggregation with drop-outs, client and server.
//! - [`job`], [`service`], [`aggregation`]: a run by its specification, its server, and the next model from a batch.
//! - [`simulate`]: a run over synthetic clients in virtual time.
//!
//! There is no I/O, no clock and no source of randomness here: times, seeds and secrets are passed in. Invariants:
//! - **Updates are checked before the first is used**, and a failure leaves the state unchanged.
//! - **An update counts at most once**, whatever is repeated, late or restarted.
//! - **The privacy budget is charged before a round**, never refunded, and part of the state.
//! - **Results do not depend on the order of arrival.**
#![forbid(unsafe_code)]

pub mod aggregation;
#[cfg(test)]
mod cohorts;
mod content;
pub mod error;
pub mod job;
pub mod model;
pub mod model_signature;
pub mod privacy;
pub mod quantized;
mod random;
pub mod round;
pub mod secure;
pub mod selection;
pub mod service;
pub mod simulate;
pub mod strategy;

pub use random::Seed;
