//! Leads that the map gives to a copy here that does not take them: it is damaged, or lost something that the map knows nothing of.
//!
//! Another candidate shall lead, and nobody else knows what became of this one, so whoever cannot lead passes it on. Where no candidate
//! can, the lead would go round for ever. So whoever declines also says so to the other candidates, again and again while it is true,
//! and nobody passes a lead on to one that says it: the lead rests where all others have been heard, until one of them is started
//! again or says nothing any more.

use engram_cluster::{Change, Entry};
use engram_memory::{Member, Ordinal, PartitionId, Term};
use std::collections::BTreeMap;

/// How long the word of who declines counts: it is said again every 300 ms.
const COUNTS_MS: u64 = 1_500;

/// What is declined here, and by others.
#[derive(Debug, Default)]
pub(crate) struct Declines {
    here: BTreeMap<PartitionId, Declined>,
    /// Which processes said that they do not lead, and when last.
    there: BTreeMap<(PartitionId, Member), u64>,
}

/// A lead that is declined here.
#[derive(Debug)]
struct Declined {
    /// The newest of the map.
    entry: Entry,
    /// The map gives it to this place.
    is_given: bool,
    /// The highest term that was promised: whoever leads raises it.
    promised: Term,
}

/// What others shall know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Say {
    /// To this place: the lead of this term is declined.
    Declined(PartitionId, Ordinal, Term),
    /// To the map: another one shall lead.
    PassOn(PartitionId, Entry, Change),
}

impl Declines {
    /// Takes an entry of the map; `declines`: it gives the lead to this place, whose copy does not take it.
    pub(crate) fn learn(&mut self, partition: PartitionId, entry: &Entry, promised: Term, declines: bool) {
        if declines {
            self.here.insert(partition, Declined { entry: entry.clone(), is_given: true, promised });
        } else if let Some(before) = self.here.get_mut(&partition) {
            // Passed on, and still unable until somebody has led: whoever has it now shall know that.
            if before.promised == promised && !entry.activated {
                (before.entry, before.is_given) = (entry.clone(), false);
            } else {
                self.here.remove(&partition);
            }
        }
    }

    /// Takes the word of a process that it does not lead.
    pub(crate) fn heard(&mut self, partition: PartitionId, from: Member, now_ms: u64) {
        self.there.insert((partition, from), now_ms);
    }

    /// The partitions that the map gives to this place, and nobody leads.
    pub(crate) fn unled(&self) -> impl Iterator<Item = PartitionId> {
        self.here.iter().filter(|(_, declined)| declined.is_given).map(|(partition, _)| *partition)
    }

