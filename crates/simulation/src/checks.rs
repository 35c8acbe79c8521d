//! What must hold: at every step of every node, and in the end.

use crate::client::{Account, Told};
use crate::linear::{self, Found};
use crate::node::Node;
use crate::world::World;
use engram_memory::{Digest, Lsn, Member, PartitionId, Term};
use engram_store::Durability;
use std::collections::BTreeMap;

/// Mode async: what a process acknowledged so long before its end may be lost: 50 ms, and as long as the simulated processes let
/// their timers wait.
const LOSES_US: u64 = 50_000 + 65_000;

/// What was seen so far.
#[derive(Default)]
pub(crate) struct Checks {
    /// The state behind each record that some node had applied last at some time: the record's term, the digest, and who.
    /// In mode async two records may have had one lsn, and a term tells them apart.
    states: BTreeMap<(PartitionId, Lsn, Term), (Term, Digest, Member)>,
    /// Who served each term.
    served: BTreeMap<(PartitionId, Term), Member>,
    /// The highest record that was acknowledged to somebody.
    acknowledged: BTreeMap<PartitionId, Lsn>,
    reads: u64,
    /// Operations that were acknowledged in mode async and are not there.
    lost: u64,
    /// When each process ended.
    ends_us: BTreeMap<Member, u64>,
}

impl Checks {
    /// A node has answered that everything up to a record is committed.
    pub(crate) fn acknowledged(&mut self, partition: PartitionId, lsn: Lsn) {
        let highest = self.acknowledged.entry(partition).or_default();
        *highest = lsn.max(*highest);
    }

    /// A process ended.
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
    /// Mode async: whether the process that answered an operation ended so soon after that the answer may be forgotten.
    fn may_be_lost(&self, account: &Account, j: Option<usize>) -> bool {
        account.answered.get(&j).is_some_and(|(by, at_us)| {
            self.ends_us.get(by).is_some_and(|ended_us| ended_us.saturating_sub(*at_us) <= LOSES_US)
        })
    }
}

