//! Decisions in a toy cluster whose workers carry them out: primaries activate, add who caught up, remove who is dead, hand
//! over when told to.

use super::*;
use crate::detector::Cause;
use engram_memory::{StoreId, Term};
use proptest::prelude::*;

const NOW_MS: u64 = 1_000_000;

struct Toy {
    observed: Observed,
    map: PartitionMap,
    /// Learners named so far, whether they were added or not.
    named: usize,
    /// Copies that were under way at once, the most at any worker.
    most_incoming: usize,
}

fn seen(ordinal: u32) -> Seen {
    let store = StoreId(u128::from(ordinal) + 100);
    Seen {
        member: Member { ordinal: Ordinal(ordinal), store, incarnation: Incarnation(1) },
        lossless_since: Incarnation(1),
        domain: format!("machine-{ordinal}"),
        standing: Standing::Alive,
        fresh: true,
        supervised: true,
        damped: false,
        leaving_since_ms: None,
        heard_since_ms: 0,
        suspects: BTreeSet::new(),
    }
}

fn observed(workers: u32, copies: u32, partitions: u32) -> Observed {
    Observed {
        cluster: ClusterId(9),
        partitions,
        workers,
        copies,
        keeps_all: true,
        now_ms: NOW_MS,
        age_ms: 600_000,
        timing: Timing::default(),
        restart_grace_ms: 3_000,
        copies_at_once: 2,
        members: (0..workers).map(seen).collect(),
        absent: BTreeSet::new(),
        draining: BTreeSet::new(),
        braked: false,
        failed_over_ms: None,
    }
}

impl Toy {
    fn new(workers: u32, copies: u32, partitions: u32) -> Self {
        let observed = observed(workers, copies, partitions);
        let plan = decide(None, &observed);
        assert_eq!(plan.conditions, [""; 0]);
        let map = plan.first.expect("a cluster with all its workers forms");
        Self { observed, map, named: 0, most_incoming: 0 }
    }

    fn worker(&mut self, ordinal: u32) -> &mut Seen {
        self.observed.members.iter_mut().find(|seen| seen.member.ordinal == Ordinal(ordinal)).unwrap()
    }

    fn die(&mut self, ordinal: u32) {
        let since_ms = self.observed.now_ms;
        self.worker(ordinal).standing = Standing::Dead { since_ms };
    }

    fn restart(&mut self, ordinal: u32) {
        let now_ms = self.observed.now_ms;
        let worker = self.worker(ordinal);
        worker.member.incarnation.0 += 1;
        (worker.standing, worker.heard_since_ms) = (Standing::Alive, now_ms);
    }

    fn decide(&self) -> Plan {
        decide(Some(&self.map), &self.observed)
    }

    fn change(&mut self, partition: PartitionId, change: &Change) {
        let entry = &mut self.map.partitions[partition.0 as usize];
        match entry.changed(change) {
            Ok(changed) => *entry = changed,
            Err(illegal) => panic!("{change:?} of {entry:?}: {illegal}"),
        }
        self.map.version += 1;
    }

    /// Carries out one decision, and what the workers do about it; whether anything happened.
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
            assert!(!removed || left > 1, "who is left alone activates anew");
        }
        for HandOver { partition, to } in plan.hand_overs {
            let entry = &self.map.partitions[partition.0 as usize];
            let primary = self.observed.members.iter().find(|seen| seen.member.ordinal == to).unwrap().member;
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

    /// What the primary of a partition does.
    fn serve(&mut self, partition: PartitionId) {
        let entry = self.map.partitions[partition.0 as usize].clone();
        let alive = |ordinal: Ordinal| {
            self.observed.members.iter().find(|seen| seen.member.ordinal == ordinal && seen.standing.is_alive())
        };
        let Some(primary) = alive(entry.primary).filter(|seen| entry.served_by(&seen.member)) else { return };
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
        panic!("decisions do not come to an end: {:?}", self.decide());
    }

    fn primaries(&self, ordinal: u32) -> usize {
        self.map.partitions.iter().filter(|entry| entry.primary == Ordinal(ordinal)).count()
    }

    fn copies(&self, ordinal: u32) -> usize {
        self.map.partitions.iter().filter(|entry| entry.in_sync(Ordinal(ordinal)).is_some()).count()
    }

    fn assert_whole(&self) {
        let copies = self.observed.copies as usize;
        for entry in &self.map.partitions {
            assert!(entry.activated && entry.isr.len() == copies && entry.learners.is_empty(), "{entry:?}");
            for member in &entry.isr {
                let worker = self.observed.members.iter().find(|seen| seen.member.ordinal == member.ordinal);
                assert!(worker.is_some_and(|worker| worker.standing.is_alive()), "{entry:?}");
            }
        }
        assert_eq!(self.decide().conditions, [""; 0]);
    }
}

