//! Manifest of a cluster snapshot: `manifest.json`, next to one file per partition.
//!
//! The manifest is written last and atomically, so a directory without one is an unfinished snapshot. Invariants: the manifest
//! contains a checksum of every file and of its own text; the checksum covers the text, so fields added to the specification
//! by a later version do not invalidate it.

use anyhow::{Context, Result};
use engram_api::{API_VERSION, Code, LearnerClusterSpec, Problem};
use engram_memory::{ClusterId, Digest, FeatureShape, Law, Shape};
use engram_store::{FileDisk, SnapshotReader, snapshot_file};
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, Value};
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// Name of the manifest file.
pub const FILE_NAME: &str = "manifest.json";
/// Most bytes of a manifest: 1,024 partitions take half a MiB.
pub(crate) const MAX_BYTES: u64 = 8 << 20;
const KIND: &str = "Snapshot";

/// A snapshot of a whole cluster. Fields are added, never renamed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Manifest {
    /// API version of the specification.
    pub api_version: String,
    /// Kind of the document.
    pub kind: String,
    /// Format version of the files; unknown versions are rejected.
    pub format: u32,
    /// Name of the snapshot.
    pub name: String,
    /// Cluster ID, 32 hexadecimal digits.
    pub cluster: String,
    /// Name of the cluster.
    pub cluster_name: String,
    /// Completion time, milliseconds since 1970.
    pub created_ms: u64,
    /// Partitions of the cluster.
    pub partitions: u32,
    /// Number of the decay law.
    pub law: u32,
    /// Elements of a feature vector.
    pub feature_dimension: u32,
    /// Number of the feature type; 0 = no features.
    pub feature_type: u32,
    /// Specification of the cluster, for restoring into an empty state directory.
    pub spec: Value,
    /// Workers that wrote the snapshot. It can be restored to another number.
    pub workers: u32,
    /// Memories in it.
    pub memories: u64,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Digest of all memories, 32 hexadecimal digits, each partition at its LSN in `files`; format 1 omits it if writes occurred
    /// during the snapshot.
    pub digest: Option<String>,
    /// One entry per partition.
    pub files: Vec<Entry>,
}

/// File of one partition. Partitions without data have none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Entry {
    /// Number of the partition.
    pub partition: u32,
    /// Path of the file relative to the manifest.
    pub file: String,
    /// Term of its last record.
    pub term: u64,
    /// LSN of its last record.
    pub lsn: u64,
    /// Memories in it.
    pub memories: u64,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Digest of its memories at `lsn`, 32 hexadecimal digits; absent in format 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// XXH3-128 of the file, 32 hexadecimal digits.
    pub checksum: String,
}

/// Cluster that a snapshot is taken of.
#[derive(Debug, Clone, Copy)]
pub struct SourceCluster<'a> {
    /// Cluster ID.
    pub cluster: ClusterId,
    /// Name of the snapshot.
    pub name: &'a str,
    /// Specification.
    pub spec: &'a LearnerClusterSpec,
}

/// Content of the file: the manifest and the XXH3-128 of its text without whitespace between tokens.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ManifestFile {
    snapshot: Box<RawValue>,
    checksum: String,
}

/// Field common to the manifests of every format.
#[derive(Deserialize)]
struct Format {
    format: u64,
}

impl Entry {
    /// Describes a file in `folder`, reading all of it once.
    ///
    /// # Errors
    /// The file cannot be read or is not a snapshot file.
    pub fn of(folder: &Path, file: &str) -> Result<Self> {
        let reader = open(folder, file)?;
        let (head, digest) = (reader.head(), reader.memories_digest()?);
        let (bytes, checksum) = checksum(&folder.join(file)).with_context(|| format!("failed to read {file}"))?;
        Ok(Self {
            partition: head.partition.0,
            file: file.to_owned(),
            term: head.term.0,
            lsn: head.lsn.0,
            memories: head.memories,
            bytes,
            digest: Some(digest.to_string()),
            checksum,
        })
    }

