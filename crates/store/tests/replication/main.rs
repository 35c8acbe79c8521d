//! Several stores in one thread, with a map that a test changes by hand: what is acknowledged is on every copy, and goes on when
//! the primary does not.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod reads;
mod world;

use engram_cluster::Change;
use engram_memory::{Command, Lsn, MemoryId, OnMissing, Ordinal, Record, Term, Updates};
use engram_store::{Durability, WriteError};
use world::{P, World, reinforce, upsert};

#[test]
fn what_is_acknowledged_is_on_both_copies_and_survives_the_primary() {
    let mut world = World::new(3, 2);
    let first = world.write(0, upsert(0..100)).unwrap();
    assert_eq!(first.replicas, 2);
    let once = world.write(0, reinforce(7, 1)).unwrap();
    assert_eq!(world.store(1).applied(P).1, once.lsn, "the backup applies what is committed");
    assert_eq!(world.store(1).partitions().memories(), 0, "and counts nothing that another serves");
    let digests = world.digests();
    assert_eq!(digests[0], digests[1]);

    // Under way when the primary dies: appended there, never acknowledged.
    let lost = world.ask(0, reinforce(8, 2));
    world.kill(0);
    let promote = Change::Promote { primary: world.member(1), isr: vec![Ordinal(1)] };
    world.change(&promote);
    world.settle();
    assert!(lost.lock().unwrap().is_none());
    assert_eq!(world.store(1).serving(P), Some(Term(2)));
    assert_eq!(world.store(1).partitions().memories(), 100);
    assert_eq!(world.write(1, reinforce(7, 1)).unwrap().reply, once.reply, "a repeat is answered as the first was");
    let alone = world.write(1, reinforce(8, 2)).unwrap();
    assert_eq!((alone.replicas, alone.durable), (1, true));

    // The old primary comes back, drops what nobody acknowledged, and is in sync again.
    world.start(0);
    world.connect(0);
    world.publish();
    world.change(&Change::Learn(vec![Ordinal(0)]));
    world.settle();
    assert_eq!((world.entry.isr.len(), world.entry.term), (2, Term(3)));
    let both = world.write(1, reinforce(9, 3)).unwrap();
    assert_eq!(both.replicas, 2);
    let digests = world.digests();
    assert_eq!(digests[0], digests[1]);
    assert_eq!(world.store(0).serving(P), None);
}

#[test]
fn a_primary_without_its_backup_stalls_until_the_map_lets_it_go_on_alone() {
    let mut world = World::new(2, 2);
    world.write(0, upsert(0..10)).unwrap();
    world.kill(1);
    let answer = world.ask(0, reinforce(1, 1));
    world.settle();
    assert!(answer.lock().unwrap().is_none(), "nothing is acknowledged that the backup does not hold");
    world.store(0).suspected(Ordinal(1));
    world.settle();
    assert!(answer.lock().unwrap().take().unwrap().is_ok());
    assert_eq!((world.entry.isr.len(), world.entry.solo_safe), (1, true));
}

#[test]
fn a_copy_of_the_state_makes_up_for_records_that_are_no_longer_kept() {
    let mut world = World::new(3, 2);
    world.write(0, upsert(0..20_000)).unwrap();
    for batch in 0..40_u64 {
        let ids = (0..5_000).map(|id| MemoryId((id + batch * 500) % 20_000)).collect::<Vec<_>>();
        let deltas = vec![1_000; ids.len()];
        let updates = Updates::ById { ids, deltas, on_missing: OnMissing::Report, keys: None };
        world.write(0, Record::bare(Command::Reinforce(updates))).unwrap();
    }
    world.change(&Change::Learn(vec![Ordinal(2)]));
    world.settle();
    assert_eq!(world.entry.isr.len(), 3, "a third copy is made");
    assert_eq!(world.store(2).stats().copies_installed, 1);
    let digests = world.digests();
    assert!(digests.windows(2).all(|pair| pair[0] == pair[1]) && digests.len() == 3);
    // It is there after a crash, and goes on from where it was.
    world.kill(2);
    world.start(2);
    world.connect(2);
    world.publish();
    world.settle();
    world.write(0, reinforce(5, 1)).unwrap();
    let digests = world.digests();
    assert!(digests.windows(2).all(|pair| pair[0] == pair[1]) && digests.len() == 3);
    assert_eq!(world.store(2).stats().copies_installed, 0);
}