impl World {
    /// Looks at a node after each thing it did.
    pub(crate) fn observe(&mut self, node: usize) {
        for partition in (0..self.weather.partitions).map(PartitionId) {
            let Some(process) = &mut self.nodes[node].process else { return };
            let member = process.member;
            let loses = self.weather.durability == Durability::Async;
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
                if lsn < acknowledged && !loses {
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
                .entry((partition, lsn, if loses { term } else { Term(0) }))
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

    /// What keeps the cluster from being whole; `None` = nothing.
    pub(crate) fn missing(&mut self) -> Option<String> {
        let different = |node: &Node| {
            let process = node.process.as_ref()?;
            (process.store.stats().digests_different > 0).then_some(process.member)
        };
        if let Some(member) = self.nodes.iter().find_map(different) {
            self.fail(format!("the digest of {member} differed from its primary's"));
        }
        for partition in (0..self.weather.partitions).map(PartitionId) {
            if let Some(what) = self.missing_of(partition) {
                return Some(format!("p{partition}: {what}"));
            }
        }
        self.clients.waits_for().or_else(|| self.epochs.waits_for())
    }

    fn missing_of(&mut self, partition: PartitionId) -> Option<String> {
        let entry = self.authority.entry(partition).clone();
        let copies = self.weather.copies as usize;
        if !entry.activated || entry.isr.len() < copies {
            return Some(format!("{} of {copies} copies, activated {}", entry.isr.len(), entry.activated));
        }
        let counts_process = self.weather.durability != Durability::Sync;
        let mut states = Vec::new();
        for known in &entry.isr {
            let node = known.ordinal.0 as usize;
            let Some(process) = &mut self.nodes[node].process else { return Some(format!("node {node} is down")) };
            let same_process = process.member.incarnation == known.incarnation || !counts_process;
            if process.member.store != known.store || !same_process {
                return Some(format!("the map means {known}, there is {}", process.member));
            }
            let serves = process.store.serving(partition) == Some(entry.term);
            if serves != (known.ordinal == entry.primary) {
                return Some(format!("node {node} serves: {serves}"));
            }
            let last = process.store.replicas()[partition.0 as usize].last;
            let digest = process.store.partitions().replica_digest(partition).expect("the device works");
            states.push((last, process.store.applied(partition), digest));
        }
        let (last, applied, _) = states[0];
        let equal = states.windows(2).all(|pair| pair[0] == pair[1]);
        (!equal || last != applied.1).then(|| format!("the copies differ: {states:?}"))
    }

    /// Whether every operation was applied as often as its client was told.
    pub(crate) fn check_ledger(&mut self) {
        let mut broken = Vec::new();
        for account in self.clients.accounts() {
            let primary = self.authority.entry(account.partition).primary.0 as usize;
            let process = self.nodes[primary].process.as_mut().expect("the cluster is whole");
            let mut weight_of = |id| {
                let found = process.store.partitions().get(id).expect("the device works");
                found.map(|memory| memory.weight.units())
            };
            let (weight, twin) = (weight_of(account.id), account.twin.map(weight_of));
            if twin.is_some_and(|twin| twin != weight) {
                broken.push(format!("id {} and its twin have a part of a record: {weight:?}, {twin:?}", account.id));
            }
            self.trace.note(self.now_us, &[19, account.id.0, u64::from(weight.unwrap_or(u32::MAX))], || {
                format!("account {} of p{}: {weight:?}", account.id, account.partition)
            });
            let may_be_lost = |j| self.weather.durability == Durability::Async && self.checks.may_be_lost(account, j);
            broken.extend(wrong(account, weight, may_be_lost));
            let is_lost = |(j, told): &(usize, &Option<Told>)| **told == Some(Told::Acked) && digit(weight, *j) == 0;
            self.checks.lost += account.operations.iter().enumerate().filter(is_lost).count() as u64;
        }
        let sums: Vec<_> = self.epochs.sums().collect();
        for (partition, memory, sum) in sums {
            let primary = self.authority.entry(partition).primary.0 as usize;
            let process = self.nodes[primary].process.as_mut().expect("the cluster is whole");
            let found = process.store.partitions().get(memory).expect("the device works");
            let weight = found.map(|memory| memory.weight.units());
            if weight != Some(sum) {
                broken.push(format!("the run adds up to {sum:o} in p{partition}, and there is {weight:?}"));
            }
        }
        if let Some(first) = broken.first() {
            self.fail(format!("{} operations are not as told; the first: {first}", broken.len()));
        }
    }
}

impl World {
    /// Whether what clients saw of each id fits one order of its operations.
    pub(crate) fn check_histories(&mut self) {
        let histories = self.clients.histories();
        for (id, calls) in histories {
            self.clients.searched += calls.len() as u64;
            match linear::search(&calls) {
                Found::Order => {}
                Found::None => self.fail(format!("no order explains what was seen of id {id}: {calls:?}")),
                Found::GaveUp => self.fail(format!("too much of id {id} overlaps to be searched: {calls:?}")),
            }
        }
    }
}

/// How often operation `j` was applied.
fn digit(weight: Option<u32>, j: usize) -> u32 {
    (weight.unwrap_or(0) >> (2 * j)) & 3
}

/// The operations on an id that are not as they were told.
fn wrong(account: &Account, weight: Option<u32>, may_be_lost: impl Fn(Option<usize>) -> bool) -> Vec<String> {
    let id = account.id;
    let mut wrong = Vec::new();
    if weight.is_none() && account.created == Some(Told::Acked) && !may_be_lost(None) {
        wrong.push(format!("id {id} was acknowledged and is lost"));
    }
    if weight.is_some() && account.created == Some(Told::Never) && !may_be_lost(None) {
        wrong.push(format!("id {id} was never to be, and is there"));
    }
    for (j, told) in account.operations.iter().enumerate() {
        let times = digit(weight, j);
        let right = match told {
            // Lost with its id.
            Some(Told::Acked) if weight.is_none() && may_be_lost(None) => true,
            Some(Told::Acked) => times == 1 || (times == 0 && may_be_lost(Some(j))),
            Some(Told::Never) => times == 0 || (times == 1 && may_be_lost(Some(j))),
            _ => times <= 1,
        };
        if !right {
            wrong.push(format!("operation {j} of id {id} was told {told:?} and applied {times} times"));
        }
    }
    if weight.unwrap_or(0) >> (2 * account.operations.len()) != 0 {
        wrong.push(format!("id {id} has operations that nobody asked for: {weight:?}"));
    }
    wrong
}
