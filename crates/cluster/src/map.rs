//! The partition map, and which changes of it are legal.
//!
//! One entry per partition: its term, its primary, and the replicas that hold everything acknowledged. A change of the
//! primary or of the in-sync set raises the term by one; `activated` and `solo_safe` may be set under a term but never
//! cleared; every other change is illegal, regardless of the proposer.

use crate::injected;
use engram_memory::{ClusterId, Incarnation, Member, Ordinal, PartitionId, Term};

/// The configuration of one partition.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Entry {
    /// Raised by one at every change of `primary` or `isr`.
    pub term: Term,
    /// Ordinal of the primary.
    pub primary: Ordinal,
    /// In-sync set: the replicas that hold everything acknowledged, the primary's included. The incarnation is that of
    /// the process whose acknowledgements were counted.
    pub isr: Vec<Member>,
    /// `isr` is one member, and it had everything on disk when it became the only one.
    pub solo_safe: bool,
    /// The primary of this term may have acknowledged writes.
    pub activated: bool,
    /// The in-sync set of the last activated entry, while this one is not activated.
    pub prev: Vec<Member>,
    /// Replicas being created: a hint without influence on safety.
    pub learners: Vec<Ordinal>,
}

/// The partition map of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartitionMap {
    /// The cluster that it belongs to.
    pub cluster: ClusterId,
    /// Raised by one at every write.
    pub version: u64,
    /// Indexed by partition.
    pub partitions: Vec<Entry>,
}

/// Why a change of an entry is illegal.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IllegalChange {
    /// The term does not match the change.
    #[error("the term goes from {old} to {new}; expected {expected}")]
    Term {
        /// Term before.
        old: Term,
        /// Term proposed.
        new: Term,
        /// Term that the change needs.
        expected: Term,
    },
    /// Above every term that a cluster can reach.
    #[error("term {0} is higher than any cluster gets; allowed: up to {last}", last = Entry::LAST_TERM)]
    TermTooHigh(Term),
    /// The new primary is not a candidate.
    #[error("worker {0} is no candidate: it is not in the in-sync set that may have acknowledged writes")]
    NotCandidate(Ordinal),
    /// The primary is missing from its own in-sync set, or listed twice.
    #[error("the in-sync set does not hold the primary, worker {0}, exactly once")]
    PrimaryNotInSync(Ordinal),
    /// The proposer is not the serving process.
    #[error("worker {0} does not serve as the process that proposes")]
    NotServing(Ordinal),
    /// A member enters without its primary, or together with another change.
    #[error("worker {0} can be added to the in-sync set only by its serving primary")]
    NotAddedByPrimary(Ordinal),
    /// A mark is cleared under the same term.
    #[error("the mark '{0}' cannot be cleared under one term")]
    MarkCleared(&'static str),
    /// `solo_safe` with more than one in-sync member.
    #[error("'solo safe' is for an in-sync set of one")]
    NotSolo,
    /// `prev` does not follow from the previous entry.
    #[error("the previous in-sync set does not follow from the replaced entry")]
    WrongPrevious,
    /// `prev` is set although the primary has begun to serve.
    #[error("the primary, worker {0}, is activated; allowed: no previous in-sync set")]
    PreviousOfActivated(Ordinal),
    /// The number of partitions or the cluster changed.
    #[error("the cluster or the number of partitions changed")]
    ShapeChanged,
}

impl Entry {
    /// Terms rise one by one, and by leaps after disasters: no cluster gets half as far, and there is headroom above.
    pub const LAST_TERM: Term = Term(u64::MAX / 2);

    /// Creates the first entry of a partition: every replica is empty, so all of them hold everything acknowledged. The
    /// first member is the primary.
    ///
    /// With no members.
    pub fn first(members: Vec<Member>) -> Self {
        Self {
            term: Term(1),
            primary: members[0].ordinal,
            solo_safe: members.len() == 1,
            isr: members,
            activated: true,
            prev: Vec::new(),
            learners: Vec::new(),
        }
    }

    /// Creates the entry of a partition with a single replica.
    pub fn solo(term: Term, member: Member) -> Self {
        Self { term, ..Self::first(vec![member]) }
    }

