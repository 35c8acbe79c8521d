//! Read leases: until when a primary may read without asking anybody, and until when a backup that granted one may not serve.
//!
//! Leases are between workers; which partitions one covers the granter says each time. The holder counts from when it asked,
//! the granter from when it heard, so the holder's end comes first as long as the rates of two clocks differ by less than
//! one percent. Times are of [`crate::Clock::elapsed_ms`]. Writes rest on none of this.

use crate::store::Store;
use engram_cluster::replica::{Defect, Event, is_planted};
use engram_memory::{Member, Ordinal, PartitionId, StoreId, Term};
use std::collections::{BTreeMap, BTreeSet};

/// How long a lease lasts for its holder, in milliseconds.
pub const LEASE_MS: u64 = 1_000;
/// How long it lasts for the granter: what two clocks may differ by, and their grain, on top.
pub const GRANT_MS: u64 = LEASE_MS + LEASE_MS / 100 + 50;

/// What a worker holds and granted.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    /// By granter and its disk: the end, and the partitions that it does not cover. A new disk under an old name is another
    /// granter: it follows whom the one that the map means may have refused.
    held: BTreeMap<(Ordinal, StoreId), (u64, BTreeSet<PartitionId>)>,
    granted: BTreeMap<PartitionId, Grant>,
    /// Who said that it no longer reads, and the term that was promised here then: it is granted nothing more at it.
    released: BTreeMap<PartitionId, (Member, Term)>,
}

/// What was granted for a partition. A process that was followed before may hold a lease beside the one followed now: what
/// is proven of one of them ends nothing of the other's.
#[derive(Debug, Clone, Copy)]
struct Grant {
    /// Who was granted one last; without a process, what one before this may have granted.
    holder: Option<Member>,
    until_ms: u64,
    /// The end of what everybody else was granted.
    others_until_ms: u64,
}

impl Grant {
    /// After a grant to `holder` until `until_ms`, which is later than any before.
    fn granted(before: Option<Self>, holder: Member, until_ms: u64) -> Self {
        let others_until_ms = before
            .filter(|_| !is_planted(Defect::ForgetFirstGrant))
            .map_or(0, |before| if before.holder == Some(holder) { before.others_until_ms } else { before.until_ms });
        Self { holder: Some(holder), until_ms, others_until_ms }
    }

    /// Ends what a process was granted.
    fn end(&mut self, holder: Member) {
        let by_name = self.holder.filter(|_| is_planted(Defect::ProofByName));
        if self.holder == Some(holder) || by_name.is_some_and(|known| known.ordinal == holder.ordinal) {
            (self.holder, self.until_ms) = (None, self.others_until_ms);
        }
    }
}

impl Leases {
    /// What a start has to assume: the process before granted a moment ago.
    pub(crate) fn assume(partitions: impl Iterator<Item = PartitionId>, now_ms: u64) -> Self {
        if is_planted(Defect::ForgetLeaseGrant) {
            return Self::default();
        }
        let granted = partitions
            .map(|partition| (partition, Grant { holder: None, until_ms: now_ms + GRANT_MS, others_until_ms: 0 }))
            .collect();
        Self { granted, ..Self::default() }
    }

    /// A lease covers what is served since before it was asked for: an older one may have been given up in between, by who
    /// stepped down and leads again.
    fn covers(&self, granter: &Member, partition: PartitionId, since_ms: u64, now_ms: u64) -> bool {
        let by_place = || self.held.iter().find(|((ordinal, _), _)| *ordinal == granter.ordinal).map(|(_, held)| held);
        let held = self.held.get(&(granter.ordinal, granter.store));
        let held = held.or_else(|| by_place().filter(|_| is_planted(Defect::LeaseByOrdinal)));
        held.is_some_and(|(until, except)| {
            now_ms < *until && since_ms + LEASE_MS <= *until && !except.contains(&partition)
        })
    }
}

impl Store {
    /// Whether a read of a partition that was computed before this call is linearizable: it is served here, all that a primary
    /// before may have acknowledged is committed, and every other member in sync has promised not to serve meanwhile.
    pub fn is_readable(&self, partition: PartitionId) -> bool {
        let Some(place) = self.places.get(partition.0 as usize) else { return false };
        let now_ms = self.clock.elapsed_ms();
        // What was committed just now is not in the state that was read.
        let settled = place.corrupt.is_none() && place.applied >= place.replica.commit();
        let granters = place.replica.readable().filter(|_| settled);
        let Some((granters, since_ms)) = granters.zip(place.served_since_ms) else { return false };
        granters.iter().all(|granter| {
            is_planted(Defect::ReadWithoutLease) || self.leases.covers(granter, partition, since_ms, now_ms)
        })
    }

    /// A worker granted a lease until `until_ms`, but for these partitions.
    pub fn lease_held(&mut self, granter: Member, until_ms: u64, except: Vec<PartitionId>) {
        self.leases.held.retain(|known, _| known.0 != granter.ordinal);
        self.leases.held.insert((granter.ordinal, granter.store), (until_ms, except.into_iter().collect()));
    }

    /// Grants a lease to a process that asked now; returns the partitions that it does not cover.
    pub fn grant_lease(&mut self, holder: Member) -> Vec<PartitionId> {
        let until_ms = self.clock.elapsed_ms() + GRANT_MS;
        let mut except = Vec::new();
        for (index, place) in self.places.iter_mut().enumerate() {
            let partition = PartitionId(index as u32);
            let released = self.leases.released.get(&partition) == Some(&(holder, place.replica.promised()));
            if place.replica.may_grant(holder) && !released {
                place.replica.set_granted();
                let before = self.leases.granted.get(&partition).copied();
                self.leases.granted.insert(partition, Grant::granted(before, holder, until_ms));
            } else {
                except.push(partition);
            }
        }
        except
    }

    /// It is proven that this very process is dead: what it was granted has ended.
    pub fn proven_dead(&mut self, dead: Member) {
        self.leases.granted.values_mut().for_each(|grant| grant.end(dead));
        self.expire_grants();
    }

    /// A process says that it no longer reads a partition: it has seen another one lead.
    pub(crate) fn lease_released(&mut self, partition: PartitionId, holder: Member) {
        let promised = self.places[partition.0 as usize].replica.promised();
        self.leases.released.insert(partition, (holder, promised));
        if let Some(grant) = self.leases.granted.get_mut(&partition) {
            grant.end(holder);
            self.expire_grants();
        }
    }

    /// Ends the grants whose time is over.
    pub(crate) fn expire_grants(&mut self) {
        let now_ms = self.clock.elapsed_ms();
        let over = self.leases.granted.iter().filter(|(_, grant)| grant.until_ms <= now_ms);
        let over: Vec<PartitionId> = over.map(|(partition, _)| *partition).collect();
        for partition in over {
            self.leases.granted.remove(&partition);
            self.step(partition, Event::GrantOver);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_memory::Incarnation;

    #[test]
    fn a_grant_remembers_the_end_of_what_others_hold() {
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
            "the death of the second frees at 1200"
        );
    }
}
