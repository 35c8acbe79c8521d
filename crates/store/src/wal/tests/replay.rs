//! Replay and deletion.

use std::collections::BTreeMap;

use super::*;
use crate::wal::Tail;

fn entry(partition: u32, term: u64, lsn: u64, kind: &'static str, payload: &[u8]) -> OwnedEntry {
    OwnedEntry { partition, term, lsn, kind, payload: payload.to_vec() }
}

#[test]
fn truncated_and_replaced_records_are_not_replayed_and_lsns_stay_dense() {
    let disk = SimDisk::new(1);
    let (mut wal, mut writer, ..) = open(&disk);
    let before = [
        entry(1, 1, 1, "command", b"kept"),
        entry(1, 1, 2, "command", b"divergent"),
        entry(2, 1, 1, "command", b"another partition"),
        entry(1, 1, 3, "command", b"divergent too"),
    ];
    write(&mut wal, &mut writer, &before).unwrap();
    let cut = [entry(1, 2, 1, "truncate", b""), entry(1, 2, 2, "command", b"in its place")];
    write(&mut wal, &mut writer, &cut).unwrap();
    let replaced = [entry(2, 3, 40, "installed", b""), entry(2, 3, 41, "command", b"after the snapshot")];
    write(&mut wal, &mut writer, &replaced).unwrap();

    // Twice: after a crash, and after the segment started by the first recovery.
    for _ in 0..2 {
        let (wal, _, recovery, replayed) = open(&disk);
        assert_eq!(replayed, [&before[..1], &cut, &replaced].concat());
        assert_eq!(recovery.undone, 3);
        assert_eq!(wal.tail(PartitionId(1)), Some(Tail { lsn: Lsn(2), term: Term(2) }));
        assert_eq!(wal.tail(PartitionId(2)), Some(Tail { lsn: Lsn(41), term: Term(3) }));
        assert_eq!(recovery.commits[&PartitionId(0)], (Term(1), Lsn(1)));
    }
}

#[test]
fn a_gap_a_repeat_or_a_falling_term_is_rejected_without_a_change() {
    let disk = SimDisk::new(1);
    let (mut wal, mut writer, ..) = open(&disk);
    write(&mut wal, &mut writer, &[entry(1, 2, 1, "command", b"x")]).unwrap();
    for wrong in [
        entry(1, 2, 1, "command", b""),
        entry(1, 2, 3, "command", b""),
        entry(1, 1, 2, "command", b""),
        entry(1, 2, 0, "truncate", b""),
        entry(3, 1, 0, "command", b""),
    ] {
        assert!(matches!(wal.append(&wrong.entry()), Err(Error::NotDense { .. })), "{wrong:?}");
    }
    let large = vec![0; engram_memory::MAX_RECORD_BYTES + 1];
    let refused = wal.append(&entry(1, 2, 2, "command", &large).entry());
    assert!(matches!(refused, Err(Error::RecordTooLarge { .. })));
    assert!(wal.seal(&[]).is_none());
    wal.append(&entry(1, 2, 2, "command", b"").entry()).unwrap();
}

#[test]
fn a_record_of_the_largest_size_gets_a_segment_of_its_size() {
    let disk = SimDisk::new(1);
    let (mut wal, mut writer, ..) = open(&disk);
    let large = vec![7; engram_memory::MAX_RECORD_BYTES];
    let entries = [entry(1, 1, 1, "command", &large), entry(1, 1, 2, "command", b"next")];
    write(&mut wal, &mut writer, &entries[..1]).unwrap();
    write(&mut wal, &mut writer, &entries[1..]).unwrap();
    assert!(read(&disk, None).unwrap().1 == entries);
}