    /// Splits the path into subdirectory, if any, and file name; `None` if it is not a valid snapshot file path.
    pub fn split_path(&self) -> Option<(Option<&str>, &str)> {
        let (folder, name) = match self.file.split_once('/') {
            Some((folder, name)) => (Some(folder), name),
            None => (None, self.file.as_str()),
        };
        let plain = |folder: &str| {
            !folder.is_empty() && folder.bytes().all(|it| it.is_ascii_lowercase() || it.is_ascii_digit() || it == b'-')
        };
        let is_valid = snapshot_file::parse_name(name).is_some() && folder.is_none_or(plain);
        is_valid.then_some((folder, name))
    }
}

impl Manifest {
    /// Format version that is written.
    pub const FORMAT: u32 = 2;
    /// Oldest format version that is read.
    const OLDEST: u32 = 1;

    /// Creates a manifest without files.
    pub fn new(name: &str, cluster: SourceCluster<'_>) -> Result<Self> {
        let shape = shape_of(cluster.spec);
        Ok(Self {
            api_version: API_VERSION.into(),
            kind: KIND.into(),
            format: Self::FORMAT,
            name: name.into(),
            cluster: cluster.cluster.to_string(),
            cluster_name: cluster.name.into(),
            created_ms: 0,
            partitions: shape.partitions,
            law: shape.law.code(),
            feature_dimension: shape.features.dimension,
            feature_type: feature_type(shape.features),
            spec: serde_json::to_value(cluster.spec)?,
            workers: 0,
            memories: 0,
            bytes: 0,
            digest: None,
            files: Vec::new(),
        })
    }

    /// Adds the file of a partition.
    pub fn add(&mut self, entry: Entry) {
        (self.memories, self.bytes) = (self.memories + entry.memories, self.bytes + entry.bytes);
        self.files.push(entry);
    }

    /// Returns the text of the file, and sets the total digest.
    pub fn text(&mut self) -> Result<String> {
        self.files.sort_by_key(|entry| entry.partition);
        self.digest = self.total().map(|digest| digest.to_string());
        let snapshot = RawValue::from_string(serde_json::to_string_pretty(self)?)?;
        let checksum = text_checksum(snapshot.get());
        Ok(serde_json::to_string(&ManifestFile { snapshot, checksum })?)
    }

    /// Sum of the digests of the files; `None` if one has none.
    fn total(&self) -> Option<Digest> {
        let mut total = Digest::default();
        for entry in &self.files {
            total.merge(Digest(u128::from_str_radix(entry.digest.as_ref()?, 16).ok()?));
        }
        Some(total)
    }

    /// Writes the manifest into `folder`, which completes the snapshot.
    pub fn write(&mut self, folder: &Path) -> Result<()> {
        let text = self.text()?;
        let mut file = tempfile::Builder::new().prefix(".manifest-").tempfile_in(folder)?;
        file.write_all(text.as_bytes())?;
        file.as_file().sync_all()?;
        file.persist(folder.join(FILE_NAME))?;
        File::open(folder)?.sync_all()?;
        Ok(())
    }

    /// Parses the output of [`Self::text`], read from `source`.
    ///
    /// # Errors
    /// [`Code::SnapshotUnusable`].
    pub fn parse(bytes: &[u8], source: impl std::fmt::Display) -> Result<Self, Problem> {
        let damaged = |error: serde_json::Error| unusable(&source, format!("is damaged: {error}"));
        let sealed: ManifestFile = serde_json::from_slice(bytes).map_err(damaged)?;
        if sealed.checksum != text_checksum(sealed.snapshot.get()) {
            return Err(unusable(&source, "is damaged: checksum mismatch"));
        }
        // The format is checked first: a newer manifest has unknown fields.
        let Format { format } = serde_json::from_str(sealed.snapshot.get()).map_err(damaged)?;
        if !(u64::from(Self::OLDEST)..=u64::from(Self::FORMAT)).contains(&format) {
            let (oldest, newest) = (Self::OLDEST, Self::FORMAT);
            let what = format!("has format {format}, this version supports {oldest} to {newest}; use a newer version");
            return Err(unusable(&source, what));
        }
        let manifest: Self = serde_json::from_str(sealed.snapshot.get()).map_err(damaged)?;
        if manifest.kind != KIND {
            return Err(unusable(&source, format!("is not a snapshot but a {:?}", manifest.kind)));
        }
        Ok(manifest)
    }

