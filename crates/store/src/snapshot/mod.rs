//! Snapshots: their files, the background work that writes and scrubs them, recovery from them.

pub(crate) mod background;
pub mod file;
pub(crate) mod job;
pub(crate) mod recovery;
pub(crate) mod repartition;
pub mod restore;
pub(crate) mod scrub;

pub use file as snapshot_file;
pub use file::{SnapshotHead, SnapshotReader, SnapshotWriter};
pub use job::SnapshotInfo;
pub use recovery::Recovery;
pub use repartition::Repartition;
