//! File-based map store: changed by one process at a time, replaced atomically.
//!
//! The lock is held for one change only: the coordinator writes the map, and in its absence workers do. Reads take no lock, since
//! the file is replaced by a rename.

use crate::format::{self, DecodeError};
use crate::{Error, Goal, MapOverride, MapStore, goal, map_override};
use engram_cluster::PartitionMap;
use engram_memory::ClusterId;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use parking_lot::Mutex;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Deadline for taking the lock: many times the duration of a write with two fsyncs on a busy disk.
const LOCK_DEADLINE: Duration = Duration::from_secs(2);
/// Delay between attempts to take the lock.
const LOCK_RETRY: Duration = Duration::from_millis(2);

/// Stores the map in `<folder>/map.json`, the goal in `<folder>/goal.json`, and overrides in `<folder>/orders.json`;
/// `<folder>/map.lock` is locked during changes.
#[derive(Debug)]
pub struct FileStore {
    cluster: ClusterId,
    folder: PathBuf,
    /// Serialises changes within the process; the lock on the file keeps other processes out.
    changing: Mutex<()>,
}

impl FileStore {
    /// Opens the store of `cluster` in `folder`, which must exist.
    ///
    /// # Errors
    /// Fails if the folder is not writable.
    pub fn open(folder: &Path, cluster: ClusterId) -> Result<Self, Error> {
        let store = Self { cluster, folder: folder.to_owned(), changing: Mutex::new(()) };
        store.open_lock().map_err(|source| Error::Io { action: "open", path: store.lock_path(), source })?;
        Ok(store)
    }

    fn lock_path(&self) -> PathBuf {
        self.folder.join("map.lock")
    }

    fn open_lock(&self) -> io::Result<File> {
        OpenOptions::new().create(true).truncate(false).read(true).write(true).open(self.lock_path())
    }

    /// Runs `change` under the lock, which the kernel releases when a process exits.
    fn with_lock<T>(&self, change: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let _here = self.changing.lock();
        let failed = |source| Error::Io { action: "lock", path: self.lock_path(), source };
        let mut file = self.open_lock().map_err(failed)?;
        let began = Instant::now();
        let lock = loop {
            file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => break lock,
                Err((file, Errno::EWOULDBLOCK)) => file,
                Err((_, errno)) => return Err(failed(errno.into())),
            };
            if began.elapsed() >= LOCK_DEADLINE {
                let mut holder = String::new();
                // For the message only.
                let _ = file.read_to_string(&mut holder);
                return Err(Error::Locked { path: self.lock_path(), holder: holder.trim().to_owned() });
            }
            sleep(LOCK_RETRY);
        };
        let note = format!("{}\n", std::process::id());
        lock.set_len(0).and_then(|()| lock.write_all_at(note.as_bytes(), 0)).map_err(failed)?;
        change()
    }

    fn path(&self) -> PathBuf {
        self.folder.join("map.json")
    }

    fn goal_path(&self) -> PathBuf {
        self.folder.join("goal.json")
    }

    fn orders_path(&self) -> PathBuf {
        self.folder.join("orders.json")
    }

    fn read(&self) -> Result<Option<PartitionMap>, Error> {
        let path = self.path();
        let Some(map) = read(&path, format::decode)? else { return Ok(None) };
        if map.cluster != self.cluster {
            return Err(Error::OtherCluster { path, expected: self.cluster, found: map.cluster });
        }
        Ok(Some(map))
    }
}

/// Replaces a file atomically and durably: temporary file, fsync, rename, fsync of the folder.
pub(crate) fn replace(path: &Path, text: &str) -> Result<(), Error> {
    let temporary = path.with_extension("json.tmp");
    let write = || -> io::Result<()> {
        let mut file = File::create(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
    };
    write().map_err(|source| Error::Io { action: "write", path: path.to_owned(), source })
}

pub(crate) fn read<T>(path: &Path, decode: fn(&str) -> Result<T, DecodeError>) -> Result<Option<T>, Error> {
    let path = path.to_owned();
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(Error::Io { action: "read", path, source }),
    };
    match decode(&text) {
        Ok(content) => Ok(Some(content)),
        Err(DecodeError::NewerFormat(found)) => Err(Error::NewerFormat { path, found, known: format::FORMAT }),
        Err(DecodeError::Damaged(why)) => Err(Error::Damaged { path, why }),
    }
}

impl MapStore for FileStore {
    fn get(&self) -> Result<Option<PartitionMap>, Error> {
        self.read()
    }

