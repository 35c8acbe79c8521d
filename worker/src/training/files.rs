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
pub(super) const MANIFEST: &str = "manifest.json";
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

impl ModelFiles {
    /// Returns names and contents.
    pub(super) fn files(&self) -> [(&'static str, &str); 2] {
        [(MODEL_YAML, self.yaml.as_str()), (MODEL_PYTHON, self.python.as_str())]
    }
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
            interruption::point()?;
            fs::create_dir_all(&incomplete).with_context(|| format!("failed to create {}", incomplete.display()))?;
            for (name, bytes) in &checkpoint.files {
                write_file(&incomplete.join(name), bytes)?;
            }
            for (name, text) in model.files() {
                write_file(&incomplete.join(name), text.as_bytes())?;
            }
            write_file(&incomplete.join(MANIFEST), &checkpoint.manifest)?;
            sync_folder(&incomplete)?;
            interruption::point()?;
            fs::rename(&incomplete, &target).with_context(|| format!("failed to rename {}", incomplete.display()))?;
            sync_folder(&self.path)?;
        }
        let latest = self.path.join(format!("{LATEST}{INCOMPLETE}"));
        write_file(&latest, format!("step-{step}\n").as_bytes())?;
        interruption::point()?;
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
        interruption::point()?;
        let mut file = File::create(path)?;
        for part in interruption::parts(bytes) {
            interruption::point()?;
            file.write_all(part)?;
        }
        interruption::sync(&file)
    };
    write().with_context(|| format!("failed to write {}", path.display()))
}

fn sync_folder(path: &Path) -> anyhow::Result<()> {
    File::open(path)
        .and_then(|folder| interruption::sync(&folder))
        .with_context(|| format!("failed to flush the folder {}", path.display()))
}

fn remove_folder(path: &Path) -> anyhow::Result<()> {
    interruption::removal(path)?;
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("failed to remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Points at which a test ends the work on files as the end of the process would.
#[cfg(not(test))]
mod interruption {
    use std::fs::File;
    use std::io;
    use std::path::Path;

    pub(super) fn sync(file: &File) -> io::Result<()> {
        file.sync_all()
    }

    #[expect(clippy::unnecessary_wraps, reason = "fails in tests")]
    pub(super) const fn point() -> io::Result<()> {
        Ok(())
    }

    #[expect(clippy::unnecessary_wraps, reason = "fails in tests")]
    pub(super) const fn removal(_path: &Path) -> io::Result<()> {
        Ok(())
    }

    pub(super) const fn parts(bytes: &[u8]) -> [&[u8]; 1] {
        [bytes]
    }
}

#[cfg(test)]
mod interruption {
    use std::cell::Cell;
    use std::path::Path;
    use std::{fs, io};

    thread_local! {
        /// Points until the end; `None` for no end.
        static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
    }

    /// Ends the work of this thread on files at a point from here.
    pub(super) fn set(left: Option<u32>) {
        LEFT.set(left);
    }

    pub(super) fn point() -> io::Result<()> {
        match LEFT.get() {
            Some(0) => Err(io::Error::other("interrupted")),
            left => {
                LEFT.set(left.map(|left| left - 1));
                Ok(())
            }
        }
    }

    /// Flushes nothing: the end of a process, other than that of a machine, loses no write.
    pub(super) fn sync(_file: &fs::File) -> io::Result<()> {
        point()
    }

    /// An interrupted removal has removed a file.
    pub(super) fn removal(path: &Path) -> io::Result<()> {
        point()?;
        point().inspect_err(|_| {
            let first = fs::read_dir(path).into_iter().flatten().flatten().next();
            first.into_iter().for_each(|file| drop(fs::remove_file(file.path())));
        })
    }

    pub(super) fn parts(bytes: &[u8]) -> [&[u8]; 2] {
        let (first, second) = bytes.split_at(bytes.len() / 2);
        [first, second]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_memory::RunId;
    use engram_train::{Alone, SummationOrder, Trainer, TrainerSpec};

    /// A save is interrupted at each of its operations on files, as by `kill -9`, and within writes and removals.
    #[test]
    fn interrupted_save_leaves_a_checkpoint_that_loads_and_the_next_save_succeeds() {
        let model = ModelFiles { yaml: "inputs: 3\n".into(), python: "import torch\n".into() };
        for before in [&[][..], &[10], &[10, 20]] {
            let interrupted = (0..)
                .take_while(|&point| {
                    let state = tempfile::tempdir().unwrap();
                    let folder = CheckpointFolder::new(state.path(), RunId(7), 5, 1 + before.len() as u64 / 2);
                    before.iter().for_each(|step| folder.write(*step, &checkpoint(), &model).unwrap());
                    interruption::set(Some(point));
                    let written = folder.write(30, &checkpoint(), &model);
                    interruption::set(None);
                    let latest = folder.latest();
                    let allowed: Vec<u64> = before.last().copied().into_iter().chain([30]).collect();
                    match &latest {
                        Some((step, found)) => assert!(allowed.contains(step) && *found == checkpoint(), "{point}"),
                        None => assert!(before.is_empty() && written.is_err(), "{point}"),
                    }
                    for step in [30, 40] {
                        folder.write(step, &checkpoint(), &model).unwrap();
                        assert_eq!(folder.latest().unwrap().0, step, "{point}");
                    }
                    written.is_err()
                })
                .count();
            assert!(interrupted > 30, "{interrupted} operations");
        }
    }

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
