//! A campaign: one fault after another against a cluster under load, the next one when the cluster is whole again.
//!
//! First the throughput without faults is measured; during the campaign the load is a share of it, so that a machine with few
//! cores does not starve the failure detector and find faults of its own making. In the end every weight is compared with the
//! ledger, and every copy with every other one.

use crate::faults::{self, InjectError, Kind, deck, inject};
use crate::health::{Gone, Health, Unhealthy};
use crate::load::{LoadReport, Load};
use crate::network::Network;
use crate::outages::{Spread, milliseconds};
use crate::outcome::{FaultKind, Outcome, Replicas, Throughput, FaultReport};
use engram_client::Error;
use engram_memory::ClusterId;
use nix::sys::signal::Signal;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;
use tokio::time::Instant;

/// How long throughput without faults is measured.
const CLEAR: Duration = Duration::from_secs(4);
/// Before that: sessions are opened, files grow to their size, or another load sets in.
const WARM_UP: Duration = Duration::from_secs(1);
/// An operation that takes longer than this, or than three times the slowest hundredth at the same load without faults, is an
/// outage.
const SLOW: Duration = Duration::from_millis(100);
/// How long a cluster may take to be whole again before the campaign fails.
const WHOLE: Duration = Duration::from_secs(60);
/// How long every partition may take after that until it has executed another operation.
const SERVED: Duration = Duration::from_secs(20);

/// Where the processes of a cluster are. Whoever runs them starts them again when they end.
pub trait Processes {
    /// A worker's process id; `None` between its end and its restart.
    fn worker(&self, ordinal: u32) -> Option<u32>;
    /// The coordinator's.
    fn coordinator(&self) -> Option<u32>;
    /// The folder that is a worker's disk.
    fn disk(&self, ordinal: u32) -> PathBuf;
}

/// What shall be done.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Plan {
    /// Kills of processes.
    pub kills: u32,
    /// Stops of processes that go on afterwards.
    pub pauses: u32,
    /// Cuts and other faults of links.
    pub cuts: u32,
    /// How long the faults may take all together.
    pub limit: Duration,
    /// What is random comes from it: order, victims, jitter. Times of the cluster's own answers do not.
    pub seed: u64,
    /// Load during the campaign, as a share of the throughput without faults.
    pub share: f64,
    /// Workers of the cluster.
    pub workers: u32,
    /// Copies of each partition.
    pub copies: u32,
}

impl Default for Plan {
    fn default() -> Self {
        let limit = Duration::from_secs(240);
        Self { kills: 20, pauses: 5, cuts: 5, limit, seed: 0, share: 0.5, workers: 5, copies: 2 }
    }
}

/// What a campaign is about.
#[derive(Debug, Clone, Copy)]
pub struct Field<'a, P> {
    /// What shall be done.
    pub plan: &'a Plan,
    /// The processes.
    pub processes: &'a P,
    /// The links between them.
    pub network: &'a Network,
    /// Whether they are whole.
    pub health: &'a Health,
    /// Where clients reach the workers.
    pub endpoints: &'a [String],
    /// The cluster.
    pub cluster: ClusterId,
}

