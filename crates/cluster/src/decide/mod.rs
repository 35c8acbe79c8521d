//! What a coordinator changes in the map, given what it observed.
//!
//! ```text
//! no map ─> create, when all its workers are here
//! map ────> failover: another candidate takes over from a dead primary
//!           replicas: under-replicated partitions get learners, surplus replicas are removed, load is evened out
//!           balance:  leadership moves to workers with few primaries
//! ```
//!
//! No decision is trusted for safety: every change is validated against the entry that it replaces, and a wrong guess
//! costs a leadership transfer. A worker that comes with another disk under an old ordinal counts as *lost*: its data
//! is on the missing disk, and nothing is formatted.
//!
//! Invariant: a decision that was carried out is not made again, and repeated decisions terminate.

mod absent;
mod balance;
mod failover;
mod forced_promotion;
mod replication;
#[cfg(test)]
mod tests;

pub use absent::{ABSENT_MS, find_absent};
pub use forced_promotion::check_force_promotable;

use crate::change::Change;
use crate::detector::{Liveness, Timing};
use crate::injected;
use crate::map::{Entry, PartitionMap};
use crate::placement::{Candidate, place_replicas};
use engram_memory::{ClusterId, Incarnation, Member, Ordinal, PartitionId};
use replication::ReplicationPlanner;
use std::collections::{BTreeMap, BTreeSet};

/// The desired state of a cluster, and what the coordinator observed since it started.
#[derive(Debug, Clone)]
pub struct ClusterObservation {
    /// Cluster.
    pub cluster: ClusterId,
    /// Partitions of a new map.
    pub partitions: u32,
    /// Desired number of workers: ordinals 0 to this - 1. Workers above are drained.
    pub workers: u32,
    /// Desired number of replicas of each partition.
    pub replicas: u32,
    /// Every log write is durable before it is acknowledged (mode `sync`).
    pub keeps_all: bool,
    /// Current time on the detector's clock.
    pub now_ms: u64,
    /// How long the coordinator has been running.
    pub age_ms: u64,
    /// Timing of the failure detector.
    pub timing: Timing,
    /// How long a single replica waits for a peer that is proven dead and supervised.
    pub restart_grace_ms: u64,
    /// Concurrent incoming, and concurrent outgoing, state transfers per worker.
    pub max_transfers: usize,
    /// Workers that have reported, one per ordinal.
    pub workers_seen: Vec<WorkerObservation>,
    /// Workers that never reported and count as lost.
    pub absent: BTreeSet<Ordinal>,
    /// Workers to drain.
    pub draining: BTreeSet<Ordinal>,
    /// More workers are silent than one fault explains.
    pub braked: bool,
    /// Time of the last failover.
    pub last_failover_ms: Option<u64>,
}

/// A worker as the coordinator observes it.
#[derive(Debug, Clone)]
pub struct WorkerObservation {
    /// The process that reported last.
    pub member: Member,
    /// The process states that nothing written by this incarnation or a later one was lost.
    pub lossless_since: Incarnation,
    /// Failure domain.
    pub domain: String,
    /// Liveness according to the failure detector.
    pub liveness: Liveness,
    /// It sent a heartbeat recently: decisions that are not urgent rest on such workers only.
    pub fresh: bool,
    /// Its supervisor restarts it when it exits.
    pub supervised: bool,
    /// It failed over too often to become primary.
    pub damped: bool,
    /// Since when it has been about to stop, by its own report: it gets no new replicas, and those that it holds come
    /// back with it.
    pub leaving_since_ms: Option<u64>,
    /// Its disk has almost no free space, by its own report: it gets no new replicas.
    pub disk_full: bool,
    /// Since when this process has been connected.
    pub seen_since_ms: u64,
    /// Ordinals that it suspects.
    pub suspects: BTreeSet<Ordinal>,
}

/// Longest time that a restarted process waits before it serves: until read leases that its predecessor may have
/// granted expire.
pub const LEASE_WAIT_MS: u64 = 1_200;

