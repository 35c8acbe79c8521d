//! Tests of the round state machine.

use std::collections::BTreeSet;

use proptest::prelude::*;

mod observer;

use observer::Observer;

use super::*;
use crate::privacy::Mechanism;
use crate::privacy::budget::Budget;
use crate::selection;

const SYNCHRONOUS: Mode = Mode::Synchronous { target: 3, minimum: 2, over_selection_percent: 34 };
const BUFFERED: Mode = Mode::Buffered { concurrency: 4, buffer: 2 };
const COHORTS: Mode = Mode::Cohorts { size: 3, goal: 3, minimum: 2, cohorts: 2 };

fn settings(mode: Mode) -> RoundSettings {
    RoundSettings {
        run: "run".into(),
        mode,
        versions: 1_000,
        lease_millis: 50,
        deadline_millis: 100,
        check_in_millis: 1_000,
        max_waiting: 100,
        max_aborts: 3,
        is_masked: false,
    }
}

fn rounds(mode: Mode) -> Rounds {
    Rounds::new(settings(mode), [1; 32], (0..10).collect(), None, [0; 32]).unwrap()
}

fn upload(client: ClientId, task: u64) -> UploadedUpdate {
    UploadedUpdate { run: "run".into(), client, task, digest: [client as u8; 32] }
}

#[test]
fn round_ends_at_its_target_in_spite_of_a_straggler_and_a_client_that_disappears() {
    let mut observer = Observer::new(rounds(SYNCHRONOUS));
    for client in 0..6 {
        observer.check_in(client, 0);
    }
    // Three started the round; over-selection added two.
    assert_eq!(observer.tasks.len(), 5);
    let clients: Vec<ClientId> = observer.tasks.keys().copied().collect();
    for client in &clients[..3] {
        assert!(observer.batches.is_empty());
        observer.send(*client, 10);
    }
    assert_eq!(observer.batches[0].contributions.len(), 3);
    let late = observer.send(clients[3], 11);
    assert_eq!(late[0], Action::Refuse(clients[3], Refusal::LeaseExpired), "the round has ended");
    observer.commit(12);
    assert_eq!(observer.rounds.version(), 1);
}

#[test]
fn deadline_aggregates_the_minimum_and_aborts_below_it() {
    let mut observer = Observer::new(rounds(SYNCHRONOUS));
    observer.check_in_all(0..3, 0);
    observer.send(0, 10);
    observer.send(1, 10);
    observer.step(Event::Tick, 99);
    assert!(observer.batches.is_empty());
    observer.step(Event::Tick, 100);
    assert_eq!(observer.batches[0].contributions.len(), 2);
    observer.commit(101);
    observer.check_in_all(0..3, 200);
    observer.send(2, 210);
    let actions = observer.step(Event::Tick, 300);
    assert!(actions.contains(&Action::Abort { round: 2, updates: 1 }), "{actions:?}");
    assert!(actions.iter().any(|action| matches!(action, Action::Discard(update) if update.client == 2)));
    assert_eq!(observer.used.len(), 3, "the update of the aborted round is discarded, not lost");
}

#[test]
fn run_fails_after_too_many_aborts_and_completes_after_its_versions() {
    let mut observer = Observer::new(rounds(SYNCHRONOUS));
    for round in 0..3 {
        observer.check_in_all(0..3, round * 1_000);
        observer.step(Event::Tick, round * 1_000 + 100);
    }
    assert_eq!(observer.rounds.outcome(), Some(Outcome::TooManyAborts));
    assert_eq!(observer.step(Event::CheckIn(1), 9_000), [Action::Refuse(1, Refusal::Ended)]);
    let one = RoundSettings { versions: 1, ..settings(SYNCHRONOUS) };
    let mut observer = Observer::new(Rounds::new(one, [1; 32], (0..10).collect(), None, [0; 32]).unwrap());
    observer.check_in_all(0..3, 0);
    observer.send_all(0..3, 1);
    observer.commit(2);
    assert_eq!(observer.rounds.outcome(), Some(Outcome::Complete));
}

