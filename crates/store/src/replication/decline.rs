//! Declines the primary role that the map assigns to a replica which cannot take it: it is damaged, or lost data that the map
//! does not know of.
//!
//! The declining worker proposes to promote another candidate. To keep the role from circulating among candidates that all
//! decline, a worker also notifies the other candidates periodically while it declines, and none is promoted that has declined
//! recently: the partition stays leaderless until one of them restarts or its notifications end.

use engram_cluster::{Change, Entry};
use engram_memory::{Member, Ordinal, PartitionId, Term};
use std::collections::BTreeMap;

/// Lifetime of a received decline, which is repeated every 300 ms.
const DECLINE_TTL_MS: u64 = 1_500;

/// Primary roles declined here and by other workers.
#[derive(Debug, Default)]
pub(crate) struct Declines {
    local: BTreeMap<PartitionId, DeclinedRole>,
    /// When each process last declined.
    remote: BTreeMap<(PartitionId, Member), u64>,
}

/// A primary role that is declined here.
#[derive(Debug)]
struct DeclinedRole {
    /// Newest entry of the map.
    entry: Entry,
    /// Whether the map assigns the role to this worker.
    is_assigned: bool,
    /// Highest promised term: a new primary raises it.
    promised: Term,
}

/// What to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DeclineAction {
    /// Notify this worker that the primary role of this term is declined.
    Notify(PartitionId, Ordinal, Term),
    /// Propose to the map to promote another worker.
    PromoteOther(PartitionId, Entry, Change),
}

impl Declines {
    /// Processes an entry of the map; `declines`: it assigns the role to this worker, whose replica declines.
    pub(crate) fn observe(&mut self, partition: PartitionId, entry: &Entry, promised: Term, declines: bool) {
        if declines {
            self.local.insert(partition, DeclinedRole { entry: entry.clone(), is_assigned: true, promised });
        } else if let Some(before) = self.local.get_mut(&partition) {
            // Reassigned, but this replica remains unable until a primary activates: the assigned worker has to be notified.
            if before.promised == promised && !entry.activated {
                (before.entry, before.is_assigned) = (entry.clone(), false);
            } else {
                self.local.remove(&partition);
            }
        }
    }

    /// Records that a process declined.
    pub(crate) fn receive(&mut self, partition: PartitionId, from: Member, now_ms: u64) {
        self.remote.insert((partition, from), now_ms);
    }

    /// Partitions that the map assigns to this worker, which declines them.
    pub(crate) fn leaderless(&self) -> impl Iterator<Item = PartitionId> {
        self.local.iter().filter(|(_, declined)| declined.is_assigned).map(|(partition, _)| *partition)
    }

