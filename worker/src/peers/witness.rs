//! What this worker thinks of its partners, and whom its store may take for dead.
//!
//! A primary that drops a living member, or a backup that takes over from a living primary, loses nothing but time: the map
//! decides. So suspicion needs two witnesses, this worker's own senses and a coordinator, or proof, or that it lasts; where no
//! coordinator is heard at all, that silence stands for the second witness.

use engram_cluster::detector::{Action, Detector, Event, Standing, Timing};
use engram_memory::{Member, Ordinal};
use engram_proto::v1::MemberEntry;
use std::collections::{BTreeMap, BTreeSet};

/// Silence of all coordinators after which this worker acts on its own senses: longer than a coordinator takes to be started again.
pub(crate) const NO_COORDINATOR_MS: u64 = 2_200;
/// Without a coordinator, suspicion counts when it has lasted so long: with the silence before it, as long as the coordinator's.
const UNWITNESSED_MS: u64 = 1_000;
/// What lasts so long counts although a coordinator hears the partner: one broken way between two workers holds up what they share.
/// With the silence before it, no longer than a failover may take; a partner that is slow for others too is missed by then.
const LASTING_MS: u64 = 1_000;
/// Age at which a worker has an opinion: that of one silence, since it is never the only witness, and the partner of a worker that was
/// started again may be lost too.
pub(crate) const OPINION_MS: u64 = 1_200;

/// What is to be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The process at a place is taken for dead.
    Suspected(Ordinal),
    /// It no longer is.
    Trusted(Ordinal),
    /// This process will never act again, by proof.
    Dead(Member),
}

/// The senses of a worker. Free of clocks: milliseconds come in.
#[derive(Debug)]
pub(crate) struct Witness {
    detector: Detector,
    /// The processes that were heard here.
    met: BTreeMap<Ordinal, Member>,
    /// Those of them that a coordinator has heard, and whether it thinks that they live.
    told: BTreeMap<Ordinal, (Member, bool)>,
    /// Whom the store was told to take for dead.
    suspected: BTreeSet<Ordinal>,
}

impl Witness {
    pub(crate) fn new(now_ms: u64) -> Self {
        Self {
            detector: Detector::new(Timing { opinion_ms: OPINION_MS, ..Timing::default() }, now_ms),
            met: BTreeMap::new(),
            told: BTreeMap::new(),
            suspected: BTreeSet::new(),
        }
    }

    /// A process opened a stream of beats, from the host given.
    pub(crate) fn met(&mut self, member: Member, host: &str, now_ms: u64) -> Vec<Verdict> {
        self.met.insert(member.ordinal, member);
        // A store that is opened twice on one host proves the death of the process before; on another host it proves nothing.
        let domain = format!("{}@{host}", member.ordinal);
        self.step(Event::Met { member, domain }, now_ms)
    }

    /// Whether this very process opened a stream before.
    pub(crate) fn has_met(&self, member: &Member) -> bool {
        self.met.get(&member.ordinal) == Some(member)
    }

    /// It beats, and hears this worker.
    pub(crate) fn beat(&mut self, member: Member, number: u64, now_ms: u64) -> Vec<Verdict> {
        self.step(Event::Beat { member, turns: number, queued: false }, now_ms)
    }

    /// Its stream ended, or nobody listens where it did.
    pub(crate) fn closed(&mut self, member: Member, now_ms: u64) -> Vec<Verdict> {
        self.step(Event::Closed(member), now_ms)
    }

    /// Nobody listens where the process of a place did.
    pub(crate) fn refused(&mut self, ordinal: Ordinal, now_ms: u64) -> Vec<Verdict> {
        self.met.get(&ordinal).copied().map(|member| self.closed(member, now_ms)).unwrap_or_default()
    }

    /// What a coordinator says of everybody.
    pub(crate) fn told(&mut self, members: &[MemberEntry], now_ms: u64) -> Vec<Verdict> {
        // An empty disk under an old name counts its processes from the beginning: a member is known by its store too.
        let known = |it: &MemberEntry| {
            let met = self.met.get(&Ordinal(it.ordinal)).copied();
            met.filter(|met| it.incarnation == met.incarnation.0 && it.store[..] == met.store.0.to_be_bytes())
        };
        let known: Vec<(Member, &MemberEntry)> = members.iter().filter_map(|it| Some((known(it)?, it))).collect();
        self.told = known.iter().map(|(member, it)| (member.ordinal, (*member, it.alive))).collect();
        let dead = known.into_iter().filter(|(_, it)| it.dead);
        dead.flat_map(|(member, _)| {
            let died = Event::Died(member.ordinal, Some(member.incarnation));
            self.step(died, now_ms)
        })
        .collect()
    }