    /// Returns the in-sync member with an ordinal.
    pub fn in_sync(&self, ordinal: Ordinal) -> Option<&Member> {
        self.isr.iter().find(|member| member.ordinal == ordinal)
    }

    /// Whether `newer` is more advanced than this entry: a higher term, or more marks under the same.
    pub fn is_older_than(&self, newer: &Self) -> bool {
        let progress = |entry: &Self| (entry.term, entry.activated, entry.solo_safe);
        progress(self) < progress(newer) || (progress(self) == progress(newer) && self.learners != newer.learners)
    }

    /// Returns the primary as a member: with its store and the incarnation whose acknowledgements count.
    pub fn primary_member(&self) -> Option<&Member> {
        self.isr.iter().find(|member| member.ordinal == self.primary)
    }

    /// Members that may be promoted: the in-sync set, and the previous one while the primary of this term cannot have
    /// acknowledged anything.
    pub fn candidates(&self) -> impl Iterator<Item = &Member> {
        let settled = self.activated && !injected!(RollbackActivated);
        let before = if settled { [].as_slice() } else { self.prev.as_slice() };
        self.isr.iter().chain(before)
    }

    /// Whether the primary may acknowledge: it is activated, or no process outside the in-sync set may be promoted, as
    /// when leadership moves and all replicas stay. A single replica first has to confirm that everything is on its
    /// disk.
    pub fn is_settled(&self) -> bool {
        self.activated || (self.isr.len() > 1 && self.prev.iter().all(|member| self.isr.contains(member)))
    }

    /// Whether this exact process serves the partition.
    pub fn served_by(&self, member: &Member) -> bool {
        self.primary_member() == Some(member)
    }

    /// Whether a process holds everything acknowledged before this entry: it runs on the disk that the map names, and
    /// lost nothing that it had acknowledged there. With `keeps_all` (mode `sync`) a disk loses nothing; otherwise
    /// `lossless_since` is the incarnation from which on nothing was lost, and a single replica had all of it on disk.
    pub fn holds_all(&self, member: &Member, lossless_since: Incarnation, keeps_all: bool) -> bool {
        let before = if self.activated { &self.isr } else { &self.prev };
        let candidates = || self.candidates().chain(before);
        let record = candidates().filter(|record| record.ordinal == member.ordinal && same_store(record, member));
        let alone = self.solo_safe && candidates().all(|record| record.ordinal == member.ordinal);
        // The oldest record is the one whose acknowledgements were counted.
        record
            .min_by_key(|record| record.incarnation)
            .is_some_and(|record| keeps_all || alone || lossless_since <= record.incarnation)
    }

    /// Checks a change from `self` to `new`. The same disk under a newer incarnation counts as the same member: whether
    /// it lost anything is its own statement.
    ///
    /// # Errors
    /// The first rule that the change violates.
    pub fn check(&self, new: &Self) -> Result<(), IllegalChange> {
        let reconfigured = self.primary != new.primary || self.isr != new.isr;
        let expected = if reconfigured { Term(self.term.0 + 1) } else { self.term };
        if new.term != expected {
            return Err(IllegalChange::Term { old: self.term, new: new.term, expected });
        }
        new.check_invariants()?;
        if reconfigured { self.check_reconfigured(new) } else { self.check_marks(new) }
    }

    /// Checks what holds for every entry, regardless of its predecessor. Entries read from outside must pass it.
    ///
    /// # Errors
    /// The violated invariant.
    pub fn check_invariants(&self) -> Result<(), IllegalChange> {
        if self.term > Self::LAST_TERM {
            return Err(IllegalChange::TermTooHigh(self.term));
        }
        if self.isr.iter().filter(|member| member.ordinal == self.primary).count() != 1 {
            return Err(IllegalChange::PrimaryNotInSync(self.primary));
        }
        if self.activated && !self.prev.is_empty() && !keeps_previous() {
            return Err(IllegalChange::PreviousOfActivated(self.primary));
        }
        if self.solo_safe && self.isr.len() != 1 { Err(IllegalChange::NotSolo) } else { Ok(()) }
    }

