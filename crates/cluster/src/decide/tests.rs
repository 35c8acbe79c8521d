//! Decisions in a toy cluster whose workers carry them out: primaries activate, add learners that caught up, remove dead members
//! and transfer leadership.

use super::*;
use crate::detector::Cause;
use engram_memory::{StoreId, Term};
use proptest::prelude::*;

const NOW_MS: u64 = 1_000_000;

struct Toy {
    observed: ClusterObservation,
    map: PartitionMap,
    /// Learners named so far, whether they were added or not.
    named: usize,
    /// Most concurrent incoming transfers at any worker.
    most_incoming: usize,
}

fn observation(ordinal: u32) -> WorkerObservation {
    let store = StoreId(u128::from(ordinal) + 100);
    WorkerObservation {
        member: Member { ordinal: Ordinal(ordinal), store, incarnation: Incarnation(1) },
        lossless_since: Incarnation(1),
        domain: format!("machine-{ordinal}"),
        liveness: Liveness::Alive,
        fresh: true,
        supervised: true,
        damped: false,
        leaving_since_ms: None,
        disk_full: false,
        seen_since_ms: 0,
        suspects: BTreeSet::new(),
    }
}

fn observed(workers: u32, replicas: u32, partitions: u32) -> ClusterObservation {
    ClusterObservation {
        cluster: ClusterId(9),
        partitions,
        workers,
        replicas,
        keeps_all: true,
        now_ms: NOW_MS,
        age_ms: 600_000,
        timing: Timing::default(),
        restart_grace_ms: 3_000,
        max_transfers: 2,
        workers_seen: (0..workers).map(observation).collect(),
        absent: BTreeSet::new(),
        draining: BTreeSet::new(),
        braked: false,
        last_failover_ms: None,
    }
}

impl Toy {
    fn new(workers: u32, replicas: u32, partitions: u32) -> Self {
        let observed = observed(workers, replicas, partitions);
        let plan = decide(None, &observed);
        assert_eq!(plan.conditions, [""; 0]);
        let map = plan.initial_map.expect("a cluster with all its workers forms");
        Self { observed, map, named: 0, most_incoming: 0 }
    }

    fn worker(&mut self, ordinal: u32) -> &mut WorkerObservation {
        self.observed.workers_seen.iter_mut().find(|worker| worker.member.ordinal == Ordinal(ordinal)).unwrap()
    }

    fn die(&mut self, ordinal: u32) {
        let since_ms = self.observed.now_ms;
        self.worker(ordinal).liveness = Liveness::Dead { since_ms };
    }

    fn restart(&mut self, ordinal: u32) {
        let now_ms = self.observed.now_ms;
        let worker = self.worker(ordinal);
        worker.member.incarnation.0 += 1;
        (worker.liveness, worker.seen_since_ms) = (Liveness::Alive, now_ms);
    }

    fn decide(&self) -> Plan {
        decide(Some(&self.map), &self.observed)
    }

    fn change(&mut self, partition: PartitionId, change: &Change) {
        let entry = &mut self.map.partitions[partition.0 as usize];
        match entry.apply(change) {
            Ok(changed) => *entry = changed,
            Err(illegal) => panic!("{change:?} of {entry:?}: {illegal}"),
        }
        self.map.version += 1;
    }

    /// Carries out one decision and the workers' reaction; returns whether anything changed.
    fn turn(&mut self) -> bool {
        let before = self.map.clone();
        let plan = self.decide();
        for (partition, change) in &plan.changes {
            if let Change::Learn(learners) = change {
                let entry = &self.map.partitions[partition.0 as usize];
                self.named += learners.iter().filter(|learner| !entry.learners.contains(learner)).count();
            }
            self.change(*partition, change);
            let removed = matches!(change, Change::Remove { .. });
            let left = self.map.partitions[partition.0 as usize].isr.len();
            assert!(!removed || left > 1, "the only replica left activates again");
        }
        for LeadershipTransfer { partition, to } in plan.transfers {
            let entry = &self.map.partitions[partition.0 as usize];
            let primary = self.observed.workers_seen.iter().find(|worker| worker.member.ordinal == to).unwrap().member;
            let isr = entry.isr.iter().map(|member| member.ordinal).collect();
            self.change(partition, &Change::Promote { primary, isr });
        }
        let mut incoming: BTreeMap<Ordinal, usize> = BTreeMap::new();
        for partition in (0..self.map.partitions.len() as u32).map(PartitionId) {
            let entry = &self.map.partitions[partition.0 as usize];
            entry.learners.iter().for_each(|learner| *incoming.entry(*learner).or_default() += 1);
            self.serve(partition);
        }
        self.most_incoming = incoming.into_values().max().unwrap_or(0).max(self.most_incoming);
        self.observed.now_ms += 100;
        self.map.partitions != before.partitions
    }

