//! Invariants, checked at every step of every node and at the end.

pub(crate) mod linear;
pub(crate) mod trace;

use crate::cluster::node::Node;
use crate::workload::client::{Account, Response};
use crate::world::World;
use engram_memory::{Digest, Lsn, Member, PartitionId, Term};
use engram_store::Durability;
use linear::Linearization;
use std::collections::BTreeMap;

/// Mode async: acknowledgements this close to the end of their process may be lost: 50 ms plus the timer delays of the
/// simulated processes.
const ASYNC_LOSS_US: u64 = 50_000 + 65_000;

/// What the checks have observed so far.
#[derive(Default)]
pub(crate) struct Checks {
    /// The state after each record that was the last applied one of some node: the record's term, the digest, and the
    /// member. In mode async two records may have had the same lsn, so the key includes the term.
    states: BTreeMap<(PartitionId, Lsn, Term), (Term, Digest, Member)>,
    /// The process that served each term.
    served: BTreeMap<(PartitionId, Term), Member>,
    /// The highest acknowledged record.
    acknowledged: BTreeMap<PartitionId, Lsn>,
    reads: u64,
    /// Operations that were acknowledged in mode async and are missing.
    lost: u64,
    /// When each process ended.
    ends_us: BTreeMap<Member, u64>,
}

impl Checks {
    /// Notes that a node acknowledged everything up to a record.
    pub(crate) fn acknowledged(&mut self, partition: PartitionId, lsn: Lsn) {
        let highest = self.acknowledged.entry(partition).or_default();
        *highest = lsn.max(*highest);
    }

    /// Notes that a process ended.
    pub(crate) fn ended(&mut self, member: Member, now_us: u64) {
        self.ends_us.insert(member, now_us);
    }

    pub(crate) const fn lost(&self) -> u64 {
        self.lost
    }

    pub(crate) const fn reads(&self) -> u64 {
        self.reads
    }
}

impl Checks {
    /// Mode async: whether the process that acknowledged an operation ended so soon after it that the acknowledgement
    /// may be lost.
    fn may_be_lost(&self, account: &Account, j: Option<usize>) -> bool {
        account.answered.get(&j).is_some_and(|(member, at_us)| {
            self.ends_us.get(member).is_some_and(|ended_us| ended_us.saturating_sub(*at_us) <= ASYNC_LOSS_US)
        })
    }
}

impl World {
    /// Checks a node after each of its steps.
    pub(crate) fn observe(&mut self, node: usize) {
        for partition in (0..self.plan.partitions).map(PartitionId) {
            let Some(process) = &mut self.nodes[node].process else { return };
            let member = process.member;
            let may_lose = self.plan.durability == Durability::Async;
            let mut broken = None;
            if let Some(term) = process.store.serving(partition) {
                let first = *self.checks.served.entry((partition, term)).or_insert(member);
                if first != member {
                    broken = Some(format!("term {term} of p{partition} is served by {first} and by {member}"));
                }
            }
            let (term, lsn) = process.store.applied(partition);
            if process.store.is_readable(partition) {
                self.checks.reads += 1;
                let acknowledged = self.checks.acknowledged.get(&partition).copied().unwrap_or_default();
                if lsn < acknowledged && !may_lose {
                    broken = Some(format!(
                        "{member} would read p{partition} at {lsn}; up to {acknowledged} is acknowledged"
                    ));
                }
            }
            let before = std::mem::replace(&mut process.applied[partition.0 as usize], (term, lsn));
            if before == (term, lsn) || lsn == Lsn(0) {
                broken.into_iter().for_each(|what| self.fail(what));
                continue;
            }
            if lsn < before.1 {
                broken = Some(format!("{member} applied p{partition} up to {} and then {lsn}", before.1));
            }
            let digest = process.store.partitions().replica_digest(partition);
            let digest = digest.expect("the device works").unwrap_or_default();
            let numbers = [18, node as u64, u64::from(partition.0), lsn.0, term.0, digest.0 as u64];
            self.trace
                .note(self.now_us, &numbers, || format!("{node} applied p{partition} up to {lsn} of term {term}"));
            let state = self
                .checks
                .states
                .entry((partition, lsn, if may_lose { term } else { Term(0) }))
                .or_insert((term, digest, member));
            if (state.0, state.1) != (term, digest) {
                broken = Some(format!(
                    "p{partition} at lsn {lsn}: {} has term {} and digest {}, {member} has term {term} and digest {digest}",
                    state.2, state.0, state.1
                ));
            }
            broken.into_iter().for_each(|what| self.fail(what));
        }
    }

    /// Returns what keeps the cluster from being healthy; `None` = nothing.
    pub(crate) fn missing(&mut self) -> Option<String> {
        let different = |node: &Node| {
            let process = node.process.as_ref()?;
            (process.store.stats().digest_mismatches > 0).then_some(process.member)
        };
        if let Some(member) = self.nodes.iter().find_map(different) {
            self.fail(format!("the digest of {member} differed from its primary's"));
        }
        for partition in (0..self.plan.partitions).map(PartitionId) {
            if let Some(what) = self.missing_of(partition) {
                return Some(format!("p{partition}: {what}"));
            }
        }
        self.clients.pending().or_else(|| self.epochs.pending()).or_else(|| self.items.pending())
    }

