//! The engine: a store on threads over real files.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use engram_cluster::{Entry, PartitionMap};
use engram_kernels::Cpu;
use engram_memory::{
    ClusterId, Command, FeatureShape, Incarnation, Law, Member, MemoryId, OnMissing, Ordinal, PartitionId, Record,
    Settings, Shape, StoreId, Term, Updates, Upsert, partition_of,
};
use engram_store::{CommittedWrite, Engine, FileDisk, Handle, Options, Overload, Store, SystemClock, WriteError};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

const PARTITIONS: u32 = 8;
/// Only ends a test that hangs: nothing here takes seconds.
const DEADLINE: Duration = Duration::from_secs(60);

fn options() -> Options {
    let shape = Shape { partitions: PARTITIONS, law: Law::Linear, features: FeatureShape::NONE };
    Options::new(ClusterId(1), shape, Settings::default())
}

fn start(folder: &Path, options: Options, term: u64) -> Handle {
    let disk = Arc::new(FileDisk::new(folder).unwrap());
    let (store, _) = Store::open(disk, Arc::new(SystemClock), Box::new(Cpu::new(2)), options).unwrap();
    let handle = Engine::start(store, Box::new(engram_store::NoPeers)).unwrap();
    let (done, activated) = channel();
    handle.activate((0..PARTITIONS).map(|p| (PartitionId(p), Term(term))).collect(), move |answers| {
        done.send(answers).unwrap();
    });
    assert!(activated.recv_timeout(DEADLINE).unwrap().iter().all(Result::is_ok));
    handle
}

fn stop(handle: &Handle) {
    let (done, stopped) = channel();
    handle.stop(move |result| done.send(result).unwrap());
    stopped.recv_timeout(DEADLINE).unwrap().unwrap();
}

type Answers = Vec<Result<CommittedWrite, WriteError>>;

fn write(handle: &Handle, records: Vec<(PartitionId, Record)>) -> Result<Receiver<Answers>, Overload> {
    let (done, answers) = channel();
    handle.write(records, move |result| drop(done.send(result)))?;
    Ok(answers)
}

fn read<T: Send + 'static>(
    handle: &Handle,
    read: impl FnOnce(&mut engram_store::Partitions) -> T + Send + 'static,
) -> T {
    let (done, answer) = channel();
    handle.read(read, move |result| done.send(result).unwrap()).unwrap();
    answer.recv_timeout(DEADLINE).unwrap()
}

/// One record per partition that some id hashes to.
fn split(ids: impl Iterator<Item = u64>, command: impl Fn(Vec<MemoryId>) -> Command) -> Vec<(PartitionId, Record)> {
    let mut split = vec![Vec::new(); PARTITIONS as usize];
    ids.map(MemoryId).for_each(|id| split[partition_of(id, PARTITIONS).0 as usize].push(id));
    let parts = split.into_iter().enumerate().filter(|(_, ids)| !ids.is_empty());
    parts.map(|(partition, ids)| (PartitionId(partition as u32), Record::bare(command(ids)))).collect()
}

fn upsert(ids: Vec<MemoryId>) -> Command {
    Command::Upsert(Upsert { ids, ..Upsert::default() })
}

fn reinforce(ids: Vec<MemoryId>) -> Command {
    let deltas = vec![1; ids.len()];
    Command::Reinforce(Updates::ById { ids, deltas, on_missing: OnMissing::Report, keys: None })
}

#[test]
fn concurrent_writes_are_applied_once_and_survive_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let mut small = options();
    (small.snapshot_bytes, small.wal.segment_bytes) = (256 << 10, 256 << 10);
    let handle = start(folder.path(), small.clone(), 1);
    let created = write(&handle, split(0..1_000, upsert)).unwrap().recv_timeout(DEADLINE).unwrap();
    assert!(created.iter().all(|answer| answer.as_ref().is_ok_and(|committed| committed.durable)));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let calls: Vec<_> = (0..50).map(|_| write(&handle, split(0..1_000, reinforce)).unwrap()).collect();
                for call in calls {
                    assert!(call.recv_timeout(DEADLINE).unwrap().iter().all(Result::is_ok));
                }
            });
        }
    });
    let expected = (1_u128 << 29) * 1_000 + 200 * 1_000;
    let (sum, digest) =
        read(&handle, |partitions| (partitions.quality().unwrap().total().sum, partitions.digest().unwrap()));
    assert_eq!(sum, expected);
    assert_eq!(handle.settings(PartitionId(3)), Some(Settings::default()));
    assert_eq!(handle.position(PartitionId(3)).map(|(term, _)| term), Some(Term(1)));
    let stats = handle.stats();
    assert_eq!((stats.applied_rows, stats.memories, stats.waiting_records), (201_000, 1_000, 0));
    assert!(stats.batch_records.count < stats.applied_records, "one sync for many records: {stats:?}");
    stop(&handle);
    let refused = write(&handle, split(0..1, upsert)).unwrap().recv_timeout(DEADLINE).unwrap();
    assert!(matches!(refused[..], [Err(WriteError::Failed { .. })]));
    let again = start(folder.path(), small, 2);
    assert_eq!(read(&again, |partitions| partitions.digest().unwrap()), digest);
}

