//! Storage of one worker: partition state machines over a device, one write-ahead log, snapshots.
//!
//! Decides how records change slots and columns ([`Partitions`]); which records are logged, deduplicated or rejected, when they
//! are applied and answered, and what a restart recovers ([`Store`]). [`Engine`] runs a store on threads; a simulator runs the same
//! store on one thread over its own [`Disk`] and [`Clock`]. A replica of `engram-cluster` decides for each partition what is
//! committed and served; its messages are sent through [`Peers`]. Uses neither networks nor tokio.
//!
//! ```
//! use engram_kernels::Cpu;
//! use engram_memory::{ClusterId, Command, FeatureShape, Law, MemoryId, PartitionId, Record, Settings, Shape, Term, Upsert};
//! use engram_store::{ManualClock, Options, SimDisk, Store};
//! use std::sync::Arc;
//!
//! let shape = Shape { partitions: 1, law: Law::Linear, features: FeatureShape::NONE };
//! let options = Options::new(ClusterId(1), shape, Settings::default());
//! let (disk, clock) = (Arc::new(SimDisk::new(1)), Arc::new(ManualClock::new(0)));
//! let (mut store, _) = Store::open(disk, clock, Box::new(Cpu::new(1)), options)?;
//! store.activate(vec![(PartitionId(0), Term(1))], |_| {});
//! store.turn()?;
//! let upsert = Command::Upsert(Upsert { ids: vec![MemoryId(7)], ..Upsert::default() });
//! store.write(vec![(PartitionId(0), Record::bare(upsert))], |answers| assert!(answers[0].is_ok()));
//! store.turn()?;
//! assert_eq!(store.partitions().memories(), 1);
//! # Ok::<(), engram_store::Error>(())
//! ```
//!
//! Invariants: the state is a function of the log alone, equal on every machine, device and number of threads; no record is
//! answered before it is as durable as the mode requires; answered records survive any crash; damage is distinguished from a torn
//! write, reported, and never served.
#![forbid(unsafe_code)]

mod clock;
mod context;
pub mod disk;
mod engine;
mod error;
mod format;
mod identity;
mod options;
mod payload;
pub mod replication;
mod serving;
mod session_clock;
mod snapshot;
mod state;
mod stats;
pub mod wal;

pub use clock::{Clock, ManualClock, SystemClock};
pub use disk::{Disk, FileDisk, SimDisk};
pub use engine::{
    ActivateError, CommittedWrite, Engine, Handle, MissingLease, Overload, SteppedEngine, Store, WriteError,
};
pub use error::{Error, abort_on_sync_failure};
pub use format::FileHead;
pub use identity::{Identity, Origin};
pub use options::Options;
pub use payload::StoredPayload;
pub use replication::{ConfirmError, NoPeers, Peers, ReplicaPosition, ReplicaStatus, leases, peer};
pub use session_clock::SessionClock;
pub use snapshot::{
    Recovery, Repartition, SnapshotHead, SnapshotInfo, SnapshotReader, SnapshotWriter, restore, snapshot_file,
};
pub use state::{
    ByAge, Column, Content, Coverage, DrawnItem, ImportError, ItemSums, Memory, Partitions, PayloadPart, RankedMemory,
    RecalledMemory, Sampler, Trajectory,
};
pub use stats::{Distribution, Stats};
pub use wal::{Durability, Wal};
