//! Checkpoints on the disk of a worker.
//!
//! A checkpoint is written into `step-N.incomplete`, flushed, and renamed; then `LATEST` names it. So what `LATEST` names is always
//! complete, at whatever instant the process is killed.

use anyhow::{Context as _, bail};
use engram_train::Checkpoint;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

const LATEST: &str = "LATEST";
const MANIFEST: &str = "manifest.json";
const INCOMPLETE: &str = ".incomplete";
/// Files for users, next to those of the checkpoint itself.
const MODEL_YAML: &str = "model.yaml";
const MODEL_PYTHON: &str = "model.py";
/// Folders of runs that are kept on a worker; of more, the oldest are removed.
const MAX_RUNS: usize = 32;

/// Files of a checkpoint that describe the model for users.
#[derive(Debug, Clone)]
pub(super) struct ModelFiles {
    pub(super) yaml: String,
    pub(super) python: String,
}

/// The folder with the checkpoints of one run.
#[derive(Debug, Clone)]
pub(super) struct CheckpointFolder {
    path: PathBuf,
    keep: usize,
}

/// Returns the folder of all training runs.
fn root(state_dir: &Path) -> PathBuf {
    state_dir.join("training")
}

impl CheckpointFolder {
    pub(super) fn new(state_dir: &Path, run: engram_memory::RunId, submitted_ms: u64, keep: u64) -> Self {
        let path = root(state_dir).join(format!("{run}-{submitted_ms}"));
        Self { path, keep: usize::try_from(keep).unwrap_or(usize::MAX) }
    }

    /// Returns the newest complete checkpoint of the runs with this id, which is that of their name.
    pub(super) fn newest_of(state_dir: &Path, run: engram_memory::RunId) -> Option<Checkpoint> {
        Self::newest_with_time(state_dir, run).map(|(_, checkpoint)| checkpoint)
    }

    /// Returns the same, with the submission time of its run.
    pub(super) fn newest_with_time(state_dir: &Path, run: engram_memory::RunId) -> Option<(u64, Checkpoint)> {
        let entries = fs::read_dir(root(state_dir)).ok()?.flatten();
        let prefix = format!("{run}-");
        let time = |entry: fs::DirEntry| entry.file_name().to_str()?.strip_prefix(&prefix)?.parse::<u64>().ok();
        let mut times: Vec<u64> = entries.filter_map(time).collect();
        times.sort_unstable();
        times.into_iter().rev().find_map(|time| Some((time, Self::new(state_dir, run, time, 1).latest()?.1)))
    }

    /// Returns the folder of a step.
    pub(super) fn step(&self, step: u64) -> PathBuf {
        self.path.join(format!("step-{step}"))
    }

    /// Writes a checkpoint and removes older ones.
    ///
    /// # Errors
    /// The disk fails or is full.
    pub(super) fn write(&self, step: u64, checkpoint: &Checkpoint, model: &ModelFiles) -> anyhow::Result<()> {
        let target = self.step(step);
        if !target.exists() {
            self.forget_oldest_runs();
            let incomplete = self.path.join(format!("step-{step}{INCOMPLETE}"));
            remove_folder(&incomplete)?;
            fs::create_dir_all(&incomplete).with_context(|| format!("failed to create {}", incomplete.display()))?;
            for (name, bytes) in &checkpoint.files {
                write_file(&incomplete.join(name), bytes)?;
            }
            write_file(&incomplete.join(MODEL_YAML), model.yaml.as_bytes())?;
            write_file(&incomplete.join(MODEL_PYTHON), model.python.as_bytes())?;
            write_file(&incomplete.join(MANIFEST), &checkpoint.manifest)?;
            sync_folder(&incomplete)?;
            fs::rename(&incomplete, &target).with_context(|| format!("failed to rename {}", incomplete.display()))?;
            sync_folder(&self.path)?;
        }
        let latest = self.path.join(format!("{LATEST}{INCOMPLETE}"));
        write_file(&latest, format!("step-{step}\n").as_bytes())?;
        fs::rename(&latest, self.path.join(LATEST)).context("failed to rename LATEST")?;
        sync_folder(&self.path)?;
        for old in self.steps().into_iter().filter(|other| *other < step).rev().skip(self.keep.saturating_sub(1)) {
            remove_folder(&self.step(old))?;
        }
        Ok(())
    }