    /// Simulates the primary of a partition.
    fn serve(&mut self, partition: PartitionId) {
        let entry = self.map.partitions[partition.0 as usize].clone();
        let alive = |ordinal: Ordinal| {
            self.observed
                .workers_seen
                .iter()
                .find(|worker| worker.member.ordinal == ordinal && worker.liveness.is_alive())
        };
        let Some(primary) = alive(entry.primary).filter(|worker| entry.served_by(&worker.member)) else { return };
        let primary = primary.member;
        if !entry.activated {
            return self.change(partition, &Change::Activate);
        }
        if let Some(dead) = entry.isr.iter().find(|member| alive(member.ordinal).is_none()) {
            return self.change(partition, &Change::Remove { primary, leaver: dead.ordinal });
        }
        if let Some(newcomer) = entry.learners.iter().find_map(|learner| alive(*learner)) {
            self.change(partition, &Change::Add { primary, newcomer: newcomer.member });
        }
    }

    fn turns(&mut self, turns: u32) {
        for _ in 0..turns {
            self.turn();
        }
    }

    fn settle(&mut self) {
        for _ in 0..20_000 {
            if !self.turn() {
                return;
            }
        }
        panic!("decisions do not terminate: {:?}", self.decide());
    }

    fn primaries(&self, ordinal: u32) -> usize {
        self.map.partitions.iter().filter(|entry| entry.primary == Ordinal(ordinal)).count()
    }

    fn replicas_on(&self, ordinal: u32) -> usize {
        self.map.partitions.iter().filter(|entry| entry.in_sync(Ordinal(ordinal)).is_some()).count()
    }

    fn assert_whole(&self) {
        let replicas = self.observed.replicas as usize;
        for entry in &self.map.partitions {
            assert!(entry.activated && entry.isr.len() == replicas && entry.learners.is_empty(), "{entry:?}");
            for member in &entry.isr {
                let worker = self.observed.workers_seen.iter().find(|worker| worker.member.ordinal == member.ordinal);
                assert!(worker.is_some_and(|worker| worker.liveness.is_alive()), "{entry:?}");
            }
        }
        assert_eq!(self.decide().conditions, [""; 0]);
    }
}

#[test]
fn cluster_forms_only_when_all_workers_are_present() {
    let mut early = observed(3, 2, 16);
    early.workers_seen.remove(1);
    let plan = decide(None, &early);
    assert_eq!(
        (plan.initial_map, plan.conditions),
        (None, vec!["waiting for workers [1] to form the cluster".to_owned()])
    );
    for (workers, replicas, partitions) in
        [(1, 1, 7), (3, 1, 64), (5, 2, 256), (7, 3, 256), (10, 2, 256), (50, 1, 256), (50, 2, 256)]
    {
        let toy = Toy::new(workers, replicas, partitions);
        assert_eq!(toy.decide(), Plan::default(), "{workers} workers, {replicas} replicas: nothing to do");
    }
    let toy = Toy::new(3, 2, 16);
    assert!(toy.map.partitions.iter().all(|entry| entry.term == Term(1) && entry.activated && entry.isr.len() == 2));
    let few = decide(None, &observed(1, 2, 16));
    assert!(few.initial_map.is_none() && few.conditions[0].contains("2 replicas need as many workers"), "{few:?}");
}

