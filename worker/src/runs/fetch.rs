//! Events of a run that lie in a storage for objects: fetched by whoever drives the run, into a file of its disk that goes with the driver.
//!
//! All of it is fetched before the first epoch, since the run is tied to what it began with (a driver that goes on elsewhere fetches and
//! compares), and since Parquet is read from its end. In memory there is a piece at a time.

use super::credentials;
use crate::shared::Shared;
use engram_api::{Code, ObjectPlace, Problem};
use engram_learn::run::{Fetch, Status, Unfetched};
use engram_learn::source::{Fetched, Origin};
use engram_memory::RunId;
use engram_objects::{Credentials, Error, Options};
use futures::future::BoxFuture;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How often the status says how far it is: nobody asks more often.
const PROGRESS: Duration = Duration::from_millis(250);

/// Fetches the events of one run.
pub(super) struct Storage {
    pub(super) shared: Arc<Shared>,
    pub(super) run: RunId,
    pub(super) place: ObjectPlace,
}

impl Fetch for Storage {
    fn fetch<'a>(&'a self, status: &'a watch::Sender<Status>) -> BoxFuture<'a, Result<Origin, Unfetched>> {
        Box::pin(async move {
            let fetched = self.get(status).await?;
            tracing::info!(run = %self.run, from = self.place.url, bytes = fetched.1, "fetched the input of a run");
            Ok(Origin::Fetched(Fetched::new(fetched.0)))
        })
    }
}

impl Storage {
    async fn get(&self, status: &watch::Sender<Status>) -> Result<(File, u64), Unfetched> {
        let ObjectPlace { url, endpoint, region, secret_ref } = &self.place;
        let keys = credentials::wait(&self.shared, self.run, secret_ref.as_ref(), status).await;
        let credentials = keys.map(Credentials::Keys);
        let options = Options { endpoint: endpoint.clone(), region: region.clone(), credentials };
        // A checked manifest names a file.
        let (place, name) = url.rsplit_once('/').unwrap_or((url, ""));
        let bucket = engram_snapshot::bucket(place, &options).map_err(|error| unusable(&error))?;
        let folder = &self.shared.options.state_dir;
        let unwritten = |error: &dyn std::fmt::Display| unreadable(url, &format!("failed to keep it here: {error}"));
        let (file, limit) = room(folder).map_err(|error| unwritten(&error))?;
        let writer = file.try_clone().map_err(|error| unwritten(&error))?;
        let mut told = Instant::now();
        status.send_modify(|status| status.message = format!("fetches {url}"));
        let progress = |bytes: u64, all: u64| {
            if told.elapsed() >= PROGRESS {
                told = Instant::now();
                status.send_modify(|status| status.message = format!("fetches {url}: {}", part(bytes, all)));
            }
        };
        let got = bucket.get_into(name, &mut tokio::fs::File::from_std(writer), folder, limit, progress).await;
        let bytes = got.map_err(|error| match error {
            Error::NotFound { object } if object == *url => unreadable(url, "it is not there"),
            Error::NotFound { object } => unreadable(url, &format!("{object} is not there")),
            Error::TooLong { limit, .. } => {
                let ordinal = self.shared.ordinal();
                let what =
                    format!("it is longer than {limit} bytes, half of what is free on the disk of worker {ordinal}");
                unreadable(url, &what)
            }
            error @ Error::File { .. } => unwritten(&format!("{:#}", anyhow::Error::new(error))),
            error => unusable(&engram_snapshot::failed(error)),
        })?;
        status.send_modify(|status| status.message.clear());
        Ok((file, bytes))
    }
}

/// A file without a name in a folder, and how long it may become: the rest of what is free is for the store.
fn room(folder: &Path) -> std::io::Result<(File, u64)> {
    let file = tempfile::tempfile_in(folder)?;
    let disk = nix::sys::statvfs::fstatvfs(&file)?;
    Ok((file, disk.blocks_available().saturating_mul(disk.fragment_size()) / 2))
}

/// How far it is, for people.
fn part(bytes: u64, all: u64) -> String {
    const MIB: u64 = 1 << 20;
    if all < MIB { format!("{bytes} of {all} bytes") } else { format!("{} of {} MiB", bytes / MIB, all.div_ceil(MIB)) }
}

fn unreadable(url: &str, what: &str) -> Unfetched {
    Unfetched { code: Code::SourceUnreadable.id(), message: format!("failed to read {url}: {what}") }
}

/// What the storage said, or the way to it.
fn unusable(error: &anyhow::Error) -> Unfetched {
    let code = error.downcast_ref::<Problem>().map_or(Code::StorageUnusable, Problem::code);
    let message = error.downcast_ref::<Problem>().map_or_else(|| format!("{error:#}"), |it| it.message().to_owned());
    Unfetched { code: code.id(), message }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_far_it_is_is_told_in_what_people_count_in_and_the_disk_is_never_filled() {
        assert_eq!(part(7, 90), "7 of 90 bytes");
        assert_eq!(part(3 << 20, (4 << 20) + 1), "3 of 5 MiB");
        let folder = tempfile::tempdir().unwrap();
        let (_, limit) = room(folder.path()).unwrap();
        let disk = nix::sys::statvfs::statvfs(folder.path()).unwrap();
        assert!(limit > 0 && limit < disk.blocks_available() * disk.fragment_size());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "it has no name");
    }
}
