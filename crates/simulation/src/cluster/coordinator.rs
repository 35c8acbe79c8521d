//! The coordinator: receives heartbeats, runs the real detector, decides with the real [`decide`], and occasionally
//! makes erratic proposals.
//!
//! Safety does not depend on it, so while there are faults a seed may let it be arbitrarily wrong. In the calm phase it
//! brings the cluster back, by its own rules only. It may die and restart with only the map.

use crate::cluster::liveness::{Heartbeat, View, detector_ms, observe_heartbeat};
use crate::cluster::node::CLUSTER;
use crate::faults::Fault;
use crate::faults::plan::FaultPlan;
use crate::world::{Event, World};
use engram_cluster::detector::{self, Action, Detector, Liveness};
use engram_cluster::{Change, ClusterObservation, Entry, LeadershipTransfer, WorkerObservation, decide, find_absent};
use engram_memory::{Incarnation, Member, Ordinal, PartitionId};
use engram_store::Durability;
use engram_store::peer::Proposal;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const EVERY_US: u64 = 100_000;
const _: () = assert!(engram_store::leases::GRANT_MS < engram_cluster::LEASE_WAIT_MS);
/// Erratic proposals consider a node dead after this silence.
const SILENCE_US: u64 = 600_000;

/// A process that has connected.
#[derive(Debug, Clone)]
struct WorkerState {
    member: Member,
    number: u64,
    lossless_since: Incarnation,
    suspects: BTreeSet<Ordinal>,
    leaving_since_ms: Option<u64>,
    since_ms: u64,
    heard_us: u64,
}

/// What is known about the nodes.
pub(crate) struct Coordinator {
    detector: Detector,
    members: BTreeMap<Ordinal, WorkerState>,
    transfers: Vec<LeadershipTransfer>,
    last_failover_ms: Option<u64>,
    /// Workers to drain. This is part of the desired state and survives a restart.
    pub(crate) draining: BTreeSet<Ordinal>,
    /// It is down until then, and restarts without state.
    pub(crate) down_until_us: Option<u64>,
    /// It is paused until then.
    pub(crate) paused_until_us: u64,
    /// Earliest next proposal, by partition.
    next_proposal_us: Vec<u64>,
}

impl Coordinator {
    pub(crate) fn new(plan: &FaultPlan) -> Self {
        Self {
            detector: Detector::new(plan.timing, 0),
            members: BTreeMap::new(),
            transfers: Vec::new(),
            last_failover_ms: None,
            draining: BTreeSet::new(),
            down_until_us: None,
            paused_until_us: 0,
            next_proposal_us: vec![0; plan.partitions as usize],
        }
    }

    /// Restarts without state.
    fn restart(&mut self, plan: &FaultPlan, now_us: u64) {
        let draining = std::mem::take(&mut self.draining);
        *self = Self { draining, detector: Detector::new(plan.timing, detector_ms(now_us)), ..Self::new(plan) };
    }

    /// Returns the process of a worker, if it reported recently, with its `lossless_since`.
    fn living(&self, ordinal: Ordinal, now_us: u64) -> Option<(Member, Incarnation)> {
        let worker = self.members.get(&ordinal)?;
        (now_us - worker.heard_us <= SILENCE_US).then_some((worker.member, worker.lossless_since))
    }

    /// Notes that the partitions of a process were failed over.
    pub(crate) fn failed_over(&mut self, ordinal: Ordinal, now_ms: u64) {
        self.detector.step(detector::Event::FailedOver(ordinal), now_ms);
        self.last_failover_ms = Some(now_ms);
    }

    fn view(&self) -> View {
        let liveness = |member: &WorkerState| self.detector.liveness(member.member.ordinal);
        let members = self.members.values().map(|worker| {
            let liveness = liveness(worker);
            let alive = liveness.is_some_and(Liveness::is_alive);
            (worker.member, alive, matches!(liveness, Some(Liveness::Dead { .. })))
        });
        let is_alive = |worker: &&WorkerState| liveness(worker).is_some_and(Liveness::is_alive);
        let leaving = self.members.values().filter(|worker| worker.leaving_since_ms.is_some()).filter(is_alive);
        View {
            leaving: Arc::new(leaving.map(|worker| worker.member.ordinal).collect()),
            members: Arc::new(members.collect()),
            transfers: Arc::new(self.transfers.clone()),
        }
    }

