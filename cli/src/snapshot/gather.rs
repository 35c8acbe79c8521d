//! Asks the workers of a running cluster for what they lead, until each partition is there once.
//!
//! A partition that changes hands meanwhile may be written by both of its primaries, or by none. Of two the later is taken, by term
//! and record; for those that are missing everybody is asked again.

use crate::local::admin;
use crate::route::Door;
use anyhow::{Context as _, Result};
use engram_memory::{Lsn, PartitionId, Term};
use engram_proto::v1;
use engram_store::snapshot_file;
use futures::future::join_all;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

/// How often everybody is asked, and how long it takes a partition to change hands.
const ROUNDS: u32 = 5;
const PAUSE: Duration = Duration::from_secs(1);

/// What was written of each partition.
#[derive(Debug, Default, PartialEq, Eq)]
struct Found(BTreeMap<PartitionId, (Term, Lsn)>);

impl Found {
    /// Takes what one worker says it wrote.
    fn take(&mut self, versions: &[v1::PartitionVersion]) {
        for version in versions {
            let found = (Term(version.term), Lsn(version.lsn));
            let kept = self.0.entry(PartitionId(version.partition)).or_insert(found);
            *kept = found.max(*kept);
        }
    }

    fn missing(&self, partitions: u32) -> Vec<u32> {
        (0..partitions).filter(|partition| !self.0.contains_key(&PartitionId(*partition))).collect()
    }

    /// The files, one for each partition.
    fn files(&self) -> Vec<String> {
        self.0.iter().map(|(partition, (_, lsn))| snapshot_file::name(*partition, *lsn)).collect()
    }
}

/// Has the workers write all partitions of a cluster into `folder`. Returns the names of the files; nothing else is in the folder then.
///
/// # Errors
/// A partition is served by nobody that answers; a worker cannot write; the folder cannot be read.
pub(crate) async fn gather(workers: &[Door], partitions: u32, folder: &Path) -> Result<Vec<String>> {
    let text = folder.to_str().with_context(|| format!("the path {} is not UTF-8", folder.display()))?;
    let mut found = Found::default();
    for round in 1.. {
        let mut failed = None;
        for reply in join_all(workers.iter().map(|worker| admin::snapshot(worker, text.to_owned()))).await {
            match reply {
                Ok(reply) => found.take(&reply.versions),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        let missing = found.missing(partitions);
        if missing.is_empty() {
            break;
        }
        if round == ROUNDS {
            return Err(failed.unwrap_or_else(|| anyhow::anyhow!("nobody serves partitions {missing:?}")));
        }
        tokio::time::sleep(PAUSE).await;
    }
    let files = found.files();
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
    fn of_a_partition_that_changed_hands_the_later_is_taken_and_one_that_nobody_wrote_is_missed() {
        let mut found = Found::default();
        found.take(&[version(0, 3, 90), version(2, 1, 5)]);
        found.take(&[version(0, 4, 80), version(2, 1, 4)]);
        assert_eq!(found.missing(4), [1, 3]);
        found.take(&[version(1, 1, 1), version(3, 1, 0)]);
        assert_eq!(found.missing(4), [] as [u32; 0]);
        let name = |partition, lsn| snapshot_file::name(PartitionId(partition), Lsn(lsn));
        assert_eq!(found.files(), [name(0, 80), name(1, 1), name(2, 5), name(3, 0)]);
    }
}