    fn check_reconfigured(&self, new: &Self) -> Result<(), IllegalChange> {
        let same_disk =
            |a: &Member, b: &Member| a.ordinal == b.ordinal && same_store(a, b) && a.incarnation <= b.incarnation;
        let was_candidate = |member: &Member| self.candidates().any(|old| same_disk(old, member));
        let primary = new.primary_member().expect("check_invariants found the primary in the in-sync set");
        let unrestricted = injected!(PromoteNonIsr) && !new.activated;
        if !was_candidate(primary) && !unrestricted {
            return Err(IllegalChange::NotCandidate(new.primary));
        }
        // Only a primary that keeps serving may add a member, and it changes nothing about itself in the same step.
        let primary_stays = self.activated && self.primary_member() == Some(primary);
        if let Some(entered) = new.isr.iter().find(|member| !was_candidate(member))
            && !primary_stays
            && !unrestricted
        {
            return Err(IllegalChange::NotAddedByPrimary(entered.ordinal));
        }
        let prev = if self.activated { &self.isr } else { &self.prev };
        let expected: &[Member] = if new.activated { &[] } else { prev };
        if new.prev != expected && !keeps_previous() {
            return Err(IllegalChange::WrongPrevious);
        }
        Ok(())
    }

    fn check_marks(&self, new: &Self) -> Result<(), IllegalChange> {
        if self.activated && !new.activated {
            return Err(IllegalChange::MarkCleared("activated"));
        }
        if self.solo_safe && !new.solo_safe {
            return Err(IllegalChange::MarkCleared("solo safe"));
        }
        let expected: &[Member] = if new.activated { &[] } else { &self.prev };
        if new.prev == expected || keeps_previous() { Ok(()) } else { Err(IllegalChange::WrongPrevious) }
    }
}

/// Whether two members are on the same disk.
fn same_store(a: &Member, b: &Member) -> bool {
    a.store == b.store || injected!(EligibleByOrdinal)
}

/// Whether an injected bug keeps the previous in-sync set.
pub(crate) fn keeps_previous() -> bool {
    injected!(RollbackActivated) || injected!(StalePrev)
}

impl PartitionMap {
    /// Checks a change of the whole map, entry by entry.
    ///
    /// # Errors
    /// The first partition whose change is not legal, and why.
    pub fn check(&self, new: &Self) -> Result<(), (PartitionId, IllegalChange)> {
        if self.cluster != new.cluster || self.partitions.len() != new.partitions.len() {
            return Err((PartitionId(0), IllegalChange::ShapeChanged));
        }
        for (partition, (old, new)) in self.partitions.iter().zip(&new.partitions).enumerate() {
            old.check(new).map_err(|illegal| (PartitionId(partition as u32), illegal))?;
        }
        Ok(())
    }

    /// The partitions that `member`, this exact process, serves.
    pub fn served_by<'a>(&'a self, member: &'a Member) -> impl Iterator<Item = (PartitionId, Term)> + 'a {
        self.entries().filter(|(_, entry)| entry.served_by(member)).map(|(partition, entry)| (partition, entry.term))
    }

