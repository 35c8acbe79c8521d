//! Checkpoints of ensembles: the files of the first member have the names of a single model's, those of member k have its number.

use std::collections::BTreeMap;

use engram_neural::ScalerState;
use serde::{Deserialize, Serialize};

use crate::checkpoint::{Checkpoint, CheckpointError, Manifest};
use crate::ensemble::{Ensemble, member_seed, member_specs};
use crate::trainer::{Counters, Trainer, TrainerSpec};

/// State of a further member of an ensemble.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MemberEntry {
    /// Its seed.
    pub seed: u64,
    /// Its steps, updates and samples.
    pub counters: Counters,
    /// Steps of its optimizer.
    pub optimizer_steps: u64,
    /// State of its loss scaler.
    pub scaler: ScalerState,
}

/// Returns the name of a member's file: `model.safetensors` of member 2 is `model-2.safetensors`.
fn file_of(name: &str, member: usize) -> String {
    match name.split_once('.') {
        Some((stem, extension)) if member > 0 => format!("{stem}-{member}.{extension}"),
        _ => name.to_owned(),
    }
}

/// Returns the name that a file of a member has in a checkpoint of its own; `None` for files of others.
fn original_name(name: &str, member: usize) -> Option<String> {
    let (stem, extension) = name.split_once('.')?;
    let (stem, number) = match stem.rsplit_once('-') {
        Some((stem, number)) => (stem, number.parse().ok()?),
        None => (stem, 0),
    };
    (number == member).then(|| format!("{stem}.{extension}"))
}

impl Manifest {
    /// Number of models in the checkpoint.
    pub fn models(&self) -> usize {
        self.members.len() + 1
    }
}

impl Checkpoint {
    /// Returns the weights of all models as safetensors files, in order.
    ///
    /// # Errors
    /// The manifest is damaged.
    pub fn weights(&self) -> Result<Vec<Vec<u8>>, CheckpointError> {
        let manifest: Manifest = serde_json::from_slice(&self.manifest)?;
        let file = |member| self.files.get(&file_of("model.safetensors", member)).cloned();
        Ok((0..manifest.models()).filter_map(file).collect())
    }

    /// The checkpoint of one member.
    fn member(&self, manifest: &Manifest, member: usize) -> Result<Self, CheckpointError> {
        let mut own = Manifest { members: Vec::new(), ..manifest.clone() };
        if let Some(entry) = member.checked_sub(1).and_then(|at| manifest.members.get(at)) {
            own.spec.seed = entry.seed;
            (own.counters, own.optimizer_steps, own.scaler) = (entry.counters, entry.optimizer_steps, entry.scaler);
        }
        let name = |name: &str| original_name(name, member);
        own.files = manifest
            .files
            .iter()
            .filter_map(|it| Some((name(&it.name)?, it)))
            .map(|(name, it)| it.named(name))
            .collect();
        own.tensors.retain_mut(|tensor| name(&tensor.file).map(|file| tensor.file = file).is_some());
        let files = self.files.iter().filter_map(|(file, bytes)| Some((name(file)?, bytes.clone()))).collect();
        Ok(Self { manifest: own.to_bytes()?, files })
    }
}

impl Ensemble {
    /// Copies the state of all members. `cursors` are the positions of the data.
    ///
    /// # Errors
    /// A tensor cannot be serialized.
    pub fn checkpoint(
        &self,
        generation: u64,
        world: u32,
        cursors: BTreeMap<String, u64>,
    ) -> Result<Checkpoint, CheckpointError> {
        let mut all = self.first().checkpoint(generation, world, cursors)?;
        if self.members().len() == 1 {
            return Ok(all);
        }
        let mut manifest: Manifest = serde_json::from_slice(&all.manifest)?;
        for (number, member) in self.members().iter().enumerate().skip(1) {
            let own = member.checkpoint(generation, world, BTreeMap::new())?;
            let entry: Manifest = serde_json::from_slice(&own.manifest)?;
            manifest.members.push(MemberEntry {
                seed: entry.spec.seed,
                counters: entry.counters,
                optimizer_steps: entry.optimizer_steps,
                scaler: entry.scaler,
            });
            let files = entry.files.iter().map(|file| file.named(file_of(&file.name, number)));
            manifest.files.extend(files);
            manifest.tensors.extend(entry.tensors.into_iter().map(|mut tensor| {
                tensor.file = file_of(&tensor.file, number);
                tensor
            }));
            all.files.extend(own.files.into_iter().map(|(name, bytes)| (file_of(&name, number), bytes)));
        }
        all.manifest = manifest.to_bytes()?;
        Ok(all)
    }

    /// An ensemble of `members` members that continues where the checkpoint was taken, and the positions of the data. `spec` is that of the run.
    ///
    /// # Errors
    /// A file is missing or damaged, or the checkpoint is of another model, another number of members or, with several, other seeds.
    pub fn restore(
        spec: &TrainerSpec,
        members: usize,
        checkpoint: &Checkpoint,
    ) -> Result<(Self, BTreeMap<String, u64>), CheckpointError> {
        let manifest = checkpoint.verify()?;
        if manifest.models() != members {
            let (actual, expected) =
                (format!("{} models", manifest.models()), format!("{members}, spec.replay.ensemble"));
            return Err(CheckpointError::Model { actual, expected });
        }
        if members == 1 {
            let (trainer, cursors) = Trainer::restore(spec, checkpoint)?;
            return Ok((vec![trainer].into(), cursors));
        }
        for (at, entry) in manifest.members.iter().enumerate() {
            let expected = member_seed(spec.seed, at + 1);
            if entry.seed != expected {
                let (actual, expected) =
                    (format!("seed {} of member {}", entry.seed, at + 1), format!("seed {expected}"));
                return Err(CheckpointError::Model { actual, expected });
            }
        }
        let specs = member_specs(spec, members);
        let restore = |(number, spec): (usize, &TrainerSpec)| {
            Ok(Trainer::restore(spec, &checkpoint.member(&manifest, number)?)?.0)
        };
        let trainers: Result<Vec<Trainer>, CheckpointError> = specs.iter().enumerate().map(restore).collect();
        Ok((trainers?.into(), manifest.cursors))
    }
}
