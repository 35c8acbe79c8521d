//! The store on a simulated disk: answered records survive any crash, and nothing but requested records is applied.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use engram_cluster::{Entry, PartitionMap};
use engram_kernels::Cpu;
use engram_memory::session::Admission;
use engram_memory::{
    CapacityPolicy, ClusterId, Command, Digest, FeatureShape, FeatureType, Incarnation, Law, Lsn, Member, MemoryId,
    OnMissing, Ordinal, Outcome, PartitionId, Record, Refusal, Reply, Request, SessionId, Settings, Shape, StoreId,
    Term, Updates, Upsert, reference,
};
use engram_store::{
    ActivateError, CommittedWrite, Disk, Durability, Error, ManualClock, Options, SimDisk, Store, WriteError, restore,
    snapshot_file,
};
use engram_testing::commands::World;
use parking_lot::Mutex;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::channel;

type Answer = Result<CommittedWrite, WriteError>;

const FEATURES: FeatureShape = FeatureShape { dimension: 2, dtype: FeatureType::F16 };

fn options(partitions: u32) -> Options {
    let shape = Shape { partitions, law: Law::Linear, features: FEATURES };
    let mut options = Options::new(ClusterId(7), shape, Settings::default());
    options.origin = engram_store::Origin { boot: 0, mount: 0 };
    options.wal.segment_bytes = 16 << 10;
    options.snapshot_bytes = 8 << 10;
    options
}

fn open(disk: &SimDisk, clock: &Arc<ManualClock>, options: &Options) -> Result<(Store, engram_store::Recovery), Error> {
    Store::open(Arc::new(disk.clone()), clock.clone(), Box::new(Cpu::new(1)), options.clone())
}

fn activate(store: &mut Store, term: u64) -> Vec<Result<(), ActivateError>> {
    let (done, answers) = channel();
    let partitions = store.partitions().shape().partitions;
    store.activate((0..partitions).map(|p| (PartitionId(p), Term(term))).collect(), move |answer| {
        done.send(answer).unwrap();
    });
    store.turn().unwrap();
    answers.try_recv().expect("a turn answers everything")
}

/// Writes and runs a turn; returns all answers.
fn write(store: &mut Store, records: Vec<(PartitionId, Record)>) -> Vec<Answer> {
    let answers = Arc::new(Mutex::new(None));
    let slot = Arc::clone(&answers);
    store.write(records, move |answers| *slot.lock() = Some(answers));
    store.turn().unwrap();
    answers.lock().take().expect("a turn answers everything")
}

fn write_one(store: &mut Store, record: Record) -> Answer {
    write(store, vec![(PartitionId(0), record)]).pop().unwrap()
}

fn applied(answer: Answer) -> Outcome {
    answer.unwrap().reply.into_result().unwrap()
}

fn upsert(ids: impl IntoIterator<Item = u64>) -> Record {
    Record::bare(Command::Upsert(Upsert { ids: ids.into_iter().map(MemoryId).collect(), ..Upsert::default() }))
}

/// Model of a partition as seen by a client: the certain state, and later requests.
struct Model {
    certain: reference::Partition,
    /// LSN of the certain state.
    lsn: Lsn,
    /// Later requests with their answers. Unanswered ones may have been lost.
    requests: Vec<(Record, Arc<Mutex<Option<Answer>>>)>,
}

