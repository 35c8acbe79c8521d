//! The newest map that a worker has seen, kept on its own disk: what a lost map is made anew from.
//!
//! Never served from: only the map store says what holds.

use crate::file::{read, replace};
use crate::{Error, format};
use engram_cluster::PartitionMap;
use std::path::{Path, PathBuf};

/// A file beside the store of a worker.
#[derive(Debug, Clone)]
pub struct LastSeenMap {
    path: PathBuf,
}

impl LastSeenMap {
    /// Of the worker with this folder.
    pub fn of(folder: &Path) -> Self {
        Self { path: folder.join("map-seen.json") }
    }

    /// The newest map that this disk has seen; `None`: none.
    ///
    /// # Errors
    /// The file cannot be read, or is damaged: what was seen is not known then.
    pub fn read(&self) -> Result<Option<PartitionMap>, Error> {
        read(&self.path, format::decode)
    }

    /// Keeps `map` in place of an older one; durable when it returns.
    ///
    /// # Errors
    /// The disk refuses; the older one is there still.
    pub fn write(&self, map: &PartitionMap) -> Result<(), Error> {
        replace(&self.path, &format::encode(map))
    }
}
