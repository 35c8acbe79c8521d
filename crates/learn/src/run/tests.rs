//! Runs on a cluster of reference partitions, with drivers that die at every step.

mod resume;

use super::*;
use crate::prediction::HitRate;
use crate::report::RankEntry;
use crate::source::{Content, Event, ExampleName, Origin, Population, Signal, SourceOptions, SyntheticOptions};
use engram_memory::reference::Partition;
use engram_memory::run::Table;
use engram_memory::{
    Blobs, ClusterId, Command, Digest, FeatureShape, Group, Histogram, Law, LearningEpoch, MemoryId, OnMissing,
    Outcome, PartitionId, QualityVector, Record, RunId, Settings, Shape, Updates, Upsert, Weight, edge, law,
    partition_of, run::Entry,
};
use futures::future::BoxFuture;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use tokio::sync::{Notify, watch};

const PARTITIONS: u32 = 7;

/// Reference partitions, the records of runs, and planned failures.
struct FakeClusterState {
    partitions: Vec<Partition>,
    records: Table,
    turn: Option<RunId>,
    /// Calls so far, and the call at which the driver dies.
    calls: u64,
    dies_at: Option<u64>,
    /// Calls fail at this interval, alternately before and after they took effect. It exceeds the calls of an epoch, or none would
    /// complete.
    fails_every: Option<u64>,
    /// An order that is sent once every partition has learned this epoch.
    order: Option<(LearningEpoch, Order, watch::Sender<Order>)>,
    settings: Settings,
}

#[derive(Clone)]
struct FakeCluster(Arc<Mutex<FakeClusterState>>);

impl FakeCluster {
    fn new(settings: Settings) -> Self {
        let shape = Shape { partitions: PARTITIONS, law: Law::Linear, features: FeatureShape::NONE };
        let partitions = (0..PARTITIONS).map(|_| Partition::new(shape, settings)).collect();
        Self(Arc::new(Mutex::new(FakeClusterState {
            partitions,
            records: Table::default(),
            turn: None,
            calls: 0,
            dies_at: None,
            fails_every: None,
            order: None,
            settings,
        })))
    }

    /// One call: it may fail before or after its effect, and the driver may die on either side of it.
    async fn call<T>(&self, effect: impl FnOnce(&mut FakeClusterState) -> T) -> Result<T, ClusterError> {
        let (dies, fails) = {
            let mut state = self.0.lock().unwrap();
            state.calls += 1;
            let fails =
                state.fails_every.filter(|every| state.calls.is_multiple_of(*every)).map(|every| state.calls / every);
            (state.dies_at == Some(state.calls), fails)
        };
        if dies && self.0.lock().unwrap().calls.is_multiple_of(2) {
            std::future::pending::<()>().await;
        }
        if fails.is_some_and(|fails| fails.is_multiple_of(2)) {
            return Err(ClusterError::Temporary("the request was lost".into()));
        }
        let done = effect(&mut self.0.lock().unwrap());
        if dies {
            std::future::pending::<()>().await;
        }
        if fails.is_some() {
            return Err(ClusterError::Temporary("the answer was lost".into()));
        }
        Ok(done)
    }

    fn digest_now(&self) -> String {
        let mut digest = Digest::default();
        self.0.lock().unwrap().partitions.iter().for_each(|partition| digest.merge(partition.digest()));
        digest.to_string()
    }
}

impl FakeClusterState {
    fn each(&mut self, command: impl Fn(u32) -> Command) -> Outcome {
        let mut all = Outcome::default();
        for (partition, state) in self.partitions.iter_mut().enumerate() {
            let reply = state.apply(&Record::bare(command(partition as u32)));
            all.merge(&reply.into_result().expect("a driver sends what follows"));
        }
        all
    }

    fn rank(&self) -> Vec<(Weight, MemoryId)> {
        let mut order: Vec<_> = self.partitions.iter().flat_map(Partition::rank).collect();
        order.sort_by(|a, b| law::rank_order(*a, *b));
        order
    }

    fn rank_entry(&self, id: MemoryId) -> Option<RankEntry> {
        let memory = self.partitions.iter().find_map(|partition| partition.memories().get(&id))?;
        let key = (!memory.key.is_empty()).then(|| String::from_utf8(memory.key.clone()).unwrap());
        Some(RankEntry { id, key, weight: memory.weight })
    }
}