    /// The timer of the detector fired.
    pub(crate) fn tick(&mut self, now_ms: u64) -> Vec<Verdict> {
        self.step(Event::Tick, now_ms)
    }

    /// Looks at everybody. `unheard_ms`: for how long no coordinator has been heard, 0 = one is.
    pub(crate) fn look(&mut self, unheard_ms: u64, now_ms: u64) -> Vec<Verdict> {
        let mut verdicts = Vec::new();
        let braked = self.detector.is_braked();
        for (ordinal, member) in &self.met {
            let Some(standing) = self.detector.standing(*ordinal) else { continue };
            let lasted_ms = standing.since_ms().map_or(0, |since_ms| now_ms.saturating_sub(since_ms));
            let reported = self.told.get(ordinal).is_some_and(|told| *told == (*member, false));
            let unwitnessed = unheard_ms >= NO_COORDINATOR_MS && lasted_ms >= UNWITNESSED_MS;
            let proven = matches!(standing, Standing::Dead { .. });
            let counts = proven || reported || unwitnessed || (lasted_ms >= LASTING_MS && !braked);
            if !standing.is_alive() && counts && self.suspected.insert(*ordinal) {
                verdicts.push(Verdict::Suspected(*ordinal));
            } else if standing.is_alive() && self.suspected.remove(ordinal) {
                verdicts.push(Verdict::Trusted(*ordinal));
            }
        }
        verdicts
    }

    /// Whom this worker itself takes for dead: its word as a witness.
    pub(crate) fn suspects(&self) -> Vec<u32> {
        self.detector.suspects().map(|ordinal| ordinal.0).collect()
    }

    /// Whether a place is taken for dead.
    pub(crate) fn is_suspected(&self, ordinal: Ordinal) -> bool {
        self.suspected.contains(&ordinal)
    }

    /// Whether another process has come to the place of this one: it serves no more, however alive its place is.
    pub(crate) fn is_replaced(&self, member: &Member) -> bool {
        let older = |met: &Member| met.store == member.store && met.incarnation <= member.incarnation;
        self.met.get(&member.ordinal).is_some_and(|met| !older(met))
    }

    /// Whether a place beats.
    pub(crate) fn is_alive(&self, ordinal: Ordinal) -> bool {
        self.detector.standing(ordinal).is_some_and(Standing::is_alive)
    }

