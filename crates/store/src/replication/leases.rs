//! Read leases: until when a primary may read without confirmation, and until when a backup that granted one may not serve.
//!
//! Leases are between workers; each grant lists the partitions that it does not cover. The holder counts from the request, the
//! granter from its receipt, so the lease expires first at the holder as long as the rates of the two clocks differ by less than
//! one percent. Times are of [`crate::Clock::elapsed_ms`]. Writes do not depend on leases.

use super::Replication;
use crate::state::State;
use engram_cluster::injected;
use engram_memory::{Member, Ordinal, PartitionId, StoreId, Term};
use std::collections::{BTreeMap, BTreeSet};

/// Duration of a lease for its holder in milliseconds.
pub const LEASE_MS: u64 = 1_000;
/// Duration of a lease for the granter: includes the clock drift and granularity.
pub const GRANT_MS: u64 = LEASE_MS + LEASE_MS / 100 + 50;

/// Leases held and granted by a worker.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    /// By granter and its disk: the end, and the partitions not covered. A replaced disk under the same ordinal is another granter:
    /// it may follow a primary that the member named by the map has refused.
    held: BTreeMap<(Ordinal, StoreId), (u64, BTreeSet<PartitionId>)>,
    granted: BTreeMap<PartitionId, Grant>,
    /// Process that released its lease, and the term promised here then: it gets no further grants at that term.
    released: BTreeMap<PartitionId, (Member, Term)>,
}

/// Grants for a partition. A previous primary may hold a lease in addition to the current one: the death of one does not end the
/// lease of the other.
#[derive(Debug, Clone, Copy)]
struct Grant {
    /// Holder of the last grant; `None` for grants that a previous process here may have made.
    holder: Option<Member>,
    until_ms: u64,
    /// End of the grants to all other processes.
    others_until_ms: u64,
}

impl Grant {
    /// Returns the state after a grant to `holder` until `until_ms`, which is later than any previous one.
    fn granted(before: Option<Self>, holder: Member, until_ms: u64) -> Self {
        let others_until_ms = before
            .filter(|_| !injected!(ForgetFirstGrant))
            .map_or(0, |before| if before.holder == Some(holder) { before.others_until_ms } else { before.until_ms });
        Self { holder: Some(holder), until_ms, others_until_ms }
    }

    /// Ends the grant to a process.
    fn end(&mut self, holder: Member) {
        let by_name = self.holder.filter(|_| injected!(ProofByName));
        if self.holder == Some(holder) || by_name.is_some_and(|granter| granter.ordinal == holder.ordinal) {
            (self.holder, self.until_ms) = (None, self.others_until_ms);
        }
    }
}

/// A lease granted to another worker.
pub(crate) struct LeaseGrant {
    /// Partitions that it covers: their replicas have to know of it.
    pub(crate) granted: Vec<PartitionId>,
    /// Partitions that it does not cover.
    pub(crate) except: Vec<PartitionId>,
}

impl Leases {
    /// Returns the grants that a starting process has to assume: its predecessor may have granted just before.
    pub(crate) fn assume_granted(partitions: impl Iterator<Item = PartitionId>, now_ms: u64) -> Self {
        if injected!(ForgetLeaseGrant) {
            return Self::default();
        }
        let granted = partitions
            .map(|partition| (partition, Grant { holder: None, until_ms: now_ms + GRANT_MS, others_until_ms: 0 }))
            .collect();
        Self { granted, ..Self::default() }
    }

    /// Whether a held lease covers a partition. It covers only what was served before the lease was requested: an older lease may
    /// have been released if this process stepped down in between.
    fn covers(&self, granter: &Member, partition: PartitionId, since_ms: u64, now_ms: u64) -> bool {
        let by_place = || self.held.iter().find(|((ordinal, _), _)| *ordinal == granter.ordinal).map(|(_, held)| held);
        let held = self.held.get(&(granter.ordinal, granter.store));
        let held = held.or_else(|| by_place().filter(|_| injected!(LeaseByOrdinal)));
        held.is_some_and(|(until, except)| {
            now_ms < *until && since_ms + LEASE_MS <= *until && !except.contains(&partition)
        })
    }
}