impl Cluster for FakeCluster {
    fn facts(&self) -> ClusterFacts {
        ClusterFacts { name: "test".into(), workers: 1, partitions: PARTITIONS, rate: 0.05, initial_weight: 0.5 }
    }

    async fn acquire_turn(&self, run: RunId, _name: &str, _submitted_ms: u64) -> Result<Turn, ClusterError> {
        self.call(|state| match state.turn {
            Some(other) if other != run => Turn::Held { holder: "other".into(), runs_ahead: 0 },
            _ => {
                state.turn = Some(run);
                Turn::Granted
            }
        })
        .await
    }

    async fn release_turn(&self, run: RunId) -> Result<(), ClusterError> {
        self.call(|state| {
            if state.turn == Some(run) {
                state.turn = None;
            }
        })
        .await
    }

    async fn set_update_counting(&self, enabled: bool) -> Result<(), ClusterError> {
        self.call(|state| {
            let settings = Settings { count_updates: enabled, ..state.settings };
            state.each(|_| Command::Configure(settings));
        })
        .await
    }

    async fn populate(&self, population: &Population) -> Result<(), ClusterError> {
        let weight = edge::weight(population.initial_weight).unwrap().units();
        self.call(|state| {
            for id in population.ids() {
                let upsert = Upsert {
                    ids: vec![id],
                    weights: vec![weight],
                    groups: vec![Population::group_of(id)],
                    ..Upsert::default()
                };
                let PartitionId(partition) = partition_of(id, PARTITIONS);
                state.partitions[partition as usize].apply(&Record::bare(Command::Upsert(upsert)));
            }
        })
        .await
    }

    async fn learn(
        &self,
        run: RunId,
        n: LearningEpoch,
        decay: f64,
        content: &Content,
        on_missing: OnMissing,
        sent: &SentKeys,
    ) -> Result<EpochOutcome, ClusterError> {
        let decay = edge::setting(decay).unwrap();
        let rate = self.0.lock().unwrap().settings.rate;
        let delta = |signal: Signal| match signal {
            Signal::Quality(quality) => law::delta(rate, edge::quality(quality).unwrap()),
            Signal::Delta(delta) => edge::delta(delta).unwrap(),
        };
        let updates = |partition: u32| match content {
            Content::Groups(groups) => {
                Updates::ByGroup(groups.iter().map(|(group, signal)| (*group, delta(*signal))).collect())
            }
            Content::Events(events) => by_id(partition, events.iter().cloned(), on_missing, sent, &delta),
            Content::Noise(noise) => by_id(partition, noise.events(0..noise.memories()), on_missing, sent, &delta),
        };
        // Partitions one by one, so that a driver may die in the middle of the fan-out.
        let mut all = Outcome::default();
        for partition in 0..PARTITIONS {
            let command = Command::Epoch { run, n, decay, updates: updates(partition) };
            let reply = self.call(|state| state.partitions[partition as usize].apply(&Record::bare(command))).await?;
            all.merge(&reply.into_result().expect("a driver sends what follows"));
        }
        if let Some((_, order, driver)) = self.0.lock().unwrap().order.take_if(|order| order.0 == n) {
            driver.send(order).unwrap();
        }
        Ok(EpochOutcome {
            applied: all.applied,
            created: all.created,
            evicted: all.evicted,
            rejected: all.rejected,
            quality: all.quality.unwrap_or_default(),
        })
    }

    async fn broadcast(&self, _: RunId, _: LearningEpoch, _: &QualityVector) -> Result<(), ClusterError> {
        self.call(|_| ()).await
    }

    async fn top(&self, limit: usize) -> Result<Vec<RankEntry>, ClusterError> {
        self.call(|state| state.rank().into_iter().take(limit).filter_map(|(_, id)| state.rank_entry(id)).collect())
            .await
    }

    async fn get(&self, ids: &[MemoryId]) -> Result<Vec<RankEntry>, ClusterError> {
        self.call(|state| ids.iter().filter_map(|id| state.rank_entry(*id)).collect()).await
    }

