//! Updates on disk that wait for a connection.
//!
//! Each is one file, written under another name first and then renamed, so a file is whole or absent after a power failure. The queue is bounded in
//! number and bytes over all runs of the device; the oldest updates make room, since they are the first that the server would refuse as too old.

use crate::{Error, Training};
use engram_federated::error::InvalidInput;
use engram_federated::service::{decode_values, digest, encode_values};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};

/// Ending of the files.
const EXTENSION: &str = "update";
/// Beginning of the names of files that are not complete.
const UNFINISHED: &str = ".unfinished";

/// Bounds of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most updates.
    pub updates: usize,
    /// Most bytes of all updates.
    pub bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { updates: 1_000, bytes: 256 << 20 }
    }
}

/// An update that was computed and is not acknowledged.
#[derive(Debug, Clone, PartialEq)]
pub struct QueuedUpdate {
    /// The run.
    pub run: String,
    /// The task.
    pub task: u64,
    /// What is reported with it.
    pub training: Training,
    /// The update.
    pub update: Vec<f32>,
}

/// An update that left the queue without having been sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DroppedUpdate {
    /// Run and task; `None` if the file cannot be read.
    pub task: Option<(String, u64)>,
    /// Bytes on disk.
    pub bytes: u64,
}

#[derive(Serialize, Deserialize)]
struct Head {
    run: String,
    task: u64,
    samples: u64,
    loss: Option<f64>,
    rate_sum: Option<f64>,
    digest: [u8; 32],
}

/// A file of the queue.
#[derive(Debug)]
struct Entry {
    bytes: u64,
    /// Run and task; `None` if it is damaged.
    task: Option<(String, u64)>,
}

/// A queue in a folder. One process at a time uses it.
#[derive(Debug)]
pub struct Queue {
    folder: PathBuf,
    limits: Limits,
    /// Files by number, oldest first.
    files: BTreeMap<u64, Entry>,
    dropped: Vec<DroppedUpdate>,
    /// Locked as long as it is open.
    _lock: File,
}

