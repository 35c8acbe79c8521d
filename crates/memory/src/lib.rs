//! Domain types and rules of Engram: values and pure functions.
//!
//! Decides how weights change ([`law`]), how decay is kept as a clock ([`clock`]), which partition a memory belongs to and how
//! digests are computed ([`hash`]), the commands of a partition ([`command`]) and their replies ([`outcome`]), exactly-once
//! requests ([`session`]), the state of replay buffers ([`buffer`]), and how learning epochs and runs are numbered ([`epoch`], [`run`]). [`reference::Partition`] is the
//! slow, simple implementation of all of it; every other implementation is compared with it bit for bit.
//!
//! Invariants: no I/O, no clock, no randomness, no float in any state. Floats enter and leave only through [`edge`].
#![forbid(unsafe_code)]

pub mod buffer;
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

pub use buffer::BufferCommand;
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
/// Maximum payload of an item of a replay buffer in bytes: its head and its fields.
pub const MAX_ITEM_PAYLOAD_BYTES: usize = 4 << 20;
/// Largest feature dimension.
pub const MAX_DIMENSION: u32 = 4_096;
/// Most ids in one client message and in one log record.
pub const MAX_IDS: usize = 64 << 10;
/// Largest log record, in bytes; checked before allocation.
pub const MAX_RECORD_BYTES: usize = 8 << 20;
