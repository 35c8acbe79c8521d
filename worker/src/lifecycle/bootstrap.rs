//! Bootstrap from a snapshot: in a cluster with `spec.bootstrap`, a worker with a new disk loads its partitions before there is a
//! map.
//!
//! ```text
//! empty store, no map ──load──> complete folder `bootstrap` ──restart──> files installed ──heartbeats report it──> first map
//! ```
//!
//! Which partitions a worker loads follows from the number of workers. The coordinator creates the first map when all workers have
//! reported completion, and assigns each partition to a worker that has loaded it. The loaded state depends only on the snapshot,
//! to the bit: a worker that loads again, or that the map does not use, holds nothing that contradicts the others.
//!
//! The store's folder stays empty until the load is complete: an interrupted load starts again, an interrupted move continues.

use crate::shared::Shared;
use anyhow::{Context as _, Result};
use engram_api::{Bootstrap as Spec, Code, Problem};
use engram_cluster::assign_loaders;
use engram_memory::{Lsn, PartitionId, Settings, Term};
use engram_objects::{Credentials, Options};
use engram_proto::v1;
use engram_snapshot::{Location, Manifest, unusable};
use engram_store::{FileDisk, FileHead, Repartition};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Folder of a load in progress, in the folder of the store.
const LOAD_FOLDER: &str = "bootstrap";
/// Marks a complete load.
const COMPLETE_FILE: &str = "ready.json";
/// Recorded in the store's folder: what it was loaded from.
const ORIGIN_FILE: &str = "bootstrapped.json";
/// Interval between attempts: a missing snapshot may be uploaded later.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// What a disk was loaded from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct LoadRecord {
    /// Number of workers that the partitions were divided between.
    workers: u32,
    /// Highest term in the snapshot.
    term: u64,
}

/// Progress of the load.
#[derive(Debug, Default)]
pub(crate) struct BootstrapProgress(Mutex<Option<v1::BootstrapStatus>>);

impl BootstrapProgress {
    /// Returns the status for heartbeats; `None` if there is nothing to load.
    pub(crate) fn status(&self) -> Option<v1::BootstrapStatus> {
        self.0.lock().clone()
    }

    pub(crate) fn set_status(&self, state: Option<v1::BootstrapStatus>) {
        *self.0.lock() = state;
    }
}

impl LoadRecord {
    pub(crate) fn status(self) -> v1::BootstrapStatus {
        v1::BootstrapStatus { loaded: true, workers: self.workers, term: self.term, ..v1::BootstrapStatus::default() }
    }

    /// Returns whether a promise under `term` can only be of a map, not of the snapshot.
    pub(crate) const fn is_before(self, term: Term) -> bool {
        term.0 > self.term
    }
}

