//! Several stores in one thread, with a map that the test changes: acknowledged writes are on every in-sync replica, and survive the
//! primary.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod cluster;
mod payloads;
mod reads;

use cluster::{P, TestCluster, reinforce, upsert};
use engram_cluster::Change;
use engram_memory::{
    Command, Lsn, MemoryId, OnMissing, Ordinal, PartitionId, Record, Term, Updates, Upsert, partition_of,
};
use engram_store::{Durability, WriteError};

#[test]
fn acknowledged_writes_are_on_both_replicas_and_survive_the_primary() {
    let mut cluster = TestCluster::new(3, 2);
    let first = cluster.write(0, upsert(0..100)).unwrap();
    assert_eq!(first.replicas, 2);
    let once = cluster.write(0, reinforce(7, 1)).unwrap();
    assert_eq!(cluster.store(1).applied(P).1, once.lsn, "the backup applies committed records");
    assert_eq!(cluster.store(1).partitions().memories(), 0, "a backup is hidden from counts");
    let digests = cluster.digests();
    assert_eq!(digests[0], digests[1]);

    // In flight when the primary dies: appended there, never acknowledged.
    let unacknowledged = cluster.submit(0, reinforce(8, 2));
    cluster.kill(0);
    let promote = Change::Promote { primary: cluster.member(1), isr: vec![Ordinal(1)] };
    cluster.change(&promote);
    cluster.settle();
    assert!(unacknowledged.lock().is_none());
    assert_eq!(cluster.store(1).serving(P), Some(Term(2)));
    assert_eq!(cluster.store(1).partitions().memories(), 100);
    assert_eq!(cluster.write(1, reinforce(7, 1)).unwrap().reply, once.reply, "a repeat gets the first reply");
    let single = cluster.write(1, reinforce(8, 2)).unwrap();
    assert_eq!((single.replicas, single.durable), (1, true));

    // The old primary restarts, truncates unacknowledged records, and is in sync again.
    cluster.start(0);
    cluster.connect(0);
    cluster.publish();
    cluster.change(&Change::Learn(vec![Ordinal(0)]));
    cluster.settle();
    assert_eq!((cluster.entry.isr.len(), cluster.entry.term), (2, Term(3)));
    let both = cluster.write(1, reinforce(9, 3)).unwrap();
    assert_eq!(both.replicas, 2);
    let digests = cluster.digests();
    assert_eq!(digests[0], digests[1]);
    assert_eq!(cluster.store(0).serving(P), None);
}

#[test]
fn a_primary_without_its_backup_stalls_until_the_map_removes_the_backup() {
    let mut cluster = TestCluster::new(2, 2);
    cluster.write(0, upsert(0..10)).unwrap();
    cluster.kill(1);
    let answer = cluster.submit(0, reinforce(1, 1));
    cluster.settle();
    assert!(answer.lock().is_none(), "records are not acknowledged before the backup has them");
    cluster.store(0).suspect(Ordinal(1));
    cluster.settle();
    assert!(answer.lock().take().unwrap().is_ok());
    assert_eq!((cluster.entry.isr.len(), cluster.entry.solo_safe), (1, true));
}

/// Creates a cluster whose log no longer has the first records of its partition.
fn cluster_with_long_history() -> TestCluster {
    let mut cluster = TestCluster::new(3, 2);
    write_long_history(&mut cluster, P);
    cluster
}

/// Writes more to a partition than the log keeps of all.
fn write_long_history(cluster: &mut TestCluster, partition: PartitionId) {
    let ids = insert_memories(cluster, partition);
    for batch in 0..40 {
        let ids: Vec<MemoryId> = (0..5_000).map(|index| ids[(index + batch * 500) % ids.len()]).collect();
        let deltas = vec![1_000; ids.len()];
        let updates = Updates::ById { ids, deltas, on_missing: OnMissing::Report, keys: None };
        cluster.write_to(partition, 0, Record::bare(Command::Reinforce(updates))).unwrap();
    }
}

