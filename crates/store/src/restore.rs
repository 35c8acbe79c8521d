//! Puts snapshot files into an empty store, which a start then recovers from.

use crate::snapshot_file::{self, LEDGER, SnapshotReader, SnapshotWriter};
use crate::{Disk, Error, Identity, Origin, SnapshotInfo, wal};
use engram_memory::{ClusterId, PartitionId, Shape};
use std::sync::Arc;

/// Installs the newest whole snapshot of every partition that `wanted` names from the folder `from` into the empty store on
/// `disk`, under the identity of that store. A start of the store recovers them; nothing of them is served before.
///
/// The folder may hold the snapshots of all workers of the cluster: each worker takes what its map gives it.
///
/// # Errors
/// [`Error::NotEmpty`] when the store has data; [`Error::Corrupt`] when a partition has damaged snapshots only;
/// [`Error::OtherCluster`], [`Error::OtherShape`] when they are of another cluster; those of [`Identity::open`] and of the disks. What was
/// installed until then is removed.
pub fn install(
    disk: &Arc<dyn Disk>,
    cluster: ClusterId,
    shape: Shape,
    from: &dyn Disk,
    wanted: impl Fn(PartitionId) -> bool,
) -> Result<Vec<SnapshotInfo>, Error> {
    let identity = Identity::open(disk, cluster, shape, Origin { boot: 0, mount: 0 })?;
    let listed = disk.list().map_err(|source| Error::Io { operation: "list", path: disk.describe(""), source })?;
    if let Some(file) = listed.iter().find(|name| wal::is_log_file(name) || snapshot_file::parse_name(name).is_some()) {
        return Err(Error::NotEmpty { path: disk.describe(""), file: file.clone() });
    }
    let found = snapshot_file::list(from)?;
    let mut installed = Vec::new();
    let copied = (found.keys()).filter(|partition| partition.0 < shape.partitions && wanted(**partition)).try_for_each(
        |&partition| {
            let (newest, rejected) = snapshot_file::newest_valid(from, &identity.head(), partition)?;
            match (newest, rejected.into_iter().next()) {
                (Some(reader), _) => installed.push(copy(&**disk, &identity, &reader)?),
                (None, Some(rejected)) => return Err(rejected.error),
                (None, None) => {}
            }
            Ok(())
        },
    );
    if let Err(error) = copied {
        for info in installed {
            // Best effort: an installed partition is whole, it is only not all that was asked for.
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
        reader.read(chunk, &mut bytes)?;
        writer.chunk(chunk.kind, &bytes)?;
    }
    let bytes = writer.finish()?;
    let path = disk.describe(&snapshot_file::name(head.partition, head.lsn));
    let (digest, memories) = (reader.memories_digest()?, head.memories);
    Ok(SnapshotInfo { partition: head.partition, lsn: head.lsn, term: head.term, memories, bytes, digest, path })
}
