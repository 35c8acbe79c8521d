//! A folder with snapshots or with the files of one, on a disk of this machine or in a volume that others write to as well.
//!
//! Invariants: a file appears whole and durable under its name, or not at all; nothing outside of the volume is read, written or removed,
//! whatever symbolic links are in it.

use engram_objects::Error;
use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};

/// What a file is called before it is whole. No snapshot file is called so.
const UNFINISHED: &str = ".unfinished-";
/// Who may read what is written, but for the process's own mask: as every file that a program makes.
const MODE: u32 = 0o666;

/// A folder. It need not be there.
#[derive(Debug, Clone)]
pub struct Folder {
    /// What nothing leads out of.
    root: PathBuf,
    path: PathBuf,
    /// How messages name it.
    shown: String,
}

impl Folder {
    /// A folder of this machine, by its absolute path. Symbolic links lead where they lead.
    pub fn of_machine(path: PathBuf) -> Self {
        Self { root: "/".into(), shown: path.display().to_string(), path }
    }

    /// The folder `path` of the volume that is mounted at `root`, called `shown`; `None` for a path that is not one below it.
    pub fn of_volume(root: PathBuf, path: &str, shown: &str) -> Option<Self> {
        let is_below = Path::new(path).components().all(|part| matches!(part, Component::Normal(_)));
        is_below.then(|| Self { path: root.join(path), root, shown: shown.to_owned() })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How messages name it.
    pub fn shown(&self) -> &str {
        &self.shown
    }

    /// The folder `name` in this one.
    #[must_use]
    pub fn below(&self, name: &str) -> Self {
        let shown = format!("{}/{name}", self.shown.trim_end_matches('/'));
        Self { root: self.root.clone(), path: self.path.join(name), shown }
    }

    /// Makes it, and those above it, where they are not there.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn make(&self) -> Result<(), Error> {
        let failed = |error| self.failed("make", "", error);
        let mut at = self.root.clone();
        for part in self.path.strip_prefix(&self.root).unwrap_or(&self.path).components() {
            let parent = at.clone();
            at.push(part);
            match fs::create_dir(&at) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(failed(error)),
                // Also one that was there: whoever made it may have died before this.
                _ => sync(&parent).map_err(failed)?,
            }
            // Before anything is made below it.
            at = self.inside(&at).map_err(failed)?;
        }
        Ok(())
    }

    /// Writes a file, in place of one of its name.
    ///
    /// # Errors
    /// [`Error::Storage`]; nothing of it is kept then.
    pub fn put(&self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        self.write(name, |file| file.write_all(bytes))
    }

    /// Copies the file at `from` into the folder, under a name that nothing has. Returns its size.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Storage`]; nothing of it is kept then.
    pub fn put_file(&self, name: &str, from: &Path) -> Result<u64, Error> {
        let failed = |source| Error::File { operation: "read", path: from.display().to_string(), source };
        let (mut from, mut bytes) = (File::open(from).map_err(failed)?, 0);
        self.write(name, |file| io::copy(&mut from, file).map(|copied| bytes = copied))?;
        Ok(bytes)
    }

    fn write(&self, name: &str, fill: impl FnOnce(&mut File) -> io::Result<()>) -> Result<(), Error> {
        let written: io::Result<()> = (|| {
            let folder = self.inside(&self.path)?;
            let mut file = tempfile::Builder::new();
            let mut file = file.prefix(UNFINISHED).permissions(Permissions::from_mode(MODE)).tempfile_in(&folder)?;
            fill(file.as_file_mut())?;
            file.as_file().sync_all()?;
            file.persist(folder.join(name))?;
            sync(&folder)
        })();
        written.map_err(|error| self.failed("write", name, error))
    }

    /// The bytes of a file; `None` where there is none.
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
    /// [`Error::NotFound`]; [`Error::TooLong`] above `limit` bytes; [`Error::File`], [`Error::Storage`]. The copy may be there in part then.
    pub fn get_file(&self, name: &str, to: &Path, limit: u64) -> Result<u64, Error> {
        let failed = |operation| move |source| Error::File { operation, path: to.display().to_string(), source };
        let mut file = File::create(to).map_err(failed("make"))?;
        let bytes = self.read(name, limit, &mut file)?;
        file.sync_all().map_err(failed("sync"))?;
        Ok(bytes)
    }

    fn read(&self, name: &str, limit: u64, into: &mut impl io::Write) -> Result<u64, Error> {
        let object = || self.below(name).shown;
        let read = self.inside(&self.path.join(name)).and_then(|path| {
            let file = File::open(path)?;
            io::copy(&mut file.take(limit.saturating_add(1)), into)
        });
        match read {
            Ok(bytes) if bytes > limit => Err(Error::TooLong { object: object(), limit }),
            Ok(bytes) => Ok(bytes),
            Err(error) if error.kind() == ErrorKind::NotFound => Err(Error::NotFound { object: object() }),
            Err(error) => Err(self.failed("read", name, error)),
        }
    }

    /// Names of what is in it; none where it is not there.
    ///
    /// # Errors
    /// [`Error::Storage`], also where it is no folder.
    pub fn list(&self) -> Result<Vec<String>, Error> {
        let listed: io::Result<_> = (|| {
            let mut names = Vec::new();
            for entry in fs::read_dir(self.inside(&self.path)?)? {
                names.extend(entry?.file_name().into_string().ok());
            }
            Ok(names)
        })();
        match listed {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            listed => listed.map_err(|error| self.failed("list", "", error)),
        }
    }

    /// Removes it with all that is in it, and the folder above it where nothing else is in that.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn remove(&self) -> Result<(), Error> {
        match self.inside(&self.path).and_then(fs::remove_dir_all) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(self.failed("remove", "", error)),
            _ => {}
        }
        if let Some(parent) = self.path.parent().filter(|parent| *parent != self.root) {
            // One that is not empty stays.
            let _ = self.inside(parent).and_then(fs::remove_dir);
        }
        Ok(())
    }

    /// The real path of what is there under `path`, which is below the root.
    fn inside(&self, path: &Path) -> io::Result<PathBuf> {
        let (root, path) = (self.root.canonicalize()?, path.canonicalize()?);
        if path.starts_with(&root) {
            Ok(path)
        } else {
            Err(io::Error::other("a symbolic link leads out of the volume"))
        }
    }

    fn failed(&self, operation: &'static str, name: &str, error: io::Error) -> Error {
        let object = if name.is_empty() { self.shown.clone() } else { self.below(name).shown };
        Error::Storage { operation, object, source: Box::new(error) }
    }
}

