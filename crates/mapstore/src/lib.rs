//! Partition map stores: external storage of the map, changed only by compare-and-swap.
//!
//! A [`MapStore`] keeps one map, and replaces it if the expected version is current and every entry's change is legal. It makes no
//! decisions. A manual override of the rules goes in by
//! [`MapStore::overrule`] alone, and leaves a record that stays. [`FileStore`] keeps it in a file of the local state directory, which
//! the coordinator and the workers of a machine share; with the feature `kubernetes`, `KubernetesStore` keeps it in an API server.
//! [`MemoryStore`] keeps it for as long as it lives itself.
#![forbid(unsafe_code)]

mod file;
mod format;
mod goal;
#[cfg(feature = "kubernetes")]
mod kubernetes;
mod last_seen;
mod map_override;
mod memory;

pub use file::FileStore;
pub use goal::{Goal, Scale};
#[cfg(feature = "kubernetes")]
pub use kubernetes::{KubernetesStore, MapLocation, read_object};
pub use last_seen::LastSeenMap;
pub use map_override::{EntryOverride, MapOverride, OverrideKind, unless_superseded};
pub use memory::MemoryStore;

use engram_cluster::{IllegalChange, PartitionMap};
use engram_memory::{ClusterId, PartitionId};
use std::path::PathBuf;

/// Formats an error with its causes, without repetitions. The last cause of an API error has the server's message.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source()).map(ToString::to_string);
    causes.fold(error.to_string(), |text, cause| if text.contains(&cause) { text } else { format!("{text}: {cause}") })
}

/// Keeps the map of one cluster.
pub trait MapStore: Send + Sync {
    /// Reads the map; `None` if the cluster has none yet.
    ///
    /// # Errors
    /// Fails if the store cannot be read or does not hold a map of this cluster, which is never treated as a missing map.
    fn get(&self) -> Result<Option<PartitionMap>, Error>;

    /// Writes `map` if the current version is `expected` (`None`: if there is no map). Returns the stored map with its new version.
    ///
    /// # Errors
    /// [`Error::Conflict`] with the current map; [`Error::Illegal`]; or a failure of the store, after which it is unknown whether the
    /// map was written.
    fn compare_and_swap(&self, expected: Option<u64>, map: PartitionMap) -> Result<PartitionMap, Error>;

    /// Reads the goal; the default if none was set.
    ///
    /// # Errors
    /// As for [`MapStore::get`].
    fn goal(&self) -> Result<Goal, Error>;

    /// Replaces the goal. The last write wins: only the coordinator writes it.
    ///
    /// # Errors
    /// Fails if the store fails.
    fn set_goal(&self, goal: &Goal) -> Result<(), Error>;

    /// Reads the records of manual overrides, oldest first.
    ///
    /// # Errors
    /// As for [`MapStore::get`].
    fn overrides(&self) -> Result<Vec<MapOverride>, Error>;

    /// Writes `map` without checking that its changes are legal, if the current version is `expected` (`None`: if there is no map, or
    /// an unreadable one). Returns the stored map: its version is that of `map`, or the successor of the current one if that is
    /// higher. The record is durable before the map is: an override whose version no map ever had was not applied.
    ///
    /// # Errors
    /// As for [`MapStore::compare_and_swap`], but for [`Error::Illegal`].
    fn override_map(&self, expected: Option<u64>, map: PartitionMap, order: MapOverride)
    -> Result<PartitionMap, Error>;

    /// Returns whether calls may block on I/O: such calls run on a separate thread.
    fn may_wait(&self) -> bool {
        true
    }

    /// Returns what is known about writes by others, without I/O.
    fn change_state(&self) -> ChangeState {
        ChangeState::Unknown
    }
}

/// Knowledge about writes by others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeState {
    /// The store is not watched: the map must be read again.
    Unknown,
    /// No write was observed since the map was last read or written here.
    Unchanged,
    /// The map changed since it was last read or written here.
    Changed,
}

/// Error of a map store.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another writer changed the map.
    #[error("the map has version {}, not {expected:?}", .found.as_ref().map_or(0, |map| map.version))]
    Conflict {
        /// Expected version.
        expected: Option<u64>,
        /// Current map.
        found: Option<Box<PartitionMap>>,
    },
    /// The change breaks a rule of the map.
    #[error("illegal change of partition {partition}: {illegal}")]
    Illegal {
        /// First partition whose change is illegal.
        partition: PartitionId,
        /// The rule.
        illegal: IllegalChange,
    },
    /// Another process has held the lock for too long.
    #[error("{path} has been held by process {holder} for too long")]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// Process id of the holder, from the lock file.
        holder: String,
    },
    /// The map is of another cluster.
    #[error("{path} is the map of cluster {found}, not of {expected}")]
    OtherCluster {
        /// The file.
        path: PathBuf,
        /// This cluster.
        expected: ClusterId,
        /// The map's.
        found: ClusterId,
    },
    /// The map was written by a newer version.
    #[error("{path} has format version {found}; this version supports up to {known}")]
    NewerFormat {
        /// The file.
        path: PathBuf,
        /// Its format version.
        found: u32,
        /// Newest supported format version.
        known: u32,
    },
    /// The map is damaged. It is never replaced by an empty one.
    #[error("{path} is damaged: {why}; nothing was changed")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Description of the damage.
        why: String,
    },
    /// The store does not support the operation.
    #[error("{what} is not supported here: {instead}")]
    NotSupported {
        /// Requested operation.
        what: &'static str,
        /// Alternative.
        instead: &'static str,
    },
    /// The file system or the API server failed or did not respond.
    #[error("failed to {action} {path}")]
    Io {
        /// Attempted action.
        action: &'static str,
        /// File or object.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
}