impl Model {
    /// Applies answered requests, checks the answers, and applies unanswered ones until the state equals `recovered`.
    fn settle(&mut self, recovered: Option<(Digest, Lsn)>) -> Result<(), TestCaseError> {
        let mut lsn = self.lsn;
        let mut logged = None;
        let mut answered = BTreeSet::new();
        for (at, (record, answer)) in self.requests.iter().enumerate() {
            // An answer without a new LSN was given without the log, perhaps while the log failed; likewise for a repeat, whose
            // LSN is the current one: the store may have logged entries of its own meanwhile.
            let is_new = record.request.is_none_or(|request| {
                answered.insert((request.session, request.seq))
                    && self.certain.ledger().sessions.admit(request) == Admission::Execute
            });
            if let Some(Ok(committed)) = &*answer.lock()
                && committed.lsn > lsn
                && is_new
            {
                (lsn, logged) = (committed.lsn, Some(at));
            }
        }
        for (at, (record, answer)) in std::mem::take(&mut self.requests).into_iter().enumerate() {
            if logged.is_none_or(|last| at > last)
                && recovered.is_some_and(|(recovered, _)| self.certain.replica_digest() == recovered)
            {
                break;
            }
            match answer.lock().take() {
                Some(Err(WriteError::Capacity { .. })) => {}
                Some(Ok(committed)) => {
                    let expected = self.certain.apply(&record);
                    // A repeat gets the first reply, even if a request in between expired it in the model.
                    let forgotten =
                        matches!(expected, Reply::Refused(Refusal::SessionExpired | Refusal::AlreadyClosed));
                    if !forgotten {
                        prop_assert_eq!(committed.reply, expected, "{:?}", record);
                    }
                }
                Some(Err(WriteError::Failed { .. } | WriteError::DiskFull { .. })) if recovered.is_some() => {
                    drop(self.certain.apply(&record));
                }
                None => drop(self.certain.apply(&record)),
                Some(Err(error)) => prop_assert!(false, "{}", error),
            }
        }
        if let Some((recovered, lsn)) = recovered {
            self.lsn = lsn;
            prop_assert_eq!(
                self.certain.replica_digest(),
                recovered,
                "the recovered state does not result from the requests"
            );
        }
        Ok(())
    }
}

/// Activates every partition, which configures those that differ, durably in every mode.
fn serve(store: &mut Store, term: u64, settings: Settings, models: &mut [Model]) {
    let current = |store: &mut Store, partition| store.partitions().ledger(partition).map(|ledger| ledger.settings);
    let before: Vec<_> = (0..models.len() as u32).map(|p| current(store, PartitionId(p)).unwrap_or_default()).collect();
    assert!(activate(store, term).iter().all(Result::is_ok));
    for (partition, (model, before)) in models.iter_mut().zip(before).enumerate() {
        let wanted = Settings { count_updates: before.count_updates, ..settings };
        assert_eq!(current(store, PartitionId(partition as u32)), Some(wanted));
        if wanted != before {
            model.certain.apply(&Record::bare(Command::Configure(wanted)));
            model.lsn = Lsn(model.lsn.0 + 1);
        }
        // A turn may also propose a no-op record to an idle partition.
        let applied = store.applied(PartitionId(partition as u32)).1;
        assert!(applied >= model.lsn, "{applied} is before {}", model.lsn);
        model.lsn = applied;
    }
}

#[derive(Debug, Clone)]
enum Step {
    /// Proposes this number of records of each partition.
    Write(Vec<usize>),
    Turn,
    Wait(u64),
    /// Kills the process after this number of further disk changes, with or without a power loss.
    Crash(u64, bool),
    Stop,
}