#[test]
fn a_listener_is_notified_when_partitions_start_and_stop_being_served() {
    let folder = tempfile::tempdir().unwrap();
    let handle = start(folder.path(), options(), 1);
    let (changed, changes) = channel();
    handle.on_serving_change(move |partition, term| changed.send((partition, term)).unwrap());
    let wait_for = |term: Option<Term>| {
        let mut waiting: BTreeSet<PartitionId> = (0..PARTITIONS).map(PartitionId).collect();
        while !waiting.is_empty() {
            let (partition, changed_to) = changes.recv_timeout(DEADLINE).unwrap();
            if changed_to == term {
                assert!(waiting.remove(&partition), "one notification per change");
                assert_eq!(handle.position(partition).map(|(term, _)| term), term, "published before the notification");
            }
        }
    };
    handle.activate((0..PARTITIONS).map(|p| (PartitionId(p), Term(2))).collect(), |_| {});
    wait_for(Some(Term(2)));
    let other = Member { ordinal: Ordinal(1), store: StoreId(9), incarnation: Incarnation(1) };
    let partitions = (0..PARTITIONS).map(|_| Entry::solo(Term(3), other)).collect();
    handle.update_map(Arc::new(PartitionMap { cluster: ClusterId(1), version: 1, partitions }));
    wait_for(None);
}

#[test]
fn a_full_queue_rejects_calls_until_it_drains() {
    let folder = tempfile::tempdir().unwrap();
    let handle = start(folder.path(), Options { queue_calls: 3, ..options() }, 1);
    let (begun, has_begun) = channel();
    let (go_on, wait) = channel::<()>();
    let blocked = move |_: &mut engram_store::Partitions| {
        begun.send(()).unwrap();
        wait.recv_timeout(DEADLINE).unwrap();
    };
    handle.read(blocked, |()| {}).unwrap();
    has_begun.recv_timeout(DEADLINE).unwrap();
    let queued: Vec<_> = (0..2).map(|id| write(&handle, split(id..id + 1, upsert)).unwrap()).collect();
    let turned_away = write(&handle, split(9..10, upsert)).unwrap_err();
    assert_eq!(turned_away.calls, 3);
    go_on.send(()).unwrap();
    for call in queued {
        assert!(call.recv_timeout(DEADLINE).unwrap()[0].is_ok());
    }
    assert!(write(&handle, split(9..10, upsert)).unwrap().recv_timeout(DEADLINE).unwrap()[0].is_ok());
    assert_eq!(handle.stats().overloaded_calls, 1);
}

#[test]
fn dropping_the_last_handle_stops_the_engine_gracefully() {
    let folder = tempfile::tempdir().unwrap();
    let handle = start(folder.path(), options(), 1);
    let answers = write(&handle, split(0..100, upsert)).unwrap();
    let (done, snapshotted) = channel();
    let backup = tempfile::tempdir().unwrap();
    handle.snapshot_all(Some(backup.path().to_path_buf()), move |result| done.send(result).unwrap());
    drop(handle);
    assert!(answers.recv_timeout(DEADLINE).unwrap().iter().all(Result::is_ok));
    // Dropped or done: the last requested round may be cancelled.
    let _ = snapshotted.recv_timeout(DEADLINE);
    let disk = Arc::new(FileDisk::new(folder.path()).unwrap());
    let recovery = (0..600).find_map(|_| {
        match Store::open(disk.clone(), Arc::new(SystemClock), Box::new(Cpu::new(1)), options()) {
            Ok((_, recovery)) => Some(recovery),
            Err(engram_store::Error::Locked { .. }) => {
                std::thread::yield_now();
                std::thread::park_timeout(Duration::from_millis(100));
                None
            }
            Err(error) => panic!("{error}"),
        }
    });
    let recovery = recovery.expect("the engine unlocks the directory");
    assert!(recovery.lossless && recovery.log.dropped_bytes == 0, "{recovery:?}");
    assert_eq!(recovery.memories, 100);
}