#[test]
fn partitions_of_a_dead_worker_fail_over_at_once_and_are_re_replicated() {
    let mut toy = Toy::new(3, 2, 48);
    let primaries = toy.primaries(1);
    toy.die(1);
    let plan = toy.decide();
    let promotions = plan.changes.iter().filter(|(_, change)| matches!(change, Change::Promote { .. })).count();
    assert_eq!(promotions, primaries, "all of them in one decision");
    toy.turn();
    assert_eq!(toy.primaries(1), 0);
    // It restarts within the grace period: nothing is re-replicated elsewhere, it gets its own replicas back.
    toy.turns(10);
    assert_eq!(toy.named, 0, "a single replica waits for a peer that is proven dead");
    assert!(toy.decide().conditions[0].contains("fewer than 2 in-sync replicas"), "{:?}", toy.decide().conditions);
    toy.restart(1);
    toy.settle();
    toy.assert_whole();
    assert!(toy.replicas_on(1) >= 30, "{}", toy.replicas_on(1));
    assert!(toy.most_incoming <= 2);
    // Primaries move back slowly, and only later.
    assert!((14..=18).contains(&toy.primaries(1)), "{}", toy.primaries(1));
}

#[test]
fn lost_replicas_are_re_replicated_elsewhere_after_the_grace_period() {
    let mut toy = Toy::new(4, 2, 32);
    toy.die(3);
    while toy.observed.now_ms < NOW_MS + 2_900 {
        toy.turn();
    }
    assert_eq!(toy.named, 0);
    toy.settle();
    toy.turns(10);
    toy.settle();
    toy.assert_whole();
    assert_eq!(toy.replicas_on(3), 0);

    // Without proof of death no supervisor restarts it: re-replicate at once.
    let mut toy = Toy::new(4, 2, 32);
    toy.worker(3).liveness = Liveness::Suspected { cause: Cause::Closed, since_ms: NOW_MS - 200 };
    toy.turns(4);
    assert!(toy.named > 0);
    // With two replicas left there is time.
    let mut toy = Toy::new(4, 3, 32);
    toy.worker(3).liveness = Liveness::Suspected { cause: Cause::Closed, since_ms: NOW_MS - 200 };
    while toy.observed.now_ms < NOW_MS + 29_000 {
        toy.turn();
    }
    assert_eq!(toy.named, 0);
    toy.turns(20);
    toy.settle();
    toy.assert_whole();
}

#[test]
fn restarted_primary_continues_and_restarted_cluster_keeps_its_replicas() {
    let mut toy = Toy::new(3, 2, 24);
    let before = toy.map.clone();
    // All workers come back as new processes, one after the other, to a coordinator that has just started.
    (0..3).for_each(|ordinal| toy.restart(ordinal));
    toy.observed.age_ms = 100;
    let late = toy.observed.workers_seen.split_off(1);
    toy.turn();
    for (old, new) in before.partitions.iter().zip(&toy.map.partitions) {
        let served = new.primary == Ordinal(0);
        assert_eq!(new.term, if served { Term(2) } else { Term(1) }, "only workers that reported are promoted again");
        assert_eq!(new.isr.len(), old.isr.len(), "members that have not reported keep their membership");
    }
    assert_eq!(toy.decide().conditions.len(), 2, "{:?}", toy.decide().conditions);
    toy.observed.workers_seen.extend(late);
    toy.settle();
    for (old, new) in before.partitions.iter().zip(&toy.map.partitions) {
        assert_eq!((new.primary, new.isr.len(), new.activated), (old.primary, 2, true));
    }
    assert_eq!(toy.named, 0, "nothing was re-replicated");
    // A late heartbeat of the older process changes nothing.
    toy.worker(1).member.incarnation = Incarnation(1);
    assert_eq!(toy.decide().changes, []);
}