#[test]
fn forged_replayed_and_foreign_uploads_are_refused_and_nothing_is_aggregated() {
    let mut observer = Observer::new(rounds(SYNCHRONOUS));
    observer.check_in_all(0..3, 0);
    let task = observer.tasks[&0].number;
    let mut refused = |update: UploadedUpdate, refusal| {
        let client = update.client;
        assert_eq!(observer.step(Event::Upload(update), 10), [Action::Refuse(client, refusal)]);
    };
    refused(upload(77, task), Refusal::NotEnrolled);
    refused(UploadedUpdate { run: "other".into(), ..upload(0, task) }, Refusal::OtherRun);
    refused(upload(1, task), Refusal::LeaseExpired);
    refused(upload(0, 4_711), Refusal::LeaseExpired);
    let accepted = Action::Acknowledge { client: 0, task, repeated: false };
    assert_eq!(observer.send(0, 10), [accepted]);
    assert_eq!(observer.send(0, 11), [Action::Acknowledge { client: 0, task, repeated: true }]);
    let other = UploadedUpdate { digest: [99; 32], ..upload(0, task) };
    assert_eq!(observer.step(Event::Upload(other), 11), [Action::Refuse(0, Refusal::Conflict)]);
    assert_eq!(observer.step(Event::Upload(upload(1, task)), 11), [Action::Refuse(1, Refusal::OtherClient)]);
    let expired = observer.send(1, 50);
    assert!(expired.contains(&Action::Refuse(1, Refusal::LeaseExpired)), "the lease ended at 50");
    assert!(observer.batches.is_empty());
    assert_eq!(observer.rounds.accepted.len(), 1);
}

#[test]
fn client_that_lost_its_connection_gets_the_same_task_again() {
    let mut observer = Observer::new(rounds(SYNCHRONOUS));
    observer.check_in_all(0..3, 0);
    let task = observer.tasks[&1];
    assert_eq!(observer.check_in(1, 5), Some(task));
    observer.step(Event::GiveUp { client: 1, task: task.number }, 6);
    assert_ne!(observer.check_in(1, 7), Some(task));
}

#[test]
fn lease_that_ends_frees_its_place_and_never_outlives_its_round() {
    let mut observer = Observer::new(rounds(BUFFERED));
    observer.check_in_all(0..5, 0);
    let actions = observer.step(Event::Tick, 50);
    for client in 0..4 {
        assert!(actions.contains(&Action::Revoke { client, task: observer.log_task(client) }), "{actions:?}");
    }
    assert_eq!(observer.rounds.tasks().map(|task| task.client).collect::<Vec<_>>(), [4], "the place is free");
    let long = RoundSettings { lease_millis: 1_000, ..settings(SYNCHRONOUS) };
    let mut observer = Observer::new(Rounds::new(long, [1; 32], (0..10).collect(), None, [0; 32]).unwrap());
    observer.check_in_all(0..3, 7);
    assert_eq!(observer.tasks[&0].expires_millis, 107, "the end of the round");
    assert_eq!(observer.rounds.next_deadline(), Some(107));
}

#[test]
fn clock_of_the_next_driver_that_is_behind_does_not_turn_time_back() {
    let mut observer = Observer::new(rounds(BUFFERED));
    observer.step(Event::Tick, 1_000);
    observer.restart();
    observer.check_in(0, 400);
    assert_eq!(observer.tasks[&0].expires_millis, 1_050);
}

#[test]
fn only_aborts_in_sequence_fail_the_run() {
    let mut observer = Observer::new(rounds(SYNCHRONOUS));
    for round in 0..6 {
        let now = round * 1_000;
        observer.check_in_all(0..3, now);
        if round % 3 == 2 {
            observer.send_all(0..3, now);
            observer.commit(now);
        } else {
            observer.step(Event::Tick, now + 100);
        }
    }
    assert_eq!((observer.rounds.outcome(), observer.rounds.version()), (None, 2));
}

#[test]
fn closed_round_without_enough_updates_ends_its_tasks() {
    let mut observer = Observer::new(rounds(SYNCHRONOUS));
    observer.check_in_all(0..3, 0);
    assert_eq!(observer.step(Event::CloseRound(7), 1), [], "another round");
    let actions = observer.step(Event::CloseRound(1), 1);
    assert!(actions.contains(&Action::Abort { round: 1, updates: 0 }), "{actions:?}");
    let revoked = actions.iter().filter(|action| matches!(action, Action::Revoke { .. })).count();
    assert_eq!((revoked, observer.rounds.training()), (3, 0));
}