impl Replication {
    /// Whether a read of a partition that ran before this call is linearizable: it is served here, everything acknowledged by
    /// earlier primaries is committed, and every other in-sync member has promised not to serve meanwhile.
    pub(crate) fn is_readable(&self, state: &State, partition: PartitionId) -> bool {
        let Some(state) = state.get(partition) else { return false };
        let now_ms = self.context.now_ms();
        let granters = state.replica().required_leases();
        let Some((granters, since_ms)) = granters.zip(state.readable_since_ms()) else { return false };
        granters
            .iter()
            .all(|granter| injected!(ReadWithoutLease) || self.leases.covers(granter, partition, since_ms, now_ms))
    }

    /// Records a lease granted until `until_ms` for all partitions but `except`.
    pub(crate) fn record_lease(&mut self, granter: Member, until_ms: u64, except: Vec<PartitionId>) {
        self.leases.held.retain(|held, _| held.0 != granter.ordinal);
        self.leases.held.insert((granter.ordinal, granter.store), (until_ms, except.into_iter().collect()));
    }

    /// Grants a lease to a process that requests it now.
    pub(crate) fn grant_lease(&mut self, state: &State, holder: Member) -> LeaseGrant {
        let until_ms = self.context.now_ms() + GRANT_MS;
        let (mut granted, mut except) = (Vec::new(), Vec::new());
        for partition in self.context.all_partitions() {
            let replica = state.of(partition).replica();
            let released = self.leases.released.get(&partition) == Some(&(holder, replica.promised()));
            if replica.may_grant_lease(holder) && !released {
                granted.push(partition);
                let before = self.leases.granted.get(&partition).copied();
                self.leases.granted.insert(partition, Grant::granted(before, holder, until_ms));
            } else {
                except.push(partition);
            }
        }
        LeaseGrant { granted, except }
    }

    /// Ends the grants to a process that is proven dead.
    pub(crate) fn end_grants(&mut self, dead: Member) {
        self.leases.granted.values_mut().for_each(|grant| grant.end(dead));
    }

    /// Ends the grant of a process that no longer reads a partition, since it has seen another primary; `false` if there is none.
    pub(crate) fn end_grant(&mut self, state: &State, partition: PartitionId, holder: Member) -> bool {
        let promised = state.of(partition).replica().promised();
        self.leases.released.insert(partition, (holder, promised));
        let grant = self.leases.granted.get_mut(&partition);
        grant.map(|grant| grant.end(holder)).is_some()
    }

    /// Removes expired grants; returns their partitions.
    pub(crate) fn take_expired_grants(&mut self) -> Vec<PartitionId> {
        let now_ms = self.context.now_ms();
        let expired = self.leases.granted.extract_if(.., |_, grant| grant.until_ms <= now_ms);
        expired.map(|(partition, _)| partition).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_memory::Incarnation;

    #[test]
    fn a_grant_keeps_the_end_of_the_grants_to_other_processes() {
        let process = |ordinal: u32| Member {
            ordinal: Ordinal(ordinal),
            store: StoreId(u128::from(ordinal)),
            incarnation: Incarnation(1),
        };
        let first = Grant::granted(None, process(1), 1_000);
        let renewed = Grant::granted(Some(first), process(1), 1_200);
        assert_eq!((renewed.until_ms, renewed.others_until_ms), (1_200, 0));
        let second = Grant::granted(Some(renewed), process(2), 1_400);
        let renewed = Grant::granted(Some(second), process(2), 1_600);
        assert_eq!(
            (renewed.until_ms, renewed.others_until_ms),
            (1_600, 1_200),
            "after the death of the second holder the first grant ends at 1200"
        );
    }
}
