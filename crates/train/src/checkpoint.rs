//! Checkpoints as bytes: tensors in safetensors files, everything else in a manifest with hashes.
//!
//! Writing them so that none is visible half-written is the caller's part: files into `step-N.incomplete/`, flush,
//! rename, then `LATEST`. The state is the same on every member, so a checkpoint restores at any number of members.

use std::collections::BTreeMap;
use std::sync::Arc;

use engram_neural::{Coverage, ScalerState, SettingError, WeightsError};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_128;

use crate::automatic::AutomaticCompression;
use crate::ensemble_checkpoint::MemberEntry;
use crate::private::PrivacyCharge;
use crate::table::TableColumns;
use crate::trainer::{Counters, Trainer, TrainerError, TrainerSpec};

/// Version of the manifest.
const FORMAT: u32 = 1;
/// Bytes that one hash covers: a damaged or missing piece is fetched again alone.
const CHUNK_BYTES: usize = 4 << 20;
/// Stands for the hash of a manifest while it is computed.
const NO_HASH: &str = "00000000000000000000000000000000";
const MODEL_FILE: &str = "model.safetensors";
const OPTIMIZER_FILE: &str = "optimizer.safetensors";
/// What compression lost on the member that wrote the checkpoint; only with compression.
const FEEDBACK_FILE: &str = "feedback.safetensors";
const FEEDBACK: &str = "lost";
/// The basis of the next step, with `PowerSgd` and `Automatic`.
const BASIS: &str = "basis";

/// A checkpoint: the manifest and the files it describes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// Content of `manifest.json`.
    pub manifest: Vec<u8>,
    /// Names and contents of the other files.
    pub files: BTreeMap<String, Vec<u8>>,
}

/// What `manifest.json` says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Manifest {
    /// XXH3-128 of the manifest with zeros in place of this hash, in hexadecimal.
    #[serde(default)]
    pub manifest_hash: String,
    /// Version of this format.
    pub format: u32,
    /// Steps, updates and samples.
    pub counters: Counters,
    /// Generation of the group that wrote the checkpoint.
    pub generation: u64,
    /// Members of the group that wrote the checkpoint.
    pub world: u32,
    /// What is trained and how.
    pub spec: TrainerSpec,
    /// Steps of the optimizer, for its bias corrections.
    pub optimizer_steps: u64,
    /// State of the loss scaler.
    pub scaler: ScalerState,
    /// Paths of frozen tensors.
    pub frozen: Vec<String>,
    /// Positions of the data: sampler step, log positions, whatever the caller needs to continue at the exact sample.
    pub cursors: BTreeMap<String, u64>,
    /// Further members of an ensemble; none of a single model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<MemberEntry>,
    /// Level of compression and times of the window, with automatic compression.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub automatic_compression: Option<AutomaticCompression>,
    /// Steps charged to the privacy budget, with privacy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub privacy: Option<PrivacyCharge>,
    /// Columns that the model reads, where it was trained on a table.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<TableColumns>,
    /// Where each tensor is.
    pub tensors: Vec<TensorEntry>,
    /// Sizes and hashes of the files.
    pub files: Vec<FileEntry>,
}

/// Place of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TensorEntry {
    /// Name within its file.
    pub name: String,
    /// The file.
    pub file: String,
    /// First byte within the file.
    pub offset: usize,
    /// Element type, as safetensors names it.
    pub dtype: String,
    /// Shape, row-major.
    pub shape: Vec<usize>,
}

/// Size and hashes of a file. The hashes find damage, not forgery.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FileEntry {
    /// The file.
    pub name: String,
    /// Its size.
    pub bytes: usize,
    /// XXH3-128 of the file, in hexadecimal.
    pub hash: String,
    /// XXH3-128 of each 4 MiB.
    pub chunks: Vec<String>,
}

