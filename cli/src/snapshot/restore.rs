//! Rebuilds the stores and the map of a cluster that is down from a snapshot.
//!
//! Everything is checked and built beside the old data first: files verified, stores loaded and their digest compared. Then
//! two renames put it in place, the stores first, the map last; until the map is there, the old map names stores that are not
//! there, so nothing is served and nothing formatted. What an interrupted restore left is put back by the next one.

use super::manifest::{Entry, Manifest, unusable};
use anyhow::{Context, Result, ensure};
use engram_cluster::{Candidate, PartitionMap, place};
use engram_kernels::Cpu;
use engram_mapstore::{FileStore, MapStore as _};
use engram_memory::{ClusterId, Digest, Member, Ordinal, Settings, Shape, Term};
use engram_store::{Disk, FileDisk, Identity, Origin, Store, SystemClock};
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
    pub(crate) shape: Shape,
    /// Workers to spread the partitions over; it need not be as many as wrote the snapshot.
    pub(crate) workers: u32,
}

/// Restores the snapshot of `folder`. `progress` hears of the bytes that were checked and copied, twice [`Manifest::bytes`]
/// in all.
///
/// # Errors
/// The snapshot is unfinished, damaged or of another cluster (nothing was changed), or the file system refuses.
pub(crate) fn restore(
    folder: &Path,
    manifest: &Manifest,
    into: Into<'_>,
    mut progress: impl FnMut(u64),
) -> Result<Restored> {
    manifest.verify(folder, into.cluster, into.shape, &mut progress)?;
    let building = Building::begin(into.state_dir)?;
    let built = building.build(folder, manifest, into, &mut progress)?;
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

    fn build(
        &self,
        from: &Path,
        manifest: &Manifest,
        into: Into<'_>,
        progress: &mut impl FnMut(u64),
    ) -> Result<Restored> {
        let candidates: Vec<Candidate> = (0..into.workers)
            .map(|worker| Candidate { ordinal: Ordinal(worker), domain: format!("worker-{worker}") })
            .collect();
        let placed = place(into.shape.partitions, &candidates, 1)?;
        let primary = |partition: u32| placed[partition as usize][0];
        let (mut members, mut digest, mut memories) = (BTreeMap::new(), Digest::default(), 0);
        for worker in (0..into.workers).map(Ordinal) {
            let files: Vec<&Entry> = manifest.files.iter().filter(|entry| primary(entry.partition) == worker).collect();
            let store = self.store(worker, from, &files, into, progress)?;
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
            return Err(unusable(from, format!("gives the digest {digest}, its manifest says {expected}")).into());
        }
        // Above every term that anything was ever acknowledged under, here or in the snapshot.
        let old = FileStore::open(self.state_dir, into.cluster)?.get().ok().flatten();
        let old_term = |partition: u32| {
            old.as_ref().and_then(|map| map.partitions.get(partition as usize)).map_or(Term(0), |entry| entry.term)
        };
        let new_term = |partition: u32| {
            let file = manifest.files.iter().find(|entry| entry.partition == partition);
            Term(file.map_or(0, |entry| entry.term).max(old_term(partition).0) + 1)
        };
        let entry = |partition| engram_cluster::Entry::solo(new_term(partition), members[&primary(partition)]);
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
        from: &Path,
        files: &[&Entry],
        into: Into<'_>,
        progress: &mut impl FnMut(u64),
    ) -> Result<Made> {
        let folder = self.folder.join("workers").join(worker.to_string());
        let disk: Arc<dyn Disk> = Arc::new(FileDisk::new(&folder)?);
        drop(Identity::open(&disk, into.cluster, into.shape, Origin::current(0))?);
        for entry in files {
            let to = folder.join(&entry.file);
            fs::copy(from.join(&entry.file), &to).with_context(|| format!("failed to copy to {}", to.display()))?;
            File::open(&to).and_then(|file| file.sync_all())?;
            progress(entry.bytes);
        }
        sync_folder(&folder)?;
        let options = engram_store::Options::new(into.cluster, into.shape, Settings::default());
        let clock = Arc::new(SystemClock);
        let (mut store, found) = Store::open(Arc::clone(&disk), clock, Box::new(Cpu::new(1)), options)?;
        if let Some((partition, what)) = found.corrupt.first().or(found.passed_over.first()) {
            return Err(unusable(from, format!("does not load: partition {partition}: {what}")).into());
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

fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder)
        .and_then(|folder| folder.sync_all())
        .with_context(|| format!("failed to sync {}", folder.display()))
}
