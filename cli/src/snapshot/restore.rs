//! Restores the stores and the partition map of a stopped cluster from a snapshot.
//!
//! All data is verified and built next to the old data first: files are checked, stores loaded and their digests compared. A different
//! number of partitions redistributes the memories ([`Repartition`]). Two renames then activate the new data, the stores first, the map
//! last: in between, the old map names stores that do not exist, so nothing is served or formatted. The next restore rolls back an
//! interrupted one.

use anyhow::{Context, Result, ensure};
use engram_api::{Code, Problem};
use engram_cluster::{PartitionMap, assign_loaders};
use engram_kernels::Cpu;
use engram_mapstore::{FileStore, MapStore as _};
use engram_memory::{ClusterId, Digest, Member, Ordinal, PartitionId, Settings, Shape, Term};
use engram_snapshot::{Entry, Manifest, open, unusable};
use engram_store::{Clock as _, Disk, FileDisk, Identity, Origin, Repartition, Store, SystemClock};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Folder for new data, and for old data until the restore is complete.
const BUILDING: &str = "restoring";

/// Result of a restore.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Restored {
    pub(crate) workers: u32,
    pub(crate) memories: u64,
    pub(crate) digest: Digest,
}

/// The cluster to restore to; this process holds the lock of its state directory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Destination<'a> {
    pub(crate) state_dir: &'a Path,
    pub(crate) cluster: ClusterId,
    /// Number of partitions may differ from the snapshot.
    pub(crate) shape: Shape,
    /// Capacity in memories.
    pub(crate) capacity: u64,
    /// Number of workers; may differ from the snapshot.
    pub(crate) workers: u32,
}

/// The snapshot to restore from, in a local folder.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Backup<'a> {
    pub(crate) folder: &'a Path,
    /// Location for messages.
    pub(crate) location: &'a str,
    pub(crate) manifest: &'a Manifest,
}

impl Backup<'_> {
    /// Returns the bytes that a restore verifies and copies; with redistribution every worker reads all files.
    pub(crate) fn work(&self, destination: Destination<'_>) -> u64 {
        let reads =
            if self.manifest.partitions == destination.shape.partitions { 1 } else { u64::from(destination.workers) };
        self.manifest.bytes * (1 + reads)
    }
}

/// Restores a snapshot. `progress` receives the bytes that were verified and copied, [`Backup::work`] in total.
///
/// # Errors
/// The snapshot is incomplete, damaged, of another cluster, or exceeds the capacity of a partition (nothing was changed), or the file
/// system fails.
pub(crate) fn restore(
    backup: Backup<'_>,
    destination: Destination<'_>,
    mut progress: impl FnMut(u64),
) -> Result<Restored> {
    let Backup { folder, location, manifest } = backup;
    manifest.verify(folder, location, destination.cluster, destination.shape, &mut progress)?;
    let building = Building::begin(destination.state_dir)?;
    let built = building.build(backup, destination, &mut progress);
    if built.is_err() {
        // Leftovers are removed by the next restore.
        let _ = fs::remove_dir_all(&building.folder);
    }
    let built = built?;
    building.install()?;
    Ok(built)
}

/// The folder in which the new data is built.
struct Building<'a> {
    state_dir: &'a Path,
    folder: PathBuf,
}

impl<'a> Building<'a> {
    fn begin(state_dir: &'a Path) -> Result<Self> {
        let folder = state_dir.join(BUILDING);
        let building = Self { state_dir, folder };
        building.roll_back()?;
        fs::create_dir_all(building.folder.join("workers"))
            .context("failed to create a folder for the restored data")?;
        Ok(building)
    }

    /// Rolls back an interrupted restore, or finishes its cleanup.
    fn roll_back(&self) -> Result<()> {
        let (old, new_map) = (self.folder.join("before"), self.folder.join("map.json"));
        // The map is moved last: while the new map is still here, the old map and the old stores are valid.
        if old.exists() && new_map.exists() {
            let workers = self.state_dir.join("workers");
            if workers.exists() {
                fs::remove_dir_all(&workers)?;
            }
            fs::rename(&old, &workers).context("failed to roll back an interrupted restore")?;
            sync_folder(self.state_dir)?;
        }
        if self.folder.exists() {
            fs::remove_dir_all(&self.folder).context("failed to remove the leftovers of an interrupted restore")?;
        }
        Ok(())
    }

    fn build(
        &self,
        backup: Backup<'_>,
        destination: Destination<'_>,
        progress: &mut impl FnMut(u64),
    ) -> Result<Restored> {
        let Backup { location, manifest, .. } = backup;
        let placed = assign_loaders(destination.shape.partitions, destination.workers);
        let primary = |partition: PartitionId| placed[partition.0 as usize];
        let (mut members, mut digest, mut memories) = (BTreeMap::new(), Digest::default(), 0);
        for worker in (0..destination.workers).map(Ordinal) {
            let store = self.store(worker, |partition| primary(partition) == worker, backup, destination, progress)?;
            members.insert(worker, store.member);
            digest.merge(store.digest);
            memories += store.memories;
        }
        ensure!(
            memories == manifest.memories,
            "the stores have {memories} memories, but the manifest has {}",
            manifest.memories
        );
        if let Some(expected) = manifest.digest.as_ref().filter(|expected| **expected != digest.to_string()) {
            return Err(unusable(location, format!("has digest {digest}, but its manifest has {expected}")).into());
        }
        // The new term exceeds every term under which a write may have been acknowledged, in the state directory or the snapshot.
        let old = FileStore::open(self.state_dir, destination.cluster)?.get().ok().flatten();
        let old = old.iter().flat_map(|map| map.partitions.iter().map(|entry| entry.term));
        let highest = old.chain(manifest.files.iter().map(|entry| Term(entry.term))).max().unwrap_or_default();
        let entry =
            |partition| engram_cluster::Entry::solo(Term(highest.0 + 1), members[&primary(PartitionId(partition))]);
        let partitions = (0..destination.shape.partitions).map(entry).collect();
        let map = PartitionMap { cluster: destination.cluster, version: 0, partitions };
        FileStore::open(&self.folder, destination.cluster)?.compare_and_swap(None, map)?;
        Ok(Restored { workers: destination.workers, memories, digest })
    }