#[test]
fn member_that_lost_acknowledged_writes_is_not_promoted_and_is_added_again() {
    let mut toy = Toy::new(2, 2, 8);
    toy.observed.keeps_all = false;
    toy.restart(0);
    toy.worker(0).lossless_since = Incarnation(2);
    toy.settle();
    toy.assert_whole();
    let again = Member { incarnation: Incarnation(2), ..observation(0).member };
    assert!(toy.map.partitions.iter().all(|entry| entry.isr.contains(&again)), "its new process counts");
    // Both at once: no replica holds everything, manual intervention is required.
    for ordinal in 0..2 {
        toy.restart(ordinal);
        toy.worker(ordinal).lossless_since = Incarnation(9);
    }
    let plan = toy.decide();
    assert_eq!(plan.changes, []);
    assert!(plan.conditions[0].contains("lost acknowledged writes"), "{:?}", plan.conditions);
}

#[test]
fn single_replica_is_waited_for_and_another_disk_under_its_ordinal_is_lost() {
    let mut toy = Toy::new(3, 1, 12);
    toy.die(1);
    let plan = toy.decide();
    assert_eq!(plan.changes, [], "no other worker is ever promoted");
    assert!(plan.conditions[0].contains("only on worker 1"), "{:?}", plan.conditions);
    toy.restart(1);
    toy.worker(1).member.store = StoreId(666);
    let plan = toy.decide();
    assert_eq!(plan.changes, []);
    assert!(plan.conditions[0].contains("restore that disk"), "{:?}", plan.conditions);

    // With two replicas the other one takes over, and the new disk gets replicas like any other.
    let mut toy = Toy::new(2, 2, 8);
    toy.restart(1);
    toy.worker(1).member.store = StoreId(666);
    toy.settle();
    toy.assert_whole();
}

#[test]
fn suspicion_moves_leadership_only_with_a_second_witness_or_in_time() {
    let mut toy = Toy::new(3, 2, 12);
    toy.worker(1).liveness = Liveness::Suspected { cause: Cause::Silent, since_ms: NOW_MS };
    assert_eq!(toy.decide().changes, []);
    toy.worker(0).suspects = [Ordinal(1)].into();
    let promoted = |(partition, change)| matches!(change, Change::Promote { .. }).then_some(partition);
    let moved: Vec<_> = toy.decide().changes.into_iter().filter_map(promoted).collect();
    assert!(!moved.is_empty());
    for partition in moved {
        let entry = &toy.map.partitions[partition.0 as usize];
        assert!(entry.primary == Ordinal(1) && entry.in_sync(Ordinal(0)).is_some(), "its backup has to confirm");
    }
    toy.worker(0).suspects.clear();
    toy.observed.now_ms += 3_600;
    assert!(!toy.decide().changes.is_empty());
    toy.observed.braked = true;
    assert_eq!(toy.decide().changes, [], "the brake acts");
}

#[test]
fn damped_workers_become_primary_only_as_a_last_choice() {
    let mut toy = Toy::new(3, 3, 9);
    toy.worker(0).damped = true;
    toy.die(1);
    toy.turn();
    assert_eq!(toy.primaries(1), 0);
    assert_eq!(toy.primaries(0), 3, "it keeps its own partitions");
    toy.die(2);
    toy.turn();
    assert_eq!(toy.primaries(0), 9);
}

#[test]
fn member_that_never_reported_is_removed_eventually() {
    let mut toy = Toy::new(3, 2, 12);
    toy.observed.workers_seen.remove(2);
    assert_eq!(toy.decide().changes, []);
    toy.observed.absent = [Ordinal(2)].into();
    let plan = toy.decide();
    for (partition, change) in &plan.changes {
        let entry = &toy.map.partitions[partition.0 as usize];
        assert!(entry.in_sync(Ordinal(2)).is_some());
        assert!(matches!(change, Change::Promote { isr, .. } if !isr.contains(&Ordinal(2))));
    }
    assert_eq!(plan.changes.len(), toy.replicas_on(2));
}

#[test]
fn additional_worker_gets_its_share_with_few_moves() {
    let mut toy = Toy::new(3, 2, 256);
    toy.observed.workers_seen.push(observation(3));
    toy.observed.workers = 4;
    toy.settle();
    toy.assert_whole();
    assert!(toy.most_incoming <= 2);
    // Its share is a quarter of 512 replicas.
    assert!(toy.named * 100 <= 512 * 30, "{} of 512 replicas moved", toy.named);
    for ordinal in 0..4 {
        assert!((124..=132).contains(&toy.replicas_on(ordinal)), "{}", toy.replicas_on(ordinal));
        assert!((60..=67).contains(&toy.primaries(ordinal)), "{}", toy.primaries(ordinal));
    }
}

