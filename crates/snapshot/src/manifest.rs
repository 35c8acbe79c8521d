//! What a snapshot of a cluster consists of: `manifest.json`, beside one file per partition.
//!
//! It is written last and appears whole or not at all, so a folder without one is an unfinished snapshot. Invariants: every
//! byte of every file is under a checksum that stands here, and so is this file itself, as text: what a later version adds to
//! a specification does not change what was written.

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

/// Name of the file.
pub const FILE_NAME: &str = "manifest.json";
/// Bytes that a manifest has at most: 1,024 partitions take half a MiB.
pub(crate) const MAX_BYTES: u64 = 8 << 20;
const KIND: &str = "Snapshot";

/// A snapshot of a whole cluster. Fields are added, never renamed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Manifest {
    /// Version of the API that it was made under.
    pub api_version: String,
    /// What it is.
    pub kind: String,
    /// Version of what the files hold; another one is refused.
    pub format: u32,
    /// Its name.
    pub name: String,
    /// 32 hexadecimal digits.
    pub cluster: String,
    /// Name of the cluster.
    pub cluster_name: String,
    /// When it was finished, milliseconds since 1970.
    pub created_ms: u64,
    /// Partitions of the cluster.
    pub partitions: u32,
    /// Number of the law.
    pub law: u32,
    /// Numbers per memory.
    pub feature_dimension: u32,
    /// Number of the type; 0 = no features.
    pub feature_type: u32,
    /// The specification of the cluster, for a state directory that does not know it; looked at there only.
    pub spec: Value,
    /// Workers that wrote it. It may be restored to another number.
    pub workers: u32,
    /// Memories in it.
    pub memories: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// Digest of all memories, 32 hexadecimal digits, each partition as of its record in `files`; what format 1 had not where somebody
    /// wrote while it was made.
    pub digest: Option<String>,
    /// One entry per partition.
    pub files: Vec<Entry>,
}

/// One partition of a snapshot. Partitions without data have none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Entry {
    /// Number of the partition.
    pub partition: u32,
    /// Path of the file, beside the manifest or in a folder there.
    pub file: String,
    /// Term of its last record.
    pub term: u64,
    /// Its last record.
    pub lsn: u64,
    /// Memories in it.
    pub memories: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// Digest of its memories at `lsn`, 32 hexadecimal digits; format 1 had none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// XXH3-128 of the file, 32 hexadecimal digits.
    pub checksum: String,
}

/// The cluster that a snapshot is made of.
#[derive(Debug, Clone, Copy)]
pub struct Of<'a> {
    /// Its identity.
    pub cluster: ClusterId,
    /// Its name.
    pub name: &'a str,
    /// Its specification.
    pub spec: &'a LearnerClusterSpec,
}

/// The file: the manifest, and the XXH3-128 of its text without the spaces between its tokens.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    snapshot: Box<RawValue>,
    checksum: String,
}

/// What every format has in its manifest.
#[derive(Deserialize)]
struct Format {
    format: u64,
}

impl Entry {
    /// Describes a file of `folder` that a worker wrote, and reads all of it once to do so.
    ///
    /// # Errors
    /// It cannot be read, or is no snapshot file.
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

    /// The folder beside the manifest that has the file, if it is in one, and its name there; `None` where no snapshot file is called so.
    pub fn place(&self) -> Option<(Option<&str>, &str)> {
        let (folder, name) = match self.file.split_once('/') {
            Some((folder, name)) => (Some(folder), name),
            None => (None, self.file.as_str()),
        };
        let plain = |folder: &str| {
            !folder.is_empty() && folder.bytes().all(|it| it.is_ascii_lowercase() || it.is_ascii_digit() || it == b'-')
        };
        let ours = snapshot_file::parse_name(name).is_some() && folder.is_none_or(plain);
        ours.then_some((folder, name))
    }
}

impl Manifest {
    /// The format that is written.
    pub const FORMAT: u32 = 2;
    /// The oldest that is read.
    const OLDEST: u32 = 1;

    /// A manifest of no files yet.
    pub fn new(name: &str, of: Of<'_>) -> Result<Self> {
        let shape = shape_of(of.spec);
        Ok(Self {
            api_version: API_VERSION.into(),
            kind: KIND.into(),
            format: Self::FORMAT,
            name: name.into(),
            cluster: of.cluster.to_string(),
            cluster_name: of.name.into(),
            created_ms: 0,
            partitions: shape.partitions,
            law: shape.law.code(),
            feature_dimension: shape.features.dimension,
            feature_type: feature_type(shape.features),
            spec: serde_json::to_value(of.spec)?,
            workers: 0,
            memories: 0,
            bytes: 0,
            digest: None,
            files: Vec::new(),
        })
    }

