//! The vocabulary and the laws of Engram: values and pure functions, nothing else.
//!
//! Decides how a weight changes ([`law`]), how decay is kept as a clock ([`clock`]), where a memory lives and how
//! a store is fingerprinted ([`hash`]), what a partition can be told to do ([`command`]) and what it answers
//! ([`outcome`]), who may do it once ([`session`]), and how learning epochs and runs are numbered ([`epoch`],
//! [`run`]). [`reference::Partition`] is the slow, obvious implementation of all of it; every other one is compared
//! with it bit for bit.
//!
//! Invariants: no I/O, no clock, no randomness, no float in any state. Floats enter and leave by the functions of
//! [`edge`] alone.
#![forbid(unsafe_code)]

pub mod clock;
pub mod codec;
pub mod command;
pub mod edge;
pub mod epoch;
pub mod hash;
mod ids;
pub mod law;
pub mod ledger;
pub mod outcome;
pub mod quality;
pub mod reference;
pub mod run;
pub mod session;
mod settings;

pub use clock::DecayClock;
pub use command::{Blobs, Command, OnMissing, Record, Updates, Upsert};
pub use hash::{Digest, key_id, mix64, partition_of};
pub use ids::{
    ClusterId, Group, Incarnation, LearningEpoch, Lsn, Member, MemoryId, Ordinal, PartitionId, RunId, StoreId, Term,
};
pub use law::{ONE, Weight};
pub use ledger::Ledger;
pub use outcome::{Outcome, Refusal, Rejection, RejectionReason, Reply};
pub use quality::{GroupQuality, Histogram, QualityVector};
pub use session::{Request, SessionId};
pub use settings::{CapacityPolicy, FeatureShape, FeatureType, Law, MAX_PARTITIONS, Settings, Shape};

/// Longest key, in bytes.
pub const MAX_KEY_BYTES: usize = 1_024;
/// Largest payload of a memory, in bytes.
pub const MAX_PAYLOAD_BYTES: usize = 64 << 10;
/// Largest feature dimension.
pub const MAX_DIMENSION: u32 = 4_096;
/// Most ids in one client message and in one log record.
pub const MAX_IDS: usize = 64 << 10;
/// Largest log record, in bytes; checked before memory is taken for it.
pub const MAX_RECORD_BYTES: usize = 8 << 20;