#[test]
fn end_of_a_run_discards_updates_and_ends_tasks_once() {
    let mut observer = Observer::new(rounds(SYNCHRONOUS));
    observer.check_in_all(0..3, 0);
    observer.send(0, 1);
    let actions = observer.step(Event::Stop, 2);
    assert!(actions.iter().any(|action| matches!(action, Action::Discard(update) if update.client == 0)));
    assert_eq!(actions.iter().filter(|action| matches!(action, Action::Revoke { .. })).count(), 2, "{actions:?}");
    assert_eq!(actions.last(), Some(&Action::End(Outcome::Stopped)));
    assert_eq!((observer.rounds.training(), observer.rounds.accepted.len()), (0, 0));
    let one = RoundSettings { versions: 1, ..settings(SYNCHRONOUS) };
    let mut observer = Observer::new(Rounds::new(one, [1; 32], (0..10).collect(), None, [0; 32]).unwrap());
    observer.check_in_all(0..3, 0);
    observer.send_all(0..3, 1);
    observer.commit(2);
    assert_eq!(observer.step(Event::Stop, 3), []);
    assert_eq!(observer.rounds.outcome(), Some(Outcome::Complete));
}

#[test]
fn repeated_report_of_a_batch_does_not_end_the_next_one() {
    let mut observer = Observer::new(rounds(BUFFERED));
    observer.check_in_all(0..4, 0);
    observer.send_all(0..4, 1);
    observer.commit(2);
    assert_eq!((observer.batches.len(), observer.rounds.version()), (2, 1));
    let first = observer.batches[0].number;
    observer.step(Event::Aggregated { batch: first, model: [5; 32] }, 3);
    assert_eq!((observer.rounds.version(), observer.rounds.model()), (1, [9; 32]));
}

/// So many versions of two clients each, while client 9 trains on the first model.
fn after_versions_with_a_straggler(versions: u64) -> Observer {
    let slow = RoundSettings { lease_millis: 1_000_000, ..settings(BUFFERED) };
    let mut observer = Observer::new(Rounds::new(slow, [1; 32], (0..10).collect(), None, [0; 32]).unwrap());
    observer.check_in(9, 0);
    for version in 0..versions {
        observer.check_in_all(0..2, version);
        observer.send_all(0..2, version);
        observer.commit(version);
    }
    observer
}

#[test]
fn update_that_becomes_too_old_while_it_waits_for_the_aggregation_is_discarded() {
    let mut observer = after_versions_with_a_straggler(20);
    observer.check_in_all(0..2, 20);
    observer.send_all(0..2, 20);
    let task = observer.tasks[&9].number;
    assert_eq!(observer.send(9, 21)[0], Action::Acknowledge { client: 9, task, repeated: false }, "20 versions old");
    let kept: BTreeSet<u64> = observer.rounds.kept_tasks().collect();
    assert_eq!((kept.len(), kept.contains(&task)), (3, true), "the batch in progress and what waits");
    let actions = observer.commit(22);
    assert!(actions.iter().any(|action| matches!(action, Action::Discard(update) if update.client == 9)));
}

#[test]
fn every_buffer_is_charged_before_its_clients_train() {
    let mechanism = Mechanism { sampling_rate: 1.0, noise_multiplier: 8.0 };
    let privacy = Some((Budget::new(4.0, 1e-4, 10).unwrap(), mechanism));
    let mut observer =
        Observer::new(Rounds::new(settings(BUFFERED), [1; 32], (0..10).collect(), privacy, [0; 32]).unwrap());
    for version in 0..3 {
        observer.check_in_all(0..4, version);
        assert_eq!(observer.rounds.budget().unwrap().steps(), version + 1);
        observer.send_all(0..2, version);
        observer.commit(version);
    }
}