/// Installs a complete load, discards an incomplete one, and returns what the disk was loaded from. The store must not be open.
///
/// # Errors
/// Errors of the file system.
pub(crate) fn install_or_discard(store: &Path) -> io::Result<Option<LoadRecord>> {
    let (folder, mark) = (store.join(LOAD_FOLDER), store.join(ORIGIN_FILE));
    let ready = folder.join(COMPLETE_FILE);
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

/// Loads the partitions of this worker, unless the cluster turns out to have a map; then the process restarts. Ends when dropped.
///
/// # Errors
/// On a laptop: what is wrong with the snapshot. A pod reports it in its heartbeats and retries.
pub(crate) async fn run(shared: &Arc<Shared>, spec: &Spec) -> Result<(), Problem> {
    shared.lifecycle.bootstrap().set_status(Some(v1::BootstrapStatus::default()));
    // If the cluster has a map by now, the content of the snapshot is outdated.
    let mut view = shared.membership.subscribe();
    loop {
        let _ = shared.membership.coordinators().connections().wait_for(|coordinators| *coordinators > 0).await;
        let _ = view.wait_for(|view| !view.members.is_empty()).await;
        if shared.membership.coordinators().silence_ms() == 0 {
            break;
        }
    }
    loop {
        let loaded = tokio::select! {
            loaded = load(shared, spec) => loaded,
            _ = view.wait_for(|view| view.map.is_some()) => {
                shared.lifecycle.bootstrap().set_status(None);
                let _ = fs::remove_dir_all(shared.setup.options.state_dir.join(LOAD_FOLDER));
                return Ok(());
            }
        };
        let problem = match loaded {
            Ok(()) => {
                tracing::info!("snapshot loaded; restarting");
                shared.lifecycle.request_restart();
                return Ok(());
            }
            Err(error) => error.downcast::<Problem>().unwrap_or_else(|error| {
                Problem::new(Code::StorageFailed, format!("failed to load the snapshot: {error:#}"))
            }),
        };
        tracing::error!(code = problem.code().id(), problem = problem.message(), "failed to bootstrap from snapshot");
        if shared.setup.options.inputs.is_none() {
            return Err(problem);
        }
        let (code, problem) = (problem.code().id().to_owned(), problem.message().to_owned());
        shared.lifecycle.bootstrap().set_status(Some(v1::BootstrapStatus {
            code,
            problem,
            ..v1::BootstrapStatus::default()
        }));
        tokio::select! {
            () = tokio::time::sleep(RETRY_INTERVAL) => {}
            _ = view.wait_for(|view| view.map.is_some()) => {}
        }
    }
}

async fn load(shared: &Arc<Shared>, spec: &Spec) -> Result<()> {
    let location = &spec.snapshot;
    let overrides = shared.setup.options.bootstrap.clone().unwrap_or_default();
    let credentials = overrides.credentials.filter(|_| location.secret_ref.is_some()).map(Credentials::Folder);
    // The author of the cluster chose the endpoint, and the environment of its workers.
    let (endpoint, region) = (location.endpoint.clone(), location.region.clone());
    let options = Options { endpoint, region, credentials, ..Options::default() };
    // The URL is that of one snapshot, so the name does not matter.
    let (address, volumes) = (location.address_of(""), shared.setup.options.snapshots.as_deref());
    let from = Location::resolve(&address, &options, volumes).await?;
    let url = from.to_string();
    let Some(manifest) = from.manifest().await? else {
        return Err(unusable(&url, "has no manifest.json: there is no snapshot, or it was never finished").into());
    };
    check(&manifest, &url, shared)?;
    let workers = overrides.workers.unwrap_or(shared.setup.options.spec.workers);
    let own = assign_loaders(shared.partitions(), workers);
    let is_own = |partition: u32| own.get(partition as usize) == Some(&shared.ordinal());
    // With the partition count of the snapshot, each partition is one file.
    let same_partition_count = manifest.partitions == shared.partitions();
    let needed: Vec<_> =
        manifest.files.iter().filter(|entry| !same_partition_count || is_own(entry.partition)).cloned().collect();
    let total: u64 = needed.iter().map(|entry| entry.bytes).sum();
    let folder = shared.setup.options.state_dir.join(LOAD_FOLDER);
    let (files, store) = (folder.join("files"), folder.join("store"));
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("failed to remove {}", folder.display()))?;
    }
    for folder in [&files, &store] {
        fs::create_dir_all(folder).with_context(|| format!("failed to create {}", folder.display()))?;
    }
    let highest = |of: fn(&engram_snapshot::Entry) -> u64| manifest.files.iter().map(of).max().unwrap_or_default();
    let (lsn, term) = (highest(|entry| entry.lsn), highest(|entry| entry.term));
    let own_partitions: Vec<_> =
        (0..shared.partitions()).filter(|partition| is_own(*partition)).map(PartitionId).collect();
    let mut repartition =
        Repartition::new(shared.setup.shape, own_partitions, manifest.created_ms).starting_after(Lsn(lsn), Term(term));
    let mut done = 0;
    for entry in needed {
        let progress =
            |done| v1::BootstrapStatus { done_bytes: done, total_bytes: total, ..v1::BootstrapStatus::default() };
        shared.lifecycle.bootstrap().set_status(Some(progress(done)));
        done += entry.bytes;
        repartition = load_file(repartition, &manifest, &from, (entry, &files)).await?;
    }
    let limit = Settings::limit_of(shared.setup.options.spec.capacity.memories, shared.partitions());
    if let Some((partition, memories)) = repartition.memories().find(|(_, memories)| *memories > limit) {
        let (partitions, capacity) = (shared.partitions(), shared.setup.options.spec.capacity.memories);
        let message = format!(
            "partition {partition} of {partitions} would hold {memories} memories of {url}, and spec.capacity.memories {capacity} gives \
             it {limit}; allowed: more capacity, or fewer partitions"
        );
        return Err(Problem::new(Code::CapacityExceeded, message).into());
    }
    let head =
        FileHead { cluster: shared.setup.options.cluster, store: shared.setup.member.store, shape: shared.setup.shape };
    let (created_ms, loaded) = (manifest.created_ms, LoadRecord { workers, term });
    tokio::task::spawn_blocking(move || {
        repartition.write(&FileDisk::new(&store)?, &head, created_ms)?;
        fs::remove_dir_all(&files)?;
        let (new, ready) = (folder.join("ready.new"), folder.join(COMPLETE_FILE));
        let mut file = File::create(&new)?;
        file.write_all(&serde_json::to_vec(&loaded)?)?;
        file.sync_all()?;
        sync(&folder)?;
        // The rename completes the load.
        fs::rename(&new, &ready)?;
        sync(&folder)?;
        anyhow::Ok(())
    })
    .await?
}

