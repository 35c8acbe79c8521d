//! Installs snapshot files into an empty store, which recovers from them at start.

use crate::snapshot_file::{self, LEDGER, SnapshotReader, SnapshotWriter};
use crate::state::content::Column;
use crate::{Disk, Error, Identity, Origin, SnapshotInfo, wal};
use engram_memory::{ClusterId, PartitionId, Shape};
use std::sync::Arc;

/// Installs the newest valid snapshot of every `wanted` partition from the directory `from` into the empty store on `disk`, under
/// the identity of that store, which recovers them at start.
///
/// The directory may contain the snapshots of all workers of the cluster: each worker takes the partitions of its map.
///
/// # Errors
/// [`Error::NotEmpty`] if the store has data; [`Error::Corrupt`] if a partition has only damaged snapshots;
/// [`Error::OtherCluster`], [`Error::OtherShape`] for snapshots of another cluster; those of [`Identity::open`] and of the disks.
/// Installed files are then removed.
pub fn install(
    disk: &Arc<dyn Disk>,
    cluster: ClusterId,
    shape: Shape,
    from: &dyn Disk,
    wanted: impl Fn(PartitionId) -> bool,
) -> Result<Vec<SnapshotInfo>, Error> {
    let identity = Identity::open(disk, cluster, shape, Origin { boot: 0, mount: 0 })?;
    let names = disk.list().map_err(|source| Error::Io { operation: "list", path: disk.describe(""), source })?;
    if let Some(file) = names.iter().find(|name| wal::is_log_file(name) || snapshot_file::parse_name(name).is_some()) {
        return Err(Error::NotEmpty { path: disk.describe(""), file: file.clone() });
    }
    let snapshots = snapshot_file::list(from)?;
    let mut installed = Vec::new();
    let result = (snapshots.keys())
        .filter(|partition| partition.0 < shape.partitions && wanted(**partition))
        .try_for_each(|&partition| {
            let (newest, rejected) = snapshot_file::newest_valid(from, &identity.head(), partition)?;
            match (newest, rejected.into_iter().next()) {
                (Some(reader), _) => installed.push(copy(&**disk, &identity, &reader)?),
                (None, Some(rejected)) => return Err(rejected.error),
                (None, None) => {}
            }
            Ok(())
        });
    if let Err(error) = result {
        for info in installed {
            // Best effort: each installed snapshot is valid by itself.
            let _ = disk.remove(&snapshot_file::name(info.partition, info.lsn));
        }
        return Err(error);
    }
    Ok(installed)
}

fn copy(disk: &dyn Disk, identity: &Identity, reader: &SnapshotReader) -> Result<SnapshotInfo, Error> {
    let head = reader.head();
    let mut writer = SnapshotWriter::create(disk, &identity.head(), head, &reader.ledger()?)?;
    let mut bytes = Vec::new();
    for chunk in reader.chunks().iter().filter(|chunk| chunk.kind != LEDGER) {
        if chunk.kind == Column::References.code() {
            let what = "it refers to payload segments of its own store; restore from a backup";
            return Err(Error::Corrupt { path: reader.path().into(), offset: 0, what });
        }
        reader.read(chunk, &mut bytes)?;
        writer.chunk(chunk.kind, &bytes)?;
    }
    let bytes = writer.finish()?;
    let path = disk.describe(&snapshot_file::name(head.partition, head.lsn));
    let (digest, memories) = (reader.memories_digest()?, head.memories);
    Ok(SnapshotInfo { partition: head.partition, lsn: head.lsn, term: head.term, memories, bytes, digest, path })
}