impl WorkerObservation {
    /// Whether it serves a partition as soon as its promise is durable.
    fn serves_at_once(&self, now_ms: u64) -> bool {
        self.member.incarnation == Incarnation(1) || now_ms >= self.seen_since_ms + LEASE_WAIT_MS
    }
}

/// The changes to make.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// The first map of the cluster, if there is none.
    pub initial_map: Option<PartitionMap>,
    /// At most one change per entry.
    pub changes: Vec<(PartitionId, Change)>,
    /// Planned leadership transfers: all that are currently wanted, new or not.
    pub transfers: Vec<LeadershipTransfer>,
    /// Why the cluster does not serve everything with all its replicas.
    pub conditions: Vec<String>,
}

/// An order to the primary of a partition to transfer its leadership to an in-sync member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeadershipTransfer {
    /// Partition.
    pub partition: PartitionId,
    /// The new primary.
    pub to: Ordinal,
}

/// Computes the changes for the current map.
pub fn decide(map: Option<&PartitionMap>, observed: &ClusterObservation) -> Plan {
    let Some(map) = map else { return plan_initial_map(observed) };
    let view = ClusterView { map, observed };
    let mut plan = Plan::default();
    let mut primaries = view.primaries();
    let settled = failover::plan(&view, &mut primaries, &mut plan);
    let mut planner = ReplicationPlanner::new(&view, &settled);
    planner.re_replicate(&mut plan);
    planner.remove_surplus(&primaries, &mut plan);
    // Balancing comes after repair.
    if plan.changes.is_empty() && !planner.is_under_replicated() && !observed.braked {
        planner.rebalance(&mut plan);
        if !planner.is_moving() {
            balance::plan(&view, &settled, &mut primaries, &mut plan);
        }
    }
    planner.report_conditions(&mut plan);
    if observed.braked {
        plan.conditions.push(
            "more workers are silent than one fault explains: re-replication is paused, and failover needs a backup's confirmation"
                .to_owned(),
        );
    }
    plan
}

fn plan_initial_map(observed: &ClusterObservation) -> Plan {
    let wait = |why: String| Plan { conditions: vec![why], ..Plan::default() };
    let reported = |ordinal: u32| observed.workers_seen.iter().find(|worker| worker.member.ordinal == Ordinal(ordinal));
    let missing: Vec<_> = (0..observed.workers)
        .filter(|&ordinal| reported(ordinal).is_none_or(|worker| !worker.liveness.is_alive()))
        .collect();
    if !missing.is_empty() {
        return wait(format!("waiting for workers {missing:?} to form the cluster"));
    }
    let candidates: Vec<_> = (0..observed.workers)
        .filter_map(reported)
        .map(|worker| Candidate { ordinal: worker.member.ordinal, domain: worker.domain.clone() })
        .collect();
    let placed = match place_replicas(observed.partitions, &candidates, observed.replicas as usize) {
        Ok(placed) => placed,
        Err(error) => return wait(error.to_string()),
    };
    let member = |ordinal: &Ordinal| reported(ordinal.0).expect("replicas are placed on workers that reported").member;
    let partitions = placed.iter().map(|chosen| Entry::first(chosen.iter().map(member).collect())).collect();
    Plan { initial_map: Some(PartitionMap { cluster: observed.cluster, version: 1, partitions }), ..Plan::default() }
}

/// Health of a process that the map names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MemberHealth {
    /// A process runs on its disk, perhaps a newer one.
    Alive,
    /// Not known yet.
    Unknown,
    /// The process or its disk is gone; for how long that has been known.
    Lost { for_ms: u64 },
}

/// The map together with the observations.
struct ClusterView<'a> {
    map: &'a PartitionMap,
    observed: &'a ClusterObservation,
}

