//! Pins a run to its input: a driver that resumes it must read the same data.

use crate::source::{EventsOptions, SourceError, SourceOptions, StopFlag};
use std::io::{self, Read as _};
use xxhash_rust::xxh3::Xxh3;

/// Resolves references that may move (a git revision becomes its commit) and identifies the content of files.
///
/// # Errors
/// The input cannot be read.
pub(super) fn pin(source: &SourceOptions, stop: &StopFlag) -> Result<(SourceOptions, String), SourceError> {
    match source {
        SourceOptions::Example(_) => Ok((source.clone(), "built in".to_owned())),
        SourceOptions::Synthetic(_) => Ok((source.clone(), "generated".to_owned())),
        SourceOptions::Events(events) => {
            let content = fingerprint(events, stop)
                .map_err(|error| SourceError::Unreadable { path: events.path.clone(), cause: error.to_string() })?;
            Ok((source.clone(), content))
        }
        SourceOptions::Git(git) => {
            let commit = crate::source::resolve_git(git)?;
            let mut pinned = git.clone();
            pinned.revision = commit.clone();
            Ok((SourceOptions::Git(pinned), commit))
        }
    }
}

/// Length and XXH3-128 of a file.
fn fingerprint(events: &EventsOptions, stop: &StopFlag) -> io::Result<String> {
    let mut file = events.open()?;
    let mut hasher = Xxh3::new();
    let mut buffer = vec![0; 1 << 20];
    let mut length = 0_u64;
    loop {
        if stop.is_set() {
            return Err(io::Error::other("the read was stopped"));
        }
        match file.read(&mut buffer)? {
            0 => return Ok(format!("{length} bytes, {:032x}", hasher.digest128())),
            read => {
                hasher.update(&buffer[..read]);
                length += read as u64;
            }
        }
    }
}