#[test]
fn driver_wakes_at_the_next_deadline_and_keeps_what_is_in_use() {
    let short = RoundSettings { lease_millis: 50, deadline_millis: 20, ..settings(COHORTS) };
    let mut observer = Observer::new(Rounds::new(short, [1; 32], (0..10).collect(), None, [0; 32]).unwrap());
    assert_eq!(observer.rounds.next_deadline(), None);
    observer.check_in_all(0..3, 0);
    assert_eq!(observer.rounds.next_deadline(), Some(20), "of the cohort");
    observer.send_all(0..3, 1);
    observer.step(Event::CloseRound(1), 2);
    assert_eq!(observer.rounds.open_rounds(), BTreeSet::from([1]), "its sum is being aggregated");
    let mut observer = Observer::new(rounds(SYNCHRONOUS));
    observer.check_in_all(0..3, 0);
    assert_eq!(observer.rounds.next_deadline(), Some(50), "of a lease");
    observer.send_all(0..2, 1);
    observer.step(Event::Tick, 50);
    assert_eq!(observer.rounds.next_deadline(), Some(100), "of the round");
    let mut observer = Observer::new(rounds(BUFFERED));
    observer.check_in_all(0..4, 0);
    observer.send_all(0..2, 1);
    observer.commit(2);
    assert_eq!(observer.rounds.versions_in_use(), BTreeSet::from([0, 1]), "two clients train from version 0");
}

#[test]
fn client_gives_up_its_own_task_only() {
    let mut observer = Observer::new(rounds(SYNCHRONOUS));
    observer.check_in_all(0..3, 0);
    let task = observer.tasks[&0].number;
    assert_eq!(observer.step(Event::GiveUp { client: 1, task }, 1), []);
    assert_eq!(observer.rounds.training(), 3);
}

#[test]
fn client_that_left_takes_no_further_part_and_is_not_waited_for() {
    let mut observer = Observer::new(rounds(SYNCHRONOUS));
    observer.check_in_all(0..2, 0);
    observer.step(Event::Leave(0), 1);
    assert_eq!(observer.step(Event::CheckIn(0), 2), [Action::Refuse(0, Refusal::NotEnrolled)]);
    observer.check_in(2, 3);
    assert!(observer.tasks.is_empty(), "two clients are less than a round needs");
    let mut observer = Observer::new(rounds(Mode::Poisson { rate: 1.0 }));
    observer.check_in_all(0..10, 0);
    observer.send_all(0..9, 1);
    assert!(observer.batches.is_empty());
    observer.step(Event::Leave(9), 2);
    assert_eq!(observer.batches.first().map(|batch| batch.contributions.len()), Some(9));
}

#[test]
fn no_more_clients_wait_than_are_remembered() {
    let small = RoundSettings { max_waiting: 2, ..settings(Mode::Buffered { concurrency: 1, buffer: 1 }) };
    let mut observer = Observer::new(Rounds::new(small, [1; 32], (0..10).collect(), None, [0; 32]).unwrap());
    observer.check_in_all(0..3, 0);
    assert_eq!(observer.step(Event::CheckIn(3), 1), [Action::Refuse(3, Refusal::Busy)]);
    assert_eq!(observer.step(Event::CheckIn(2), 1), [Action::Wait(2)], "a client that waits is remembered already");
}

#[test]
fn last_receipt_of_each_client_is_kept_and_older_updates_are_refused() {
    let mut rounds = Rounds::new(
        RoundSettings { versions: u64::MAX, ..settings(Mode::Buffered { concurrency: 2, buffer: 1 }) },
        [1; 32],
        (0..2).collect(),
        None,
        [0; 32],
    )
    .unwrap();
    let mut bytes = Vec::new();
    for task in 0..1_000 {
        rounds.step(Event::CheckIn(task % 2), 0);
        rounds.step(Event::Upload(upload(task % 2, task)), 0);
        rounds.step(Event::Aggregated { batch: task, model: [0; 32] }, 0);
        bytes.push(postcard::to_stdvec(&rounds).unwrap().len());
    }
    assert!(bytes[999] < bytes[10] + 50, "the state grows with the age of the run: {} then {}", bytes[10], bytes[999]);
    assert!(rounds.has_receipt(1, 999) && rounds.has_receipt(0, 998) && !rounds.has_receipt(0, 996));
    let mut send = |client, task| rounds.step(Event::Upload(upload(client, task)), 0);
    assert_eq!(send(0, 998), [Action::Acknowledge { client: 0, task: 998, repeated: true }]);
    assert_eq!(send(0, 996), [Action::Refuse(0, Refusal::LeaseExpired)], "it is never counted again");
    assert_eq!(send(1, 998), [Action::Refuse(1, Refusal::OtherClient)]);
}