#[test]
fn a_hand_over_loses_nothing_and_both_stay_in_sync() {
    let mut world = World::new(2, 2);
    world.write(0, upsert(0..10)).unwrap();
    let (under_way, holder) = (world.ask(0, reinforce(1, 1)), world.member(0));
    assert!(world.store(1).grant_lease(holder).is_empty());
    world.store(0).hand_over(P, Ordinal(1));
    world.settle();
    assert!(under_way.lock().unwrap().take().unwrap().is_ok());
    assert_eq!(world.store(1).serving(P), Some(world.entry.term), "the lease was given up, nobody waits for its end");
    assert_eq!((world.entry.primary, world.entry.isr.len(), world.entry.activated), (Ordinal(1), 2, true));
    assert!(matches!(world.write(0, reinforce(1, 2)), Err(WriteError::NotPrimary { .. })));
    assert_eq!(world.write(1, reinforce(1, 2)).unwrap().lsn, Lsn(3));
}

#[test]
fn a_restarted_primary_is_elected_anew_and_its_tail_is_committed() {
    let mut world = World::new(2, 2);
    world.write(0, upsert(0..10)).unwrap();
    let once = reinforce(1, 1);
    let lost = world.ask(0, once.clone());
    // The record reaches this disk, and no other copy.
    world.store(0).turn().unwrap();
    world.kill(0);
    assert!(lost.lock().unwrap().is_none());
    world.start(0);
    world.connect(0);
    let promote = Change::Promote { primary: world.member(0), isr: vec![Ordinal(0), Ordinal(1)] };
    world.change(&promote);
    world.settle();
    assert_eq!(world.store(0).serving(P), None, "somebody may read under a lease of the process before");
    world.wait();
    assert_eq!(world.store(0).serving(P), Some(Term(2)));
    let lsn = world.store(0).applied(P).1;
    world.write(0, once).unwrap();
    assert_eq!(world.store(0).applied(P).1, lsn, "a repeat of what was in the tail is not logged again");
    let digests = world.digests();
    assert_eq!(digests[0], digests[1]);
}

#[test]
fn a_copy_that_differs_is_found_and_made_anew() {
    let mut world = World::new(2, 2);
    world.write(0, upsert(0..50)).unwrap();
    world.store(1).partitions().apply(P, &reinforce(3, 9)).unwrap();
    let digests = world.digests();
    assert_ne!(digests[0], digests[1]);
    world.clock.advance(2 * 60 * 60 * 1_000);
    world.settle();
    assert_eq!(world.store(1).stats().digests_different, 1);
    let digests = world.digests();
    assert_eq!(digests[0], digests[1]);
    assert_eq!(world.write(0, reinforce(4, 1)).unwrap().replicas, 2);
    assert_eq!(world.store(1).replicas()[0].role, "backup", "it is whole");
    world.clock.advance(2 * 60 * 60 * 1_000);
    world.settle();
    assert_eq!((world.store(1).stats().digests_different, world.store(1).stats().digests_compared), (1, 2));
}

