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
pub(in crate::training) const MANIFEST: &str = "manifest.json";
const INCOMPLETE: &str = ".incomplete";
/// Files for users, next to those of the checkpoint itself.
const MODEL_YAML: &str = "model.yaml";
const MODEL_PYTHON: &str = "model.py";
/// Folders of runs that are kept on a worker; of more, the oldest are removed.
const MAX_RUNS: usize = 32;

/// Files of a checkpoint that describe the model for users.
#[derive(Debug, Clone)]
pub(in crate::training) struct ModelFiles {
    pub(in crate::training) yaml: String,
    pub(in crate::training) python: String,
}

impl ModelFiles {
    /// Returns names and contents.
    pub(in crate::training) fn files(&self) -> [(&'static str, &str); 2] {
        [(MODEL_YAML, self.yaml.as_str()), (MODEL_PYTHON, self.python.as_str())]
    }
}

/// The folder with the checkpoints of one run.
#[derive(Debug, Clone)]
pub(in crate::training) struct CheckpointFolder {
    path: PathBuf,
    keep: usize,
}

/// Returns the folder of all training runs.
fn root(state_dir: &Path) -> PathBuf {
    state_dir.join("training")
}

impl CheckpointFolder {
    pub(in crate::training) fn new(state_dir: &Path, run: engram_memory::RunId, submitted_ms: u64, keep: u64) -> Self {
        let path = root(state_dir).join(format!("{run}-{submitted_ms}"));
        Self { path, keep: usize::try_from(keep).unwrap_or(usize::MAX) }
    }

    /// Returns the newest complete checkpoint of the runs with this id, which is that of their name.
    pub(in crate::training) fn newest_of(state_dir: &Path, run: engram_memory::RunId) -> Option<Checkpoint> {
        Self::newest_with_time(state_dir, run).map(|(_, checkpoint)| checkpoint)
    }

    /// Returns the same, with the submission time of its run.
    pub(in crate::training) fn newest_with_time(
        state_dir: &Path,
        run: engram_memory::RunId,
    ) -> Option<(u64, Checkpoint)> {
        let entries = fs::read_dir(root(state_dir)).ok()?.flatten();
        let prefix = format!("{run}-");
        let time = |entry: fs::DirEntry| entry.file_name().to_str()?.strip_prefix(&prefix)?.parse::<u64>().ok();
        let mut times: Vec<u64> = entries.filter_map(time).collect();
        times.sort_unstable();
        times.into_iter().rev().find_map(|time| Some((time, Self::new(state_dir, run, time, 1).latest()?.1)))
    }

    /// Returns the folder of a step.
    pub(in crate::training) fn step(&self, step: u64) -> PathBuf {
        self.path.join(format!("step-{step}"))
    }

    /// Writes a checkpoint and removes older ones.
    ///
    /// # Errors
    /// The disk fails or is full.
    pub(in crate::training) fn write(
        &self,
        step: u64,
        checkpoint: &Checkpoint,
        model: &ModelFiles,
    ) -> anyhow::Result<()> {
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
            interruption::rename(&incomplete, &target)
                .with_context(|| format!("failed to rename {}", incomplete.display()))?;
            sync_folder(&self.path)?;
        }
        let latest = self.path.join(format!("{LATEST}{INCOMPLETE}"));
        write_file(&latest, format!("step-{step}\n").as_bytes())?;
        interruption::rename(&latest, &self.path.join(LATEST)).context("failed to rename LATEST")?;
        sync_folder(&self.path)?;
        for old in self.steps().into_iter().filter(|other| *other < step).rev().skip(self.keep.saturating_sub(1)) {
            remove_folder(&self.step(old))?;
        }
        Ok(())
    }

    /// Returns the newest complete checkpoint and its step; `None` if there is none. Damaged ones are skipped.
    pub(in crate::training) fn latest(&self) -> Option<(u64, Checkpoint)> {
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
        interruption::sync(&file, path)
    };
    write().with_context(|| format!("failed to write {}", path.display()))
}

