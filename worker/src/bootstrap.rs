//! A new disk of a cluster that begins from a snapshot: what this worker will lead is loaded before there is a map.
//!
//! ```text
//! empty store, no map ──load──> folder `bootstrap`, complete ──stop in order, start again──> files in place, marked ──beats say so──> first map
//! ```
//!
//! Which partitions a worker loads follows from the number of workers alone; the coordinator forms the first map when all of them have
//! said that they are done, and gives each partition to who has loaded it. What is loaded depends on the snapshot alone, to the bit, so
//! that a worker that loads again, or one that the map does not name after all, holds nothing that contradicts the others.
//!
//! Nothing is in the store's folder before all of it is there: an interrupted load begins again, an interrupted move goes on.

use crate::shared::Shared;
use anyhow::{Context as _, Result};
use engram_api::{Bootstrap as Spec, Code, Problem};
use engram_cluster::loaders;
use engram_memory::{Lsn, PartitionId, Settings, Term};
use engram_objects::{Credentials, Options};
use engram_proto::v1;
use engram_snapshot::{Manifest, Place, unusable};
use engram_store::{FileDisk, FileHead, Repartition};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The folder in which a load is gathered, in the folder of the store.
const FOLDER: &str = "bootstrap";
/// Written when all of it is there.
const READY: &str = "ready.json";
/// Beside the store: what it was loaded from.
const MARK: &str = "bootstrapped.json";
/// Between attempts: a snapshot that is not there may be put there.
const AGAIN: Duration = Duration::from_secs(10);
/// Between looks whether a coordinator is heard and what it knows.
const LOOK: Duration = Duration::from_millis(100);

/// What a disk was loaded with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Loaded {
    /// Workers that the partitions were shared out between.
    workers: u32,
    /// The highest term of the snapshot.
    term: u64,
}

/// How the load of this disk stands.
#[derive(Debug, Default)]
pub(crate) struct Bootstrap(Mutex<Option<v1::Bootstrap>>);

impl Bootstrap {
    /// What coordinators are told; nothing where nothing is to be loaded.
    pub(crate) fn told(&self) -> Option<v1::Bootstrap> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn tell(&self, state: Option<v1::Bootstrap>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }
}

impl Loaded {
    pub(crate) fn told(self) -> v1::Bootstrap {
        v1::Bootstrap { loaded: true, workers: self.workers, term: self.term, ..v1::Bootstrap::default() }
    }

    /// Whether a promise under `term` can be of a map only, and not of the snapshot.
    pub(crate) const fn is_before(self, term: Term) -> bool {
        term.0 > self.term
    }
}

