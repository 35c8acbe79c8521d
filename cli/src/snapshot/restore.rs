//! Rebuilds the stores and the map of a cluster that is down from a snapshot.
//!
//! Everything is checked and built beside the old data first: files verified, stores loaded and their digest compared. A cluster
//! of another number of partitions has its memories dealt out anew ([`Repartition`]). Then
//! two renames put it in place, the stores first, the map last; until the map is there, the old map names stores that are not
//! there, so nothing is served and nothing formatted. What an interrupted restore left is put back by the next one.

use anyhow::{Context, Result, ensure};
use engram_api::{Code, Problem};
use engram_cluster::{PartitionMap, loaders};
use engram_kernels::Cpu;
use engram_mapstore::{FileStore, MapStore as _};
use engram_memory::{ClusterId, Digest, Member, Ordinal, PartitionId, Settings, Shape, Term};
use engram_snapshot::{Entry, Manifest, open, unusable};
use engram_store::{Clock as _, Disk, FileDisk, Identity, Origin, Repartition, Store, SystemClock};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where the new data is built, and the old kept until the new is in place.
const BUILDING: &str = "restoring";

/// What was restored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Restored {
    pub(crate) workers: u32,
    pub(crate) memories: u64,
    pub(crate) digest: Digest,
}

/// A cluster whose state directory this process holds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Into<'a> {
    pub(crate) state_dir: &'a Path,
    pub(crate) cluster: ClusterId,
    /// Its partitions need not be as many as those of the snapshot.
    pub(crate) shape: Shape,
    /// Most memories that it may hold.
    pub(crate) capacity: u64,
    /// Workers to spread the partitions over; it need not be as many as wrote the snapshot.
    pub(crate) workers: u32,
}

/// A snapshot in a folder, and how messages name it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct From<'a> {
    pub(crate) folder: &'a Path,
    pub(crate) whence: &'a str,
    pub(crate) manifest: &'a Manifest,
}

impl From<'_> {
    /// Bytes that a restore checks and copies in all: files that are dealt out are read by each worker.
    pub(crate) fn work(&self, into: Into<'_>) -> u64 {
        let copies = if self.manifest.partitions == into.shape.partitions { 1 } else { u64::from(into.workers) };
        self.manifest.bytes * (1 + copies)
    }
}

