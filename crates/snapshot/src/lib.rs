//! Snapshots of a whole cluster: manifest, location and verification.
//!
//! Knows nothing of the processes that create or restore snapshots. Invariants: a snapshot exists once its manifest does, and not
//! before; every byte of it is covered by a checksum; errors name the damaged file.
#![forbid(unsafe_code)]

mod folder;
mod location;
mod manifest;

pub use folder::Folder;
pub use location::{Location, bucket, download, storage_error, upload};
pub use manifest::{Entry, FILE_NAME, Manifest, SourceCluster, open, shape_of, unusable};