/// Makes names of a folder durable, on file systems that know such a thing.
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

    fn said(error: Error) -> String {
        format!("{:#}", crate::failed(error))
    }

    #[test]
    fn a_file_is_there_when_all_of_it_is_and_goes_with_its_folder() {
        let volume = tempfile::tempdir().unwrap();
        let snapshot =
            Folder::of_volume(volume.path().into(), "words/monday", "volume://backups/words/monday").unwrap();
        assert_eq!((snapshot.list().unwrap(), snapshot.get("manifest.json", 9).unwrap()), (Vec::new(), None));
        let attempt = snapshot.below("0a-1");
        assert!(
            said(attempt.put("a", b"a").unwrap_err()).contains("failed to write volume://backups/words/monday/0a-1/a")
        );
        attempt.make().unwrap();
        attempt.make().unwrap();
        let from = volume.path().join("from");
        fs::write(&from, [7; 1000]).unwrap();
        assert_eq!(attempt.put_file("a", &from).unwrap(), 1000);
        snapshot.put("manifest.json", b"one").unwrap();
        snapshot.put("manifest.json", b"another").unwrap();
        assert_eq!(names(attempt.path()), ["a"], "nothing unfinished stays");
        assert_eq!(snapshot.get("manifest.json", 7).unwrap().unwrap(), b"another");
        assert!(matches!(snapshot.get("manifest.json", 6), Err(Error::TooLong { limit: 6, .. })));
        let to = volume.path().join("to");
        assert_eq!(snapshot.get_file("0a-1/a", &to, 1000).unwrap(), 1000);
        assert!(fs::read(&to).unwrap() == [7; 1000]);
        assert!(matches!(snapshot.get_file("0a-1/a", &to, 999), Err(Error::TooLong { .. })));
        assert!(matches!(snapshot.get_file("0a-1/b", &to, 1), Err(Error::NotFound { .. })));
        // A write that fails in the middle leaves what was there.
        let broken =
            snapshot.write("manifest.json", |file| file.write_all(b"hal").and(Err(io::Error::other("pulled"))));
        assert!(said(broken.unwrap_err()).contains("pulled"));
        assert_eq!(names(snapshot.path()), ["0a-1", "manifest.json"]);
        assert_eq!(snapshot.get("manifest.json", 7).unwrap().unwrap(), b"another");
        attempt.remove().unwrap();
        attempt.remove().unwrap();
        assert_eq!(names(snapshot.path()), ["manifest.json"], "a folder with something else in it stays");
        fs::remove_file(snapshot.path().join("manifest.json")).unwrap();
        attempt.make().unwrap();
        attempt.remove().unwrap();
        assert_eq!(names(&volume.path().join("words")), [""; 0], "and one without goes");
        Folder::of_volume(volume.path().into(), "only", "only").unwrap().remove().unwrap();
        assert!(volume.path().exists(), "but not the volume");
    }

    #[test]
    fn nothing_outside_of_a_volume_is_read_written_or_removed() {
        let (volume, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let root = volume.path();
        for path in ["/words", "../words", "a/../../words"] {
            assert!(Folder::of_volume(root.into(), path, "v").is_none(), "{path}");
        }
        fs::create_dir(root.join("inside")).unwrap();
        fs::create_dir(elsewhere.path().join("monday")).unwrap();
        fs::write(elsewhere.path().join("monday/secret"), "s").unwrap();
        symlink(elsewhere.path(), root.join("out")).unwrap();
        symlink(root.join("inside"), root.join("in")).unwrap();
        symlink(elsewhere.path().join("monday/secret"), root.join("inside/secret")).unwrap();
        symlink(elsewhere.path().join("made"), root.join("nowhere")).unwrap();
        let of = |path: &str| Folder::of_volume(root.into(), path, "volume://backups/x").unwrap();
        let leads_out = "a symbolic link leads out of the volume";
        for refused in [
            of("out/monday").list().map(drop),
            of("out/tuesday").make(),
            of("out").put("a", b"a"),
            of("out/monday").get("secret", 9).map(drop),
            of("inside").get("secret", 9).map(drop),
            of("out/monday").remove(),
        ] {
            let said = said(refused.unwrap_err());
            assert!(said.contains(leads_out) && said.contains("volume://backups/x"), "{said}");
        }
        assert!(of("nowhere/a").make().is_err(), "a link to nothing is not made something");
        assert_eq!(names(elsewhere.path()), ["monday"]);
        assert_eq!(names(&elsewhere.path().join("monday")), ["secret"]);
        // What leads to another place of the volume is as good as any, and what is under a name is replaced, not followed.
        of("in/a").make().unwrap();
        of("in").put("secret", b"ours").unwrap();
        assert_eq!(names(&root.join("inside")), ["a", "secret"]);
        assert_eq!(fs::read(elsewhere.path().join("monday/secret")).unwrap(), b"s");
        assert_eq!(of("inside").get("secret", 9).unwrap().unwrap(), b"ours");
    }
}