    /// Creates the store of a worker with a new identity and the snapshots of its partitions, loads it, which verifies the digest of
    /// every partition, and stops it.
    fn store(
        &self,
        worker: Ordinal,
        is_assigned: impl Fn(PartitionId) -> bool,
        backup: Backup<'_>,
        destination: Destination<'_>,
        progress: &mut impl FnMut(u64),
    ) -> Result<BuiltStore> {
        let folder = self.folder.join("workers").join(worker.to_string());
        let disk: Arc<dyn Disk> = Arc::new(FileDisk::new(&folder)?);
        let identity = Identity::open(&disk, destination.cluster, destination.shape, Origin::current(0))?;
        if backup.manifest.partitions == destination.shape.partitions {
            let files = backup.manifest.files.iter().filter(|entry| is_assigned(PartitionId(entry.partition)));
            copy(files, backup.folder, &folder, progress)?;
        } else {
            redistribute(is_assigned, backup, destination, (&*disk, &identity), progress)?;
        }
        drop(identity);
        sync_folder(&folder)?;
        let options = engram_store::Options::new(destination.cluster, destination.shape, Settings::default());
        let clock = Arc::new(SystemClock);
        let (mut store, recovery) = Store::open(Arc::clone(&disk), clock, Box::new(Cpu::new(1)), options)?;
        if let Some((partition, reason)) = recovery.corrupt.first().or(recovery.skipped_snapshots.first()) {
            return Err(unusable(backup.location, format!("failed to load partition {partition}: {reason}")).into());
        }
        let digest = store.partitions().digest()?;
        let (id, incarnation) = (store.identity().store(), store.identity().incarnation());
        store.stop()?;
        let member = Member { ordinal: worker, store: id, incarnation };
        Ok(BuiltStore { member, digest, memories: recovery.memories })
    }

    fn install(&self) -> Result<()> {
        let (workers, old) = (self.state_dir.join("workers"), self.folder.join("before"));
        sync_folder(&self.folder)?;
        if workers.exists() {
            fs::rename(&workers, &old).context("failed to move the old stores aside")?;
        } else {
            fs::create_dir(&old)?;
        }
        fs::rename(self.folder.join("workers"), &workers).context("failed to move the new stores into place")?;
        sync_folder(self.state_dir)?;
        let (new_map, map) = (self.folder.join("map.json"), self.state_dir.join("map.json"));
        fs::rename(new_map, map).context("failed to move the new map into place")?;
        sync_folder(self.state_dir)?;
        fs::remove_dir_all(&self.folder).context("the snapshot is restored, but removing the old data failed")
    }
}

/// Store of a worker, ready to be moved into place.
struct BuiltStore {
    member: Member,
    digest: Digest,
    memories: u64,
}

/// Copies the files of a worker's partitions.
fn copy<'a>(
    files: impl Iterator<Item = &'a Entry>,
    from: &Path,
    to: &Path,
    progress: &mut impl FnMut(u64),
) -> Result<()> {
    for entry in files {
        // Files may be in subfolders of the snapshot; stores have no subfolders.
        let (_, name) = entry.split_path().with_context(|| format!("{} is not a snapshot file", entry.file))?;
        let to = to.join(name);
        fs::copy(from.join(&entry.file), &to).with_context(|| format!("failed to copy to {}", to.display()))?;
        File::open(&to).and_then(|file| file.sync_all())?;
        progress(entry.bytes);
    }
    Ok(())
}

/// Redistributes the memories of all files to the partitions of a worker.
fn redistribute(
    is_assigned: impl Fn(PartitionId) -> bool,
    backup: Backup<'_>,
    destination: Destination<'_>,
    (disk, identity): (&dyn Disk, &Identity),
    progress: &mut impl FnMut(u64),
) -> Result<()> {
    let now_ms = SystemClock.now_ms();
    let own = (0..destination.shape.partitions).map(PartitionId).filter(|partition| is_assigned(*partition));
    let mut repartition = Repartition::new(destination.shape, own, now_ms);
    for entry in &backup.manifest.files {
        let unusable_file = |error: engram_store::Error| unusable(format!("{}/{}", backup.location, entry.file), error);
        repartition.add_snapshot(&open(backup.folder, &entry.file)?).map_err(unusable_file)?;
        progress(entry.bytes);
    }
    let limit = Settings::limit_of(destination.capacity, destination.shape.partitions);
    if let Some((partition, memories)) = repartition.memories().find(|(_, memories)| *memories > limit) {
        let (partitions, capacity) = (destination.shape.partitions, destination.capacity);
        let message = format!(
            "partition {partition} of {partitions} would have {memories} memories, but capacity.memories {capacity} allows {limit}"
        );
        return Err(Problem::new(Code::CapacityExceeded, message).help("restore to fewer partitions").into());
    }
    repartition.write(disk, &identity.head(), now_ms)?;
    Ok(())
}

fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder)
        .and_then(|folder| folder.sync_all())
        .with_context(|| format!("failed to sync {}", folder.display()))
}
