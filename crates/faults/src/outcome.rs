//! Outcome of a campaign: what was injected, what came of it, and whether a guarantee was violated.

use crate::campaign::Plan;
use crate::ledger::Tally;
use crate::outages::Spread;
use crate::proxy::Counts;
use serde::ser::SerializeStruct as _;
use serde::{Serialize, Serializer};
use std::time::Duration;

/// A completed fault.
#[derive(Debug, Clone, Default)]
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
    /// The longest outage that is allowed, where that is judged.
    pub budget: Option<Duration>,
    /// Batches acknowledged during the fault, where it has a load of its own.
    pub acknowledged: u64,
    /// The ledger of that load.
    pub ledger: Tally,
}

impl FaultReport {
    /// Returns the longest outage of any partition.
    pub fn longest(&self) -> Duration {
        self.outages.iter().max().copied().unwrap_or_default()
    }

    /// Whether an outage was longer than allowed.
    pub fn exceeds_budget(&self) -> bool {
        self.budget.is_some_and(|budget| self.longest() > budget)
    }
}

/// Outcome of any campaign: of processes, of trainings, of Kubernetes.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Seed.
    pub seed: u64,
    /// Completed faults, in order.
    pub faults: Vec<FaultReport>,
    /// The ledger over all faults; `None` = it could not be read, or there is one for each fault.
    pub ledger: Option<Tally>,
    /// `None` = the replicas were not compared.
    pub replicas: Option<Replicas>,
    /// Reasons why it ended early or is incomplete.
    pub problems: Vec<String>,
    /// Kinds in the order of reports.
    pub(crate) order: &'static [&'static str],
}

/// Outcome of a campaign on a cluster of processes, with the figures of its load.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CampaignOutcome {
    /// What was injected, and what came of it.
    #[serde(flatten)]
    pub outcome: Outcome,
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
    /// Counters of the proxies.
    pub network: Counts,
    /// Ids written to.
    pub memories: u64,
    /// Requests with unknown outcome, which was queried.
    pub outcome_queries: u64,
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
    /// Faults with an outage longer than allowed.
    #[serde(skip)]
    pub over_budget: usize,
    /// The ledgers of the faults that have one each.
    #[serde(skip)]
    pub ledger: Tally,
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

impl CampaignOutcome {
    /// Outcome of a campaign that has not begun.
    pub(crate) fn of(plan: &Plan) -> Self {
        Self {
            outcome: Outcome { seed: plan.seed, ..Outcome::default() },
            workers: plan.workers,
            copies: plan.replicas,
            partitions: 0,
            seconds: 0.0,
            slow_ms: 0.0,
            clear: Throughput::default(),
            calm: Throughput::default(),
            troubled: Throughput::default(),
            network: Counts::default(),
            memories: 0,
            outcome_queries: 0,
        }
    }
}

impl FaultKind {
    fn of(kind: &'static str, faults: &[&FaultReport]) -> Self {
        let ledger = faults.iter().fold(Tally::default(), |mut sum, fault| {
            sum.add(&fault.ledger);
            sum
        });
        Self {
            kind,
            done: faults.len(),
            unavailable: Spread::of(faults.iter().flat_map(|fault| fault.outages.iter().copied())),
            longest: Spread::of(faults.iter().map(|fault| fault.longest())),
            restored: Spread::of(faults.iter().map(|fault| fault.restored)),
            over_budget: faults.iter().filter(|fault| fault.exceeds_budget()).count(),
            ledger,
        }
    }
}

/// With the figures of each kind of fault instead of every fault.
impl Serialize for Outcome {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Outcome", 5)?;
        fields.serialize_field("seed", &self.seed)?;
        fields.serialize_field("faults", &self.by_kind())?;
        fields.serialize_field("ledger", &self.ledger)?;
        fields.serialize_field("replicas", &self.replicas)?;
        fields.serialize_field("problems", &self.problems)?;
        fields.end()
    }
}

impl Outcome {
    /// Returns the figures of each kind of fault that was done.
    pub fn by_kind(&self) -> Vec<FaultKind> {
        let mut kinds: Vec<&'static str> = self.faults.iter().map(|fault| fault.kind).collect();
        let place = |kind: &str| self.order.iter().position(|named| *named == kind).unwrap_or(self.order.len());
        kinds.sort_by_key(|kind| (place(kind), *kind));
        kinds.dedup();
        let of = |kind| self.faults.iter().filter(|fault| fault.kind == kind).collect::<Vec<_>>();
        kinds.into_iter().map(|kind| FaultKind::of(kind, &of(kind))).collect()
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