#[test]
fn masked_round_takes_no_further_client_once_it_has_begun() {
    let mode = Mode::Synchronous { target: 3, minimum: 2, over_selection_percent: 0 };
    for (is_masked, training) in [(false, 3), (true, 1)] {
        let settings = RoundSettings { is_masked, ..settings(mode) };
        let mut observer = Observer::new(Rounds::new(settings, [1; 32], (0..10).collect(), None, [0; 32]).unwrap());
        observer.check_in_all(0..6, 0);
        let clients: Vec<ClientId> = observer.tasks.keys().copied().collect();
        let task = observer.tasks[&clients[0]].number;
        observer.step(Event::GiveUp { client: clients[0], task }, 1);
        observer.step(Event::Leave(clients[1]), 1);
        assert_eq!(observer.rounds.training(), training, "masked: {is_masked}");
    }
}

#[test]
fn poisson_round_counts_every_chosen_client_and_empty_rounds() {
    let mechanism = Mechanism { sampling_rate: 0.2, noise_multiplier: 4.0 };
    let budget = Budget::new(3.0, 1e-4, 10).unwrap();
    let enrolled = (0..10).collect();
    let privacy = Some((budget, mechanism));
    let poisson = RoundSettings { check_in_millis: 50, ..settings(Mode::Poisson { rate: 0.2 }) };
    let mut observer = Observer::new(Rounds::new(poisson, [5; 32], enrolled, privacy, [0; 32]).unwrap());
    let (mut empty, mut sizes) = (0, BTreeSet::new());
    for round in 0..12 {
        let now = round * 1_000;
        observer.tasks.clear();
        observer.check_in_all(0..10, now);
        let clients: BTreeSet<ClientId> = observer.tasks.keys().copied().collect();
        if let Some(task) = observer.tasks.values().next() {
            // The charge for a round rests on the draw: no client that was not drawn may take part.
            assert_eq!(clients, selection::poisson(&(0..10).collect(), 0.2, &[5; 32], task.round));
        }
        observer.send_all(clients.iter().copied(), now + 1);
        observer.step(Event::Tick, now + 100);
        let batch = observer.batches.last().unwrap();
        assert_eq!(observer.rounds.budget().unwrap().steps(), observer.batches.len() as u64);
        sizes.insert(batch.contributions.len());
        empty += u32::from(batch.contributions.is_empty());
        observer.commit(now + 101);
    }
    assert!(empty > 0, "an empty round is released and charged");
    assert!(sizes.len() > 2, "{sizes:?}");
}

#[test]
fn no_round_starts_when_the_budget_is_spent() {
    let mechanism = Mechanism { sampling_rate: 1.0, noise_multiplier: 2.0 };
    let budget = Budget::new(4.0, 1e-4, 10).unwrap();
    let mut observer = Observer::new(
        Rounds::new(settings(SYNCHRONOUS), [1; 32], (0..10).collect(), Some((budget, mechanism)), [0; 32]).unwrap(),
    );
    for round in 0..20 {
        observer.tasks.clear();
        observer.check_in_all(0..3, round * 1_000);
        if observer.tasks.is_empty() {
            break;
        }
        observer.send_all(0..3, round * 1_000 + 1);
        observer.commit(round * 1_000 + 2);
        observer.restart();
    }
    assert!(matches!(observer.rounds.outcome(), Some(Outcome::Exhausted { needed, .. }) if needed > 4.0));
    assert!(!observer.batches.is_empty());
    assert!(observer.rounds.budget().unwrap().spent().epsilon <= 4.0);
    let wrong = Some((Budget::new(4.0, 1e-4, 10).unwrap(), Mechanism { sampling_rate: 0.5, noise_multiplier: 2.0 }));
    assert!(Rounds::new(settings(SYNCHRONOUS), [1; 32], (0..10).collect(), wrong, [0; 32]).is_err());
}