    fn observation(&self, plan: &FaultPlan, entries: &[Entry], now_ms: u64) -> ClusterObservation {
        let observe = |worker: &WorkerState| WorkerObservation {
            member: worker.member,
            lossless_since: worker.lossless_since,
            domain: format!("node-{}", worker.member.ordinal),
            liveness: self
                .detector
                .liveness(worker.member.ordinal)
                .expect("every known worker is tracked by the detector"),
            fresh: self.detector.is_fresh(worker.member.ordinal, now_ms),
            supervised: plan.proof > 0,
            damped: worker.leaving_since_ms.is_some() || self.detector.is_damped(worker.member.ordinal, now_ms),
            leaving_since_ms: worker.leaving_since_ms,
            disk_full: false,
            seen_since_ms: worker.since_ms,
            suspects: worker.suspects.clone(),
        };
        let members: Vec<_> = self.members.values().map(observe).collect();
        ClusterObservation {
            cluster: CLUSTER,
            partitions: plan.partitions,
            workers: plan.nodes as u32,
            replicas: plan.replicas,
            keeps_all: plan.durability == Durability::Sync,
            now_ms,
            age_ms: self.detector.age_ms(now_ms),
            timing: *self.detector.timing(),
            restart_grace_ms: plan.restart_grace_ms,
            max_transfers: plan.max_transfers,
            absent: find_absent(entries, &members, &self.detector, now_ms),
            workers_seen: members,
            draining: self.draining.clone(),
            braked: self.detector.is_braked(),
            last_failover_ms: self.last_failover_ms,
        }
    }
}

impl World {
    pub(crate) fn coordinator_receives(&mut self, heartbeat: &Heartbeat, lives: bool) {
        let (now_us, now_ms) = (self.now_us, detector_ms(self.now_us));
        let coordinator = &mut self.coordinator;
        if coordinator.down_until_us.is_some() {
            return;
        }
        let ordinal = heartbeat.member.ordinal;
        let current = coordinator.members.get(&ordinal).map(|worker| worker.member);
        let before = coordinator.members.get(&ordinal).filter(|worker| worker.member == heartbeat.member);
        let leaving_since_ms =
            before.and_then(|worker| worker.leaving_since_ms).or(Some(now_ms)).filter(|_| heartbeat.leaving);
        let since_ms = before.map_or(now_ms, |worker| worker.since_ms);
        let Some(actions) = observe_heartbeat(&mut coordinator.detector, current, heartbeat, lives, now_ms) else {
            return;
        };
        let worker = WorkerState {
            member: heartbeat.member,
            number: heartbeat.number,
            lossless_since: heartbeat.lossless_since,
            suspects: heartbeat.suspects.clone(),
            leaving_since_ms,
            since_ms,
            heard_us: now_us,
        };
        coordinator.members.insert(ordinal, worker);
        self.note_actions(&actions);
    }

    pub(crate) fn coordinator_step(&mut self, event: detector::Event) {
        if self.coordinator.down_until_us.is_none() {
            let actions = self.coordinator.detector.step(event, detector_ms(self.now_us));
            self.note_actions(&actions);
        }
    }

    /// A supervisor reports the end of its process.
    pub(crate) fn report_death(&mut self, member: Member, number: u64) {
        // The next process may have connected before, and on an empty disk it has the same incarnation.
        let current = self.coordinator.members.get(&member.ordinal).map(|worker| worker.number);
        if current.is_none_or(|other| other == number) {
            self.coordinator_step(detector::Event::Died(member.ordinal, Some(member.incarnation)));
        }
    }

    fn note_actions(&mut self, actions: &[Action]) {
        self.check_proofs(actions);
        for action in actions {
            let (kind, member) = match action {
                Action::Suspect(member, _) => (1, member),
                Action::Trust(member) => (2, member),
                Action::Dead(member) => (3, member),
            };
            let numbers = [21, kind, u64::from(member.ordinal.0)];
            self.trace.note(self.now_us, &numbers, || format!("coordinator: {action:?}"));
        }
    }

    pub(crate) fn coordinate(&mut self) {
        let wait_us = EVERY_US + self.draw.below(20_000);
        self.at(wait_us, Event::Coordinate);
        match self.coordinator.down_until_us {
            Some(until_us) if until_us > self.now_us => return,
            Some(_) => self.coordinator.restart(&self.plan, self.now_us),
            None => {}
        }
        self.coordinator_step(detector::Event::Tick);
        self.propose_decisions();
        if !self.is_calm {
            self.propose_erratically();
        }
        let view = self.coordinator.view();
        for node in 0..self.nodes.len() {
            if !self.network.is_cut(self.map_index(), node) {
                let wait_us = self.delay_us();
                self.at(wait_us, Event::View { node, view: view.clone() });
            }
        }
    }