    /// Returns the immutable shape of the source cluster.
    ///
    /// # Errors
    /// [`Code::SnapshotUnusable`]: unknown law or feature type.
    pub fn shape(&self, source: &str) -> Result<Shape, Problem> {
        let unknown = || unusable(source, "has a decay law or a feature type that this version does not support");
        let features = match self.feature_dimension {
            0 => FeatureShape::NONE,
            dimension => {
                let dtype = engram_memory::FeatureType::from_code(self.feature_type).ok_or_else(unknown)?;
                FeatureShape { dimension, dtype }
            }
        };
        Ok(Shape { partitions: self.partitions, law: Law::from_code(self.law).ok_or_else(unknown)?, features })
    }

    /// Verifies that the snapshot can be restored to its own cluster, and every byte of every file. `source` names the snapshot;
    /// `progress` receives the bytes verified.
    ///
    /// # Errors
    /// [`Code::SnapshotUnusable`], naming the file; nothing was changed.
    pub fn verify(
        &self,
        folder: &Path,
        source: &str,
        cluster: ClusterId,
        shape: Shape,
        mut progress: impl FnMut(u64),
    ) -> Result<()> {
        self.check_owner(source, cluster)?;
        self.check_shape(source, shape)?;
        self.check_files(source)?;
        for entry in &self.files {
            self.verify_file(entry, folder, source)?;
            progress(entry.bytes);
        }
        Ok(())
    }

    /// Checks the list of files: one per partition, with valid names.
    ///
    /// # Errors
    /// [`Code::SnapshotUnusable`].
    pub fn check_files(&self, source: &str) -> Result<(), Problem> {
        let mut partitions = std::collections::BTreeSet::new();
        for entry in &self.files {
            let wrong = |what: String| unusable(format!("{source}/{}", entry.file), what);
            if entry.partition >= self.partitions || !partitions.insert(entry.partition) {
                return Err(wrong(format!(
                    "belongs to partition {}, which is duplicate or out of range",
                    entry.partition
                )));
            }
            // Also rejects paths that leave the directory.
            if entry.split_path().is_none() {
                return Err(wrong("is not the name of a snapshot file".into()));
            }
        }
        let (total, stated) = (self.total().map(|digest| digest.to_string()), self.digest.as_ref());
        match stated.filter(|stated| total.as_ref().is_some_and(|total| total != *stated)) {
            Some(stated) => Err(unusable(source, format!("states digest {stated}, which does not match its files"))),
            None => Ok(()),
        }
    }

