//! The wire: types generated from `engram/v1/*.proto`, and their conversions to the types of `engram-memory`.
//!
//! Holds no logic: what a message means is decided by who receives it.
#![forbid(unsafe_code)]

pub mod answers;
pub mod columns;
mod credentials;
mod problem;
pub mod protocol;
pub mod split;

/// Types, clients and servers of the package `engram.v1`.
#[allow(missing_docs, clippy::all, unreachable_pub, rust_2018_idioms, unused_qualifications)]
pub mod v1 {
    tonic::include_proto!("engram.v1");
}

/// All messages and services, encoded, for the reflection service.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// Largest message that a client sends or gets, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 4 << 20;
/// Largest message between workers, in bytes.
pub const MAX_PEER_MESSAGE_BYTES: usize = 16 << 20;

/// Longest recording of a worker's devices, in milliseconds: a call lasts a minute at most.
pub const MAX_PROFILE_MS: u32 = 50_000;
/// Most spans of a device in a recording: what all devices of a worker did then fits a message.
pub const MAX_PROFILE_SPANS: u32 = 100_000;
/// Metadata key of the cluster id, 32 hex digits.
pub const CLUSTER_KEY: &str = "engram-cluster";
/// Metadata key of a [`v1::Problem`].
pub const PROBLEM_KEY: &str = "engram-problem-bin";
/// Metadata key of the W3C trace context.
pub const TRACE_KEY: &str = "traceparent";
