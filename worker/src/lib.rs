//! One worker of a cluster: gRPC services over the store and the learning runs.
//!
//! Decides which requests are valid ([`engram_proto::columns`] checks them before memory is allocated), which parts are executed
//! here and which are forwarded to their primary (at most one hop), and when the worker is ready. The store decides what a record
//! does, the map who serves which partition.
//!
//! ```text
//! client listener ─┐                 ┌─ local parts ── engine (store) ── log, device
//! peer listener ───┴─ edge ─ service ┤
//! admin listener, socket             └─ other parts ── client library ── peer listener of their primary
//! heartbeat thread ── map, members ── view ── engine: serves the partitions that the map assigns to this process
//! links ───────────── records, acknowledgements, state transfers ── engines of other workers
//! ```
//!
//! Invariants: nothing is executed on a partition that the store does not serve; a request is rejected as a whole before any of its
//! parts is executed, or answered part by part; a forwarded request keeps its session; acknowledged writes survive the end of
//! [`Worker::run`].
#![forbid(unsafe_code)]

mod buffers;
mod engine;
mod groups;
mod lifecycle;
pub mod machine;
mod membership;
mod observability;
mod options;
mod peers;
pub mod pod;
mod runs;
mod service;
mod setup;
mod shared;
mod training;
mod write;

pub use lifecycle::worker::{Addresses, Error, Handle, Worker};
pub use lifecycle::{exit, supervise};
pub use observability::metrics;
pub use observability::panics::count_panics;
pub use options::{Bootstrap, Listen, LocalFiles, MapLocation, Options, Tls, TokenFiles};
pub use service::edge::{AllowAll, Authorizer, Principal};
pub use tonic::codegen::http::HeaderMap;
