//! A campaign: one fault after another against a cluster under load, the next one when the cluster is healthy again.
//!
//! First the throughput without faults is measured. During the campaign the load is a share of it, so that a machine
//! with few cores does not starve the failure detector and cause faults of its own. At the end every weight is compared
//! with the ledger, and all replicas with each other.

use crate::faults::{self, InjectError, Kind, NAMES, deck, inject};
use crate::health::{EndedProcesses, Health, Unhealthy};
use crate::load::{Load, LoadReport};
use crate::network::Network;
use crate::outages::milliseconds;
use crate::outcome::{CampaignOutcome, FaultReport, Outcome, Replicas, Throughput};
use crate::runner::SeedRunner;
use engram_client::Error;
use engram_memory::ClusterId;
use nix::sys::signal::Signal;
use rand::rngs::StdRng;
use std::path::PathBuf;
use std::time::Duration;
use tokio::time::Instant;

/// Duration of each measurement without faults.
const CLEAR: Duration = Duration::from_secs(4);
/// Warm-up before a measurement: sessions are opened, files grow to their size, a new load takes effect.
const WARM_UP: Duration = Duration::from_secs(1);
/// An operation that takes longer than this, or than three times the p99 at the same load without faults, is an outage.
const SLOW: Duration = Duration::from_millis(100);
/// Time limit for a cluster to become healthy again.
const HEALTHY_LIMIT: Duration = Duration::from_secs(60);
/// Time limit after that for every partition to execute another operation.
const SERVED_LIMIT: Duration = Duration::from_secs(20);

/// Locates the processes of a cluster. The implementor restarts them when they end.
pub trait Processes {
    /// Returns the process id of a worker; `None` between its end and its restart.
    fn worker(&self, ordinal: u32) -> Option<u32>;
    /// Returns the process id of the coordinator.
    fn coordinator(&self) -> Option<u32>;
    /// Returns the folder that is a worker's disk.
    fn disk(&self, ordinal: u32) -> PathBuf;
}

/// Plan of a campaign.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Plan {
    /// Kills of processes.
    pub kills: u32,
    /// Pauses of processes.
    pub pauses: u32,
    /// Cuts and other link faults.
    pub cuts: u32,
    /// Time limit for all faults together.
    pub limit: Duration,
    /// Seed of everything random: order, victims, jitter. The timing of the cluster itself is not determined by it.
    pub seed: u64,
    /// Load during the campaign, as a share of the throughput without faults.
    pub share: f64,
    /// Workers of the cluster.
    pub workers: u32,
    /// Replicas of each partition.
    pub replicas: u32,
}

impl Default for Plan {
    fn default() -> Self {
        let limit = Duration::from_secs(240);
        Self { kills: 20, pauses: 5, cuts: 5, limit, seed: 0, share: 0.5, workers: 5, replicas: 2 }
    }
}

/// The cluster under test.
#[derive(Debug, Clone, Copy)]
pub struct CampaignTarget<'a, P> {
    /// The plan.
    pub plan: &'a Plan,
    /// The processes.
    pub processes: &'a P,
    /// The links between them.
    pub network: &'a Network,
    /// Health of the cluster.
    pub health: &'a Health,
    /// Client endpoints of the workers.
    pub endpoints: &'a [String],
    /// Cluster id.
    pub id: ClusterId,
}

