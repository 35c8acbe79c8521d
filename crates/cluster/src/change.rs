//! Changes of a map entry as intents, so that a proposal is applied to the entry that exists when it arrives.

use crate::injected;
use crate::map::{Entry, IllegalChange, keeps_previous};
use engram_memory::{Member, Ordinal, Term};

/// What a proposal expects of the entry that it replaces. The term alone does not say whether `activated` was set after
/// the change was decided; [`Entry::apply`] additionally validates the change against the current entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExpectedEntry {
    /// Expected term.
    pub term: Term,
    /// Expected `activated` mark.
    pub activated: bool,
    /// Expected `solo_safe` mark.
    pub solo_safe: bool,
}

/// A change of a map entry.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Change {
    /// The primary has made its promise of the term durable, and its whole log if it is the only replica: it may
    /// acknowledge writes.
    Activate,
    /// The serving primary adds a replica that holds everything acknowledged.
    Add {
        /// The primary, as the proposing process.
        primary: Member,
        /// The replica, as the process whose acknowledgements were counted.
        newcomer: Member,
    },
    /// The serving primary removes a member.
    Remove {
        /// The primary, as the proposing process.
        primary: Member,
        /// The member to remove.
        leaver: Ordinal,
    },
    /// Another candidate becomes primary, or the same one as a new process, with a subset of the candidates.
    Promote {
        /// The new primary, as the process that is to serve.
        primary: Member,
        /// The in-sync set, `primary` included; all of them are candidates.
        isr: Vec<Ordinal>,
    },
    /// Sets the replicas that the primary is to create. A hint without influence on safety.
    Learn(
        /// Ordinals of the learners.
        Vec<Ordinal>,
    ),
}

impl Entry {
    /// Returns what a proposal based on this entry expects.
    pub const fn expectation(&self) -> ExpectedEntry {
        ExpectedEntry { term: self.term, activated: self.activated, solo_safe: self.solo_safe }
    }

    /// Whether this is the entry on which a proposal was based.
    pub fn matches_expectation(&self, expected: ExpectedEntry) -> bool {
        self.expectation() == expected
    }

    /// Returns the entry after `change`.
    ///
    /// # Errors
    /// The rule that the change violates.
    pub fn apply(&self, change: &Change) -> Result<Self, IllegalChange> {
        let next = self.apply_unchecked(change)?;
        self.check(&next).map(|()| next)
    }

    fn apply_unchecked(&self, change: &Change) -> Result<Self, IllegalChange> {
        let mut next = self.clone();
        match change {
            Change::Activate => {
                next.activated = true;
                next.solo_safe = next.isr.len() == 1;
                if !keeps_previous() {
                    next.prev.clear();
                }
            }
            Change::Learn(learners) => next.learners.clone_from(learners),
            Change::Add { primary, newcomer } => {
                self.check_serving(primary)?;
                next.isr.retain(|member| member.ordinal != newcomer.ordinal);
                next.isr.push(*newcomer);
                next.learners.retain(|learner| *learner != newcomer.ordinal);
                next.solo_safe = false;
                next.term.0 += 1;
            }
            Change::Remove { primary, leaver } => {
                self.check_serving(primary)?;
                next.isr.retain(|member| member.ordinal != *leaver);
                next.solo_safe = next.isr.len() == 1;
                next.term.0 += 1;
            }
            Change::Promote { primary, isr } => {
                // The oldest record of a member is the process whose acknowledgements were counted: a later one was
                // promoted but never served, and may have lost records.
                let candidate = |ordinal: Ordinal| {
                    let records = self.candidates().filter(move |member| member.ordinal == ordinal);
                    if injected!(PromoteRelabels) {
                        return records.max_by_key(|member| member.incarnation);
                    }
                    records.min_by_key(|member| member.incarnation)
                };
                let members = isr.iter().map(|ordinal| {
                    let injected_primary = Some(primary).filter(|_| injected!(PromoteNonIsr));
                    let record =
                        candidate(*ordinal).or(injected_primary).ok_or(IllegalChange::NotCandidate(*ordinal))?;
                    Ok(if *ordinal == primary.ordinal { *primary } else { *record })
                });
                next.isr = members.collect::<Result<_, _>>()?;
                next.primary = primary.ordinal;
                next.term.0 += 1;
                let same_members = next.isr.len() == 1 && self.isr.len() == 1 && self.isr[0].ordinal == primary.ordinal;
                next.solo_safe = self.solo_safe && same_members;
                let stale = injected!(StalePrev) && !self.prev.is_empty();
                if self.activated && !stale {
                    next.prev.clone_from(&self.isr);
                }
                next.activated = false;
            }
        }
        Ok(next)
    }

