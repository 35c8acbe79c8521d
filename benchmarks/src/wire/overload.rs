//! Twice the capacity of a cluster: rejections, latency of accepted requests, and memory, compared with half of the capacity.
//!
//! The cluster consists of processes, as started by `engram up`, so that their memory can be measured. Requests arrive on a schedule, regardless of
//! responses, as from many users: a cluster that accepts more than it can process only delays all of them. Requests are not retried, and a caller
//! without a response gives up after [`PATIENCE`]. Each is one message to the primary's worker, without the client library. The cluster has half of
//! the processors for itself, and the load generator has the others.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use engram_client::Placement;
use engram_memory::{mix64, partition_of};
use engram_proto::v1::memory_service_client::MemoryServiceClient;
use engram_proto::v1::{self, ProblemKind};
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use serde_json::json;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio::time::interval;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::echo::connected;
use super::processes::Cluster;
use crate::measure;
use crate::population::{self, QUALITY};
use crate::row::{Budget, Figure, Row};

const WORKERS: usize = 3;
/// Updates of a request, of one partition: so many that the store dominates. For small requests the calls dominate, and the load generator would
/// need more processors than the cluster.
const UPDATES: usize = 4_096;
/// Connections to each worker, each with a limit of concurrent calls.
const CONNECTIONS: usize = 8;
/// Requests in flight while capacity is measured, and for how long.
const FULL_WRITERS: usize = 64;
const FULL: Duration = Duration::from_secs(10);
/// Offered load relative to capacity: the intended load, and overload.
const HALF: f64 = 0.5;
const HALF_LASTS: Duration = Duration::from_secs(15);
const TIMES: f64 = 2.0;
/// Timeout of a caller.
const PATIENCE: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(1);
/// The calling thread.
const THIS: Pid = Pid::from_raw(0);
/// Names of the figures at capacity, and at half of it.
const FULL_NAME: &str = "at capacity";
const HALF_NAME: &str = "at half load";

pub(super) fn overload_rows(runtime: &Runtime, memories: u32, lasts: Duration, scratch: &Path) -> Result<Vec<Row>> {
    eprintln!("overload: {memories} memories on {WORKERS} workers, for {} s", lasts.as_secs());
    let shared = CpuSplit::split(sched_getaffinity(THIS)?);
    let spec = json!({ "workers": WORKERS, "replicationFactor": 2 });
    let cluster = Cluster::start(scratch, &spec, |command| shared.spawn(command))?;
    runtime.block_on(async {
        let load = Arc::new(Load::new(&cluster, memories).await?);
        let full = at_capacity(&load).await?;
        let capacity = full.accepted_ms.len() as f64 / FULL.as_secs_f64();
        eprintln!(
            "overload: capacity is {capacity:.0} requests per second; now {HALF} times as many, then {TIMES} times"
        );
        let half = run_at_rate(&cluster, &load, capacity * HALF, HALF_LASTS).await?;
        let over = run_at_rate(&cluster, &load, capacity * TIMES, lasts).await?;
        Ok(table(memories, capacity, &half, &over))
    })
}

/// Division of the processors, in effect until dropped.
struct CpuSplit {
    all: CpuSet,
    cluster: CpuSet,
    load: CpuSet,
}

impl CpuSplit {
    /// Divides `all` into halves; a single processor is shared.
    fn split(all: CpuSet) -> Self {
        let numbers: Vec<usize> = (0..CpuSet::count()).filter(|&it| all.is_set(it) == Ok(true)).collect();
        let of = |numbers: &[usize]| {
            let mut set = CpuSet::new();
            numbers.iter().for_each(|&it| set.set(it).expect("the processor is in a set of the same size"));
            set
        };
        let (load, cluster) = numbers.split_at(numbers.len() / 2);
        if load.is_empty() {
            eprintln!("overload: load generator and cluster share one processor");
            return Self { cluster: all, load: all, all };
        }
        Self { cluster: of(cluster), load: of(load), all }
    }

    /// Starts a process on the processors of the cluster; its children inherit them.
    fn spawn(&self, command: &mut Command) -> Result<Child> {
        sched_setaffinity(THIS, &self.cluster)?;
        let spawned = command.spawn();
        restrict(&self.load)?;
        Ok(spawned?)
    }
}

