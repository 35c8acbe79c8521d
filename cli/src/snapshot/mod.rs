//! Snapshots of local clusters: creation, and restore to a state directory.

mod collect;
mod restore;

pub(crate) use collect::collect;
pub(crate) use restore::{Backup, Destination, restore};

use crate::local::state::{Cluster, FORMAT};
use anyhow::Context as _;
use engram_snapshot::Manifest;
use std::path::{Path, PathBuf};

/// Options of object storage.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Object storage options")]
pub(crate) struct StorageOptions {
    /// Endpoint of an S3-compatible storage [default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or AWS]
    #[arg(long, value_name = "URL")]
    s3_endpoint: Option<String>,
    /// Region [default: AWS_REGION, AWS_DEFAULT_REGION, or us-east-1]
    #[arg(long, value_name = "NAME")]
    s3_region: Option<String>,
    /// Folder with files accessKeyId and secretAccessKey [default: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY]
    #[arg(long, value_name = "DIR")]
    s3_credentials: Option<PathBuf>,
}

impl StorageOptions {
    pub(crate) fn options(self) -> engram_objects::Options {
        let Self { s3_endpoint: endpoint, s3_region: region, s3_credentials: credentials } = self;
        let credentials = credentials.map(engram_objects::Credentials::Folder);
        engram_objects::Options { endpoint, region, credentials, ..engram_objects::Options::default() }
    }
}

/// Returns the cluster of a snapshot, for a new state directory.
pub(crate) fn cluster_of(manifest: &Manifest) -> anyhow::Result<Cluster> {
    let cluster = Cluster {
        format_version: FORMAT,
        cluster: manifest.cluster.clone(),
        name: manifest.cluster_name.clone(),
        memories: manifest.memories,
        spec: serde_json::from_value(manifest.spec.clone())
            .context("the cluster specification in the snapshot is not supported by this version")?,
    };
    cluster.id().map(|_| cluster)
}

/// Returns the folder of snapshots in a state directory.
pub(crate) fn folder(state_dir: &Path) -> PathBuf {
    state_dir.join("snapshots")
}

/// Formats milliseconds since 1970 as RFC 3339 in UTC, in seconds.
pub(crate) fn rfc3339(ms: u64) -> String {
    let (seconds, days) = (ms / 1_000 % 86_400, ms / 86_400_000);
    // Gregorian calendar in eras of 400 years that start on 1 March (Hinnant, chrono-compatible date algorithms).
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    #[test]
    fn dates_follow_the_gregorian_calendar() {
        for (ms, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399_999, "2000-02-28T23:59:59Z"),
            (951_782_400_000, "2000-02-29T00:00:00Z"),
            (1_795_281_135_000, "2026-11-21T17:12:15Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(super::rfc3339(ms), text);
        }
    }
}