    fn check_serving(&self, primary: &Member) -> Result<(), IllegalChange> {
        if self.activated && self.served_by(primary) { Ok(()) } else { Err(IllegalChange::NotServing(primary.ordinal)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_memory::{Incarnation, StoreId};

    fn member(ordinal: u32, incarnation: u64) -> Member {
        let store = StoreId(u128::from(ordinal) + 100);
        Member { ordinal: Ordinal(ordinal), store, incarnation: Incarnation(incarnation) }
    }

    #[test]
    fn failover_and_failback_are_legal_step_by_step() {
        let pair = Entry::first(vec![member(0, 1), member(1, 1)]);
        let promoted = pair.apply(&Change::Promote { primary: member(1, 1), isr: vec![Ordinal(1)] }).unwrap();
        assert_eq!((promoted.term, promoted.activated, promoted.solo_safe), (Term(2), false, false));
        assert_eq!(promoted.prev, pair.isr);
        let serving = promoted.apply(&Change::Activate).unwrap();
        assert!(serving.activated && serving.solo_safe && serving.prev.is_empty());
        assert!(promoted.expectation() != serving.expectation() && promoted.is_older_than(&serving));
        let learning = serving.apply(&Change::Learn(vec![Ordinal(0)])).unwrap();
        assert_eq!(learning.expectation(), serving.expectation(), "learners are not part of the expectation");
        let add = Change::Add { primary: member(1, 1), newcomer: member(0, 2) };
        let restored = learning.apply(&add).unwrap();
        assert_eq!((restored.term, restored.isr.len(), restored.solo_safe), (Term(3), 2, false));
        assert!(restored.activated && restored.learners.is_empty());
        let alone = restored.apply(&Change::Remove { primary: member(1, 1), leaver: Ordinal(0) }).unwrap();
        assert_eq!((alone.term, alone.isr.len(), alone.solo_safe), (Term(4), 1, true));
    }

    #[test]
    fn promoted_process_that_never_served_keeps_the_counted_incarnation() {
        let pair = Entry::first(vec![member(0, 1), member(1, 1)]);
        let restarted = pair.apply(&Change::Promote { primary: member(1, 2), isr: vec![Ordinal(1)] }).unwrap();
        let back = Change::Promote { primary: member(0, 1), isr: vec![Ordinal(0), Ordinal(1)] };
        let serving = restarted.apply(&back).unwrap().apply(&Change::Activate).unwrap();
        assert_eq!(serving.isr, pair.isr);
        assert!(
            !serving.holds_all(&member(1, 2), Incarnation(2), false),
            "it lost what the first process acknowledged"
        );
    }

    #[test]
    fn only_the_serving_process_changes_the_in_sync_set() {
        let pair = Entry::first(vec![member(0, 1), member(1, 1)]);
        let by = |primary| pair.apply(&Change::Remove { primary, leaver: Ordinal(1) });
        assert_eq!(
            by(member(0, 2)),
            Err(IllegalChange::NotServing(Ordinal(0))),
            "a new process must be promoted first"
        );
        assert_eq!(by(member(1, 1)), Err(IllegalChange::NotServing(Ordinal(1))));
        let promote = |primary, isr| pair.apply(&Change::Promote { primary, isr });
        assert_eq!(promote(member(2, 1), vec![Ordinal(2)]), Err(IllegalChange::NotCandidate(Ordinal(2))));
        let foreign = Member { store: StoreId(7), ..member(1, 1) };
        assert_eq!(promote(foreign, vec![Ordinal(1)]), Err(IllegalChange::NotCandidate(Ordinal(1))));
        assert_eq!(promote(member(1, 1), vec![Ordinal(0)]), Err(IllegalChange::PrimaryNotInSync(Ordinal(1))));
    }
}
