//! Changes of an entry as what they mean, so that a proposal can be applied to the entry that is there when it arrives.

use crate::map::{Entry, Illegal, keeps_previous};
use crate::replica::{Defect, is_planted};
use engram_memory::{Member, Ordinal, Term};

/// What a proposal expects of the entry that it replaces. The term alone does not say whether `activated` was set since the
/// change was decided; [`Entry::changed`] besides judges a change by the entry that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Expected {
    /// Term.
    pub term: Term,
    /// Mark.
    pub activated: bool,
    /// Mark.
    pub solo_safe: bool,
}

/// What may happen to an entry.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Change {
    /// The primary of the term promised it, and if alone has all on disk: it may acknowledge from now on.
    Activate,
    /// The serving primary adds a copy that holds all that it acknowledged.
    Add {
        /// The primary, as the process that proposes.
        primary: Member,
        /// The copy, as the process whose acknowledgements were counted.
        newcomer: Member,
    },
    /// The serving primary goes on without a member.
    Remove {
        /// The primary, as the process that proposes.
        primary: Member,
        /// Who leaves.
        leaver: Ordinal,
    },
    /// Another candidate becomes primary, or the same one as a new process, with a part of the candidates.
    Promote {
        /// The new primary, as the process that shall serve.
        primary: Member,
        /// The in-sync set, `primary` included; all of them candidates.
        isr: Vec<Ordinal>,
    },
    /// Copies that the primary shall make. Safety does not rest on it.
    Learn(
        /// Who shall hold them.
        Vec<Ordinal>,
    ),
}

impl Entry {
    /// What a proposal made on this entry expects to find.
    pub const fn expected(&self) -> Expected {
        Expected { term: self.term, activated: self.activated, solo_safe: self.solo_safe }
    }

    /// Whether this is the entry on which a proposal was made.
    pub fn is_expected(&self, expected: Expected) -> bool {
        self.expected() == expected
    }

    /// The entry after `change`.
    ///
    /// # Errors
    /// The rule that the change breaks.
    pub fn changed(&self, change: &Change) -> Result<Self, Illegal> {
        let next = self.altered(change)?;
        self.check(&next).map(|()| next)
    }

    fn altered(&self, change: &Change) -> Result<Self, Illegal> {
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
                // to serve and never did, and may have lost something.
                let candidate = |ordinal: Ordinal| {
                    let records = self.candidates().filter(move |member| member.ordinal == ordinal);
                    if is_planted(Defect::PromoteRelabels) {
                        return records.max_by_key(|member| member.incarnation);
                    }
                    records.min_by_key(|member| member.incarnation)
                };
                let members = isr.iter().map(|ordinal| {
                    let anybody = Some(primary).filter(|_| is_planted(Defect::PromoteNonIsr));
                    let known = candidate(*ordinal).or(anybody).ok_or(Illegal::NotCandidate(*ordinal))?;
                    Ok(if *ordinal == primary.ordinal { *primary } else { *known })
                });
                next.isr = members.collect::<Result<_, _>>()?;
                next.primary = primary.ordinal;
                next.term.0 += 1;
                let same_members = next.isr.len() == 1 && self.isr.len() == 1 && self.isr[0].ordinal == primary.ordinal;
                next.solo_safe = self.solo_safe && same_members;
                let stale = is_planted(Defect::StalePrev) && !self.prev.is_empty();
                if self.activated && !stale {
                    next.prev.clone_from(&self.isr);
                }
                next.activated = false;
            }
        }
        Ok(next)
    }

    fn check_serving(&self, primary: &Member) -> Result<(), Illegal> {
        if self.activated && self.served_by(primary) { Ok(()) } else { Err(Illegal::NotServing(primary.ordinal)) }
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
    fn a_failover_and_the_way_back_are_legal_step_by_step() {
        let pair = Entry::first(vec![member(0, 1), member(1, 1)]);
        let promoted = pair.changed(&Change::Promote { primary: member(1, 1), isr: vec![Ordinal(1)] }).unwrap();
        assert_eq!((promoted.term, promoted.activated, promoted.solo_safe), (Term(2), false, false));
        assert_eq!(promoted.prev, pair.isr);
        let serving = promoted.changed(&Change::Activate).unwrap();
        assert!(serving.activated && serving.solo_safe && serving.prev.is_empty());
        assert!(promoted.expected() != serving.expected() && promoted.is_older_than(&serving));
        let learning = serving.changed(&Change::Learn(vec![Ordinal(0)])).unwrap();
        assert_eq!(learning.expected(), serving.expected(), "a hint is nothing that a proposal expects");
        let add = Change::Add { primary: member(1, 1), newcomer: member(0, 2) };
        let healed = learning.changed(&add).unwrap();
        assert_eq!((healed.term, healed.isr.len(), healed.solo_safe), (Term(3), 2, false));
        assert!(healed.activated && healed.learners.is_empty());
        let alone = healed.changed(&Change::Remove { primary: member(1, 1), leaver: Ordinal(0) }).unwrap();
        assert_eq!((alone.term, alone.isr.len(), alone.solo_safe), (Term(4), 1, true));
    }

    #[test]
    fn who_was_to_serve_and_never_did_keeps_the_record_of_the_process_that_was_counted() {
        let pair = Entry::first(vec![member(0, 1), member(1, 1)]);
        let restarted = pair.changed(&Change::Promote { primary: member(1, 2), isr: vec![Ordinal(1)] }).unwrap();
        let back = Change::Promote { primary: member(0, 1), isr: vec![Ordinal(0), Ordinal(1)] };
        let serving = restarted.changed(&back).unwrap().changed(&Change::Activate).unwrap();
        assert_eq!(serving.isr, pair.isr);
        assert!(
            !serving.holds_all(&member(1, 2), Incarnation(2), false),
            "it lost what the first process acknowledged"
        );
    }

    #[test]
    fn only_the_serving_process_changes_who_is_in_sync() {
        let pair = Entry::first(vec![member(0, 1), member(1, 1)]);
        let by = |primary| pair.changed(&Change::Remove { primary, leaver: Ordinal(1) });
        assert_eq!(by(member(0, 2)), Err(Illegal::NotServing(Ordinal(0))), "a new process has to be elected first");
        assert_eq!(by(member(1, 1)), Err(Illegal::NotServing(Ordinal(1))));
        let promote = |primary, isr| pair.changed(&Change::Promote { primary, isr });
        assert_eq!(promote(member(2, 1), vec![Ordinal(2)]), Err(Illegal::NotCandidate(Ordinal(2))));
        let foreign = Member { store: StoreId(7), ..member(1, 1) };
        assert_eq!(promote(foreign, vec![Ordinal(1)]), Err(Illegal::NotCandidate(Ordinal(1))));
        assert_eq!(promote(member(1, 1), vec![Ordinal(0)]), Err(Illegal::PrimaryNotInSync(Ordinal(1))));
    }
}
