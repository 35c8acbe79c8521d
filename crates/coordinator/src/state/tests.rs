//! What is heard, and what follows from it for the map.

use super::*;
use engram_cluster::{ABSENT_MS, Change, Entry, Expected};
use engram_memory::{ClusterId, PartitionId, Term};

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

/// A cluster of two workers that has its map.
fn formed() -> State {
    let mut state = State::new(None, Goal::default(), 0);
    for ordinal in 0..2 {
        assert_eq!(state.greet(hello(ordinal, 1, 100 + ordinal), 0), Greeting::Welcome);
    }
    let first = state.wanted(&options(2), 0).expect("both are here").map;
    state.set_map(Some(first), 0);
    assert!(state.wanted(&options(2), 0).is_none());
    state
}

fn beats(state: &mut State, now_ms: u64) {
    for ordinal in 0..2 {
        state.beat(&member(ordinal, 1), Pulse::default(), now_ms);
    }
    state.tick(&options(2), now_ms);
}

fn entry(state: &State, partition: usize) -> &Entry {
    &state.map().unwrap().partitions[partition]
}

#[test]
fn what_rests_on_a_map_that_another_wrote_waits_until_it_is_read_here() {
    let mut state = formed();
    let mut newer = state.map().unwrap().clone();
    let leader = *newer.partitions[0].primary_member().unwrap();
    let other = *newer.partitions[0].isr.iter().find(|known| **known != leader).unwrap();
    let promote = Change::Promote { primary: other, isr: vec![leader.ordinal, other.ordinal] };
    newer.partitions[0] = newer.partitions[0].changed(&promote).unwrap();
    newer.version += 1;
    let activate =
        Proposal { partition: PartitionId(0), expected: newer.partitions[0].expected(), change: Change::Activate };
    state.propose(other.ordinal, vec![activate]);
    assert!(state.is_behind() && state.wanted(&options(2), 0).is_none(), "its entry is not known here yet");
    state.found(Some(newer.clone()), 0);
    let wanted = state.wanted(&options(2), 0).expect("what was asked for");
    assert!(wanted.is_urgent && wanted.map.partitions[0].activated);

    newer.version += 1;
    assert!(state.beat(&member(0, 1), Pulse { map_version: newer.version, ..Pulse::default() }, 0));
    assert!(state.is_behind(), "a beat tells of it, too");
    state.found(Some(newer.clone()), 0);
    assert!(!state.is_behind());
    assert!(!state.beat(&member(1, 1), Pulse { map_version: newer.version, ..Pulse::default() }, 0), "no news");
}

#[test]
fn an_older_process_neither_replaces_nor_ends_the_newer_one() {
    let mut state = State::new(None, Goal::default(), 0);
    assert_eq!(state.greet(hello(1, 4, 40), 0), Greeting::Welcome);
    assert_eq!(state.greet(hello(1, 3, 30), 0), Greeting::Superseded);
    assert!(!state.beat(&member(1, 3), Pulse { ready: true, ..Pulse::default() }, LATER));
    assert!(!state.closed(&member(1, 3), LATER), "the end of an older stream says nothing of the living process");
    assert!(!state.died(Ordinal(1), None, 3, 0, LATER), "nor does a proof that names it");
    assert!(!state.died(Ordinal(1), None, 0, 30, LATER), "nor the word of another process's end");
    let (here, elsewhere) = (member(1, 4).store, StoreId(4_711));
    assert!(!state.died(Ordinal(1), Some(elsewhere), 4, 0, LATER), "nor of one that had that number on another disk");
    assert!(!state.ended(&Member { store: elsewhere, ..member(1, 4) }, LATER) && !state.ended(&member(1, 3), LATER));
    assert!(!state.ended(&member(0, 1), LATER), "nor of one that was never heard");
    assert!(!state.died(Ordinal(1), Some(here), 3, 0, LATER));
    let mut proven = State::new(None, Goal::default(), 0);
    assert_eq!(proven.greet(hello(1, 4, 40), 0), Greeting::Welcome);
    assert!(proven.ended(&member(1, 4), LATER) && !proven.ended(&member(1, 4), LATER), "said once");
    assert!(state.died(Ordinal(1), None, 0, 40, LATER));
}