fn arb_steps(partitions: usize) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => proptest::collection::vec(0_usize..12, partitions).prop_map(Step::Write),
        4 => Just(Step::Turn),
        1 => (0_u64..400_000).prop_map(Step::Wait),
        3 => (0_u64..40, any::<bool>()).prop_map(|(changes, power)| Step::Crash(changes, power)),
        1 => Just(Step::Stop),
    ];
    proptest::collection::vec(step, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 160, max_shrink_iters: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_answered_record_survives_any_crash(
        (settings, logs, steps, durability) in (1_u32..4).prop_flat_map(|partitions| {
            let worlds: Vec<World> =
                (0..partitions).map(|p| World::of_partition(FEATURES, 24, 12, PartitionId(p), partitions)).collect();
            let logs: Vec<_> = worlds.iter().map(|world| world.arb_records(0..200)).collect();
            let durability = prop_oneof![3 => Just(Durability::Sync), 1 => Just(Durability::Async)];
            (worlds[0].arb_settings(), logs, arb_steps(partitions as usize), durability)
        }),
        seed in any::<u64>(),
    ) {
        let partitions = logs.len() as u32;
        let mut options = options(partitions);
        options.settings = settings;
        options.wal.durability = durability;
        let (disk, clock) = (SimDisk::new(seed), Arc::new(ManualClock::new(1_000_000)));
        let (mut store, _) = open(&disk, &clock, &options).unwrap();
        let mut term = 1;
        let empty = || Model { certain: reference::Partition::new(options.shape, Settings::default()), lsn: Lsn(0), requests: Vec::new() };
        let mut models: Vec<Model> = (0..partitions).map(|_| empty()).collect();
        serve(&mut store, term, settings, &mut models);
        let mut logs: Vec<_> = logs.into_iter().map(Vec::into_iter).collect();
        let mut running = Some(store);
        for step in steps {
            let mut store = running.take().expect("the store was reopened");
            let mut power = false;
            running = match step {
                Step::Write(counts) => {
                    for (partition, count) in counts.into_iter().enumerate() {
                        for record in logs[partition].by_ref().take(count) {
                            let slot = Arc::new(Mutex::new(None));
                            models[partition].requests.push((record.clone(), Arc::clone(&slot)));
                            // A separate call: a rejection is answered even if the process dies before the others are.
                            store.write(vec![(PartitionId(partition as u32), record)], move |mut answers| {
                                *slot.lock() = answers.pop();
                            });
                        }
                    }
                    Some(store)
                }
                Step::Turn => {
                    store.turn().unwrap();
                    Some(store)
                }
                Step::Wait(ms) => {
                    clock.advance(ms);
                    store.turn().unwrap();
                    Some(store)
                }
                Step::Crash(changes, with_power) => {
                    power = with_power;
                    disk.stop_after(changes);
                    // The result is irrelevant: the process is dying.
                    let _ = store.turn();
                    clock.advance(400_000);
                    let _ = store.turn();
                    None
                }
                Step::Stop => {
                    store.stop().unwrap();
                    None
                }
            };
            if running.is_some() {
                continue;
            }
            if power { disk.lose_power() } else { disk.kill() }
            let (mut store, recovery) = open(&disk, &clock, &options).unwrap();
            prop_assert!(recovery.corrupt.is_empty() && recovery.skipped_snapshots.is_empty(), "{:?}", recovery);
            for (partition, model) in models.iter_mut().enumerate() {
                let empty = reference::Partition::new(options.shape, Settings::default()).replica_digest();
                let recovered = store.partitions().replica_digest(PartitionId(partition as u32)).unwrap().unwrap_or(empty);
                if durability == Durability::Async && power {
                    // Answered records are not durable in this mode: any earlier state may be recovered.
                    model.requests.iter().for_each(|(_, answer)| {
                        let mut answer = answer.lock();
                        if matches!(*answer, Some(Ok(_))) {
                            *answer = None;
                        }
                    });
                }
                let lsn = store.applied(PartitionId(partition as u32)).1;
                model.settle(Some((recovered, lsn)))?;
            }
            let refused = activate(&mut store, term);
            prop_assert!(
                refused.iter().all(|answer| matches!(answer, Err(ActivateError::TermPromised { .. }))),
                "a promise was lost: {:?}", refused
            );
            term += 1;
            serve(&mut store, term, settings, &mut models);
            running = Some(store);
        }
        let mut store = running.expect("the store was reopened");
        store.turn().unwrap();
        for (partition, model) in models.iter_mut().enumerate() {
            model.settle(None)?;
            let recovered = store.partitions().replica_digest(PartitionId(partition as u32)).unwrap();
            prop_assert_eq!(recovered, Some(model.certain.replica_digest()));
        }
    }
}

fn reinforce(ids: &[u64], delta: i32) -> Record {
    let ids: Vec<MemoryId> = ids.iter().copied().map(MemoryId).collect();
    let deltas = vec![delta; ids.len()];
    Record::bare(Command::Reinforce(Updates::ById { ids, deltas, on_missing: OnMissing::Report, keys: None }))
}

fn weight(store: &mut Store, id: u64) -> u32 {
    store.partitions().get(MemoryId(id)).unwrap().expect("the memory exists").weight.units()
}

