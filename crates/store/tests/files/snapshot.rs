//! Snapshot files: valid or skipped.

use engram_memory::{ClusterId, Lsn, PartitionId, mix64};
use engram_store::snapshot_file::{self, LEDGER, MAX_CHUNK_BYTES, keep_generations, newest_valid};
use engram_store::{Disk, Error, FileHead, SimDisk, SnapshotReader, SnapshotWriter};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::{head, snapshot_head};

const FLIPS: u64 = 2_500;

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| mix64(seed << 32 | at) as u8).collect()
}

/// Writes a snapshot whose content depends on its LSN.
fn write(disk: &dyn Disk, partition: u32, lsn: u64) -> Result<u64, Error> {
    let mut writer = SnapshotWriter::create(disk, &head(), snapshot_head(partition, lsn), &bytes(lsn, 700))?;
    writer.chunk(1, &bytes(lsn + 1, 3_000))?;
    writer.chunk(2, &[])?;
    writer.chunk(7, &bytes(lsn + 2, 1_500))?;
    writer.finish()
}

fn content(reader: &SnapshotReader) -> (Vec<u8>, Vec<(u32, Vec<u8>)>) {
    let mut chunks = Vec::new();
    for chunk in reader.chunks().iter().filter(|chunk| chunk.kind != LEDGER) {
        let mut bytes = Vec::new();
        reader.read(chunk, &mut bytes).unwrap();
        chunks.push((chunk.kind, bytes));
    }
    (reader.ledger().unwrap(), chunks)
}

fn expected(lsn: u64) -> (Vec<u8>, Vec<(u32, Vec<u8>)>) {
    let chunks = vec![(1, bytes(lsn + 1, 3_000)), (2, Vec::new()), (7, bytes(lsn + 2, 1_500))];
    (bytes(lsn, 700), chunks)
}

fn newest(disk: &SimDisk, partition: u32) -> (Option<SnapshotReader>, Vec<Lsn>) {
    let (reader, rejected) = newest_valid(disk, &head(), PartitionId(partition)).unwrap();
    (reader, rejected.into_iter().map(|rejected| rejected.lsn).collect())
}

#[test]
fn a_snapshot_returns_its_content_and_a_large_ledger_spans_chunks() {
    let disk = SimDisk::new(1);
    let size = write(&disk, 3, 10).unwrap();
    assert_eq!(size, disk.bytes(&snapshot_file::name(PartitionId(3), Lsn(10))).len() as u64);
    let (reader, rejected) = newest(&disk, 3);
    let reader = reader.unwrap();
    assert_eq!((content(&reader), rejected), (expected(10), vec![]));
    assert_eq!((reader.head(), reader.file_head()), (snapshot_head(3, 10), head()));

    let ledger = bytes(9, 2 * MAX_CHUNK_BYTES + 17);
    let mut writer = SnapshotWriter::create(&disk, &head(), snapshot_head(4, 1), &ledger).unwrap();
    let large = writer.chunk(1, &vec![0; MAX_CHUNK_BYTES + 1]);
    assert!(matches!(large, Err(Error::ChunkTooLarge { .. })));
    writer.finish().unwrap();
    let reader = newest(&disk, 4).0.unwrap();
    assert_eq!((reader.ledger().unwrap() == ledger, reader.chunks().len()), (true, 3));
}

#[test]
fn two_generations_are_kept_and_the_older_bounds_the_log() {
    let disk = SimDisk::new(1);
    write(&disk, 3, 10).unwrap();
    write(&disk, 4, 5).unwrap();
    assert_eq!(keep_generations(&disk, PartitionId(3)).unwrap(), None, "the only snapshot may be damaged");
    for lsn in [20, 30, 40] {
        write(&disk, 3, lsn).unwrap();
    }
    assert_eq!(keep_generations(&disk, PartitionId(3)).unwrap(), Some(Lsn(30)));
    let kept = snapshot_file::list(&disk).unwrap();
    assert_eq!(kept[&PartitionId(3)], [Lsn(40), Lsn(30)]);
    assert_eq!(kept[&PartitionId(4)], [Lsn(5)]);
}

#[test]
fn a_bit_flip_in_the_newest_snapshot_falls_back_to_the_older_one() {
    let disk = SimDisk::new(1);
    write(&disk, 3, 10).unwrap();
    write(&disk, 3, 20).unwrap();
    let name = snapshot_file::name(PartitionId(3), Lsn(20));
    let bits = disk.bytes(&name).len() as u64 * 8;
    // Also in the version: the checksum distinguishes damage from a newer format.
    for bit in (0..FLIPS).map(|flip| mix64(flip + 1) % bits).chain(64..96) {
        disk.flip_bit(&name, bit);
        let (reader, rejected) = newest_valid(&disk, &head(), PartitionId(3)).unwrap();
        assert_eq!((content(&reader.unwrap()), rejected.len()), (expected(10), 1), "bit {bit}");
        disk.flip_bit(&name, bit);
    }
}