impl<'a> ClusterView<'a> {
    fn worker(&self, ordinal: Ordinal) -> Option<&'a WorkerObservation> {
        self.observed.workers_seen.iter().find(|worker| worker.member.ordinal == ordinal)
    }

    /// Whether a worker is to be drained.
    fn is_draining(&self, ordinal: Ordinal) -> bool {
        ordinal.0 >= self.observed.workers || self.observed.draining.contains(&ordinal)
    }

    /// Workers that may hold replicas.
    fn holders(&self) -> impl Iterator<Item = &'a WorkerObservation> {
        self.observed
            .workers_seen
            .iter()
            .filter(|worker| worker.liveness.is_alive() && !self.is_draining(worker.member.ordinal))
    }

    /// Whether a worker is about to stop.
    fn is_leaving(&self, ordinal: Ordinal) -> bool {
        self.worker(ordinal).is_some_and(|worker| worker.leaving_since_ms.is_some())
    }

    /// Whether a worker can take a new replica: it stays, and has space for it.
    fn takes_replicas(&self, ordinal: Ordinal) -> bool {
        self.worker(ordinal).is_some_and(|worker| worker.leaving_since_ms.is_none() && !worker.disk_full)
    }

    fn domain(&self, ordinal: Ordinal) -> Option<&'a str> {
        self.worker(ordinal).map(|worker| worker.domain.as_str())
    }

    fn shares_domain(&self, ordinal: Ordinal, others: impl IntoIterator<Item = Ordinal>) -> bool {
        others.into_iter().any(|other| other != ordinal && self.domain(other) == self.domain(ordinal))
    }

    /// Returns the health of a member of `entry`. The members of `entry` are the second witnesses.
    fn health(&self, entry: &Entry, member: &Member) -> MemberHealth {
        let observed = self.observed;
        let Some(worker) = self.worker(member.ordinal) else {
            let lost = observed.absent.contains(&member.ordinal);
            return if lost { MemberHealth::Lost { for_ms: observed.age_ms } } else { MemberHealth::Unknown };
        };
        if worker.member.store != member.store && !injected!(EligibleByOrdinal) {
            return MemberHealth::Lost { for_ms: observed.age_ms };
        }
        if worker.member.incarnation < member.incarnation {
            // The observation is older than the map.
            return MemberHealth::Unknown;
        }
        let witness = || {
            let suspects =
                |worker: &WorkerObservation| worker.liveness.is_alive() && worker.suspects.contains(&member.ordinal);
            entry.candidates().filter_map(|other| self.worker(other.ordinal)).any(suspects)
        };
        match worker.liveness {
            Liveness::Alive => MemberHealth::Alive,
            standing if standing.is_confirmed(witness(), observed.braked, observed.now_ms, &observed.timing) => {
                let since_ms = standing.since_ms().expect("it is not alive");
                MemberHealth::Lost { for_ms: observed.now_ms.saturating_sub(since_ms) }
            }
            _ => MemberHealth::Unknown,
        }
    }

    /// Returns the process on a member's disk, if it is alive and holds everything acknowledged.
    fn eligible(&self, entry: &Entry, member: &Member) -> Option<&'a WorkerObservation> {
        let worker = self.worker(member.ordinal).filter(|_| self.health(entry, member) == MemberHealth::Alive)?;
        entry.holds_all(&worker.member, worker.lossless_since, self.observed.keeps_all).then_some(worker)
    }

    /// Whether a worker can become primary without a pause.
    fn serves_at_once(&self, ordinal: Ordinal) -> bool {
        self.worker(ordinal)
            .is_some_and(|worker| worker.liveness.is_alive() && worker.serves_at_once(self.observed.now_ms))
    }

    /// Number of primaries per worker.
    fn primaries(&self) -> BTreeMap<Ordinal, usize> {
        let mut primaries = BTreeMap::new();
        self.map.partitions.iter().for_each(|entry| *primaries.entry(entry.primary).or_default() += 1);
        primaries
    }
}

/// Formats a list of workers.
fn workers(ordinals: impl IntoIterator<Item = Ordinal>) -> String {
    let names: Vec<_> = ordinals.into_iter().map(|ordinal| ordinal.to_string()).collect();
    format!("worker{} {}", if names.len() == 1 { "" } else { "s" }, names.join(", "))
}

/// Formats a count: "1 partition", "2 partitions".
fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}