/// Inserts 20,000 memories into a partition.
fn insert_memories(cluster: &mut TestCluster, partition: PartitionId) -> Vec<MemoryId> {
    let partitions = 1 + cluster.others.len() as u32;
    let mine = (0..).map(MemoryId).filter(|id| partition_of(*id, partitions) == partition);
    let ids: Vec<MemoryId> = mine.take(20_000).collect();
    let upsert = Upsert { ids: ids.clone(), ..Upsert::default() };
    cluster.write_to(partition, 0, Record::bare(Command::Upsert(upsert))).unwrap();
    ids
}

/// Two coordinators that disagree name learners and drop them again.
#[test]
fn transfers_to_dropped_learners_do_not_prevent_others_to_their_worker() {
    let mut cluster = TestCluster::with_partitions(3, 2, Durability::Sync, 3);
    let [first, second, third] = [0, 1, 2].map(PartitionId);
    insert_memories(&mut cluster, first);
    insert_memories(&mut cluster, second);
    write_long_history(&mut cluster, third);
    cluster.set_free_space(2, Some(50_000));
    let learn = |learners: &[u32]| Change::Learn(learners.iter().copied().map(Ordinal).collect());
    [first, second].into_iter().for_each(|partition| cluster.change_of(partition, &learn(&[2])));
    cluster.settle();
    assert_eq!(cluster.store(2).stats().failed_snapshots, 2, "neither was installed");
    [first, second].into_iter().for_each(|partition| cluster.change_of(partition, &learn(&[])));
    cluster.settle();
    cluster.set_free_space(2, None);
    cluster.clock.advance(10_000);
    cluster.settle();
    cluster.change_of(third, &learn(&[2]));
    cluster.settle();
    assert_eq!(cluster.entry_of(third).isr.len(), 3, "a third replica of the third partition is created");
    cluster.change_of(first, &learn(&[2]));
    cluster.settle();
    assert_eq!(cluster.entry.isr.len(), 3, "a learner that is named again, too");
}

#[test]
fn a_state_transfer_replaces_records_that_are_no_longer_retained() {
    let mut cluster = cluster_with_long_history();
    cluster.change(&Change::Learn(vec![Ordinal(2)]));
    cluster.settle();
    assert_eq!(cluster.entry.isr.len(), 3, "a third replica is created");
    assert_eq!(cluster.store(2).stats().transfers_installed, 1);
    let digests = cluster.digests();
    assert!(digests.windows(2).all(|pair| pair[0] == pair[1]) && digests.len() == 3);
    // It survives a crash, and continues from its position.
    cluster.kill(2);
    cluster.start(2);
    cluster.connect(2);
    cluster.publish();
    cluster.settle();
    cluster.write(0, reinforce(5, 1)).unwrap();
    let digests = cluster.digests();
    assert!(digests.windows(2).all(|pair| pair[0] == pair[1]) && digests.len() == 3);
    assert_eq!(cluster.store(2).stats().transfers_installed, 0);
}

#[test]
fn a_state_that_a_full_disk_did_not_take_is_transferred_again() {
    let mut cluster = cluster_with_long_history();
    cluster.set_free_space(2, Some(50_000));
    cluster.change(&Change::Learn(vec![Ordinal(2)]));
    cluster.settle();
    assert_eq!((cluster.store(2).stats().failed_snapshots, cluster.entry.isr.len()), (1, 2));
    cluster.clock.advance(1_000);
    cluster.settle();
    assert_eq!(cluster.store(2).stats().failed_snapshots, 1, "not at once");
    cluster.set_free_space(2, None);
    cluster.clock.advance(5_000);
    cluster.settle();
    assert_eq!(cluster.entry.isr.len(), 3, "a third replica is created");
    let digests = cluster.digests();
    assert!(digests.windows(2).all(|pair| pair[0] == pair[1]) && digests.len() == 3);
}