    fn missing_of(&mut self, partition: PartitionId) -> Option<String> {
        let entry = self.map_store.entry(partition).clone();
        let replicas = self.plan.replicas as usize;
        if !entry.activated || entry.isr.len() < replicas {
            return Some(format!("{} of {replicas} replicas, activated {}", entry.isr.len(), entry.activated));
        }
        let counts_process = self.plan.durability != Durability::Sync;
        let mut states = Vec::new();
        for member in &entry.isr {
            let node = member.ordinal.0 as usize;
            let Some(process) = &mut self.nodes[node].process else { return Some(format!("node {node} is down")) };
            let same_process = process.member.incarnation == member.incarnation || !counts_process;
            if process.member.store != member.store || !same_process {
                return Some(format!("the map names {member}, running is {}", process.member));
            }
            let serves = process.store.serving(partition) == Some(entry.term);
            if serves != (member.ordinal == entry.primary) {
                return Some(format!("node {node} serves: {serves}"));
            }
            let last = process.store.replicas()[partition.0 as usize].last;
            let digest = process.store.partitions().replica_digest(partition).expect("the device works");
            states.push((last, process.store.applied(partition), digest));
        }
        let (last, applied, _) = states[0];
        let equal = states.windows(2).all(|pair| pair[0] == pair[1]);
        (!equal || last != applied.1).then(|| format!("the replicas differ: {states:?}"))
    }

    /// Checks that every operation was applied as often as its client's response says.
    pub(crate) fn check_ledger(&mut self) {
        let mut broken = Vec::new();
        for account in self.clients.accounts() {
            let primary = self.map_store.entry(account.partition).primary.0 as usize;
            let process = self.nodes[primary].process.as_mut().expect("the cluster is whole");
            let mut weight_of = |id| {
                let memory = process.store.partitions().get(id).expect("the device works");
                memory.map(|memory| memory.weight.units())
            };
            let (weight, twin) = (weight_of(account.id), account.twin.map(weight_of));
            if twin.is_some_and(|twin| twin != weight) {
                broken.push(format!("id {} and its twin have a part of a record: {weight:?}, {twin:?}", account.id));
            }
            self.trace.note(self.now_us, &[19, account.id.0, u64::from(weight.unwrap_or(u32::MAX))], || {
                format!("account {} of p{}: {weight:?}", account.id, account.partition)
            });
            let may_be_lost = |j| self.plan.durability == Durability::Async && self.checks.may_be_lost(account, j);
            broken.extend(mismatches(account, weight, may_be_lost));
            let is_lost = |(j, response): &(usize, &Option<Response>)| {
                **response == Some(Response::Acked) && digit(weight, *j) == 0
            };
            self.checks.lost += account.operations.iter().enumerate().filter(is_lost).count() as u64;
        }
        let sums: Vec<_> = self.epochs.sums().collect();
        for (partition, memory, sum) in sums {
            let primary = self.map_store.entry(partition).primary.0 as usize;
            let process = self.nodes[primary].process.as_mut().expect("the cluster is whole");
            let memory = process.store.partitions().get(memory).expect("the device works");
            let weight = memory.map(|memory| memory.weight.units());
            if weight != Some(sum) {
                broken.push(format!("the run adds up to {sum:o} in p{partition}, but the weight is {weight:?}"));
            }
        }
        if let Some(first) = broken.first() {
            self.fail(format!("{} operations differ from their responses; the first: {first}", broken.len()));
        }
    }
}

impl World {
    /// Checks that the history of each id is linearizable.
    pub(crate) fn check_histories(&mut self) {
        let histories = self.clients.histories();
        for (id, calls) in histories {
            self.clients.searched += calls.len() as u64;
            match linear::search(&calls) {
                Linearization::Order => {}
                Linearization::None => self.fail(format!("no linearization of id {id}: {calls:?}")),
                Linearization::GaveUp => {
                    self.fail(format!("too many overlapping calls of id {id} to search: {calls:?}"));
                }
            }
        }
    }
}

/// Returns how often operation `j` was applied.
fn digit(weight: Option<u32>, j: usize) -> u32 {
    (weight.unwrap_or(0) >> (2 * j)) & 3
}

/// Returns the operations on an id that contradict their responses.
fn mismatches(account: &Account, weight: Option<u32>, may_be_lost: impl Fn(Option<usize>) -> bool) -> Vec<String> {
    let id = account.id;
    let mut mismatches = Vec::new();
    if weight.is_none() && account.created == Some(Response::Acked) && !may_be_lost(None) {
        mismatches.push(format!("id {id} was acknowledged and is lost"));
    }
    if weight.is_some() && account.created == Some(Response::Never) && !may_be_lost(None) {
        mismatches.push(format!("id {id} was reported as never executed, but exists"));
    }
    for (j, response) in account.operations.iter().enumerate() {
        let times = digit(weight, j);
        let right = match response {
            // Lost with its id.
            Some(Response::Acked) if weight.is_none() && may_be_lost(None) => true,
            Some(Response::Acked) => times == 1 || (times == 0 && may_be_lost(Some(j))),
            Some(Response::Never) => times == 0 || (times == 1 && may_be_lost(Some(j))),
            _ => times <= 1,
        };
        if !right {
            mismatches
                .push(format!("operation {j} of id {id} got response {response:?} but was applied {times} times"));
        }
    }
    if weight.unwrap_or(0) >> (2 * account.operations.len()) != 0 {
        mismatches.push(format!("id {id} has operations that were never requested: {weight:?}"));
    }
    mismatches
}
