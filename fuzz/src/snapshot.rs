//! Snapshots: the file, and loading it in a store.

use crate::world;
use engram_store::{Error, SimDisk, SnapshotReader, snapshot_file};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

const HEAD_BYTES: usize = 120;
const ENTRY_BYTES: usize = 16;
const TRAILER_BYTES: usize = 40;

/// The first byte selects whether the rest is a file as it is, or one whose checksums are corrected first.
pub(crate) fn manifest(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else { return };
    let mut file = bytes.to_vec();
    if kind % 2 == 1 {
        seal(&mut file);
    }
    let disk = world::disk();
    let reader = match read(&disk, &file) {
        Ok(reader) => reader,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let head = reader.head();
    assert!(reader.bytes() <= file.len() as u64, "chunks are within the file");
    // A store that finds the file loads it or returns an error.
    disk.put(&snapshot_file::name(head.partition, head.lsn), &file);
    if let Ok((mut store, recovery)) = world::open(&disk, 1) {
        let loaded = recovery.corrupt.is_empty() && recovery.skipped_snapshots.is_empty() && head.partition == world::P;
        if loaded {
            assert_eq!(store.partitions().memories(), head.memories);
        }
        store.turn().expect("the disk does not fail");
    }
}

fn read(disk: &SimDisk, file: &[u8]) -> Result<SnapshotReader, Error> {
    const NAME: &str = "given";
    disk.put(NAME, file);
    let reader = SnapshotReader::open_any(disk, NAME)?;
    reader.verify()?;
    reader.ledger()?;
    disk.kill();
    engram_store::Disk::remove(disk, NAME).expect("the disk does not fail");
    Ok(reader)
}

/// Corrects magic, version and checksums, and keeps every other field.
fn seal(file: &mut [u8]) {
    let Some(trailer_at) = file.len().checked_sub(TRAILER_BYTES).filter(|at| *at >= HEAD_BYTES) else { return };
    file[..8].copy_from_slice(b"ENGRSNP\0");
    file[8..12].copy_from_slice(&1_u32.to_le_bytes());
    let end = file.len();
    file[end - 8..].copy_from_slice(b"ENGRSNPE");
    let chunks = number(&file[trailer_at..]) as usize;
    let bytes = chunks.saturating_mul(ENTRY_BYTES);
    let Some(manifest_at) = trailer_at.checked_sub(bytes).filter(|at| *at >= HEAD_BYTES) else { return };
    let (front, tail) = file.split_at_mut(manifest_at);
    let mut offset = HEAD_BYTES;
    for entry in tail[..bytes].chunks_exact_mut(ENTRY_BYTES) {
        let len = (number(entry) >> 32) as usize;
        let Some(chunk) = front.get(offset..offset.saturating_add(len)) else { break };
        entry[8..].copy_from_slice(&xxh3_64(chunk).to_le_bytes());
        offset += len;
    }
    let mut hasher = Xxh3::new();
    hasher.update(&front[..HEAD_BYTES]);
    hasher.update(&tail[..bytes + 16]);
    tail[bytes + 16..bytes + 32].copy_from_slice(&hasher.digest128().to_le_bytes());
}

/// Reads the u64 at the front.
fn number(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}