    /// Returns what to send now. `running_at`: the process at a member's ordinal, unless suspected dead.
    pub(crate) fn actions(
        &mut self,
        own: Ordinal,
        now_ms: u64,
        running_at: impl Fn(&Member) -> Option<Member>,
    ) -> Vec<DeclineAction> {
        self.remote.retain(|_, received_ms| now_ms < *received_ms + DECLINE_TTL_MS);
        let mut out = Vec::new();
        for (partition, DeclinedRole { entry, is_assigned, .. }) in &self.local {
            let others = || entry.candidates().filter(|member| member.ordinal != own);
            // A replaced disk does not have the candidate's data.
            let same_disk = |member: &Member| running_at(member).filter(|running| running.store == member.store);
            let mut recipients: Vec<Ordinal> = others().filter_map(same_disk).map(|member| member.ordinal).collect();
            recipients.sort_unstable();
            recipients.dedup();
            out.extend(recipients.into_iter().map(|other| DeclineAction::Notify(*partition, other, entry.term)));
            if !is_assigned {
                continue;
            }
            let mut best: Option<(bool, Member)> = None;
            for member in others() {
                let Some(running) = same_disk(member) else { continue };
                let has_restarted = running != *member;
                // A process that kept running has lost nothing, a restarted one may have.
                if !self.remote.contains_key(&(*partition, running))
                    && best.is_none_or(|(best_restarted, _)| !has_restarted && best_restarted)
                {
                    best = Some((has_restarted, running));
                }
            }
            if let Some((_, primary)) = best {
                let mut isr: Vec<Ordinal> =
                    others().filter(|it| running_at(it).is_some()).map(|it| it.ordinal).collect();
                isr.sort_unstable();
                isr.dedup();
                out.push(DeclineAction::PromoteOther(*partition, entry.clone(), Change::Promote { primary, isr }));
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

    /// A worker whose replica cannot become primary.
    struct UnableWorker {
        me: Member,
        declines: Declines,
    }

    impl UnableWorker {
        fn new(ordinal: u32) -> Self {
            Self { me: member(ordinal, 1), declines: Declines::default() }
        }

        fn observe(&mut self, entry: &Entry) {
            self.declines.observe(P, entry, Term(1), entry.primary == self.me.ordinal);
        }

        fn actions(&mut self, now_ms: u64, members: &[Member]) -> Vec<DeclineAction> {
            let running_at =
                |member: &Member| members.iter().find(|running| running.ordinal == member.ordinal).copied();
            self.declines.actions(self.me.ordinal, now_ms, running_at)
        }
    }

    /// Exchanges actions for some turns; returns how often the primary role moved.
    fn moves(entry: &mut Entry, unable: &mut [UnableWorker], members: &[Member], now_ms: u64, turns: u64) -> usize {
        let mut moves = 0;
        for turn in 0..turns {
            let now_ms = now_ms + turn * 300;
            for at in 0..unable.len() {
                unable[at].observe(entry);
                for action in unable[at].actions(now_ms, members) {
                    match action {
                        DeclineAction::Notify(partition, to, _) => {
                            let from = unable[at].me;
                            if let Some(receiver) = unable.iter_mut().find(|it| it.me.ordinal == to) {
                                receiver.declines.receive(partition, from, now_ms);
                            }
                        }
                        DeclineAction::PromoteOther(_, expected, change) if expected == *entry => {
                            let next = entry.apply(&change).unwrap();
                            entry.check(&next).unwrap();
                            *entry = next;
                            moves += 1;
                        }
                        DeclineAction::PromoteOther(..) => {}
                    }
                }
            }
        }
        moves
    }

    #[test]
    fn a_primary_role_that_no_candidate_can_take_stops_moving() {
        for replicas in 2..=4_u32 {
            let members: Vec<Member> = (0..replicas).map(|ordinal| member(ordinal, 1)).collect();
            let mut entry = Entry::first(members.clone());
            let mut unable: Vec<UnableWorker> = (0..replicas).map(UnableWorker::new).collect();
            let first = moves(&mut entry, &mut unable, &members, 0, 10);
            assert!((1..=2 * replicas as usize).contains(&first), "{replicas} replicas: {first} moves");
            assert_eq!(
                moves(&mut entry, &mut unable, &members, 3_000, 200),
                0,
                "{replicas} replicas: the role moves again"
            );
        }
    }

    #[test]
    fn a_restarted_or_silent_candidate_is_promoted_again() {
        let members = [member(0, 1), member(1, 1)];
        let mut entry = Entry::first(members.to_vec());
        let mut unable: Vec<UnableWorker> = (0..2).map(UnableWorker::new).collect();
        moves(&mut entry, &mut unable, &members, 0, 10);
        let (primary, other) = (entry.primary, 1 - entry.primary.0);
        let primary = &mut unable[primary.0 as usize];
        let promotes_other =
            |actions: &[DeclineAction]| actions.iter().any(|action| matches!(action, DeclineAction::PromoteOther(..)));
        assert!(!promotes_other(&primary.actions(3_000, &members)));
        let restarted = [member(other, 2)];
        assert!(promotes_other(&primary.actions(3_000, &restarted)), "a restarted process may have a complete replica");
        assert!(!promotes_other(&primary.actions(3_000, &members)));
        assert!(promotes_other(&primary.actions(3_000 + DECLINE_TTL_MS, &members)), "its decline has expired");
        let other_disk = [Member { store: StoreId(77), ..member(other, 2) }];
        assert_eq!(primary.actions(9_000, &other_disk), [], "a replaced disk does not have the data");
    }

    #[test]
    fn an_able_candidate_is_promoted_and_declines_end_once_it_activates() {
        let members: Vec<Member> = (0..3).map(|ordinal| member(ordinal, 1)).collect();
        let mut entry = Entry::first(members.clone());
        let mut unable: Vec<UnableWorker> = (0..2).map(UnableWorker::new).collect();
        moves(&mut entry, &mut unable, &members, 0, 20);
        assert_eq!(entry.primary, Ordinal(2));
        assert!(!unable[0].actions(6_000, &members).is_empty());
        let activated = Entry { activated: true, prev: Vec::new(), ..entry };
        unable[0].observe(&activated);
        assert_eq!(unable[0].actions(6_000, &members), []);
    }
}
