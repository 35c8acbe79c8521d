//! Snapshots of a whole cluster: what one consists of, where it lies, and whether it is right.
//!
//! Knows nothing of who makes one or what is made of it. Invariants: a snapshot is there when its manifest is, and not before; every
//! byte of it is under a checksum; whatever is wrong is told by the name of the file.
#![forbid(unsafe_code)]

mod folder;
mod manifest;
mod place;

pub use folder::Folder;
pub use manifest::{Entry, FILE_NAME, Manifest, Of, open, shape_of, unusable};
pub use place::{Place, bucket, download, failed, upload};
