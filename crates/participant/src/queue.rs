//! Updates on disk that wait for a connection.
//!
//! Each is one file, written under another name first and then renamed, so a file is whole or absent after a power failure. The queue is bounded in
//! number and bytes; the oldest updates make room, since they are the first that the server would refuse as too old.

use crate::{Error, Training};
use engram_federated::service::{decode_values, digest, encode_values};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// Ending of the files.
const EXTENSION: &str = "update";

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
    /// The task.
    pub task: u64,
    /// What is reported with it.
    pub training: Training,
    /// The update.
    pub update: Vec<f32>,
}

#[derive(Serialize, Deserialize)]
struct Head {
    task: u64,
    samples: u64,
    loss: Option<f64>,
    #[serde(default)]
    rate_sum: Option<f64>,
    digest: [u8; 32],
}

/// A queue in a folder. One process at a time uses it.
#[derive(Debug)]
pub struct Queue {
    folder: PathBuf,
    limits: Limits,
    /// Bytes of each file by its number, oldest first.
    files: BTreeMap<u64, u64>,
    dropped: u64,
}

impl Queue {
    /// Opens the queue in a folder, which is created if it does not exist.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn open(folder: &Path, limits: Limits) -> Result<Self, Error> {
        let error = |source| Error::file(folder, source);
        std::fs::create_dir_all(folder).map_err(error)?;
        let mut files = BTreeMap::new();
        for entry in std::fs::read_dir(folder).map_err(error)? {
            let entry = entry.map_err(error)?;
            let path = entry.path();
            let is_update = path.extension().is_some_and(|extension| extension == EXTENSION);
            let number = path.file_stem().and_then(|stem| stem.to_str()?.parse().ok()).filter(|_| is_update);
            if let Some(number) = number {
                files.insert(number, entry.metadata().map_err(error)?.len());
            }
        }
        Ok(Self { folder: folder.to_owned(), limits, files, dropped: 0 })
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

    /// Updates that made room for newer ones, or could not be read, since the queue was opened.
    #[must_use]
    pub const fn dropped(&self) -> u64 {
        self.dropped
    }

    fn path(&self, number: u64) -> PathBuf {
        self.folder.join(format!("{number:020}.{EXTENSION}"))
    }

    /// Adds an update. It is on disk when this returns.
    ///
    /// # Errors
    /// It is larger than the bounds, or the disk refuses it.
    pub fn push(&mut self, update: &QueuedUpdate) -> Result<(), Error> {
        let content = encode_values(&update.update);
        let Training { samples, loss, rate_sum } = update.training;
        let head = Head { task: update.task, samples, loss, rate_sum, digest: digest(&content) };
        let mut bytes = serde_json::to_vec(&head).expect("a head has string keys only");
        bytes.push(b'\n');
        bytes.extend(content);
        let size = bytes.len() as u64;
        if size > self.limits.bytes || self.limits.updates == 0 {
            let (value, allowed) = (format!("{size} bytes"), format!("at most {} bytes in all", self.limits.bytes));
            return Err(engram_federated::error::InvalidInput::new("queue", value, allowed).into());
        }
        while self.files.len() >= self.limits.updates || self.files.values().sum::<u64>() + size > self.limits.bytes {
            let Some(oldest) = self.files.first_key_value().map(|(number, _)| *number) else { break };
            self.remove(oldest)?;
            self.dropped += 1;
        }
        let number = self.files.last_key_value().map_or(0, |(number, _)| number + 1);
        let path = self.path(number);
        let error = |source| Error::file(&path, source);
        let mut file = tempfile::NamedTempFile::new_in(&self.folder).map_err(error)?;
        file.write_all(&bytes).and_then(|()| file.as_file().sync_all()).map_err(error)?;
        file.persist(&path).map_err(|failure| error(failure.error))?;
        // The name is durable with its folder.
        std::fs::File::open(&self.folder).and_then(|folder| folder.sync_all()).map_err(error)?;
        self.files.insert(number, size);
        Ok(())
    }

    /// Returns the oldest update with its number; files that are damaged are dropped.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn first(&mut self) -> Result<Option<(u64, QueuedUpdate)>, Error> {
        while let Some(number) = self.files.first_key_value().map(|(number, _)| *number) {
            let path = self.path(number);
            let bytes = std::fs::read(&path).map_err(|source| Error::file(&path, source))?;
            if let Some(update) = parse(&bytes) {
                return Ok(Some((number, update)));
            }
            self.remove(number)?;
            self.dropped += 1;
        }
        Ok(None)
    }

    /// Removes an update: it was acknowledged, or the server will never take it.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn remove(&mut self, number: u64) -> Result<(), Error> {
        let path = self.path(number);
        match std::fs::remove_file(&path) {
            Ok(()) => {}
            Err(failure) if failure.kind() == std::io::ErrorKind::NotFound => {}
            Err(failure) => return Err(Error::file(&path, failure)),
        }
        self.files.remove(&number);
        Ok(())
    }
}

fn parse(bytes: &[u8]) -> Option<QueuedUpdate> {
    let end = bytes.iter().position(|byte| *byte == b'\n')?;
    let head: Head = serde_json::from_slice(&bytes[..end]).ok()?;
    let content = &bytes[end + 1..];
    let is_whole = digest(content) == head.digest;
    is_whole.then(|| QueuedUpdate {
        task: head.task,
        training: Training { samples: head.samples, loss: head.loss, rate_sum: head.rate_sum },
        update: decode_values(content),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn update(task: u64, values: usize) -> QueuedUpdate {
        QueuedUpdate {
            task,
            training: Training { samples: 5, loss: Some(0.5), rate_sum: Some(0.1) },
            update: vec![task as f32; values],
        }
    }

    #[test]
    fn updates_survive_a_restart_in_order_and_the_oldest_make_room() {
        let folder = tempfile::tempdir().unwrap();
        let limits = Limits { updates: 3, bytes: 1 << 20 };
        let mut queue = Queue::open(folder.path(), limits).unwrap();
        (1..=4).for_each(|task| queue.push(&update(task, 10)).unwrap());
        assert_eq!((queue.len(), queue.dropped()), (3, 1));
        let mut queue = Queue::open(folder.path(), limits).unwrap();
        let (number, first) = queue.first().unwrap().unwrap();
        assert_eq!(first, update(2, 10));
        queue.remove(number).unwrap();
        assert_eq!(queue.first().unwrap().unwrap().1.task, 3);
        let small = Limits { updates: 3, bytes: 500 };
        let mut queue = Queue::open(folder.path(), small).unwrap();
        queue.push(&update(9, 60)).unwrap();
        assert_eq!(queue.first().unwrap().unwrap().1.task, 9, "bounded in bytes");
        assert!(queue.push(&update(9, 1_000)).is_err());
    }

    #[test]
    fn damaged_files_are_dropped_and_unfinished_ones_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let mut queue = Queue::open(folder.path(), Limits::default()).unwrap();
        (1..=2).for_each(|task| queue.push(&update(task, 10)).unwrap());
        std::fs::write(folder.path().join(".tmpabc"), "unfinished").unwrap();
        let path = queue.path(0);
        let mut bytes = std::fs::read(&path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let mut queue = Queue::open(folder.path(), Limits::default()).unwrap();
        assert_eq!(queue.len(), 2);
        assert_eq!(queue.first().unwrap().unwrap().1.task, 2);
        assert_eq!(queue.dropped(), 1);
    }
}
