//! Tests of the round state machine.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::privacy::Mechanism;
use crate::privacy::budget::Budget;

const SYNCHRONOUS: Mode = Mode::Synchronous { target: 3, minimum: 2, over_selection_percent: 34 };
const BUFFERED: Mode = Mode::Buffered { concurrency: 4, buffer: 2 };

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
    }
}

fn rounds(mode: Mode) -> Rounds {
    Rounds::new(settings(mode), [1; 32], (0..10).collect(), None, [0; 32]).unwrap()
}

fn upload(client: ClientId, task: u64) -> UploadedUpdate {
    UploadedUpdate { run: "run".into(), client, task, digest: [client as u8; 32] }
}

/// The machine with what an observer of its actions knows.
struct Observer {
    rounds: Rounds,
    tasks: BTreeMap<ClientId, Task>,
    acknowledged: BTreeMap<u64, ClientId>,
    used: BTreeSet<u64>,
    batches: Vec<Batch>,
    log: Vec<Action>,
}

impl Observer {
    fn new(rounds: Rounds) -> Self {
        let (tasks, acknowledged, used) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        Self { rounds, tasks, acknowledged, used, batches: Vec::new(), log: Vec::new() }
    }

    fn step(&mut self, event: Event, now: u64) -> Vec<Action> {
        let actions = self.rounds.step(event, now);
        for action in &actions {
            self.observe(action, now);
        }
        self.log.extend(actions.iter().cloned());
        actions
    }

    /// Checks the promises of an action.
    fn observe(&mut self, action: &Action, now: u64) {
        match action {
            Action::Assign(task) => {
                assert!(task.expires_millis > now, "a lease that has ended is not assigned");
                self.tasks.insert(task.client, *task);
            }
            Action::Acknowledge { client, task, repeated } => {
                let first = self.acknowledged.insert(*task, *client).is_none();
                assert_eq!(first, !repeated, "task {task} of client {client}");
            }
            Action::Aggregate(batch) => {
                let clients: BTreeSet<ClientId> = batch.contributions.iter().map(|update| update.client).collect();
                assert_eq!(clients.len(), batch.contributions.len(), "a client counts once per batch");
                for update in &batch.contributions {
                    self.use_up(update);
                }
                self.batches.push(batch.clone());
            }
            Action::Discard(update) => self.use_up(update),
            _ => {}
        }
    }

    fn use_up(&mut self, update: &Contribution) {
        assert_eq!(self.acknowledged.get(&update.task), Some(&update.client), "only acknowledged updates are used");
        assert!(self.used.insert(update.task), "update of task {} is used twice", update.task);
    }

    fn check_in(&mut self, client: ClientId, now: u64) -> Option<Task> {
        self.step(Event::CheckIn(client), now);
        self.tasks.get(&client).copied()
    }

    fn send(&mut self, client: ClientId, now: u64) -> Vec<Action> {
        let task = self.tasks[&client].number;
        self.step(Event::Upload(upload(client, task)), now)
    }

    fn check_in_all(&mut self, clients: impl IntoIterator<Item = ClientId>, now: u64) {
        for client in clients {
            self.check_in(client, now);
        }
    }

    fn send_all(&mut self, clients: impl IntoIterator<Item = ClientId>, now: u64) {
        for client in clients {
            self.send(client, now);
        }
    }

    fn commit(&mut self, now: u64) -> Vec<Action> {
        let batch = self.batches.last().unwrap().number;
        self.step(Event::Aggregated { batch, model: [9; 32] }, now)
    }

    fn restart(&mut self) {
        let bytes = postcard::to_stdvec(&self.rounds).unwrap();
        let restored: Rounds = postcard::from_bytes(&bytes).unwrap();
        assert_eq!(restored, self.rounds);
        self.rounds = restored;
    }
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
        let clients: Vec<ClientId> = observer.tasks.keys().copied().collect();
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
fn buffered_mode_refuses_updates_older_than_twenty_versions() {
    let slow = RoundSettings { lease_millis: 1_000_000, ..settings(BUFFERED) };
    let mut observer = Observer::new(Rounds::new(slow, [1; 32], (0..10).collect(), None, [0; 32]).unwrap());
    observer.check_in(9, 0);
    for version in 0..21 {
        observer.check_in_all(0..2, version);
        observer.send_all(0..2, version);
        observer.commit(version);
    }
    assert!(observer.send(9, 22).contains(&Action::Refuse(9, Refusal::Stale { staleness: 21 })));
}

#[test]
fn settings_out_of_range_are_refused() {
    let refused = |mode| settings(mode).validate().unwrap_err().field;
    assert_eq!(refused(Mode::Synchronous { target: 3, minimum: 4, over_selection_percent: 0 }), "minimum");
    assert_eq!(refused(Mode::Poisson { rate: 0.0 }), "rate");
    assert_eq!(refused(Mode::Buffered { concurrency: 1, buffer: 2 }), "buffer");
    assert!(Rounds::new(settings(BUFFERED), [1; 32], BTreeSet::new(), None, [0; 32]).is_err());
}

/// What a client, the driver or the clock does next in a random history.
#[derive(Debug, Clone, Copy)]
enum Move {
    CheckIn(ClientId),
    Send(ClientId),
    Repeat(ClientId),
    GiveUp(ClientId),
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
        1 => client.prop_map(Move::GiveUp),
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
        for mode in [SYNCHRONOUS, BUFFERED, Mode::Poisson { rate: 0.5 }] {
            let observer = play(mode, &history, false);
            let pending: BTreeSet<u64> = observer.rounds.accepted.iter().map(|update| update.task).collect();
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
