//! A directory of snapshots, or of the files of one, on a local disk or in a shared volume.
//!
//! Invariants: a file appears complete and durable under its name, or not at all; nothing outside the volume is read, written or
//! removed, whatever symbolic links it contains.

use engram_objects::Error;
use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};

/// Prefix of a file's name before it is complete. No snapshot file begins with it.
const UNFINISHED: &str = ".unfinished-";
/// Mode of new files, before the process's umask.
const MODE: u32 = 0o666;

/// A directory, which may not exist yet.
#[derive(Debug, Clone)]
pub struct Folder {
    /// Directory that no access may leave.
    root: PathBuf,
    path: PathBuf,
    /// Name in messages.
    display_name: String,
}

impl Folder {
    /// A local directory by its absolute path. Symbolic links are followed.
    pub fn local(path: PathBuf) -> Self {
        Self { root: "/".into(), display_name: path.display().to_string(), path }
    }

    /// The directory `path` of the volume mounted at `root`, named `display_name` in messages; `None` unless `path` stays below it.
    pub fn in_volume(root: PathBuf, path: &str, display_name: &str) -> Option<Self> {
        let is_below = Path::new(path).components().all(|part| matches!(part, Component::Normal(_)));
        is_below.then(|| Self { path: root.join(path), root, display_name: display_name.to_owned() })
    }

    /// Returns the path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Name in messages.
    pub fn display_name(&self) -> &str {
        &self.display_name
    }

    /// Returns the directory `name` in this one.
    #[must_use]
    pub fn join(&self, name: &str) -> Self {
        let display_name = format!("{}/{name}", self.display_name.trim_end_matches('/'));
        Self { root: self.root.clone(), path: self.path.join(name), display_name }
    }