/// Opens a store that serves all partitions at term 1.
fn serving(disk: &SimDisk, clock: &Arc<ManualClock>, options: &Options) -> Store {
    let (mut store, _) = open(disk, clock, options).unwrap();
    assert!(activate(&mut store, 1).iter().all(Result::is_ok));
    store
}

/// Returns ids of one partition.
fn ids_of(partition: u32, partitions: u32) -> impl Iterator<Item = u64> {
    (0..).filter(move |id| engram_memory::partition_of(MemoryId(*id), partitions) == PartitionId(partition))
}

#[test]
fn a_repeated_request_waits_for_the_first_and_is_applied_once() {
    let (disk, clock, options) = (SimDisk::new(1), Arc::new(ManualClock::new(5_000)), options(1));
    let mut store = serving(&disk, &clock, &options);
    write_one(&mut store, upsert([1])).unwrap();
    let request = Some(Request { session: SessionId { opened_ms: 1, random: 1 }, seq: 1 });
    let once = Record { request, ..reinforce(&[1], 1_000) };
    let answers = write(&mut store, vec![(PartitionId(0), once.clone()), (PartitionId(0), once.clone())]);
    assert_eq!(answers[0], answers[1]);
    let first = answers[0].clone().unwrap();
    assert_eq!(first.lsn, Lsn(2));
    assert_eq!(weight(&mut store, 1), (1 << 29) + 1_000);
    assert_eq!(write_one(&mut store, once.clone()).unwrap().reply, first.reply);
    drop(store);
    disk.lose_power();
    let (mut store, _) = open(&disk, &clock, &options).unwrap();
    assert_eq!(activate(&mut store, 2), [Ok(())]);
    assert_eq!(write_one(&mut store, once).unwrap().reply, first.reply);
    assert_eq!(weight(&mut store, 1), (1 << 29) + 1_000);
    assert_eq!(store.applied(PartitionId(0)).1, Lsn(2));
}

#[test]
fn invalid_records_and_full_partitions_are_rejected_before_the_log() {
    let (disk, clock) = (SimDisk::new(1), Arc::new(ManualClock::new(5_000)));
    let mut options = options(2);
    options.settings = Settings { limit: 5, policy: CapacityPolicy::Refuse, ..Settings::default() };
    let mut store = serving(&disk, &clock, &options);
    let here: Vec<u64> = ids_of(0, 2).take(8).collect();
    let there = ids_of(1, 2).next().unwrap();
    let features = Upsert { ids: vec![MemoryId(here[0])], features: vec![0; 3], ..Upsert::default() };
    let early = Request { session: SessionId { opened_ms: 5_000 + 3_600_001, random: 1 }, seq: 1 };
    let invalid = [
        upsert([there]),
        Record::bare(Command::Upsert(features)),
        Record::bare(Command::Decay { amount: u32::MAX }),
        Record { request: Some(early), ..upsert([here[0]]) },
    ];
    for record in invalid {
        assert!(matches!(write_one(&mut store, record).unwrap_err(), WriteError::Invalid { .. }));
    }
    // Four fit, one more, then none: rows of existing memories or of those in flight do not count.
    let rows = |ids: &[u64]| (PartitionId(0), upsert(ids.iter().copied()));
    let answers = write(&mut store, vec![rows(&here[..4]), rows(&here[..5]), rows(&here[..5]), rows(&here[3..6])]);
    let created: Vec<u64> = answers[..3].iter().map(|answer| applied(answer.clone()).created).collect();
    assert_eq!(created, [4, 1, 0]);
    let refused = WriteError::Capacity { partition: PartitionId(0), limit: 5, memories: 5, wanted: 1 };
    assert_eq!(answers[3], Err(refused));
    assert_eq!(store.partitions().memories(), 5);
    let other_worker = Member { ordinal: Ordinal(1), store: StoreId(9), incarnation: Incarnation(1) };
    let entry = Entry::solo(Term(2), other_worker);
    store.update_map(&PartitionMap { cluster: ClusterId(7), version: 2, partitions: vec![entry; 2] });
    let answer = write_one(&mut store, upsert([here[0]]));
    assert_eq!(answer, Err(WriteError::NotPrimary { partition: PartitionId(0), term: Some(Term(1)) }));
    assert_eq!(store.applied(PartitionId(0)).1, Lsn(4), "the configuration and three upserts");
}

