//! Where the partition map lives: an external store that changes it by compare-and-swap alone.
//!
//! A [`MapStore`] keeps one map, hands it out, and replaces it when the version that the writer saw is still the one there
//! and every entry's change is legal. It decides nothing. What a person ordered against the rules goes in by
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

/// What went wrong, with what it was caused by, each said once: an API server says in the last cause what it has against a map.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source()).map(ToString::to_string);
    causes.fold(error.to_string(), |text, cause| if text.contains(&cause) { text } else { format!("{text}: {cause}") })
}

/// Keeps the map of one cluster.
pub trait MapStore: Send + Sync {
    /// Reads the map; `None` when the cluster has none yet.
    ///
    /// # Errors
    /// The store cannot be read, or holds what is not a map of this cluster: never taken for "no map".
    fn get(&self) -> Result<Option<PartitionMap>, Error>;

    /// Writes `map` if the version there is still `expected` (`None`: if there is no map), and returns what is then stored,
    /// with the version that follows.
    ///
    /// # Errors
    /// [`Error::Conflict`] with the map that is there; [`Error::Illegal`]; or the store failed, and whether it was written is
    /// unknown until it is read again.
    fn compare_and_swap(&self, expected: Option<u64>, map: PartitionMap) -> Result<PartitionMap, Error>;

    /// Reads what people ordered; nothing when they have not.
    ///
    /// # Errors
    /// As for [`MapStore::get`].
    fn goal(&self) -> Result<Goal, Error>;

    /// Replaces what people ordered. The last one wins: only the coordinator writes it.
    ///
    /// # Errors
    /// The store failed.
    fn set_goal(&self, goal: &Goal) -> Result<(), Error>;

    /// Reads what people ordered against the rules, oldest first.
    ///
    /// # Errors
    /// As for [`MapStore::get`].
    fn overrides(&self) -> Result<Vec<MapOverride>, Error>;

    /// Writes `map` against the rules, since a person ordered it, if the version there is still `expected` (`None`: if there is
    /// no map, or one that nobody can read), and returns what is then stored: its version is that of `map`, or the one that
    /// follows what is there if that is higher. The record of the order is durable before the map is: an order whose version
    /// no map ever had was not carried out.
    ///
    /// # Errors
    /// As for [`MapStore::compare_and_swap`], but for [`Error::Illegal`].
    fn override_map(&self, expected: Option<u64>, map: PartitionMap, order: MapOverride)
    -> Result<PartitionMap, Error>;

    /// Whether a call may take long, as where it goes to a disk or over a network: such calls get a thread of their own.
    fn may_wait(&self) -> bool {
        true
    }

    /// What is known of writes by others without asking.
    fn change_state(&self) -> ChangeState {
        ChangeState::Unknown
    }
}

/// What a store was told of writes by others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeState {
    /// Nobody tells it: only who reads again knows.
    Unknown,
    /// Nobody has written since the map was read or written here, or has a moment ago.
    Unchanged,
    /// There is another map than the one that was read or written here last.
    Changed,
}

/// Why a map was not read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Somebody else wrote in between.
    #[error("the map has version {}, not {expected:?}", .found.as_ref().map_or(0, |map| map.version))]
    Conflict {
        /// Version that was expected.
        expected: Option<u64>,
        /// What is there.
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
    /// Another process has been writing for too long: it is stopped, or the disk is.
    #[error("{path} has been held by process {holder} for too long")]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// Who holds it, as it wrote there itself.
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
    /// It was written by a newer version.
    #[error("{path} has format version {found}; this version knows up to {known}")]
    NewerFormat {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The newest known.
        known: u32,
    },
    /// It is damaged. A map is never replaced by an empty one.
    #[error("{path} is damaged: {why}; nothing was changed")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        why: String,
    },
    /// Such a store has no place for it.
    #[error("{what} is not supported here: {instead}")]
    NotSupported {
        /// What was asked for.
        what: &'static str,
        /// What to do instead.
        instead: &'static str,
    },
    /// The file system or the API server refused, or did not answer.
    #[error("failed to {action} {path}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
}