impl Drop for CpuSplit {
    fn drop(&mut self) {
        // Later measurements run in their own process.
        let _ = restrict(&self.all);
    }
}

/// Restricts every thread of this process to processors.
fn restrict(to: &CpuSet) -> Result<()> {
    for thread in fs::read_dir("/proc/self/task").context("failed to list the threads of this process")? {
        let number = thread?.file_name().to_string_lossy().parse().context("invalid thread id")?;
        // The thread has exited meanwhile.
        match sched_setaffinity(Pid::from_raw(number), to) {
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(error) => return Err(error).context("failed to restrict a thread"),
        }
    }
    Ok(())
}

/// Results of requests on a schedule.
struct Phase {
    tally: Tally,
    lasted: Duration,
    /// Peak memory of the workers.
    most_mib: f64,
}

impl Phase {
    fn per_second(&self, count: usize) -> Figure {
        measure::once(count as f64 / self.lasted.as_secs_f64())
    }
}

fn table(memories: u32, capacity: f64, half: &Phase, over: &Phase) -> Vec<Row> {
    let name = format!("{TIMES} times capacity, writes of {UPDATES} updates");
    // Three times as long at most.
    let at_least = 1.0 / 3.0;
    let of_accepted = |share, says: &str| {
        Row::lower(format!("{name}: {says} of those accepted"), memories, "ms", over.tally.quantile(share))
            .with_peer(HALF_NAME, half.tally.quantile(share))
            .with_budgets([Budget::Ratio { peer: HALF_NAME.to_owned(), at_least }])
    };
    let rate = |says: &str, count: fn(&Tally) -> usize| {
        let row = format!("{name}: {says}");
        Row::lower(row, memories, "requests/s", over.per_second(count(&over.tally)))
            .with_peer(HALF_NAME, half.per_second(count(&half.tally)))
    };
    vec![
        Row::higher(format!("{name}: accepted"), memories, "requests/s", over.per_second(over.tally.accepted_ms.len()))
            .with_peer(FULL_NAME, measure::once(capacity)),
        rate("rejected with a reason", |tally| tally.refused),
        rate("timed out", |tally| tally.unanswered),
        of_accepted(0.5, "p50"),
        of_accepted(0.99, "p99"),
        Row::lower(format!("{name}: peak memory of all workers"), memories, "MiB", measure::once(over.most_mib))
            .with_peer(HALF_NAME, measure::once(half.most_mib)),
    ]
}

/// Counts of requests by outcome.
#[derive(Debug, Default)]
struct Tally {
    /// Durations of successful requests in milliseconds.
    accepted_ms: Vec<f64>,
    /// Rejections with a reason.
    refused: usize,
    /// Requests without a response.
    unanswered: usize,
}

impl Tally {
    fn note(&mut self, duration: Duration, result: &Result<(), Status>) {
        let is_explained = |status: &Status| {
            let problem = v1::Problem::from_status(status);
            let says_when = problem.is_some_and(|it| it.kind() == ProblemKind::Overloaded && it.retry_after_ms > 0);
            says_when && status.code() == Code::ResourceExhausted
        };
        match result {
            Ok(()) => self.accepted_ms.push(duration.as_secs_f64() * 1e3),
            Err(status) if is_explained(status) => self.refused += 1,
            Err(_) => self.unanswered += 1,
        }
    }

    fn add(&mut self, other: Self) {
        self.accepted_ms.extend(other.accepted_ms);
        self.refused += other.refused;
        self.unanswered += other.unanswered;
    }

    fn quantile(&self, share: f64) -> Figure {
        measure::quantile(&self.accepted_ms, share)
    }
}

/// Connections to the workers, and the location of memories.
struct Load {
    /// Connections to the primary, and the memories, by partition.
    partitions: Vec<(Vec<MemoryServiceClient<Channel>>, Vec<u64>)>,
}