#[test]
fn deletion_keeps_promises_notes_and_records_not_covered_by_snapshots() {
    let disk = SimDisk::new(1);
    let (mut wal, mut writer, ..) = open(&disk);
    let promised = [
        entry(1, 4, 0, "promise", &[0]),
        entry(1, 4, 0, "note", b"old"),
        entry(1, 5, 0, "promise", &[1]),
        entry(2, 5, 0, "note", b"new"),
        entry(3, 1, 1, "command", b"of a quiet partition"),
    ];
    write(&mut wal, &mut writer, &promised).unwrap();
    for lsn in 1..=100 {
        write(&mut wal, &mut writer, &[entry(1, 5, lsn, "command", &[9; 3_000])]).unwrap();
    }
    let segments = || disk.list().unwrap().len();
    let (made, bytes) = (segments(), wal.bytes());
    assert!(made > 5);
    let mut covered = BTreeMap::from([(PartitionId(1), Lsn(100))]);
    assert_eq!(wal.delete_below(&covered).unwrap(), 0, "partition 3 still needs the oldest segment");
    covered.insert(PartitionId(3), Lsn(1));
    covered.insert(PartitionId(1), Lsn(50));
    let deleted = wal.delete_below(&covered).unwrap();
    assert!(deleted > 0 && wal.bytes() == bytes - deleted && segments() < made);
    let (_, replayed) = read(&disk, None).unwrap();
    let commands: Vec<u64> = replayed.iter().filter(|entry| entry.kind == "command").map(|entry| entry.lsn).collect();
    assert!(commands[0] <= 51 && *commands.last().unwrap() == 100, "{commands:?}");

    covered.insert(PartitionId(1), Lsn(100));
    wal.delete_below(&covered).unwrap();
    assert_eq!(segments(), 1, "only the segment being written remains");
    disk.lose_power();
    let (wal, _, _, replayed) = open(&disk);
    let rest: Vec<OwnedEntry> = replayed.into_iter().filter(|entry| entry.kind != "command").collect();
    let newest = [promised[2].clone(), promised[1].clone(), promised[3].clone()];
    assert_eq!(rest, newest, "the newest promise and note of each partition");
    let recovered_from_a_snapshot = Tail { lsn: Lsn(1), term: Term(1) };
    let mut wal = wal;
    wal.continue_after(PartitionId(3), recovered_from_a_snapshot);
    wal.append(&entry(3, 1, 2, "command", b"continues").entry()).unwrap();
    assert!(wal.append(&entry(3, 1, 4, "command", b"leaves a gap").entry()).is_err());
}

#[test]
fn a_log_whose_beginning_was_deleted_may_begin_with_a_truncation() {
    let disk = SimDisk::new(1);
    let (mut wal, mut writer, ..) = open(&disk);
    for lsn in 1..=100 {
        write(&mut wal, &mut writer, &[entry(1, 5, lsn, "command", &[9; 3_000])]).unwrap();
    }
    drop((wal, writer));
    // The restart starts a segment, whose first entry is the truncation.
    disk.kill();
    let (mut wal, mut writer, ..) = open(&disk);
    let cut = [entry(1, 6, 90, "truncate", b""), entry(1, 6, 91, "command", b"again")];
    write(&mut wal, &mut writer, &cut).unwrap();
    wal.delete_below(&BTreeMap::from([(PartitionId(1), Lsn(100))])).unwrap();
    assert_eq!(read(&disk, None).unwrap().1, cut);
    drop((wal, writer));
    disk.kill();
    let (mut wal, ..) = open(&disk);
    wal.append(&entry(1, 6, 92, "command", b"continues").entry()).unwrap();
}

#[test]
fn a_missing_segment_and_a_log_of_another_owner_or_version_are_rejected() {
    let log = Log::of(1_000, 5, 9);
    let names = log.segments();
    let missing = log.disk.fork(0);
    missing.remove(&names[1]).unwrap();
    assert!(matches!(read(&missing, None), Err(Error::Corrupt { what: "the previous segment is missing", .. })));
    let empty = read(&SimDisk::new(0), Some(Position(4_096)));
    assert!(matches!(empty, Err(Error::Corrupt { .. })), "a gracefully closed log is missing");

    let refuse =
        |head: FileHead| recover(&log.disk, &head, None, &mut |_, _| unreachable!("nothing is replayed")).err();
    let error = refuse(FileHead { cluster: ClusterId(8), ..head() });
    assert!(
        matches!(error, Some(Error::OtherCluster { found: ClusterId(7), expected: ClusterId(8), .. })),
        "{error:?}"
    );
    let error = refuse(FileHead { store: StoreId(12), ..head() });
    assert!(matches!(error, Some(Error::OtherStore { .. })), "{error:?}");
    let error = refuse(FileHead { shape: Shape { partitions: 9, ..head().shape }, ..head() });
    assert!(matches!(error, Some(Error::OtherShape { .. })), "{error:?}");
    let newer = log.disk.fork(0);
    newer.flip_bit(&names[0], 8 * 8 + 1);
    let error = recover(&newer, &head(), None, &mut |_, _| Ok(())).err();
    assert!(matches!(error, Some(Error::Corrupt { what: "damaged format version", .. })), "{error:?}");
    // A newer format differs in more than the version.
    newer.flip_bit(&names[0], 8 * 12);
    let error = recover(&newer, &head(), None, &mut |_, _| Ok(())).err();
    assert!(matches!(error, Some(Error::UnknownFormat { found: 3, supported: 1, .. })), "{error:?}");
}
