//! Client library for Engram clusters: knows the partition map and sends requests directly to the primaries.
//!
//! Decides how a batch is split (by partition, in order, in bounded parts), when a request is retried (with the same
//! sequence number, to the current primary), and when it fails (at its deadline, never before, with a typed outcome:
//! [`Error::OutcomeUnknown`] if a write may or may not have been applied).
//!
//! - [`Client`] reads: [`Client::get`], [`Client::scan`], [`Client::rank`], [`Client::top`], [`Client::quality`],
//!   [`Client::digest`]; learns: [`Client::learn_epoch`], [`Client::broadcast_quality`]; and manages runs:
//!   [`Client::submit_run`] and others.
//! - [`Session`] writes, each request exactly once.
//!
//! Invariants: one call per worker, never one per partition; every call has a deadline; every queue has a bound;
//! retries are at most a tenth of the traffic above a floor; a read over several partitions covers every partition
//! exactly once or is repeated.
//!
//! ```no_run
//! # async fn example() -> Result<(), engram_client::Error> {
//! use engram_client::{Client, Options, Rows, Signals, Updates};
//! use engram_memory::MemoryId;
//!
//! let client = Client::connect(Options::new(["127.0.0.1:7443"])).await?;
//! let session = client.session();
//! let ids: Vec<_> = (0..1_000).map(MemoryId).collect();
//! session.upsert(Rows { ids: ids.clone(), ..Rows::default() }).await?;
//! session.reinforce(Updates { ids, signals: Signals::Quality(0.9), ..Updates::default() }).await?;
//! for memory in client.top(10, None).await? {
//!     println!("{} {}", memory.id, memory.weight);
//! }
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod buffer;
mod call;
mod client;
mod epoch;
mod error;
mod federated;
pub mod group;
mod limit;
mod map;
mod message;
mod network;
mod options;
mod plain;
mod pool;
mod rank;
mod read;
mod recall;
mod replica_reads;
mod retry;
mod rows;
mod runs;
mod session;
mod tasks;
mod token;
mod turn;
mod window;
mod write;

pub use buffer::{
    Appended, Batch, Buffer, BufferDescription, BufferSpec, BufferStats, Changed, Column, ConsumerStats,
    DeclarationProblem, Fields, Items, Sample, SampleBy,
};
pub use call::Service;
pub use client::Client;
pub use engram_memory::buffer::Remover;
pub use engram_replay::limiter::Settings as RateLimit;
pub use engram_replay::schema::{DType, Field};
pub use epoch::{EpochReport, EpochUpdates};
pub use error::{Error, PartFailure};
pub use limit::within;
pub use map::{Map, Placement, Worker};
pub use network::{Dial, Network, Stream, StreamOpener};
pub use options::{Options, OwnerKey, Plane, ReadMode};
pub use rank::{RankOptions, Ranking};
pub use read::{DigestResult, GetOptions, GetResult, GetStream, Quality, QualityOptions, Scan};
pub use recall::{RecallMatch, RecallOptions};
pub use retry::RetryBudget;
pub use rows::{GroupSignal, Memory, Rows, Signals, Updates};
pub use runs::{Watch, run_id};
pub use session::{Session, WriteOutcome};
pub use tasks::TaskCall;
pub use token::Token;
pub use write::{Version, WriteResult};