#[test]
fn a_leadership_transfer_loses_nothing_and_both_stay_in_sync() {
    let mut cluster = TestCluster::new(2, 2);
    cluster.write(0, upsert(0..10)).unwrap();
    let (in_flight, holder) = (cluster.submit(0, reinforce(1, 1)), cluster.member(0));
    assert!(cluster.store(1).grant_lease(holder).is_empty());
    cluster.store(0).transfer_leadership(P, Ordinal(1));
    cluster.settle();
    assert!(in_flight.lock().take().unwrap().is_ok());
    assert_eq!(
        cluster.store(1).serving(P),
        Some(cluster.entry.term),
        "the lease was released, so its expiry is not awaited"
    );
    assert_eq!((cluster.entry.primary, cluster.entry.isr.len(), cluster.entry.activated), (Ordinal(1), 2, true));
    assert!(matches!(cluster.write(0, reinforce(1, 2)), Err(WriteError::NotPrimary { .. })));
    assert_eq!(cluster.write(1, reinforce(1, 2)).unwrap().lsn, Lsn(3));
}

#[test]
fn a_restarted_primary_is_promoted_again_and_its_tail_is_committed() {
    let mut cluster = TestCluster::new(2, 2);
    cluster.write(0, upsert(0..10)).unwrap();
    let once = reinforce(1, 1);
    let unacknowledged = cluster.submit(0, once.clone());
    // The record reaches this disk, and no other replica.
    cluster.store(0).turn().unwrap();
    cluster.kill(0);
    assert!(unacknowledged.lock().is_none());
    cluster.start(0);
    cluster.connect(0);
    let promote = Change::Promote { primary: cluster.member(0), isr: vec![Ordinal(0), Ordinal(1)] };
    cluster.change(&promote);
    cluster.settle();
    assert_eq!(cluster.store(0).serving(P), None, "a lease of the previous process may be in force");
    cluster.wait();
    assert_eq!(cluster.store(0).serving(P), Some(Term(2)));
    let lsn = cluster.store(0).applied(P).1;
    cluster.write(0, once).unwrap();
    assert_eq!(cluster.store(0).applied(P).1, lsn, "a repeat of a record in the tail is not logged again");
    let digests = cluster.digests();
    assert_eq!(digests[0], digests[1]);
}

#[test]
fn a_differing_replica_is_detected_and_rebuilt() {
    let mut cluster = TestCluster::new(2, 2);
    cluster.write(0, upsert(0..50)).unwrap();
    cluster.store(1).partitions().apply(P, &reinforce(3, 9)).unwrap();
    let digests = cluster.digests();
    assert_ne!(digests[0], digests[1]);
    cluster.clock.advance(2 * 60 * 60 * 1_000);
    cluster.settle();
    assert_eq!(cluster.store(1).stats().digest_mismatches, 1);
    let digests = cluster.digests();
    assert_eq!(digests[0], digests[1]);
    assert_eq!(cluster.write(0, reinforce(4, 1)).unwrap().replicas, 2);
    assert_eq!(cluster.store(1).replicas()[0].role, "backup", "it is repaired");
    cluster.clock.advance(2 * 60 * 60 * 1_000);
    cluster.settle();
    assert_eq!((cluster.store(1).stats().digest_mismatches, cluster.store(1).stats().digests_compared), (1, 2));
}

#[test]
fn a_damaged_replica_is_not_primary_until_repaired_despite_restarts() {
    let mut cluster = TestCluster::new(2, 2);
    cluster.write(0, upsert(0..50)).unwrap();
    // Its process and its primary die before it is rebuilt.
    cluster.damage(1);
    for _ in 0..2 {
        cluster.kill(1);
        cluster.start(1);
        assert_eq!(cluster.store(1).replicas()[0].role, "corrupt");
    }
    cluster.kill(0);
    let promote = Change::Promote { primary: cluster.member(1), isr: vec![Ordinal(1)] };
    cluster.change(&promote);
    cluster.settle();
    assert_eq!(cluster.store(1).serving(P), None, "a damaged replica is not served");

    cluster.start(0);
    cluster.connect(0);
    let promote_back = Change::Promote { primary: cluster.member(0), isr: vec![Ordinal(0), Ordinal(1)] };
    cluster.change(&promote_back);
    cluster.settle();
    cluster.wait();
    assert_eq!(cluster.store(0).serving(P), Some(cluster.entry.term));
    assert_eq!(cluster.store(1).replicas()[0].role, "backup");
    let after = cluster.digests();
    assert_eq!(after[0], after[1]);
}

