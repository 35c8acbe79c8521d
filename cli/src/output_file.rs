//! Files that a command writes: a regular file appears complete or not at all; everything else is written through.

use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Maximum length of a chain of symbolic links, as in the kernel.
const MAX_LINKS: usize = 40;

/// A file that is being written.
pub(crate) struct OutputFile(Destination);

enum Destination {
    /// A regular file: a temporary file in its folder that is renamed to `path` at the end.
    Regular { file: NamedTempFile, path: PathBuf },
    /// A device, a FIFO, or an open descriptor such as `/dev/stdout`: it must be neither replaced nor truncated.
    WrittenThrough(File),
}

impl OutputFile {
    /// Opens `path` for writing. A symbolic link is followed, as by a shell's redirection: its target is written and the link stays.
    /// Owner and permissions of an existing file are kept.
    ///
    /// # Errors
    /// The file cannot be written, or `path` is a folder or a socket.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let metadata = existing(path)?;
        if let Some(metadata) = &metadata {
            let kind = metadata.file_type();
            if kind.is_dir() || kind.is_socket() {
                let kind = if kind.is_dir() { "folder" } else { "socket" };
                return Err(io::Error::other(format!("it is a {kind}; allowed: a file, a device or a FIFO")));
            }
            if is_written_through(path, metadata) {
                return Ok(Self(Destination::WrittenThrough(File::options().write(true).open(path)?)));
            }
        }
        let path = follow_links(path)?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // Same permissions as a regularly created file, subject to the umask.
        let new = Permissions::from_mode(0o666);
        let file = tempfile::Builder::new().prefix(".engram-").permissions(new).tempfile_in(folder)?;
        if let Some(metadata) = metadata {
            // Permitted to root only: any other user becomes the owner.
            let _ = fchown(file.as_file(), Some(metadata.uid()), Some(metadata.gid()));
            file.as_file().set_permissions(metadata.permissions())?;
        }
        Ok(Self(Destination::Regular { file, path }))
    }

    /// Returns whether a command would overwrite data at `path`, which requires `--force`.
    ///
    /// # Errors
    /// The metadata cannot be read.
    pub(crate) fn is_overwritten(path: &Path) -> io::Result<bool> {
        Ok(existing(path)?.is_some_and(|metadata| !is_written_through(path, &metadata)))
    }

    /// Returns a second handle, for a writer that takes a file.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub(crate) fn handle(&self) -> io::Result<File> {
        match &self.0 {
            Destination::Regular { file, .. } => file.as_file().try_clone(),
            Destination::WrittenThrough(file) => file.try_clone(),
        }
    }

    /// Completes the file: syncs it and puts it into place.
    ///
    /// # Errors
    /// Syncing or renaming fails; the previous file stays.
    pub(crate) fn finish(self) -> io::Result<()> {
        match self.0 {
            Destination::Regular { file, path } => {
                file.as_file().sync_all()?;
                file.persist(path)?;
                Ok(())
            }
            // Devices and pipes cannot be synced.
            Destination::WrittenThrough(mut file) => file.flush(),
        }
    }

    /// Writes a complete file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
        let file = Self::create(path)?;
        file.handle()?.write_all(bytes)?;
        file.finish()
    }
}

/// Returns the metadata behind all symbolic links, `None` if nothing is there.
fn existing(path: &Path) -> io::Result<Option<Metadata>> {
    match fs::metadata(path) {
        Ok(metadata) => Ok(Some(metadata)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether `path` is no regular file, or names an open descriptor of a process, whatever that refers to.
fn is_written_through(path: &Path, metadata: &Metadata) -> bool {
    !metadata.is_file() || path.starts_with("/dev") || path.starts_with("/proc")
}

/// Returns the path that a chain of symbolic links leads to; the last one may lead to nothing.
fn follow_links(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        match fs::read_link(&path) {
            Ok(target) => path = path.parent().unwrap_or(Path::new("")).join(target),
            // Not a link, or nothing there yet.
            Err(_) => return Ok(path),
        }
    }
    Err(io::Error::other("it is a chain of too many symbolic links"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;
    use std::os::unix::fs::symlink;
    use std::process::Command;

    #[test]
    fn regular_files_are_replaced_at_the_end_and_keep_their_permissions() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.csv");
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        let file = OutputFile::create(&path).unwrap();
        file.handle().unwrap().write_all(b"new").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        drop(file);
        assert_eq!(fs::read_to_string(&path).unwrap(), "old", "an unfinished file does not appear");
        OutputFile::write(&path, b"new").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
        assert!(OutputFile::is_overwritten(&path).unwrap());
        assert!(OutputFile::create(folder.path()).is_err(), "a folder");
    }

    #[test]
    fn links_stay_and_their_targets_are_written() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("data")).unwrap();
        for target in ["data/there.csv", "data/absent.csv"] {
            let (link, second) = (folder.path().join("link.csv"), folder.path().join("second.csv"));
            let _ = (fs::remove_file(&link), fs::remove_file(&second));
            symlink(target, &link).unwrap();
            symlink("link.csv", &second).unwrap();
            if target.ends_with("there.csv") {
                fs::write(folder.path().join(target), "old").unwrap();
            }
            OutputFile::write(&second, b"new").unwrap();
            assert!(
                fs::symlink_metadata(&link).unwrap().is_symlink()
                    && fs::symlink_metadata(&second).unwrap().is_symlink()
            );
            assert_eq!(fs::read_to_string(folder.path().join(target)).unwrap(), "new");
        }
        let cycle = folder.path().join("cycle");
        symlink("cycle", &cycle).unwrap();
        assert!(OutputFile::create(&cycle).is_err());
    }

    #[test]
    fn fifos_and_devices_are_written_through() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("fifo");
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        assert!(!OutputFile::is_overwritten(&path).unwrap());
        let reader = std::thread::spawn({
            let path = path.clone();
            move || {
                let mut text = String::new();
                File::open(path).unwrap().read_to_string(&mut text).unwrap();
                text
            }
        });
        OutputFile::write(&path, b"rows").unwrap();
        assert_eq!(reader.join().unwrap(), "rows");
        assert!(fs::symlink_metadata(&path).unwrap().file_type().is_fifo());
        // The rule, without a device at stake.
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let regular = fs::metadata(&file).unwrap();
        assert!(is_written_through(Path::new("/dev/stdout"), &regular) && !is_written_through(&file, &regular));
        assert!(is_written_through(&file, &fs::metadata("/dev/null").unwrap()));
    }
}