/// Why a campaign could not be begun. What goes wrong later is part of its outcome.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The cluster is not whole to begin with.
    #[error(transparent)]
    NotWhole(#[from] Unhealthy),
    /// The clients cannot connect.
    #[error(transparent)]
    Client(#[from] Error),
    /// Nothing was acknowledged while nothing was troubled.
    #[error("no operation was acknowledged within {} s without any fault", CLEAR.as_secs())]
    NoThroughput,
}

/// Why a campaign ended early.
#[derive(Debug, thiserror::Error)]
enum Stopped {
    #[error("{kind}, {whom}: {reason}")]
    NotWhole { kind: &'static str, whom: String, reason: Unhealthy },
    #[error("{kind}, {whom}: {} partitions are not served {} s after the cluster was whole, the first is {first}", .count, SERVED.as_secs())]
    NotServed { kind: &'static str, whom: String, count: usize, first: u32 },
    #[error("{kind}: {reason}")]
    NotDone { kind: &'static str, reason: InjectError },
    #[error("the map is not told: {0}")]
    Map(Error),
    #[error("{done} of {asked} faults were done within {} s", .limit.as_secs())]
    OutOfTime { done: usize, asked: usize, limit: Duration },
}

/// Runs a campaign; `tell` hears of each fault that is over.
///
/// # Errors
/// It could not be begun.
pub async fn run<P: Processes>(field: Field<'_, P>, mut tell: impl FnMut(&FaultReport)) -> Result<Outcome, StartError> {
    let plan = field.plan;
    let began = Instant::now();
    field.health.wait_until_healthy(&Gone::new(), WHOLE).await?;
    let load = Load::start(field.endpoints, field.cluster, SLOW).await?;
    let mut outcome = Outcome::of(plan);
    outcome.partitions = load.client().map()?.partition_count();
    tokio::time::sleep(WARM_UP).await;
    outcome.clear = measured(&load, CLEAR).await;
    if outcome.clear.operations_per_second <= 0.0 {
        return Err(StartError::NoThroughput);
    }
    load.set_rate(Some(outcome.clear.operations_per_second * plan.share));
    tokio::time::sleep(WARM_UP).await;
    outcome.calm = measured(&load, CLEAR).await;
    let slow = SLOW.max(Duration::from_secs_f64(outcome.calm.latency.p99_ms * 3.0 / 1_000.0));
    load.set_slow(slow);
    outcome.slow_ms = milliseconds(slow);

    let (acked, since) = (load.acked(), Instant::now());
    load.take_latency();
    let mut faults = Vec::new();
    let stopped = trouble(&field, &load, &mut faults, &mut tell).await.err();
    outcome.troubled.operations_per_second = (load.acked() - acked) as f64 / since.elapsed().as_secs_f64();
    outcome.troubled.latency = load.take_latency();
    let books = load.finish().await;
    let compared = match stopped {
        None => compare(&field, &books).await,
        Some(stopped) => Err(stopped.to_string()),
    };
    match compared {
        Ok(replicas) => outcome.replicas = Some(replicas),
        Err(problem) => outcome.problems.push(problem),
    }
    outcome.faults = by_kind(&faults);
    outcome.memories = books.memories() as u64;
    outcome.asked_for_fate = books.asked_for_fate();
    match books.check().await {
        Ok(tally) => outcome.ledger = Some(tally),
        Err(error) => outcome.problems.push(format!("the weights could not be read: {error}")),
    }
    outcome.network = field.network.counts();
    outcome.seconds = milliseconds(began.elapsed()) / 1_000.0;
    Ok(outcome)
}

/// Operations a second, and how long they took, over so much time.
async fn measured(load: &Load, time: Duration) -> Throughput {
    load.take_latency();
    let (acked, since) = (load.acked(), Instant::now());
    tokio::time::sleep(time).await;
    let operations_per_second = (load.acked() - acked) as f64 / since.elapsed().as_secs_f64();
    Throughput { operations_per_second, latency: load.take_latency() }
}

async fn trouble<P: Processes>(
    field: &Field<'_, P>,
    load: &Load,
    faults: &mut Vec<(Kind, FaultReport)>,
    tell: &mut impl FnMut(&FaultReport),
) -> Result<(), Stopped> {
    let plan = field.plan;
    let mut draws = StdRng::seed_from_u64(plan.seed);
    let deck = deck(plan, &mut draws);
    let until = Instant::now() + plan.limit;
    for (done, kind) in deck.iter().copied().enumerate() {
        if Instant::now() >= until {
            return Err(Stopped::OutOfTime { done, asked: deck.len(), limit: plan.limit });
        }
        let map = load.client().refreshed_map().await.map_err(Stopped::Map)?;
        let leaders: Vec<u32> = map.owners().into_iter().map(|ordinal| ordinal.0).collect();
        load.forget_longest();
        let began = Instant::now();
        let inflicted = inject(kind, field, &leaders, &mut draws).await;
        let fault = inflicted.map_err(|reason| Stopped::NotDone { kind: kind.name(), reason })?;
        let whom = fault.whom;
        let whole = field.health.wait_until_healthy(&fault.gone, WHOLE).await;
        whole.map_err(|reason| Stopped::NotWhole { kind: kind.name(), whom: whom.clone(), reason })?;
        let restored = began.elapsed();
        if let Err(behind) = load.wait_until_served(SERVED).await {
            let (count, first) = (behind.len(), behind.first().map_or(0, |partition| partition.0));
            return Err(Stopped::NotServed { kind: kind.name(), whom, count, first });
        }
        if let Some(taken) = fault.taken
            && let Err(error) = std::fs::remove_dir_all(&taken)
        {
            tracing::warn!(folder = %taken.display(), %error, "a disk that was taken out cannot be removed");
        }
        // What the victim led had to change hands, however soon it did.
        let hit = |partition| fault.victim.is_some() && map.owner(partition).map(|ordinal| ordinal.0) == fault.victim;
        let outages = load.outages(began, hit);
        let troubled = FaultReport { number: done + 1, of: deck.len(), kind: kind.name(), whom, restored, outages };
        tell(&troubled);
        faults.push((kind, troubled));
    }
    Ok(())
}

fn by_kind(faults: &[(Kind, FaultReport)]) -> Vec<FaultKind> {
    let mut kinds: BTreeMap<Kind, Vec<&FaultReport>> = BTreeMap::new();
    for (kind, fault) in faults {
        kinds.entry(*kind).or_default().push(fault);
    }
    let figures = |(kind, faults): (Kind, Vec<&FaultReport>)| FaultKind {
        kind: kind.name(),
        done: faults.len(),
        unavailable: Spread::of(faults.iter().flat_map(|fault| fault.outages.iter().copied())),
        longest: Spread::of(faults.iter().map(|fault| fault.outages.iter().max().copied().unwrap_or_default())),
        restored: Spread::of(faults.iter().map(|fault| fault.restored)),
    };
    kinds.into_iter().map(figures).collect()
}

/// Compares copies: nobody writes any more, every worker is killed once, and whoever serves in its place must hold the same.
async fn compare<P: Processes>(field: &Field<'_, P>, books: &LoadReport) -> Result<Replicas, String> {
    let digest = async || {
        let digested = books.client().digest().await.map_err(|error| format!("no digest is told: {error}"))?;
        Ok::<_, String>((digested.digest.to_string(), digested.memories))
    };
    let expected = digest().await?;
    let mut replicas = Replicas { digest: expected.0.clone(), memories: expected.1, ..Replicas::default() };
    for ordinal in 0..field.plan.workers {
        let gone = field.health.process(ordinal).await;
        let process = field.processes.worker(ordinal).ok_or_else(|| format!("worker {ordinal} does not run"))?;
        faults::send(process, Signal::SIGKILL).map_err(|error| error.to_string())?;
        // Those who serve in its place, while it is away and after it is back.
        for _ in 0..2 {
            let found = digest().await?;
            replicas.compared += 1;
            replicas.different += u32::from(found != expected);
            let whole = field.health.wait_until_healthy(&gone, WHOLE).await;
            whole.map_err(|reason| format!("after the load, worker {ordinal} was killed: {reason}"))?;
        }
    }
    Ok(replicas)
}
