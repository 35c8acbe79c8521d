//! Locations of snapshots: object storage or a volume.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::objects::{SecretRef, is_part};

/// Pattern of a folder in a volume; of a run its last part may be `{name}`.
pub(crate) const PATTERN: &str = "^([A-Za-z0-9_-][A-Za-z0-9._-]*/)*([A-Za-z0-9_-][A-Za-z0-9._-]*|[{]name[}])$";
/// Description of [`PATTERN`] for error messages.
pub(crate) const ALLOWED: &str = "a folder relative to the root of the volume, with A-Z, a-z, 0-9, -, _ and . between its slashes, and no \
     leading dot";
/// Placeholder for the name of the run.
pub(crate) const NAME: &str = "{name}";

/// Location of a snapshot: `url` in S3-compatible object storage, or `path` in a `volume`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SnapshotLocation {
    /// Bucket and prefix of the snapshot's objects. In a run the last part may be `{name}`, the name of the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024), extend("format" = "engram-s3"), example = &"s3://backups/words/monday")]
    pub url: Option<String>,

    /// With `url`: endpoint of the storage, such as `http://minio.storage:9000`; absent means the environment of the workers, else
    /// AWS. `http://` is unencrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024), extend("format" = "engram-endpoint"))]
    pub endpoint: Option<String>,

    /// With `url`: region; absent means the environment of the workers, else `us-east-1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64), extend("format" = "engram-region"))]
    pub region: Option<String>,

    /// With `url`: credentials, a Secret in the same namespace with the keys `accessKeyId`, `secretAccessKey` and optionally
    /// `sessionToken`; absent, and always in local mode, means the environment of the workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-only" = true))]
    pub secret_ref: Option<SecretRef>,

    /// On Kubernetes, instead of `url`: entry of the cluster's `spec.snapshotVolumes` that holds the snapshot at `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "engram-name"))]
    pub volume: Option<String>,

    /// Folder of the snapshot in `volume`, created if absent. In a run the last part may be `{name}`, the name of the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024), extend("format" = "engram-folder"), example = &"words/monday")]
    pub path: Option<String>,
}

impl SnapshotLocation {
    /// Returns the address, `s3://BUCKET/PREFIX` or `volume://VOLUME/PATH`, for the run called `name`.
    pub fn address_of(&self, name: &str) -> String {
        let address = match (&self.volume, &self.path) {
            (Some(volume), Some(path)) => format!("volume://{volume}/{path}"),
            _ => self.url.as_deref().unwrap_or_default().trim_end_matches('/').to_owned(),
        };
        address.strip_suffix(NAME).map_or_else(|| address.clone(), |parent| format!("{parent}{name}"))
    }
}

/// Returns whether a text is a folder of a volume.
pub(crate) fn is_folder(text: &str) -> bool {
    let (parent, last) = text.rsplit_once('/').map_or((None, text), |(parent, last)| (Some(parent), last));
    parent.is_none_or(|parent| parent.split('/').all(is_part)) && (last == NAME || is_part(last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_of_a_volume_stays_in_it_and_may_end_with_the_name_of_the_run() {
        for good in ["words", "a/B_2/2026-11-20", "{name}", "words/{name}", "a..b/c."] {
            assert!(is_folder(good), "{good}");
        }
        for bad in
            ["", "/words", "words/", "../words", "a/../b", "a/./b", "a//b", ".hidden", "a/{name}/b", "a{name}", "a b"]
        {
            assert!(!is_folder(bad), "{bad}");
        }
        let stored = |url: &str| SnapshotLocation { url: Some(url.into()), ..SnapshotLocation::default() };
        assert_eq!(stored("s3://bbb/nightly/{name}").address_of("n-1"), "s3://bbb/nightly/n-1");
        assert_eq!(stored("s3://bbb/nightly/{name}/").address_of("n-1"), "s3://bbb/nightly/n-1");
        assert_eq!(stored("s3://bbb/monday/").address_of("n-1"), "s3://bbb/monday");
        let kept = |path: &str| SnapshotLocation {
            volume: Some("backups".into()),
            path: Some(path.into()),
            ..SnapshotLocation::default()
        };
        assert_eq!(kept("{name}").address_of("n-1"), "volume://backups/n-1");
        assert_eq!(kept("words/monday").address_of("n-1"), "volume://backups/words/monday");
    }
}
