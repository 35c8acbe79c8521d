//! Reads: leased, confirmed, and stale ones.

use crate::cluster::{P, TestCluster, is_unanswered, reinforce, upsert};
use engram_cluster::{Change, replica};
use engram_memory::{Member, Ordinal, Term};
use engram_store::peer::Message;
use engram_store::{Clock as _, ConfirmError, ReplicaPosition};
use parking_lot::Mutex;
use std::sync::Arc;

#[test]
fn a_read_needs_leases_of_all_replicas_and_a_granter_waits_before_it_serves() {
    let mut cluster = TestCluster::new(2, 2);
    cluster.write(0, upsert(0..10)).unwrap();
    assert!(!cluster.store(0).is_readable(P));
    let holder = cluster.member(0);
    let except = cluster.store(1).grant_lease(holder);
    assert!(except.is_empty());
    let until = cluster.clock.elapsed_ms() + engram_store::leases::LEASE_MS;
    let granter = cluster.member(1);
    cluster.store(0).record_lease(granter, until, except);
    assert!(cluster.store(0).is_readable(P));

    cluster.without_map = Some(0);
    let promote = Change::Promote { primary: cluster.member(1), isr: vec![Ordinal(1)] };
    cluster.change(&promote);
    cluster.settle();
    assert_eq!(cluster.store(1).serving(P), None, "the old primary may still read");
    cluster.clock.advance(engram_store::leases::LEASE_MS);
    assert!(!cluster.store(0).is_readable(P));
    cluster.wait();
    assert_eq!(cluster.store(1).serving(P), Some(Term(2)));
    assert!(cluster.store(1).is_readable(P), "a single replica needs no lease");
    assert_eq!(cluster.store(1).grant_lease(holder), [P], "a primary grants nothing");
}

#[test]
fn proof_of_the_holders_death_ends_its_lease_and_that_of_another_does_not() {
    let mut cluster = TestCluster::new(2, 2);
    cluster.write(0, upsert(0..10)).unwrap();
    let holder = cluster.member(0);
    cluster.store(1).grant_lease(holder);
    cluster.kill(0);
    let promote = Change::Promote { primary: cluster.member(1), isr: vec![Ordinal(1)] };
    cluster.change(&promote);
    cluster.store(1).confirm_dead(Member { incarnation: engram_memory::Incarnation(0), ..holder });
    cluster.settle();
    assert_eq!(cluster.store(1).serving(P), None);
    cluster.store(1).confirm_dead(holder);
    cluster.settle();
    assert_eq!(cluster.store(1).serving(P), Some(Term(2)));
}

#[test]
fn a_primary_that_sees_its_successor_before_the_map_releases_its_lease() {
    let mut cluster = TestCluster::new(2, 2);
    cluster.write(0, upsert(0..10)).unwrap();
    cluster.lease();
    assert!(cluster.store(0).is_readable(P));
    cluster.without_map = Some(0);
    let promote = Change::Promote { primary: cluster.member(1), isr: vec![Ordinal(0), Ordinal(1)] };
    cluster.change(&promote);
    cluster.settle();
    assert!(!cluster.store(0).is_readable(P), "the successor opened its term");
    assert_eq!(cluster.store(1).serving(P), Some(Term(2)), "immediately: the old lease was released");
}

#[test]
fn the_second_successor_does_not_wait_for_the_lease_of_the_first_primary() {
    let mut cluster = TestCluster::new(3, 3);
    cluster.write(0, upsert(0..10)).unwrap();
    cluster.lease();
    assert!(cluster.store(0).is_readable(P));
    for (from, to) in [(0, 1), (1, 2)] {
        cluster.store(from).transfer_leadership(P, Ordinal(to as u32));
        cluster.settle();
        assert_eq!(cluster.store(to).serving(P), Some(cluster.entry.term), "worker {to} immediately");
    }
}

