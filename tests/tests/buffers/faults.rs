//! Faults while items are appended, drawn, re-prioritized and consumed: nothing acknowledged is lost, no item is done twice, and no handle is used
//! again.
//!
//! `cargo xtask chaos --buffers` runs the same campaign with more faults.

use super::{fields, items, numbers, prioritized};
use crate::cuts::{Cut, cut, enter_namespace};
use engram_client::{Batch, Buffer, BufferSpec, BufferStats, Client, Fields, Remover, Sample, SampleBy};
use engram_faults::ledger::Tally;
use engram_faults::outcome::{FaultReport, Outcome};
use engram_faults::runner::SeedRunner;
use engram_memory::MemoryId;
use engram_proto::v1::ProblemKind;
use engram_tests::{Cluster, DEADLINE, cluster_manifest, wait_for};
use rand::RngExt as _;
use rand::rngs::StdRng;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const WORKERS: usize = 3;
const REPLICAS: usize = 2;
/// Faults in CI: each takes two seconds.
const DEFAULT_COUNT: u64 = 8;
/// Longest pause or cut: over twice the time after which a silent worker loses its partitions.
const LONGEST_MS: u64 = 2_500;
/// How long an item belongs to the reader that it was delivered to.
const LEASE: Duration = Duration::from_secs(5);
/// Wait of the last reads: an item whose reader never heard of it is delivered again meanwhile.
const LAST_WAIT: Duration = Duration::from_secs(8);
/// Pause of a writer between two batches.
const PACE: Duration = Duration::from_millis(100);
/// More items than a campaign of 1,000 faults appends at that pace: a full buffer would be an error.
const CAPACITY: u64 = 1_000_000;
/// Most draws of an item of the buffer that is drawn empty.
const MAX_REUSE: u32 = 2;

/// A kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// A worker is killed.
    Kill,
    /// A worker is killed and restarts with an empty disk.
    EmptyDisk,
    /// The coordinator is killed.
    KillCoordinator,
    /// A worker is stopped for a while.
    Pause,
    /// Connections between two workers are reset for a while.
    CutLink,
    /// Packets between two workers vanish for a while.
    Swallow,
    /// Packets from one worker to another vanish, and those of the opposite direction arrive.
    SwallowOneWay,
}

const KINDS: [Fault; 7] = [
    Fault::Kill,
    Fault::EmptyDisk,
    Fault::Pause,
    Fault::KillCoordinator,
    Fault::CutLink,
    Fault::Swallow,
    Fault::SwallowOneWay,
];

impl Fault {
    const fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill a worker",
            Self::EmptyDisk => "kill a worker, empty its disk",
            Self::KillCoordinator => "kill the coordinator",
            Self::Pause => "stop a worker",
            Self::CutLink => "reset a link",
            Self::Swallow => "cut a link",
            Self::SwallowOneWay => "cut a link one way",
        }
    }

    const fn cut(self) -> Option<Cut> {
        Some(match self {
            Self::CutLink => Cut::Reset,
            Self::Swallow => Cut::BothWays,
            Self::SwallowOneWay => Cut::OneWay,
            Self::Kill | Self::EmptyDisk | Self::KillCoordinator | Self::Pause => return None,
        })
    }
}

/// Injects a fault and ends it. A link that cannot be cut, for which `can_cut` or a connection is missing, is replaced by a pause.
fn inject(cluster: &mut Cluster, can_cut: bool, fault: Fault, draws: &mut StdRng) -> (Fault, String) {
    let worker = draws.random_range(0..WORKERS);
    let other = (worker + draws.random_range(1..WORKERS)) % WORKERS;
    let lasts = Duration::from_millis(draws.random_range(50..LONGEST_MS));
    let process = |ordinal| wait_for("a process", DEADLINE, || cluster.worker(ordinal));
    let (pid, peer) = (process(worker), process(other));
    if let Some(kind) = fault.cut().filter(|_| can_cut)
        && cut(kind, (pid, peer), lasts) > 0
    {
        return (fault, format!("workers {worker} and {other}, {lasts:?}"));
    }
    match fault {
        Fault::Kill => {
            cluster.kill(pid);
            cluster.wait_for_restart(worker, pid);
        }
        Fault::EmptyDisk => {
            let disk = cluster.state_dir().join("workers").join(worker.to_string());
            let taken = disk.with_extension("taken");
            // A stopped process writes nothing while its disk is exchanged.
            cluster.pause(pid);
            fs::rename(&disk, &taken).expect("the disk can be moved");
            fs::create_dir(&disk).expect("an empty one can be made");
            cluster.kill(pid);
            cluster.wait_for_restart(worker, pid);
            fs::remove_dir_all(taken).expect("the moved one can be removed");
        }
        Fault::KillCoordinator => {
            let pid = wait_for("the coordinator", DEADLINE, || cluster.coordinator());
            cluster.kill(pid);
            wait_for("another coordinator", DEADLINE, || cluster.coordinator().filter(|it| *it != pid));
            return (fault, "the coordinator".into());
        }
        Fault::Pause | Fault::CutLink | Fault::Swallow | Fault::SwallowOneWay => {
            cluster.pause(pid);
            std::thread::sleep(lasts);
            cluster.resume(pid);
            return (Fault::Pause, format!("worker {worker}, {lasts:?}"));
        }
    }
    (fault, format!("worker {worker}"))
}

