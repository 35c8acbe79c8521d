//! A map in a file: locked by one process, replaced atomically, never half-written.

use crate::format::{self, Unreadable};
use crate::{Error, MapStore};
use engram_cluster::PartitionMap;
use engram_memory::ClusterId;
use nix::fcntl::{Flock, FlockArg};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Keeps the map in `<folder>/map.json`; `<folder>/map.lock` is held as long as the store lives.
#[derive(Debug)]
pub struct FileStore {
    cluster: ClusterId,
    folder: PathBuf,
    /// Serialises compare and swap within the process; the lock in it keeps other processes out.
    lock: Mutex<Flock<File>>,
}

impl FileStore {
    /// Takes the lock of `folder`, which must exist, for `cluster`.
    ///
    /// # Errors
    /// [`Error::Locked`] names the process that holds it.
    pub fn open(folder: &Path, cluster: ClusterId) -> Result<Self, Error> {
        let path = folder.join("map.lock");
        let io = |action| move |source| Error::Io { action, path: path.clone(), source };
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(folder.join("map.lock"))
            .map_err(io("open"))?;
        let path = folder.join("map.lock");
        let mut holder = String::new();
        // What stands there is for the message alone; the lock is the kernel's.
        let _ = file.read_to_string(&mut holder);
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock)
            .map_err(|_| Error::Locked { path: path.clone(), holder: holder.trim().to_owned() })?;
        let note = || -> io::Result<()> {
            lock.set_len(0)?;
            std::os::unix::fs::FileExt::write_all_at(&*lock, format!("{}\n", std::process::id()).as_bytes(), 0)
        };
        note().map_err(|source| Error::Io { action: "write", path, source })?;
        Ok(Self { cluster, folder: folder.to_owned(), lock: Mutex::new(lock) })
    }

    fn path(&self) -> PathBuf {
        self.folder.join("map.json")
    }

    fn read(&self) -> Result<Option<PartitionMap>, Error> {
        let path = self.path();
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(Error::Io { action: "read", path, source }),
        };
        let map = format::decode(&text).map_err(|unreadable| match unreadable {
            Unreadable::NewerFormat(found) => Error::NewerFormat { path: path.clone(), found, known: format::FORMAT },
            Unreadable::Damaged(why) => Error::Damaged { path: path.clone(), why },
        })?;
        if map.cluster != self.cluster {
            return Err(Error::OtherCluster { path, expected: self.cluster, found: map.cluster });
        }
        Ok(Some(map))
    }

    /// Temporary file, fsync, rename, fsync of the folder: after a crash the old map is there or the new one.
    fn write(&self, map: &PartitionMap) -> Result<(), Error> {
        let temporary = self.folder.join("map.json.tmp");
        let write = || -> io::Result<()> {
            let mut file = File::create(&temporary)?;
            file.write_all(format::encode(map).as_bytes())?;
            file.sync_all()?;
            fs::rename(&temporary, self.path())?;
            File::open(&self.folder)?.sync_all()
        };
        write().map_err(|source| Error::Io { action: "write", path: self.path(), source })
    }
}

impl MapStore for FileStore {
    fn get(&self) -> Result<Option<PartitionMap>, Error> {
        self.read()
    }

    fn compare_and_swap(&self, expected: Option<u64>, mut map: PartitionMap) -> Result<PartitionMap, Error> {
        let _held = self.lock.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if map.cluster != self.cluster {
            return Err(Error::OtherCluster { path: self.path(), expected: self.cluster, found: map.cluster });
        }
        let current = self.read()?;
        if current.as_ref().map(|map| map.version) != expected {
            return Err(Error::Conflict { expected, found: current.map(Box::new) });
        }
        if let Some(current) = &current {
            current.check(&map).map_err(|(partition, illegal)| Error::Illegal { partition, illegal })?;
        }
        map.version = expected.unwrap_or(0) + 1;
        self.write(&map)?;
        Ok(map)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_cluster::Entry;
    use engram_memory::{Incarnation, Member, Ordinal, StoreId, Term};

    fn member(incarnation: u64) -> Member {
        Member { ordinal: Ordinal(3), store: StoreId(u128::MAX - 5), incarnation: Incarnation(incarnation) }
    }

    fn map() -> PartitionMap {
        let partitions = vec![Entry::solo(Term(1), member(1)); 4];
        PartitionMap { cluster: ClusterId(7), version: 0, partitions }
    }

    #[test]
    fn of_two_writers_that_saw_one_version_one_wins_and_the_other_learns_what_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let store = FileStore::open(folder.path(), ClusterId(7)).unwrap();
        assert!(store.get().unwrap().is_none());
        let first = store.compare_and_swap(None, map()).unwrap();
        assert_eq!(first.version, 1);
        assert!(matches!(store.compare_and_swap(None, map()), Err(Error::Conflict { found: Some(_), .. })));

        let mut next = first;
        next.partitions[2] = Entry::solo(Term(2), member(2));
        let second = store.compare_and_swap(Some(1), next.clone()).unwrap();
        match store.compare_and_swap(Some(1), next) {
            Err(Error::Conflict { found: Some(found), .. }) => assert_eq!(*found, second),
            other => panic!("expected a conflict: {other:?}"),
        }
        drop(store);
        let again = FileStore::open(folder.path(), ClusterId(7)).unwrap();
        assert_eq!(again.get().unwrap(), Some(second), "the map is there after a restart");
    }

    #[test]
    fn illegal_changes_are_refused_whoever_writes() {
        let folder = tempfile::tempdir().unwrap();
        let store = FileStore::open(folder.path(), ClusterId(7)).unwrap();
        let mut stolen = store.compare_and_swap(None, map()).unwrap();
        stolen.partitions[1].term = Term(9);
        let error = store.compare_and_swap(Some(1), stolen).unwrap_err();
        assert!(matches!(error, Error::Illegal { partition: engram_memory::PartitionId(1), .. }), "{error}");
    }

    #[test]
    fn a_second_process_is_told_who_holds_the_map() {
        let folder = tempfile::tempdir().unwrap();
        let _store = FileStore::open(folder.path(), ClusterId(7)).unwrap();
        let error = FileStore::open(folder.path(), ClusterId(7)).unwrap_err();
        assert!(error.to_string().contains(&format!("in use by process {}", std::process::id())), "{error}");
    }

    #[test]
    fn damage_another_cluster_and_newer_formats_are_errors_and_never_an_empty_map() {
        let folder = tempfile::tempdir().unwrap();
        let store = FileStore::open(folder.path(), ClusterId(7)).unwrap();
        store.compare_and_swap(None, map()).unwrap();
        let path = folder.path().join("map.json");
        let good = fs::read_to_string(&path).unwrap();

        for (index, byte) in good.bytes().enumerate() {
            let mut bad = good.clone().into_bytes();
            bad[index] = if byte == b'7' { b'8' } else { b'7' };
            fs::write(&path, &bad).unwrap();
            // White space at the end is the one place where a byte does not matter.
            assert!(store.get().is_err(), "byte {index} of the map may be changed unnoticed");
        }
        fs::write(&path, good.replace("\"format\":1", "\"format\":2")).unwrap();
        assert!(matches!(store.get(), Err(Error::NewerFormat { found: 2, known: 1, .. })));
        fs::write(&path, &good).unwrap();
        drop(store);
        let other = FileStore::open(folder.path(), ClusterId(8)).unwrap();
        assert!(matches!(other.get(), Err(Error::OtherCluster { .. })));
        assert!(matches!(other.compare_and_swap(Some(1), map()), Err(Error::OtherCluster { .. })));
    }
}
