//! Files that are read again while a process runs: what is good takes the place of what was there, and what is not leaves it in use.

use crate::{Error, LOOK};
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::Instant;

/// Makes a value of the contents of all files, in their order, in place of the one before.
type Parse<T> = Box<dyn Fn(&[Vec<u8>], Option<&T>) -> Result<T, Error> + Send + Sync>;

/// What files say, as they are now.
pub struct Followed<T> {
    /// What they are, for logs.
    what: String,
    /// None where the value is given and not read.
    files: Vec<PathBuf>,
    parse: Parse<T>,
    current: RwLock<Arc<T>>,
    looked: Mutex<Looked>,
    failures: AtomicU64,
}

struct Looked {
    at: Instant,
    /// What is in use.
    contents: Option<Vec<Vec<u8>>>,
    /// Whether what lies there since is of no use, and was told.
    failing: bool,
}

impl<T: Send + Sync + 'static> Followed<T> {
    /// Reads the files.
    ///
    /// # Errors
    /// One cannot be read, or they are not good.
    pub fn open(
        what: &str,
        files: Vec<PathBuf>,
        parse: fn(&[Vec<u8>]) -> Result<T, Error>,
    ) -> Result<Arc<Self>, Error> {
        let contents = read(&files)?;
        let current = parse(&contents)?;
        Ok(Self::of(what.to_owned(), files, Box::new(move |contents, _| parse(contents)), current, Some(contents)))
    }

    /// The same with `before` until they are there and good.
    pub fn open_or(what: &str, files: Vec<PathBuf>, parse: fn(&[Vec<u8>]) -> Result<T, Error>, before: T) -> Arc<Self> {
        let followed = Self::of(what.to_owned(), files, Box::new(move |contents, _| parse(contents)), before, None);
        followed.look();
        followed
    }

    /// A value that nobody changes.
    pub fn fixed(value: T) -> Arc<Self> {
        let nothing = |_: &[Vec<u8>], _: Option<&T>| Err(Error::unusable("no files"));
        Self::of(String::new(), Vec::new(), Box::new(nothing), value, None)
    }

    /// What was read already, or given, of `contents`. What comes is held against what is in use.
    pub(crate) fn of(
        what: String,
        files: Vec<PathBuf>,
        parse: Parse<T>,
        current: T,
        contents: Option<Vec<Vec<u8>>>,
    ) -> Arc<Self> {
        let looked = Mutex::new(Looked { at: Instant::now(), contents, failing: false });
        Arc::new(Self {
            what,
            files,
            parse,
            current: RwLock::new(Arc::new(current)),
            looked,
            failures: AtomicU64::new(0),
        })
    }

    /// What they say.
    pub fn current(&self) -> Arc<T> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// How often a look found files of no use.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Looks at the files again and again, until nobody has this any more. Needs a runtime.
    pub fn follow(self: &Arc<Self>) {
        let followed = Arc::downgrade(self);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(LOOK).await;
                let Some(followed) = Weak::upgrade(&followed) else { return };
                // Files may lie on a disk that is slow. A look that panicked is repeated.
                let _ = tokio::task::spawn_blocking(move || followed.look()).await;
            }
        });
    }

    /// Looks at the files now, and takes them if all of them are good.
    pub fn look(&self) {
        if !self.files.is_empty() {
            self.take(|| read(&self.files));
        }
    }

    /// Takes what is given, as files are taken.
    pub(crate) fn replace(&self, contents: Vec<Vec<u8>>) {
        self.take(|| Ok(contents));
    }

    fn take(&self, read: impl FnOnce() -> Result<Vec<Vec<u8>>, Error>) {
        let mut looked = self.looked.lock().unwrap_or_else(PoisonError::into_inner);
        looked.at = Instant::now();
        let found = read().and_then(|contents| {
            if looked.contents.as_ref() == Some(&contents) {
                return Ok(None);
            }
            (self.parse)(&contents, Some(&self.current())).map(|value| Some((contents, value)))
        });
        match found {
            Ok(None) => looked.failing = false,
            Ok(Some((contents, value))) => {
                tracing::info!("took {}", self.what);
                *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(value);
                (looked.contents, looked.failing) = (Some(contents), false);
            }
            Err(error) => {
                self.failures.fetch_add(1, Ordering::Relaxed);
                if !std::mem::replace(&mut looked.failing, true) {
                    let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
                    tracing::warn!(%error, cause, "{} that are of no use; what was known before stays in use", self.what);
                }
            }
        }
    }

    /// The same where nobody looked for a while: for a process that does not [follow](Self::follow) them.
    pub fn look_if_due(&self) {
        let due = self.looked.lock().unwrap_or_else(PoisonError::into_inner).at.elapsed() >= LOOK;
        if due {
            self.look();
        }
    }
}

pub(crate) fn read(files: &[PathBuf]) -> Result<Vec<Vec<u8>>, Error> {
    files.iter().map(|path| std::fs::read(path).map_err(|source| Error::Read { path: path.clone(), source })).collect()
}

impl<T> fmt::Debug for Followed<T> {
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
    fn good_files_are_taken_and_bad_ones_leave_what_was_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("number");
        assert!(Followed::open("numbers", vec![path.clone()], number).is_err(), "there is none");
        let followed = Followed::open_or("numbers", vec![path.clone()], number, 7);
        assert_eq!((*followed.current(), followed.failures()), (7, 1));
        fs::write(&path, "8").unwrap();
        followed.look();
        assert_eq!((*followed.current(), followed.failures()), (8, 1));
        for (nth, bad) in [(2, "eight"), (3, "")] {
            fs::write(&path, bad).unwrap();
            followed.look();
            assert_eq!((*followed.current(), followed.failures()), (8, nth));
        }
        assert_eq!(*Followed::open_or("numbers", vec![path], number, 1).current(), 1);
        assert_eq!(*Followed::fixed(5).current(), 5);
    }
}
