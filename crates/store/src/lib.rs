//! One machine's partitions: state machines over a device, a log under one sync, snapshots.
//!
//! Decides what a record does to slots and columns ([`Partitions`]), what is logged, repeated or refused before it, when
//! it is applied and answered, and what a restart recovers ([`Store`]). [`Engine`] runs a store on threads; a simulator runs the
//! same store on one, over a [`Disk`] and a [`Clock`] of its own. A replica of `engram-cluster` decides for each partition what is
//! committed and served; what it says to others goes out by [`Peers`]. Knows nothing of networks or tokio.
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
//! Invariants: the state is a function of the log alone, equal on every machine, device and number of threads; nothing is
//! answered before it is as durable as the mode says; what was answered is there after any crash; damage is told from a
//! torn write, named, and never served.
#![forbid(unsafe_code)]

mod answers;
mod apply;
mod arena;
mod background;
mod clock;
mod columns;
mod confirm;
mod content;
mod copy;
mod decline;
pub mod disk;
mod engine;
mod error;
mod format;
mod gather;
mod identity;
mod index;
mod lagging;
pub mod leases;
mod partition;
mod partitions;
pub mod peer;
mod propose;
mod recover;
mod repartition;
pub mod replication;
pub mod restore;
mod scrub;
mod ship;
pub mod snapshot_file;
mod stats;
mod store;
mod throttle;
mod verify;
pub mod wal;

pub use answers::{ActivateError, Committed, WriteError};
pub use background::SnapshotInfo;
pub use clock::{Clock, ManualClock, SystemClock};
pub use confirm::Unconfirmed;
pub use content::{Column, Content, ImportError};
pub use disk::{Disk, FileDisk, SimDisk};
pub use engine::{Engine, Handle, Overloaded, Stepped, Unreadable};
pub use error::{Error, abort_on_sync_failure};
pub use format::FileHead;
pub use identity::{Identity, Origin};
pub use lagging::Copied;
pub use partitions::{Coverage, Memory, Partitions, Ranked, Recalled};
pub use peer::{Alone, Peers};
pub use recover::Recovery;
pub use repartition::Repartition;
pub use replication::ReplicaStatus;
pub use snapshot_file::{SnapshotHead, SnapshotReader, SnapshotWriter};
pub use stats::{Distribution, Stats};
pub use store::{Options, Store};
pub use wal::{Durability, Wal};
