//! Makes the workers of a running cluster write snapshots of their primaries until every partition is present once.
//!
//! During a change of primary, a partition may be written by both primaries or by none. Of two snapshots the later one is used, by
//! term and LSN; missing partitions are requested again.

use crate::local::admin;
use crate::route::Endpoint;
use anyhow::{Context as _, Result};
use engram_memory::{Lsn, PartitionId, Term};
use engram_proto::v1;
use engram_store::snapshot_file;
use futures::future::join_all;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

/// Number of requests, and the delay between them, which covers a change of primary.
const ROUNDS: u32 = 5;
const ROUND_DELAY: Duration = Duration::from_secs(1);

/// Latest snapshot of each partition.
#[derive(Debug, Default, PartialEq, Eq)]
struct Versions(BTreeMap<PartitionId, (Term, Lsn)>);

impl Versions {
    /// Adds the snapshots that a worker wrote.
    fn add(&mut self, versions: &[v1::PartitionVersion]) {
        for version in versions {
            let written = (Term(version.term), Lsn(version.lsn));
            let latest = self.0.entry(PartitionId(version.partition)).or_insert(written);
            *latest = written.max(*latest);
        }
    }

    fn missing(&self, partitions: u32) -> Vec<u32> {
        (0..partitions).filter(|partition| !self.0.contains_key(&PartitionId(*partition))).collect()
    }

    /// Returns the file names, one per partition.
    fn files(&self) -> Vec<String> {
        self.0.iter().map(|(partition, (_, lsn))| snapshot_file::name(*partition, *lsn)).collect()
    }
}

/// Makes the workers write all partitions of a cluster to `folder`, and removes all other files there. Returns the file names.
///
/// # Errors
/// A partition has no primary that responds, a worker fails to write, or the folder cannot be read.
pub(crate) async fn collect(
    workers: &[Endpoint],
    partitions: u32,
    folder: &Path,
    owner_key: &str,
) -> Result<Vec<String>> {
    let text = folder.to_str().with_context(|| format!("the path {} is not UTF-8", folder.display()))?;
    let mut collected = Versions::default();
    for round in 1.. {
        let mut first_error = None;
        let requests = workers.iter().map(|worker| admin::snapshot(worker, text.to_owned(), owner_key.to_owned()));
        for reply in join_all(requests).await {
            match reply {
                Ok(reply) => collected.add(&reply.versions),
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        let missing = collected.missing(partitions);
        if missing.is_empty() {
            break;
        }
        if round == ROUNDS {
            return Err(first_error.unwrap_or_else(|| anyhow::anyhow!("partitions without primary: {missing:?}")));
        }
        tokio::time::sleep(ROUND_DELAY).await;
    }
    let files = collected.files();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if !files.iter().any(|file| entry.file_name() == **file) {
            fs::remove_file(entry.path()).with_context(|| format!("failed to remove {}", entry.path().display()))?;
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(partition: u32, term: u64, lsn: u64) -> v1::PartitionVersion {
        v1::PartitionVersion { partition, term, lsn, lag_ms: None }
    }

    #[test]
    fn the_latest_snapshot_wins_and_missing_partitions_are_listed() {
        let mut collected = Versions::default();
        collected.add(&[version(0, 3, 90), version(2, 1, 5)]);
        collected.add(&[version(0, 4, 80), version(2, 1, 4)]);
        assert_eq!(collected.missing(4), [1, 3]);
        collected.add(&[version(1, 1, 1), version(3, 1, 0)]);
        assert_eq!(collected.missing(4), [] as [u32; 0]);
        let name = |partition, lsn| snapshot_file::name(PartitionId(partition), Lsn(lsn));
        assert_eq!(collected.files(), [name(0, 80), name(1, 1), name(2, 5), name(3, 0)]);
    }
}
