//! Reads: what a lease rests on, what is confirmed, and what a copy may tell.

use crate::world::{P, World, answered_nothing, reinforce, upsert};
use engram_cluster::{Change, replica};
use engram_memory::{Member, Ordinal, Term};
use engram_store::peer::Message;
use engram_store::{Clock as _, Copied, Unconfirmed};
use std::sync::{Arc, Mutex};

#[test]
fn a_read_needs_the_lease_of_every_copy_and_a_granter_waits_before_it_serves() {
    let mut world = World::new(2, 2);
    world.write(0, upsert(0..10)).unwrap();
    assert!(!world.store(0).is_readable(P));
    let holder = world.member(0);
    let except = world.store(1).grant_lease(holder);
    assert!(except.is_empty());
    let until = world.clock.elapsed_ms() + engram_store::leases::LEASE_MS;
    let granter = world.member(1);
    world.store(0).lease_held(granter, until, except);
    assert!(world.store(0).is_readable(P));

    world.deaf = Some(0);
    let promote = Change::Promote { primary: world.member(1), isr: vec![Ordinal(1)] };
    world.change(&promote);
    world.settle();
    assert_eq!(world.store(1).serving(P), None, "the old primary may still read");
    world.clock.advance(engram_store::leases::LEASE_MS);
    assert!(!world.store(0).is_readable(P));
    world.wait();
    assert_eq!(world.store(1).serving(P), Some(Term(2)));
    assert!(world.store(1).is_readable(P), "alone it asks nobody");
    assert_eq!(world.store(1).grant_lease(holder), [P], "who leads grants nothing");
}

#[test]
fn proof_that_the_holder_is_dead_ends_its_lease_and_proof_of_another_process_does_not() {
    let mut world = World::new(2, 2);
    world.write(0, upsert(0..10)).unwrap();
    let holder = world.member(0);
    world.store(1).grant_lease(holder);
    world.kill(0);
    let promote = Change::Promote { primary: world.member(1), isr: vec![Ordinal(1)] };
    world.change(&promote);
    world.store(1).proven_dead(Member { incarnation: engram_memory::Incarnation(0), ..holder });
    world.settle();
    assert_eq!(world.store(1).serving(P), None);
    world.store(1).proven_dead(holder);
    world.settle();
    assert_eq!(world.store(1).serving(P), Some(Term(2)));
}

#[test]
fn who_hears_of_its_successor_before_it_reads_the_map_gives_its_lease_back_too() {
    let mut world = World::new(2, 2);
    world.write(0, upsert(0..10)).unwrap();
    world.lease();
    assert!(world.store(0).is_readable(P));
    world.deaf = Some(0);
    let promote = Change::Promote { primary: world.member(1), isr: vec![Ordinal(0), Ordinal(1)] };
    world.change(&promote);
    world.settle();
    assert!(!world.store(0).is_readable(P), "the other one opened its term");
    assert_eq!(world.store(1).serving(P), Some(Term(2)), "at once: nobody reads by the old lease any more");
}

#[test]
fn who_leads_after_the_next_waits_for_no_lease_of_the_first_either() {
    let mut world = World::new(3, 3);
    world.write(0, upsert(0..10)).unwrap();
    world.lease();
    assert!(world.store(0).is_readable(P));
    for (from, to) in [(0, 1), (1, 2)] {
        world.store(from).hand_over(P, Ordinal(to as u32));
        world.settle();
        assert_eq!(world.store(to).serving(P), Some(world.entry.term), "worker {to} at once");
    }
}

#[test]
fn a_lease_from_before_a_step_down_is_good_for_nothing_after_it() {
    let mut world = World::new(2, 2);
    world.write(0, upsert(0..10)).unwrap();
    let (first, granter) = (world.member(0), world.member(1));
    let except = world.store(1).grant_lease(first);
    let until = world.clock.elapsed_ms() + engram_store::leases::LEASE_MS;
    world.store(0).lease_held(granter, until, except);
    for to in [1, 0] {
        let from = 1 - to;
        world.clock.advance(1);
        world.store(from).hand_over(P, Ordinal(to as u32));
        world.settle();
        assert_eq!(world.entry.primary, Ordinal(to as u32));
    }
    assert_eq!(world.store(0).serving(P), Some(world.entry.term));
    assert!(!world.store(0).is_readable(P), "that lease was given up at the first hand-over");
}

#[test]
fn a_deposed_primary_that_believes_in_its_lease_confirms_no_read() {
    let mut world = World::new(2, 2);
    world.write(0, upsert(0..10)).unwrap();
    let read = world.confirm(0);
    world.settle();
    assert_eq!(read.lock().unwrap().take(), Some(Ok(10)), "no lease is needed");

    // Its clock stands still, so its lease never ends; the map has gone on without it.
    let granter = world.member(1);
    world.store(0).lease_held(granter, u64::MAX, Vec::new());
    world.deaf = Some(0);
    let promote = Change::Promote { primary: world.member(1), isr: vec![Ordinal(1)] };
    world.change(&promote);
    world.settle();
    world.wait();
    world.write(1, upsert(10..30)).unwrap();
    assert!(world.store(0).is_readable(P), "what a lease rests on is broken here");
    assert_eq!(world.store(0).partitions().memories(), 10, "a leased read is stale then");
    let read = world.confirm(0);
    world.settle();
    let refused = Unconfirmed::Deposed { partition: P, term: Term(1), promised: Term(2) };
    assert_eq!(read.lock().unwrap().take(), Some(Err(refused)));
    let read = world.confirm(1);
    world.settle();
    assert_eq!(read.lock().unwrap().take(), Some(Ok(30)));
}