#[test]
fn a_cluster_forms_when_all_its_workers_are_here_and_not_before() {
    let mut early = observed(3, 2, 16);
    early.members.remove(1);
    let plan = decide(None, &early);
    assert_eq!((plan.first, plan.conditions), (None, vec!["waiting for workers [1] to form the cluster".to_owned()]));
    for (workers, copies, partitions) in
        [(1, 1, 7), (3, 1, 64), (5, 2, 256), (7, 3, 256), (10, 2, 256), (50, 1, 256), (50, 2, 256)]
    {
        let toy = Toy::new(workers, copies, partitions);
        assert_eq!(toy.decide(), Plan::default(), "{workers} workers, {copies} copies: left alone");
    }
    let toy = Toy::new(3, 2, 16);
    assert!(toy.map.partitions.iter().all(|entry| entry.term == Term(1) && entry.activated && entry.isr.len() == 2));
    let few = decide(None, &observed(1, 2, 16));
    assert!(few.first.is_none() && few.conditions[0].contains("2 copies need as many workers"), "{few:?}");
}

#[test]
fn a_dead_workers_partitions_go_to_their_backups_at_once_and_get_their_copies_back() {
    let mut toy = Toy::new(3, 2, 48);
    let led = toy.primaries(1);
    toy.die(1);
    let plan = toy.decide();
    let promotions = plan.changes.iter().filter(|(_, change)| matches!(change, Change::Promote { .. })).count();
    assert_eq!(promotions, led, "all of them in one decision");
    toy.turn();
    assert_eq!(toy.primaries(1), 0);
    // It is started again within the grace: nothing was copied elsewhere, it gets its own copies back.
    toy.turns(10);
    assert_eq!(toy.named, 0, "a lone partition waits for a partner that died with proof");
    assert!(toy.decide().conditions[0].contains("fewer than 2 copies in sync"), "{:?}", toy.decide().conditions);
    toy.restart(1);
    toy.settle();
    toy.assert_whole();
    assert!(toy.copies(1) >= 30, "{}", toy.copies(1));
    assert!(toy.most_incoming <= 2);
    // Primaries come back slowly, and only later.
    assert!((14..=18).contains(&toy.primaries(1)), "{}", toy.primaries(1));
}

#[test]
fn what_does_not_come_back_is_copied_elsewhere_after_its_grace() {
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
    assert_eq!(toy.copies(3), 0);

    // Without proof nobody starts it again: at once.
    let mut toy = Toy::new(4, 2, 32);
    toy.worker(3).standing = Standing::Suspected { cause: Cause::Closed, since_ms: NOW_MS - 200 };
    toy.turns(4);
    assert!(toy.named > 0);
    // With two copies left there is time.
    let mut toy = Toy::new(4, 3, 32);
    toy.worker(3).standing = Standing::Suspected { cause: Cause::Closed, since_ms: NOW_MS - 200 };
    while toy.observed.now_ms < NOW_MS + 29_000 {
        toy.turn();
    }
    assert_eq!(toy.named, 0);
    toy.turns(20);
    toy.settle();
    toy.assert_whole();
}

#[test]
fn a_restarted_primary_goes_on_and_a_restarted_cluster_keeps_its_copies() {
    let mut toy = Toy::new(3, 2, 24);
    let before = toy.map.clone();
    // All come back as new processes, one after the other, to a coordinator that has just started.
    (0..3).for_each(|ordinal| toy.restart(ordinal));
    toy.observed.age_ms = 100;
    let late = toy.observed.members.split_off(1);
    toy.turn();
    for (old, new) in before.partitions.iter().zip(&toy.map.partitions) {
        let served = new.primary == Ordinal(0);
        assert_eq!(new.term, if served { Term(2) } else { Term(1) }, "only who was heard is elected again");
        assert_eq!(new.isr.len(), old.isr.len(), "who was not heard yet keeps its place");
    }
    assert_eq!(toy.decide().conditions.len(), 2, "{:?}", toy.decide().conditions);
    toy.observed.members.extend(late);
    toy.settle();
    for (old, new) in before.partitions.iter().zip(&toy.map.partitions) {
        assert_eq!((new.primary, new.isr.len(), new.activated), (old.primary, 2, true));
    }
    assert_eq!(toy.named, 0, "nothing was copied");
    // A beat of the older process that arrives late changes nothing.
    toy.worker(1).member.incarnation = Incarnation(1);
    assert_eq!(toy.decide().changes, []);
}