/// Puts a complete load in place, removes one that is not, and says what the disk was loaded with. The store is not open.
///
/// # Errors
/// Those of the file system.
pub(crate) fn settle(store: &Path) -> io::Result<Option<Loaded>> {
    let (folder, mark) = (store.join(FOLDER), store.join(MARK));
    let ready = folder.join(READY);
    if ready.exists() {
        for entry in fs::read_dir(folder.join("store"))? {
            let entry = entry?;
            fs::rename(entry.path(), store.join(entry.file_name()))?;
        }
        sync(store)?;
        fs::rename(&ready, &mark)?;
        sync(store)?;
    }
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    match fs::read(&mark) {
        Ok(text) => serde_json::from_slice(&text).map(Some).map_err(io::Error::other),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Loads what this worker will lead, unless the cluster turns out to have a map; then the process begins again. Ends when dropped.
///
/// # Errors
/// On one machine: what is wrong with the snapshot. A pod says so in its beats, and tries again.
pub(crate) async fn run(shared: &Arc<Shared>, spec: &Spec) -> Result<(), Problem> {
    shared.bootstrap.tell(Some(v1::Bootstrap::default()));
    // A disk that comes later finds a map: what is in the snapshot is old by then.
    while shared.coordinators.unheard_ms() > 0 || shared.view.borrow().members.is_empty() {
        tokio::time::sleep(LOOK).await;
    }
    let mut view = shared.view.subscribe();
    loop {
        let loaded = tokio::select! {
            loaded = load(shared, spec) => loaded,
            _ = view.wait_for(|view| view.map.is_some()) => {
                shared.bootstrap.tell(None);
                let _ = fs::remove_dir_all(shared.options.state_dir.join(FOLDER));
                return Ok(());
            }
        };
        let problem = match loaded {
            Ok(()) => {
                tracing::info!("loaded the snapshot; begins again with it");
                shared.begins_again.store(true, Ordering::Release);
                shared.asked_to_stop.notify_one();
                return Ok(());
            }
            Err(error) => error.downcast::<Problem>().unwrap_or_else(|error| {
                Problem::new(Code::StorageFailed, format!("failed to load the snapshot: {error:#}"))
            }),
        };
        tracing::error!(code = problem.code().id(), problem = problem.message(), "cannot begin from the snapshot");
        if shared.options.inputs.is_none() {
            return Err(problem);
        }
        let (code, problem) = (problem.code().id().to_owned(), problem.message().to_owned());
        shared.bootstrap.tell(Some(v1::Bootstrap { code, problem, ..v1::Bootstrap::default() }));
        tokio::select! {
            () = tokio::time::sleep(AGAIN) => {}
            _ = view.wait_for(|view| view.map.is_some()) => {}
        }
    }
}

async fn load(shared: &Arc<Shared>, spec: &Spec) -> Result<()> {
    let place = &spec.snapshot;
    let told = shared.options.bootstrap.clone().unwrap_or_default();
    let credentials = told.credentials.filter(|_| place.secret_ref.is_some()).map(Credentials::Folder);
    let options = Options { endpoint: place.endpoint.clone(), region: place.region.clone(), credentials };
    // The address of one snapshot, whatever the name.
    let (address, volumes) = (place.address_of(""), shared.options.snapshots.as_deref());
    let from = Place::named(&address, &options, volumes).await?;
    let whence = from.to_string();
    let Some(manifest) = from.manifest().await? else {
        return Err(unusable(&whence, "has no manifest.json: there is no snapshot, or it was never finished").into());
    };
    check(&manifest, &whence, shared)?;
    let workers = told.workers.unwrap_or(shared.options.spec.workers);
    let own = loaders(shared.partitions(), workers);
    let is_own = |partition: u32| own.get(partition as usize) == Some(&shared.ordinal());
    // With as many partitions as the snapshot has each is in a file of its own.
    let alike = manifest.partitions == shared.partitions();
    let needed: Vec<_> = manifest.files.iter().filter(|entry| !alike || is_own(entry.partition)).cloned().collect();
    let total: u64 = needed.iter().map(|entry| entry.bytes).sum();
    let folder = shared.options.state_dir.join(FOLDER);
    let (files, store) = (folder.join("files"), folder.join("store"));
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("failed to remove {}", folder.display()))?;
    }
    for folder in [&files, &store] {
        fs::create_dir_all(folder).with_context(|| format!("failed to make {}", folder.display()))?;
    }
    let highest = |of: fn(&engram_snapshot::Entry) -> u64| manifest.files.iter().map(of).max().unwrap_or_default();
    let (lsn, term) = (highest(|entry| entry.lsn), highest(|entry| entry.term));
    let wanted: Vec<_> = (0..shared.partitions()).filter(|partition| is_own(*partition)).map(PartitionId).collect();
    let mut dealt = Repartition::new(shared.shape, wanted, manifest.created_ms).behind(Lsn(lsn), Term(term));
    let mut done = 0;
    for entry in needed {
        let tell = |done| v1::Bootstrap { done_bytes: done, total_bytes: total, ..v1::Bootstrap::default() };
        shared.bootstrap.tell(Some(tell(done)));
        done += entry.bytes;
        dealt = take(dealt, &manifest, &from, (entry, &files)).await?;
    }
    let limit = Settings::limit_of(shared.options.spec.capacity.memories, shared.partitions());
    if let Some((partition, memories)) = dealt.memories().find(|(_, memories)| *memories > limit) {
        let (partitions, capacity) = (shared.partitions(), shared.options.spec.capacity.memories);
        let message = format!(
            "partition {partition} of {partitions} would hold {memories} memories of {whence}, and spec.capacity.memories {capacity} gives \
             it {limit}; allowed: more capacity, or fewer partitions"
        );
        return Err(Problem::new(Code::CapacityExceeded, message).into());
    }
    let head = FileHead { cluster: shared.options.cluster, store: shared.member.store, shape: shared.shape };
    let (created_ms, loaded) = (manifest.created_ms, Loaded { workers, term });
    tokio::task::spawn_blocking(move || {
        dealt.write(&FileDisk::new(&store)?, &head, created_ms)?;
        fs::remove_dir_all(&files)?;
        let (new, ready) = (folder.join("ready.new"), folder.join(READY));
        let mut file = File::create(&new)?;
        file.write_all(&serde_json::to_vec(&loaded)?)?;
        file.sync_all()?;
        sync(&folder)?;
        // From here on it is complete.
        fs::rename(&new, &ready)?;
        sync(&folder)?;
        anyhow::Ok(())
    })
    .await?
}