impl Load {
    async fn new(cluster: &Cluster, memories: u32) -> Result<Self> {
        let map = cluster.connect_and_fill(memories).await?.map()?;
        let mut ways = BTreeMap::new();
        for (ordinal, worker) in &map.workers {
            let address = worker.client_address.parse().context("invalid worker address")?;
            let mut channels = Vec::new();
            for _ in 0..CONNECTIONS {
                channels.push(MemoryServiceClient::new(connected(address).await?));
            }
            ways.insert(*ordinal, channels);
        }
        let way = |placement: &Placement| {
            Ok((ways.get(&placement.primary).context("partition has no primary")?.clone(), Vec::new()))
        };
        let mut partitions = map.partitions.iter().map(way).collect::<Result<Vec<(_, Vec<u64>)>>>()?;
        let count = partitions.len() as u32;
        for id in (0..memories).map(population::id) {
            partitions[partition_of(id, count).0 as usize].1.push(id.0);
        }
        ensure!(partitions.iter().all(|(_, ids)| !ids.is_empty()), "{memories} memories are too few");
        Ok(Self { partitions })
    }

    async fn write(&self, seed: u64) -> Result<(), Status> {
        let partition = mix64(seed) % self.partitions.len() as u64;
        let (ways, ids) = &self.partitions[partition as usize];
        let first = mix64(!seed) as usize % ids.len();
        let ids = ids.iter().copied().cycle().skip(first).take(UPDATES).collect();
        let updates = v1::Updates { ids, quality: Some(QUALITY), ..v1::Updates::default() };
        let part = v1::ReinforcePart { partition: Some(partition as u32), seq: 0, updates: Some(updates) };
        let mut request = tonic::Request::new(v1::ApplyReinforcementRequest { session: None, parts: vec![part] });
        request.set_timeout(PATIENCE);
        let answer = ways[seed as usize % ways.len()].clone().apply_reinforcement(request).await?.into_inner();
        let problem = answer.parts.into_iter().find_map(|part| match part.result {
            Some(v1::partition_result::Result::Problem(problem)) => Some(problem.into_status()),
            _ => None,
        });
        problem.map_or(Ok(()), Err)
    }
}

/// Measures capacity: each writer sends the next request after the last response.
async fn at_capacity(load: &Arc<Load>) -> Result<Tally> {
    let until = Instant::now() + FULL;
    let mut writers = JoinSet::new();
    for number in 0..FULL_WRITERS {
        let load = Arc::clone(load);
        writers.spawn(async move {
            let mut tally = Tally::default();
            let mut seed = number as u64;
            while Instant::now() < until {
                let begun = Instant::now();
                let result = load.write(seed).await;
                tally.note(begun.elapsed(), &result);
                seed += FULL_WRITERS as u64;
            }
            tally
        });
    }
    let mut all = Tally::default();
    while let Some(joined) = writers.join_next().await {
        all.add(joined.context("a writer panicked")?);
    }
    ensure!(!all.accepted_ms.is_empty(), "nothing was written");
    Ok(all)
}

/// Sends requests at a rate.
async fn run_at_rate(cluster: &Cluster, load: &Arc<Load>, rate: f64, lasts: Duration) -> Result<Phase> {
    let (mut tally, mut most_mib) = (Tally::default(), 0.0_f64);
    // As many as arrive within one timeout.
    let mut in_flight = JoinSet::new();
    let begun = Instant::now();
    let (mut sent, mut looked) = (0_u64, begun);
    let mut clock = interval(TICK);
    while begun.elapsed() < lasts {
        clock.tick().await;
        let due = (begun.elapsed().as_secs_f64() * rate) as u64;
        for seed in sent..due {
            let load = Arc::clone(load);
            let due = begun + Duration::from_secs_f64(seed as f64 / rate);
            in_flight.spawn(async move {
                let result = load.write(seed).await;
                (due.elapsed(), result)
            });
        }
        sent = due;
        while let Some(joined) = in_flight.try_join_next() {
            let (duration, result) = joined.context("a request panicked")?;
            tally.note(duration, &result);
        }
        if looked.elapsed() > Duration::from_secs(1) {
            (looked, most_mib) = (Instant::now(), most_mib.max(cluster.resident_mib()?));
        }
    }
    while let Some(joined) = in_flight.join_next().await {
        let (duration, result) = joined.context("a request panicked")?;
        tally.note(duration, &result);
    }
    Ok(Phase { tally, lasted: lasts, most_mib })
}