#[test]
fn who_lost_what_it_had_acknowledged_is_not_elected_and_is_added_again() {
    let mut toy = Toy::new(2, 2, 8);
    toy.observed.keeps_all = false;
    toy.restart(0);
    toy.worker(0).lossless_since = Incarnation(2);
    toy.settle();
    toy.assert_whole();
    let again = Member { incarnation: Incarnation(2), ..seen(0).member };
    assert!(toy.map.partitions.iter().all(|entry| entry.isr.contains(&again)), "its new process counts");
    // Both at once: nobody holds everything, and a person has to decide.
    for ordinal in 0..2 {
        toy.restart(ordinal);
        toy.worker(ordinal).lossless_since = Incarnation(9);
    }
    let plan = toy.decide();
    assert_eq!(plan.changes, []);
    assert!(plan.conditions[0].contains("lost writes that it had acknowledged"), "{:?}", plan.conditions);
}

#[test]
fn a_lone_copy_is_waited_for_and_another_disk_under_its_name_is_absent() {
    let mut toy = Toy::new(3, 1, 12);
    toy.die(1);
    let plan = toy.decide();
    assert_eq!(plan.changes, [], "nobody else is ever promoted");
    assert!(plan.conditions[0].contains("worker 1 alone"), "{:?}", plan.conditions);
    toy.restart(1);
    toy.worker(1).member.store = StoreId(666);
    let plan = toy.decide();
    assert_eq!(plan.changes, []);
    assert!(plan.conditions[0].contains("bring that disk back"), "{:?}", plan.conditions);

    // With two copies the other one takes over, and the new disk gets copies as any other.
    let mut toy = Toy::new(2, 2, 8);
    toy.restart(1);
    toy.worker(1).member.store = StoreId(666);
    toy.settle();
    toy.assert_whole();
}

#[test]
fn suspicion_moves_primaryship_only_with_a_second_witness_or_in_time() {
    let mut toy = Toy::new(3, 2, 12);
    toy.worker(1).standing = Standing::Suspected { cause: Cause::Silent, since_ms: NOW_MS };
    assert_eq!(toy.decide().changes, []);
    toy.worker(0).suspects = [Ordinal(1)].into();
    let promoted = |(partition, change)| matches!(change, Change::Promote { .. }).then_some(partition);
    let moved: Vec<_> = toy.decide().changes.into_iter().filter_map(promoted).collect();
    assert!(!moved.is_empty());
    for partition in moved {
        let entry = &toy.map.partitions[partition.0 as usize];
        assert!(entry.primary == Ordinal(1) && entry.in_sync(Ordinal(0)).is_some(), "its backup has to say so");
    }
    toy.worker(0).suspects.clear();
    toy.observed.now_ms += 3_600;
    assert!(!toy.decide().changes.is_empty());
    toy.observed.braked = true;
    assert_eq!(toy.decide().changes, [], "the brake acts");
}

#[test]
fn the_damped_lead_only_where_nobody_else_can() {
    let mut toy = Toy::new(3, 3, 9);
    toy.worker(0).damped = true;
    toy.die(1);
    toy.turn();
    assert_eq!(toy.primaries(1), 0);
    assert_eq!(toy.primaries(0), 3, "what it leads it keeps");
    toy.die(2);
    toy.turn();
    assert_eq!(toy.primaries(0), 9);
}

#[test]
fn a_member_that_was_never_heard_is_given_up_in_the_end() {
    let mut toy = Toy::new(3, 2, 12);
    toy.observed.members.remove(2);
    assert_eq!(toy.decide().changes, []);
    toy.observed.absent = [Ordinal(2)].into();
    let plan = toy.decide();
    for (partition, change) in &plan.changes {
        let entry = &toy.map.partitions[partition.0 as usize];
        assert!(entry.in_sync(Ordinal(2)).is_some());
        assert!(matches!(change, Change::Promote { isr, .. } if !isr.contains(&Ordinal(2))));
    }
    assert_eq!(plan.changes.len(), toy.copies(2));
}