    /// Every partition with its entry.
    pub fn entries(&self) -> impl Iterator<Item = (PartitionId, &Entry)> {
        self.partitions.iter().enumerate().map(|(partition, entry)| (PartitionId(partition as u32), entry))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_memory::StoreId;

    fn member(ordinal: u32, incarnation: u64) -> Member {
        Member {
            ordinal: Ordinal(ordinal),
            store: StoreId(u128::from(ordinal) + 100),
            incarnation: Incarnation(incarnation),
        }
    }

    fn pair() -> Entry {
        Entry { isr: vec![member(0, 1), member(1, 1)], solo_safe: false, ..Entry::solo(Term(4), member(0, 1)) }
    }

    #[test]
    fn only_in_sync_replicas_can_be_promoted() {
        let old = pair();
        let promoted = Entry {
            term: Term(5),
            primary: Ordinal(1),
            isr: vec![member(1, 1)],
            activated: false,
            prev: old.isr.clone(),
            ..old.clone()
        };
        assert_eq!(old.check(&promoted), Ok(()));

        let stranger = Entry { primary: Ordinal(2), isr: vec![member(2, 1)], ..promoted.clone() };
        assert_eq!(old.check(&stranger), Err(IllegalChange::NotCandidate(Ordinal(2))));

        let mut other_disk = promoted.clone();
        other_disk.isr[0].store = StoreId(7);
        assert_eq!(old.check(&other_disk), Err(IllegalChange::NotCandidate(Ordinal(1))));

        let mut older_process = Entry { isr: vec![member(1, 0)], ..promoted.clone() };
        assert_eq!(old.check(&older_process), Err(IllegalChange::NotCandidate(Ordinal(1))));
        older_process.isr = vec![member(1, 9)];
        assert_eq!(old.check(&older_process), Ok(()));

        // The primary of term 5 acknowledged nothing: the replica left behind may still come back.
        let rolled_back = Entry { term: Term(6), primary: Ordinal(0), isr: vec![member(0, 1)], ..promoted.clone() };
        assert_eq!(promoted.check(&rolled_back), Ok(()));
        let activated = Entry { activated: true, prev: Vec::new(), ..promoted.clone() };
        assert_eq!(promoted.check(&activated), Ok(()));
        assert!(!promoted.is_settled() && activated.is_settled());
        let all_stay = Entry { isr: vec![member(1, 1), member(0, 1)], ..promoted.clone() };
        assert!(all_stay.is_settled(), "every candidate is in sync");
        let restarted = Entry { isr: vec![member(1, 2), member(0, 1)], ..promoted };
        assert!(!restarted.is_settled(), "a new incarnation is not known to hold what its predecessor held");
        let too_late = Entry { prev: activated.isr.clone(), ..rolled_back };
        assert_eq!(activated.check(&too_late), Err(IllegalChange::NotCandidate(Ordinal(0))));
    }

    #[test]
    fn entries_from_outside_are_checked_against_the_invariants() {
        let rejection = |entry: Entry| entry.check_invariants().unwrap_err();
        assert_eq!(pair().check_invariants(), Ok(()));
        assert_eq!(rejection(Entry { primary: Ordinal(7), ..pair() }), IllegalChange::PrimaryNotInSync(Ordinal(7)));
        let twice = Entry { isr: vec![member(0, 1), member(0, 2)], ..pair() };
        assert_eq!(rejection(twice), IllegalChange::PrimaryNotInSync(Ordinal(0)));
        assert_eq!(rejection(Entry { solo_safe: true, ..pair() }), IllegalChange::NotSolo);
        let others = Entry { prev: vec![member(2, 1)], ..pair() };
        assert_eq!(rejection(others), IllegalChange::PreviousOfActivated(Ordinal(0)));
        assert_eq!(rejection(Entry { term: Term(u64::MAX), ..pair() }), IllegalChange::TermTooHigh(Term(u64::MAX)));
    }

    #[test]
    fn terms_rise_by_one_with_the_configuration_and_only_then() {
        let old = pair();
        let shrunk = |term| Entry { term: Term(term), isr: vec![member(0, 1)], ..old.clone() };
        assert_eq!(old.check(&shrunk(5)), Ok(()));
        for term in [3, 4, 6] {
            assert!(matches!(old.check(&shrunk(term)), Err(IllegalChange::Term { .. })));
        }
        let idle = Entry { term: Term(5), ..old.clone() };
        assert!(matches!(old.check(&idle), Err(IllegalChange::Term { .. })));
    }

    #[test]
    fn members_are_added_only_by_their_serving_primary() {
        let old = Entry::solo(Term(1), member(0, 1));
        let grown = Entry { term: Term(2), isr: vec![member(0, 1), member(1, 1)], solo_safe: false, ..old.clone() };
        assert_eq!(old.check(&grown), Ok(()));
        let restarted = Entry { isr: vec![member(0, 2), member(1, 1)], ..grown };
        assert_eq!(old.check(&restarted), Err(IllegalChange::NotAddedByPrimary(Ordinal(1))));
    }

    #[test]
    fn marks_are_never_cleared_under_a_term() {
        let old = Entry::solo(Term(1), member(0, 1));
        let cleared = Entry { activated: false, ..old.clone() };
        assert_eq!(old.check(&cleared), Err(IllegalChange::MarkCleared("activated")));
        let cleared = Entry { solo_safe: false, ..old.clone() };
        assert_eq!(old.check(&cleared), Err(IllegalChange::MarkCleared("solo safe")));
        let crowded = Entry { solo_safe: true, ..pair() };
        assert_eq!(pair().check(&crowded), Err(IllegalChange::NotSolo));
    }
}