#[test]
fn worker_is_drained_before_it_is_removed() {
    for (replicas, keeps_all) in [(1, true), (2, true), (2, false), (1, false)] {
        let mut toy = Toy::new(4, replicas, 64);
        toy.observed.keeps_all = keeps_all;
        toy.observed.workers = 3;
        toy.observed.draining = [Ordinal(1)].into();
        let plan = toy.decide();
        assert!(plan.conditions.iter().any(|why| why.contains("worker 3 is draining")), "{:?}", plan.conditions);
        if replicas == 2 {
            assert!(!plan.transfers.is_empty(), "leadership moves first");
        }
        toy.settle();
        toy.assert_whole();
        assert_eq!((toy.replicas_on(1), toy.replicas_on(3), toy.primaries(1), toy.primaries(3)), (0, 0, 0, 0));
        // And back.
        toy.observed.draining.clear();
        toy.settle();
        toy.assert_whole();
        assert!(toy.replicas_on(1) >= 64 * replicas as usize / 3 - 6);
    }
    let mut pair = Toy::new(2, 2, 8);
    pair.observed.draining = [Ordinal(1)].into();
    pair.settle();
    assert_eq!((pair.replicas_on(1), pair.primaries(1)), (8, 0), "no replica is removed that no other worker can take");
    assert!(pair.decide().conditions.iter().any(|why| why.contains("too few workers")));
}

#[test]
fn replicas_never_share_a_machine_when_there_is_another() {
    let mut toy = Toy::new(4, 2, 64);
    for ordinal in 0..4 {
        toy.worker(ordinal).domain = format!("machine-{}", ordinal / 2);
    }
    let before = toy.map.clone();
    toy.die(0);
    toy.observed.now_ms += 40_000;
    toy.settle();
    toy.assert_whole();
    let machine = |member: &Member| member.ordinal.0 / 2;
    let mut copied = 0;
    for (old, new) in before.partitions.iter().zip(&toy.map.partitions) {
        // Replicas that shared a machine from the start (each worker was its own domain at placement) are not moved.
        if old.in_sync(Ordinal(0)).is_some() {
            assert_ne!(machine(&new.isr[0]), machine(&new.isr[1]), "{new:?}");
            copied += 1;
        }
    }
    assert!(copied > 20);
}

#[test]
fn leaving_worker_gets_no_replicas_and_its_replicas_wait_for_it() {
    let mut toy = Toy::new(3, 2, 48);
    let held = toy.replicas_on(1);
    let now_ms = toy.observed.now_ms;
    (toy.worker(1).leaving_since_ms, toy.worker(1).damped) = (Some(now_ms), true);
    assert_eq!(toy.decide(), Plan::default(), "the primaries of its replicas remove it themselves");
    for partition in (0..48).map(PartitionId) {
        let entry = toy.map.partitions[partition.0 as usize].clone();
        let primary = *entry.primary_member().unwrap();
        let others = || entry.isr.iter().filter(|member| member.ordinal != Ordinal(1));
        if primary.ordinal == Ordinal(1) {
            let primary = *others().next().unwrap();
            toy.change(partition, &Change::Promote { primary, isr: vec![primary.ordinal] });
        } else if others().count() == 1 {
            toy.change(partition, &Change::Remove { primary, leaver: Ordinal(1) });
        }
    }
    toy.settle();
    assert_eq!((toy.replicas_on(1), toy.named), (0, 0), "nothing is re-replicated: it comes back");
    toy.die(1);
    toy.turns(5);
    toy.restart(1);
    (toy.worker(1).leaving_since_ms, toy.worker(1).damped) = (None, false);
    toy.settle();
    toy.assert_whole();
    assert_eq!((toy.replicas_on(1), toy.named), (held, held), "to where they were");

    let now_ms = toy.observed.now_ms;
    toy.worker(1).leaving_since_ms = Some(now_ms);
    toy.die(2);
    toy.observed.now_ms += 100_000;
    let to_whom = toy.decide().changes.into_iter().filter_map(|(_, change)| match change {
        Change::Learn(learners) => Some(learners),
        _ => None,
    });
    assert!(to_whom.flatten().all(|learner| learner == Ordinal(0)), "no plan depends on a leaving worker");
}