#[test]
fn a_lease_from_before_a_step_down_is_invalid_after_it() {
    let mut cluster = TestCluster::new(2, 2);
    cluster.write(0, upsert(0..10)).unwrap();
    let (first, granter) = (cluster.member(0), cluster.member(1));
    let except = cluster.store(1).grant_lease(first);
    let until = cluster.clock.elapsed_ms() + engram_store::leases::LEASE_MS;
    cluster.store(0).record_lease(granter, until, except);
    for to in [1, 0] {
        let from = 1 - to;
        cluster.clock.advance(1);
        cluster.store(from).transfer_leadership(P, Ordinal(to as u32));
        cluster.settle();
        assert_eq!(cluster.entry.primary, Ordinal(to as u32));
    }
    assert_eq!(cluster.store(0).serving(P), Some(cluster.entry.term));
    assert!(!cluster.store(0).is_readable(P), "the lease was released at the first transfer");
}

#[test]
fn a_deposed_primary_with_an_endless_lease_confirms_no_read() {
    let mut cluster = TestCluster::new(2, 2);
    cluster.write(0, upsert(0..10)).unwrap();
    let read = cluster.confirm(0);
    cluster.settle();
    assert_eq!(read.lock().take(), Some(Ok(10)), "no lease is needed");

    // Its clock is stopped, so its lease never ends; the map has changed without it.
    let granter = cluster.member(1);
    cluster.store(0).record_lease(granter, u64::MAX, Vec::new());
    cluster.without_map = Some(0);
    let promote = Change::Promote { primary: cluster.member(1), isr: vec![Ordinal(1)] };
    cluster.change(&promote);
    cluster.settle();
    cluster.wait();
    cluster.write(1, upsert(10..30)).unwrap();
    assert!(cluster.store(0).is_readable(P), "the clock assumption of leases is violated");
    assert_eq!(cluster.store(0).partitions().memories(), 10, "a leased read is then stale");
    let read = cluster.confirm(0);
    cluster.settle();
    let refused = ConfirmError::Deposed { partition: P, term: Term(1), promised: Term(2) };
    assert_eq!(read.lock().take(), Some(Err(refused)));
    let read = cluster.confirm(1);
    cluster.settle();
    assert_eq!(read.lock().take(), Some(Ok(30)));
}

#[test]
fn a_read_is_confirmed_by_later_responses_of_every_member() {
    let mut cluster = TestCluster::new(3, 3);
    cluster.write(0, upsert(0..10)).unwrap();
    let read = cluster.confirm(0);
    cluster.settle();
    assert_eq!(read.lock().take(), Some(Ok(10)));
    cluster.kill(2);
    let read = cluster.confirm(0);
    cluster.settle();
    assert!(is_unanswered(&read), "earlier responses do not count");
    // The member is removed: the next term queries the remaining ones.
    cluster.store(0).suspect(Ordinal(2));
    cluster.settle();
    assert_eq!((read.lock().take(), cluster.entry.isr.len()), (Some(Ok(10)), 2));

    cluster.kill(1);
    let read = cluster.confirm(0);
    cluster.settle();
    cluster.clock.advance(3_000);
    cluster.settle();
    assert_eq!(read.lock().take(), Some(Err(ConfirmError::NoResponse { partition: P, unresponsive: vec![1] })));
    let read = cluster.confirm(0);
    let promote = Change::Promote { primary: cluster.member(0), isr: vec![Ordinal(0)] };
    cluster.change(&promote);
    cluster.settle();
    assert_eq!(read.lock().take(), Some(Ok(10)), "a single replica queries no other");
}

#[test]
fn a_confirmed_read_after_a_failover_sees_earlier_acknowledged_writes() {
    let mut cluster = TestCluster::new(3, 3);
    cluster.write(0, upsert(0..10)).unwrap();
    // Acknowledged, but no other replica knows that it is committed.
    let acknowledged = cluster.submit(0, upsert(10..20));
    while is_unanswered(&acknowledged) {
        cluster.step();
    }
    cluster.kill(0);
    let promote = Change::Promote { primary: cluster.member(1), isr: vec![Ordinal(1), Ordinal(2)] };
    cluster.change(&promote);
    let read = cluster.confirm(1);
    cluster.settle();
    assert_eq!(read.lock().take(), Some(Ok(20)));
    let read = cluster.confirm(2);
    cluster.settle();
    assert_eq!(read.lock().take(), Some(Err(ConfirmError::NotServed { partition: P })));
}

