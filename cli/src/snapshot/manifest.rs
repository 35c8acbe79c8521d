//! What a snapshot of a cluster consists of: `manifest.json`, beside one file per partition.
//!
//! It is written last and appears whole or not at all, so a folder without one is an unfinished snapshot. Invariants: every
//! byte of every file is under a checksum that stands here, and so is this file itself.

use crate::local::state::Cluster;
use anyhow::{Context, Result};
use engram_api::{API_VERSION, Code, LearnerClusterSpec, Problem};
use engram_memory::{ClusterId, FeatureShape, Law, Shape};
use engram_store::{FileDisk, SnapshotReader};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// Name of the file.
const FILE_NAME: &str = "manifest.json";
const KIND: &str = "Snapshot";

/// A snapshot of a whole cluster. Fields are added, never renamed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Manifest {
    pub(crate) api_version: String,
    pub(crate) kind: String,
    /// Version of what the files hold; another one is refused.
    pub(crate) format: u32,
    pub(crate) name: String,
    /// 32 hexadecimal digits.
    pub(crate) cluster: String,
    pub(crate) cluster_name: String,
    /// When it was finished, milliseconds since 1970.
    pub(crate) created_ms: u64,
    pub(crate) partitions: u32,
    /// Number of the law.
    pub(crate) law: u32,
    pub(crate) feature_dimension: u32,
    /// Number of the type; 0 = no features.
    pub(crate) feature_type: u32,
    /// The specification of the cluster, for a state directory that does not know it.
    pub(crate) spec: LearnerClusterSpec,
    /// Workers that wrote it. It may be restored to another number.
    pub(crate) workers: u32,
    pub(crate) memories: u64,
    pub(crate) bytes: u64,
    /// Digest of all memories, 32 hexadecimal digits; absent where somebody wrote while it was made, since each partition is as
    /// of its own moment then.
    pub(crate) digest: Option<String>,
    pub(crate) files: Vec<Entry>,
}

/// One partition of a snapshot. Partitions without data have none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Entry {
    pub(crate) partition: u32,
    pub(crate) file: String,
    pub(crate) term: u64,
    pub(crate) lsn: u64,
    pub(crate) memories: u64,
    pub(crate) bytes: u64,
    /// XXH3-128 of the file, 32 hexadecimal digits.
    pub(crate) checksum: String,
}

/// The file: the manifest, and the XXH3-128 of its compact JSON.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    snapshot: Manifest,
    checksum: String,
}

impl Manifest {
    pub(crate) const FORMAT: u32 = 1;

    /// A manifest of no files yet.
    pub(crate) fn new(name: &str, cluster: &Cluster) -> Result<Self> {
        let shape = shape_of(&cluster.spec);
        Ok(Self {
            api_version: API_VERSION.into(),
            kind: KIND.into(),
            format: Self::FORMAT,
            name: name.into(),
            cluster: cluster.id()?.to_string(),
            cluster_name: cluster.name.clone(),
            created_ms: 0,
            partitions: shape.partitions,
            law: shape.law.code(),
            feature_dimension: shape.features.dimension,
            feature_type: feature_type(shape.features),
            spec: cluster.spec.clone(),
            workers: 0,
            memories: 0,
            bytes: 0,
            digest: None,
            files: Vec::new(),
        })
    }

    /// The cluster that it was made of, for a state directory that has none.
    pub(crate) fn to_cluster(&self, format_version: u32) -> Result<Cluster> {
        let cluster = Cluster {
            format_version,
            cluster: self.cluster.clone(),
            name: self.cluster_name.clone(),
            memories: self.memories,
            spec: self.spec.clone(),
        };
        cluster.id().map(|_| cluster)
    }

    /// Describes a file of `folder` that a worker wrote, and reads all of it once to do so.
    pub(crate) fn add(&mut self, folder: &Path, file: &str) -> Result<()> {
        let head = open(folder, file)?.head();
        let (bytes, checksum) = checksum(&folder.join(file)).with_context(|| format!("failed to read {file}"))?;
        self.files.push(Entry {
            partition: head.partition.0,
            file: file.to_owned(),
            term: head.term.0,
            lsn: head.lsn.0,
            memories: head.memories,
            bytes,
            checksum,
        });
        (self.memories, self.bytes) = (self.memories + head.memories, self.bytes + bytes);
        Ok(())
    }

    /// Writes the manifest into `folder`: after this, and not before, the snapshot is there.
    pub(crate) fn write(&mut self, folder: &Path) -> Result<()> {
        self.files.sort_by_key(|entry| entry.partition);
        let sealed = Sealed { checksum: self.seal(), snapshot: self.clone() };
        let mut file = tempfile::Builder::new().prefix(".manifest-").tempfile_in(folder)?;
        file.write_all(&serde_json::to_vec_pretty(&sealed)?)?;
        file.as_file().sync_all()?;
        file.persist(folder.join(FILE_NAME))?;
        File::open(folder)?.sync_all()?;
        Ok(())
    }

