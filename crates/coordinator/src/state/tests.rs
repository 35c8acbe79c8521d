//! Inputs of a coordinator, and the resulting map.

use super::known_map::DELETION_MS;
use super::*;
use engram_cluster::{ABSENT_MS, Change, Entry, ExpectedEntry};
use engram_memory::{ClusterId, Incarnation, PartitionId, Term};

const LATER: u64 = 10_000;

fn member(ordinal: u32, incarnation: u64) -> Member {
    let store = StoreId(u128::from(ordinal) + 5);
    Member { ordinal: Ordinal(ordinal), store, incarnation: Incarnation(incarnation) }
}

fn hello(ordinal: u32, incarnation: u64, process_id: u32) -> Introduction {
    Introduction {
        member: member(ordinal, incarnation),
        lossless_since: Incarnation(1),
        process_id,
        addresses: Addresses::default(),
        seen_version: 0,
    }
}

fn options(workers: u32) -> Options {
    Options { replication_factor: 2, ..Options::new(ClusterId(7), "test", 8, workers) }
}

/// A cluster of two workers with a map.
fn formed() -> State {
    let mut state = State::new(None, Goal::default(), 0);
    for ordinal in 0..2 {
        assert_eq!(state.accept_hello(hello(ordinal, 1, 100 + ordinal), 0), HelloOutcome::Accepted);
    }
    let first = state.next_map(&options(2), 0).expect("both are here").map;
    state.set_map(Some(first), 0);
    assert!(state.next_map(&options(2), 0).is_none());
    state
}

fn send_heartbeats(state: &mut State, now_ms: u64) {
    for ordinal in 0..2 {
        state.heartbeat(&member(ordinal, 1), HeartbeatInfo::default(), now_ms);
    }
    state.tick(&options(2), now_ms);
}

fn entry(state: &State, partition: usize) -> &Entry {
    &state.map().unwrap().partitions[partition]
}

#[test]
fn proposals_on_a_foreign_map_wait_until_it_is_read() {
    let mut state = formed();
    let mut newer = state.map().unwrap().clone();
    let primary = *newer.partitions[0].primary_member().unwrap();
    let other = *newer.partitions[0].isr.iter().find(|member| **member != primary).unwrap();
    let promote = Change::Promote { primary: other, isr: vec![primary.ordinal, other.ordinal] };
    newer.partitions[0] = newer.partitions[0].apply(&promote).unwrap();
    newer.version += 1;
    let activate =
        Proposal { partition: PartitionId(0), expected: newer.partitions[0].expectation(), change: Change::Activate };
    state.propose(other.ordinal, vec![activate]);
    assert!(state.is_behind() && state.next_map(&options(2), 0).is_none(), "its entry was not read yet");
    state.map_read(Some(newer.clone()), 0);
    let wanted = state.next_map(&options(2), 0).expect("the proposal applies");
    assert!(wanted.is_urgent && wanted.map.partitions[0].activated);

    newer.version += 1;
    assert!(state.heartbeat(
        &member(0, 1),
        HeartbeatInfo { map_version: newer.version, ..HeartbeatInfo::default() },
        0
    ));
    assert!(state.is_behind(), "a heartbeat reports it, too");
    state.map_read(Some(newer.clone()), 0);
    assert!(!state.is_behind());
    assert!(
        !state.heartbeat(&member(1, 1), HeartbeatInfo { map_version: newer.version, ..HeartbeatInfo::default() }, 0),
        "nothing new"
    );
}

#[test]
fn older_process_neither_replaces_nor_ends_the_newer_one() {
    let mut state = State::new(None, Goal::default(), 0);
    assert_eq!(state.accept_hello(hello(1, 4, 40), 0), HelloOutcome::Accepted);
    assert_eq!(state.accept_hello(hello(1, 3, 30), 0), HelloOutcome::Superseded);
    assert!(!state.heartbeat(
        &member(1, 3),
        HeartbeatInfo { report: WorkerReport { ready: true, ..WorkerReport::default() }, ..HeartbeatInfo::default() },
        LATER
    ));
    assert!(!state.closed(&member(1, 3), LATER), "the end of an older stream does not affect the living process");
    assert!(!state.died(Ordinal(1), None, 3, 0, LATER), "nor does a proof for the older process");
    assert!(!state.died(Ordinal(1), None, 0, 30, LATER), "nor the exit of another process");
    let (here, elsewhere) = (member(1, 4).store, StoreId(4_711));
    assert!(!state.died(Ordinal(1), Some(elsewhere), 4, 0, LATER), "nor of one with that incarnation on another disk");
    assert!(!state.ended(&Member { store: elsewhere, ..member(1, 4) }, LATER) && !state.ended(&member(1, 3), LATER));
    assert!(!state.ended(&member(0, 1), LATER), "nor of one that never connected");
    assert!(!state.died(Ordinal(1), Some(here), 3, 0, LATER));
    let mut proven = State::new(None, Goal::default(), 0);
    assert_eq!(proven.accept_hello(hello(1, 4, 40), 0), HelloOutcome::Accepted);
    assert!(proven.ended(&member(1, 4), LATER) && !proven.ended(&member(1, 4), LATER), "reported once");
    assert!(state.died(Ordinal(1), None, 0, 40, LATER));
}