/// Restores a snapshot. `progress` hears of the bytes that were checked and copied, [`From::work`] in all.
///
/// # Errors
/// The snapshot is unfinished, damaged or of another cluster, or does not fit into so many partitions (nothing was changed), or the
/// file system refuses.
pub(crate) fn restore(from: From<'_>, into: Into<'_>, mut progress: impl FnMut(u64)) -> Result<Restored> {
    let From { folder, whence, manifest } = from;
    manifest.verify(folder, whence, into.cluster, into.shape, &mut progress)?;
    let building = Building::begin(into.state_dir)?;
    let built = building.build(from, into, &mut progress);
    if built.is_err() {
        // What stays is removed by the next restore.
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
        building.put_back()?;
        fs::create_dir_all(building.folder.join("workers")).context("failed to make a folder for the restored data")?;
        Ok(building)
    }

    /// Undoes what an interrupted restore left half done, or finishes its tidying.
    fn put_back(&self) -> Result<()> {
        let (old, new_map) = (self.folder.join("before"), self.folder.join("map.json"));
        // The new map moves last: while it is still here, the old map is in force, and the old stores belong to it.
        if old.exists() && new_map.exists() {
            let workers = self.state_dir.join("workers");
            if workers.exists() {
                fs::remove_dir_all(&workers)?;
            }
            fs::rename(&old, &workers).context("failed to put back what an interrupted restore had moved")?;
            sync_folder(self.state_dir)?;
        }
        if self.folder.exists() {
            fs::remove_dir_all(&self.folder).context("failed to remove what an interrupted restore left")?;
        }
        Ok(())
    }

    fn build(&self, from: From<'_>, into: Into<'_>, progress: &mut impl FnMut(u64)) -> Result<Restored> {
        let From { whence, manifest, .. } = from;
        let placed = loaders(into.shape.partitions, into.workers);
        let primary = |partition: PartitionId| placed[partition.0 as usize];
        let (mut members, mut digest, mut memories) = (BTreeMap::new(), Digest::default(), 0);
        for worker in (0..into.workers).map(Ordinal) {
            let store = self.store(worker, |partition| primary(partition) == worker, from, into, progress)?;
            members.insert(worker, store.member);
            digest.merge(store.digest);
            memories += store.memories;
        }
        ensure!(
            memories == manifest.memories,
            "the stores hold {memories} memories, the manifest says {}",
            manifest.memories
        );
        if let Some(expected) = manifest.digest.as_ref().filter(|expected| **expected != digest.to_string()) {
            return Err(unusable(whence, format!("gives the digest {digest}, its manifest says {expected}")).into());
        }
        // Above every term that anything was ever acknowledged under, here or in the snapshot, and in any of its partitions where
        // they are others.
        let old = FileStore::open(self.state_dir, into.cluster)?.get().ok().flatten();
        let old = old.iter().flat_map(|map| map.partitions.iter().map(|entry| entry.term));
        let highest = old.chain(manifest.files.iter().map(|entry| Term(entry.term))).max().unwrap_or_default();
        let entry =
            |partition| engram_cluster::Entry::solo(Term(highest.0 + 1), members[&primary(PartitionId(partition))]);
        let partitions = (0..into.shape.partitions).map(entry).collect();
        let map = PartitionMap { cluster: into.cluster, version: 0, partitions };
        FileStore::open(&self.folder, into.cluster)?.compare_and_swap(None, map)?;
        Ok(Restored { workers: into.workers, memories, digest })
    }

    /// Makes the store of a worker: an identity of its own, the snapshots of its partitions; then loads it, which checks every
    /// partition's digest, and stops it in order.
    fn store(
        &self,
        worker: Ordinal,
        wanted: impl Fn(PartitionId) -> bool,
        from: From<'_>,
        into: Into<'_>,
        progress: &mut impl FnMut(u64),
    ) -> Result<Made> {
        let folder = self.folder.join("workers").join(worker.to_string());
        let disk: Arc<dyn Disk> = Arc::new(FileDisk::new(&folder)?);
        let identity = Identity::open(&disk, into.cluster, into.shape, Origin::current(0))?;
        if from.manifest.partitions == into.shape.partitions {
            let files = from.manifest.files.iter().filter(|entry| wanted(PartitionId(entry.partition)));
            copy(files, from.folder, &folder, progress)?;
        } else {
            deal(wanted, from, into, (&*disk, &identity), progress)?;
        }
        drop(identity);
        sync_folder(&folder)?;
        let options = engram_store::Options::new(into.cluster, into.shape, Settings::default());
        let clock = Arc::new(SystemClock);
        let (mut store, found) = Store::open(Arc::clone(&disk), clock, Box::new(Cpu::new(1)), options)?;
        if let Some((partition, what)) = found.corrupt.first().or(found.passed_over.first()) {
            return Err(unusable(from.whence, format!("does not load: partition {partition}: {what}")).into());
        }
        let digest = store.partitions().digest()?;
        let (id, incarnation) = (store.identity().store(), store.identity().incarnation());
        store.stop()?;
        let member = Member { ordinal: worker, store: id, incarnation };
        Ok(Made { member, digest, memories: found.memories })
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
        fs::remove_dir_all(&self.folder).context("the snapshot is restored, but the old data could not be removed")
    }
}

/// The store of a worker, built.
struct Made {
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
        // They may lie in folders of the snapshot; a store has none.
        let (_, name) = entry.place().with_context(|| format!("{} is no snapshot file", entry.file))?;
        let to = to.join(name);
        fs::copy(from.join(&entry.file), &to).with_context(|| format!("failed to copy to {}", to.display()))?;
        File::open(&to).and_then(|file| file.sync_all())?;
        progress(entry.bytes);
    }
    Ok(())
}

/// Deals the memories of all files out to a worker's partitions.
fn deal(
    wanted: impl Fn(PartitionId) -> bool,
    from: From<'_>,
    into: Into<'_>,
    (disk, identity): (&dyn Disk, &Identity),
    progress: &mut impl FnMut(u64),
) -> Result<()> {
    let now_ms = SystemClock.now_ms();
    let own = (0..into.shape.partitions).map(PartitionId).filter(|partition| wanted(*partition));
    let mut anew = Repartition::new(into.shape, own, now_ms);
    for entry in &from.manifest.files {
        let wrong = |error: engram_store::Error| unusable(format!("{}/{}", from.whence, entry.file), error);
        anew.take(&open(from.folder, &entry.file)?).map_err(wrong)?;
        progress(entry.bytes);
    }
    let limit = Settings::limit_of(into.capacity, into.shape.partitions);
    if let Some((partition, memories)) = anew.memories().find(|(_, memories)| *memories > limit) {
        let (partitions, capacity) = (into.shape.partitions, into.capacity);
        let message = format!(
            "partition {partition} of {partitions} would hold {memories} memories, and capacity.memories {capacity} gives it {limit}"
        );
        return Err(Problem::new(Code::CapacityExceeded, message).help("restore to fewer partitions").into());
    }
    anew.write(disk, &identity.head(), now_ms)?;
    Ok(())
}

fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder)
        .and_then(|folder| folder.sync_all())
        .with_context(|| format!("failed to sync {}", folder.display()))
}