fn sync_folder(path: &Path) -> anyhow::Result<()> {
    File::open(path)
        .and_then(|folder| interruption::sync(&folder, path))
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
    use std::fs::{self, File};
    use std::io;
    use std::path::Path;

    pub(in crate::training) fn sync(file: &File, _path: &Path) -> io::Result<()> {
        file.sync_all()
    }

    pub(in crate::training) fn rename(from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    #[expect(clippy::unnecessary_wraps, reason = "fails in tests")]
    pub(in crate::training) const fn point() -> io::Result<()> {
        Ok(())
    }

    #[expect(clippy::unnecessary_wraps, reason = "fails in tests")]
    pub(in crate::training) const fn removal(_path: &Path) -> io::Result<()> {
        Ok(())
    }

    pub(in crate::training) const fn parts(bytes: &[u8]) -> [&[u8]; 1] {
        [bytes]
    }
}

#[cfg(test)]
mod interruption {
    use std::cell::{Cell, RefCell};
    use std::path::{Path, PathBuf};
    use std::{fs, io};

    thread_local! {
        /// Points until the end; `None` for no end.
        static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
        static JOURNAL: RefCell<Vec<Operation>> = const { RefCell::new(Vec::new()) };
    }

    /// What decides what the end of a machine leaves.
    #[derive(Debug)]
    pub(in crate::training) enum Operation {
        /// A file of this length, or a folder, was flushed.
        Flushed(PathBuf, u64),
        /// A file, or a folder of files, got another name.
        Renamed { from: PathBuf, to: PathBuf, files: Vec<(PathBuf, u64)> },
    }

    /// Returns the operations of this thread since the last call.
    pub(in crate::training) fn take_journal() -> Vec<Operation> {
        JOURNAL.take()
    }

    /// Ends the work of this thread on files at a point from here.
    pub(in crate::training) fn set(left: Option<u32>) {
        LEFT.set(left);
    }

    pub(in crate::training) fn point() -> io::Result<()> {
        match LEFT.get() {
            Some(0) => Err(io::Error::other("interrupted")),
            left => {
                LEFT.set(left.map(|left| left - 1));
                Ok(())
            }
        }
    }

    /// Flushes nothing: the end of a process, other than that of a machine, loses no write.
    pub(in crate::training) fn sync(file: &fs::File, path: &Path) -> io::Result<()> {
        point()?;
        let flushed = Operation::Flushed(path.to_owned(), file.metadata()?.len());
        JOURNAL.with_borrow_mut(|journal| journal.push(flushed));
        Ok(())
    }

    pub(in crate::training) fn rename(from: &Path, to: &Path) -> io::Result<()> {
        point()?;
        let paths: Vec<PathBuf> = if from.is_dir() {
            fs::read_dir(from)?.map(|entry| entry.map(|it| it.path())).collect::<io::Result<_>>()?
        } else {
            vec![from.to_owned()]
        };
        let length = |path: PathBuf| fs::metadata(&path).map(|it| (path, it.len()));
        let files = paths.into_iter().map(length).collect::<io::Result<_>>()?;
        let renamed = Operation::Renamed { from: from.to_owned(), to: to.to_owned(), files };
        JOURNAL.with_borrow_mut(|journal| journal.push(renamed));
        fs::rename(from, to)
    }

    /// An interrupted removal has removed a file.
    pub(in crate::training) fn removal(path: &Path) -> io::Result<()> {
        point()?;
        point().inspect_err(|_| {
            let first = fs::read_dir(path).into_iter().flatten().flatten().next();
            first.into_iter().for_each(|file| drop(fs::remove_file(file.path())));
        })
    }

    pub(in crate::training) fn parts(bytes: &[u8]) -> [&[u8]; 2] {
        let (first, second) = bytes.split_at(bytes.len() / 2);
        [first, second]
    }
}

#[cfg(test)]
mod tests {
    use super::interruption::Operation;
    use super::*;
    use engram_memory::RunId;
    use engram_train::{Alone, SummationOrder, Trainer, TrainerSpec};
    use std::io::{BufRead as _, BufReader};
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

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

    /// What a machine that loses its power keeps: a name is durable after its files are, and the next name after it.
    #[test]
    fn save_flushes_files_before_their_name_and_each_name_before_the_next() {
        let state = tempfile::tempdir().unwrap();
        let folder = CheckpointFolder::new(state.path(), RunId(7), 5, 1);
        let model = ModelFiles { yaml: "inputs: 3\n".into(), python: "import torch\n".into() };
        interruption::take_journal();
        [10, 20].iter().for_each(|step| folder.write(*step, &checkpoint(), &model).unwrap());
        let journal = interruption::take_journal();
        let is_flushed = |operations: &[Operation], path: &Path, expected: Option<u64>| {
            let matches = |it: &Operation| matches!(it, Operation::Flushed(other, length) if other == path && expected.is_none_or(|expected| expected == *length));
            operations.iter().any(matches)
        };
        let mut names = Vec::new();
        for (at, operation) in journal.iter().enumerate() {
            let Operation::Renamed { from, to, files } = operation else { continue };
            names.push(to.file_name().unwrap().to_str().unwrap());
            let (before, after) = (&journal[..at], &journal[at + 1..]);
            for (file, length) in files {
                assert!(is_flushed(before, file, Some(*length)), "{} of {length} bytes", file.display());
            }
            assert!(files.len() == 1 || is_flushed(before, from, None), "{}", from.display());
            let next = after.iter().position(|it| matches!(it, Operation::Renamed { .. })).unwrap_or(after.len());
            assert!(is_flushed(&after[..next], to.parent().unwrap(), None), "{}", to.display());
        }
        assert_eq!(names, ["step-10", "LATEST", "step-20", "LATEST"]);
    }

    const KILLS: u64 = 200;
    /// Set in the process that is killed: the folder of its state.
    const SAVES_TO: &str = "ENGRAM_TEST_SAVES_TO";

    fn folder_of_saves(state: &Path) -> CheckpointFolder {
        CheckpointFolder::new(state, RunId(7), 5, 2)
    }

    /// Saves one checkpoint after another, and writes a line before each.
    fn save_until_killed(state: &Path) -> ! {
        let folder = folder_of_saves(state);
        let first = folder.latest().map_or(1, |(step, _)| step + 1);
        let model = ModelFiles { yaml: "inputs: 3\n".into(), python: "import torch\n".into() };
        let trainer = trainer_of(64);
        for step in first.. {
            let checkpoint = trainer.checkpoint(1, 1, BTreeMap::from([("step".to_owned(), step)])).unwrap();
            std::io::stdout().write_all(b"saves\n").unwrap();
            folder.write(step, &checkpoint, &model).unwrap();
        }
        unreachable!("the range has no end")
    }

    #[test]
    fn latest_loads_after_each_of_many_kills_within_saves() {
        if let Some(state) = std::env::var_os(SAVES_TO) {
            save_until_killed(Path::new(&state));
        }
        let state = tempfile::tempdir().unwrap();
        let folder = folder_of_saves(state.path());
        let (_, module) = module_path!().split_once("::").unwrap();
        let name = format!("{module}::latest_loads_after_each_of_many_kills_within_saves");
        let is_saving = || {
            let names = fs::read_dir(&folder.path).unwrap().map(|it| it.unwrap().file_name());
            names.into_iter().any(|it| it.to_string_lossy().ends_with(INCOMPLETE))
        };
        let (mut newest, mut within) = (0, 0);
        for kill in 0..KILLS {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", &name, "--nocapture"]).env(SAVES_TO, state.path());
            let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
            let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
            let saves = lines.by_ref().map(Result::unwrap).filter(|line| line == "saves").take(2).count();
            // Every other kill comes soon after the first file of a save; the others anywhere within about the time of a save and what is between
            // two.
            let mut micros = kill * 7_919 % 2_003;
            if kill % 2 == 0 {
                let deadline = Instant::now() + Duration::from_secs(30);
                while !is_saving() {
                    assert!(Instant::now() < deadline, "kill {kill}: no save in 30 s");
                }
                micros /= 10;
            }
            std::thread::sleep(Duration::from_micros(micros));
            process.kill().unwrap();
            process.wait().unwrap();
            assert_eq!(saves, 2, "kill {kill}");
            within += u64::from(is_saving());
            let named = fs::read_to_string(folder.path.join(LATEST)).unwrap();
            let step: u64 = named.trim().strip_prefix("step-").unwrap().parse().unwrap();
            let manifest = read(&folder.step(step)).unwrap_or_else(|error| panic!("kill {kill}: {error:#}")).verify();
            assert_eq!(manifest.unwrap().cursors["step"], step, "kill {kill}");
            assert_eq!(folder.latest().unwrap().0, step, "kill {kill}");
            assert!(step > newest, "kill {kill}: step {step} after {newest}");
            newest = step;
        }
        assert!(within > KILLS / 10, "{within} of {KILLS} kills were within a save");
    }

    fn checkpoint() -> Checkpoint {
        trainer_of(1).checkpoint(1, 1, BTreeMap::new()).unwrap()
    }

    /// A trainer of a layer with so many outputs, after a step.
    fn trainer_of(outputs: usize) -> Trainer {
        let spec: TrainerSpec = serde_json::from_value(serde_json::json!({
            "model": { "inputs": 3, "layers": [{ "dense": outputs }, { "dense": 1 }] },
            "loss": { "kind": "Mse" },
            "schedule": { "rate": 0.1 },
        }))
        .unwrap();
        let mut trainer = Trainer::new(&spec).unwrap();
        trainer.step(&[], &SummationOrder::Rank { leaves: 1 }, &mut Alone).unwrap();
        trainer
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
