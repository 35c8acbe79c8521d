//! The store on a simulated disk: whatever was answered is there after any crash, and nothing else but what was asked.

use engram_kernels::Cpu;
use engram_memory::testing::World;
use engram_memory::{
    CapacityPolicy, ClusterId, Command, Digest, FeatureShape, FeatureType, Law, LearningEpoch, Lsn, MemoryId,
    OnMissing, Outcome, PartitionId, Record, Refusal, Reply, Request, RunId, SessionId, Settings, Shape, Term, Updates,
    Upsert, reference,
};
use engram_store::{
    ActivateError, Committed, Disk, Durability, Error, ManualClock, Options, SimDisk, SnapshotReader, SnapshotWriter,
    Store, WriteError, disk, snapshot_file,
};
use proptest::prelude::*;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

type Answer = Result<Committed, WriteError>;

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

/// Writes and takes a turn; all answers.
fn write(store: &mut Store, records: Vec<(PartitionId, Record)>) -> Vec<Answer> {
    let answers = Arc::new(Mutex::new(None));
    let place = Arc::clone(&answers);
    store.write(records, move |answers| *place.lock().unwrap() = Some(answers));
    store.turn().unwrap();
    answers.lock().unwrap().take().expect("a turn answers everything")
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

/// What is known of a partition from outside: the state that was certain, and what was asked since.
struct Model {
    certain: reference::Partition,
    /// Its lsn.
    lsn: Lsn,
    /// Asked since, with the answer where there was one. What has no answer may have been lost.
    asked: Vec<(Record, Arc<Mutex<Option<Answer>>>)>,
}

impl Model {
    /// Applies what was answered, checks the answers, and goes on as far as `found` says that the unanswered was kept.
    fn settle(&mut self, found: Option<(Digest, Lsn)>) -> Result<(), TestCaseError> {
        let mut lsn = self.lsn;
        let mut logged = None;
        for (at, (_, answer)) in self.asked.iter().enumerate() {
            // An answer without a new lsn was given without the log, perhaps while the log failed.
            if let Some(Ok(committed)) = &*answer.lock().unwrap()
                && committed.lsn > lsn
            {
                (lsn, logged) = (committed.lsn, Some(at));
            }
        }
        for (at, (record, answer)) in std::mem::take(&mut self.asked).into_iter().enumerate() {
            if logged.is_none_or(|last| at > last)
                && found.is_some_and(|(found, _)| self.certain.replica_digest() == found)
            {
                break;
            }
            match answer.lock().unwrap().take() {
                Some(Err(WriteError::Capacity { .. })) => {}
                Some(Ok(committed)) => {
                    let expected = self.certain.apply(&record);
                    // A repeat is answered as its first was, also when something between the two made that be forgotten.
                    let forgotten =
                        matches!(expected, Reply::Refused(Refusal::SessionExpired | Refusal::AlreadyClosed));
                    if !forgotten {
                        prop_assert_eq!(committed.reply, expected, "{:?}", record);
                    }
                }
                Some(Err(WriteError::Failed { .. })) if found.is_some() => drop(self.certain.apply(&record)),
                None => drop(self.certain.apply(&record)),
                Some(Err(error)) => prop_assert!(false, "{}", error),
            }
        }
        if let Some((found, lsn)) = found {
            self.lsn = lsn;
            prop_assert_eq!(self.certain.replica_digest(), found, "what was found is no state that was asked for");
        }
        Ok(())
    }
}

/// Activates every partition, which configures those that differ and is durable in every mode.
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
        assert_eq!(store.applied(PartitionId(partition as u32)).1, model.lsn);
    }
}

#[derive(Debug, Clone)]
enum Step {
    /// Proposes so many records of each partition in one call.
    Write(Vec<usize>),
    Turn,
    Wait(u64),
    /// The process is gone after so many more changes of the disk; with the power, or not.
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
        let empty = || Model { certain: reference::Partition::new(options.shape, Settings::default()), lsn: Lsn(0), asked: Vec::new() };
        let mut models: Vec<Model> = (0..partitions).map(|_| empty()).collect();
        serve(&mut store, term, settings, &mut models);
        let mut logs: Vec<_> = logs.into_iter().map(Vec::into_iter).collect();
        let mut running = Some(store);
        for step in steps {
            let mut store = running.take().expect("it was opened again");
            let mut power = false;
            running = match step {
                Step::Write(counts) => {
                    let mut batch = Vec::new();
                    let mut places = Vec::new();
                    for (partition, count) in counts.into_iter().enumerate() {
                        for record in logs[partition].by_ref().take(count) {
                            let place = Arc::new(Mutex::new(None));
                            models[partition].asked.push((record.clone(), Arc::clone(&place)));
                            batch.push((PartitionId(partition as u32), record));
                            places.push(place);
                        }
                    }
                    store.write(batch, move |answers| {
                        answers.into_iter().zip(places).for_each(|(answer, place)| *place.lock().unwrap() = Some(answer));
                    });
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
                    // Whatever it says: the process is dying.
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
            prop_assert!(recovery.corrupt.is_empty() && recovery.passed_over.is_empty(), "{:?}", recovery);
            for (partition, model) in models.iter_mut().enumerate() {
                let empty = reference::Partition::new(options.shape, Settings::default()).replica_digest();
                let found = store.partitions().replica_digest(PartitionId(partition as u32)).unwrap().unwrap_or(empty);
                if durability == Durability::Async && power {
                    // Answered is not durable in this mode: some state that was, never a mixture.
                    model.asked.iter().for_each(|(_, answer)| {
                        let mut answer = answer.lock().unwrap();
                        if matches!(*answer, Some(Ok(_))) {
                            *answer = None;
                        }
                    });
                }
                let lsn = store.applied(PartitionId(partition as u32)).1;
                model.settle(Some((found, lsn)))?;
            }
            let refused = activate(&mut store, term);
            prop_assert!(
                refused.iter().all(|answer| matches!(answer, Err(ActivateError::Promised { .. }))),
                "a promise was forgotten: {:?}", refused
            );
            term += 1;
            serve(&mut store, term, settings, &mut models);
            running = Some(store);
        }
        let mut store = running.expect("it was opened again");
        store.turn().unwrap();
        for (partition, model) in models.iter_mut().enumerate() {
            model.settle(None)?;
            let found = store.partitions().replica_digest(PartitionId(partition as u32)).unwrap();
            prop_assert_eq!(found, Some(model.certain.replica_digest()));
        }
    }
}