/// Fetches one file, checks every byte of it and takes its memories.
async fn take(
    mut dealt: Repartition,
    manifest: &Manifest,
    from: &Place,
    (entry, folder): (engram_snapshot::Entry, &PathBuf),
) -> Result<Repartition> {
    from.fetch(&entry, folder).await?;
    let (manifest, folder, whence) = (manifest.clone(), folder.clone(), from.to_string());
    tokio::task::spawn_blocking(move || {
        let wrong = |error: engram_store::Error| unusable(format!("{whence}/{}", entry.file), error);
        dealt.take(&manifest.verify_file(&entry, &folder, &whence)?).map_err(wrong)?;
        fs::remove_file(folder.join(&entry.file))?;
        anyhow::Ok(dealt)
    })
    .await?
}

/// Whether a snapshot can be what this cluster begins with, as far as its manifest says.
fn check(manifest: &Manifest, whence: &str, shared: &Shared) -> Result<(), Problem> {
    manifest.check_shape(whence, shared.shape)?;
    manifest.check_files(whence)?;
    let missing = (0..manifest.partitions).find(|it| !manifest.files.iter().any(|entry| entry.partition == *it));
    if let Some(missing) = missing.filter(|_| manifest.format >= 2) {
        return Err(unusable(whence, format!("has no file of partition {missing}")));
    }
    let capacity = shared.options.spec.capacity.memories;
    if manifest.memories > capacity {
        let memories = manifest.memories;
        let message = format!("{whence} has {memories} memories, and spec.capacity.memories is {capacity}");
        return Err(Problem::new(Code::CapacityExceeded, message));
    }
    Ok(())
}

fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder).and_then(|folder| folder.sync_all())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_is_put_in_place_when_it_is_complete_and_removed_when_it_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let store = folder.path();
        let gathered = store.join(FOLDER);
        let make = || {
            fs::create_dir_all(gathered.join("store")).unwrap();
            fs::write(gathered.join("store/a.snap"), "a").unwrap();
            fs::write(gathered.join("store/b.snap"), "b").unwrap();
        };
        assert_eq!(settle(store).unwrap(), None);
        make();
        assert_eq!(settle(store).unwrap(), None);
        assert!(!gathered.exists() && !store.join("a.snap").exists(), "an interrupted load begins again");
        make();
        let loaded = Loaded { workers: 3, term: 7 };
        fs::write(gathered.join(READY), serde_json::to_vec(&loaded).unwrap()).unwrap();
        // As if the move had been interrupted behind the first file.
        fs::rename(gathered.join("store/a.snap"), store.join("a.snap")).unwrap();
        for _ in 0..2 {
            assert_eq!(settle(store).unwrap(), Some(loaded), "and a complete one stays");
            assert!(!gathered.exists() && store.join("a.snap").exists() && store.join("b.snap").exists());
        }
        assert!(loaded.is_before(Term(8)) && !loaded.is_before(Term(7)));
    }
}