    fn step(&mut self, event: Event, now_ms: u64) -> Vec<Verdict> {
        let actions = self.detector.step(event, now_ms);
        let mut verdicts = Vec::new();
        for action in actions {
            match action {
                Action::Dead(member) => verdicts.push(Verdict::Dead(member)),
                // A beat, or a new process: trusted at once. Suspicion waits for its second witness.
                Action::Trust(member) if self.suspected.remove(&member.ordinal) => {
                    verdicts.push(Verdict::Trusted(member.ordinal));
                }
                Action::Trust(_) | Action::Suspect(..) => {}
            }
        }
        verdicts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_memory::{Incarnation, StoreId};

    fn member(incarnation: u64) -> Member {
        Member { ordinal: Ordinal(1), store: StoreId(9), incarnation: Incarnation(incarnation) }
    }

    fn says(incarnation: u64, alive: bool) -> Vec<MemberEntry> {
        let store = member(incarnation).store.0.to_be_bytes().to_vec().into();
        vec![MemberEntry { ordinal: 1, store, incarnation, alive, ..MemberEntry::default() }]
    }

    /// A witness old enough for an opinion, whose partner beats.
    fn witness() -> (Witness, u64) {
        let mut witness = Witness::new(0);
        assert_eq!(witness.met(member(4), "h", 0), []);
        let mut now_ms = 0;
        while now_ms < 4_000 {
            now_ms += 100;
            witness.beat(member(4), now_ms, now_ms);
            assert_eq!((witness.tick(now_ms), witness.look(0, now_ms)), (Vec::new(), Vec::new()));
        }
        (witness, now_ms)
    }

    fn silent(witness: &mut Witness, now_ms: &mut u64, ms: u64, unheard_ms: u64) -> Vec<Verdict> {
        let until = *now_ms + ms;
        let mut verdicts = Vec::new();
        while *now_ms < until {
            *now_ms += 100;
            verdicts.extend(witness.tick(*now_ms));
            verdicts.extend(witness.look(unheard_ms, *now_ms));
        }
        verdicts
    }

    #[test]
    fn a_silent_partner_is_suspected_when_a_coordinator_misses_it_too_and_trusted_with_its_first_beat() {
        let (mut witness, mut now_ms) = witness();
        assert_eq!(silent(&mut witness, &mut now_ms, 1_900, 0), [], "this worker alone may be deaf");
        assert!(!witness.is_suspected(Ordinal(1)) && witness.suspects() == [1], "but it says what it thinks");
        assert_eq!(witness.told(&says(3, false), now_ms), []);
        assert_eq!(silent(&mut witness, &mut now_ms, 100, 0), [], "an older process is missed: long known");
        assert_eq!(witness.told(&says(4, false), now_ms), []);
        assert_eq!(silent(&mut witness, &mut now_ms, 100, 0), [Verdict::Suspected(Ordinal(1))]);
        assert_eq!(silent(&mut witness, &mut now_ms, 1_000, 0), [], "said once");
        assert_eq!(witness.beat(member(4), 1, now_ms), [Verdict::Trusted(Ordinal(1))]);
        assert_eq!(silent(&mut witness, &mut now_ms, 500, 0), [], "a coordinator alone convinces nobody");
    }

    #[test]
    fn without_a_coordinator_its_own_senses_decide_when_it_lasts() {
        let (mut witness, mut now_ms) = witness();
        assert_eq!(silent(&mut witness, &mut now_ms, 2_100, NO_COORDINATOR_MS), []);
        assert_eq!(silent(&mut witness, &mut now_ms, 100, NO_COORDINATOR_MS), [Verdict::Suspected(Ordinal(1))]);
        let (mut reset, mut now_ms) = self::witness();
        reset.closed(member(4), now_ms);
        assert_eq!(silent(&mut reset, &mut now_ms, 500, 60_000), [], "a connection that was reset comes back");
        assert_eq!(reset.met(member(4), "h", now_ms), []);
        reset.beat(member(4), 1, now_ms);
        assert_eq!(silent(&mut reset, &mut now_ms, 1_000, 60_000), []);
    }

    #[test]
    fn a_broken_way_counts_when_it_lasts_though_a_coordinator_hears_the_partner() {
        let (mut witness, mut now_ms) = witness();
        assert_eq!(witness.told(&says(4, true), now_ms), []);
        assert_eq!(silent(&mut witness, &mut now_ms, 2_100, 0), []);
        assert_eq!(silent(&mut witness, &mut now_ms, 100, 0), [Verdict::Suspected(Ordinal(1))]);
    }

    #[test]
    fn a_worker_that_was_just_started_is_a_witness_too_of_whom_it_has_heard() {
        let (mut witness, mut now_ms) = (Witness::new(0), 0);
        assert_eq!(witness.met(member(4), "h", now_ms), []);
        witness.closed(member(4), now_ms);
        assert_eq!(silent(&mut witness, &mut now_ms, OPINION_MS - 100, 0), []);
        assert!(witness.suspects().is_empty(), "a connection may come back in the confusion of a start");
        assert_eq!(witness.told(&says(4, false), now_ms), []);
        assert_eq!(silent(&mut witness, &mut now_ms, 100, 0), [Verdict::Suspected(Ordinal(1))]);
    }

    #[test]
    fn a_proven_death_is_told_at_once_and_ends_nobody_elses_time() {
        let (mut witness, mut now_ms) = witness();
        let dead = |incarnation| vec![MemberEntry { dead: true, ..says(incarnation, false).remove(0) }];
        assert_eq!(witness.told(&dead(3), now_ms), [], "not this process");
        let other_disk = vec![MemberEntry { store: vec![7; 16].into(), ..dead(4).remove(0) }];
        assert_eq!(witness.told(&other_disk, now_ms), [], "nor this disk");
        assert_eq!(witness.told(&dead(4), now_ms), [Verdict::Dead(member(4))]);
        assert_eq!(witness.look(0, now_ms), [Verdict::Suspected(Ordinal(1))]);
        assert_eq!(witness.told(&dead(4), now_ms), [], "said once");
        assert_eq!(silent(&mut witness, &mut now_ms, 500, 0), []);
    }

    #[test]
    fn a_new_process_proves_the_death_of_the_one_before() {
        let (mut witness, mut now_ms) = witness();
        witness.closed(member(4), now_ms);
        assert_eq!(witness.told(&says(4, false), now_ms), []);
        assert_eq!(silent(&mut witness, &mut now_ms, 100, 0), [Verdict::Suspected(Ordinal(1))]);
        assert!(!witness.is_replaced(&member(4)), "nobody else has come");
        let met = witness.met(member(5), "h", now_ms);
        assert_eq!(met, [Verdict::Dead(member(4)), Verdict::Trusted(Ordinal(1))]);
        assert!(witness.is_replaced(&member(4)) && witness.is_alive(Ordinal(1)), "what it led is led by nobody now");
        let not_met_yet = member(6);
        assert!(!witness.is_replaced(&member(5)) && !witness.is_replaced(&not_met_yet));
        assert_eq!(witness.refused(Ordinal(1), now_ms), [], "its own stream may end as well");
    }
}