#[test]
fn a_proposal_is_checked_against_the_entry_that_is_there_when_it_is_written() {
    let mut state = formed();
    beats(&mut state, LATER);
    let led =
        |state: &State, ordinal| (0..8).find(|&partition| entry(state, partition).primary == Ordinal(ordinal)).unwrap();
    let (mine, other) = (led(&state, 0), led(&state, 1));
    let remove = |state: &State, partition: usize, term| Proposal {
        partition: PartitionId(partition as u32),
        expected: Expected { term: Term(term), ..entry(state, partition).expected() },
        change: Change::Remove { primary: member(0, 1), leaver: Ordinal(1) },
    };
    state.propose(Ordinal(0), vec![remove(&state, mine, 7)]);
    assert!(state.wanted(&options(2), LATER).is_none(), "an entry that is not there yet, or never will be");
    state.found(state.map().cloned(), LATER);
    assert!(state.wanted(&options(2), LATER).is_none(), "nor is it when the map was read");
    state.propose(Ordinal(0), vec![remove(&state, other, 1)]);
    assert!(state.wanted(&options(2), LATER).is_none(), "a primary changes its own partitions alone");
    let promote = Proposal {
        change: Change::Promote { primary: member(1, 1), isr: vec![Ordinal(1)] },
        ..remove(&state, mine, 1)
    };
    state.propose(Ordinal(1), vec![promote.clone()]);
    assert!(state.wanted(&options(2), LATER).is_none(), "nobody is deposed that is heard here");

    // Two for one partition: the first one changes what the second expects.
    state.propose(Ordinal(0), vec![remove(&state, mine, 1)]);
    state.propose(Ordinal(1), vec![promote]);
    let wanted = state.wanted(&options(2), LATER).unwrap();
    assert_eq!((wanted.expected, wanted.proposals.len()), (Some(1), 1));
    assert_eq!(wanted.map.partitions[mine].isr, [member(0, 1)]);
    // The write fails: what was in it is looked at again, against what is there then.
    state.propose_again(wanted.proposals);
    let mut moved = state.map().unwrap().clone();
    moved.partitions[mine].term = Term(2);
    state.set_map(Some(moved), LATER);
    assert!(state.wanted(&options(2), LATER).is_none());
}

#[test]
fn who_ends_finishes_what_was_asked_of_it_and_begins_nothing() {
    let mut state = formed();
    beats(&mut state, LATER);
    let mine = (0..8).find(|&partition| entry(&state, partition).primary == Ordinal(0)).unwrap();
    let expected = entry(&state, mine).expected();
    let change = Change::Remove { primary: member(0, 1), leaver: Ordinal(1) };
    state.propose(Ordinal(0), vec![Proposal { partition: PartitionId(mine as u32), expected, change }]);
    state.close();
    assert!(state.died(Ordinal(1), None, 1, 0, LATER), "what follows from it others decide");
    let before = state.map().unwrap().partitions.clone();
    let wanted = state.wanted(&options(2), LATER).unwrap();
    assert_eq!(wanted.map.partitions[mine].isr, [member(0, 1)]);
    let others = before.iter().zip(&wanted.map.partitions).enumerate().filter(|(partition, _)| *partition != mine);
    others.for_each(|(_, (before, after))| assert_eq!(before, after));
    assert!(!state.has_proposals());
}

#[test]
fn a_death_moves_all_partitions_in_one_write_and_is_remembered() {
    let mut state = formed();
    beats(&mut state, LATER);
    assert!(state.died(Ordinal(1), None, 1, 0, LATER));
    let wanted = state.wanted(&options(2), LATER).unwrap();
    assert!(wanted.map.partitions.iter().all(|entry| entry.primary == Ordinal(0)));
    state.set_map(Some(wanted.map), LATER);
    assert_eq!(state.failed_over_ms, Some(LATER));
    let map = state.map().cloned();
    state.set_map(map, 2 * LATER);
    assert_eq!(state.failed_over_ms, Some(LATER), "the same map again is no failover");
}

#[test]
fn who_was_not_heard_is_given_up_late_or_on_its_supervisors_word() {
    let map = formed().map().cloned();
    let mut state = State::new(map, Goal::default(), 0);
    state.greet(hello(0, 1, 100), 0);
    let promoted = |state: &mut State, now_ms| {
        state.beat(&member(0, 1), Pulse::default(), now_ms);
        state.tick(&options(2), now_ms);
        state.wanted(&options(2), now_ms).is_some()
    };
    assert!(!promoted(&mut state, LATER), "a coordinator that just started has no opinion");
    assert!(state.conditions().iter().any(|why| why.contains("worker 1 has not been heard")));
    assert!(promoted(&mut state, ABSENT_MS));
    state.died(Ordinal(1), None, 0, 9, LATER);
    assert!(promoted(&mut state, LATER), "it cannot be started");
}