#[test]
fn a_full_disk_fails_only_writes() {
    let (disk, clock, options) = (SimDisk::new(1), Arc::new(ManualClock::new(0)), options(1));
    let mut store = serving(&disk, &clock, &options);
    write_one(&mut store, upsert(0..100)).unwrap();
    let digest = store.partitions().replica_digest(PartitionId(0)).unwrap();
    disk.set_capacity(Some(0));
    let large = upsert(100..3_000);
    assert!(matches!(write_one(&mut store, large.clone()), Err(WriteError::DiskFull { .. })));
    assert_eq!(store.partitions().replica_digest(PartitionId(0)).unwrap(), digest);
    assert_eq!(weight(&mut store, 5), 1 << 29);
    disk.set_capacity(None);
    let answer = write_one(&mut store, large).unwrap();
    assert_eq!(answer.lsn, Lsn(2), "the failed write took no LSN");
    drop(store);
    disk.lose_power();
    let (mut store, recovery) = open(&disk, &clock, &options).unwrap();
    assert_eq!(store.partitions().memories(), 3_000, "{recovery:?}");
}

#[test]
fn a_damaged_snapshot_is_skipped_and_only_a_damaged_partition_is_corrupt() {
    let (disk, clock, options) = (SimDisk::new(1), Arc::new(ManualClock::new(0)), options(2));
    let mut store = serving(&disk, &clock, &options);
    let ids: Vec<Vec<u64>> = (0..2).map(|p| ids_of(p, 2).take(200).collect()).collect();
    for round in 0..40 {
        let records = (0..2)
            .map(|p| (PartitionId(p as u32), if round == 0 { upsert(ids[p].clone()) } else { reinforce(&ids[p], 7) }));
        assert!(write(&mut store, records.collect()).iter().all(Result::is_ok));
    }
    let stats = store.stats();
    assert!(stats.snapshots > 4 && stats.deleted_log_bytes > 0, "{stats:?}");
    assert!(
        stats.log_bytes < 8 * options.snapshot_bytes,
        "the log covered by snapshots is deleted: {}",
        stats.log_bytes
    );
    let digests: Vec<_> = (0..2).map(|p| store.partitions().replica_digest(PartitionId(p)).unwrap()).collect();
    drop(store);
    disk.kill();
    let snapshots = snapshot_file::list(&disk).unwrap();
    let name = |partition: u32, generation: usize| {
        snapshot_file::name(PartitionId(partition), snapshots[&PartitionId(partition)][generation])
    };
    disk.flip_bit(&name(0, 0), 8 * 300);
    let (mut store, recovery) = open(&disk, &clock, &options).unwrap();
    assert_eq!((recovery.skipped_snapshots.len(), recovery.corrupt.len()), (1, 0), "{recovery:?}");
    for (partition, digest) in digests.iter().enumerate() {
        assert_eq!(store.partitions().replica_digest(PartitionId(partition as u32)).unwrap(), *digest);
    }
    drop(store);
    disk.kill();
    assert!(!disk.list().unwrap().contains(&name(0, 0)), "a damaged snapshot is not kept as a generation");
    disk.flip_bit(&name(0, 1), 8 * 300);
    let (mut store, recovery) = open(&disk, &clock, &options).unwrap();
    assert_eq!(recovery.corrupt.iter().map(|(partition, _)| *partition).collect::<Vec<_>>(), [PartitionId(0)]);
    assert_eq!(store.partitions().replica_digest(PartitionId(0)).unwrap(), None);
    assert_eq!(store.partitions().replica_digest(PartitionId(1)).unwrap(), digests[1]);
    let answers = activate(&mut store, 2);
    assert!(matches!(answers[..], [Err(ActivateError::Corrupt { .. }), Ok(())]), "{answers:?}");
    assert!(matches!(write_one(&mut store, upsert([ids[0][0]])), Err(WriteError::Corrupt { .. })));
    assert!(write(&mut store, vec![(PartitionId(1), reinforce(&ids[1], 7))])[0].is_ok());
    assert_eq!(
        disk.list().unwrap().iter().filter(|file| **file == name(0, 1)).count(),
        1,
        "the file is kept for repair"
    );
}

