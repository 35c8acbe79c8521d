//! Failure detection between workers, and which partners the store may treat as dead.
//!
//! A wrong suspicion costs only time, because the map decides. So a suspicion needs a second witness: this worker's own detector
//! and a coordinator, or proof, or that it lasts. If no coordinator is heard at all, that silence replaces the second witness.

use engram_cluster::detector::{Action, Detector, Event, Liveness, Timing};
use engram_memory::{Member, Ordinal};
use engram_proto::v1::MemberEntry;
use std::collections::{BTreeMap, BTreeSet};

/// Silence of all coordinators after which this worker relies on its own detector: longer than a coordinator takes to restart.
pub(crate) const NO_COORDINATOR_MS: u64 = 2_200;
/// Without a coordinator, a suspicion counts after this time: together with the silence before it, as long as at a coordinator.
const NO_COORDINATOR_CONFIRM_MS: u64 = 1_000;
/// A suspicion that lasts this long counts although a coordinator hears the partner, because one broken connection between two
/// workers blocks their common partitions. Together with the silence before it, no longer than a failover may take; a coordinator
/// suspects a partner that is slow for everyone by then.
const UNCONFIRMED_MS: u64 = 1_000;
/// Age from which a worker suspects partners: that of one silence. It is never the only witness, and the partner of a restarted
/// worker may have failed too.
pub(crate) const MIN_AGE_MS: u64 = 1_200;

/// A change that the store must be notified of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The process of this ordinal is suspected dead.
    Suspected(Ordinal),
    /// It is trusted again.
    Trusted(Ordinal),
    /// This process is proven dead.
    Dead(Member),
}

/// Failure detector for the partners of a worker. Pure: the caller passes the time in milliseconds.
#[derive(Debug)]
pub(crate) struct PeerDetector {
    detector: Detector,
    /// Processes that connected to this worker.
    members: BTreeMap<Ordinal, Member>,
    /// Those of them that a coordinator reported, and whether it considers them alive.
    reported: BTreeMap<Ordinal, (Member, bool)>,
    /// Ordinals that the store treats as dead.
    suspected: BTreeSet<Ordinal>,
}

impl PeerDetector {
    pub(crate) fn new(now_ms: u64) -> Self {
        Self {
            detector: Detector::new(Timing { warmup_ms: MIN_AGE_MS, ..Timing::default() }, now_ms),
            members: BTreeMap::new(),
            reported: BTreeMap::new(),
            suspected: BTreeSet::new(),
        }
    }

    /// A process on `host` opened a heartbeat stream.
    pub(crate) fn process_connected(&mut self, member: Member, host: &str, now_ms: u64) -> Vec<Verdict> {
        self.members.insert(member.ordinal, member);
        // A store that is opened again on the same host proves the death of the previous process; on another host it proves
        // nothing.
        let domain = format!("{}@{host}", member.ordinal);
        self.step(Event::Connected { member, domain }, now_ms)
    }

    /// Returns whether this process opened a stream before.
    pub(crate) fn has_connected(&self, member: &Member) -> bool {
        self.members.get(&member.ordinal) == Some(member)
    }

    /// A heartbeat arrived that acknowledges a newer one of this worker.
    pub(crate) fn heartbeat_received(&mut self, member: Member, number: u64, now_ms: u64) -> Vec<Verdict> {
        self.step(Event::Heartbeat { member, progress: number, queued: false }, now_ms)
    }

    /// The stream of a process ended, or its address refuses connections.
    pub(crate) fn stream_closed(&mut self, member: Member, now_ms: u64) -> Vec<Verdict> {
        self.step(Event::Closed(member), now_ms)
    }

    /// The address of an ordinal refuses connections.
    pub(crate) fn connection_refused(&mut self, ordinal: Ordinal, now_ms: u64) -> Vec<Verdict> {
        self.members.get(&ordinal).copied().map(|member| self.stream_closed(member, now_ms)).unwrap_or_default()
    }