#[test]
fn a_newer_format_of_a_snapshot_is_refused() {
    let disk = SimDisk::new(1);
    write(&disk, 3, 10).unwrap();
    let name = snapshot_file::name(PartitionId(3), Lsn(10));
    // The version of a newer format; the header differs in more than that.
    disk.flip_bit(&name, 8 * 8 + 1);
    disk.flip_bit(&name, 8 * 12);
    let error = newest_valid(&disk, &head(), PartitionId(3)).err();
    assert!(matches!(error, Some(Error::UnknownFormat { found: 3, supported: 1, .. })), "{error:?}");
}

#[test]
fn a_snapshot_truncated_at_any_byte_is_skipped() {
    let disk = SimDisk::new(1);
    write(&disk, 3, 20).unwrap();
    let name = snapshot_file::name(PartitionId(3), Lsn(20));
    let whole = disk.bytes(&name);
    for cut in 0..whole.len() {
        disk.put(&name, &whole[..cut]);
        let (reader, rejected) = newest(&disk, 3);
        assert!(reader.is_none() && rejected == [Lsn(20)], "cut at {cut}");
    }
    disk.put(&name, &[&whole[..], &[0]].concat());
    assert!(newest(&disk, 3).0.is_none(), "an extra byte");
    disk.put(&snapshot_file::name(PartitionId(3), Lsn(21)), &whole);
    assert!(newest(&disk, 3).0.is_none(), "under the name of another snapshot");
}

#[test]
fn a_power_loss_at_any_change_leaves_the_older_snapshot_or_both() {
    for stop in 0..40 {
        for seed in 0..6 {
            let disk = SimDisk::new(seed);
            write(&disk, 3, 10).unwrap();
            disk.stop_after(stop);
            let is_written = write(&disk, 3, 20).is_ok();
            disk.lose_power();
            let (reader, rejected) = newest(&disk, 3);
            let reader = reader.unwrap();
            assert!(rejected.is_empty(), "a name without content: stop {stop}, seed {seed}");
            let lsn = reader.head().lsn.0;
            assert!(lsn == 20 || !is_written, "stop {stop}, seed {seed}");
            assert_eq!(content(&reader), expected(lsn));
        }
    }
}

#[test]
fn a_full_disk_or_a_failed_sync_keeps_the_older_snapshot() {
    let disk = SimDisk::new(1);
    write(&disk, 3, 10).unwrap();
    disk.set_capacity(Some(9_000));
    assert!(matches!(write(&disk, 3, 20), Err(Error::DiskFull { .. })));
    disk.set_capacity(None);
    disk.fail_syncs(1);
    assert!(matches!(write(&disk, 3, 20), Err(Error::SyncFailed { .. })));
    assert_eq!(newest(&disk, 3).0.unwrap().head().lsn, Lsn(10));
    write(&disk, 3, 20).unwrap();
    assert_eq!(newest(&disk, 3).0.unwrap().head().lsn, Lsn(20));
}

#[test]
fn a_snapshot_of_another_cluster_is_rejected_not_skipped() {
    let disk = SimDisk::new(1);
    write(&disk, 3, 10).unwrap();
    let other = FileHead { cluster: ClusterId(5), ..head() };
    let refused = newest_valid(&disk, &other, PartitionId(3)).err();
    assert!(matches!(refused, Some(Error::OtherCluster { .. })), "{refused:?}");
    let reader = SnapshotReader::open_any(&disk, &snapshot_file::name(PartitionId(3), Lsn(10))).unwrap();
    assert_eq!(reader.file_head(), head());
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic_the_reader_or_pass_as_a_snapshot(bytes in vec(any::<u8>(), 0..2_000)) {
        let disk = SimDisk::new(0);
        let name = snapshot_file::name(PartitionId(1), Lsn(1));
        disk.put(&name, &bytes);
        prop_assert!(SnapshotReader::open_any(&disk, &name).is_err());
    }

    #[test]
    fn a_snapshot_with_overwritten_bytes_is_valid_or_skipped(
        garbage in vec(any::<u8>(), 1..64), at in 0usize..6_000
    ) {
        let disk = SimDisk::new(0);
        write(&disk, 3, 10).unwrap();
        let name = snapshot_file::name(PartitionId(3), Lsn(10));
        let mut bytes = disk.bytes(&name);
        let at = at.min(bytes.len());
        let end = (at + garbage.len()).min(bytes.len());
        bytes[at..end].copy_from_slice(&garbage[..end - at]);
        disk.put(&name, &bytes);
        if let Ok((Some(reader), _)) = newest_valid(&disk, &head(), PartitionId(3)) {
            prop_assert_eq!(content(&reader), expected(10));
        }
    }
}