    /// Adds a partition.
    pub fn add(&mut self, entry: Entry) {
        (self.memories, self.bytes) = (self.memories + entry.memories, self.bytes + entry.bytes);
        self.files.push(entry);
    }

    /// The text of the file, with the digest of the whole.
    pub fn text(&mut self) -> Result<String> {
        self.files.sort_by_key(|entry| entry.partition);
        self.digest = self.total().map(|digest| digest.to_string());
        let snapshot = RawValue::from_string(serde_json::to_string_pretty(self)?)?;
        let checksum = seal(snapshot.get());
        Ok(serde_json::to_string(&Sealed { snapshot, checksum })?)
    }

    /// Sum of the digests of the files; `None` where one has none.
    fn total(&self) -> Option<Digest> {
        let mut total = Digest::default();
        for entry in &self.files {
            total.merge(Digest(u128::from_str_radix(entry.digest.as_ref()?, 16).ok()?));
        }
        Some(total)
    }

    /// Writes the manifest into `folder`: after this, and not before, the snapshot is there.
    pub fn write(&mut self, folder: &Path) -> Result<()> {
        let text = self.text()?;
        let mut file = tempfile::Builder::new().prefix(".manifest-").tempfile_in(folder)?;
        file.write_all(text.as_bytes())?;
        file.as_file().sync_all()?;
        file.persist(folder.join(FILE_NAME))?;
        File::open(folder)?.sync_all()?;
        Ok(())
    }

    /// Reads what [`Self::text`] gave, from the place `whence`.
    ///
    /// # Errors
    /// [`Code::SnapshotUnusable`].
    pub fn parse(bytes: &[u8], whence: impl std::fmt::Display) -> Result<Self, Problem> {
        let damaged = |error: serde_json::Error| unusable(&whence, format!("is damaged: {error}"));
        let sealed: Sealed = serde_json::from_slice(bytes).map_err(damaged)?;
        if sealed.checksum != seal(sealed.snapshot.get()) {
            return Err(unusable(&whence, "is damaged: its checksum is wrong"));
        }
        // Look at the format first: a newer manifest has fields that are not known here.
        let Format { format } = serde_json::from_str(sealed.snapshot.get()).map_err(damaged)?;
        if !(u64::from(Self::OLDEST)..=u64::from(Self::FORMAT)).contains(&format) {
            let (oldest, newest) = (Self::OLDEST, Self::FORMAT);
            let what = format!("has format {format}, this program knows {oldest} to {newest}; use a newer program");
            return Err(unusable(&whence, what));
        }
        let manifest: Self = serde_json::from_str(sealed.snapshot.get()).map_err(damaged)?;
        if manifest.kind != KIND {
            return Err(unusable(&whence, format!("is no snapshot but a {:?}", manifest.kind)));
        }
        Ok(manifest)
    }

    /// What is fixed of the cluster that it was made of.
    ///
    /// # Errors
    /// [`Code::SnapshotUnusable`]: a law or a type that this version does not know.
    pub fn shape(&self, whence: &str) -> Result<Shape, Problem> {
        let unknown = || unusable(whence, "has a law or a type of features that this program does not know");
        let features = match self.feature_dimension {
            0 => FeatureShape::NONE,
            dimension => {
                let dtype = engram_memory::FeatureType::from_code(self.feature_type).ok_or_else(unknown)?;
                FeatureShape { dimension, dtype }
            }
        };
        Ok(Shape { partitions: self.partitions, law: Law::from_code(self.law).ok_or_else(unknown)?, features })
    }

    /// Checks that this can be restored to its own cluster, and every byte of every file. `whence` names the snapshot; `progress` hears of
    /// the bytes that were checked.
    ///
    /// # Errors
    /// [`Code::SnapshotUnusable`], naming the file; nothing was changed.
    pub fn verify(
        &self,
        folder: &Path,
        whence: &str,
        cluster: ClusterId,
        shape: Shape,
        mut progress: impl FnMut(u64),
    ) -> Result<()> {
        self.check_owner(whence, cluster)?;
        self.check_shape(whence, shape)?;
        self.check_files(whence)?;
        for entry in &self.files {
            self.verify_file(entry, folder, whence)?;
            progress(entry.bytes);
        }
        Ok(())
    }

