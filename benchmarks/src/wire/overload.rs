//! Twice what a cluster takes: what is refused and how, what those feel that are not, and what memory it costs, beside half of what it
//! takes.
//!
//! The cluster is one of processes, as `engram up` starts them, so that their memory is theirs. Requests come on a schedule whether those
//! before them are answered or not, as from many users: a cluster that takes on more than it does only makes all of them wait. No request
//! is repeated, and who is not answered within [`PATIENCE`] gives up. Each is one message to the worker that leads its partition, without
//! the client library. Users are elsewhere: the cluster has half of the processors for itself, and whoever makes the load has the others.

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
/// Updates of a request, of one partition: so many that the work is the store's. Of small ones reading and answering calls is most of it,
/// for those who make the load as well, who would have to be more than the cluster.
const UPDATES: usize = 4_096;
/// Connections to each worker, which has room for so many calls on each.
const CONNECTIONS: usize = 8;
/// Requests under way while the highest rate is looked for, and for how long.
const FULL_WRITERS: usize = 64;
const FULL: Duration = Duration::from_secs(10);
/// Parts of that rate that come then: what a cluster is meant for, and too much.
const HALF: f64 = 0.5;
const HALF_LASTS: Duration = Duration::from_secs(15);
const TIMES: f64 = 2.0;
/// How long somebody waits for an answer.
const PATIENCE: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(1);
/// The calling thread.
const THIS: Pid = Pid::from_raw(0);
/// Names of the figures at the highest rate that is answered, and at half of it.
const FULL_NAME: &str = "at capacity";
const HALF_NAME: &str = "at half load";

pub(super) fn rows(runtime: &Runtime, memories: u32, lasts: Duration, scratch: &Path) -> Result<Vec<Row>> {
    eprintln!("overload: {memories} memories on {WORKERS} workers, for {} s", lasts.as_secs());
    let shared = Shared::among(sched_getaffinity(THIS)?);
    let spec = json!({ "workers": WORKERS, "replicationFactor": 2 });
    let cluster = Cluster::start(scratch, &spec, |command| shared.spawn(command))?;
    runtime.block_on(async {
        let load = Arc::new(Load::new(&cluster, memories).await?);
        let full = at_capacity(&load).await?;
        let capacity = full.accepted_ms.len() as f64 / FULL.as_secs_f64();
        eprintln!(
            "overload: {capacity:.0} requests a second are answered; now {HALF} times as many, then {TIMES} times"
        );
        let half = offered(&cluster, &load, capacity * HALF, HALF_LASTS).await?;
        let over = offered(&cluster, &load, capacity * TIMES, lasts).await?;
        Ok(table(memories, capacity, &half, &over))
    })
}

/// Which processors are whose, until it goes.
struct Shared {
    all: CpuSet,
    cluster: CpuSet,
    load: CpuSet,
}

impl Shared {
    /// Shares `all` out; one alone is everybody's.
    fn among(all: CpuSet) -> Self {
        let numbers: Vec<usize> = (0..CpuSet::count()).filter(|&it| all.is_set(it) == Ok(true)).collect();
        let of = |numbers: &[usize]| {
            let mut set = CpuSet::new();
            numbers.iter().for_each(|&it| set.set(it).expect("it is in a set of the same size"));
            set
        };
        let (load, cluster) = numbers.split_at(numbers.len() / 2);
        if load.is_empty() {
            eprintln!("overload: one processor, which load and cluster share");
            return Self { cluster: all, load: all, all };
        }
        Self { cluster: of(cluster), load: of(load), all }
    }

    /// Starts a process on the processors of the cluster, where its own will be as well.
    fn spawn(&self, command: &mut Command) -> Result<Child> {
        sched_setaffinity(THIS, &self.cluster)?;
        let spawned = command.spawn();
        restrict(&self.load)?;
        Ok(spawned?)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // What is measured after this is measured by a process of its own.
        let _ = restrict(&self.all);
    }
}

/// Restricts every thread of this process.
fn restrict(to: &CpuSet) -> Result<()> {
    for thread in fs::read_dir("/proc/self/task").context("failed to list the threads of this process")? {
        let number = thread?.file_name().to_string_lossy().parse().context("a thread has no number")?;
        // One that has ended meanwhile needs no processor.
        match sched_setaffinity(Pid::from_raw(number), to) {
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(error) => return Err(error).context("failed to restrict a thread"),
        }
    }
    Ok(())
}

