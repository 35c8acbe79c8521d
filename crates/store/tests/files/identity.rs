//! Identity of a store over starts, stops and crashes.

use std::sync::Arc;

use engram_memory::{ClusterId, Incarnation, Shape};
use engram_store::wal::{self, Position, Recovery};
use engram_store::{Disk, Error, Identity, Origin, SimDisk, Wal};

use crate::shape;

const CLUSTER: ClusterId = ClusterId(9);
const FIRST_BOOT: Origin = Origin { boot: 1, mount: 2 };
const SECOND_BOOT: Origin = Origin { boot: 2, mount: 2 };

fn start(disk: &SimDisk, origin: Origin) -> Result<Identity, Error> {
    Identity::open(&shared(disk), CLUSTER, shape(), origin)
}

fn shared(disk: &SimDisk) -> Arc<dyn Disk> {
    Arc::new(disk.clone())
}

fn ended_at(end: u64) -> Recovery {
    Recovery { end: Position(end), ..Recovery::default() }
}

#[test]
fn the_incarnation_rises_and_only_a_clean_stop_or_the_same_boot_is_lossless() {
    let disk = SimDisk::new(1);
    let first = start(&disk, FIRST_BOOT).unwrap();
    let store = first.store();
    assert_eq!((first.incarnation(), first.clean_end(), first.durable_end()), (Incarnation(1), None, None));
    assert!(!first.is_lossless(&ended_at(0)), "first start");
    assert!(matches!(start(&disk, FIRST_BOOT), Err(Error::Locked { pid: Some(_), .. })));
    drop(first);

    let same_boot = start(&disk, FIRST_BOOT).unwrap();
    assert_eq!((same_boot.store(), same_boot.incarnation()), (store, Incarnation(2)));
    assert!(same_boot.is_lossless(&ended_at(7)), "the page cache was never lost");
    assert_eq!(same_boot.lossless_since(), Incarnation(1), "even if this start fails before recording it");
    disk.lose_power();
    let crashed = start(&disk, SECOND_BOOT).unwrap();
    assert_eq!((crashed.incarnation(), crashed.clean_end()), (Incarnation(3), None));
    assert!(!crashed.is_lossless(&ended_at(7)));
    crashed.leave_clean_mark(&shared(&disk), Position(4_096)).unwrap();

    disk.lose_power();
    let clean = start(&disk, FIRST_BOOT).unwrap();
    assert_eq!(clean.clean_end(), Some(Position(4_096)));
    assert!(clean.is_lossless(&ended_at(4_096)) && !clean.is_lossless(&ended_at(8_192)), "only with the recorded end");
    disk.lose_power();
    let erased = start(&disk, SECOND_BOOT).unwrap();
    assert_eq!((erased.store(), erased.clean_end()), (store, None), "a mark is valid for one start");
    assert_eq!(erased.durable_end(), Some(Position(4_096)), "the log never ends before it");
    let unknown = Origin { boot: 0, mount: 0 };
    drop(erased);
    drop(start(&disk, unknown).unwrap());
    assert!(!start(&disk, unknown).unwrap().is_lossless(&ended_at(7)), "an unknown boot equals no other");
}

#[test]
fn a_power_loss_during_a_start_leaves_the_old_or_the_new_identity() {
    for stop in 0..8 {
        for seed in 0..10 {
            let disk = SimDisk::new(seed);
            drop(start(&disk, FIRST_BOOT).unwrap());
            let store = start(&disk, FIRST_BOOT).unwrap().store();
            disk.stop_after(stop);
            let is_up = start(&disk, FIRST_BOOT).is_ok();
            disk.lose_power();
            let next = start(&disk, SECOND_BOOT).unwrap();
            assert_eq!(next.store(), store);
            let risen = next.incarnation().0;
            assert!(risen == 4 || (risen == 3 && !is_up), "stop {stop}, seed {seed}: {risen}");
        }
    }
}

#[test]
fn another_cluster_shape_or_version_and_a_missing_identity_are_rejected() {
    let disk = SimDisk::new(1);
    drop(start(&disk, FIRST_BOOT).unwrap());
    let bytes = disk.bytes("identity");
    let other = Identity::open(&shared(&disk), ClusterId(8), shape(), FIRST_BOOT).unwrap_err();
    assert!(matches!(other, Error::OtherCluster { found: CLUSTER, expected: ClusterId(8), .. }), "{other}");
    let wider = Shape { partitions: 512, ..shape() };
    let other = Identity::open(&shared(&disk), CLUSTER, wider, FIRST_BOOT).unwrap_err();
    assert!(matches!(other, Error::OtherShape { .. }), "{other}");
    // A newer format, with a checksum of its own.
    for bit in [8 * 8 + 1, 8 * 12] {
        disk.flip_bit("identity", bit);
    }
    let newer = start(&disk, FIRST_BOOT).unwrap_err();
    assert!(matches!(newer, Error::UnknownFormat { found: 3, supported: 1, .. }), "{newer}");
    for bit in [8 * 8 + 1, 8 * 12] {
        disk.flip_bit("identity", bit);
    }
    assert_eq!(disk.bytes("identity"), bytes, "a failed start changes nothing");

    let identity = start(&disk, FIRST_BOOT).unwrap();
    let opened = Wal::open(shared(&disk), identity.head(), wal::Options::default(), &mut |_| Ok(()));
    drop((opened.unwrap(), identity));
    disk.remove("identity").unwrap();
    let missing = start(&disk, FIRST_BOOT).unwrap_err();
    assert!(matches!(missing, Error::IdentityMissing { .. }), "{missing}");
}

#[test]
fn every_bit_flip_and_truncation_of_the_identity_is_detected() {
    let disk = SimDisk::new(1);
    drop(start(&disk, FIRST_BOOT).unwrap());
    let bytes = disk.bytes("identity");
    for bit in 0..bytes.len() as u64 * 8 {
        disk.flip_bit("identity", bit);
        let error = start(&disk, FIRST_BOOT).unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "bit {bit}: {error}");
        disk.flip_bit("identity", bit);
    }
    for cut in 0..bytes.len() {
        disk.put("identity", &bytes[..cut]);
        assert!(matches!(start(&disk, FIRST_BOOT), Err(Error::Corrupt { .. })), "cut at {cut}");
    }
    disk.put("identity", &[&bytes[..], &[0]].concat());
    assert!(matches!(start(&disk, FIRST_BOOT), Err(Error::Corrupt { .. })), "an extra byte");
}