/// What the loops did.
#[derive(Debug, Default)]
struct Done {
    /// Number of each item.
    appended: BTreeMap<MemoryId, usize>,
    /// Items that the readers of one consumer got.
    consumed: BTreeSet<MemoryId>,
    /// Acknowledgments that counted.
    acknowledged: u64,
    samples: u32,
    /// The last priority that was set, of items that were drawn.
    priorities: BTreeMap<MemoryId, f64>,
    reused: Reused,
}

/// Items of the buffer that is drawn empty, and how often each was drawn.
#[derive(Debug, Default)]
struct Reused {
    appended: BTreeSet<MemoryId>,
    drawn: BTreeMap<MemoryId, u32>,
}

async fn append_until(buffer: &Buffer, first: usize, done: &AtomicBool) -> BTreeMap<MemoryId, usize> {
    let mut appended = BTreeMap::new();
    let mut next = first;
    while !done.load(Ordering::Relaxed) {
        let handles = buffer.append(items(next..next + 20, |it| 1.0 + (it % 5) as f64)).await.unwrap().handles;
        for (row, handle) in handles.into_iter().enumerate() {
            assert_eq!(appended.insert(handle, next + row), None, "a handle was used twice");
        }
        next += 20;
        tokio::time::sleep(PACE).await;
    }
    appended
}

/// Draws and sets priorities, with a deleted item in each update: it counts as stale, once. Returns the number of draws, and the last priority of
/// each item.
async fn learn_until(buffer: &Buffer, deleted: MemoryId, done: &AtomicBool) -> (u32, BTreeMap<MemoryId, f64>) {
    let (mut step, mut priorities) = (0, BTreeMap::new());
    while !done.load(Ordering::Relaxed) {
        let sample = Sample { wait: Duration::from_secs(20), ..prioritized(32, step.into()) };
        let batch = buffer.sample(sample).await.unwrap();
        assert_eq!(batch.len(), 32);
        // Differs from step to step: an update that is lost, or applied again after the next one, shows.
        let priority = 2.0 + f64::from(step % 64);
        let mut handles: Vec<MemoryId> = BTreeSet::from_iter(batch.handles).into_iter().collect();
        priorities.extend(handles.iter().map(|handle| (*handle, priority)));
        handles.push(deleted);
        let changed = buffer.update_priorities(&handles, &vec![priority; handles.len()]).await.unwrap();
        assert_eq!((changed.applied, changed.stale), (handles.len() as u64 - 1, 1), "step {step}");
        step += 1;
    }
    (step, priorities)
}

/// Reads as one of the readers of a consumer until there is nothing left after `done`. Returns the items that it got, and the number of its
/// acknowledgments that counted.
async fn consume_until(buffer: &Buffer, done: &AtomicBool) -> (BTreeSet<MemoryId>, u64) {
    let (mut consumed, mut acknowledged) = (BTreeSet::new(), 0);
    loop {
        let last = done.load(Ordering::Relaxed);
        let wait = if last { LAST_WAIT } else { Duration::from_millis(200) };
        match buffer.consume("learner", 64, LEASE, wait, Fields::None).await {
            Ok(batch) => {
                acknowledged += buffer.acknowledge_batch("learner", &batch).await.unwrap().applied;
                consumed.extend(batch.handles);
            }
            Err(error) if error.kind() == ProblemKind::BufferWait && last => return (consumed, acknowledged),
            Err(error) => assert_eq!(error.kind(), ProblemKind::BufferWait, "{error}"),
        }
    }
}

