//! The newest map that a worker has seen, on its own disk, from which a lost map can be rebuilt.
//!
//! It is never used otherwise: only the map store is authoritative.

use crate::file::{read, replace};
use crate::{Error, format};
use engram_cluster::PartitionMap;
use std::path::{Path, PathBuf};

/// A file next to the store of a worker.
#[derive(Debug, Clone)]
pub struct LastSeenMap {
    path: PathBuf,
}

impl LastSeenMap {
    /// Returns the file of the worker with this directory.
    pub fn of(folder: &Path) -> Self {
        Self { path: folder.join("map-seen.json") }
    }

    /// Reads the newest seen map, if any.
    ///
    /// # Errors
    /// Fails if the file cannot be read or is damaged.
    pub fn read(&self) -> Result<Option<PartitionMap>, Error> {
        read(&self.path, format::decode)
    }

    /// Replaces the map durably.
    ///
    /// # Errors
    /// Fails if the disk fails; the older map is kept.
    pub fn write(&self, map: &PartitionMap) -> Result<(), Error> {
        replace(&self.path, &format::encode(map))
    }
}
