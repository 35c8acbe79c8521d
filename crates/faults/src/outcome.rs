//! What came of a campaign.

use crate::campaign::Plan;
use crate::ledger::Tally;
use crate::outages::Spread;
use crate::proxy::Counts;
use serde::Serialize;
use std::time::Duration;

/// One fault that is over.
#[derive(Debug, Clone)]
pub struct FaultReport {
    /// Its place in the campaign, from 1.
    pub number: usize,
    /// Faults of the campaign.
    pub of: usize,
    /// What it was.
    pub kind: &'static str,
    /// To whom it was done.
    pub whom: String,
    /// From its beginning until the cluster was whole again.
    pub restored: Duration,
    /// How long partitions did not answer: the longest outage of each that had one.
    pub outages: Vec<Duration>,
}

/// What came of a campaign.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Outcome {
    /// What was random came from it.
    pub seed: u64,
    /// Workers.
    pub workers: u32,
    /// Copies of each partition.
    pub copies: u32,
    /// Partitions.
    pub partitions: u32,
    /// How long everything took.
    pub seconds: f64,
    /// An operation that took longer counts as an outage.
    pub slow_ms: f64,
    /// Without faults, as fast as the cluster answers.
    pub clear: Throughput,
    /// Without faults, at a share of that.
    pub calm: Throughput,
    /// During the campaign, at the same share.
    pub troubled: Throughput,
    /// By kind.
    pub faults: Vec<FaultKind>,
    /// What the proxies did.
    pub network: Counts,
    /// Ids written to.
    pub memories: u64,
    /// Requests that ended without an answer and whose fate was asked for.
    pub asked_for_fate: u64,
    /// Absent where the weights could not be read.
    pub ledger: Option<Tally>,
    /// Absent where the copies were not compared.
    pub replicas: Option<Replicas>,
    /// Why it ended early, or is not complete.
    pub problems: Vec<String>,
}

/// Operations under one load.
#[derive(Debug, Clone, Copy, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Throughput {
    /// Acknowledged batches a second.
    pub operations_per_second: f64,
    /// How long they took.
    pub latency: Spread,
}

/// Faults of one kind.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FaultKind {
    /// What it was.
    pub kind: &'static str,
    /// How many were done.
    pub done: usize,
    /// How long partitions did not answer, over all partitions that did not.
    pub unavailable: Spread,
    /// The longest such time of each fault; 0 where every partition went on answering.
    pub longest: Spread,
    /// Until the cluster was whole again.
    pub restored: Spread,
}

/// Copies compared.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Replicas {
    /// Digest of all memories.
    pub digest: String,
    /// How many there are.
    pub memories: u64,
    /// Looks at the digest, each after others had come to serve.
    pub compared: u32,
    /// Looks that found another digest.
    pub different: u32,
}

impl Outcome {
    /// Of a campaign that has not begun.
    pub(crate) fn of(plan: &Plan) -> Self {
        Self {
            seed: plan.seed,
            workers: plan.workers,
            copies: plan.copies,
            partitions: 0,
            seconds: 0.0,
            slow_ms: 0.0,
            clear: Throughput::default(),
            calm: Throughput::default(),
            troubled: Throughput::default(),
            faults: Vec::new(),
            network: Counts::default(),
            memories: 0,
            asked_for_fate: 0,
            ledger: None,
            replicas: None,
            problems: Vec::new(),
        }
    }

    /// What is wrong, in words; empty = every promise was kept and everything asked for was done.
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
            wrong.push(format!("{different} of {compared} looks found another digest: copies differ"));
        }
        wrong
    }
}