#[test]
fn proposal_is_checked_against_the_current_entry() {
    let mut state = formed();
    send_heartbeats(&mut state, LATER);
    let partition_of =
        |state: &State, ordinal| (0..8).find(|&partition| entry(state, partition).primary == Ordinal(ordinal)).unwrap();
    let (mine, other) = (partition_of(&state, 0), partition_of(&state, 1));
    let remove = |state: &State, partition: usize, term| Proposal {
        partition: PartitionId(partition as u32),
        expected: ExpectedEntry { term: Term(term), ..entry(state, partition).expectation() },
        change: Change::Remove { primary: member(0, 1), leaver: Ordinal(1) },
    };
    state.propose(Ordinal(0), vec![remove(&state, mine, 7)]);
    assert!(state.next_map(&options(2), LATER).is_none(), "an unknown entry");
    state.map_read(state.map().cloned(), LATER);
    assert!(state.next_map(&options(2), LATER).is_none(), "still unknown after the map was read");
    state.propose(Ordinal(0), vec![remove(&state, other, 1)]);
    assert!(state.next_map(&options(2), LATER).is_none(), "a primary changes only its own partitions");
    let promote = Proposal {
        change: Change::Promote { primary: member(1, 1), isr: vec![Ordinal(1)] },
        ..remove(&state, mine, 1)
    };
    state.propose(Ordinal(1), vec![promote.clone()]);
    assert!(state.next_map(&options(2), LATER).is_none(), "no live primary is deposed");

    // Two proposals for one partition: the first one changes what the second expects.
    state.propose(Ordinal(0), vec![remove(&state, mine, 1)]);
    state.propose(Ordinal(1), vec![promote]);
    let wanted = state.next_map(&options(2), LATER).unwrap();
    assert_eq!((wanted.expected, wanted.proposals.len()), (Some(1), 1));
    assert_eq!(wanted.map.partitions[mine].isr, [member(0, 1)]);
    // The write fails: its proposals are checked again against the current map.
    state.requeue(wanted.proposals);
    let mut moved = state.map().unwrap().clone();
    moved.partitions[mine].term = Term(2);
    state.set_map(Some(moved), LATER);
    assert!(state.next_map(&options(2), LATER).is_none());
}

#[test]
fn closing_coordinator_finishes_proposals_and_starts_nothing() {
    let mut state = formed();
    send_heartbeats(&mut state, LATER);
    let mine = (0..8).find(|&partition| entry(&state, partition).primary == Ordinal(0)).unwrap();
    let expected = entry(&state, mine).expectation();
    let change = Change::Remove { primary: member(0, 1), leaver: Ordinal(1) };
    state.propose(Ordinal(0), vec![Proposal { partition: PartitionId(mine as u32), expected, change }]);
    state.close();
    assert!(state.died(Ordinal(1), None, 1, 0, LATER), "its successor decides about it");
    let before = state.map().unwrap().partitions.clone();
    let wanted = state.next_map(&options(2), LATER).unwrap();
    assert_eq!(wanted.map.partitions[mine].isr, [member(0, 1)]);
    let others = before.iter().zip(&wanted.map.partitions).enumerate().filter(|(partition, _)| *partition != mine);
    others.for_each(|(_, (before, after))| assert_eq!(before, after));
    assert!(!state.has_proposals());
}

#[test]
fn death_moves_all_partitions_in_one_write_and_is_remembered() {
    let mut state = formed();
    send_heartbeats(&mut state, LATER);
    assert!(state.died(Ordinal(1), None, 1, 0, LATER));
    let wanted = state.next_map(&options(2), LATER).unwrap();
    assert!(wanted.map.partitions.iter().all(|entry| entry.primary == Ordinal(0)));
    state.set_map(Some(wanted.map), LATER);
    assert_eq!(state.known.last_failover_ms(), Some(LATER));
    let map = state.map().cloned();
    state.set_map(map, 2 * LATER);
    assert_eq!(state.known.last_failover_ms(), Some(LATER), "the same map again is no failover");
}

#[test]
fn unseen_worker_is_lost_after_a_timeout_or_by_its_supervisors_report() {
    let map = formed().map().cloned();
    let mut state = State::new(map, Goal::default(), 0);
    state.accept_hello(hello(0, 1, 100), 0);
    let promoted = |state: &mut State, now_ms| {
        state.heartbeat(&member(0, 1), HeartbeatInfo::default(), now_ms);
        state.tick(&options(2), now_ms);
        state.next_map(&options(2), now_ms).is_some()
    };
    assert!(!promoted(&mut state, LATER), "a coordinator that just started suspects nothing");
    assert!(state.conditions().iter().any(|why| why.contains("no heartbeat from worker 1")));
    assert!(promoted(&mut state, ABSENT_MS));
    state.died(Ordinal(1), None, 0, 9, LATER);
    assert!(promoted(&mut state, LATER), "it failed to start");
}

