//! Disk space in reserve: a store on a full disk still starts and serves reads.
//!
//! A start writes the identity, a log segment, and what partitions log when they are served. The reserve is released for that, and
//! taken again afterwards, as far as there is space.

use crate::{Disk, Error};

/// Name of the file that holds the space.
const FILE_NAME: &str = "reserve";

/// Releases the space.
///
/// # Errors
/// Those of the disk.
pub(crate) fn release(disk: &dyn Disk) -> Result<(), Error> {
    match disk.remove(FILE_NAME) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::Io { operation: "remove", path: disk.describe(FILE_NAME), source })
        }
        _ => Ok(()),
    }
}

/// Takes `bytes`, or half of them as often as needed; false if the disk is too full for all of them. Not durable: after a crash there
/// is a reserve or its space.
pub(crate) fn refill(disk: &dyn Disk, bytes: u64) -> bool {
    let sizes = std::iter::successors(Some(bytes), |bytes| Some(bytes / 2)).take_while(|bytes| *bytes > 0);
    for size in sizes {
        let taken = disk.create(FILE_NAME).and_then(|file| file.preallocate(size));
        if taken.is_ok() {
            return size == bytes;
        }
        // A file that remains is removed at the next start.
        let _ = disk.remove(FILE_NAME);
    }
    bytes == 0
}