#[test]
fn a_read_is_confirmed_by_answers_to_questions_that_came_after_it_and_by_every_member() {
    let mut world = World::new(3, 3);
    world.write(0, upsert(0..10)).unwrap();
    let read = world.confirm(0);
    world.settle();
    assert_eq!(read.lock().unwrap().take(), Some(Ok(10)));
    world.kill(2);
    let read = world.confirm(0);
    world.settle();
    assert!(answered_nothing(&read), "what was answered before it came counts for nothing");
    // The member is dropped: the next term asks those that are left.
    world.store(0).suspected(Ordinal(2));
    world.settle();
    assert_eq!((read.lock().unwrap().take(), world.entry.isr.len()), (Some(Ok(10)), 2));

    world.kill(1);
    let read = world.confirm(0);
    world.settle();
    world.clock.advance(3_000);
    world.settle();
    assert_eq!(read.lock().unwrap().take(), Some(Err(Unconfirmed::NoAnswer { partition: P, silent: vec![1] })));
    let read = world.confirm(0);
    let promote = Change::Promote { primary: world.member(0), isr: vec![Ordinal(0)] };
    world.change(&promote);
    world.settle();
    assert_eq!(read.lock().unwrap().take(), Some(Ok(10)), "alone it asks nobody");
}

#[test]
fn a_confirmed_read_after_a_takeover_sees_what_the_primary_before_acknowledged() {
    let mut world = World::new(3, 3);
    world.write(0, upsert(0..10)).unwrap();
    // Acknowledged, and no other copy has heard that it is committed.
    let acknowledged = world.ask(0, upsert(10..20));
    while answered_nothing(&acknowledged) {
        world.step();
    }
    world.kill(0);
    let promote = Change::Promote { primary: world.member(1), isr: vec![Ordinal(1), Ordinal(2)] };
    world.change(&promote);
    let read = world.confirm(1);
    world.settle();
    assert_eq!(read.lock().unwrap().take(), Some(Ok(20)));
    let read = world.confirm(2);
    world.settle();
    assert_eq!(read.lock().unwrap().take(), Some(Err(Unconfirmed::NotServed { partition: P })));
}

#[test]
fn a_confirmed_read_waits_for_the_records_that_its_primary_took_over() {
    let mut world = World::new(3, 3);
    world.write(0, upsert(0..10)).unwrap();
    let acknowledged = world.ask(0, upsert(10..20));
    while answered_nothing(&acknowledged) {
        world.step();
    }
    world.kill(0);
    // The successor serves. What the other copy holds it does not hear yet, so nothing of its tail is committed and applied.
    world.delays = |message| matches!(message, Message::Replica(replica::Message::Opened { .. }, _));
    let promote = Change::Promote { primary: world.member(1), isr: vec![Ordinal(1), Ordinal(2)] };
    world.change(&promote);
    world.settle();
    assert_eq!(world.store(1).serving(P), Some(Term(2)));
    assert_eq!(world.store(1).partitions().memories(), 10, "what was acknowledged last is not in its state");
    let read = world.confirm(1);
    world.settle();
    assert!(answered_nothing(&read), "the other copy has confirmed it, the state is not there yet");
    world.deliver_delayed();
    assert_eq!(read.lock().unwrap().take(), Some(Ok(20)));
}

#[test]
fn a_copy_is_read_within_its_bound_and_not_beyond_it() {
    let mut world = World::new(2, 2);
    world.write(0, upsert(0..10)).unwrap();
    assert_eq!(world.copy(1, 1_000), None, "a primary that is not sure to lead says nothing");
    world.lease();
    let lsn = world.store(0).applied(P).1;
    let (memories, copied) = world.copy(1, 0).unwrap();
    assert_eq!((memories, copied), (10, Copied { partition: P, term: Term(1), lsn, lag_ms: 0 }));
    assert_eq!(world.store(1).partitions().memories(), 0, "it is hidden from other reads still");
    assert_eq!(world.copy(0, 0).unwrap().1.lag_ms, 0, "so can the primary be read");

    // The lease is over, and what was known grows old.
    world.clock.advance(5_000);
    world.settle();
    assert_eq!(world.copy(1, 4_999), None);
    let (memories, copied) = world.copy(1, 5_150).unwrap();
    assert_eq!((memories, copied.lag_ms), (10, 5_150));
    world.kill(0);
    assert_eq!(world.copy(1, 6_000).unwrap().0, 10, "without a primary too");
    assert_eq!(world.copy(1, 5_000), None);
}

#[test]
fn a_copy_that_is_not_whole_is_not_read() {
    let mut world = World::new(2, 2);
    world.write(0, upsert(0..50)).unwrap();
    world.lease();
    assert_eq!(world.copy(1, 0).unwrap().0, 50);
    world.store(1).partitions().apply(P, &reinforce(3, 9)).unwrap();
    world.clock.advance(2 * 60 * 60 * 1_000);
    while world.store(1).stats().digests_different == 0 {
        world.step();
    }
    assert_eq!(world.store(1).replicas()[0].role, "corrupt");
    let read = Arc::new(Mutex::new(None));
    let answered = Arc::clone(&read);
    let any_lag = u64::MAX;
    world.store(1).read_copies(vec![P], any_lag, move |_, copied| *answered.lock().unwrap() = Some(copied));
    world.store(1).turn().unwrap();
    assert_eq!(read.lock().unwrap().take(), Some(Vec::new()));
    world.settle();
    assert_eq!(world.copy(1, any_lag).unwrap().0, 50, "it was made anew");
}