/// What became of requests that came on a schedule.
struct Phase {
    tally: Tally,
    lasted: Duration,
    /// The most memory that the workers had meanwhile.
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
            .beside(HALF_NAME, half.tally.quantile(share))
            .promised([Budget::Ratio { peer: HALF_NAME.to_owned(), at_least }])
    };
    let rate = |says: &str, count: fn(&Tally) -> usize| {
        let row = format!("{name}: {says}");
        Row::lower(row, memories, "requests/s", over.per_second(count(&over.tally)))
            .beside(HALF_NAME, half.per_second(count(&half.tally)))
    };
    vec![
        Row::higher(format!("{name}: accepted"), memories, "requests/s", over.per_second(over.tally.accepted_ms.len()))
            .beside(FULL_NAME, measure::once(capacity)),
        rate("refused, and told why", |tally| tally.refused),
        rate("not answered in time", |tally| tally.unanswered),
        of_accepted(0.5, "p50"),
        of_accepted(0.99, "p99"),
        Row::lower(format!("{name}: memory of all workers at most"), memories, "MiB", measure::once(over.most_mib))
            .beside(HALF_NAME, measure::once(half.most_mib)),
    ]
}

/// What became of requests.
#[derive(Debug, Default)]
struct Tally {
    /// How long those took that were done, in milliseconds.
    accepted_ms: Vec<f64>,
    /// The cluster said no, and why.
    refused: usize,
    /// Nobody said anything.
    unanswered: usize,
}

impl Tally {
    fn note(&mut self, took: Duration, done: &Result<(), Status>) {
        let told = |status: &Status| {
            let problem = v1::Problem::from_status(status);
            let says_when = problem.is_some_and(|it| it.kind() == ProblemKind::Overloaded && it.retry_after_ms > 0);
            says_when && status.code() == Code::ResourceExhausted
        };
        match done {
            Ok(()) => self.accepted_ms.push(took.as_secs_f64() * 1e3),
            Err(status) if told(status) => self.refused += 1,
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

/// Ways to the workers, and what is where.
struct Load {
    /// The connections to the worker that leads, and the memories, by partition.
    partitions: Vec<(Vec<MemoryServiceClient<Channel>>, Vec<u64>)>,
}

impl Load {
    async fn new(cluster: &Cluster, memories: u32) -> Result<Self> {
        let map = cluster.filled(memories).await?.map()?;
        let mut ways = BTreeMap::new();
        for (ordinal, worker) in &map.workers {
            let address = worker.client_address.parse().context("a worker's address is none")?;
            let mut channels = Vec::new();
            for _ in 0..CONNECTIONS {
                channels.push(MemoryServiceClient::new(connected(address).await?));
            }
            ways.insert(*ordinal, channels);
        }
        let way =
            |placement: &Placement| Ok((ways.get(&placement.primary).context("nobody leads")?.clone(), Vec::new()));
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
        let mut request = tonic::Request::new(v1::ReinforceRequest { session: None, parts: vec![part] });
        request.set_timeout(PATIENCE);
        let answer = ways[seed as usize % ways.len()].clone().apply_reinforcement(request).await?.into_inner();
        let problem = answer.parts.into_iter().find_map(|part| match part.result {
            Some(v1::partition_reply::Result::Problem(problem)) => Some(problem.into_status()),
            _ => None,
        });
        problem.map_or(Ok(()), Err)
    }
}

/// Each writer sends the next request when the last is answered.
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
                let done = load.write(seed).await;
                tally.note(begun.elapsed(), &done);
                seed += FULL_WRITERS as u64;
            }
            tally
        });
    }
    let mut all = Tally::default();
    while let Some(ended) = writers.join_next().await {
        all.add(ended.context("a writer panicked")?);
    }
    ensure!(!all.accepted_ms.is_empty(), "nothing was written");
    Ok(all)
}

/// Requests as they come.
async fn offered(cluster: &Cluster, load: &Arc<Load>, rate: f64, lasts: Duration) -> Result<Phase> {
    let (mut tally, mut most_mib) = (Tally::default(), 0.0_f64);
    // As many as come within the patience of one.
    let mut under_way = JoinSet::new();
    let begun = Instant::now();
    let (mut sent, mut looked) = (0_u64, begun);
    let mut clock = interval(TICK);
    while begun.elapsed() < lasts {
        clock.tick().await;
        let due = (begun.elapsed().as_secs_f64() * rate) as u64;
        for seed in sent..due {
            let load = Arc::clone(load);
            let due = begun + Duration::from_secs_f64(seed as f64 / rate);
            under_way.spawn(async move {
                let done = load.write(seed).await;
                (due.elapsed(), done)
            });
        }
        sent = due;
        while let Some(ended) = under_way.try_join_next() {
            let (took, done) = ended.context("a request panicked")?;
            tally.note(took, &done);
        }
        if looked.elapsed() > Duration::from_secs(1) {
            (looked, most_mib) = (Instant::now(), most_mib.max(cluster.resident_mib()?));
        }
    }
    while let Some(ended) = under_way.join_next().await {
        let (took, done) = ended.context("a request panicked")?;
        tally.note(took, &done);
    }
    Ok(Phase { tally, lasted: lasts, most_mib })
}
