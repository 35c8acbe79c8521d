//! The partition map, and which changes of it are legal.
//!
//! One entry per partition: its term, who serves it, which copies hold everything that was acknowledged. A change of
//! primary or of the in-sync set raises the term by one; `activated` and `solo_safe` may be set under a term but never
//! cleared; everything else is illegal, whoever proposes it.

use crate::replica::{Defect, is_planted};
use engram_memory::{ClusterId, Incarnation, Member, Ordinal, PartitionId, Term};

/// The configuration of one partition.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Entry {
    /// Raised by one at every change of `primary` or `isr`.
    pub term: Term,
    /// Who serves it.
    pub primary: Ordinal,
    /// The copies that hold all that was acknowledged, the primary's included. The incarnation is that of the process whose
    /// acknowledgements were counted.
    pub isr: Vec<Member>,
    /// `isr` is one member, and it had everything on disk when it became alone.
    pub solo_safe: bool,
    /// The primary of this term may have acknowledged writes.
    pub activated: bool,
    /// The in-sync set of the last activated entry, while this one is not activated.
    pub prev: Vec<Member>,
    /// Copies being made: a hint, safety does not rest on it.
    pub learners: Vec<Ordinal>,
}

/// The whole map of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartitionMap {
    /// The cluster it belongs to.
    pub cluster: ClusterId,
    /// Raised by one at every write.
    pub version: u64,
    /// Indexed by partition.
    pub partitions: Vec<Entry>,
}

/// Why a change of an entry is not legal.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Illegal {
    /// The term does not fit the change.
    #[error("the term goes from {old} to {new}; expected {expected}")]
    Term {
        /// Term before.
        old: Term,
        /// Term proposed.
        new: Term,
        /// Term that the change needs.
        expected: Term,
    },
    /// Nobody raised it so far.
    #[error("term {0} is higher than any cluster gets; allowed: up to {last}", last = Entry::LAST_TERM)]
    TermTooHigh(Term),
    /// The new primary has no right to serve.
    #[error("worker {0} is no candidate: it is not in the in-sync set that may have acknowledged writes")]
    NotCandidate(Ordinal),
    /// The primary is not in its own in-sync set, or stands there twice.
    #[error("the in-sync set does not hold the primary, worker {0}, exactly once")]
    PrimaryNotInSync(Ordinal),
    /// The proposer is not the process that serves.
    #[error("worker {0} does not serve as the process that proposes")]
    NotServing(Ordinal),
    /// A member enters without its primary, or together with another change.
    #[error("worker {0} may enter the in-sync set only by its serving primary")]
    Entered(Ordinal),
    /// A mark that was set is cleared under one term.
    #[error("the mark '{0}' cannot be cleared under one term")]
    MarkCleared(&'static str),
    /// `solo_safe` with more than one member in sync.
    #[error("'solo safe' is for an in-sync set of one")]
    NotSolo,
    /// `prev` is not what follows from the entry before.
    #[error("the previous in-sync set does not follow from the entry before")]
    Previous,
    /// `prev` of an entry whose primary has begun to serve: nobody else counts any more.
    #[error("the primary, worker {0}, is activated; allowed: no previous in-sync set")]
    PreviousOfActivated(Ordinal),
    /// The number of partitions or the cluster changed.
    #[error("the cluster or the number of partitions changed")]
    Shape,
}

impl Entry {
    /// Terms are raised one by one, and by leaps after disasters: nobody gets half as far, and there is room above.
    pub const LAST_TERM: Term = Term(u64::MAX / 2);

    /// The first entry of a partition: every copy is empty, so all of them hold all that was acknowledged. The first
    /// member is the primary.
    ///
    /// # Panics
    /// Without a member.
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

    /// The entry of a partition with one copy, which nobody else can claim.
    pub fn solo(term: Term, member: Member) -> Self {
        Self { term, ..Self::first(vec![member]) }
    }

    /// The in-sync member at a place.
    pub fn in_sync(&self, ordinal: Ordinal) -> Option<&Member> {
        self.isr.iter().find(|member| member.ordinal == ordinal)
    }

    /// Whether `newer` says more than this entry: a higher term, or more marks under the same.
    pub fn is_older_than(&self, newer: &Self) -> bool {
        let progress = |entry: &Self| (entry.term, entry.activated, entry.solo_safe);
        progress(self) < progress(newer) || (progress(self) == progress(newer) && self.learners != newer.learners)
    }

    /// The member that serves: the primary with its store and the incarnation whose acknowledgements count.
    pub fn primary_member(&self) -> Option<&Member> {
        self.isr.iter().find(|member| member.ordinal == self.primary)
    }

    /// Who may be promoted: the in-sync set, and while nobody of this term can have acknowledged, the one before.
    pub fn candidates(&self) -> impl Iterator<Item = &Member> {
        let settled = self.activated && !is_planted(Defect::RollbackActivated);
        let before = if settled { [].as_slice() } else { self.prev.as_slice() };
        self.isr.iter().chain(before)
    }