    async fn ranked_pairs(&self, first: Group, second: Group) -> Result<Vec<(u32, bool)>, ClusterError> {
        self.call(|state| {
            let group = |id: MemoryId| state.partitions.iter().find_map(|it| it.memories().get(&id)).unwrap().group;
            let ranked = state.rank().into_iter().map(|(weight, id)| (weight.units(), group(id)));
            ranked.filter(|(_, group)| [first, second].contains(group)).map(|(w, group)| (w, group == first)).collect()
        })
        .await
    }

    async fn quality(&self) -> Result<QualityVector, ClusterError> {
        self.call(|state| {
            let mut all = QualityVector::default();
            state.partitions.iter().for_each(|partition| all.merge(&partition.quality()));
            all
        })
        .await
    }

    async fn histogram(&self, bits: u32) -> Result<Histogram, ClusterError> {
        self.call(|state| {
            let mut all = Histogram::new(bits).unwrap();
            state.partitions.iter().for_each(|partition| all.merge(&partition.histogram(bits)));
            all
        })
        .await
    }

    async fn coverage(&self, updates: u16) -> Result<Vec<(Group, u64, u64)>, ClusterError> {
        self.call(|state| {
            let mut groups = BTreeMap::new();
            for memory in state.partitions.iter().flat_map(|partition| partition.memories().values()) {
                let (covered, all) = groups.entry(memory.group).or_insert((0, 0));
                *covered += u64::from(memory.updates >= updates);
                *all += 1;
            }
            groups.into_iter().map(|(group, (covered, all))| (group, covered, all)).collect()
        })
        .await
    }

    async fn digest(&self) -> Result<Digest, ClusterError> {
        self.call(|state| {
            let mut digest = Digest::default();
            state.partitions.iter().for_each(|partition| digest.merge(partition.digest()));
            digest
        })
        .await
    }
}

fn by_id(
    partition: u32,
    events: impl Iterator<Item = Event>,
    on_missing: OnMissing,
    sent: &SentKeys,
    delta: &dyn Fn(Signal) -> i32,
) -> Updates {
    let (mut ids, mut deltas, mut keys) = (Vec::new(), Vec::new(), Blobs::default());
    for event in events.filter(|event| partition_of(event.id, PARTITIONS).0 == partition) {
        ids.push(event.id);
        deltas.push(delta(event.signal));
        keys.push(event.key.filter(|_| !sent.contains(event.id)).as_deref().unwrap_or("").as_bytes());
    }
    Updates::ById { ids, deltas, on_missing, keys: Some(keys) }
}

impl RunLog for FakeCluster {
    async fn load(&self, run: RunId) -> Result<Option<Entry>, LogError> {
        Ok(self.call(|state| state.records.get(run).cloned()).await?)
    }

    async fn record(&self, run: RunId, expected: u64, state: Vec<u8>, row: Option<Vec<u8>>) -> Result<(), LogError> {
        let written = self.call(|fake| fake.records.record(run, expected, &state, row.as_deref())).await?;
        written.map_err(|_| LogError::Superseded)
    }
}

fn run_id() -> RunId {
    RunState::run_id(ClusterId(1), "test")
}

/// Submits the run and drives it to its end, with a new driver after each death. Returns its last status.
async fn drive(cluster: &FakeCluster, job: &Job, mut deaths: impl Iterator<Item = u64>) -> Status {
    let run = run_id();
    let submitted = RunState::new("test", serde_json::Value::Null).encode();
    cluster.0.lock().unwrap().records.record(run, 0, &submitted, None).unwrap();
    loop {
        let entry = {
            let mut state = cluster.0.lock().unwrap();
            state.calls = 0;
            state.dies_at = deaths.next();
            state.records.get(run).cloned().unwrap()
        };
        let state = RunState::of(&entry).unwrap();
        if state.phase.is_final() {
            // Its driver died between the last record and the release of the turn, which is all that is left to do.
            cluster.0.lock().unwrap().turn = None;
        }
        let (status, watched) = watch::channel(Status::default());
        let (_orders, ordered) = watch::channel(Order::Continue);
        let driver =
            Driver::new(run, job.clone(), (state, entry.version), cluster.clone(), cluster.clone(), status, ordered);
        let mut task = tokio::spawn(driver.run());
        // Time is paused and advances only when all tasks wait, so a driver that hangs on a planned death is stopped here.
        match tokio::time::timeout(std::time::Duration::from_secs(3_600), &mut task).await {
            Ok(joined) => {
                joined.unwrap();
                let status = watched.borrow().clone();
                return status;
            }
            Err(_) => task.abort(),
        }
    }
}

