//! The partition map where it is kept: a folder of this machine, or an object of an API server. Opened when it is first needed.
//!
//! It decides nothing: what may be written the entries say, and between several that write the store's compare-and-swap does.

use crate::options::{MapPlace, Options};
use engram_cluster::PartitionMap;
use engram_mapstore::{Error, FileStore, KubernetesStore, MapStore, Place};
use engram_memory::{ClusterId, Law};
use engram_store::peer::Proposal;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::sync::OnceCell;
use tokio::task::JoinError;

/// Attempts to write over what others write meanwhile; then what is still wanted is asked for again.
const CONFLICTS: usize = 8;

/// The way to the map.
pub(crate) struct MapKeeper {
    place: MapPlace,
    cluster: ClusterId,
    law: Law,
    /// Of the services: what beats has no time for it.
    runtime: Handle,
    opened: OnceCell<Kept>,
}

#[derive(Clone)]
enum Kept {
    Folder(Arc<FileStore>),
    Object(Arc<KubernetesStore>),
}

impl MapKeeper {
    /// The one of a worker that reaches the map by itself; called on the runtime of its services.
    pub(crate) fn of(options: &Options) -> Option<Self> {
        let place = options.map_place.clone()?;
        let (cluster, law) = (options.cluster, options.shape().law);
        Some(Self { place, cluster, law, runtime: Handle::current(), opened: OnceCell::new() })
    }

    /// The newest map; where changes are told, once there may be one since the last question, or after a while. `None`: there is no map.
    pub(super) async fn newest(&self) -> Result<Option<PartitionMap>, Error> {
        let read = match self.kept().await? {
            Kept::Folder(store) => self.runtime.spawn_blocking(move || store.get()),
            Kept::Object(store) => self.runtime.spawn(async move { store.changed().await }),
        };
        read.await.unwrap_or_else(panicked)
    }

    /// The map after those of the proposals that fit the entries that are there; `None`: there is no map.
    pub(super) async fn change(&self, proposals: Vec<Proposal>) -> Result<Option<PartitionMap>, Error> {
        let kept = self.kept().await?;
        let change = move || match kept {
            Kept::Folder(store) => compare_and_swap(&*store, &proposals),
            Kept::Object(store) => compare_and_swap(&*store, &proposals),
        };
        self.runtime.spawn_blocking(change).await.unwrap_or_else(panicked)
    }

    /// Opens it, unless that was done before.
    async fn kept(&self) -> Result<Kept, Error> {
        let (cluster, law) = (self.cluster, self.law);
        let open = || async {
            let opening = match self.place.clone() {
                MapPlace::Folder(folder) => self.runtime.spawn_blocking(move || {
                    FileStore::open(&folder, cluster).map(|store| Kept::Folder(Arc::new(store)))
                }),
                MapPlace::Object { namespace, name } => self.runtime.spawn(async move {
                    let place = Place { namespace, name, ..Place::default() };
                    let store = KubernetesStore::connect(place, cluster, law).await;
                    store.map(|store| Kept::Object(Arc::new(store)))
                }),
            };
            opening.await.unwrap_or_else(panicked)
        };
        self.opened.get_or_try_init(open).await.cloned()
    }
}

fn panicked<T>(error: JoinError) -> Result<T, Error> {
    Err(Error::Io { action: "reach", path: PathBuf::from("the map store"), source: std::io::Error::other(error) })
}

fn compare_and_swap(store: &dyn MapStore, proposals: &[Proposal]) -> Result<Option<PartitionMap>, Error> {
    let mut current = store.get()?;
    for _ in 0..CONFLICTS {
        let Some(map) = current else { return Ok(None) };
        let Some(next) = applied(&map, proposals) else { return Ok(Some(map)) };
        match store.compare_and_swap(Some(map.version), next) {
            Ok(map) => return Ok(Some(map)),
            Err(Error::Conflict { found, .. }) => current = found.map(|found| *found),
            Err(error) => return Err(error),
        }
    }
    Ok(current)
}