#[test]
fn no_replica_is_removed_while_another_may_be_dead() {
    let mut toy = Toy::new(3, 2, 12);
    for partition in 0..12 {
        let entry = &toy.map.partitions[partition as usize];
        let primary = *entry.primary_member().unwrap();
        let newcomer =
            (0..3).map(|ordinal| observation(ordinal).member).find(|member| !entry.isr.contains(member)).unwrap();
        toy.change(PartitionId(partition), &Change::Add { primary, newcomer });
    }
    let removals = |toy: &Toy| toy.decide().changes.len();
    assert_eq!(removals(&toy), 12, "one of three is surplus");
    toy.worker(1).liveness = Liveness::Suspected { cause: Cause::Silent, since_ms: NOW_MS };
    for (partition, change) in toy.decide().changes {
        let entry = toy.map.partitions[partition.0 as usize].apply(&change).unwrap();
        let sure = entry.isr.iter().filter(|member| member.ordinal != Ordinal(1)).count();
        assert_eq!(sure, 2, "{entry:?}");
    }
}

#[test]
fn leadership_is_not_balanced_soon_after_a_failover() {
    let mut toy = Toy::new(3, 3, 30);
    toy.die(0);
    toy.turns(2);
    toy.restart(0);
    toy.observed.last_failover_ms = Some(toy.observed.now_ms + 1_000_000);
    toy.settle();
    assert_eq!((toy.primaries(0), toy.replicas_on(0)), (0, 30));
    toy.observed.last_failover_ms = Some(toy.observed.now_ms);
    assert_eq!(toy.decide().transfers, []);
    toy.observed.now_ms += 10_000;
    assert_eq!(toy.decide().transfers.len(), 4, "a few at a time");
    toy.settle();
    assert!((9..=11).contains(&toy.primaries(0)));
}

#[test]
fn full_disk_gets_no_new_replicas_and_blocks_no_others() {
    let mut toy = Toy::new(4, 2, 32);
    let before = toy.replicas_on(1);
    toy.worker(1).disk_full = true;
    toy.die(3);
    toy.observed.now_ms += 3_000;
    toy.settle();
    toy.turns(10);
    toy.settle();
    assert_eq!(toy.decide().conditions, ["no free disk space on worker 1: no new replicas there"]);
    toy.worker(1).disk_full = false;
    assert!(toy.replicas_on(1) <= before, "{} replicas", toy.replicas_on(1));
    assert!(toy.map.partitions.iter().all(|entry| entry.isr.len() == 2 && entry.in_sync(Ordinal(3)).is_none()));

    // A transfer that has begun goes elsewhere.
    let mut toy = Toy::new(3, 2, 1);
    let entry = &mut toy.map.partitions[0];
    let backup = entry.isr.iter().map(|member| member.ordinal).find(|ordinal| *ordinal != entry.primary).unwrap();
    entry.activated = true;
    entry.isr.retain(|member| member.ordinal != backup);
    entry.learners = vec![backup];
    toy.worker(backup.0).disk_full = true;
    let other = (0..3).map(Ordinal).find(|it| *it != backup && *it != toy.map.partitions[0].primary).unwrap();
    assert_eq!(toy.decide().changes, [(PartitionId(0), Change::Learn(vec![other]))]);
}

