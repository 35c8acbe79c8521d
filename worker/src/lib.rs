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

mod accept;
mod activation;
mod admin;
mod admission;
mod authorization;
mod batch;
mod bootstrap;
mod buffers;
mod call_body;
mod cluster_view;
mod coordinator_addresses;
mod cpu_pressure;
mod device;
mod disk_space;
mod drain;
mod edge;
mod engine;
mod epoch;
pub mod exit;
mod failovers;
mod gpu_fault;
mod groups;
mod heartbeat;
mod http;
mod listeners;
mod local_files;
pub mod machine;
mod map_state;
pub mod metrics;
mod options;
mod panics;
mod partition_write;
mod peers;
pub mod pod;
mod profile;
mod read;
mod read_consistency;
mod recall;
mod runs;
mod service;
mod shared;
mod stalls;
pub mod supervise;
mod training;
mod worker;
mod write;

pub use edge::{AllowAll, Authorizer, Principal};
pub use options::{Bootstrap, Listen, LocalFiles, MapLocation, Options, Tls, TokenFiles};
pub use panics::count_panics;
pub use tonic::codegen::http::HeaderMap;
pub use worker::{Addresses, Error, Handle, Worker};