#[test]
fn an_idle_partition_does_not_keep_the_log_from_being_deleted() {
    let (disk, clock, options) = (SimDisk::new(1), Arc::new(ManualClock::new(0)), options(2));
    let mut store = serving(&disk, &clock, &options);
    let busy: Vec<u64> = ids_of(1, 2).take(200).collect();
    write_one(&mut store, upsert(ids_of(0, 2).take(10))).unwrap();
    write(&mut store, vec![(PartitionId(1), upsert(busy.clone()))]);
    let mut most = 0;
    for _ in 0..300 {
        write(&mut store, vec![(PartitionId(1), reinforce(&busy, 7))]);
        most = most.max(store.stats().log_bytes);
    }
    assert!(most < 10 * options.snapshot_bytes, "{most} bytes of log");
    drop(store);
    disk.kill();
    assert_eq!(open(&disk, &clock, &options).unwrap().0.partitions().memories(), 210);
}

#[test]
fn snapshots_restore_into_an_empty_store_with_their_slot_order() {
    let (disk, clock, options) = (SimDisk::new(1), Arc::new(ManualClock::new(0)), options(3));
    let mut store = serving(&disk, &clock, &options);
    for partition in 0..3 {
        let ids: Vec<u64> = ids_of(partition, 3).take(500).collect();
        let remove = Command::Remove { ids: ids[..100].iter().copied().map(MemoryId).collect() };
        let records = [upsert(ids.clone()), Record::bare(remove), reinforce(&ids[200..], -999)];
        write(&mut store, records.map(|record| (PartitionId(partition), record)).to_vec());
    }
    let (backup, done) = (SimDisk::new(2), Arc::new(Mutex::new(None)));
    let slot = Arc::clone(&done);
    store.snapshot_all(Some(Arc::new(backup.clone())), move |result| *slot.lock() = Some(result));
    store.turn().unwrap();
    assert_eq!(done.lock().take().unwrap().unwrap().len(), 3);
    let empty = SimDisk::new(3);
    let target: Arc<dyn Disk> = Arc::new(empty.clone());
    let install = |wanted: &dyn Fn(PartitionId) -> bool| {
        restore::install(&target, options.cluster, options.shape, &backup, wanted)
    };
    assert_eq!(install(&|partition| partition.0 < 2).unwrap().len(), 2);
    assert!(matches!(install(&|_| true), Err(Error::NotEmpty { .. })));
    let (mut restored, _) = open(&empty, &clock, &options).unwrap();
    for partition in [PartitionId(0), PartitionId(1)] {
        assert_eq!(restored.partitions().export(partition).unwrap(), store.partitions().export(partition).unwrap());
    }
    assert!(!restored.partitions().contains(PartitionId(2)));
    let again = activate(&mut restored, 1);
    assert!(matches!(
        again[..],
        [Err(ActivateError::TermPromised { .. }), Err(ActivateError::TermPromised { .. }), Ok(())]
    ));
    assert!(activate(&mut restored, 2).iter().all(Result::is_ok));
    let next = Lsn(store.applied(PartitionId(0)).1.0 + 1);
    assert_eq!(write_one(&mut restored, upsert(ids_of(0, 3).take(1))).unwrap().lsn, next);
}