#[test]
fn a_damaged_copy_leads_nobody_until_it_is_whole_however_often_it_starts() {
    let mut world = World::new(2, 2);
    world.write(0, upsert(0..50)).unwrap();
    // Before the copy is made anew its process and its primary are gone.
    world.damage(1);
    for _ in 0..2 {
        world.kill(1);
        world.start(1);
        assert_eq!(world.store(1).replicas()[0].role, "corrupt");
    }
    world.kill(0);
    let promote = Change::Promote { primary: world.member(1), isr: vec![Ordinal(1)] };
    world.change(&promote);
    world.settle();
    assert_eq!(world.store(1).serving(P), None, "what is not whole is not served");

    world.start(0);
    world.connect(0);
    let back = Change::Promote { primary: world.member(0), isr: vec![Ordinal(0), Ordinal(1)] };
    world.change(&back);
    world.settle();
    world.wait();
    assert_eq!(world.store(0).serving(P), Some(world.entry.term));
    assert_eq!(world.store(1).replicas()[0].role, "backup");
    let after = world.digests();
    assert_eq!(after[0], after[1]);
}

#[test]
fn a_damaged_copy_that_shall_lead_names_one_whose_disk_is_still_there() {
    let mut world = World::new(3, 3);
    world.write(0, upsert(0..50)).unwrap();
    world.damage(1);
    world.kill(1);
    world.start(1);
    world.kill(0);
    world.replace_disk(0);
    world.start(0);
    (0..3).for_each(|node| world.connect(node));
    // Whoever decides has heard neither of the damage nor of the other disk.
    let promote = Change::Promote { primary: world.member(1), isr: vec![Ordinal(0), Ordinal(1), Ordinal(2)] };
    world.change(&promote);
    assert_eq!(world.store(1).replicas()[0].role, "corrupt");
    world.settle();
    world.wait();
    assert_eq!(world.entry.primary, Ordinal(2));
}

#[test]
fn mode_async_loses_the_last_moment_at_most_and_says_so_over_a_crash_of_one_and_of_both() {
    let mut world = World::with(2, 2, Durability::Async);
    // So long after a write every disk has it.
    let pass = |world: &mut World| {
        world.clock.advance(engram_store::wal::BACKGROUND_SYNC_MS);
        world.settle();
    };
    // Acknowledged by the primary alone: the other copy hears nothing of it.
    let told_alone = |world: &mut World, node, record| {
        let answer = world.ask(node, record);
        world.store(node).turn().unwrap();
        let told = answer.lock().unwrap().take().expect("nobody else is asked").unwrap();
        assert_eq!((told.replicas, told.durable), (1, false), "it says what it is worth");
    };
    world.write(0, upsert(0..10)).unwrap();
    pass(&mut world);
    told_alone(&mut world, 0, upsert(10..30));
    world.lose_power(0);
    let promote = Change::Promote { primary: world.member(1), isr: vec![Ordinal(1)] };
    world.change(&promote);
    world.settle();
    world.wait();
    assert_eq!(world.store(1).serving(P), Some(Term(2)));
    assert_eq!(world.store(1).partitions().memories(), 10, "the last moment, whole records of it, and nothing else");
    world.start(0);
    world.connect(0);
    world.publish();
    world.change(&Change::Learn(vec![Ordinal(0)]));
    world.settle();
    world.write(1, reinforce(3, 1)).unwrap();
    let digests = world.digests();
    assert_eq!((world.entry.isr.len(), digests[0]), (2, digests[1]), "what only the lost one had said is nowhere");

    pass(&mut world);
    let kept = world.store(1).applied(P).1;
    told_alone(&mut world, 1, upsert(30..60));
    (0..2).for_each(|node| world.lose_power(node));
    (0..2).for_each(|node| world.start(node));
    world.connect(0);
    for node in 0..2 {
        let last = world.store(node).replicas()[0].last;
        assert!(last >= kept, "worker {node} has {last} of {kept}");
    }
    for node in 0..2 {
        let both = Change::Promote { primary: world.member(node), isr: vec![Ordinal(0), Ordinal(1)] };
        world.change(&both);
        world.settle();
        world.wait();
        assert_eq!(
            world.store(node).serving(P),
            None,
            "what may lack the last moment is not served as if it were whole"
        );
    }
}