#[test]
fn one_worker_more_gets_its_share_and_moves_little() {
    let mut toy = Toy::new(3, 2, 256);
    toy.observed.members.push(seen(3));
    toy.observed.workers = 4;
    toy.settle();
    toy.assert_whole();
    assert!(toy.most_incoming <= 2);
    // Of 512 copies a quarter is its share.
    assert!(toy.named * 100 <= 512 * 30, "{} of 512 copies moved", toy.named);
    for ordinal in 0..4 {
        assert!((124..=132).contains(&toy.copies(ordinal)), "{}", toy.copies(ordinal));
        assert!((60..=67).contains(&toy.primaries(ordinal)), "{}", toy.primaries(ordinal));
    }
}

#[test]
fn a_worker_is_emptied_before_it_goes() {
    for (copies, keeps_all) in [(1, true), (2, true), (2, false), (1, false)] {
        let mut toy = Toy::new(4, copies, 64);
        toy.observed.keeps_all = keeps_all;
        toy.observed.workers = 3;
        toy.observed.draining = [Ordinal(1)].into();
        let plan = toy.decide();
        assert!(plan.conditions.iter().any(|why| why.contains("worker 3 is being emptied")), "{:?}", plan.conditions);
        if copies == 2 {
            assert!(!plan.hand_overs.is_empty(), "what it leads goes first");
        }
        toy.settle();
        toy.assert_whole();
        assert_eq!((toy.copies(1), toy.copies(3), toy.primaries(1), toy.primaries(3)), (0, 0, 0, 0));
        // And back.
        toy.observed.draining.clear();
        toy.settle();
        toy.assert_whole();
        assert!(toy.copies(1) >= 64 * copies as usize / 3 - 6);
    }
    let mut pair = Toy::new(2, 2, 8);
    pair.observed.draining = [Ordinal(1)].into();
    pair.settle();
    assert_eq!((pair.copies(1), pair.primaries(1)), (8, 0), "no copy is given up that nobody else can take");
    assert!(pair.decide().conditions.iter().any(|why| why.contains("too few workers")));
}

#[test]
fn two_copies_never_share_a_machine_when_there_is_another() {
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
        // What shared a machine from the start (each was its own when it was placed) is not moved for that.
        if old.in_sync(Ordinal(0)).is_some() {
            assert_ne!(machine(&new.isr[0]), machine(&new.isr[1]), "{new:?}");
            copied += 1;
        }
    }
    assert!(copied > 20);
}

#[test]
fn a_worker_that_leaves_gets_no_copies_and_what_it_leaves_waits_for_it() {
    let mut toy = Toy::new(3, 2, 48);
    let held = toy.copies(1);
    let now_ms = toy.observed.now_ms;
    (toy.worker(1).leaving_since_ms, toy.worker(1).damped) = (Some(now_ms), true);
    assert_eq!(toy.decide(), Plan::default(), "whose copies it has see to that themselves");
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
    assert_eq!((toy.copies(1), toy.named), (0, 0), "nothing is copied elsewhere: it comes back");
    toy.die(1);
    toy.turns(5);
    toy.restart(1);
    (toy.worker(1).leaving_since_ms, toy.worker(1).damped) = (None, false);
    toy.settle();
    toy.assert_whole();
    assert_eq!((toy.copies(1), toy.named), (held, held), "to where they were");

    let now_ms = toy.observed.now_ms;
    toy.worker(1).leaving_since_ms = Some(now_ms);
    toy.die(2);
    toy.observed.now_ms += 100_000;
    let to_whom = toy.decide().changes.into_iter().filter_map(|(_, change)| match change {
        Change::Learn(learners) => Some(learners),
        _ => None,
    });
    assert!(to_whom.flatten().all(|learner| learner == Ordinal(0)), "nobody counts on one that leaves");
}