#[test]
fn a_damaged_replica_declines_in_favor_of_a_candidate_with_its_disk() {
    let mut cluster = TestCluster::new(3, 3);
    cluster.write(0, upsert(0..50)).unwrap();
    cluster.damage(1);
    cluster.kill(1);
    cluster.start(1);
    cluster.kill(0);
    cluster.replace_disk(0);
    cluster.start(0);
    (0..3).for_each(|node| cluster.connect(node));
    // The coordinator knows neither of the damage nor of the replaced disk.
    let promote = Change::Promote { primary: cluster.member(1), isr: vec![Ordinal(0), Ordinal(1), Ordinal(2)] };
    cluster.change(&promote);
    assert_eq!(cluster.store(1).replicas()[0].role, "corrupt");
    cluster.settle();
    cluster.wait();
    assert_eq!(cluster.entry.primary, Ordinal(2));
}

#[test]
fn mode_async_loses_only_the_last_writes_in_a_crash_of_one_or_both() {
    let mut cluster = TestCluster::with(2, 2, Durability::Async);
    // After this time every disk has the writes.
    let pass = |cluster: &mut TestCluster| {
        cluster.clock.advance(engram_store::wal::BACKGROUND_SYNC_MS);
        cluster.settle();
    };
    // Acknowledged by the primary alone, without the backup.
    let write_async = |cluster: &mut TestCluster, node, record| {
        let answer = cluster.submit(node, record);
        cluster.store(node).turn().unwrap();
        let written = answer.lock().take().expect("the primary answers alone").unwrap();
        assert_eq!((written.replicas, written.durable), (1, false), "the answer states its durability");
    };
    cluster.write(0, upsert(0..10)).unwrap();
    pass(&mut cluster);
    write_async(&mut cluster, 0, upsert(10..30));
    cluster.lose_power(0);
    let promote = Change::Promote { primary: cluster.member(1), isr: vec![Ordinal(1)] };
    cluster.change(&promote);
    cluster.settle();
    cluster.wait();
    assert_eq!(cluster.store(1).serving(P), Some(Term(2)));
    assert_eq!(cluster.store(1).partitions().memories(), 10, "only the last complete records are lost");
    cluster.start(0);
    cluster.connect(0);
    cluster.publish();
    cluster.change(&Change::Learn(vec![Ordinal(0)]));
    cluster.settle();
    cluster.write(1, reinforce(3, 1)).unwrap();
    let digests = cluster.digests();
    assert_eq!(
        (cluster.entry.isr.len(), digests[0]),
        (2, digests[1]),
        "records known only to the lost primary are gone"
    );

    pass(&mut cluster);
    let kept = cluster.store(1).applied(P).1;
    write_async(&mut cluster, 1, upsert(30..60));
    (0..2).for_each(|node| cluster.lose_power(node));
    (0..2).for_each(|node| cluster.start(node));
    cluster.connect(0);
    for node in 0..2 {
        let last = cluster.store(node).replicas()[0].last;
        assert!(last >= kept, "worker {node} has {last} of {kept}");
    }
    for node in 0..2 {
        let both = Change::Promote { primary: cluster.member(node), isr: vec![Ordinal(0), Ordinal(1)] };
        cluster.change(&both);
        cluster.settle();
        cluster.wait();
        assert_eq!(cluster.store(node).serving(P), None, "a log that may lack the last writes is not served");
    }
}