/// Reason why a campaign could not start. Later problems are part of its outcome.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The cluster is not healthy.
    #[error(transparent)]
    NotHealthy(#[from] Unhealthy),
    /// The clients cannot connect.
    #[error(transparent)]
    Client(#[from] Error),
    /// Nothing was acknowledged without faults.
    #[error("no operation was acknowledged within {} s without any fault", CLEAR.as_secs())]
    NoThroughput,
}

/// Reason why a campaign ended early.
#[derive(Debug, thiserror::Error)]
enum StopReason {
    #[error("{kind}, {target}: {reason}")]
    NotHealthy { kind: &'static str, target: String, reason: Unhealthy },
    #[error("{kind}, {target}: {} partitions are not served {} s after the cluster was healthy, the first is {first}", .count, SERVED_LIMIT.as_secs())]
    NotServed { kind: &'static str, target: String, count: usize, first: u32 },
    #[error("{kind}: {reason}")]
    NotInjected { kind: &'static str, reason: InjectError },
    #[error("failed to read the map: {0}")]
    Map(Error),
}

/// Runs a campaign; calls `report` for each completed fault.
///
/// # Errors If it could not start.
pub async fn run<P: Processes>(
    cluster: CampaignTarget<'_, P>,
    mut report: impl FnMut(&FaultReport),
) -> Result<CampaignOutcome, StartError> {
    let plan = cluster.plan;
    let began = Instant::now();
    cluster.health.wait_until_healthy(&EndedProcesses::new(), HEALTHY_LIMIT).await?;
    let load = Load::start(cluster.endpoints, cluster.id, SLOW).await?;
    let mut outcome = CampaignOutcome::of(plan);
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
    outcome.outcome = inject_all(&cluster, &load, &mut report).await;
    outcome.troubled.operations_per_second = (load.acked() - acked) as f64 / since.elapsed().as_secs_f64();
    outcome.troubled.latency = load.take_latency();
    let load_report = load.finish().await;
    if outcome.outcome.problems.is_empty() {
        match compare(&cluster, &load_report).await {
            Ok(replicas) => outcome.outcome.replicas = Some(replicas),
            Err(problem) => outcome.outcome.problems.push(problem),
        }
    }
    outcome.memories = load_report.memories() as u64;
    outcome.outcome_queries = load_report.outcome_queries();
    match load_report.check().await {
        Ok(tally) => outcome.outcome.ledger = Some(tally),
        Err(error) => outcome.outcome.problems.push(format!("the weights could not be read: {error}")),
    }
    outcome.network = cluster.network.counts();
    outcome.seconds = milliseconds(began.elapsed()) / 1_000.0;
    Ok(outcome)
}

/// Measures throughput and latency for `time`.
async fn measured(load: &Load, time: Duration) -> Throughput {
    load.take_latency();
    let (acked, since) = (load.acked(), Instant::now());
    tokio::time::sleep(time).await;
    let operations_per_second = (load.acked() - acked) as f64 / since.elapsed().as_secs_f64();
    Throughput { operations_per_second, latency: load.take_latency() }
}

/// Injects all faults of the plan, until one of them stops the campaign.
async fn inject_all<P: Processes>(
    cluster: &CampaignTarget<'_, P>,
    load: &Load,
    report: &mut impl FnMut(&FaultReport),
) -> Outcome {
    let plan = cluster.plan;
    let planned = (plan.kills + plan.pauses + plan.cuts) as usize;
    let mut runner = SeedRunner::new(plan.seed, planned).within(plan.limit).in_order(&NAMES);
    let deck = deck(plan, runner.draws());
    while let Some(number) = runner.next_fault() {
        let result = suffer(deck[number - 1], cluster, load, runner.draws()).await;
        if let Some(fault) = runner.note(result.map_err(|stopped| stopped.to_string())) {
            report(fault);
        }
    }
    runner.finish()
}

/// Injects one fault, and waits until the cluster is healthy and serves everything again.
async fn suffer<P: Processes>(
    kind: Kind,
    cluster: &CampaignTarget<'_, P>,
    load: &Load,
    draws: &mut StdRng,
) -> Result<FaultReport, StopReason> {
    let map = load.client().refreshed_map().await.map_err(StopReason::Map)?;
    let leaders: Vec<u32> = map.owners().into_iter().map(|ordinal| ordinal.0).collect();
    load.reset_longest();
    let began = Instant::now();
    let inflicted = inject(kind, cluster, &leaders, draws).await;
    let fault = inflicted.map_err(|reason| StopReason::NotInjected { kind: kind.name(), reason })?;
    let target = fault.target;
    let healthy = cluster.health.wait_until_healthy(&fault.ended, HEALTHY_LIMIT).await;
    healthy.map_err(|reason| StopReason::NotHealthy { kind: kind.name(), target: target.clone(), reason })?;
    let restored = began.elapsed();
    if let Err(behind) = load.wait_until_served(SERVED_LIMIT).await {
        let (count, first) = (behind.len(), behind.first().map_or(0, |partition| partition.0));
        return Err(StopReason::NotServed { kind: kind.name(), target, count, first });
    }
    if let Some(taken) = fault.exchanged
        && let Err(error) = std::fs::remove_dir_all(&taken)
    {
        tracing::warn!(folder = %taken.display(), %error, "failed to remove an exchanged disk");
    }
    // Partitions of the victim had to fail over, however fast.
    let hit = |partition| fault.victim.is_some() && map.owner(partition).map(|ordinal| ordinal.0) == fault.victim;
    let outages = load.outages(began, hit);
    Ok(FaultReport { kind: kind.name(), target, restored, outages, ..FaultReport::default() })
}

/// Compares replicas: without writes, every worker is killed once, and its successors must hold the same memories.
async fn compare<P: Processes>(cluster: &CampaignTarget<'_, P>, load_report: &LoadReport) -> Result<Replicas, String> {
    let digest = async || {
        let digested =
            load_report.client().digest().await.map_err(|error| format!("failed to read the digest: {error}"))?;
        Ok::<_, String>((digested.digest.to_string(), digested.memories))
    };
    let expected = digest().await?;
    let mut replicas = Replicas { digest: expected.0.clone(), memories: expected.1, ..Replicas::default() };
    for ordinal in 0..cluster.plan.workers {
        let ended = cluster.health.process(ordinal).await;
        let process = cluster.processes.worker(ordinal).ok_or_else(|| format!("worker {ordinal} is not running"))?;
        faults::send(process, Signal::SIGKILL).map_err(|error| error.to_string())?;
        // The successors, while it is away and after it is back.
        for _ in 0..2 {
            let found = digest().await?;
            replicas.compared += 1;
            replicas.different += u32::from(found != expected);
            let healthy = cluster.health.wait_until_healthy(&ended, HEALTHY_LIMIT).await;
            healthy.map_err(|reason| format!("after the load, worker {ordinal} was killed: {reason}"))?;
        }
    }
    Ok(replicas)
}