impl Queue {
    /// Opens the queue in a folder, which is created if it does not exist. What exceeds the bounds is dropped, the oldest first.
    ///
    /// # Errors
    /// The folder cannot be read, or another process uses it.
    pub fn open(folder: &Path, limits: Limits) -> Result<Self, Error> {
        let error = |source| Error::file(folder, source);
        std::fs::create_dir_all(folder).map_err(error)?;
        let lock = File::create(folder.join("lock")).map_err(error)?;
        lock.try_lock().map_err(|failure| match failure {
            TryLockError::WouldBlock => error(std::io::Error::other("another process uses this queue")),
            TryLockError::Error(failure) => error(failure),
        })?;
        let mut files = BTreeMap::new();
        for entry in std::fs::read_dir(folder).map_err(error)? {
            let entry = entry.map_err(error)?;
            let path = entry.path();
            if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
                // Left by a power failure.
                std::fs::remove_file(&path).map_err(|source| Error::file(&path, source))?;
                continue;
            }
            let is_update = path.extension().is_some_and(|extension| extension == EXTENSION);
            let number = path.file_stem().and_then(|stem| stem.to_str()?.parse().ok()).filter(|_| is_update);
            if let Some(number) = number {
                let bytes = entry.metadata().map_err(error)?.len();
                files.insert(number, Entry { bytes, task: task_of(&path) });
            }
        }
        let mut queue = Self { folder: folder.to_owned(), limits, files, dropped: Vec::new(), _lock: lock };
        queue.make_room(0, 0)?;
        Ok(queue)
    }

    /// Number of updates.
    #[must_use]
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Bytes of all updates on disk.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.files.values().map(|entry| entry.bytes).sum()
    }

    /// Returns the updates that made room for newer ones, or could not be read, since the last call.
    pub fn take_dropped(&mut self) -> Vec<DroppedUpdate> {
        std::mem::take(&mut self.dropped)
    }

    fn path(&self, number: u64) -> PathBuf {
        self.folder.join(format!("{number:020}.{EXTENSION}"))
    }

    /// Checks that an update of so many values fits when the others make room.
    ///
    /// # Errors
    /// It is larger than the bounds.
    pub fn check_size(&self, values: usize) -> Result<(), InvalidInput> {
        // A head has less than a kibibyte.
        let bytes = 4 * values as u64 + 1_024;
        let Limits { updates, bytes: most } = self.limits;
        if bytes > most || updates == 0 {
            let allowed = format!("at most {updates} updates and {most} bytes in all");
            return Err(InvalidInput::new("queue", format!("an update of {bytes} bytes"), allowed));
        }
        Ok(())
    }

    /// Adds an update. It is on disk when this returns.
    ///
    /// # Errors
    /// It is larger than the bounds, or the disk refuses it.
    pub fn push(&mut self, update: &QueuedUpdate) -> Result<(), Error> {
        self.check_size(update.update.len())?;
        let content = encode_values(&update.update);
        let Training { samples, loss, rate_sum } = update.training;
        let (run, task) = (update.run.clone(), update.task);
        let head = Head { run: run.clone(), task, samples, loss, rate_sum, digest: digest(&content) };
        let mut bytes = serde_json::to_vec(&head).expect("a head has string keys only");
        bytes.push(b'\n');
        bytes.extend(content);
        self.make_room(1, bytes.len() as u64)?;
        let number = self.files.last_key_value().map_or(0, |(number, _)| number + 1);
        let path = self.path(number);
        let error = |source| Error::file(&path, source);
        let file = tempfile::Builder::new().prefix(UNFINISHED).tempfile_in(&self.folder);
        let mut file = file.map_err(error)?;
        file.write_all(&bytes).and_then(|()| file.as_file().sync_all()).map_err(error)?;
        file.persist(&path).map_err(|failure| error(failure.error))?;
        // The name is durable with its folder.
        File::open(&self.folder).and_then(|folder| folder.sync_all()).map_err(error)?;
        self.files.insert(number, Entry { bytes: bytes.len() as u64, task: Some((run, task)) });
        Ok(())
    }

    /// Drops the oldest updates until so many more updates and bytes fit.
    fn make_room(&mut self, updates: usize, bytes: u64) -> Result<(), Error> {
        while self.len() + updates > self.limits.updates || self.bytes() + bytes > self.limits.bytes {
            let Some(oldest) = self.files.first_key_value().map(|(number, _)| *number) else { break };
            self.discard(oldest)?;
        }
        Ok(())
    }

    fn discard(&mut self, number: u64) -> Result<(), Error> {
        if let Some(Entry { bytes, task }) = self.remove(number)? {
            self.dropped.push(DroppedUpdate { task, bytes });
        }
        Ok(())
    }

    /// Returns the oldest update of a run with its number; files that are damaged are dropped.
    ///
    /// # Errors
    /// A file cannot be read or removed.
    pub fn first(&mut self, run: &str) -> Result<Option<(u64, QueuedUpdate)>, Error> {
        let is_next = |entry: &Entry| entry.task.as_ref().is_none_or(|(of, _)| of == run);
        while let Some(number) = self.files.iter().find(|(_, entry)| is_next(entry)).map(|(number, _)| *number) {
            let path = self.path(number);
            let bytes = std::fs::read(&path).map_err(|source| Error::file(&path, source))?;
            if let Some(update) = parse(&bytes) {
                return Ok(Some((number, update)));
            }
            self.discard(number)?;
        }
        Ok(None)
    }

    /// Removes an update: it was acknowledged, or the server will never take it.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn delete(&mut self, number: u64) -> Result<(), Error> {
        self.remove(number).map(drop)
    }

    fn remove(&mut self, number: u64) -> Result<Option<Entry>, Error> {
        let path = self.path(number);
        match std::fs::remove_file(&path) {
            Ok(()) => {}
            Err(failure) if failure.kind() == std::io::ErrorKind::NotFound => {}
            Err(failure) => return Err(Error::file(&path, failure)),
        }
        Ok(self.files.remove(&number))
    }
}

/// Reads run and task of a file.
fn task_of(path: &Path) -> Option<(String, u64)> {
    let mut line = Vec::new();
    BufReader::new(File::open(path).ok()?).read_until(b'\n', &mut line).ok()?;
    let head: Head = serde_json::from_slice(&line).ok()?;
    Some((head.run, head.task))
}