    /// Whether the primary may acknowledge. It is activated; or nobody outside of the in-sync set may be promoted, as when primaryship
    /// moves and all copies stay: the mark would exclude nobody, for every candidate holds what all in sync hold. Who is alone has to
    /// say first that all is on its disk.
    pub fn is_settled(&self) -> bool {
        self.activated || (self.isr.len() > 1 && self.prev.iter().all(|member| self.isr.contains(member)))
    }

    /// Whether this very process serves the partition.
    pub fn served_by(&self, member: &Member) -> bool {
        self.primary_member() == Some(member)
    }

    /// Whether a process holds everything that was acknowledged before this entry: it runs on the disk that the map names, and lost
    /// nothing that it had acknowledged there. With `keeps_all` (mode `sync`) a disk loses nothing; otherwise
    /// `lossless_since` says from which incarnation on nothing was lost, and who was alone had all of it on disk.
    pub fn holds_all(&self, member: &Member, lossless_since: Incarnation, keeps_all: bool) -> bool {
        let before = if self.activated { &self.isr } else { &self.prev };
        let candidates = || self.candidates().chain(before);
        let known = candidates().filter(|known| known.ordinal == member.ordinal && same_store(known, member));
        let alone = self.solo_safe && candidates().all(|known| known.ordinal == member.ordinal);
        // The oldest record of it is the one whose acknowledgements were counted.
        known
            .min_by_key(|known| known.incarnation)
            .is_some_and(|known| keeps_all || alone || lossless_since <= known.incarnation)
    }

    /// Checks a change from `self` to `new`. The same disk under a newer incarnation counts as the same member: whether
    /// it lost anything it had written is its own statement.
    ///
    /// # Errors
    /// The first rule that the change breaks.
    pub fn check(&self, new: &Self) -> Result<(), Illegal> {
        let reconfigured = self.primary != new.primary || self.isr != new.isr;
        let expected = if reconfigured { Term(self.term.0 + 1) } else { self.term };
        if new.term != expected {
            return Err(Illegal::Term { old: self.term, new: new.term, expected });
        }
        new.check_alone()?;
        if reconfigured { self.check_reconfigured(new) } else { self.check_marks(new) }
    }

    /// Checks what holds for every entry, whatever was there before: whoever reads one from outside does.
    ///
    /// # Errors
    /// The primary is not in sync, alone is who is not, others count beside a primary that serves, or no cluster gets to this term.
    pub fn check_alone(&self) -> Result<(), Illegal> {
        if self.term > Self::LAST_TERM {
            return Err(Illegal::TermTooHigh(self.term));
        }
        if self.isr.iter().filter(|member| member.ordinal == self.primary).count() != 1 {
            return Err(Illegal::PrimaryNotInSync(self.primary));
        }
        if self.activated && !self.prev.is_empty() && !keeps_previous() {
            return Err(Illegal::PreviousOfActivated(self.primary));
        }
        if self.solo_safe && self.isr.len() != 1 { Err(Illegal::NotSolo) } else { Ok(()) }
    }

    fn check_reconfigured(&self, new: &Self) -> Result<(), Illegal> {
        let same_disk =
            |a: &Member, b: &Member| a.ordinal == b.ordinal && same_store(a, b) && a.incarnation <= b.incarnation;
        let was_candidate = |member: &Member| self.candidates().any(|old| same_disk(old, member));
        let primary = new.primary_member().expect("checked: the primary stands in the in-sync set");
        let anybody = is_planted(Defect::PromoteNonIsr) && !new.activated;
        if !was_candidate(primary) && !anybody {
            return Err(Illegal::NotCandidate(new.primary));
        }
        // Only a primary that goes on serving may bring somebody in, and it changes nothing of itself meanwhile.
        let primary_stays = self.activated && self.primary_member() == Some(primary);
        if let Some(entered) = new.isr.iter().find(|member| !was_candidate(member))
            && !primary_stays
            && !anybody
        {
            return Err(Illegal::Entered(entered.ordinal));
        }
        let prev = if self.activated { &self.isr } else { &self.prev };
        let expected: &[Member] = if new.activated { &[] } else { prev };
        if new.prev != expected && !keeps_previous() {
            return Err(Illegal::Previous);
        }
        Ok(())
    }

    fn check_marks(&self, new: &Self) -> Result<(), Illegal> {
        if self.activated && !new.activated {
            return Err(Illegal::MarkCleared("activated"));
        }
        if self.solo_safe && !new.solo_safe {
            return Err(Illegal::MarkCleared("solo safe"));
        }
        let expected: &[Member] = if new.activated { &[] } else { &self.prev };
        if new.prev == expected || keeps_previous() { Ok(()) } else { Err(Illegal::Previous) }
    }
}

/// Whether two members are the same disk.
fn same_store(a: &Member, b: &Member) -> bool {
    a.store == b.store || is_planted(Defect::EligibleByOrdinal)
}

/// Whether the in-sync set before is kept when it should not be: a planted defect.
pub(crate) fn keeps_previous() -> bool {
    is_planted(Defect::RollbackActivated) || is_planted(Defect::StalePrev)
}