#[test]
fn no_transfer_to_a_worker_that_waits_for_leases_of_its_predecessor() {
    let mut toy = Toy::new(3, 3, 30);
    toy.die(0);
    toy.turns(2);
    toy.restart(0);
    toy.observed.last_failover_ms = Some(toy.observed.now_ms + 1_000_000);
    toy.settle();
    assert_eq!((toy.primaries(0), toy.replicas_on(0)), (0, 30));
    toy.observed.last_failover_ms = None;
    toy.worker(0).seen_since_ms = toy.observed.now_ms;
    assert_eq!(toy.decide().transfers, [], "not for balance");
    toy.observed.draining = [Ordinal(1)].into();
    let transfers = toy.decide().transfers;
    assert!(!transfers.is_empty() && transfers.iter().all(|order| order.to == Ordinal(2)), "{transfers:?}");
    toy.observed.now_ms += LEASE_WAIT_MS;
    assert!(toy.decide().transfers.iter().any(|order| order.to == Ordinal(0)));

    let mut grown = Toy::new(2, 2, 8);
    grown.observed.workers_seen.push(WorkerObservation { seen_since_ms: NOW_MS, ..observation(2) });
    grown.observed.workers = 3;
    grown.settle();
    assert!(grown.primaries(2) > 0, "the first process on a disk has no predecessor that granted leases");
}

#[derive(Debug, Clone)]
enum Fault {
    Die(u32),
    Silence(u32),
    Restart(u32),
    Lose(u32),
    Drain(u32),
    Undrain(u32),
    Turns(u32),
    Wait(u32),
}

fn fault(workers: u32) -> impl Strategy<Value = Fault> {
    let worker = 0..workers;
    prop_oneof![
        worker.clone().prop_map(Fault::Die),
        worker.clone().prop_map(Fault::Silence),
        worker.clone().prop_map(Fault::Restart),
        worker.clone().prop_map(Fault::Lose),
        worker.clone().prop_map(Fault::Drain),
        worker.prop_map(Fault::Undrain),
        (1..20_u32).prop_map(Fault::Turns),
        (1..40_u32).prop_map(Fault::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Every change is legal for any observation; and when faults stop, every partition with a living candidate ends with all its
    /// replicas on living workers that are not draining.
    #[test]
    fn decisions_are_legal_and_terminate(
        (workers, replicas, keeps_all) in (3..6_u32, 1..4_u32, any::<bool>()),
        faults in prop::collection::vec(fault(5), 0..30),
    ) {
        let mut toy = Toy::new(workers, replicas, 12);
        toy.observed.keeps_all = keeps_all;
        for fault in faults {
            match fault {
                Fault::Die(ordinal) if ordinal < workers => toy.die(ordinal),
                Fault::Silence(ordinal) if ordinal < workers => {
                    let since_ms = toy.observed.now_ms;
                    toy.worker(ordinal).liveness = Liveness::Suspected { cause: Cause::Silent, since_ms };
                }
                Fault::Restart(ordinal) if ordinal < workers => toy.restart(ordinal),
                Fault::Lose(ordinal) if ordinal < workers => {
                    toy.restart(ordinal);
                    let worker = toy.worker(ordinal);
                    worker.lossless_since = worker.member.incarnation;
                }
                Fault::Drain(ordinal) => drop(toy.observed.draining.insert(Ordinal(ordinal))),
                Fault::Undrain(ordinal) => drop(toy.observed.draining.remove(&Ordinal(ordinal))),
                Fault::Turns(turns) => toy.turns(turns),
                Fault::Wait(seconds) => toy.observed.now_ms += u64::from(seconds) * 1_000,
                _ => {}
            }
        }
        toy.observed.draining.clear();
        for ordinal in 0..workers {
            if !toy.worker(ordinal).liveness.is_alive() {
                toy.restart(ordinal);
            }
        }
        toy.settle();
        toy.observed.now_ms += 60_000;
        toy.settle();
        let stuck = |entry: &&Entry| !entry.candidates().any(|member| {
            let worker = &toy.observed.workers_seen[member.ordinal.0 as usize];
            entry.holds_all(&worker.member, worker.lossless_since, keeps_all)
        });
        if toy.map.partitions.iter().any(|entry| stuck(&entry)) {
            prop_assert!(!keeps_all, "a disk that keeps everything can always be promoted again");
            prop_assert!(!toy.decide().conditions.is_empty());
        } else {
            toy.assert_whole();
        }
    }
}