/// Downloads one file, verifies every byte and takes its memories.
async fn load_file(
    mut repartition: Repartition,
    manifest: &Manifest,
    from: &Location,
    (entry, folder): (engram_snapshot::Entry, &PathBuf),
) -> Result<Repartition> {
    from.fetch(&entry, folder).await?;
    let (manifest, folder, url) = (manifest.clone(), folder.clone(), from.to_string());
    tokio::task::spawn_blocking(move || {
        let wrong = |error: engram_store::Error| unusable(format!("{url}/{}", entry.file), error);
        repartition.add_snapshot(&manifest.verify_file(&entry, &folder, &url)?).map_err(wrong)?;
        fs::remove_file(folder.join(&entry.file))?;
        anyhow::Ok(repartition)
    })
    .await?
}

/// Checks whether the cluster can start from a snapshot, as far as the manifest says.
fn check(manifest: &Manifest, url: &str, shared: &Shared) -> Result<(), Problem> {
    manifest.check_shape(url, shared.setup.shape)?;
    manifest.check_files(url)?;
    let missing = (0..manifest.partitions).find(|it| !manifest.files.iter().any(|entry| entry.partition == *it));
    if let Some(missing) = missing.filter(|_| manifest.format >= 2) {
        return Err(unusable(url, format!("has no file of partition {missing}")));
    }
    let capacity = shared.setup.options.spec.capacity.memories;
    if manifest.memories > capacity {
        let memories = manifest.memories;
        let message = format!("{url} has {memories} memories, and spec.capacity.memories is {capacity}");
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
    fn a_complete_load_is_installed_and_an_incomplete_one_discarded() {
        let folder = tempfile::tempdir().unwrap();
        let store = folder.path();
        let load_folder = store.join(LOAD_FOLDER);
        let create_load = || {
            fs::create_dir_all(load_folder.join("store")).unwrap();
            fs::write(load_folder.join("store/a.snap"), "a").unwrap();
            fs::write(load_folder.join("store/b.snap"), "b").unwrap();
        };
        assert_eq!(install_or_discard(store).unwrap(), None);
        create_load();
        assert_eq!(install_or_discard(store).unwrap(), None);
        assert!(!load_folder.exists() && !store.join("a.snap").exists(), "an interrupted load starts again");
        create_load();
        let loaded = LoadRecord { workers: 3, term: 7 };
        fs::write(load_folder.join(COMPLETE_FILE), serde_json::to_vec(&loaded).unwrap()).unwrap();
        // Simulates an interruption after the first file.
        fs::rename(load_folder.join("store/a.snap"), store.join("a.snap")).unwrap();
        for _ in 0..2 {
            assert_eq!(install_or_discard(store).unwrap(), Some(loaded), "a complete load stays");
            assert!(!load_folder.exists() && store.join("a.snap").exists() && store.join("b.snap").exists());
        }
        assert!(loaded.is_before(Term(8)) && !loaded.is_before(Term(7)));
    }
}
