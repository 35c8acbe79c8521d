//! Files that are reloaded while a process runs: valid contents replace the current value, invalid ones leave it in
//! use.

use crate::{Error, RELOAD_INTERVAL};
use parking_lot::{Mutex, RwLock};
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

/// Parses the contents of all files, in their order, to replace the previous value.
type Parse<T> = Box<dyn Fn(&[Vec<u8>], Option<&T>) -> Result<T, Error> + Send + Sync>;

/// A value read from files, reloaded when they change.
pub struct WatchedFiles<T> {
    /// What the files contain, for logs.
    what: String,
    /// Empty if the value is not read from files.
    files: Vec<PathBuf>,
    parse: Parse<T>,
    current: RwLock<Arc<T>>,
    last_reload: Mutex<LastReload>,
    failures: AtomicU64,
}

struct LastReload {
    at: Instant,
    /// Contents in use.
    contents: Option<Vec<Vec<u8>>>,
    /// Whether the current files are invalid, and that was logged.
    failing: bool,
}

impl<T: Send + Sync + 'static> WatchedFiles<T> {
    /// Reads the files.
    ///
    /// # Errors
    /// A file cannot be read, or is invalid.
    pub fn open(
        what: &str,
        files: Vec<PathBuf>,
        parse: fn(&[Vec<u8>]) -> Result<T, Error>,
    ) -> Result<Arc<Self>, Error> {
        let contents = read(&files)?;
        let current = parse(&contents)?;
        Ok(Self::new(what.to_owned(), files, Box::new(move |contents, _| parse(contents)), current, Some(contents)))
    }

    /// Starts with `before` until the files exist and are valid.
    pub fn open_or(what: &str, files: Vec<PathBuf>, parse: fn(&[Vec<u8>]) -> Result<T, Error>, before: T) -> Arc<Self> {
        let files_watch = Self::new(what.to_owned(), files, Box::new(move |contents, _| parse(contents)), before, None);
        files_watch.reload();
        files_watch
    }

    /// A value that never changes.
    pub fn fixed(value: T) -> Arc<Self> {
        let parse = |_: &[Vec<u8>], _: Option<&T>| Err(Error::unusable("no files"));
        Self::new(String::new(), Vec::new(), Box::new(parse), value, None)
    }

    /// Starts with a value of `contents`. Later contents are compared with the ones in use.
    pub(crate) fn new(
        what: String,
        files: Vec<PathBuf>,
        parse: Parse<T>,
        current: T,
        contents: Option<Vec<Vec<u8>>>,
    ) -> Arc<Self> {
        let last_reload = Mutex::new(LastReload { at: Instant::now(), contents, failing: false });
        Arc::new(Self {
            what,
            files,
            parse,
            current: RwLock::new(Arc::new(current)),
            last_reload,
            failures: AtomicU64::new(0),
        })
    }

    /// Returns the current value.
    pub fn current(&self) -> Arc<T> {
        Arc::clone(&self.current.read())
    }

    /// Returns how often a reload failed.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Reloads the files periodically until this value is dropped. Needs a runtime.
    pub fn watch(self: &Arc<Self>) {
        let watched = Arc::downgrade(self);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(RELOAD_INTERVAL).await;
                let Some(watched) = Weak::upgrade(&watched) else { return };
                // The files may be on a slow disk. A reload that panicked is repeated.
                let _ = tokio::task::spawn_blocking(move || watched.reload()).await;
            }
        });
    }

    /// Reloads the files now, and takes them if all of them are valid.
    pub fn reload(&self) {
        if !self.files.is_empty() {
            self.take(|| read(&self.files));
        }
    }

    /// Replaces the value by one parsed from `contents`, if it is valid.
    pub(crate) fn replace(&self, contents: Vec<Vec<u8>>) {
        self.take(|| Ok(contents));
    }

    fn take(&self, read: impl FnOnce() -> Result<Vec<Vec<u8>>, Error>) {
        let mut last_reload = self.last_reload.lock();
        last_reload.at = Instant::now();
        let outcome = read().and_then(|contents| {
            if last_reload.contents.as_ref() == Some(&contents) {
                return Ok(None);
            }
            (self.parse)(&contents, Some(&self.current())).map(|value| Some((contents, value)))
        });
        match outcome {
            Ok(None) => last_reload.failing = false,
            Ok(Some((contents, value))) => {
                tracing::info!("reloaded {}", self.what);
                *self.current.write() = Arc::new(value);
                (last_reload.contents, last_reload.failing) = (Some(contents), false);
            }
            Err(error) => {
                self.failures.fetch_add(1, Ordering::Relaxed);
                if !std::mem::replace(&mut last_reload.failing, true) {
                    let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
                    tracing::warn!(%error, cause, "failed to reload {}; the previous version stays in use", self.what);
                }
            }
        }
    }

    /// Reloads the files if the last reload is old: for a process that does not [watch](Self::watch) them.
    pub fn reload_if_due(&self) {
        let due = self.last_reload.lock().at.elapsed() >= RELOAD_INTERVAL;
        if due {
            self.reload();
        }
    }
}

pub(crate) fn read(files: &[PathBuf]) -> Result<Vec<Vec<u8>>, Error> {
    files.iter().map(|path| std::fs::read(path).map_err(|source| Error::Read { path: path.clone(), source })).collect()
}

impl<T> fmt::Debug for WatchedFiles<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Followed").field("files", &self.files).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn number(contents: &[Vec<u8>]) -> Result<u32, Error> {
        let text = String::from_utf8_lossy(&contents[0]);
        text.trim().parse().map_err(|_| Error::unusable(format!("'{text}' is no number")))
    }

    #[test]
    fn valid_files_are_taken_and_invalid_ones_leave_the_value() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("number");
        assert!(WatchedFiles::open("numbers", vec![path.clone()], number).is_err(), "no file");
        let watched = WatchedFiles::open_or("numbers", vec![path.clone()], number, 7);
        assert_eq!((*watched.current(), watched.failures()), (7, 1));
        fs::write(&path, "8").unwrap();
        watched.reload();
        assert_eq!((*watched.current(), watched.failures()), (8, 1));
        for (nth, bad) in [(2, "eight"), (3, "")] {
            fs::write(&path, bad).unwrap();
            watched.reload();
            assert_eq!((*watched.current(), watched.failures()), (8, nth));
        }
        assert_eq!(*WatchedFiles::open_or("numbers", vec![path], number, 1).current(), 1);
        assert_eq!(*WatchedFiles::fixed(5).current(), 5);
    }
}