/// Appends to a buffer whose items leave it after some draws, draws from it, and in the end draws what is left.
async fn reuse_until(buffer: &Buffer, done: &AtomicBool) -> Reused {
    let mut reused = Reused::default();
    let mut next = 0;
    while !done.load(Ordering::Relaxed) {
        reused.appended.extend(buffer.append(items(next..next + 20, |_| 1.0)).await.unwrap().handles);
        next += 20;
        for _ in 0..MAX_REUSE {
            reused.draw(buffer, 16).await;
        }
        tokio::time::sleep(PACE).await;
    }
    loop {
        let left = buffer.stats().await.unwrap().items;
        if left == 0 {
            return reused;
        }
        reused.draw(buffer, left.min(64) as u32).await;
    }
}

impl Reused {
    async fn draw(&mut self, buffer: &Buffer, count: u32) {
        let sample = Sample { wait: Duration::from_secs(20), ..Sample::new(SampleBy::Fifo, count, 0, 0) };
        let batch = buffer.sample(sample).await.unwrap();
        batch.handles.iter().for_each(|handle| *self.drawn.entry(*handle).or_default() += 1);
    }
}

/// Runs all loops until `stop`, and checks what they left.
async fn load(client: &Client, stop: &AtomicBool) -> Done {
    let spec = |name| BufferSpec { remover: Remover::Refuse, ..BufferSpec::new(name, fields(), CAPACITY) };
    let buffer = client.create_buffer(&spec("train")).await.unwrap();
    let spec = BufferSpec { max_reuse: MAX_REUSE, ..spec("reused") };
    let reused = client.create_buffer(&spec).await.unwrap();
    let deleted = buffer.append(items(0..1, |_| 1.0)).await.unwrap().handles[0];
    assert_eq!(buffer.delete(&[deleted]).await.unwrap().applied, 1);
    let (mut appended, second, (samples, priorities), one, other, reuse) = tokio::join!(
        append_until(&buffer, 0, stop),
        append_until(&buffer, 1_000_000, stop),
        learn_until(&buffer, deleted, stop),
        consume_until(&buffer, stop),
        consume_until(&buffer, stop),
        reuse_until(&reused, stop),
    );
    for (handle, number) in second {
        assert_eq!(appended.insert(handle, number), None, "a handle was used twice");
    }
    let consumed = one.0.union(&other.0).copied().collect();
    let done = Done { appended, consumed, acknowledged: one.1 + other.1, samples, priorities, reused: reuse };
    check(&buffer, &done).await;
    check_reused(&reused, &done.reused).await;
    done
}

async fn check(buffer: &Buffer, done: &Done) {
    let handles: Vec<MemoryId> = done.appended.keys().copied().collect();
    let found = buffer.get(&handles, Fields::All).await.unwrap();
    assert_eq!(found.missing, [], "acknowledged items are lost");
    let expected: Vec<usize> = done.appended.values().map(|number| *number as f32 as usize).collect();
    assert_eq!(numbers(&found), expected);
    for (row, handle) in handles.iter().enumerate() {
        let appended = 1.0 + (done.appended[handle] % 5) as f64;
        let expected = done.priorities.get(handle).copied().unwrap_or(appended);
        let found = found.priorities[row];
        assert!(
            (found - expected).abs() < 1e-3 * expected,
            "priority {found} of {handle:?}, the last one set is {expected}"
        );
    }
    let stats = buffer.stats().await.unwrap();
    assert_eq!((stats.items, stats.deleted), (handles.len() as u64, 1));
    assert_eq!(stats.appended, stats.items + 1);
    assert!(stats.consumers.iter().all(|consumer| consumer.leased == 0), "{:?}", stats.consumers);
    assert_eq!(done.consumed, handles.iter().copied().collect(), "items were not consumed, or never appended");
}

async fn check_reused(buffer: &Buffer, reused: &Reused) {
    let stats = buffer.stats().await.unwrap();
    assert_eq!((stats.items, stats.appended), (0, reused.appended.len() as u64));
    let often: Vec<_> = reused.drawn.iter().filter(|(_, times)| **times > MAX_REUSE).collect();
    assert!(often.is_empty(), "drawn too often: {often:?}");
    let is_appended = |handle: &MemoryId| reused.appended.contains(handle);
    assert!(reused.drawn.keys().all(is_appended), "an item was drawn that was never appended");
}

/// What must survive a kill: statistics, a draw with its importance weights (by the smallest priority), and what the consumer has had.
async fn state(client: &Client, done: &Done) -> (BufferStats, Batch) {
    let buffer = client.buffer("train").await.unwrap();
    let again = buffer.consume("learner", 64, LEASE, Duration::ZERO, Fields::None).await;
    assert_eq!(again.unwrap_err().kind(), ProblemKind::BufferWait, "an item is consumed twice");
    let handles: Vec<MemoryId> = done.consumed.iter().copied().take(100).collect();
    let acknowledged = buffer.acknowledge("learner", &handles).await.unwrap();
    assert_eq!((acknowledged.applied, acknowledged.stale), (0, handles.len() as u64));
    let stats = buffer.stats().await.unwrap();
    (stats, buffer.sample(prioritized(64, 7)).await.unwrap())
}

