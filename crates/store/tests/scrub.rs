//! Damaged snapshots are detected while the store runs, and rewritten from memory.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use engram_kernels::Cpu;
use engram_memory::{
    ClusterId, Command, FeatureShape, Law, MemoryId, PartitionId, Record, Settings, Shape, Term, Upsert,
};
use engram_store::{ManualClock, Options, Recovery, SimDisk, Store, snapshot_file};
use std::sync::Arc;

const HOUR_MS: u64 = 60 * 60 * 1_000;
const PARTITIONS: u32 = 2;

fn open(disk: &SimDisk, clock: &Arc<ManualClock>) -> (Store, Recovery) {
    let shape = Shape { partitions: PARTITIONS, law: Law::Linear, features: FeatureShape::NONE };
    let mut options = Options::new(ClusterId(7), shape, Settings::default());
    // Only damage causes snapshots.
    (options.snapshot_bytes, options.snapshot_ms) = (u64::MAX, u64::MAX);
    options.scrub_ms = HOUR_MS;
    let disk = Arc::new(disk.clone());
    let (mut store, recovery) = Store::open(disk, clock.clone(), Box::new(Cpu::new(1)), options).unwrap();
    let term = store.promised(PartitionId(0)).0 + 1;
    store.activate((0..PARTITIONS).map(|partition| (PartitionId(partition), Term(term))).collect(), |_| {});
    store.turn().unwrap();
    (store, recovery)
}

/// Writes to every partition, and snapshots each.
fn generation(store: &mut Store, ids: std::ops::Range<u64>) {
    let upsert = |partition| {
        let ids = ids.clone().map(MemoryId).filter(|id| engram_memory::partition_of(*id, PARTITIONS) == partition);
        (partition, Record::bare(Command::Upsert(Upsert { ids: ids.collect(), ..Upsert::default() })))
    };
    let records = (0..PARTITIONS).map(PartitionId).map(upsert).collect();
    store.write(records, |answers| assert!(answers.iter().all(Result::is_ok)));
    store.turn().unwrap();
    store.snapshot_all(None, |written| assert_eq!(written.unwrap().len(), PARTITIONS as usize));
    store.turn().unwrap();
}

/// Advances the clock minute by minute.
fn pass(store: &mut Store, clock: &ManualClock, minutes: u64) {
    for _ in 0..minutes {
        clock.advance(60_000);
        store.turn().unwrap();
    }
}

fn files(disk: &SimDisk, partition: u32) -> Vec<String> {
    let snapshots = snapshot_file::list(disk).unwrap();
    snapshots[&PartitionId(partition)].iter().map(|lsn| snapshot_file::name(PartitionId(partition), *lsn)).collect()
}

#[test]
fn a_damaged_snapshot_is_detected_within_a_period_and_rewritten_from_memory() {
    // The newest; the older; and the newest of a partition that has changed since.
    for (generation_hit, changed) in [(0, false), (1, false), (0, true)] {
        let (disk, clock) = (SimDisk::new(1), Arc::new(ManualClock::new(100 * HOUR_MS)));
        let (mut store, _) = open(&disk, &clock);
        generation(&mut store, 0..50);
        generation(&mut store, 50..90);
        pass(&mut store, &clock, 130);
        let stats = store.stats();
        assert!((7..=9).contains(&stats.scrubbed_snapshots), "four files, twice: {}", stats.scrubbed_snapshots);
        assert_eq!((stats.damaged_snapshots, stats.damage), (0, None));
        let before = files(&disk, 1);
        if changed {
            let more = Record::bare(Command::Upsert(Upsert { ids: Vec::new(), ..Upsert::default() }));
            store.write(vec![(PartitionId(1), more)], |answers| assert!(answers[0].is_ok()));
            store.turn().unwrap();
        }
        let hit = before[generation_hit].clone();
        disk.flip_bit(&hit, 8 * 300);
        pass(&mut store, &clock, 65);

        let stats = store.stats();
        assert_eq!(stats.damaged_snapshots, 1, "detected once and removed");
        let message = stats.damage.unwrap();
        assert!(message.contains(&hit) && message.contains("byte"), "{message}");
        let after = files(&disk, 1);
        let same_name = generation_hit == 0 && !changed;
        assert_eq!(after.contains(&hit), same_name, "the damaged file is removed");
        assert_eq!(files(&disk, 0).len(), 2, "the other partition is unchanged");
        pass(&mut store, &clock, 65);
        assert_eq!(store.stats().damaged_snapshots, 1);

        let digest = store.partitions().replica_digest(PartitionId(1)).unwrap();
        drop(store);
        disk.lose_power();
        let (mut store, recovery) = open(&disk, &clock);
        assert!(recovery.skipped_snapshots.is_empty() && recovery.corrupt.is_empty(), "{recovery:?}");
        assert_eq!(store.partitions().memories(), 90);
        assert!(digest == store.partitions().replica_digest(PartitionId(1)).unwrap());
    }
}

#[test]
fn a_single_damaged_snapshot_is_removed_only_when_the_new_one_is_durable() {
    let (disk, clock) = (SimDisk::new(2), Arc::new(ManualClock::new(100 * HOUR_MS)));
    let (mut store, _) = open(&disk, &clock);
    generation(&mut store, 0..50);
    let hit = files(&disk, 0).remove(0);
    // The idle log seals itself, which needs disk space.
    pass(&mut store, &clock, 1);
    disk.flip_bit(&hit, 8 * 300);
    disk.set_capacity(Some(0));
    pass(&mut store, &clock, 65);
    let stats = store.stats();
    assert_eq!((stats.damaged_snapshots, stats.failed_snapshots > 0), (1, true));
    assert_eq!(files(&disk, 0), [hit.as_str()], "the damaged file remains as evidence");
    disk.set_capacity(None);
    store.snapshot_all(None, |written| assert_eq!(written.unwrap().len(), 1));
    store.turn().unwrap();
    pass(&mut store, &clock, 65);
    assert_eq!(store.stats().damaged_snapshots, 1);
    snapshot_file::SnapshotReader::open(&disk, &store.identity().head(), &hit).unwrap().verify().unwrap();
}
