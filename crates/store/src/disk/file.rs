//! A local directory.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, Flock, FlockArg, fallocate};

use super::{Disk, File, Lock, LockError};
use crate::Error;

/// Name of the lock file, which contains the PID of the holder as text.
const LOCK: &str = "lock";

/// A local directory.
#[derive(Debug, Clone)]
pub struct FileDisk {
    folder: PathBuf,
}

impl FileDisk {
    /// Opens a directory, creating it if missing.
    ///
    /// # Errors
    /// [`Error::Unwritable`] if it cannot be created or is not a directory.
    pub fn new(folder: impl Into<PathBuf>) -> Result<Self, Error> {
        let folder = folder.into();
        fs::create_dir_all(&folder)
            .map_err(|source| Error::Unwritable { path: folder.display().to_string(), source })?;
        Ok(Self { folder })
    }

    /// Returns the path of the directory.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Disk for FileDisk {
    fn create(&self, name: &str) -> io::Result<Box<dyn File>> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(self.folder.join(name))?;
        Ok(Box::new(PlainFile(file)))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn File>> {
        let file = OpenOptions::new().read(true).write(true).open(self.folder.join(name))?;
        Ok(Box::new(PlainFile(file)))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            // Names that are not UTF-8 and directories do not belong to the store.
            if let (Ok(name), true) = (entry.file_name().into_string(), entry.file_type()?.is_file()) {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.folder.join(from), self.folder.join(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.folder.join(name))
    }

    fn sync_dir(&self) -> io::Result<()> {
        fs::File::open(&self.folder)?.sync_all()
    }

    fn lock(&self) -> Result<Lock, LockError> {
        let path = self.folder.join(LOCK);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let mut locked = match Flock::lock(file.map_err(LockError::Io)?, FlockArg::LockExclusiveNonblock) {
            Ok(locked) => locked,
            Err((mut file, Errno::EWOULDBLOCK)) => {
                let mut text = String::new();
                let pid = file.read_to_string(&mut text).ok().and_then(|_| text.trim().parse().ok());
                return Err(LockError::Held { pid });
            }
            Err((_, error)) => return Err(LockError::Io(error.into())),
        };
        let write_pid = |file: &mut fs::File| {
            file.set_len(0)?;
            file.rewind()?;
            writeln!(file, "{}", std::process::id())
        };
        write_pid(&mut locked).map_err(LockError::Io)?;
        Ok(Lock(Box::new(locked)))
    }

    fn random(&self) -> u128 {
        rand::random()
    }

    fn describe(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }
}

struct PlainFile(fs::File);

impl File for PlainFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(bytes, offset)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    fn preallocate(&self, bytes: u64) -> io::Result<()> {
        let len = i64::try_from(bytes).map_err(io::Error::other)?;
        match fallocate(&self.0, FallocateFlags::empty(), 0, len) {
            // Some network and overlay file systems do not support fallocate; the file then grows as it is written.
            Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => self.0.set_len(bytes),
            other => Ok(other?),
        }
    }

    fn truncate(&self, bytes: u64) -> io::Result<()> {
        self.0.set_len(bytes)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }
}