#[test]
fn no_copy_is_removed_while_another_may_be_dead() {
    let mut toy = Toy::new(3, 2, 12);
    for partition in 0..12 {
        let entry = &toy.map.partitions[partition as usize];
        let primary = *entry.primary_member().unwrap();
        let newcomer = (0..3).map(|ordinal| seen(ordinal).member).find(|member| !entry.isr.contains(member)).unwrap();
        toy.change(PartitionId(partition), &Change::Add { primary, newcomer });
    }
    let removals = |toy: &Toy| toy.decide().changes.len();
    assert_eq!(removals(&toy), 12, "one of three is too many");
    toy.worker(1).standing = Standing::Suspected { cause: Cause::Silent, since_ms: NOW_MS };
    for (partition, change) in toy.decide().changes {
        let entry = toy.map.partitions[partition.0 as usize].changed(&change).unwrap();
        let sure = entry.isr.iter().filter(|member| member.ordinal != Ordinal(1)).count();
        assert_eq!(sure, 2, "{entry:?}");
    }
}

#[test]
fn primaryship_is_not_moved_for_balance_soon_after_a_failover() {
    let mut toy = Toy::new(3, 3, 30);
    toy.die(0);
    toy.turns(2);
    toy.restart(0);
    toy.observed.failed_over_ms = Some(toy.observed.now_ms + 1_000_000);
    toy.settle();
    assert_eq!((toy.primaries(0), toy.copies(0)), (0, 30));
    toy.observed.failed_over_ms = Some(toy.observed.now_ms);
    assert_eq!(toy.decide().hand_overs, []);
    toy.observed.now_ms += 10_000;
    assert_eq!(toy.decide().hand_overs.len(), 4, "a few at a time");
    toy.settle();
    assert!((9..=11).contains(&toy.primaries(0)));
}

#[test]
fn nobody_is_given_anything_to_lead_who_waits_for_the_end_of_leases_of_the_process_before_it() {
    let mut toy = Toy::new(3, 3, 30);
    toy.die(0);
    toy.turns(2);
    toy.restart(0);
    toy.observed.failed_over_ms = Some(toy.observed.now_ms + 1_000_000);
    toy.settle();
    assert_eq!((toy.primaries(0), toy.copies(0)), (0, 30));
    toy.observed.failed_over_ms = None;
    toy.worker(0).heard_since_ms = toy.observed.now_ms;
    assert_eq!(toy.decide().hand_overs, [], "to comfort nobody");
    toy.observed.draining = [Ordinal(1)].into();
    let given = toy.decide().hand_overs;
    assert!(!given.is_empty() && given.iter().all(|order| order.to == Ordinal(2)), "{given:?}");
    toy.observed.now_ms += LEASES_END_MS;
    assert!(toy.decide().hand_overs.iter().any(|order| order.to == Ordinal(0)));

    let mut grown = Toy::new(2, 2, 8);
    grown.observed.members.push(Seen { heard_since_ms: NOW_MS, ..seen(2) });
    grown.observed.workers = 3;
    grown.settle();
    assert!(grown.primaries(2) > 0, "nobody before the first process on a disk can have granted anything");
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

    /// Every change is legal, whatever is observed; and when faults stop, every partition that has a living candidate ends with
    /// all its copies on living workers that shall hold them.
    #[test]
    fn decisions_are_legal_and_come_to_an_end(
        (workers, copies, keeps_all) in (3..6_u32, 1..4_u32, any::<bool>()),
        faults in prop::collection::vec(fault(5), 0..30),
    ) {
        let mut toy = Toy::new(workers, copies, 12);
        toy.observed.keeps_all = keeps_all;
        for fault in faults {
            match fault {
                Fault::Die(ordinal) if ordinal < workers => toy.die(ordinal),
                Fault::Silence(ordinal) if ordinal < workers => {
                    let since_ms = toy.observed.now_ms;
                    toy.worker(ordinal).standing = Standing::Suspected { cause: Cause::Silent, since_ms };
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
            if !toy.worker(ordinal).standing.is_alive() {
                toy.restart(ordinal);
            }
        }
        toy.settle();
        toy.observed.now_ms += 60_000;
        toy.settle();
        let stuck = |entry: &&Entry| !entry.candidates().any(|member| {
            let worker = &toy.observed.members[member.ordinal.0 as usize];
            entry.holds_all(&worker.member, worker.lossless_since, keeps_all)
        });
        if toy.map.partitions.iter().any(|entry| stuck(&entry)) {
            prop_assert!(!keeps_all, "a disk that keeps everything can always be elected again");
            prop_assert!(!toy.decide().conditions.is_empty());
        } else {
            toy.assert_whole();
        }
    }
}