    /// Reads the manifest of a folder; `None` where there is none: the snapshot was never finished.
    ///
    /// # Errors
    /// It is damaged or of another format ([`Code::SnapshotUnusable`]), or cannot be read.
    pub(crate) fn read(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(FILE_NAME);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).with_context(|| format!("failed to read {}", path.display())),
        };
        // Look at the format first: a newer manifest has fields that are not known here.
        let format = serde_json::from_slice::<serde_json::Value>(&bytes).ok();
        let format = format.and_then(|sealed| sealed["snapshot"]["format"].as_u64());
        if let Some(newer) = format.filter(|format| *format > u64::from(Self::FORMAT)) {
            let what = format!("has format {newer}, this program knows up to {}; use a newer program", Self::FORMAT);
            return Err(unusable(&path, what).into());
        }
        let sealed: Sealed =
            serde_json::from_slice(&bytes).map_err(|error| unusable(&path, format!("is damaged: {error}")))?;
        if sealed.checksum != sealed.snapshot.seal() {
            return Err(unusable(&path, "is damaged: its checksum is wrong").into());
        }
        Ok(Some(sealed.snapshot))
    }

    fn seal(&self) -> String {
        let bytes = serde_json::to_vec(self).expect("a manifest has string keys only");
        format!("{:032x}", xxh3_128(&bytes))
    }

    /// Checks that this can be restored to a cluster, and every byte of every file. `progress` hears of the bytes that were
    /// checked.
    ///
    /// # Errors
    /// [`Code::SnapshotUnusable`], naming the file; nothing was changed.
    pub(crate) fn verify(
        &self,
        folder: &Path,
        cluster: ClusterId,
        shape: Shape,
        mut progress: impl FnMut(u64),
    ) -> Result<()> {
        self.check_owner(folder, cluster, shape)?;
        let mut seen = std::collections::BTreeSet::new();
        for entry in &self.files {
            let path = folder.join(&entry.file);
            let wrong = |what: String| unusable(&path, what);
            if entry.partition >= self.partitions || !seen.insert(entry.partition) {
                return Err(
                    wrong(format!("stands for partition {}, which is twice or not there", entry.partition)).into()
                );
            }
            // A name that leads out of the folder is no name of ours.
            if engram_store::snapshot_file::parse_name(&entry.file).is_none() {
                return Err(wrong("is not the name of a snapshot file".into()).into());
            }
            let (bytes, checksum) = checksum(&path).map_err(|error| wrong(format!("cannot be read: {error}")))?;
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
            if (file.cluster, file.shape) != (cluster, shape) {
                return Err(wrong(format!("is of cluster {}, not of {cluster}", file.cluster)).into());
            }
            if (head.partition.0, head.term.0, head.lsn.0, head.memories)
                != (entry.partition, entry.term, entry.lsn, entry.memories)
            {
                return Err(wrong("is not the file that the manifest describes".into()).into());
            }
            progress(bytes);
        }
        Ok(())
    }

    fn check_owner(&self, folder: &Path, cluster: ClusterId, shape: Shape) -> Result<(), Problem> {
        let path = folder.join(FILE_NAME);
        if self.cluster != cluster.to_string() {
            let what = format!("is of cluster {} ({}), not of {cluster}", self.cluster_name, self.cluster);
            return Err(unusable(&path, what));
        }
        let fields = [
            ("partitions", self.partitions, shape.partitions),
            ("law", self.law, shape.law.code()),
            ("feature dimension", self.feature_dimension, shape.features.dimension),
            ("feature type", self.feature_type, feature_type(shape.features)),
        ];
        match fields.iter().find(|(_, found, expected)| found != expected) {
            Some((what, found, expected)) => {
                Err(unusable(&path, format!("has {what} {found}, the cluster has {expected}: fixed at creation")))
            }
            None => Ok(()),
        }
    }
}

/// The number of the feature type in a manifest.
fn feature_type(features: FeatureShape) -> u32 {
    if features.dimension == 0 { 0 } else { features.dtype.code() }
}

/// A problem of one file of a snapshot.
pub(crate) fn unusable(path: &Path, what: impl std::fmt::Display) -> Problem {
    Problem::new(Code::SnapshotUnusable, format!("{} {what}", path.display()))
}

/// Opens a file of a snapshot.
fn open(folder: &Path, file: &str) -> Result<SnapshotReader> {
    let disk = FileDisk::new(folder)?;
    Ok(SnapshotReader::open_any(&disk, file)
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
pub(crate) fn shape_of(spec: &LearnerClusterSpec) -> Shape {
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