#[test]
fn buffered_mode_keeps_clients_busy_while_a_batch_is_aggregated() {
    let mut observer = Observer::new(rounds(BUFFERED));
    observer.check_in_all(0..6, 0);
    assert_eq!(observer.rounds.training(), 4, "bounded by the concurrency");
    observer.send(0, 1);
    observer.send(1, 1);
    assert_eq!(observer.batches.len(), 1);
    assert_eq!(observer.rounds.training(), 4, "waiting clients took the places");
    observer.send(2, 2);
    observer.send(3, 2);
    assert_eq!(observer.batches.len(), 1, "one aggregation at a time");
    observer.commit(3);
    assert_eq!(observer.batches.len(), 2);
    let stale = observer.batches[1].contributions.iter().map(|update| update.version).collect::<Vec<_>>();
    assert_eq!((observer.batches[1].version, stale), (1, vec![0, 0]));
}

#[test]
fn buffered_mode_bounds_the_updates_that_wait_for_an_aggregation() {
    let enrolled = (0..40).collect();
    let mut observer = Observer::new(Rounds::new(settings(BUFFERED), [1; 32], enrolled, None, [0; 32]).unwrap());
    for now in 0..10 {
        observer.check_in_all(0..40, now);
        let open: Vec<ClientId> = observer.tasks.keys().copied().collect();
        observer.send_all(open, now);
    }
    assert_eq!(observer.batches.len(), 1, "its aggregation has not ended");
    assert_eq!(observer.acknowledged.len(), 2 + 4 + 2, "a batch, and as many as the concurrency and a buffer");
}

#[test]
fn buffered_mode_refuses_updates_older_than_twenty_versions() {
    let mut observer = after_versions_with_a_straggler(21);
    assert!(observer.send(9, 22).contains(&Action::Refuse(9, Refusal::Stale { staleness: 21 })));
}

#[test]
fn cohorts_train_at_the_same_time_and_end_on_their_own() {
    let mut observer = Observer::new(rounds(COHORTS));
    observer.check_in_all(0..2, 0);
    assert!(observer.tasks.is_empty(), "a cohort needs three");
    observer.check_in_all(2..9, 0);
    assert_eq!(observer.rounds.training(), 6, "two cohorts; the third waits");
    assert_eq!(observer.rounds.open_rounds(), BTreeSet::from([1, 2]));
    observer.send_all(3..6, 10);
    assert!(observer.batches.is_empty(), "the sum is known when the cohort ends");
    observer.step(Event::CloseRound(2), 11);
    assert_eq!((observer.batches[0].round, observer.batches[0].contributions.len()), (2, 3));
    assert_eq!(observer.tasks[&6].version, 0, "the next cohort does not wait for the aggregation");
    observer.commit(12);
    observer.send(0, 13);
    let actions = observer.step(Event::CloseRound(1), 14);
    assert!(actions.contains(&Action::Abort { round: 1, updates: 1 }), "{actions:?}");
    observer.check_in_all(0..3, 15);
    assert_eq!((observer.tasks[&0].round, observer.tasks[&0].version), (4, 1), "from the newest model");
    let actions = observer.step(Event::Tick, 200);
    let aborts = actions.iter().filter(|action| matches!(action, Action::Abort { updates: 0, .. })).count();
    assert_eq!((aborts, observer.rounds.outcome()), (2, Some(Outcome::TooManyAborts)), "{actions:?}");
}

#[test]
fn no_more_cohorts_are_in_progress_than_versions_are_missing_and_stale_ones_are_aborted() {
    let last = RoundSettings { versions: 1, ..settings(COHORTS) };
    let mut observer = Observer::new(Rounds::new(last, [1; 32], (0..10).collect(), None, [0; 32]).unwrap());
    observer.check_in_all(0..6, 0);
    assert_eq!(observer.rounds.training(), 3);
    let slow = RoundSettings { lease_millis: 1_000_000, deadline_millis: 1_000_000, ..settings(COHORTS) };
    let mut observer = Observer::new(Rounds::new(slow, [1; 32], (0..10).collect(), None, [0; 32]).unwrap());
    observer.check_in_all(0..3, 0);
    for version in 0..21 {
        observer.check_in_all(3..6, version);
        observer.send_all(3..6, version);
        observer.step(Event::CloseRound(version + 2), version);
        if version < 20 {
            observer.commit(version);
        }
    }
    // Twenty versions old when it ends, 21 when it is its turn.
    observer.send_all(0..3, 30);
    observer.step(Event::CloseRound(1), 30);
    let actions = observer.commit(31);
    assert!(actions.contains(&Action::Abort { round: 1, updates: 3 }), "{actions:?}");
    assert_eq!((observer.rounds.version(), observer.used.len()), (21, 66));
}