#[test]
fn unseen_worker_is_lost_if_a_peer_suspects_it_and_one_fault_explains_it() {
    let finds_lost = |workers: u32, connected: u32| {
        let with_workers = |map, count: u32| {
            let mut state = State::new(map, Goal::default(), 0);
            for ordinal in 0..count {
                assert_eq!(state.accept_hello(hello(ordinal, 1, 100 + ordinal), 0), HelloOutcome::Accepted);
            }
            state
        };
        let map = with_workers(None, workers).next_map(&options(workers), 0).expect("all are here").map;
        let mut state = with_workers(Some(map), connected);
        let missed: BTreeSet<_> = (connected..workers).map(Ordinal).collect();
        for ordinal in 0..connected {
            let suspects = if ordinal == 0 { missed.clone() } else { BTreeSet::new() };
            let report = WorkerReport { suspects, ..WorkerReport::default() };
            state.heartbeat(&member(ordinal, 1), HeartbeatInfo { report, ..HeartbeatInfo::default() }, LATER);
        }
        !state.observed(&options(workers), LATER).absent.is_empty()
    };
    assert!(finds_lost(5, 4));
    assert!(!finds_lost(5, 3), "two of five may be on the other side of a partition");
    assert!(finds_lost(2, 1));
}

#[test]
fn drained_worker_that_stops_is_removed_and_one_with_replicas_is_not() {
    let mut state = formed();
    state.accept_hello(hello(2, 1, 102), 0);
    send_heartbeats(&mut state, LATER);
    assert!(state.closed(&member(2, 1), LATER) && state.closed(&member(1, 1), LATER));
    assert!(state.tick(&options(1), LATER));
    assert_eq!(state.members().map(|worker| worker.member.ordinal.0).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(state.accept_hello(hello(2, 2, 102), LATER), HelloOutcome::Accepted, "it may come back");
}

#[test]
fn missing_map_is_not_recreated_and_older_one_is_rejected() {
    let mut state = State::new(None, Goal::default(), 0);
    state.accept_hello(hello(0, 2, 100), 0);
    state.accept_hello(Introduction { seen_version: 7, ..hello(1, 2, 101) }, 0);
    assert!(state.next_map(&options(2), 0).is_none(), "all are present, and one has seen a map");
    assert!(state.conditions()[0].contains("rebuild-map"), "{:?}", state.conditions());

    let mut state = formed();
    send_heartbeats(&mut state, LATER);
    state.died(Ordinal(1), None, 1, 0, LATER);
    let map = PartitionMap { version: 5, ..state.map().unwrap().clone() };
    let older = PartitionMap { version: 4, ..map.clone() };
    state.map_read(Some(map.clone()), LATER);
    state.map_read(Some(older.clone()), LATER);
    assert!(state.next_map(&options(2), LATER).is_some(), "one read may be stale");
    state.map_read(Some(older), LATER);
    assert!(state.next_map(&options(2), LATER).is_none());
    state.map_read(Some(map.clone()), LATER);
    assert!(state.next_map(&options(2), LATER).is_some(), "it is back");
    state.map_read(None, LATER);
    assert!(state.next_map(&options(2), LATER).is_none() && state.lost().is_some());
    assert_eq!(state.map(), Some(&map), "serving continues under the known map");
    state.map_overridden(PartitionMap { version: 50, ..map }, Vec::new(), LATER);
    assert!(state.next_map(&options(2), LATER).is_some());
}

#[test]
fn no_first_map_is_written_if_one_existed_before() {
    let mut state = State::new(None, Goal::default(), 0);
    state.set_environment(Environment { had_map: true, ..Environment::default() });
    state.accept_hello(hello(0, 2, 100), 0);
    state.accept_hello(hello(1, 2, 101), 0);
    assert!(state.next_map(&options(2), 0).is_none());
    assert!(state.conditions()[0].contains("no connected worker has stored one"), "{:?}", state.conditions());
    state.set_environment(Environment::default());
    assert!(state.next_map(&options(2), 0).is_some(), "they would form a new cluster");
}

#[test]
fn surplus_workers_may_connect_while_they_hold_replicas() {
    let state = formed();
    assert_eq!(state.max_workers(&options(1)), 2);
    assert_eq!(state.draining(&options(1)), [Ordinal(1)].into());
    assert_eq!(state.max_workers(&options(4)), 4);
}

#[test]
fn missing_map_is_an_error_only_if_the_cluster_outlives_it() {
    let mut state = formed();
    let map = state.map().cloned();
    state.map_read(None, LATER);
    assert!(state.next_map(&options(2), LATER).is_none() && state.lost().is_some(), "nothing is written from now on");
    assert_eq!(state.known.take_overdue_loss(LATER + DELETION_MS - 1), None, "its cluster may be in deletion");
    assert!(state.known.take_overdue_loss(LATER + DELETION_MS).is_some_and(|why| why.contains("missing")));
    assert_eq!(state.known.take_overdue_loss(LATER + 2 * DELETION_MS), None, "reported once");
    state.map_read(map.clone(), LATER);
    state.map_read(None, LATER);
    state.map_read(map, LATER);
    assert_eq!(state.known.take_overdue_loss(LATER + DELETION_MS), None, "it was found again");
}
