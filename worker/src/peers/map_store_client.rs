//! Direct access to the map store: a folder of this machine, or an object of an API server. Opened on first use.
//!
//! It makes no decisions: the map's entries say what may be written, and the store's compare-and-swap decides between several
//! writers.

use crate::options::{MapLocation, Options};
use engram_cluster::PartitionMap;
use engram_mapstore::{Error, FileStore, KubernetesStore, MapStore};
use engram_memory::{ClusterId, Law};
use engram_store::peer::Proposal;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::sync::OnceCell;
use tokio::task::JoinError;

/// Maximum number of attempts after a conflict; then proposals that are still needed are made again.
const MAX_CONFLICTS: usize = 8;

/// Client of the map store.
pub(crate) struct MapStoreClient {
    location: MapLocation,
    cluster: ClusterId,
    law: Law,
    /// Runtime of the services: the heartbeat thread must not block.
    runtime: Handle,
    backend: OnceCell<MapStoreBackend>,
}

#[derive(Clone)]
enum MapStoreBackend {
    Folder(Arc<FileStore>),
    Object(Arc<KubernetesStore>),
}

impl MapStoreClient {
    /// Returns the client of a worker that can reach the map store. Must be called on the runtime of its services.
    pub(crate) fn of(options: &Options) -> Option<Self> {
        let location = options.map_location.clone()?;
        let (cluster, law) = (options.cluster, options.shape().law);
        Some(Self { location, cluster, law, runtime: Handle::current(), backend: OnceCell::new() })
    }

    /// Reads the newest map. A store that announces changes returns after the next one or a timeout. `None`: there is no map.
    pub(super) async fn newest(&self) -> Result<Option<PartitionMap>, Error> {
        let read = match self.backend().await? {
            MapStoreBackend::Folder(store) => self.runtime.spawn_blocking(move || store.get()),
            MapStoreBackend::Object(store) => self.runtime.spawn(async move { store.changed().await }),
        };
        read.await.unwrap_or_else(panicked)
    }

    /// Applies the proposals that match the current entries and returns the map; `None`: there is no map.
    pub(super) async fn apply(&self, proposals: Vec<Proposal>) -> Result<Option<PartitionMap>, Error> {
        let backend = self.backend().await?;
        let change = move || match backend {
            MapStoreBackend::Folder(store) => compare_and_swap(&*store, &proposals),
            MapStoreBackend::Object(store) => compare_and_swap(&*store, &proposals),
        };
        self.runtime.spawn_blocking(change).await.unwrap_or_else(panicked)
    }

    /// Opens the store, unless it is open.
    async fn backend(&self) -> Result<MapStoreBackend, Error> {
        let (cluster, law) = (self.cluster, self.law);
        let open = || async {
            let opening = match self.location.clone() {
                MapLocation::Folder(folder) => self.runtime.spawn_blocking(move || {
                    FileStore::open(&folder, cluster).map(|store| MapStoreBackend::Folder(Arc::new(store)))
                }),
                MapLocation::Object { namespace, name } => self.runtime.spawn(async move {
                    let location = engram_mapstore::MapLocation { namespace, name, ..Default::default() };
                    let store = KubernetesStore::connect(location, cluster, law).await;
                    store.map(|store| MapStoreBackend::Object(Arc::new(store)))
                }),
            };
            opening.await.unwrap_or_else(panicked)
        };
        self.backend.get_or_try_init(open).await.cloned()
    }
}

fn panicked<T>(error: JoinError) -> Result<T, Error> {
    Err(Error::Io { action: "reach", path: PathBuf::from("the map store"), source: std::io::Error::other(error) })
}

fn compare_and_swap(store: &dyn MapStore, proposals: &[Proposal]) -> Result<Option<PartitionMap>, Error> {
    let mut current = store.get()?;
    for _ in 0..MAX_CONFLICTS {
        let Some(map) = current else { return Ok(None) };
        let Some(next) = apply_matching(&map, proposals) else { return Ok(Some(map)) };
        match store.compare_and_swap(Some(map.version), next) {
            Ok(map) => return Ok(Some(map)),
            Err(Error::Conflict { found, .. }) => current = found.map(|map| *map),
            Err(error) => return Err(error),
        }
    }
    Ok(current)
}

/// Returns the map with every proposal whose expected entry is current; `None`: there is none.
fn apply_matching(map: &PartitionMap, proposals: &[Proposal]) -> Option<PartitionMap> {
    let mut next = map.clone();
    let mut changed = false;
    for proposal in proposals {
        let Some(entry) = next.partitions.get_mut(proposal.partition.0 as usize) else { continue };
        if entry.expectation() != proposal.expected {
            continue;
        }
        if let Ok(after) = entry.apply(&proposal.change) {
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
    use engram_testing::map_store::{FaultRates, FaultyMapStore};

    const CLUSTER: ClusterId = ClusterId(5);

    fn member(ordinal: u32) -> Member {
        Member { ordinal: Ordinal(ordinal), store: StoreId(u128::from(ordinal) + 9), incarnation: Incarnation(1) }
    }

    /// Three partitions, each with worker 0 as primary and a replica on worker 1.
    fn map() -> PartitionMap {
        let first = Entry::first(vec![member(0), member(1)]);
        PartitionMap { cluster: CLUSTER, version: 0, partitions: vec![first; 3] }
    }

    fn promote(partition: u32, to: u32) -> Proposal {
        Proposal {
            partition: PartitionId(partition),
            expected: map().partitions[0].expectation(),
            change: Change::Promote { primary: member(to), isr: vec![Ordinal(to)] },
        }
    }

    #[test]
    fn only_proposals_that_match_the_current_entries_are_written() {
        let store = MemoryStore::default();
        assert_eq!(
            compare_and_swap(&store, &[promote(0, 1)]).unwrap(),
            None,
            "only a coordinator creates the first map"
        );
        store.compare_and_swap(None, map()).unwrap();
        // A worker without a replica is no candidate.
        let written = compare_and_swap(&store, &[promote(0, 1), promote(2, 7)]).unwrap().unwrap();
        assert_eq!(written.version, 2);
        assert_eq!(written.partitions[0].primary, Ordinal(1));
        assert_eq!(written.partitions[1..], map().partitions[1..]);
        let again = compare_and_swap(&store, &[promote(0, 1)]).unwrap().unwrap();
        assert_eq!(again, written, "a proposal for an outdated entry writes nothing");
    }

    #[test]
    fn a_repeated_promotion_takes_effect_once_on_a_faulty_store() {
        for seed in 0..200 {
            let store = FaultyMapStore::new(MemoryStore::default(), seed, FaultRates::ALL);
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
    async fn a_folder_is_opened_once_it_exists() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("later");
        let location = MapLocation::Folder(folder.clone());
        let client = MapStoreClient {
            location,
            cluster: CLUSTER,
            law: Law::Linear,
            runtime: Handle::current(),
            backend: OnceCell::new(),
        };
        assert!(client.newest().await.is_err(), "the folder does not exist yet");
        std::fs::create_dir(&folder).unwrap();
        assert_eq!(client.newest().await.unwrap(), None);
        FileStore::open(&folder, CLUSTER).unwrap().compare_and_swap(None, map()).unwrap();
        let written = client.apply(vec![promote(1, 1)]).await.unwrap();
        assert_eq!((written.as_ref().map(|map| map.version), &client.newest().await.unwrap()), (Some(2), &written));
    }
}