    /// Checks that the files which it names can be those of a snapshot: each of a partition of its own, under a name of ours.
    ///
    /// # Errors
    /// [`Code::SnapshotUnusable`].
    pub fn check_files(&self, whence: &str) -> Result<(), Problem> {
        let mut seen = std::collections::BTreeSet::new();
        for entry in &self.files {
            let wrong = |what: String| unusable(format!("{whence}/{}", entry.file), what);
            if entry.partition >= self.partitions || !seen.insert(entry.partition) {
                return Err(wrong(format!("stands for partition {}, which is twice or not there", entry.partition)));
            }
            // A name that leads out of the folder is no name of ours.
            if entry.place().is_none() {
                return Err(wrong("is not the name of a snapshot file".into()));
            }
        }
        let (total, told) = (self.total().map(|digest| digest.to_string()), self.digest.as_ref());
        match told.filter(|told| total.as_ref().is_some_and(|total| total != *told)) {
            Some(told) => Err(unusable(whence, format!("names the digest {told}, which is not that of its files"))),
            None => Ok(()),
        }
    }

    /// Checks every byte of one file in `folder`, and that it is the one described.
    ///
    /// # Errors
    /// [`Code::SnapshotUnusable`], naming the file.
    pub fn verify_file(&self, entry: &Entry, folder: &Path, whence: &str) -> Result<SnapshotReader> {
        let wrong = |what: String| unusable(format!("{whence}/{}", entry.file), what);
        let summed = checksum(&folder.join(&entry.file));
        let (bytes, checksum) = summed.map_err(|error| wrong(format!("cannot be read: {error}")))?;
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
        if file.cluster.to_string() != self.cluster || file.shape != self.shape(whence)? {
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

    /// Checks that it is of this cluster.
    ///
    /// # Errors
    /// [`Code::SnapshotUnusable`].
    pub fn check_owner(&self, whence: &str, cluster: ClusterId) -> Result<(), Problem> {
        if self.cluster == cluster.to_string() {
            return Ok(());
        }
        let what = format!("is of cluster {} ({}), not of {cluster}", self.cluster_name, self.cluster);
        Err(unusable(whence, what))
    }

    /// Checks that what no restore can change is as a cluster of `shape` has it.
    ///
    /// # Errors
    /// [`Code::SnapshotUnusable`].
    pub fn check_shape(&self, whence: &str, shape: Shape) -> Result<(), Problem> {
        let fields = [
            ("law", self.law, shape.law.code()),
            ("feature dimension", self.feature_dimension, shape.features.dimension),
            ("feature type", self.feature_type, feature_type(shape.features)),
        ];
        match fields.iter().find(|(_, found, expected)| found != expected) {
            Some((what, found, expected)) => {
                Err(unusable(whence, format!("has {what} {found}, the cluster has {expected}: fixed at creation")))
            }
            None => Ok(()),
        }
    }
}

/// The checksum of the manifest's text: strings as they are, nothing between the tokens.
fn seal(text: &str) -> String {
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

/// The number of the feature type in a manifest.
fn feature_type(features: FeatureShape) -> u32 {
    if features.dimension == 0 { 0 } else { features.dtype.code() }
}

/// A problem of a snapshot, or of one file of it.
pub fn unusable(whence: impl std::fmt::Display, what: impl std::fmt::Display) -> Problem {
    Problem::new(Code::SnapshotUnusable, format!("{whence} {what}"))
}

/// Opens a file of a snapshot, by its path beside the manifest.
///
/// # Errors
/// [`Code::SnapshotUnusable`]: it is not there, or no snapshot file.
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

/// The shape that a manifest was made with.
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

    /// What format 1 looked like, as it was written.
    const FIRST: &str = include_str!("../tests/golden/snapshot-v1/manifest.json");
    /// The format of this version.
    const SECOND: &str = include_str!("../tests/golden/snapshot-v2/manifest.json");

    fn folder(name: &str) -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
    }

    #[test]
    fn golden_snapshots_are_read_and_their_files_are_what_they_describe() {
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
        // What is written is what was written.
        let mut manifest = Manifest::parse(SECOND.as_bytes(), "").unwrap();
        assert_eq!(manifest.text().unwrap(), SECOND);
    }

    #[test]
    fn a_manifest_that_is_cut_or_has_any_bit_flipped_is_refused() {
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
    fn a_newer_format_is_told_from_damage_and_spaces_between_tokens_are_not_content() {
        let sealed = |snapshot: &str| {
            let snapshot = RawValue::from_string(snapshot.to_owned()).unwrap();
            serde_json::to_string(&Sealed { checksum: seal(snapshot.get()), snapshot }).unwrap()
        };
        let newer = Manifest::parse(sealed(r#"{"format":3,"new":{}}"#).as_bytes(), "it").unwrap_err().to_string();
        assert!(newer.contains("has format 3") && newer.contains("use a newer program"), "{newer}");
        assert_eq!(seal("{ \"a b\" :\n1}"), seal(r#"{"a b":1}"#));
        assert_ne!(seal(r#"{"a b":1}"#), seal(r#"{"ab":1}"#));
        assert_ne!(seal(r#"{"\\":"\" "}"#), seal(r#"{"\\":"\""}"#), "an escaped quote ends no string");
    }
}