#[test]
fn sessions_expire_after_a_day() {
    const HOUR_MS: u64 = 3_600_000;
    let (disk, clock, options) = (SimDisk::new(1), Arc::new(ManualClock::new(48 * HOUR_MS)), options(1));
    let mut store = serving(&disk, &clock, &options);
    let request = |hours| Some(Request { session: SessionId { opened_ms: hours * HOUR_MS, random: 1 }, seq: 1 });
    for hours in [30, 47] {
        write_one(&mut store, Record { request: request(hours), ..upsert([hours]) }).unwrap();
    }
    clock.advance(10 * HOUR_MS);
    store.turn().unwrap();
    let sessions = &store.partitions().ledger(PartitionId(0)).unwrap().sessions;
    assert_eq!((sessions.len(), sessions.watermark_ms()), (1, 34 * HOUR_MS));
    let late = write_one(&mut store, Record { request: request(30), ..upsert([1]) }).unwrap();
    assert_eq!(late.reply, Reply::Refused(Refusal::SessionExpired));
}

#[test]
fn clock_step_of_days_expires_no_session_and_a_new_one_is_valid() {
    const HOUR_MS: u64 = 3_600_000;
    let (disk, clock, options) = (SimDisk::new(1), Arc::new(ManualClock::new(4_800 * HOUR_MS)), options(1));
    let mut store = serving(&disk, &clock, &options);
    let request = |opened_ms, seq| Some(Request { session: SessionId { opened_ms, random: 1 }, seq });
    let opened_ms = store.session_clock().opening_ms();
    write_one(&mut store, Record { request: request(opened_ms, 1), ..upsert([1]) }).unwrap();
    for wrong_ms in [(4_800 + 960) * HOUR_MS, 0] {
        clock.set_wall(wrong_ms);
        clock.advance(HOUR_MS);
        store.turn().unwrap();
        clock.set_wall(4_802 * HOUR_MS);
        let again = write_one(&mut store, Record { request: request(opened_ms, 1), ..upsert([1]) }).unwrap();
        assert!(matches!(again.reply, Reply::Applied(_)), "{:?} after a step to {wrong_ms}", again.reply);
    }
    // A watermark that an earlier version raised: a new session is above it, also by a clock that is behind, and after a restart.
    let raised_ms = 6_000 * HOUR_MS;
    write_one(&mut store, Record::bare(Command::ExpireSessions { before_ms: raised_ms })).unwrap();
    for term in [1, 2] {
        let request = request(store.session_clock().opening_ms(), 1);
        let reply = write_one(&mut store, Record { request, ..upsert([2]) }).unwrap().reply;
        assert!(matches!(reply, Reply::Applied(_)), "{reply:?} at term {term}");
        drop(store);
        store = open(&disk, &clock, &options).unwrap().0;
        assert!(activate(&mut store, term + 1).iter().all(Result::is_ok));
    }
}

#[test]
fn store_on_a_full_disk_starts_again_and_again_and_serves_reads() {
    let (disk, clock, mut options) = (SimDisk::new(1), Arc::new(ManualClock::new(0)), options(1));
    options.wal.segment_bytes = 4 << 20;
    options.reserve_bytes = 1 << 20;
    let mut store = serving(&disk, &clock, &options);
    write_one(&mut store, upsert(0..100)).unwrap();
    for term in 2..8 {
        drop(store);
        disk.kill();
        // The first stop freed the preallocated rest of the log. Other programs have taken all but the reserve.
        let mut used = 0;
        for name in disk.list().unwrap() {
            let mut bytes = disk.bytes(&name);
            if name.starts_with("wal-") && term == 2 {
                let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
                bytes.truncate(end.next_multiple_of(4_096));
                disk.put(&name, &bytes);
            }
            used += bytes.len() as u64;
        }
        disk.set_capacity(Some(used));
        let (opened, recovery) = open(&disk, &clock, &options).unwrap();
        store = opened;
        assert!(recovery.disk_full, "term {term}: {recovery:?}");
        assert!(activate(&mut store, term).iter().all(Result::is_ok), "term {term}");
        assert_eq!((weight(&mut store, 5), store.partitions().memories()), (1 << 29, 100));
        let written = write_one(&mut store, upsert(100..60_000));
        assert!(matches!(written, Err(WriteError::DiskFull { .. })), "term {term}: {written:?}");
    }
    disk.set_capacity(None);
    write_one(&mut store, upsert(100..3_000)).unwrap();
}
