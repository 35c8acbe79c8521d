//! Outcome of a campaign.

use crate::campaign::Plan;
use crate::ledger::Tally;
use crate::outages::Spread;
use crate::proxy::Counts;
use serde::Serialize;
use std::time::Duration;

/// A completed fault.
#[derive(Debug, Clone)]
pub struct FaultReport {
    /// Its number in the campaign, from 1.
    pub number: usize,
    /// Number of faults in the campaign.
    pub of: usize,
    /// Name of its kind.
    pub kind: &'static str,
    /// Description of its target.
    pub target: String,
    /// Time from its start until the cluster was healthy again.
    pub restored: Duration,
    /// The longest outage of each partition that had one.
    pub outages: Vec<Duration>,
}

/// Outcome of a campaign.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Outcome {
    /// Seed.
    pub seed: u64,
    /// Workers.
    pub workers: u32,
    /// Replicas of each partition.
    pub copies: u32,
    /// Partitions.
    pub partitions: u32,
    /// Total duration.
    pub seconds: f64,
    /// Threshold of an outage.
    pub slow_ms: f64,
    /// Throughput without faults and without a rate limit.
    pub clear: Throughput,
    /// Throughput without faults, at a share of that.
    pub calm: Throughput,
    /// Throughput during the campaign, at the same share.
    pub troubled: Throughput,
    /// Faults by kind.
    pub faults: Vec<FaultKind>,
    /// Counters of the proxies.
    pub network: Counts,
    /// Ids written to.
    pub memories: u64,
    /// Requests with unknown outcome, which was queried.
    pub outcome_queries: u64,
    /// `None` = the weights could not be read.
    pub ledger: Option<Tally>,
    /// `None` = the replicas were not compared.
    pub replicas: Option<Replicas>,
    /// Reasons why it ended early or is incomplete.
    pub problems: Vec<String>,
}

/// Operations under one load.
#[derive(Debug, Clone, Copy, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Throughput {
    /// Acknowledged batches a second.
    pub operations_per_second: f64,
    /// Latency of acknowledged batches.
    pub latency: Spread,
}

/// Faults of one kind.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FaultKind {
    /// Name of the kind.
    pub kind: &'static str,
    /// Number of faults.
    pub done: usize,
    /// Outages of all affected partitions.
    pub unavailable: Spread,
    /// Longest outage of each fault; 0 if there was none.
    pub longest: Spread,
    /// Time until the cluster was healthy again.
    pub restored: Spread,
}

/// Comparison of replicas.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Replicas {
    /// Digest of all memories.
    pub digest: String,
    /// Number of memories.
    pub memories: u64,
    /// Comparisons, each after other replicas had become primary.
    pub compared: u32,
    /// Comparisons with a different digest.
    pub different: u32,
}

impl Outcome {
    /// Outcome of a campaign that has not begun.
    pub(crate) fn of(plan: &Plan) -> Self {
        Self {
            seed: plan.seed,
            workers: plan.workers,
            copies: plan.replicas,
            partitions: 0,
            seconds: 0.0,
            slow_ms: 0.0,
            clear: Throughput::default(),
            calm: Throughput::default(),
            troubled: Throughput::default(),
            faults: Vec::new(),
            network: Counts::default(),
            memories: 0,
            outcome_queries: 0,
            ledger: None,
            replicas: None,
            problems: Vec::new(),
        }
    }

    /// Returns all violations, as text; empty = every guarantee held and every fault was injected.
    pub fn violations(&self) -> Vec<String> {
        let mut wrong = self.problems.clone();
        if let Some(ledger) = &self.ledger {
            let counts = [
                (ledger.lost, "acknowledged operations were lost"),
                (ledger.doubled, "operations were applied more than once"),
                (ledger.conjured, "operations were applied that should not have been"),
            ];
            wrong.extend(
                counts.into_iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")),
            );
        }
        if let Some(Replicas { compared, different: different @ 1.., .. }) = self.replicas {
            wrong.push(format!("{different} of {compared} digests differ from the first one: replicas differ"));
        }
        wrong
    }
}