fn sotu(top_k: &[u32], epochs: u64) -> (FakeCluster, Job) {
    let settings = Settings { initial_weight: Weight::ZERO, ..Settings::default() };
    let job = Job {
        source: SourceOptions::Example(ExampleName::StateOfTheUnion),
        epochs: Some(epochs),
        decay: 0.02,
        on_missing: OnMissing::Create,
        top_k: top_k.to_vec(),
        skip: 5,
        exact_inversion: false,
        coverage: false,
        until: Conditions::default(),
    };
    (FakeCluster::new(settings), job)
}

fn experiment(memories: u64, noise: f32) -> (FakeCluster, Job) {
    let options = SyntheticOptions { memories, noise, ..SyntheticOptions::default() };
    let job = Job {
        source: SourceOptions::Synthetic(options),
        epochs: Some(50),
        decay: 0.01,
        on_missing: OnMissing::Report,
        top_k: Vec::new(),
        skip: 0,
        exact_inversion: true,
        coverage: true,
        until: Conditions::default(),
    };
    (FakeCluster::new(Settings::default()), job)
}

fn finished(cluster: &FakeCluster, job: &Job) -> crate::report::RunReport {
    let entry = cluster.0.lock().unwrap().records.get(run_id()).cloned().unwrap();
    report(&entry, &job.source, "test").unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_run_ends_the_same_however_often_its_driver_dies_and_calls_fail() {
    let (calm, job) = sotu(&[100, 20], 24);
    let status = drive(&calm, &job, std::iter::empty()).await;
    assert_eq!((status.phase, status.epoch), (Phase::Succeeded, 24), "{status:?}");
    let undisturbed = finished(&calm, &job);
    assert_eq!(undisturbed.digest, calm.digest_now());
    assert_eq!(undisturbed.epochs.len(), 24);
    assert!(HitRate::over(undisturbed.epochs.iter().map(|row| row.hits.as_slice()))[0].memory() > 0.3);

    for seed in 1..12_u64 {
        let (state, job) = sotu(&[100, 20], 24);
        state.0.lock().unwrap().fails_every = (seed % 3 > 0).then_some(11 + seed);
        // Each driver lives slightly longer than the previous one, so that every step is interrupted somewhere.
        let deaths = (0..).map(move |turn: u64| 3 + seed + turn * (3 + seed % 5));
        let status = drive(&state, &job, deaths.take(40)).await;
        assert_eq!((status.phase, status.epoch), (Phase::Succeeded, 24), "seed {seed}: {status:?}");
        let report = finished(&state, &job);
        assert_eq!(report.digest, undisturbed.digest, "seed {seed}");
        assert_eq!(report.epochs, undisturbed.epochs, "seed {seed}");
        assert_eq!((report.top, report.fallen), (undisturbed.top.clone(), undisturbed.fallen.clone()), "seed {seed}");
    }
}

/// Drives a run until it ends or is suspended by an order during that epoch. Returns its record.
async fn drive_on(fake: &FakeCluster, job: &Job, suspended_during: Option<u64>) -> Entry {
    let run = run_id();
    let (orders, ordered) = watch::channel(Order::Continue);
    let (status, _) = watch::channel(Status::default());
    let state = {
        let mut fake = fake.0.lock().unwrap();
        let entry = fake.records.get(run).cloned().unwrap();
        let state = RunState { suspended: false, ..RunState::of(&entry).unwrap() };
        fake.records.record(run, entry.version, &state.encode(), None).unwrap();
        fake.order = suspended_during.map(|epoch| (LearningEpoch(epoch), Order::Suspend, orders));
        (state, entry.version + 1)
    };
    Driver::new(run, job.clone(), state, fake.clone(), fake.clone(), status, ordered).run().await;
    let fake = fake.0.lock().unwrap();
    assert_eq!(fake.turn, None, "the turn is free for others");
    fake.records.get(run).cloned().unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_suspended_run_resumes_with_the_next_epoch() {
    let (calm, job) = sotu(&[100, 20], 24);
    drive(&calm, &job, std::iter::empty()).await;
    let undisturbed = finished(&calm, &job);

    let (fake, job) = sotu(&[100, 20], 24);
    let submitted = RunState { suspended: true, ..RunState::new("test", serde_json::Value::Null) };
    assert_eq!(submitted.reported_phase(), Phase::Suspended, "it may be submitted so");
    fake.0.lock().unwrap().records.record(run_id(), 0, &submitted.encode(), None).unwrap();
    for stop in [1, 2, 9, 17] {
        let entry = drive_on(&fake, &job, Some(stop)).await;
        let state = RunState::of(&entry).unwrap();
        assert_eq!((state.reported_phase(), state.phase), (Phase::Suspended, Phase::Running));
        assert_eq!((state.done, entry.rows.len() as u64), (stop, stop), "a row for every epoch that is done");
        // No partition has started the next epoch: after repeated resumes every partition is at the same one.
        let fake = fake.0.lock().unwrap();
        assert!(
            fake.partitions.iter().all(|it| it.ledger().epochs.progress(run_id()).is_some_and(|it| it.done == stop))
        );
    }
    let entry = drive_on(&fake, &job, None).await;
    assert_eq!(RunState::of(&entry).unwrap().reported_phase(), Phase::Succeeded);
    let report = finished(&fake, &job);
    assert_eq!((report.digest, report.epochs), (undisturbed.digest, undisturbed.epochs));
}

#[tokio::test(start_paused = true)]
async fn the_experiment_reports_all_four_numbers() {
    let (fake, job) = experiment(1_000, 0.0);
    let status = drive(&fake, &job, [2, 9, 33].into_iter()).await;
    assert_eq!(status.phase, Phase::Succeeded, "{status:?}");
    let report = finished(&fake, &job);
    let found = report.experiment.unwrap();
    assert!((found.convergence_factor.unwrap() - 12.500_000_133_878).abs() < 1e-9, "{found:?}");
    assert_eq!((found.separation, found.inversion_ratio, found.inversion_error), (1.0, 1.0, 0.0));
    assert!(found.coverage.iter().all(|group| group.complete == 500 && group.memories == 500), "{found:?}");
    assert_eq!(report.digest, "81614da90c4f4be97e63ff0b5f2fb1ce");

    let (fake, mut job) = experiment(1_000, 0.15);
    job.until.separation = Some(0.9);
    let status = drive(&fake, &job, std::iter::empty()).await;
    assert!(status.epoch < 50 && status.metrics["separation"] >= 0.9, "{status:?}");
}

#[tokio::test(start_paused = true)]
async fn a_synthetic_run_rejects_groups_with_other_memories() {
    let (fake, job) = experiment(10, 0.0);
    let upsert = Upsert { ids: vec![MemoryId(99)], ..Upsert::default() };
    fake.0.lock().unwrap().partitions[0].apply(&Record::bare(Command::Upsert(upsert)));
    let before = fake.digest_now();
    let status = drive(&fake, &job, std::iter::empty()).await;
    assert_eq!((status.phase, status.code.as_str()), (Phase::Failed, "ENG-0306"), "{status:?}");
    assert_eq!(fake.digest_now(), before, "nothing was changed");
    assert_eq!(fake.0.lock().unwrap().turn, None, "the turn is free for others");
}

/// Returns a fixed result, or never completes.
struct FakeFetcher(Option<Result<Origin, FetchError>>, Arc<Notify>);

impl Fetcher for FakeFetcher {
    fn fetch<'a>(&'a self, _: &'a watch::Sender<Status>) -> BoxFuture<'a, Result<Origin, FetchError>> {
        self.1.notify_one();
        match &self.0 {
            Some(fetched) => Box::pin(std::future::ready(fetched.clone())),
            None => Box::pin(std::future::pending()),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_run_fetches_its_input_with_the_turn_and_can_be_stopped_meanwhile() {
    let options: engram_api::Source = serde_json::from_str(
        r#"{"events":{"s3":{"url":"s3://events/a.csv"},"columns":{"key":"k","epoch":"e"},"quality":0.75}}"#,
    )
    .unwrap();
    let mut source = SourceOptions::from_manifest(&options, std::path::Path::new("/"));
    let SourceOptions::Events(events) = &mut source else { panic!("events") };
    events.path = "s3://events/a.csv".into();
    let content = |text: &str| Some(Ok(Origin::Content(text.as_bytes().into())));
    let missing = FetchError { code: "ENG-0302", message: "failed to read s3://events/a.csv: not found".into() };
    for (fetched, order, phase, done) in [
        (content("k,e\na,1\nb,1\na,2\n"), None, Phase::Succeeded, 2),
        (content("k,e\na,1\nb,1\na,2\nc,never\n"), None, Phase::Failed, 1),
        (Some(Err(missing.clone())), None, Phase::Failed, 0),
        (None, Some(Order::Cancel), Phase::Cancelled, 0),
        (None, Some(Order::Suspend), Phase::Suspended, 0),
    ] {
        let (fake, job) = sotu(&[], 24);
        let job = Job { source: source.clone(), epochs: None, ..job };
        let submitted = RunState::new("test", serde_json::Value::Null);
        fake.0.lock().unwrap().records.record(run_id(), 0, &submitted.encode(), None).unwrap();
        let (status, watched) = watch::channel(Status::default());
        let (orders, ordered) = watch::channel(Order::Continue);
        let begun = Arc::new(Notify::new());
        let failed = fetched.as_ref().is_some_and(Result::is_err);
        let driver = Driver::new(run_id(), job, (submitted, 1), fake.clone(), fake.clone(), status, ordered)
            .with_fetcher(Box::new(FakeFetcher(fetched, Arc::clone(&begun))));
        let driver = tokio::spawn(driver.run());
        begun.notified().await;
        assert!(order.is_none() || fake.0.lock().unwrap().turn.is_some(), "it has the turn");
        order.into_iter().for_each(|order| orders.send(order).expect("the driver listens"));
        driver.await.unwrap();
        let status = watched.borrow().clone();
        assert_eq!((status.phase, status.epoch), (phase, done), "{status:?}");
        assert!(!failed || (&*status.code, &*status.message) == (missing.code, &*missing.message), "{status:?}");
        let entry = fake.0.lock().unwrap().records.get(run_id()).cloned().unwrap();
        let recorded = RunState::of(&entry).unwrap();
        assert_eq!((done > 0, &recorded.metrics), (!status.metrics.is_empty(), &status.metrics), "{recorded:?}");
        assert_eq!(status.outputs.contains_key("digest"), phase == Phase::Succeeded, "{status:?}");
        assert_eq!(fake.0.lock().unwrap().turn, None, "the turn is free for others");
    }
}

#[tokio::test]
async fn a_cancelled_run_does_not_wait_for_a_slow_input() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("events.csv");
    // Takes minutes to read, and no space.
    std::fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
    let (cluster, mut job) = sotu(&[], 1);
    job.source = SourceOptions::Events(crate::source::EventsOptions {
        path,
        origin: Origin::Disk,
        format: crate::source::Format::Auto,
        separator: None,
        columns: crate::source::Columns {
            memory: crate::source::MemoryColumn::Key("key".into()),
            time: crate::source::TimeColumn::Epoch("epoch".into()),
        },
        signal: crate::source::SignalSource::Quality(1.0),
    });
    let state = RunState::new("test", serde_json::Value::Null);
    cluster.0.lock().unwrap().records.record(run_id(), 0, &state.encode(), None).unwrap();
    let (status, watched) = watch::channel(Status::default());
    let (orders, ordered) = watch::channel(Order::Continue);
    let driver = Driver::new(run_id(), job, (state, 1), cluster.clone(), cluster, status, ordered);
    let task = tokio::spawn(driver.run());
    orders.send(Order::Cancel).unwrap();
    task.await.unwrap();
    assert_eq!(watched.borrow().phase, Phase::Cancelled);
}