#[test]
fn a_confirmed_read_waits_for_the_tail_inherited_by_its_primary() {
    let mut cluster = TestCluster::new(3, 3);
    cluster.write(0, upsert(0..10)).unwrap();
    let acknowledged = cluster.submit(0, upsert(10..20));
    while is_unanswered(&acknowledged) {
        cluster.step();
    }
    cluster.kill(0);
    // The successor serves, but the other replica's response is delayed, so nothing of the tail is committed and applied.
    cluster.delays = |message| matches!(message, Message::Replica(replica::Message::Opened { .. }, _));
    let promote = Change::Promote { primary: cluster.member(1), isr: vec![Ordinal(1), Ordinal(2)] };
    cluster.change(&promote);
    cluster.settle();
    assert_eq!(cluster.store(1).serving(P), Some(Term(2)));
    assert_eq!(cluster.store(1).partitions().memories(), 10, "the last acknowledged records are not in its state");
    let read = cluster.confirm(1);
    cluster.settle();
    assert!(is_unanswered(&read), "confirmed by the other replica, but not applied yet");
    cluster.deliver_delayed();
    assert_eq!(read.lock().take(), Some(Ok(20)));
}

#[test]
fn a_stale_read_is_served_within_its_bound_and_not_beyond() {
    let mut cluster = TestCluster::new(2, 2);
    cluster.write(0, upsert(0..10)).unwrap();
    assert_eq!(cluster.read_replica(1, 1_000), None, "a primary without leases does not respond");
    cluster.lease();
    let lsn = cluster.store(0).applied(P).1;
    let (memories, position) = cluster.read_replica(1, 0).unwrap();
    assert_eq!((memories, position), (10, ReplicaPosition { partition: P, term: Term(1), lsn, lag_ms: 0 }));
    assert_eq!(cluster.store(1).partitions().memories(), 0, "it is still hidden from other reads");
    assert_eq!(cluster.read_replica(0, 0).unwrap().1.lag_ms, 0, "the primary serves stale reads too");

    // The lease has expired, and the known position ages.
    cluster.clock.advance(5_000);
    cluster.settle();
    assert_eq!(cluster.read_replica(1, 4_999), None);
    let (memories, position) = cluster.read_replica(1, 5_150).unwrap();
    assert_eq!((memories, position.lag_ms), (10, 5_150));
    cluster.kill(0);
    assert_eq!(cluster.read_replica(1, 6_000).unwrap().0, 10, "also without a primary");
    assert_eq!(cluster.read_replica(1, 5_000), None);
}

#[test]
fn a_damaged_replica_serves_no_reads() {
    let mut cluster = TestCluster::new(2, 2);
    cluster.write(0, upsert(0..50)).unwrap();
    cluster.lease();
    assert_eq!(cluster.read_replica(1, 0).unwrap().0, 50);
    cluster.store(1).partitions().apply(P, &reinforce(3, 9)).unwrap();
    cluster.clock.advance(2 * 60 * 60 * 1_000);
    while cluster.store(1).stats().digest_mismatches == 0 {
        cluster.step();
    }
    assert_eq!(cluster.store(1).replicas()[0].role, "corrupt");
    let read = Arc::new(Mutex::new(None));
    let result = Arc::clone(&read);
    let any_lag = u64::MAX;
    cluster.store(1).read_replicas(vec![P], any_lag, move |_, position| *result.lock() = Some(position));
    cluster.store(1).turn().unwrap();
    assert_eq!(read.lock().take(), Some(Vec::new()));
    cluster.settle();
    assert_eq!(cluster.read_replica(1, any_lag).unwrap().0, 50, "it was rebuilt");
}
