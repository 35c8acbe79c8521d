//! Full disks and failed syncs.

use super::super::batch::PAGE;
use super::super::{BACKGROUND_SYNC_MS, Durability};
use super::*;

#[test]
fn a_full_disk_acknowledges_nothing_and_the_log_continues_once_there_is_space() {
    let disk = SimDisk::new(1);
    let (mut wal, mut writer, ..) = open(&disk);
    disk.set_capacity(Some(2 * SEGMENT_BYTES));
    let (mut acknowledged, mut lsn) = (Vec::new(), 0);
    let command = |lsn| OwnedEntry::command(1, lsn, vec![5; 2_000]);
    loop {
        lsn += 1;
        match write(&mut wal, &mut writer, &[command(lsn)]) {
            Ok(_) => acknowledged.push(command(lsn)),
            Err(Error::DiskFull { .. }) => break,
            Err(other) => panic!("{other}"),
        }
    }
    assert!(acknowledged.len() > 10);
    assert!(
        matches!(write(&mut wal, &mut writer, &[command(lsn)]), Err(Error::DiskFull { .. })),
        "the disk stays full"
    );
    assert_eq!(read(&disk, None).unwrap().1, acknowledged, "the tail is complete");
    assert!(disk.list().unwrap().iter().all(|name| !name.ends_with(".tmp")), "no temporary file remains");

    disk.set_capacity(None);
    write(&mut wal, &mut writer, &[command(lsn)]).unwrap();
    acknowledged.push(command(lsn));
    disk.lose_power();
    assert_eq!(open(&disk).3, acknowledged);
}

#[test]
fn a_log_on_a_full_disk_opens_in_the_unused_space_of_its_last_segment() {
    let disk = SimDisk::new(1);
    let (mut wal, mut writer, ..) = open(&disk);
    let command = OwnedEntry::command(1, 1, vec![5; 100]);
    write(&mut wal, &mut writer, std::slice::from_ref(&command)).unwrap();
    disk.kill();
    let used = disk.list().unwrap().iter().map(|name| disk.bytes(name).len() as u64).sum::<u64>();
    // Less than a segment, but enough for the used pages.
    disk.set_capacity(Some(used + 2 * PAGE as u64));
    assert_eq!(open(&disk).3, [command]);
}

#[test]
fn a_failed_sync_is_permanent_and_loses_nothing_acknowledged() {
    let disk = SimDisk::new(1);
    let (mut wal, mut writer, ..) = open(&disk);
    let command = |lsn| OwnedEntry::command(1, lsn, vec![5; 100]);
    write(&mut wal, &mut writer, &[command(1)]).unwrap();
    disk.fail_syncs(1);
    assert!(matches!(write(&mut wal, &mut writer, &[command(2)]), Err(Error::SyncFailed { .. })));
    // The disk would succeed without reporting what it lost.
    assert!(matches!(write(&mut wal, &mut writer, &[command(2)]), Err(Error::SyncFailed { .. })));
    assert!(matches!(writer.tick(10_000), Err(Error::SyncFailed { .. })));
    assert!(matches!(writer.sync(), Err(Error::SyncFailed { .. })));
    disk.lose_power();
    assert_eq!(open(&disk).3, [command(1)]);
}

#[test]
fn modes_sync_before_or_shortly_after_a_write() {
    let mode = |durability, replicas| {
        let disk = SimDisk::new(1);
        let (mut wal, mut writer, ..) = try_open(&disk, Options { durability, replicas, ..options() }).unwrap();
        let end = write(&mut wal, &mut writer, &[OwnedEntry::command(1, 1, vec![1])]).unwrap();
        (wal, writer, end)
    };
    for (durability, replicas) in [(Durability::Sync, 1), (Durability::Sync, 2), (Durability::Replicated, 1)] {
        let (wal, _, end) = mode(durability, replicas);
        assert!(wal.durable(end), "{durability:?} with {replicas} replicas");
    }
    for (durability, replicas) in [(Durability::Async, 1), (Durability::Replicated, 2)] {
        let (wal, mut writer, end) = mode(durability, replicas);
        assert!(!wal.durable(end) && wal.written() == end, "{durability:?} with {replicas} replicas");
        assert_eq!(writer.wait_ms(10), Some(BACKGROUND_SYNC_MS - 10));
        writer.tick(BACKGROUND_SYNC_MS - 1).unwrap();
        assert!(!wal.durable(end));
        writer.tick(BACKGROUND_SYNC_MS).unwrap();
        assert!(wal.durable(end));
    }
}

#[test]
fn records_discarded_by_a_failed_sync_are_durable_once_recovered() {
    let disk = SimDisk::new(1);
    let (mut wal, mut writer, ..) = open(&disk);
    let command = |lsn| OwnedEntry::command(1, lsn, vec![5; 100]);
    write(&mut wal, &mut writer, &[command(1)]).unwrap();
    disk.fail_syncs(1);
    assert!(matches!(write(&mut wal, &mut writer, &[command(2)]), Err(Error::SyncFailed { .. })));
    disk.kill();
    // The page cache still has the record; the recovered process may acknowledge it.
    let recovered = open(&disk).3;
    assert_eq!(recovered, [command(1), command(2)]);
    disk.lose_power();
    assert_eq!(open(&disk).3, recovered);
}