    /// Proposes the decisions.
    fn propose_decisions(&mut self) {
        let now_ms = detector_ms(self.now_us);
        let map = self.map_store.snapshot();
        let observation = self.coordinator.observation(&self.plan, &map.partitions, now_ms);
        let plan = decide(Some(&map), &observation);
        self.coordinator.transfers = plan.transfers;
        for (partition, change) in plan.changes {
            let entry = self.map_store.entry(partition).clone();
            let promotes = matches!(change, Change::Promote { .. });
            // Erratic: another candidate, or another subset.
            let is_erratic = promotes && !self.is_calm && self.draw.chance(self.plan.erratic);
            let erratic = is_erratic.then(|| self.promotion(&entry)).flatten();
            self.propose_change(partition, &entry, erratic.unwrap_or(change));
        }
    }

    fn propose_change(&mut self, partition: PartitionId, entry: &Entry, change: Change) {
        let next_proposal_us = &mut self.coordinator.next_proposal_us[partition.0 as usize];
        if *next_proposal_us > self.now_us {
            return;
        }
        *next_proposal_us = self.now_us + self.draw.within(100_000, 300_000);
        let proposal = Proposal { partition, expected: entry.expectation(), change };
        self.submit(self.map_index(), vec![proposal]);
    }

    /// Makes unnecessary proposals.
    fn propose_erratically(&mut self) {
        for partition in (0..self.plan.partitions).map(PartitionId) {
            let entry = self.map_store.entry(partition).clone();
            let primary = self.coordinator.living(entry.primary, self.now_us).map(|(member, _)| member);
            let has_primary = primary.is_some_and(|member| entry.served_by(&member));
            let chance = if has_primary {
                self.plan.false_promotion + self.plan.blind_promotion / 8
            } else {
                self.plan.erratic / 2
            };
            if self.draw.chance(chance) {
                if let Some(promotion) = self.promotion(&entry) {
                    if has_primary {
                        self.count(Fault::FalsePromotion);
                    }
                    self.propose_change(partition, &entry, promotion);
                }
            } else if self.draw.chance(self.plan.extra_learner) {
                self.propose_extra_learner(partition, &entry);
            }
        }
    }

    /// A random candidate, with some of the others.
    fn promotion(&mut self, entry: &Entry) -> Option<Change> {
        let keeps_all = self.plan.durability == Durability::Sync;
        let blind = self.draw.chance(self.plan.blind_promotion);
        let mut candidates: Vec<Member> = Vec::new();
        for member in entry.candidates() {
            if !candidates.iter().any(|other| other.ordinal == member.ordinal) {
                candidates.push(*member);
            }
        }
        let same_disk = |member: &Member| {
            let (seen, lossless_since) = self.coordinator.living(member.ordinal, self.now_us)?;
            (seen.store == member.store).then_some((seen, lossless_since))
        };
        let holds = |(seen, lossless_since): &(Member, Incarnation)| entry.holds_all(seen, *lossless_since, keeps_all);
        let living: Vec<(Member, Incarnation)> = candidates.iter().filter_map(same_disk).collect();
        let eligible: Vec<Member> =
            living.iter().filter(|seen| blind || holds(seen)).map(|(member, _)| *member).collect();
        if eligible.is_empty() {
            return None;
        }
        let lossy: Vec<Member> = living.iter().filter(|seen| !holds(seen)).map(|(member, _)| *member).collect();
        let primary = self.draw.pick(if blind && !lossy.is_empty() { &lossy } else { &eligible });
        if lossy.contains(&primary) {
            self.count(Fault::BlindPromotion);
        }
        let others: Vec<Ordinal> = if self.draw.chance(600) {
            living.iter().map(|(member, _)| member.ordinal).collect()
        } else {
            candidates.iter().map(|member| member.ordinal).collect()
        };
        let takes_all = self.draw.chance(600);
        let mut isr = vec![primary.ordinal];
        for other in others {
            if other != primary.ordinal && (takes_all || self.draw.chance(500)) {
                isr.push(other);
            }
        }
        Some(Change::Promote { primary, isr })
    }

    /// Proposes a surplus learner.
    fn propose_extra_learner(&mut self, partition: PartitionId, entry: &Entry) {
        let all = (0..self.nodes.len() as u32).map(Ordinal);
        let free = |ordinal: &Ordinal| entry.in_sync(*ordinal).is_none() && !entry.learners.contains(ordinal);
        let free: Vec<Ordinal> = all.filter(free).collect();
        if !free.is_empty() {
            self.count(Fault::ExtraLearner);
            let mut learners = entry.learners.clone();
            learners.push(self.draw.pick(&free));
            self.propose_change(partition, entry, Change::Learn(learners));
        }
    }
}