/// The map with every proposal whose entry is the one that it expects; `None`: none is.
fn applied(map: &PartitionMap, proposals: &[Proposal]) -> Option<PartitionMap> {
    let mut next = map.clone();
    let mut changed = false;
    for proposal in proposals {
        let Some(entry) = next.partitions.get_mut(proposal.partition.0 as usize) else { continue };
        if entry.expected() != proposal.expected {
            continue;
        }
        if let Ok(after) = entry.changed(&proposal.change) {
            changed |= *entry != after;
            *entry = after;
        }
    }
    changed.then_some(next)
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_cluster::{Change, Entry};
    use engram_mapstore::MemoryStore;
    use engram_memory::{Incarnation, Member, Ordinal, PartitionId, StoreId};
    use engram_testing::map_store::{Faults, Faulty};

    const CLUSTER: ClusterId = ClusterId(5);

    fn member(ordinal: u32) -> Member {
        Member { ordinal: Ordinal(ordinal), store: StoreId(u128::from(ordinal) + 9), incarnation: Incarnation(1) }
    }

    /// Three partitions, each with a primary at place 0 and a copy at place 1.
    fn map() -> PartitionMap {
        let first = Entry::first(vec![member(0), member(1)]);
        PartitionMap { cluster: CLUSTER, version: 0, partitions: vec![first; 3] }
    }

    fn promote(partition: u32, to: u32) -> Proposal {
        Proposal {
            partition: PartitionId(partition),
            expected: map().partitions[0].expected(),
            change: Change::Promote { primary: member(to), isr: vec![Ordinal(to)] },
        }
    }

    #[test]
    fn what_fits_the_entries_that_are_there_is_written_and_nothing_else() {
        let store = MemoryStore::default();
        assert_eq!(
            compare_and_swap(&store, &[promote(0, 1)]).unwrap(),
            None,
            "nobody makes the first map but a coordinator"
        );
        store.compare_and_swap(None, map()).unwrap();
        // A stranger is no candidate.
        let written = compare_and_swap(&store, &[promote(0, 1), promote(2, 7)]).unwrap().unwrap();
        assert_eq!(written.version, 2);
        assert_eq!(written.partitions[0].primary, Ordinal(1));
        assert_eq!(written.partitions[1..], map().partitions[1..]);
        let again = compare_and_swap(&store, &[promote(0, 1)]).unwrap().unwrap();
        assert_eq!(again, written, "a proposal on an entry that has moved on writes nothing");
    }

    #[test]
    fn whoever_asks_again_takes_over_once_whatever_the_store_does() {
        for seed in 0..200 {
            let store = Faulty::new(MemoryStore::default(), seed, Faults::ALL);
            store.inner().compare_and_swap(None, map()).unwrap();
            let all = [promote(0, 1), promote(1, 1), promote(2, 1)];
            let is_done = |map: &PartitionMap| map.partitions.iter().all(|entry| entry.primary == Ordinal(1));
            let done =
                (0..1_000).any(|_| compare_and_swap(&store, &all).is_ok_and(|map| map.is_some_and(|it| is_done(&it))));
            assert!(done, "seed {seed}");
            let last = store.inner().get().unwrap().unwrap();
            let term = map().partitions[0].term.0 + 1;
            assert!(last.partitions.iter().all(|entry| entry.term.0 == term), "seed {seed}: promoted twice");
        }
    }

    #[tokio::test]
    async fn a_folder_is_opened_when_it_is_there() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("later");
        let place = MapPlace::Folder(folder.clone());
        let keeper = MapKeeper {
            place,
            cluster: CLUSTER,
            law: Law::Linear,
            runtime: Handle::current(),
            opened: OnceCell::new(),
        };
        assert!(keeper.newest().await.is_err(), "it is not there yet");
        std::fs::create_dir(&folder).unwrap();
        assert_eq!(keeper.newest().await.unwrap(), None);
        FileStore::open(&folder, CLUSTER).unwrap().compare_and_swap(None, map()).unwrap();
        let written = keeper.change(vec![promote(1, 1)]).await.unwrap();
        assert_eq!((written.as_ref().map(|map| map.version), &keeper.newest().await.unwrap()), (Some(2), &written));
    }
}