#[test]
fn cohorts_are_charged_when_they_are_formed_and_those_in_progress_end_before_the_run() {
    let mechanism = Mechanism { sampling_rate: 1.0, noise_multiplier: 2.0 };
    let budget = Budget::new(4.0, 1e-4, 10).unwrap();
    let privacy = Some((budget, mechanism));
    let mut observer =
        Observer::new(Rounds::new(settings(COHORTS), [1; 32], (0..10).collect(), privacy, [0; 32]).unwrap());
    let mut formed = 0;
    for step in 0..20 {
        observer.check_in_all(0..6, step);
        formed = observer.rounds.round();
        assert_eq!(observer.rounds.budget().unwrap().steps(), formed);
        // The second cohort of each pair ends only after the first was refused its successor.
        let Some(round) = observer.rounds.open_rounds().first().copied() else { break };
        let members = observer.rounds.tasks().filter(|task| task.round == round).map(|task| task.client);
        observer.send_all(members.collect::<Vec<_>>(), step);
        observer.step(Event::CloseRound(round), step);
        observer.commit(step);
        observer.restart();
    }
    assert!(matches!(observer.rounds.outcome(), Some(Outcome::Exhausted { .. })));
    assert!(formed > 1 && observer.batches.len() as u64 == formed, "{formed} cohorts were charged and aggregated");
}

#[test]
fn settings_out_of_range_are_refused() {
    let refused = |mode| settings(mode).validate().unwrap_err().field;
    assert_eq!(refused(Mode::Synchronous { target: 3, minimum: 4, over_selection_percent: 0 }), "minimum");
    assert_eq!(refused(Mode::Poisson { rate: 0.0 }), "rate");
    assert_eq!(refused(Mode::Buffered { concurrency: 1, buffer: 2 }), "buffer");
    let cohorts = |size, goal, minimum, cohorts| refused(Mode::Cohorts { size, goal, minimum, cohorts });
    assert_eq!([cohorts(3, 4, 2, 1), cohorts(3, 3, 1, 1), cohorts(3, 3, 2, 0)], ["goal", "minimum", "cohorts"]);
    assert_eq!(cohorts(101, 3, 2, 1), "size");
    assert_eq!(refused(Mode::Synchronous { target: 101, minimum: 1, over_selection_percent: 0 }), "target");
    let surplus = Mode::Synchronous { target: 3, minimum: 1, over_selection_percent: 1_001 };
    assert_eq!(refused(surplus), "overSelectionPercent");
    let valid = settings(BUFFERED);
    for (field, zero) in [
        ("versions", RoundSettings { versions: 0, ..valid.clone() }),
        ("leaseMillis", RoundSettings { lease_millis: 0, ..valid.clone() }),
        ("deadlineMillis", RoundSettings { deadline_millis: 0, ..valid.clone() }),
        ("checkInMillis", RoundSettings { check_in_millis: 0, ..valid.clone() }),
        ("maxWaiting", RoundSettings { max_waiting: 0, ..valid.clone() }),
        ("maxAborts", RoundSettings { max_aborts: 0, ..valid }),
    ] {
        assert_eq!(zero.validate().unwrap_err().field, field);
    }
    let quiet = Some((Budget::new(4.0, 1e-4, 10).unwrap(), Mechanism { sampling_rate: 1.0, noise_multiplier: 0.01 }));
    let refused = Rounds::new(settings(BUFFERED), [1; 32], (0..10).collect(), quiet, [0; 32]).unwrap_err();
    assert_eq!(refused.field, "noiseMultiplier");
    assert!(Rounds::new(settings(BUFFERED), [1; 32], BTreeSet::new(), None, [0; 32]).is_err());
}