    /// A coordinator reported its members.
    pub(crate) fn update_members(&mut self, members: &[MemberEntry], now_ms: u64) -> Vec<Verdict> {
        // A new disk under an old ordinal counts its incarnations from the beginning, so a member is identified by its store, too.
        let matching = |it: &MemberEntry| {
            let member = self.members.get(&Ordinal(it.ordinal)).copied();
            member
                .filter(|member| it.incarnation == member.incarnation.0 && it.store[..] == member.store.0.to_be_bytes())
        };
        let matching: Vec<(Member, &MemberEntry)> = members.iter().filter_map(|it| Some((matching(it)?, it))).collect();
        self.reported = matching.iter().map(|(member, it)| (member.ordinal, (*member, it.alive))).collect();
        let dead = matching.into_iter().filter(|(_, it)| it.dead);
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

    /// Evaluates all partners. `silence_ms`: how long no coordinator has been heard, 0 = one is.
    pub(crate) fn evaluate(&mut self, silence_ms: u64, now_ms: u64) -> Vec<Verdict> {
        let mut verdicts = Vec::new();
        let is_braked = self.detector.is_braked();
        for (ordinal, member) in &self.members {
            let Some(liveness) = self.detector.liveness(*ordinal) else { continue };
            let suspected_for_ms = liveness.since_ms().map_or(0, |since_ms| now_ms.saturating_sub(since_ms));
            let reported = self.reported.get(ordinal).is_some_and(|reported| *reported == (*member, false));
            let is_unwitnessed = silence_ms >= NO_COORDINATOR_MS && suspected_for_ms >= NO_COORDINATOR_CONFIRM_MS;
            let is_proven = matches!(liveness, Liveness::Dead { .. });
            let is_confirmed =
                is_proven || reported || is_unwitnessed || (suspected_for_ms >= UNCONFIRMED_MS && !is_braked);
            if !liveness.is_alive() && is_confirmed && self.suspected.insert(*ordinal) {
                verdicts.push(Verdict::Suspected(*ordinal));
            } else if liveness.is_alive() && self.suspected.remove(ordinal) {
                verdicts.push(Verdict::Trusted(*ordinal));
            }
        }
        verdicts
    }

    /// Returns the partners that this worker's own detector suspects, for the coordinators.
    pub(crate) fn suspects(&self) -> Vec<u32> {
        self.detector.suspects().map(|ordinal| ordinal.0).collect()
    }

    /// Returns whether the store treats an ordinal as dead.
    pub(crate) fn is_suspected(&self, ordinal: Ordinal) -> bool {
        self.suspected.contains(&ordinal)
    }

    /// Returns whether a newer process has replaced this one, which then serves nothing, even if the ordinal is alive.
    pub(crate) fn is_replaced(&self, member: &Member) -> bool {
        let older = |members: &Member| members.store == member.store && members.incarnation <= member.incarnation;
        self.members.get(&member.ordinal).is_some_and(|members| !older(members))
    }

    /// Returns whether an ordinal is alive.
    pub(crate) fn is_alive(&self, ordinal: Ordinal) -> bool {
        self.detector.liveness(ordinal).is_some_and(Liveness::is_alive)
    }

    fn step(&mut self, event: Event, now_ms: u64) -> Vec<Verdict> {
        let actions = self.detector.step(event, now_ms);
        let mut verdicts = Vec::new();
        for action in actions {
            match action {
                Action::Dead(member) => verdicts.push(Verdict::Dead(member)),
                // A heartbeat or a new process is trusted at once. A suspicion waits for its second witness.
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

    fn report(incarnation: u64, alive: bool) -> Vec<MemberEntry> {
        let store = member(incarnation).store.0.to_be_bytes().to_vec().into();
        vec![MemberEntry { ordinal: 1, store, incarnation, alive, ..MemberEntry::default() }]
    }

    /// A detector old enough to suspect, whose partner sends heartbeats.
    fn detector() -> (PeerDetector, u64) {
        let mut detector = PeerDetector::new(0);
        assert_eq!(detector.process_connected(member(4), "h", 0), []);
        let mut now_ms = 0;
        while now_ms < 4_000 {
            now_ms += 100;
            detector.heartbeat_received(member(4), now_ms, now_ms);
            assert_eq!((detector.tick(now_ms), detector.evaluate(0, now_ms)), (Vec::new(), Vec::new()));
        }
        (detector, now_ms)
    }

    fn advance_silently(detector: &mut PeerDetector, now_ms: &mut u64, ms: u64, silence_ms: u64) -> Vec<Verdict> {
        let until = *now_ms + ms;
        let mut verdicts = Vec::new();
        while *now_ms < until {
            *now_ms += 100;
            verdicts.extend(detector.tick(*now_ms));
            verdicts.extend(detector.evaluate(silence_ms, *now_ms));
        }
        verdicts
    }

    #[test]
    fn a_silent_partner_is_suspected_once_a_coordinator_confirms_it() {
        let (mut detector, mut now_ms) = detector();
        assert_eq!(
            advance_silently(&mut detector, &mut now_ms, 1_900, 0),
            [],
            "this worker's own connection may be broken"
        );
        assert!(
            !detector.is_suspected(Ordinal(1)) && detector.suspects() == [1],
            "the suspicion is reported to coordinators"
        );
        assert_eq!(detector.update_members(&report(3, false), now_ms), []);
        assert_eq!(advance_silently(&mut detector, &mut now_ms, 100, 0), [], "the report is about an older process");
        assert_eq!(detector.update_members(&report(4, false), now_ms), []);
        assert_eq!(advance_silently(&mut detector, &mut now_ms, 100, 0), [Verdict::Suspected(Ordinal(1))]);
        assert_eq!(advance_silently(&mut detector, &mut now_ms, 1_000, 0), [], "reported once");
        assert_eq!(detector.heartbeat_received(member(4), 1, now_ms), [Verdict::Trusted(Ordinal(1))]);
        assert_eq!(
            advance_silently(&mut detector, &mut now_ms, 500, 0),
            [],
            "a coordinator's report alone is not enough"
        );
    }

    #[test]
    fn without_a_coordinator_a_lasting_suspicion_counts() {
        let (mut detector, mut now_ms) = detector();
        assert_eq!(advance_silently(&mut detector, &mut now_ms, 2_100, NO_COORDINATOR_MS), []);
        assert_eq!(
            advance_silently(&mut detector, &mut now_ms, 100, NO_COORDINATOR_MS),
            [Verdict::Suspected(Ordinal(1))]
        );
        let (mut reset, mut now_ms) = self::detector();
        reset.stream_closed(member(4), now_ms);
        assert_eq!(
            advance_silently(&mut reset, &mut now_ms, 500, 60_000),
            [],
            "a connection that was reset is reopened"
        );
        assert_eq!(reset.process_connected(member(4), "h", now_ms), []);
        reset.heartbeat_received(member(4), 1, now_ms);
        assert_eq!(advance_silently(&mut reset, &mut now_ms, 1_000, 60_000), []);
    }

    #[test]
    fn a_lasting_broken_connection_counts_against_a_coordinators_report() {
        let (mut detector, mut now_ms) = detector();
        assert_eq!(detector.update_members(&report(4, true), now_ms), []);
        assert_eq!(advance_silently(&mut detector, &mut now_ms, 2_100, 0), []);
        assert_eq!(advance_silently(&mut detector, &mut now_ms, 100, 0), [Verdict::Suspected(Ordinal(1))]);
    }

    #[test]
    fn a_restarted_worker_suspects_partners_that_connected_to_it() {
        let (mut detector, mut now_ms) = (PeerDetector::new(0), 0);
        assert_eq!(detector.process_connected(member(4), "h", now_ms), []);
        detector.stream_closed(member(4), now_ms);
        assert_eq!(advance_silently(&mut detector, &mut now_ms, MIN_AGE_MS - 100, 0), []);
        assert!(detector.suspects().is_empty(), "a young worker suspects no partner");
        assert_eq!(detector.update_members(&report(4, false), now_ms), []);
        assert_eq!(advance_silently(&mut detector, &mut now_ms, 100, 0), [Verdict::Suspected(Ordinal(1))]);
    }

    #[test]
    fn a_proven_death_is_reported_at_once_and_only_for_that_process() {
        let (mut detector, mut now_ms) = detector();
        let dead = |incarnation| vec![MemberEntry { dead: true, ..report(incarnation, false).remove(0) }];
        assert_eq!(detector.update_members(&dead(3), now_ms), [], "an older process is not this one");
        let other_disk = vec![MemberEntry { store: vec![7; 16].into(), ..dead(4).remove(0) }];
        assert_eq!(detector.update_members(&other_disk, now_ms), [], "nor is one of another disk");
        assert_eq!(detector.update_members(&dead(4), now_ms), [Verdict::Dead(member(4))]);
        assert_eq!(detector.evaluate(0, now_ms), [Verdict::Suspected(Ordinal(1))]);
        assert_eq!(detector.update_members(&dead(4), now_ms), [], "reported once");
        assert_eq!(advance_silently(&mut detector, &mut now_ms, 500, 0), []);
    }

    #[test]
    fn a_new_process_proves_the_death_of_its_predecessor() {
        let (mut detector, mut now_ms) = detector();
        detector.stream_closed(member(4), now_ms);
        assert_eq!(detector.update_members(&report(4, false), now_ms), []);
        assert_eq!(advance_silently(&mut detector, &mut now_ms, 100, 0), [Verdict::Suspected(Ordinal(1))]);
        assert!(!detector.is_replaced(&member(4)), "no newer process connected");
        let verdicts = detector.process_connected(member(5), "h", now_ms);
        assert_eq!(verdicts, [Verdict::Dead(member(4)), Verdict::Trusted(Ordinal(1))]);
        assert!(
            detector.is_replaced(&member(4)) && detector.is_alive(Ordinal(1)),
            "the ordinal lives, the process was replaced"
        );
        let not_met_yet = member(6);
        assert!(!detector.is_replaced(&member(5)) && !detector.is_replaced(&not_met_yet));
        assert_eq!(
            detector.connection_refused(Ordinal(1), now_ms),
            [],
            "the end of the new process's stream proves nothing"
        );
    }
}
