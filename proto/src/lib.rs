//! The wire: types generated from `engram/v1/*.proto`, and their conversions to the types of `engram-memory`.
//!
//! Holds no logic: the receiver decides what a message means.
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

/// Types, clients and servers of the package `externalscaler`, which is KEDA's.
#[allow(missing_docs, clippy::all, unreachable_pub, rust_2018_idioms, unused_qualifications)]
pub mod keda {
    tonic::include_proto!("externalscaler");
}

/// All messages and services, encoded, for the reflection service.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// Maximum size of a message that a client sends or receives, in bytes: one item of the maximum size in a batch that is not full.
pub const MAX_MESSAGE_BYTES: usize = (4 << 20) + (768 << 10);
/// Maximum size of a message between workers, in bytes.
pub const MAX_PEER_MESSAGE_BYTES: usize = 16 << 20;

/// Maximum duration of a device profile, in milliseconds: a call lasts at most one minute.
pub const MAX_PROFILE_MS: u32 = 50_000;
/// Maximum number of spans per device in a profile, so that the profile of a worker fits one message.
pub const MAX_PROFILE_SPANS: u32 = 100_000;
/// Metadata key of the cluster id, 32 hex digits.
pub const CLUSTER_KEY: &str = "engram-cluster";
/// Metadata key of a [`v1::Problem`].
pub const PROBLEM_KEY: &str = "engram-problem-bin";
/// Metadata key of the W3C trace context.
pub const TRACE_KEY: &str = "traceparent";