/// What a client, the driver or the clock does next in a random history.
#[derive(Debug, Clone, Copy)]
enum Move {
    CheckIn(ClientId),
    Send(ClientId),
    Repeat(ClientId),
    GiveUp(ClientId),
    Close(ClientId),
    Commit,
    RepeatCommit,
    Pass(u64),
}

fn moves() -> impl Strategy<Value = Vec<(Move, bool)>> {
    let client = 0..8_u64;
    let one = prop_oneof![
        4 => client.clone().prop_map(Move::CheckIn),
        4 => client.clone().prop_map(Move::Send),
        1 => client.clone().prop_map(Move::Repeat),
        1 => client.clone().prop_map(Move::GiveUp),
        1 => client.prop_map(Move::Close),
        3 => Just(Move::Commit),
        1 => Just(Move::RepeatCommit),
        2 => (1..40_u64).prop_map(Move::Pass),
    ];
    prop::collection::vec((one, prop::bool::weighted(0.2)), 1..200)
}

/// Runs a history, with restarts where it has them if `restarts`.
fn play(mode: Mode, history: &[(Move, bool)], restarts: bool) -> Observer {
    let patient = RoundSettings { max_aborts: 1_000, ..settings(mode) };
    let mut observer = Observer::new(Rounds::new(patient, [1; 32], (0..8).collect(), None, [0; 32]).unwrap());
    let mut now = 0;
    for (next, restart) in history {
        let event = match *next {
            Move::CheckIn(client) => Some(Event::CheckIn(client)),
            Move::Send(client) | Move::Repeat(client) => {
                observer.tasks.get(&client).map(|task| Event::Upload(upload(client, task.number)))
            }
            Move::GiveUp(client) => observer.tasks.get(&client).map(|task| Event::GiveUp { client, task: task.number }),
            // Only cohorts are closed by their number; a round that is over is not.
            Move::Close(client) => {
                let task = observer.tasks.get(&client).filter(|_| matches!(mode, Mode::Cohorts { .. }));
                task.map(|task| Event::CloseRound(task.round))
            }
            Move::Commit => {
                observer.batches.last().map(|batch| Event::Aggregated { batch: batch.number, model: [1; 32] })
            }
            Move::RepeatCommit => {
                observer.batches.first().map(|batch| Event::Aggregated { batch: batch.number, model: [1; 32] })
            }
            Move::Pass(millis) => {
                now += millis;
                Some(Event::Tick)
            }
        };
        if let Some(event) = event {
            observer.step(event, now);
        }
        if *restart && restarts {
            observer.restart();
            let resumed = observer.rounds.resume();
            let pending = observer.rounds.aggregating.clone().map(Action::Aggregate);
            assert_eq!(resumed, pending.into_iter().collect::<Vec<_>>());
        }
    }
    observer
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_update_is_lost_or_counted_twice_and_a_restart_changes_nothing(history in moves()) {
        for mode in [SYNCHRONOUS, BUFFERED, COHORTS, Mode::Poisson { rate: 0.5 }] {
            let observer = play(mode, &history, false);
            let accepted = observer.rounds.accepted.iter().chain(observer.rounds.cohorts.accepted());
            let pending: BTreeSet<u64> = accepted.map(|update| update.task).collect();
            let used_or_pending: BTreeSet<u64> = observer.used.union(&pending).copied().collect();
            let acknowledged: BTreeSet<u64> = observer.acknowledged.keys().copied().collect();
            prop_assert_eq!(used_or_pending, acknowledged);
            let restarted = play(mode, &history, true);
            prop_assert_eq!(&restarted.log, &observer.log);
            prop_assert_eq!(&restarted.rounds, &observer.rounds);
        }
    }

    #[test]
    fn batch_does_not_depend_on_the_order_in_which_updates_arrive(order in Just(vec![0_u64, 1, 2]).prop_shuffle()) {
        let mut observer = Observer::new(rounds(Mode::Synchronous { target: 3, minimum: 3, over_selection_percent: 0 }));
        observer.check_in_all(0..3, 0);
        observer.send_all(order.iter().copied(), 1);
        let clients: BTreeSet<ClientId> = observer.batches[0].contributions.iter().map(|update| update.client).collect();
        prop_assert_eq!(clients, BTreeSet::from([0, 1, 2]));
    }
}
