//! Input files in object storage: downloaded by the run's driver into an unnamed file, which is deleted with the driver.
//!
//! The whole file is downloaded before the first epoch, because the run is tied to its content (a driver that continues elsewhere
//! downloads it again and compares), and because Parquet is read from its end. Memory holds one chunk at a time.

use crate::runs::credentials;
use crate::shared::Shared;
use engram_api::{Code, ObjectLocation, Problem};
use engram_learn::run::{FetchError, Fetcher, Status};
use engram_learn::source::{FetchedFile, Origin};
use engram_memory::RunId;
use engram_objects::{Credentials, Error, Options};
use futures::future::BoxFuture;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Interval of progress updates: clients do not poll more often.
const PROGRESS: Duration = Duration::from_millis(250);

/// Downloads the input of one run.
pub(in crate::runs) struct ObjectFetcher {
    pub(in crate::runs) shared: Arc<Shared>,
    pub(in crate::runs) run: RunId,
    pub(in crate::runs) location: ObjectLocation,
}

impl Fetcher for ObjectFetcher {
    fn fetch<'a>(&'a self, status: &'a watch::Sender<Status>) -> BoxFuture<'a, Result<Origin, FetchError>> {
        Box::pin(async move {
            let (file, bytes) = self.get(status).await?;
            tracing::info!(run = %self.run, from = self.location.url, bytes, "downloaded run input");
            Ok(Origin::Fetched(FetchedFile::new(file)))
        })
    }
}

impl ObjectFetcher {
    async fn get(&self, status: &watch::Sender<Status>) -> Result<(File, u64), FetchError> {
        let ObjectLocation { url, endpoint, region, secret_ref } = &self.location;
        let keys = credentials::wait(&self.shared, self.run, secret_ref.as_ref(), status).await;
        let credentials = keys.map(Credentials::Keys);
        let options = Options {
            endpoint: endpoint.clone(),
            region: region.clone(),
            credentials,
            endpoint_owner: crate::runs::endpoint_owner(&self.shared),
        };
        // A validated manifest names a file.
        let (location, name) = url.rsplit_once('/').unwrap_or((url, ""));
        let bucket = engram_snapshot::bucket(location, &options).map_err(|error| unusable(&error))?;
        let folder = &self.shared.setup.options.state_dir;
        let write_error =
            |error: &dyn std::fmt::Display| unreadable(url, &format!("failed to write it to disk: {error}"));
        let (file, limit) = scratch_file(folder).map_err(|error| write_error(&error))?;
        let writer = file.try_clone().map_err(|error| write_error(&error))?;
        let mut last_update = Instant::now();
        status.send_modify(|status| status.message = format!("fetching {url}"));
        let progress = |bytes: u64, all: u64| {
            if last_update.elapsed() >= PROGRESS {
                last_update = Instant::now();
                status.send_modify(|status| status.message = format!("fetching {url}: {}", progress_text(bytes, all)));
            }
        };
        let result = bucket.get_into(name, &mut tokio::fs::File::from_std(writer), folder, limit, progress).await;
        let bytes = result.map_err(|error| match error {
            Error::NotFound { object } if object == *url => unreadable(url, "not found"),
            Error::NotFound { object } => unreadable(url, &format!("{object} not found")),
            Error::TooLong { limit, .. } => {
                let ordinal = self.shared.ordinal();
                let what =
                    format!("it is longer than {limit} bytes, half of what is free on the disk of worker {ordinal}");
                unreadable(url, &what)
            }
            error @ Error::File { .. } => write_error(&format!("{:#}", anyhow::Error::new(error))),
            error => unusable(&engram_snapshot::storage_error(error)),
        })?;
        status.send_modify(|status| status.message.clear());
        Ok((file, bytes))
    }
}

/// Creates an unnamed file in a folder. Returns it with its maximum length: the rest of the free space is for the store.
fn scratch_file(folder: &Path) -> std::io::Result<(File, u64)> {
    let file = tempfile::tempfile_in(folder)?;
    let disk = nix::sys::statvfs::fstatvfs(&file)?;
    Ok((file, disk.blocks_available().saturating_mul(disk.fragment_size()) / 2))
}

/// Formats the progress.
fn progress_text(bytes: u64, all: u64) -> String {
    const MIB: u64 = 1 << 20;
    if all < MIB { format!("{bytes} of {all} bytes") } else { format!("{} of {} MiB", bytes / MIB, all.div_ceil(MIB)) }
}

fn unreadable(url: &str, what: &str) -> FetchError {
    FetchError { code: Code::SourceUnreadable.id(), message: format!("failed to read {url}: {what}") }
}

/// Converts an error of the storage, or of the connection to it.
fn unusable(error: &anyhow::Error) -> FetchError {
    let code = error.downcast_ref::<Problem>().map_or(Code::StorageUnusable, Problem::code);
    let message = error.downcast_ref::<Problem>().map_or_else(|| format!("{error:#}"), |it| it.message().to_owned());
    FetchError { code: code.id(), message }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_readable_and_the_disk_is_never_filled() {
        assert_eq!(progress_text(7, 90), "7 of 90 bytes");
        assert_eq!(progress_text(3 << 20, (4 << 20) + 1), "3 of 5 MiB");
        let folder = tempfile::tempdir().unwrap();
        let (_, limit) = scratch_file(folder.path()).unwrap();
        let disk = nix::sys::statvfs::statvfs(folder.path()).unwrap();
        assert!(limit > 0 && limit < disk.blocks_available() * disk.fragment_size());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "the file has no name");
    }
}
