//! Where the partition map lives: an external store that changes it by compare-and-swap alone.
//!
//! A [`MapStore`] keeps one map, hands it out, and replaces it when the version that the writer saw is still the one there
//! and every entry's change is legal. It decides nothing. [`FileStore`] keeps it in a file of the local state directory.
#![forbid(unsafe_code)]

mod file;
mod format;

pub use file::FileStore;

use engram_cluster::{Illegal, PartitionMap};
use engram_memory::{ClusterId, PartitionId};
use std::path::PathBuf;

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
        illegal: Illegal,
    },
    /// Another process holds the map.
    #[error("{path} is in use by process {holder}")]
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
    /// The map was written by a newer version.
    #[error("{path} has format version {found}; this version knows up to {known}")]
    NewerFormat {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The newest known.
        known: u32,
    },
    /// The map is damaged. It is never replaced by an empty one.
    #[error("{path} is damaged: {why}; restore it from a copy, nothing was changed")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        why: String,
    },
    /// The file system refused.
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