#[test]
fn who_was_not_heard_is_given_up_when_somebody_missed_it_and_no_more_are_missing_than_one_fault_explains() {
    let gives_up = |workers: u32, hears: u32| {
        let heard = |map, count: u32| {
            let mut state = State::new(map, Goal::default(), 0);
            for ordinal in 0..count {
                assert_eq!(state.greet(hello(ordinal, 1, 100 + ordinal), 0), Greeting::Welcome);
            }
            state
        };
        let map = heard(None, workers).wanted(&options(workers), 0).expect("all are here").map;
        let mut state = heard(Some(map), hears);
        let missed: BTreeSet<_> = (hears..workers).map(Ordinal).collect();
        for ordinal in 0..hears {
            let suspects = if ordinal == 0 { missed.clone() } else { BTreeSet::new() };
            state.beat(&member(ordinal, 1), Pulse { suspects, ..Pulse::default() }, LATER);
        }
        !state.observed(&options(workers), LATER).absent.is_empty()
    };
    assert!(gives_up(5, 4));
    assert!(!gives_up(5, 3), "two of five may be the others' side of a cut");
    assert!(gives_up(2, 1));
}

#[test]
fn an_emptied_worker_that_stops_is_forgotten_and_one_that_holds_copies_is_not() {
    let mut state = formed();
    state.greet(hello(2, 1, 102), 0);
    beats(&mut state, LATER);
    assert!(state.closed(&member(2, 1), LATER) && state.closed(&member(1, 1), LATER));
    assert!(state.tick(&options(1), LATER));
    assert_eq!(state.members().map(|heard| heard.member.ordinal.0).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(state.greet(hello(2, 2, 102), LATER), Greeting::Welcome, "and may come back");
}

#[test]
fn a_map_that_is_gone_is_not_formed_again_and_an_older_one_is_not_gone_on_with() {
    let mut state = State::new(None, Goal::default(), 0);
    state.greet(hello(0, 2, 100), 0);
    state.greet(Introduction { seen_version: 7, ..hello(1, 2, 101) }, 0);
    assert!(state.wanted(&options(2), 0).is_none(), "all are here, and one has seen a map");
    assert!(state.conditions()[0].contains("rebuild-map"), "{:?}", state.conditions());

    let mut state = formed();
    beats(&mut state, LATER);
    state.died(Ordinal(1), None, 1, 0, LATER);
    let map = PartitionMap { version: 5, ..state.map().unwrap().clone() };
    let older = PartitionMap { version: 4, ..map.clone() };
    state.found(Some(map.clone()), LATER);
    state.found(Some(older.clone()), LATER);
    assert!(state.wanted(&options(2), LATER).is_some(), "one read may be stale");
    state.found(Some(older), LATER);
    assert!(state.wanted(&options(2), LATER).is_none());
    state.found(Some(map.clone()), LATER);
    assert!(state.wanted(&options(2), LATER).is_some(), "it is back");
    state.found(None, LATER);
    assert!(state.wanted(&options(2), LATER).is_none() && state.lost().is_some());
    assert_eq!(state.map(), Some(&map), "who serves goes on under what is known");
    state.overruled(PartitionMap { version: 50, ..map }, Vec::new(), LATER);
    assert!(state.wanted(&options(2), LATER).is_some());
}

#[test]
fn where_there_was_a_map_no_first_one_is_written_also_by_workers_that_have_kept_none() {
    let mut state = State::new(None, Goal::default(), 0);
    state.set_surroundings(Surroundings { had_map: true, ..Surroundings::default() });
    state.greet(hello(0, 2, 100), 0);
    state.greet(hello(1, 2, 101), 0);
    assert!(state.wanted(&options(2), 0).is_none());
    assert!(state.conditions()[0].contains("no worker that answers has kept one"), "{:?}", state.conditions());
    state.set_surroundings(Surroundings::default());
    assert!(state.wanted(&options(2), 0).is_some(), "they would form a new cluster");
}

#[test]
fn more_workers_than_the_manifest_says_may_come_while_they_hold_copies() {
    let state = formed();
    assert_eq!(state.places(&options(1)), 2);
    assert_eq!(state.draining(&options(1)), [Ordinal(1)].into());
    assert_eq!(state.places(&options(4)), 4);
}
