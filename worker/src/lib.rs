//! One worker of a cluster: gRPC services over the store and the learning runs.
//!
//! Decides what a request may hold ([`engram_proto::columns`] checks it before memory is taken), which parts are executed here and which are
//! passed to their owner (at most one hop), and when the worker is ready. What a record does is the store's business, who serves which
//! partition the map's.
//!
//! ```text
//! client listener ─┐                 ┌─ parts of this worker ── engine (store) ── log, device
//! peer listener ───┴─ edge ─ service ┤
//! admin listener, socket             └─ other parts ── client library ── peer listener of their owner
//! heartbeat thread ── map, members ── view ── engine: what the map gives to this very process it serves
//! links ───────────── records, acknowledgements, copies of state ── engines of other workers
//! ```
//!
//! Invariants: nothing is executed on a partition that the store does not serve; a request is refused as a whole before any of its parts
//! is executed, or answered part by part; a request keeps its session when it is passed on; what was acknowledged survives
//! [`Worker::run`]'s end.
#![forbid(unsafe_code)]

mod admin;
mod admission;
mod batch;
mod bootstrap;
mod device;
mod drain;
mod edge;
mod engine;
mod epoch;
pub mod exit;
mod hands;
mod heartbeat;
mod listeners;
pub mod machine;
mod metrics;
mod modes;
mod options;
mod page;
mod part;
mod peers;
pub mod pod;
mod processors;
mod profile;
mod read;
mod recall;
mod rights;
mod roster;
mod runs;
mod service;
mod shared;
pub mod supervise;
mod testimony;
mod trouble;
mod view;
mod worker;
mod write;

pub use edge::{AllowAll, Authorizer, Principal};
pub use options::{Bootstrap, Listen, MapPlace, Options, Tls, TokenFiles};
pub use tonic::codegen::http::HeaderMap;
pub use worker::{Addresses, Error, Handle, Worker};