/// Why a checkpoint cannot be written or restored.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// The manifest cannot be read.
    #[error("manifest.json: failed to parse")]
    Manifest(#[from] serde_json::Error),
    /// Another version of the format.
    #[error("manifest.json: format is {actual}, expected {FORMAT}")]
    Format {
        /// Version in the manifest.
        actual: u32,
    },
    /// A part of the manifest is damaged.
    #[error("manifest.json: is damaged, its hash differs from its content")]
    ManifestDamaged,
    /// A file is absent.
    #[error("{file}: missing from the checkpoint")]
    Missing {
        /// The file.
        file: String,
    },
    /// A file has another size.
    #[error("{file}: size is {actual} bytes, expected {expected}")]
    Size {
        /// The file.
        file: String,
        /// Size of the file.
        actual: usize,
        /// Size in the manifest.
        expected: usize,
    },
    /// A part of a file is damaged.
    #[error("{file}: chunk {chunk} (4 MiB each) is damaged, its hash differs from the manifest's")]
    Damaged {
        /// The file.
        file: String,
        /// Number of the chunk.
        chunk: usize,
    },
    /// The checkpoint is of another model.
    #[error("checkpoint is of another model: it has {actual}, expected {expected}")]
    Model {
        /// First difference in the checkpoint.
        actual: String,
        /// The same in the run's specification.
        expected: String,
    },
    /// The checkpoint's optimizer keeps another state.
    #[error("checkpoint is of optimizer {actual}, expected {expected}")]
    OptimizerKind {
        /// Settings in the checkpoint.
        actual: String,
        /// Settings of the run.
        expected: String,
    },
    /// The specification is not valid.
    #[error("failed to build the trainer")]
    Trainer(#[from] TrainerError),
    /// The weights do not fit.
    #[error("failed to load weights")]
    Weights(#[from] WeightsError),
    /// The optimizer's state does not fit.
    #[error("failed to load optimizer state")]
    Optimizer(#[from] SettingError),
    /// The optimizer's file is not a safetensors file.
    #[error("failed to read {OPTIMIZER_FILE}")]
    OptimizerFile(#[from] SafeTensorError),
}

impl Checkpoint {
    /// Whether all members of a group write the same bytes to a file after a step.
    pub fn is_common(file: &str) -> bool {
        file != FEEDBACK_FILE
    }

    /// Returns the checkpoint of a model that reads this table.
    ///
    /// # Errors
    /// The manifest is damaged.
    pub fn with_table(self, table: &TableColumns) -> Result<Self, CheckpointError> {
        let mut manifest: Manifest = serde_json::from_slice(&self.manifest)?;
        manifest.table = Some(table.clone());
        Ok(Self { manifest: manifest.to_bytes()?, ..self })
    }
}

impl Trainer {
    /// Copies the state of the trainer. `cursors` are the positions of the data.
    ///
    /// # Errors
    /// A tensor cannot be serialized.
    pub fn checkpoint(
        &self,
        generation: u64,
        world: u32,
        cursors: BTreeMap<String, u64>,
    ) -> Result<Checkpoint, CheckpointError> {
        let mut files = BTreeMap::from([
            (MODEL_FILE.to_owned(), self.model.to_safetensors()?),
            (OPTIMIZER_FILE.to_owned(), tensors_file(&self.optimizer.state())?),
        ]);
        if !self.feedback.is_empty() {
            let mut vectors = vec![(FEEDBACK, &self.feedback[..])];
            vectors.extend(self.factors.as_ref().map(|factors| (BASIS, &factors.basis[..])));
            files.insert(FEEDBACK_FILE.to_owned(), tensors_file(&vectors)?);
        }
        let mut tensors = Vec::new();
        for (file, bytes) in &files {
            let (header, metadata) = SafeTensors::read_metadata(bytes)?;
            for (name, info) in metadata.tensors() {
                tensors.push(TensorEntry {
                    name,
                    file: file.clone(),
                    offset: 8 + header + info.data_offsets.0,
                    dtype: info.dtype.to_string(),
                    shape: info.shape.clone(),
                });
            }
        }
        tensors.sort_by(|a, b| (&a.file, a.offset, &a.name).cmp(&(&b.file, b.offset, &b.name)));
        let manifest = Manifest {
            manifest_hash: String::new(),
            format: FORMAT,
            counters: self.counters,
            generation,
            world,
            spec: self.spec.clone(),
            optimizer_steps: self.optimizer.steps(),
            scaler: self.scaler.state(),
            frozen: self.model.views().iter().filter(|v| v.frozen).map(|v| v.name.clone()).collect(),
            cursors,
            members: Vec::new(),
            automatic_compression: self.automatic,
            privacy: self.spec.privacy.map(|_| PrivacyCharge { steps: self.charged }),
            table: None,
            tensors,
            files: files.iter().map(|(name, bytes)| FileEntry::of(name, bytes)).collect(),
        };
        Ok(Checkpoint { manifest: manifest.to_bytes()?, files })
    }

    /// A trainer that continues where the checkpoint was taken, and the positions of the data.
    ///
    /// `spec` is the run's specification: its model must be the checkpoint's, other settings may differ.
    ///
    /// # Errors
    /// A file is missing or damaged, or the checkpoint is of another model.
    pub fn restore(
        spec: &TrainerSpec,
        checkpoint: &Checkpoint,
    ) -> Result<(Self, BTreeMap<String, u64>), CheckpointError> {
        let manifest = checkpoint.verify()?;
        check_model(spec, &manifest)?;
        let mut trainer = Self::new(spec)?;
        trainer.model.load_safetensors(&checkpoint.files[MODEL_FILE], Coverage::Exact)?;
        for view in trainer.model.views().to_vec() {
            let layer = view.name.rsplit_once('.').map_or("", |(layer, _)| layer);
            trainer.model.set_frozen(layer, manifest.frozen.contains(&view.name));
        }
        let file = SafeTensors::deserialize(&checkpoint.files[OPTIMIZER_FILE])?;
        let mut state = Vec::new();
        let expected: Vec<&str> = trainer.optimizer.state().iter().map(|(name, _)| *name).collect();
        if file.len() != expected.len() || expected.iter().any(|name| file.tensor(name).is_err()) {
            let (actual, expected) = (format!("{:?}", manifest.spec.optimizer), format!("{:?}", spec.optimizer));
            return Err(CheckpointError::OptimizerKind { actual, expected });
        }
        for name in expected {
            let values: Vec<f32> =
                file.tensor(name)?.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            state.push(values);
        }
        let state: Vec<&[f32]> = state.iter().map(Vec::as_slice).collect();
        trainer.optimizer.restore(manifest.optimizer_steps, &state)?;
        trainer.scaler.restore(manifest.scaler);
        trainer.counters = manifest.counters;
        trainer.charged = manifest.privacy.map_or(0, |charge| charge.steps);
        if let Some(automatic) = &mut trainer.automatic {
            *automatic = manifest.automatic_compression.unwrap_or_else(AutomaticCompression::after_other_compression);
        }
        trainer.restore_feedback(checkpoint)?;
        Ok((trainer, manifest.cursors))
    }

    /// Takes over what compression lost, if both the specification and the checkpoint have it.
    fn restore_feedback(&mut self, checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
        let Some(bytes) = checkpoint.files.get(FEEDBACK_FILE) else { return Ok(()) };
        let file = SafeTensors::deserialize(bytes)?;
        let vector = |name: &str| -> Result<Vec<f32>, SafeTensorError> {
            Ok(file.tensor(name)?.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
        };
        let lost = vector(FEEDBACK)?;
        if lost.len() == self.feedback.len() {
            self.feedback = lost;
        }
        if let (Some(factors), Ok(basis)) = (&mut self.factors, vector(BASIS))
            && basis.len() == factors.basis.len()
        {
            factors.basis = Arc::new(basis);
        }
        Ok(())
    }

    /// Forgets what compression lost: of a state that another member wrote, which makes up for its own losses.
    pub fn forget_feedback(&mut self) {
        self.feedback.fill(0.0);
    }
}

/// A safetensors file of vectors.
fn tensors_file(vectors: &[(&str, &[f32])]) -> Result<Vec<u8>, CheckpointError> {
    let state: Vec<(&str, Vec<u8>)> =
        vectors.iter().map(|(name, values)| (*name, values.iter().flat_map(|v| v.to_le_bytes()).collect())).collect();
    let mut tensors = Vec::new();
    for (name, bytes) in &state {
        tensors.push((*name, TensorView::new(Dtype::F32, vec![bytes.len() / 4], bytes)?));
    }
    Ok(safetensors::serialize(tensors, None)?)
}

/// Refuses a checkpoint of another model, with the first difference.
fn check_model(spec: &TrainerSpec, manifest: &Manifest) -> Result<(), CheckpointError> {
    let (own, saved) = (&spec.model, &manifest.spec.model);
    let error = |actual: String, expected: String| Err(CheckpointError::Model { actual, expected });
    if own.inputs != saved.inputs {
        return error(format!("{} inputs", saved.inputs), format!("{} inputs", own.inputs));
    }
    let text = |layer: Option<&engram_neural::LayerSpec>| {
        layer.map_or("no layer".to_owned(), |l| serde_json::to_string(l).expect("a layer has only string keys"))
    };
    for i in 0..own.layers.len().max(saved.layers.len()) {
        let (own, saved) = (own.layers.get(i), saved.layers.get(i));
        if own != saved {
            return error(format!("{} at layer {i}", text(saved)), text(own));
        }
    }
    Ok(())
}

impl Checkpoint {
    /// Parses the manifest, and compares it and every file with their hashes.
    ///
    /// # Errors
    /// The manifest cannot be read, or a file is missing or damaged.
    pub fn verify(&self) -> Result<Manifest, CheckpointError> {
        let manifest: Manifest = serde_json::from_slice(&self.manifest)?;
        if manifest.format != FORMAT {
            return Err(CheckpointError::Format { actual: manifest.format });
        }
        if content_hash(&self.manifest, &manifest.manifest_hash).as_ref() != Some(&manifest.manifest_hash) {
            return Err(CheckpointError::ManifestDamaged);
        }
        for name in [MODEL_FILE, OPTIMIZER_FILE] {
            if !manifest.files.iter().any(|f| f.name == name) {
                return Err(CheckpointError::Missing { file: name.to_owned() });
            }
        }
        for entry in &manifest.files {
            let file = entry.name.clone();
            let Some(bytes) = self.files.get(&file) else { return Err(CheckpointError::Missing { file }) };
            entry.verify(bytes)?;
        }
        Ok(manifest)
    }
}

impl Manifest {
    /// Returns the manifest as JSON, with its hash.
    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>, CheckpointError> {
        let bytes = serde_json::to_vec_pretty(&Self { manifest_hash: NO_HASH.to_owned(), ..self.clone() })?;
        let hash = hash(&bytes);
        Ok(replace_hash(&bytes, NO_HASH, &hash).expect("the hash is the first field"))
    }
}

/// Returns the hash of a manifest with zeros in place of `own`, its first field.
fn content_hash(manifest: &[u8], own: &str) -> Option<String> {
    let is_hash = own.len() == NO_HASH.len();
    is_hash.then(|| replace_hash(manifest, own, NO_HASH)).flatten().map(|content| hash(&content))
}

/// Replaces the first occurrence of a hash by another one.
fn replace_hash(manifest: &[u8], from: &str, to: &str) -> Option<Vec<u8>> {
    let at = manifest.windows(from.len()).position(|window| window == from.as_bytes())?;
    let mut replaced = manifest.to_vec();
    replaced[at..at + to.len()].copy_from_slice(to.as_bytes());
    Some(replaced)
}

impl FileEntry {
    fn of(name: &str, bytes: &[u8]) -> Self {
        Self {
            name: name.to_owned(),
            bytes: bytes.len(),
            hash: hash(bytes),
            chunks: bytes.chunks(CHUNK_BYTES).map(hash).collect(),
        }
    }

    /// The same content under another name.
    pub(crate) fn named(&self, name: String) -> Self {
        Self { name, ..self.clone() }
    }

    /// Compares a file with its size and hashes.
    ///
    /// # Errors
    /// The size differs, or a chunk is damaged; the error names the chunk.
    pub fn verify(&self, bytes: &[u8]) -> Result<(), CheckpointError> {
        let file = self.name.clone();
        if bytes.len() != self.bytes {
            return Err(CheckpointError::Size { file, actual: bytes.len(), expected: self.bytes });
        }
        let mut chunks = bytes.chunks(CHUNK_BYTES).map(hash).zip(&self.chunks);
        if let Some(chunk) = chunks.position(|(actual, expected)| actual != *expected) {
            return Err(CheckpointError::Damaged { file, chunk });
        }
        if hash(bytes) != self.hash {
            return Err(CheckpointError::Damaged { file, chunk: 0 });
        }
        Ok(())
    }
}

fn hash(bytes: &[u8]) -> String {
    format!("{:032x}", xxh3_128(bytes))
}