impl PartitionMap {
    /// Checks a change of the whole map, entry by entry.
    ///
    /// # Errors
    /// The first partition whose change is not legal, and why.
    pub fn check(&self, new: &Self) -> Result<(), (PartitionId, Illegal)> {
        if self.cluster != new.cluster || self.partitions.len() != new.partitions.len() {
            return Err((PartitionId(0), Illegal::Shape));
        }
        for (partition, (old, new)) in self.partitions.iter().zip(&new.partitions).enumerate() {
            old.check(new).map_err(|illegal| (PartitionId(partition as u32), illegal))?;
        }
        Ok(())
    }

    /// The partitions that `member`, this very process, serves.
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
    fn promotion_of_an_in_sync_copy_is_legal_and_of_anybody_else_is_not() {
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
        assert_eq!(old.check(&stranger), Err(Illegal::NotCandidate(Ordinal(2))));

        let mut other_disk = promoted.clone();
        other_disk.isr[0].store = StoreId(7);
        assert_eq!(old.check(&other_disk), Err(Illegal::NotCandidate(Ordinal(1))));

        let mut older_process = Entry { isr: vec![member(1, 0)], ..promoted.clone() };
        assert_eq!(old.check(&older_process), Err(Illegal::NotCandidate(Ordinal(1))));
        older_process.isr = vec![member(1, 9)];
        assert_eq!(old.check(&older_process), Ok(()));

        // Nobody of term 5 acknowledged: the copy left behind may still come back.
        let rolled_back = Entry { term: Term(6), primary: Ordinal(0), isr: vec![member(0, 1)], ..promoted.clone() };
        assert_eq!(promoted.check(&rolled_back), Ok(()));
        let activated = Entry { activated: true, prev: Vec::new(), ..promoted.clone() };
        assert_eq!(promoted.check(&activated), Ok(()));
        assert!(!promoted.is_settled() && activated.is_settled());
        let all_stay = Entry { isr: vec![member(1, 1), member(0, 1)], ..promoted.clone() };
        assert!(all_stay.is_settled(), "whoever may be promoted is in sync");
        let restarted = Entry { isr: vec![member(1, 2), member(0, 1)], ..promoted };
        assert!(!restarted.is_settled(), "what the process before held is not known to be held now");
        let too_late = Entry { prev: activated.isr.clone(), ..rolled_back };
        assert_eq!(activated.check(&too_late), Err(Illegal::NotCandidate(Ordinal(0))));
    }

    #[test]
    fn an_entry_from_outside_is_one_that_can_be_worked_with() {
        let refused = |entry: Entry| entry.check_alone().unwrap_err();
        assert_eq!(pair().check_alone(), Ok(()));
        assert_eq!(refused(Entry { primary: Ordinal(7), ..pair() }), Illegal::PrimaryNotInSync(Ordinal(7)));
        let twice = Entry { isr: vec![member(0, 1), member(0, 2)], ..pair() };
        assert_eq!(refused(twice), Illegal::PrimaryNotInSync(Ordinal(0)));
        assert_eq!(refused(Entry { solo_safe: true, ..pair() }), Illegal::NotSolo);
        let others = Entry { prev: vec![member(2, 1)], ..pair() };
        assert_eq!(refused(others), Illegal::PreviousOfActivated(Ordinal(0)));
        assert_eq!(refused(Entry { term: Term(u64::MAX), ..pair() }), Illegal::TermTooHigh(Term(u64::MAX)));
    }

    #[test]
    fn terms_rise_by_one_with_the_configuration_and_only_then() {
        let old = pair();
        let shrunk = |term| Entry { term: Term(term), isr: vec![member(0, 1)], ..old.clone() };
        assert_eq!(old.check(&shrunk(5)), Ok(()));
        for term in [3, 4, 6] {
            assert!(matches!(old.check(&shrunk(term)), Err(Illegal::Term { .. })));
        }
        let idle = Entry { term: Term(5), ..old.clone() };
        assert!(matches!(old.check(&idle), Err(Illegal::Term { .. })));
    }

    #[test]
    fn members_enter_by_their_serving_primary_alone() {
        let old = Entry::solo(Term(1), member(0, 1));
        let grown = Entry { term: Term(2), isr: vec![member(0, 1), member(1, 1)], solo_safe: false, ..old.clone() };
        assert_eq!(old.check(&grown), Ok(()));
        let restarted = Entry { isr: vec![member(0, 2), member(1, 1)], ..grown };
        assert_eq!(old.check(&restarted), Err(Illegal::Entered(Ordinal(1))));
    }

    #[test]
    fn marks_are_never_cleared_under_a_term() {
        let old = Entry::solo(Term(1), member(0, 1));
        let cleared = Entry { activated: false, ..old.clone() };
        assert_eq!(old.check(&cleared), Err(Illegal::MarkCleared("activated")));
        let cleared = Entry { solo_safe: false, ..old.clone() };
        assert_eq!(old.check(&cleared), Err(Illegal::MarkCleared("solo safe")));
        let crowded = Entry { solo_safe: true, ..pair() };
        assert_eq!(pair().check(&crowded), Err(Illegal::NotSolo));
    }
}