    /// Creates the directory and its missing parents.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn create(&self) -> Result<(), Error> {
        let failed = |error| self.storage_error("create", "", error);
        let mut at = self.root.clone();
        for part in self.path.strip_prefix(&self.root).unwrap_or(&self.path).components() {
            let parent = at.clone();
            at.push(part);
            match fs::create_dir(&at) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(failed(error)),
                // Also if it existed: the process that created it may have died before this sync.
                _ => sync(&parent).map_err(failed)?,
            }
            // Before anything is created below it.
            at = self.resolve_inside(&at).map_err(failed)?;
        }
        Ok(())
    }

    /// Writes a file, replacing one of the same name.
    ///
    /// # Errors
    /// [`Error::Storage`]; nothing is kept then.
    pub fn put(&self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        self.write(name, |file| file.write_all(bytes))
    }

    /// Copies the file at `from` into the directory under an unused name. Returns its size.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Storage`]; nothing is kept then.
    pub fn put_file(&self, name: &str, from: &Path) -> Result<u64, Error> {
        let failed = |source| Error::File { operation: "read", path: from.display().to_string(), source };
        let (mut from, mut bytes) = (File::open(from).map_err(failed)?, 0);
        self.write(name, |file| io::copy(&mut from, file).map(|copied| bytes = copied))?;
        Ok(bytes)
    }

    fn write(&self, name: &str, fill: impl FnOnce(&mut File) -> io::Result<()>) -> Result<(), Error> {
        let written: io::Result<()> = (|| {
            let folder = self.resolve_inside(&self.path)?;
            let mut file = tempfile::Builder::new();
            let mut file = file.prefix(UNFINISHED).permissions(Permissions::from_mode(MODE)).tempfile_in(&folder)?;
            fill(file.as_file_mut())?;
            file.as_file().sync_all()?;
            file.persist(folder.join(name))?;
            sync(&folder)
        })();
        written.map_err(|error| self.storage_error("write", name, error))
    }

    /// Reads a file; `None` if it does not exist.
    ///
    /// # Errors
    /// [`Error::TooLong`] above `limit` bytes; [`Error::Storage`].
    pub fn get(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>, Error> {
        let mut bytes = Vec::new();
        match self.read(name, limit, &mut bytes) {
            Ok(_) => Ok(Some(bytes)),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Copies a file to the path `to`, durable when this returns. Returns its size.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::TooLong`] above `limit` bytes; [`Error::File`], [`Error::Storage`]. The copy may be incomplete then.
    pub fn get_file(&self, name: &str, to: &Path, limit: u64) -> Result<u64, Error> {
        let failed = |operation| move |source| Error::File { operation, path: to.display().to_string(), source };
        let mut file = File::create(to).map_err(failed("create"))?;
        let bytes = self.read(name, limit, &mut file)?;
        file.sync_all().map_err(failed("sync"))?;
        Ok(bytes)
    }

    fn read(&self, name: &str, limit: u64, into: &mut impl io::Write) -> Result<u64, Error> {
        let object = || self.join(name).display_name;
        let read = self.resolve_inside(&self.path.join(name)).and_then(|path| {
            let file = File::open(path)?;
            io::copy(&mut file.take(limit.saturating_add(1)), into)
        });
        match read {
            Ok(bytes) if bytes > limit => Err(Error::TooLong { object: object(), limit }),
            Ok(bytes) => Ok(bytes),
            Err(error) if error.kind() == ErrorKind::NotFound => Err(Error::NotFound { object: object() }),
            Err(error) => Err(self.storage_error("read", name, error)),
        }
    }

    /// Lists the names in it; none if it does not exist.
    ///
    /// # Errors
    /// [`Error::Storage`], also if it is not a directory.
    pub fn list(&self) -> Result<Vec<String>, Error> {
        let result: io::Result<_> = (|| {
            let mut names = Vec::new();
            for entry in fs::read_dir(self.resolve_inside(&self.path)?)? {
                names.extend(entry?.file_name().into_string().ok());
            }
            Ok(names)
        })();
        match result {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            result => result.map_err(|error| self.storage_error("list", "", error)),
        }
    }

    /// Removes it with its content, and its parent if that is then empty.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn remove(&self) -> Result<(), Error> {
        match self.resolve_inside(&self.path).and_then(fs::remove_dir_all) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(self.storage_error("remove", "", error)),
            _ => {}
        }
        if let Some(parent) = self.path.parent().filter(|parent| *parent != self.root) {
            // Fails for a parent that is not empty.
            let _ = self.resolve_inside(parent).and_then(fs::remove_dir);
        }
        Ok(())
    }

    /// Resolves `path` to its real path below the root.
    fn resolve_inside(&self, path: &Path) -> io::Result<PathBuf> {
        let (root, path) = (self.root.canonicalize()?, path.canonicalize()?);
        if path.starts_with(&root) {
            Ok(path)
        } else {
            Err(io::Error::other("symbolic link points outside the volume"))
        }
    }

    fn storage_error(&self, operation: &'static str, name: &str, error: io::Error) -> Error {
        let object = if name.is_empty() { self.display_name.clone() } else { self.join(name).display_name };
        Error::Storage { operation, object, source: Box::new(error) }
    }
}

/// Makes the names in a directory durable, on file systems that support it.
fn sync(folder: &Path) -> io::Result<()> {
    match File::open(folder)?.sync_all() {
        Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(()),
        synced => synced,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn message(error: Error) -> String {
        format!("{:#}", crate::storage_error(error))
    }

    #[test]
    fn a_file_appears_complete_and_is_removed_with_its_directory() {
        let volume = tempfile::tempdir().unwrap();
        let snapshot =
            Folder::in_volume(volume.path().into(), "words/monday", "volume://backups/words/monday").unwrap();
        assert_eq!((snapshot.list().unwrap(), snapshot.get("manifest.json", 9).unwrap()), (Vec::new(), None));
        let attempt = snapshot.join("0a-1");
        assert!(
            message(attempt.put("a", b"a").unwrap_err())
                .contains("failed to write volume://backups/words/monday/0a-1/a")
        );
        attempt.create().unwrap();
        attempt.create().unwrap();
        let from = volume.path().join("from");
        fs::write(&from, [7; 1000]).unwrap();
        assert_eq!(attempt.put_file("a", &from).unwrap(), 1000);
        snapshot.put("manifest.json", b"one").unwrap();
        snapshot.put("manifest.json", b"another").unwrap();
        assert_eq!(names(attempt.path()), ["a"], "no unfinished file remains");
        assert_eq!(snapshot.get("manifest.json", 7).unwrap().unwrap(), b"another");
        assert!(matches!(snapshot.get("manifest.json", 6), Err(Error::TooLong { limit: 6, .. })));
        let to = volume.path().join("to");
        assert_eq!(snapshot.get_file("0a-1/a", &to, 1000).unwrap(), 1000);
        assert!(fs::read(&to).unwrap() == [7; 1000]);
        assert!(matches!(snapshot.get_file("0a-1/a", &to, 999), Err(Error::TooLong { .. })));
        assert!(matches!(snapshot.get_file("0a-1/b", &to, 1), Err(Error::NotFound { .. })));
        // A failed write keeps the previous file.
        let broken =
            snapshot.write("manifest.json", |file| file.write_all(b"hal").and(Err(io::Error::other("pulled"))));
        assert!(message(broken.unwrap_err()).contains("pulled"));
        assert_eq!(names(snapshot.path()), ["0a-1", "manifest.json"]);
        assert_eq!(snapshot.get("manifest.json", 7).unwrap().unwrap(), b"another");
        attempt.remove().unwrap();
        attempt.remove().unwrap();
        assert_eq!(names(snapshot.path()), ["manifest.json"], "a directory with other content remains");
        fs::remove_file(snapshot.path().join("manifest.json")).unwrap();
        attempt.create().unwrap();
        attempt.remove().unwrap();
        assert_eq!(names(&volume.path().join("words")), [""; 0], "an empty parent is removed");
        Folder::in_volume(volume.path().into(), "only", "only").unwrap().remove().unwrap();
        assert!(volume.path().exists(), "the volume remains");
    }

    #[test]
    fn nothing_outside_a_volume_is_read_written_or_removed() {
        let (volume, outside_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let root = volume.path();
        for path in ["/words", "../words", "a/../../words"] {
            assert!(Folder::in_volume(root.into(), path, "v").is_none(), "{path}");
        }
        fs::create_dir(root.join("inside")).unwrap();
        fs::create_dir(outside_dir.path().join("monday")).unwrap();
        fs::write(outside_dir.path().join("monday/secret"), "s").unwrap();
        symlink(outside_dir.path(), root.join("out")).unwrap();
        symlink(root.join("inside"), root.join("in")).unwrap();
        symlink(outside_dir.path().join("monday/secret"), root.join("inside/secret")).unwrap();
        symlink(outside_dir.path().join("made"), root.join("nowhere")).unwrap();
        let of = |path: &str| Folder::in_volume(root.into(), path, "volume://backups/x").unwrap();
        let outside = "symbolic link points outside the volume";
        for refused in [
            of("out/monday").list().map(drop),
            of("out/tuesday").create(),
            of("out").put("a", b"a"),
            of("out/monday").get("secret", 9).map(drop),
            of("inside").get("secret", 9).map(drop),
            of("out/monday").remove(),
        ] {
            let text = message(refused.unwrap_err());
            assert!(text.contains(outside) && text.contains("volume://backups/x"), "{text}");
        }
        assert!(of("nowhere/a").create().is_err(), "a dangling link is not created");
        assert_eq!(names(outside_dir.path()), ["monday"]);
        assert_eq!(names(&outside_dir.path().join("monday")), ["secret"]);
        // Links within the volume are followed; a link under the name of a file is replaced.
        of("in/a").create().unwrap();
        of("in").put("secret", b"ours").unwrap();
        assert_eq!(names(&root.join("inside")), ["a", "secret"]);
        assert_eq!(fs::read(outside_dir.path().join("monday/secret")).unwrap(), b"s");
        assert_eq!(of("inside").get("secret", 9).unwrap().unwrap(), b"ours");
    }
}
