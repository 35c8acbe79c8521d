//! (head to be written)

mod apply;
mod arena;
mod clock;
mod columns;
mod content;
pub mod disk;
mod error;
mod format;
mod identity;
mod partition;
mod partitions;
pub mod snapshot_file;
pub mod wal;

pub use clock::{Clock, ManualClock, SystemClock};
pub use content::{Column, Content, ImportError};
pub use disk::{Disk, FileDisk, SimDisk};
pub use error::{Error, abort_on_sync_failure};
pub use format::FileHead;
pub use identity::{Identity, Origin};
pub use partitions::{Coverage, Memory, Partitions, Ranked};
pub use snapshot_file::{SnapshotHead, SnapshotReader, SnapshotWriter};
pub use wal::{Durability, Wal};