/// Kills a worker while nothing changes: statistics, draws and cursors are the same to the bit.
fn check_after_kill(cluster: &mut Cluster, done: &Done) {
    let before = cluster.client(async |client| state(&client, done).await);
    let pid = wait_for("the victim to be running", DEADLINE, || cluster.worker(0));
    cluster.kill(pid);
    cluster.wait_for_restart(0, pid);
    cluster.wait_until_replicated(REPLICAS);
    assert_eq!(cluster.client(async |client| state(&client, done).await), before);
}

/// Writes the result for `cargo xtask chaos --buffers`.
fn write_report(path: &str, outcome: &Outcome, done: &Done) {
    let report = serde_json::json!({
        "outcome": outcome,
        "consumed": done.acknowledged,
        "draws": done.samples,
        "reused": done.reused.appended.len(),
        "reusedDraws": done.reused.drawn.values().sum::<u32>(),
    });
    fs::write(path, report.to_string()).expect("failed to write the report");
}

#[test]
fn faults_lose_no_item_and_let_none_be_consumed_twice() {
    let number = |variable: &str| std::env::var(variable).ok()?.parse::<u64>().ok();
    let count = number("ENGRAM_BUFFER_FAULTS").unwrap_or(DEFAULT_COUNT);
    let seed = number("ENGRAM_BUFFER_SEED").unwrap_or(7);
    println!("cargo xtask chaos --buffers --count {count} --seed {seed}");
    let namespace = enter_namespace();
    if let Err(reason) = &namespace {
        println!("links are not cut: {reason}");
    }
    let extra = format!("  replicationFactor: {REPLICAS}\n  partitions: 8\n  durability: {{ mode: Replicated }}\n");
    let mut cluster = Cluster::up(&cluster_manifest("faults", WORKERS as u32, &extra));
    cluster.wait_until_replicated(REPLICAS);
    let options = cluster.client(async |client| client.options().clone());
    let stop = Arc::new(AtomicBool::new(false));
    let loops = {
        let stop = Arc::clone(&stop);
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            runtime.block_on(async { Box::pin(load(&Client::connect(options).await.unwrap(), &stop)).await })
        })
    };
    let mut runner = SeedRunner::new(seed, count as usize);
    while let Some(number) = runner.next_fault().filter(|_| !loops.is_finished()) {
        std::thread::sleep(Duration::from_millis(runner.draws().random_range(100..600)));
        // The map of the last fault's first moments may not have shown it yet.
        cluster.wait_until_replicated(REPLICAS);
        let began = Instant::now();
        // Each kind in turn.
        let kind = KINDS[(number - 1) % KINDS.len()];
        let (kind, target) = inject(&mut cluster, namespace.is_ok(), kind, runner.draws());
        cluster.wait_until_replicated(REPLICAS);
        let fault = FaultReport { kind: kind.name(), target, restored: began.elapsed(), ..FaultReport::default() };
        println!("{number} of {count}: {}, {}: {:.1?} until all replicas", fault.kind, fault.target, fault.restored);
        let _ = runner.note(Ok(fault));
    }
    stop.store(true, Ordering::Relaxed);
    let done = loops.join().expect("no loop failed");
    let (appended, consumed) = (done.appended.len() as u64, done.consumed.len() as u64);
    let drawn: u32 = done.reused.drawn.values().sum();
    println!(
        "{appended} items appended and consumed, {} draws; {} items drawn {drawn} times",
        done.samples,
        done.reused.appended.len()
    );
    assert!(appended > 100 && done.samples > 3 && drawn > 100, "too little was done under faults");
    // Each item was delivered at least once: more acknowledgments than items are items that were done twice.
    runner.outcome().ledger = Some(Tally {
        operations: appended,
        acked: appended,
        lost: appended - consumed,
        doubled: done.acknowledged.saturating_sub(appended),
        ..Tally::default()
    });
    let outcome = runner.finish();
    assert_eq!(outcome.violations(), [""; 0]);
    assert_eq!(done.acknowledged, appended, "an item was never acknowledged");
    check_after_kill(&mut cluster, &done);
    if let Ok(path) = std::env::var("ENGRAM_BUFFER_REPORT") {
        write_report(&path, &outcome, &done);
    }
    cluster.stop();
}
