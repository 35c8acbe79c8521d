//! Golden files of each format version: they have to be read, and written again byte for byte.
//!
//! A change that breaks these tests breaks every existing state directory: raise the format version, keep these files and their
//! reader, and add new ones. `cargo test -p engram-store --test files -- --ignored` writes missing files, never existing ones.

use std::path::PathBuf;
use std::sync::Arc;

use engram_memory::{Lsn, PartitionId, Term};
use engram_store::wal::{self, Body, Entry, Position};
use engram_store::{Disk, Identity, Origin, SimDisk, SnapshotReader, SnapshotWriter, Wal, snapshot_file};

use crate::{head, shape, snapshot_head};

const WAL: &str = "wal-0000000000000001.log";
const ORIGIN: Origin = Origin { boot: 0xb007, mount: 0xd15c };

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn entries() -> Vec<Entry<'static>> {
    let entry =
        |partition, term, lsn, body| Entry { partition: PartitionId(partition), term: Term(term), lsn: Lsn(lsn), body };
    vec![
        entry(1, 1, 0, Body::Promise { accepted: true }),
        entry(1, 1, 0, Body::Note(b"an entry of the map")),
        entry(1, 1, 1, Body::Command(b"first")),
        entry(255, 1, 1, Body::Command(b"")),
        entry(1, 1, 2, Body::Command(b"divergent")),
        entry(1, 2, 0, Body::Promise { accepted: false }),
        entry(1, 2, 1, Body::Truncate),
        entry(1, 2, 2, Body::Command(b"in its place")),
        entry(255, 2, 700, Body::Installed),
    ]
}

/// Result of replaying [`entries`].
fn shown() -> Vec<Entry<'static>> {
    let mut shown = entries();
    shown.remove(4);
    shown.remove(3);
    shown
}

/// Writes a log of two batches and a seal, with fixed random numbers.
fn write_log() -> Vec<u8> {
    let disk = SimDisk::new(42);
    let options = wal::Options { segment_bytes: 64 << 10, ..Default::default() };
    let (mut wal, mut writer, _) =
        Wal::open(Arc::new(disk.clone()), head(), options, &mut |_| unreachable!("it is new")).unwrap();
    for entries in entries().chunks(5) {
        for entry in entries {
            wal.append(entry).unwrap();
        }
        let commits = [(PartitionId(1), Term(1), Lsn(1)), (PartitionId(255), Term(1), Lsn(1))];
        writer.write(&wal.seal(&commits).unwrap(), 0).unwrap();
    }
    writer.close().unwrap();
    disk.bytes(WAL)
}

fn write_snapshot() -> Vec<u8> {
    let disk = SimDisk::new(42);
    let mut writer = SnapshotWriter::create(&disk, &head(), snapshot_head(1, 2), b"the ledger").unwrap();
    writer.chunk(1, b"a column").unwrap();
    writer.chunk(2, b"").unwrap();
    writer.finish().unwrap();
    disk.bytes(&snapshot_file::name(PartitionId(1), Lsn(2)))
}

fn write_identity() -> Vec<u8> {
    let disk = SimDisk::new(42);
    let shared: Arc<dyn Disk> = Arc::new(disk.clone());
    let identity = Identity::open(&shared, head().cluster, shape(), ORIGIN).unwrap();
    identity.leave_clean_mark(&shared, Position(12_288)).unwrap();
    disk.bytes("identity")
}

/// Golden files, with the bytes that this version writes.
fn golden() -> [(&'static str, Vec<u8>); 3] {
    [("wal-v1.segment", write_log()), ("snapshot-v1.snap", write_snapshot()), ("identity-v1", write_identity())]
}

#[test]
fn golden_files_are_written_byte_for_byte() {
    for (name, written) in golden() {
        let kept = std::fs::read(path(name)).unwrap();
        let first = kept.iter().zip(&written).position(|(kept, written)| kept != written);
        assert!(kept == written, "{name}: {} and {} bytes, first difference {first:?}", kept.len(), written.len());
    }
}

#[test]
fn the_golden_log_is_read() {
    let disk = SimDisk::new(1);
    disk.put(WAL, &std::fs::read(path("wal-v1.segment")).unwrap());
    let mut at = 0;
    let options = wal::Options { sealed_at: Some(Position(12_288)), segment_bytes: 64 << 10, ..Default::default() };
    let (wal, _, recovery) = Wal::open(Arc::new(disk), head(), options, &mut |entry| {
        assert_eq!(entry, shown()[at]);
        at += 1;
        Ok(())
    })
    .unwrap();
    assert_eq!((at, recovery.end, recovery.dropped_bytes), (shown().len(), Position(12_288), 0));
    assert_eq!((recovery.batches, recovery.entries, recovery.undone), (3, 9, 2));
    assert_eq!(wal.tail(PartitionId(255)), Some(wal::Tail { lsn: Lsn(700), term: Term(2) }));
}

#[test]
fn the_golden_snapshot_is_read() {
    let disk = SimDisk::new(1);
    let name = snapshot_file::name(PartitionId(1), Lsn(2));
    disk.put(&name, &std::fs::read(path("snapshot-v1.snap")).unwrap());
    let reader = SnapshotReader::open(&disk, &head(), &name).unwrap();
    assert_eq!((reader.head(), reader.file_head()), (snapshot_head(1, 2), head()));
    let mut chunks = Vec::new();
    for chunk in reader.chunks() {
        let mut bytes = Vec::new();
        reader.read(chunk, &mut bytes).unwrap();
        chunks.push((chunk.kind, bytes));
    }
    assert_eq!(chunks, [(0, b"the ledger".to_vec()), (1, b"a column".to_vec()), (2, Vec::new())]);
}

#[test]
fn the_golden_identity_is_read() {
    let disk = SimDisk::new(1);
    disk.put("identity", &std::fs::read(path("identity-v1")).unwrap());
    let shared: Arc<dyn Disk> = Arc::new(disk);
    let identity = Identity::open(&shared, head().cluster, shape(), ORIGIN).unwrap();
    assert_eq!((identity.incarnation().0, identity.clean_end()), (2, Some(Position(12_288))));
}

#[test]
#[ignore = "writes golden files that are missing; only after a new format version"]
fn write_missing_golden_files() {
    for (name, written) in golden() {
        if !path(name).exists() {
            std::fs::write(path(name), written).unwrap();
        }
    }
}