    fn compare_and_swap(&self, expected: Option<u64>, map: PartitionMap) -> Result<PartitionMap, Error> {
        if map.cluster != self.cluster {
            return Err(Error::OtherCluster { path: self.path(), expected: self.cluster, found: map.cluster });
        }
        self.with_lock(|| {
            let next = successor(self.read()?.as_ref(), expected, map)?;
            replace(&self.path(), &format::encode(&next))?;
            Ok(next)
        })
    }

    fn goal(&self) -> Result<Goal, Error> {
        read(&self.goal_path(), goal::decode).map(Option::unwrap_or_default)
    }

    fn set_goal(&self, goal: &Goal) -> Result<(), Error> {
        self.with_lock(|| replace(&self.goal_path(), &goal::encode(goal)))
    }

    fn overrides(&self) -> Result<Vec<MapOverride>, Error> {
        read(&self.orders_path(), map_override::decode).map(Option::unwrap_or_default)
    }

    fn override_map(
        &self,
        expected: Option<u64>,
        map: PartitionMap,
        order: MapOverride,
    ) -> Result<PartitionMap, Error> {
        if map.cluster != self.cluster {
            return Err(Error::OtherCluster { path: self.path(), expected: self.cluster, found: map.cluster });
        }
        self.with_lock(|| {
            let current = match self.read() {
                // An unreadable map is renamed, not deleted.
                Err(Error::Damaged { .. }) if expected.is_none() => {
                    let (path, aside) = (self.path(), self.folder.join("map.json.damaged"));
                    fs::rename(&path, aside).map_err(|source| Error::Io { action: "rename", path, source })?;
                    None
                }
                read => read?,
            };
            let next = overridden(current.as_ref(), expected, map)?;
            let mut orders = self.overrides()?;
            orders.push(MapOverride { version: next.version, ..order });
            replace(&self.orders_path(), &map_override::encode(&orders))?;
            replace(&self.path(), &format::encode(&next))?;
            Ok(next)
        })
    }
}

fn check_expected(current: Option<&PartitionMap>, expected: Option<u64>) -> Result<(), Error> {
    if current.map(|map| map.version) == expected {
        return Ok(());
    }
    Err(Error::Conflict { expected, found: current.cloned().map(Box::new) })
}

/// Returns the map to store when `map` replaces `current`.
pub(crate) fn successor(
    current: Option<&PartitionMap>,
    expected: Option<u64>,
    mut map: PartitionMap,
) -> Result<PartitionMap, Error> {
    check_expected(current, expected)?;
    if let Some(current) = current {
        current.check(&map).map_err(|(partition, illegal)| Error::Illegal { partition, illegal })?;
    }
    map.version = expected.unwrap_or(0) + 1;
    Ok(map)
}