    /// What is to be said now. `runs`: the process at a member's place, where it is not taken for dead.
    pub(crate) fn say(&mut self, own: Ordinal, now_ms: u64, runs: impl Fn(&Member) -> Option<Member>) -> Vec<Say> {
        self.there.retain(|_, heard_ms| now_ms < *heard_ms + COUNTS_MS);
        let mut out = Vec::new();
        for (partition, Declined { entry, is_given, .. }) in &self.here {
            let others = || entry.candidates().filter(|member| member.ordinal != own);
            // Another disk at the place of a candidate: what that one held is not there.
            let running = |known: &Member| runs(known).filter(|runs| runs.store == known.store);
            let mut told: Vec<Ordinal> = others().filter_map(running).map(|member| member.ordinal).collect();
            told.sort_unstable();
            told.dedup();
            out.extend(told.into_iter().map(|other| Say::Declined(*partition, other, entry.term)));
            if !is_given {
                continue;
            }
            let able = |runs: &Member| !self.there.contains_key(&(*partition, *runs));
            let chosen = others().filter_map(|known| running(known).filter(able).map(|runs| (runs != *known, runs)));
            // One that goes on has lost nothing, one that was started again may have.
            if let Some((_, primary)) = chosen.min_by_key(|(started_again, _)| *started_again) {
                let mut isr: Vec<Ordinal> = others().filter(|it| runs(it).is_some()).map(|it| it.ordinal).collect();
                isr.sort_unstable();
                isr.dedup();
                out.push(Say::PassOn(*partition, entry.clone(), Change::Promote { primary, isr }));
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_memory::{Incarnation, StoreId};

    const P: PartitionId = PartitionId(3);

    fn member(ordinal: u32, incarnation: u64) -> Member {
        let store = StoreId(u128::from(ordinal) + 1);
        Member { ordinal: Ordinal(ordinal), store, incarnation: Incarnation(incarnation) }
    }

    /// A worker whose copy cannot lead.
    struct Unable {
        me: Member,
        declines: Declines,
    }

    impl Unable {
        fn new(ordinal: u32) -> Self {
            Self { me: member(ordinal, 1), declines: Declines::default() }
        }

        fn learn(&mut self, entry: &Entry) {
            self.declines.learn(P, entry, Term(1), entry.primary == self.me.ordinal);
        }

        fn say(&mut self, now_ms: u64, members: &[Member]) -> Vec<Say> {
            let runs = |known: &Member| members.iter().find(|runs| runs.ordinal == known.ordinal).copied();
            self.declines.say(self.me.ordinal, now_ms, runs)
        }
    }

    /// Lets all say what they have to, until nothing changes any more: how often the lead moved.
    fn moves(entry: &mut Entry, unable: &mut [Unable], members: &[Member], now_ms: u64, turns: u64) -> usize {
        let mut moves = 0;
        for turn in 0..turns {
            let now_ms = now_ms + turn * 300;
            for at in 0..unable.len() {
                unable[at].learn(entry);
                for said in unable[at].say(now_ms, members) {
                    match said {
                        Say::Declined(partition, to, _) => {
                            let from = unable[at].me;
                            if let Some(hears) = unable.iter_mut().find(|it| it.me.ordinal == to) {
                                hears.declines.heard(partition, from, now_ms);
                            }
                        }
                        Say::PassOn(_, expected, change) if expected == *entry => {
                            let next = entry.changed(&change).unwrap();
                            entry.check(&next).unwrap();
                            *entry = next;
                            moves += 1;
                        }
                        Say::PassOn(..) => {}
                    }
                }
            }
        }
        moves
    }

    #[test]
    fn a_lead_that_nobody_can_take_comes_to_rest() {
        for copies in 2..=4_u32 {
            let members: Vec<Member> = (0..copies).map(|ordinal| member(ordinal, 1)).collect();
            let mut entry = Entry::first(members.clone());
            let mut unable: Vec<Unable> = (0..copies).map(Unable::new).collect();
            let first = moves(&mut entry, &mut unable, &members, 0, 10);
            assert!((1..=2 * copies as usize).contains(&first), "{copies} copies: {first} moves");
            assert_eq!(moves(&mut entry, &mut unable, &members, 3_000, 200), 0, "{copies} copies: it rests");
        }
    }

    #[test]
    fn who_was_started_again_is_asked_again_and_so_is_who_says_nothing_any_more() {
        let members = [member(0, 1), member(1, 1)];
        let mut entry = Entry::first(members.to_vec());
        let mut unable: Vec<Unable> = (0..2).map(Unable::new).collect();
        moves(&mut entry, &mut unable, &members, 0, 10);
        let (holder, other) = (entry.primary, 1 - entry.primary.0);
        let holder = &mut unable[holder.0 as usize];
        let passes_on = |said: &[Say]| said.iter().any(|said| matches!(said, Say::PassOn(..)));
        assert!(!passes_on(&holder.say(3_000, &members)));
        let again = [member(other, 2)];
        assert!(passes_on(&holder.say(3_000, &again)), "it may have a whole copy now");
        assert!(!passes_on(&holder.say(3_000, &members)));
        assert!(passes_on(&holder.say(3_000 + COUNTS_MS, &members)), "nothing is said of it any more");
        let other_disk = [Member { store: StoreId(77), ..member(other, 2) }];
        assert_eq!(holder.say(9_000, &other_disk), [], "what it held is not there");
    }

    #[test]
    fn who_can_lead_is_found_and_nobody_says_anything_once_it_does() {
        let members: Vec<Member> = (0..3).map(|ordinal| member(ordinal, 1)).collect();
        let mut entry = Entry::first(members.clone());
        let mut unable: Vec<Unable> = (0..2).map(Unable::new).collect();
        moves(&mut entry, &mut unable, &members, 0, 20);
        assert_eq!(entry.primary, Ordinal(2));
        assert!(!unable[0].say(6_000, &members).is_empty());
        let led = Entry { activated: true, prev: Vec::new(), ..entry };
        unable[0].learn(&led);
        assert_eq!(unable[0].say(6_000, &members), []);
    }
}