    /// Verifies every byte of one file in `folder`, and that it matches its entry.
    ///
    /// # Errors
    /// [`Code::SnapshotUnusable`], naming the file.
    pub fn verify_file(&self, entry: &Entry, folder: &Path, source: &str) -> Result<SnapshotReader> {
        let wrong = |what: String| unusable(format!("{source}/{}", entry.file), what);
        let summary = checksum(&folder.join(&entry.file));
        let (bytes, checksum) = summary.map_err(|error| wrong(format!("cannot be read: {error}")))?;
        if (bytes, &checksum) != (entry.bytes, &entry.checksum) {
            return Err(wrong(format!(
                "is damaged: it has {bytes} bytes and checksum {checksum}, the manifest says {} and {}",
                entry.bytes, entry.checksum
            ))
            .into());
        }
        let reader = open(folder, &entry.file)?;
        reader.verify().map_err(|error| wrong(error.to_string()))?;
        let (file, head) = (reader.file_head(), reader.head());
        if file.cluster.to_string() != self.cluster || file.shape != self.shape(source)? {
            return Err(wrong(format!("is of cluster {}, not of {}", file.cluster, self.cluster)).into());
        }
        let digest = reader.memories_digest().map_err(|error| wrong(error.to_string()))?.to_string();
        let described = (head.partition.0, head.term.0, head.lsn.0, head.memories)
            == (entry.partition, entry.term, entry.lsn, entry.memories)
            && entry.digest.as_ref().is_none_or(|expected| *expected == digest);
        if !described {
            return Err(wrong("is not the file that the manifest describes".into()).into());
        }
        Ok(reader)
    }

    /// Checks that the snapshot belongs to this cluster.
    ///
    /// # Errors
    /// [`Code::SnapshotUnusable`].
    pub fn check_owner(&self, source: &str, cluster: ClusterId) -> Result<(), Problem> {
        if self.cluster == cluster.to_string() {
            return Ok(());
        }
        let what = format!("is of cluster {} ({}), not of {cluster}", self.cluster_name, self.cluster);
        Err(unusable(source, what))
    }

    /// Checks that the immutable fields match a cluster of `shape`.
    ///
    /// # Errors
    /// [`Code::SnapshotUnusable`].
    pub fn check_shape(&self, source: &str, shape: Shape) -> Result<(), Problem> {
        let fields = [
            ("law", self.law, shape.law.code()),
            ("feature dimension", self.feature_dimension, shape.features.dimension),
            ("feature type", self.feature_type, feature_type(shape.features)),
        ];
        match fields.iter().find(|(_, actual, expected)| actual != expected) {
            Some((what, actual, expected)) => Err(unusable(
                source,
                format!("has {what} {actual}, the cluster has {expected}: immutable after creation"),
            )),
            None => Ok(()),
        }
    }
}

/// Checksum of the manifest's text without whitespace between tokens.
fn text_checksum(text: &str) -> String {
    let (mut tokens, mut in_string, mut escaped) = (Vec::with_capacity(text.len()), false, false);
    for byte in text.bytes() {
        if in_string || !byte.is_ascii_whitespace() {
            tokens.push(byte);
        }
        in_string ^= byte == b'"' && !escaped;
        escaped = in_string && byte == b'\\' && !escaped;
    }
    format!("{:032x}", xxh3_128(&tokens))
}

/// Number of the feature type in a manifest.
fn feature_type(features: FeatureShape) -> u32 {
    if features.dimension == 0 { 0 } else { features.dtype.code() }
}

/// Problem of a snapshot, or of one of its files.
pub fn unusable(source: impl std::fmt::Display, what: impl std::fmt::Display) -> Problem {
    Problem::new(Code::SnapshotUnusable, format!("{source} {what}"))
}

/// Opens a file of a snapshot by its path relative to the manifest.
///
/// # Errors
/// [`Code::SnapshotUnusable`]: missing, or not a snapshot file.
pub fn open(folder: &Path, file: &str) -> Result<SnapshotReader> {
    let (folder, name) = match file.split_once('/') {
        Some((below, name)) => (folder.join(below), name),
        None => (folder.to_owned(), file),
    };
    let disk = FileDisk::new(folder)?;
    Ok(SnapshotReader::open_any(&disk, name)
        .map_err(|error| Problem::new(Code::SnapshotUnusable, error.to_string()))?)
}

/// Length and XXH3-128 of a file.
fn checksum(path: &Path) -> io::Result<(u64, String)> {
    let (mut file, mut hasher, mut length) = (File::open(path)?, Xxh3::new(), 0);
    let mut bytes = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut bytes)?;
        if read == 0 {
            return Ok((length, format!("{:032x}", hasher.digest128())));
        }
        hasher.update(&bytes[..read]);
        length += read as u64;
    }
}