/// Returns the map to store when `map` overrides `current`.
pub(crate) fn overridden(
    current: Option<&PartitionMap>,
    expected: Option<u64>,
    mut map: PartitionMap,
) -> Result<PartitionMap, Error> {
    check_expected(current, expected)?;
    map.version = map.version.max(expected.unwrap_or(0) + 1);
    Ok(map)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EntryOverride, OverrideKind};
    use engram_cluster::Entry;
    use engram_memory::{Incarnation, Member, Ordinal, PartitionId, StoreId, Term};

    fn member(incarnation: u64) -> Member {
        Member { ordinal: Ordinal(3), store: StoreId(u128::MAX - 5), incarnation: Incarnation(incarnation) }
    }

    fn map() -> PartitionMap {
        let partitions = vec![Entry::solo(Term(1), member(1)); 4];
        PartitionMap { cluster: ClusterId(7), version: 0, partitions }
    }

    #[test]
    fn concurrent_writers_of_a_version_conflict_and_the_loser_gets_the_map() {
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
    fn illegal_changes_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let store = FileStore::open(folder.path(), ClusterId(7)).unwrap();
        let mut stolen = store.compare_and_swap(None, map()).unwrap();
        stolen.partitions[1].term = Term(9);
        let error = store.compare_and_swap(Some(1), stolen).unwrap_err();
        assert!(matches!(error, Error::Illegal { partition: PartitionId(1), .. }), "{error}");
    }

    #[test]
    fn concurrent_writers_lose_no_change_and_the_lock_holder_is_named() {
        let folder = tempfile::tempdir().unwrap();
        FileStore::open(folder.path(), ClusterId(7)).unwrap().compare_and_swap(None, map()).unwrap();
        // Four writers, each with a store of its own as four processes have, raise one entry each, ten times.
        std::thread::scope(|scope| {
            for entry in 0..4 {
                let store = FileStore::open(folder.path(), ClusterId(7)).unwrap();
                scope.spawn(move || {
                    for incarnation in 2..12 {
                        loop {
                            let mut next = store.get().unwrap().unwrap();
                            let version = next.version;
                            next.partitions[entry] = Entry::solo(Term(incarnation), member(incarnation));
                            match store.compare_and_swap(Some(version), next) {
                                Ok(_) => break,
                                Err(Error::Conflict { .. }) => {}
                                Err(error) => panic!("{error}"),
                            }
                        }
                    }
                });
            }
        });
        let store = FileStore::open(folder.path(), ClusterId(7)).unwrap();
        let last = store.get().unwrap().unwrap();
        assert_eq!(last.version, 41);
        assert!(last.partitions.iter().all(|entry| entry.term == Term(11)));

        let stopped = store.open_lock().unwrap();
        let _held = Flock::lock(stopped, FlockArg::LockExclusiveNonblock).unwrap();
        assert!(store.get().is_ok(), "reading needs no lock");
        let error = store.compare_and_swap(Some(41), last).unwrap_err();
        assert!(error.to_string().contains(&format!("held by process {}", std::process::id())), "{error}");
    }

    #[test]
    fn a_goal_is_persistent_and_superseded_by_a_new_manifest() {
        let folder = tempfile::tempdir().unwrap();
        let store = FileStore::open(folder.path(), ClusterId(7)).unwrap();
        assert_eq!(store.goal().unwrap(), Goal::default());
        let goal =
            Goal { workers: Some(crate::Scale { to: 4, from: 3 }), draining: [Ordinal(1)].into_iter().collect() };
        store.set_goal(&goal).unwrap();
        drop(store);
        let store = FileStore::open(folder.path(), ClusterId(7)).unwrap();
        assert_eq!(store.goal().unwrap(), goal);
        assert_eq!((goal.workers(3), goal.workers(5)), (4, 5));
        let path = folder.path().join("goal.json");
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replace("[1]", "[2]")).unwrap();
        assert!(matches!(store.goal(), Err(Error::Damaged { .. })));
    }

    #[test]
    fn an_override_ignores_the_rules_and_is_recorded() {
        let folder = tempfile::tempdir().unwrap();
        let store = FileStore::open(folder.path(), ClusterId(7)).unwrap();
        let first = store.compare_and_swap(None, map()).unwrap();
        let mut forced = first.clone();
        forced.partitions[1] = Entry { activated: false, ..Entry::solo(Term(9), member(4)) };
        let order = MapOverride {
            at_ms: 5,
            by: "ann".into(),
            reason: "both disks burnt".into(),
            what: OverrideKind::ForcePromote,
            version: 0,
            steps: vec![EntryOverride {
                partition: PartitionId(1),
                before: Some(first.partitions[1].clone()),
                after: forced.partitions[1].clone(),
                lost: "all after lsn 7".into(),
            }],
        };
        let stale = store.override_map(Some(9), forced.clone(), order.clone());
        assert!(matches!(stale, Err(Error::Conflict { .. })));
        let written = store.override_map(Some(1), forced.clone(), order.clone()).unwrap();
        assert_eq!((written.version, store.get().unwrap()), (2, Some(written)));

        // An unreadable map is replaced only by an override, and kept under another name.
        fs::write(folder.path().join("map.json"), "{").unwrap();
        assert!(matches!(store.compare_and_swap(None, forced.clone()), Err(Error::Damaged { .. })));
        let rebuilt = MapOverride { what: OverrideKind::RebuildMap, ..order.clone() };
        let leapt = PartitionMap { version: 1_000, ..forced };
        assert_eq!(store.override_map(None, leapt, rebuilt).unwrap().version, 1_000);
        assert!(folder.path().join("map.json.damaged").exists());
        drop(store);
        let store = FileStore::open(folder.path(), ClusterId(7)).unwrap();
        let orders = store.overrides().unwrap();
        assert_eq!(orders[0], MapOverride { version: 2, ..order });
        assert_eq!((orders.len(), orders[1].what, orders[1].version), (2, OverrideKind::RebuildMap, 1_000));
    }

    #[test]
    fn damaged_foreign_and_newer_maps_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let store = FileStore::open(folder.path(), ClusterId(7)).unwrap();
        store.compare_and_swap(None, map()).unwrap();
        let path = folder.path().join("map.json");
        let good = fs::read_to_string(&path).unwrap();

        for (index, byte) in good.bytes().enumerate() {
            let mut bad = good.clone().into_bytes();
            bad[index] = if byte == b'7' { b'8' } else { b'7' };
            fs::write(&path, &bad).unwrap();
            // Only trailing white space may change.
            assert!(store.get().is_err(), "byte {index} of the map can change undetected");
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