    /// Returns the newest complete checkpoint and its step; `None` if there is none. Damaged ones are skipped.
    pub(super) fn latest(&self) -> Option<(u64, Checkpoint)> {
        let named = fs::read_to_string(self.path.join(LATEST)).ok()?;
        let named: u64 = named.trim().strip_prefix("step-")?.parse().ok()?;
        for step in self.steps().into_iter().filter(|step| *step <= named).rev() {
            match read(&self.step(step)) {
                Ok(checkpoint) => return Some((step, checkpoint)),
                Err(error) => {
                    let path = self.step(step).display().to_string();
                    tracing::error!(path, error = format!("{error:#}"), "skipped a damaged checkpoint");
                }
            }
        }
        None
    }

    /// Returns the steps of complete checkpoints, ascending.
    fn steps(&self) -> Vec<u64> {
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        let name = |entry: fs::DirEntry| entry.file_name().to_str()?.strip_prefix("step-")?.parse().ok();
        let mut steps: Vec<u64> = entries.filter_map(name).collect();
        steps.sort_unstable();
        steps
    }

    /// Removes the folders of the oldest other runs.
    fn forget_oldest_runs(&self) {
        let Some(root) = self.path.parent().filter(|_| !self.path.exists()) else { return };
        let entries = fs::read_dir(root).into_iter().flatten().flatten();
        let mut runs: Vec<_> =
            entries.filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path()))).collect();
        runs.sort();
        let surplus = (runs.len() + 1).saturating_sub(MAX_RUNS);
        for (_, path) in runs.into_iter().take(surplus) {
            if let Err(error) = fs::remove_dir_all(&path) {
                tracing::warn!(path = %path.display(), %error, "failed to remove the checkpoints of an old run");
            }
        }
    }
}

/// Reads and verifies a checkpoint.
fn read(folder: &Path) -> anyhow::Result<Checkpoint> {
    let manifest = fs::read(folder.join(MANIFEST)).context("failed to read manifest.json")?;
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { bail!("a file name is not UTF-8") };
        if ![MANIFEST, MODEL_YAML, MODEL_PYTHON].contains(&&*name) {
            files.insert(name, fs::read(entry.path())?);
        }
    }
    let checkpoint = Checkpoint { manifest, files };
    checkpoint.verify()?;
    Ok(checkpoint)
}

fn write_file(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().with_context(|| format!("failed to write {}", path.display()))
}

fn sync_folder(path: &Path) -> anyhow::Result<()> {
    File::open(path)
        .and_then(|folder| folder.sync_all())
        .with_context(|| format!("failed to flush the folder {}", path.display()))
}

fn remove_folder(path: &Path) -> anyhow::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("failed to remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_memory::RunId;
    use engram_train::{Alone, SummationOrder, Trainer, TrainerSpec};

    fn checkpoint() -> Checkpoint {
        let spec: TrainerSpec = serde_json::from_value(serde_json::json!({
            "model": { "inputs": 3, "layers": [{ "dense": 1 }] },
            "loss": { "kind": "Mse" },
            "schedule": { "rate": 0.1 },
        }))
        .unwrap();
        let mut trainer = Trainer::new(&spec).unwrap();
        trainer.step(&[], &SummationOrder::Rank { leaves: 1 }, &mut Alone).unwrap();
        trainer.checkpoint(1, 1, BTreeMap::new()).unwrap()
    }

    #[test]
    fn latest_names_a_complete_checkpoint_and_a_damaged_one_is_skipped() {
        let state = tempfile::tempdir().unwrap();
        let folder = CheckpointFolder::new(state.path(), RunId(7), 5, 2);
        let model = ModelFiles { yaml: "inputs: 3\n".into(), python: String::new() };
        assert!(folder.latest().is_none());
        for step in [10, 20, 30] {
            folder.write(step, &checkpoint(), &model).unwrap();
        }
        assert_eq!(folder.steps(), [20, 30]);
        // What a killed process leaves is no checkpoint.
        fs::create_dir(folder.path.join("step-40.incomplete")).unwrap();
        assert_eq!(folder.latest().unwrap().0, 30);
        let damaged = folder.step(30).join("model.safetensors");
        let mut bytes = fs::read(&damaged).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&damaged, bytes).unwrap();
        assert_eq!(folder.latest().unwrap(), (20, checkpoint()));
    }
}