/// Shape of a cluster with this specification.
pub fn shape_of(spec: &LearnerClusterSpec) -> Shape {
    let dtype = match spec.features.dtype {
        engram_api::FeatureType::F16 => engram_memory::FeatureType::F16,
        engram_api::FeatureType::F32 => engram_memory::FeatureType::F32,
    };
    let law = match spec.learning.law {
        engram_api::Law::Linear => Law::Linear,
    };
    let features = match spec.features.dimension {
        0 => FeatureShape::NONE,
        dimension => FeatureShape { dimension, dtype },
    };
    Shape { partitions: spec.partitions, law, features }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Golden manifest of format 1.
    const FIRST: &str = include_str!("../tests/golden/snapshot-v1/manifest.json");
    /// Golden manifest of the current format.
    const SECOND: &str = include_str!("../tests/golden/snapshot-v2/manifest.json");

    fn folder(name: &str) -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
    }

    #[test]
    fn golden_snapshots_are_read_and_match_their_files() {
        for (name, text) in [("snapshot-v1", FIRST), ("snapshot-v2", SECOND)] {
            let manifest = Manifest::parse(text.as_bytes(), name).unwrap();
            let shape = manifest.shape(name).unwrap();
            let spec: LearnerClusterSpec = serde_json::from_value(manifest.spec.clone()).unwrap();
            assert_eq!(shape_of(&spec), shape);
            let id = manifest.cluster.parse().unwrap();
            let mut checked = 0;
            manifest.verify(&folder(name), name, id, shape, |bytes| checked += bytes).unwrap();
            assert_eq!((manifest.partitions, manifest.memories, checked), (3, 12, manifest.bytes));
            let other = manifest.check_owner(name, ClusterId(1)).unwrap_err();
            assert!(other.to_string().contains("is of cluster kept"), "{other}");
        }
        // The current format is written back to the same bytes.
        let mut manifest = Manifest::parse(SECOND.as_bytes(), "").unwrap();
        assert_eq!(manifest.text().unwrap(), SECOND);
    }

    #[test]
    fn a_truncated_manifest_or_any_bit_flip_is_rejected() {
        for text in [FIRST, SECOND] {
            let bytes = text.trim_end().as_bytes();
            for end in 0..bytes.len() {
                assert!(Manifest::parse(&bytes[..end], "it").is_err(), "cut at {end}");
            }
            let mut flipped = bytes.to_vec();
            for bit in 0..bytes.len() * 8 {
                flipped[bit / 8] ^= 1 << (bit % 8);
                assert!(Manifest::parse(&flipped, "it").is_err(), "bit {bit}");
                flipped[bit / 8] ^= 1 << (bit % 8);
            }
        }
    }

    #[test]
    fn a_newer_format_is_not_damage_and_whitespace_between_tokens_is_ignored() {
        let sealed = |snapshot: &str| {
            let snapshot = RawValue::from_string(snapshot.to_owned()).unwrap();
            serde_json::to_string(&ManifestFile { checksum: text_checksum(snapshot.get()), snapshot }).unwrap()
        };
        let newer = Manifest::parse(sealed(r#"{"format":3,"new":{}}"#).as_bytes(), "it").unwrap_err().to_string();
        assert!(newer.contains("has format 3") && newer.contains("use a newer version"), "{newer}");
        assert_eq!(text_checksum("{ \"a b\" :\n1}"), text_checksum(r#"{"a b":1}"#));
        assert_ne!(text_checksum(r#"{"a b":1}"#), text_checksum(r#"{"ab":1}"#));
        assert_ne!(
            text_checksum(r#"{"\\":"\" "}"#),
            text_checksum(r#"{"\\":"\""}"#),
            "an escaped quote does not end a string"
        );
    }
}