fn parse(bytes: &[u8]) -> Option<QueuedUpdate> {
    let end = bytes.iter().position(|byte| *byte == b'\n')?;
    let head: Head = serde_json::from_slice(&bytes[..end]).ok()?;
    let content = &bytes[end + 1..];
    let is_whole = digest(content) == head.digest;
    is_whole.then(|| QueuedUpdate {
        run: head.run,
        task: head.task,
        training: Training { samples: head.samples, loss: head.loss, rate_sum: head.rate_sum },
        update: decode_values(content),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn update_of(run: &str, task: u64, values: usize) -> QueuedUpdate {
        QueuedUpdate {
            run: run.to_owned(),
            task,
            training: Training { samples: 5, loss: Some(0.5), rate_sum: Some(0.1) },
            update: vec![task as f32; values],
        }
    }

    fn update(task: u64, values: usize) -> QueuedUpdate {
        update_of("fleet", task, values)
    }

    fn dropped_tasks(queue: &mut Queue) -> Vec<Option<u64>> {
        queue.take_dropped().into_iter().map(|dropped| dropped.task.map(|(_, task)| task)).collect()
    }

    #[test]
    fn updates_survive_a_restart_in_order_and_the_oldest_make_room() {
        let folder = tempfile::tempdir().unwrap();
        let limits = Limits { updates: 3, bytes: 1 << 20 };
        let mut queue = Queue::open(folder.path(), limits).unwrap();
        (1..=4).for_each(|task| queue.push(&update(task, 10)).unwrap());
        assert_eq!((queue.len(), dropped_tasks(&mut queue)), (3, vec![Some(1)]));
        let in_use = Queue::open(folder.path(), limits).unwrap_err();
        assert!(format!("{:?}", in_use).contains("another process"), "{in_use:?}");
        drop(queue);
        let mut queue = Queue::open(folder.path(), limits).unwrap();
        let (number, first) = queue.first("fleet").unwrap().unwrap();
        assert_eq!(first, update(2, 10));
        queue.delete(number).unwrap();
        assert_eq!(queue.first("fleet").unwrap().unwrap().1.task, 3);
        assert!(queue.take_dropped().is_empty(), "what was sent is not reported as dropped");
        queue.push(&update(5, 10)).unwrap();
        drop(queue);
        // Smaller bounds hold from the start.
        let mut queue = Queue::open(folder.path(), Limits { updates: 1, bytes: 1 << 20 }).unwrap();
        assert_eq!((queue.len(), dropped_tasks(&mut queue)), (1, vec![Some(3), Some(4)]));
    }

    #[test]
    fn bytes_on_disk_stay_below_the_bound_and_larger_updates_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let limits = Limits { updates: 100, bytes: 1_850 };
        let mut queue = Queue::open(folder.path(), limits).unwrap();
        for task in 1..=9 {
            queue.push(&update(task, 200)).unwrap();
            let on_disk = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().metadata().unwrap());
            let on_disk: u64 = on_disk.map(|metadata| metadata.len()).sum();
            assert!(queue.bytes() == on_disk && on_disk <= limits.bytes, "{on_disk} bytes, {}", queue.bytes());
        }
        assert_eq!(queue.first("fleet").unwrap().unwrap().1.task, 9);
        assert_eq!(dropped_tasks(&mut queue).len(), 8);
        let refused = queue.push(&update(10, 1_000)).unwrap_err().to_string();
        assert!(refused.contains("queue") && refused.contains("1850 bytes"), "{refused}");
        assert_eq!(queue.len(), 1, "a refused update makes no room");
    }

    #[test]
    fn a_run_never_gets_the_updates_of_another_one() {
        let folder = tempfile::tempdir().unwrap();
        let mut queue = Queue::open(folder.path(), Limits::default()).unwrap();
        queue.push(&update_of("old", 1, 10)).unwrap();
        queue.push(&update_of("new", 1, 20)).unwrap();
        drop(queue);
        let mut queue = Queue::open(folder.path(), Limits::default()).unwrap();
        let (number, first) = queue.first("new").unwrap().unwrap();
        assert_eq!(first, update_of("new", 1, 20));
        queue.delete(number).unwrap();
        assert_eq!(queue.first("new").unwrap(), None);
        assert_eq!(queue.first("old").unwrap().unwrap().1, update_of("old", 1, 10));
    }

    #[test]
    fn damaged_files_are_dropped_and_unfinished_ones_removed() {
        let folder = tempfile::tempdir().unwrap();
        let mut queue = Queue::open(folder.path(), Limits::default()).unwrap();
        (1..=3).for_each(|task| queue.push(&update(task, 10)).unwrap());
        let unfinished = folder.path().join(format!("{UNFINISHED}abc"));
        std::fs::write(&unfinished, "unfinished").unwrap();
        let (content, head) = (queue.path(0), queue.path(1));
        drop(queue);
        let mut bytes = std::fs::read(&content).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        std::fs::write(&content, bytes).unwrap();
        std::fs::write(&head, "no head").unwrap();
        let mut queue = Queue::open(folder.path(), Limits::default()).unwrap();
        assert_eq!((queue.len(), unfinished.exists()), (3, false));
        assert_eq!(queue.first("fleet").unwrap().unwrap().1.task, 3);
        assert_eq!(dropped_tasks(&mut queue), [Some(1), None]);
    }
}
