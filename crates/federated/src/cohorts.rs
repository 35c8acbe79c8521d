//! Tests of `FedBuff` with secure aggregation: several cohorts of one run, from the check-in to the model.

use std::collections::{BTreeMap, BTreeSet};

use crate::aggregation::aggregate_sum;
use crate::job::Job;
use crate::model::ClientId;
use crate::random::{Seed, derive};
use crate::round::{Action, Batch, Event, Mode, Outcome, Task};
use crate::secure::keys::verifying_key;
use crate::secure::relay::Relay;
use crate::secure::{ClientMessage, SecureClient, SecureError, ServerMessage};
use crate::service::{Service, digest, encode_values};
use crate::strategy::Aggregator;

const SECRET: &[u8] = &[7; 16];
const STAGE_MILLIS: u64 = 1_000;
const PARAMETERS: usize = 8;

fn identity(client: ClientId) -> Seed {
    derive(&[9; 32], &[&client.to_le_bytes()])
}

/// The update of a client for a task: each value is an end of the range, so its encoding is exact.
fn update(task: &Task) -> Vec<f32> {
    let bits = task.client * 37 + task.number * 11;
    (0..PARAMETERS).map(|place| if bits >> place & 1 == 1 { 8.0 } else { -8.0 }).collect()
}

/// A cohort with its clients, over what is stored of it.
struct Cohort {
    foundation: Vec<u8>,
    entries: Vec<Vec<u8>>,
    clients: BTreeMap<ClientId, (SecureClient, usize)>,
    tasks: BTreeMap<ClientId, Task>,
}

/// A run with the clients that take part.
struct Run {
    job: Job,
    service: Service,
    aggregator: Aggregator,
    cohorts: BTreeMap<u64, Cohort>,
    batches: Vec<Batch>,
    log: Vec<Action>,
    now: u64,
}

impl Run {
    fn new(fields: &str) -> Self {
        let job = Job::new("a", &crate::job::tests::run(fields)).unwrap();
        let service = Service::new(&job, [1; 32], [0; 32]).unwrap();
        let aggregator = Aggregator::new(job.strategy.clone(), vec![0.0; PARAMETERS]).unwrap();
        Self { job, service, aggregator, cohorts: BTreeMap::new(), batches: Vec::new(), log: Vec::new(), now: 0 }
    }

    fn apply(&mut self, actions: Vec<Action>) {
        let mut assigned = BTreeMap::<u64, Vec<Task>>::new();
        for action in &actions {
            match action {
                Action::Assign(task) => assigned.entry(task.round).or_default().push(*task),
                Action::Aggregate(batch) => self.batches.push(batch.clone()),
                _ => {}
            }
        }
        self.log.extend(actions);
        for (round, tasks) in assigned {
            if !self.cohorts.contains_key(&round) {
                let relay = self.service.relay(&self.job, &tasks, STAGE_MILLIS, self.now).unwrap();
                let client = |task: &Task| {
                    let secret = derive(&[4; 32], &[&task.number.to_le_bytes()]);
                    let settings = relay.settings().clone();
                    let client = SecureClient::new(settings, task.client, secret, identity(task.client)).unwrap();
                    (task.client, (client, 0))
                };
                let clients = tasks.iter().map(client).collect();
                let tasks = tasks.iter().map(|task| (task.client, *task)).collect();
                let cohort = Cohort { foundation: relay.foundation(), entries: Vec::new(), clients, tasks };
                self.cohorts.insert(round, cohort);
            }
        }
    }

    fn check_in(&mut self, clients: impl IntoIterator<Item = u64>) {
        for number in clients {
            let key = Some(verifying_key(&identity(number)));
            let (client, _) = self.service.enrol(&self.job, &format!("c{number}"), SECRET, key).unwrap();
            assert_eq!(client, number, "clients are enrolled in their order");
            let actions = self.service.step(Event::CheckIn(client), self.now);
            self.apply(actions);
        }
    }

    /// The relay of a cohort in another process: from the records.
    fn relay(&self, round: u64) -> Relay {
        let Cohort { foundation, entries, .. } = &self.cohorts[&round];
        let signing = |round| self.service.signing_seed(round);
        Relay::restore(foundation, entries, signing, STAGE_MILLIS, self.now).unwrap()
    }

    /// One stage of a cohort without the clients that are `gone`: each of the others sends its message, through a process of its own.
    fn stage(&mut self, round: u64, gone: &[ClientId]) {
        let present: Vec<ClientId> =
            self.cohorts[&round].clients.keys().copied().filter(|client| !gone.contains(client)).collect();
        for client in present {
            let mut relay = self.relay(round);
            let cohort = self.cohorts.get_mut(&round).unwrap();
            let task = cohort.tasks[&client];
            let (state, received) = cohort.clients.get_mut(&client).unwrap();
            let answer = match received.checked_sub(1).and_then(|place| relay.message(client, place)) {
                _ if *received == 0 => state.advertise(),
                None => continue,
                Some(message) => match ServerMessage::decode(message).unwrap() {
                    shares @ ServerMessage::Shares(_) => state.mask(&shares, &update(&task), 1).unwrap(),
                    other => state.step(other).unwrap(),
                },
            };
            *received += 1;
            let entry = relay.receive(client, &answer.encode(), Some(0.5), self.now);
            cohort.entries.extend(entry.unwrap());
            let repeated = relay.receive(client, &answer.encode(), Some(0.5), self.now);
            assert_eq!(repeated, Ok(None), "a repeated message changes nothing");
        }
        let mut relay = self.relay(round);
        let clients = self.cohorts[&round].clients.iter().filter(|(client, _)| !gone.contains(client));
        let waits = |(client, (_, received)): (&ClientId, &(_, usize))| relay.message(*client, received - 1).is_none();
        let is_late = clients.into_iter().all(waits);
        if let Some(deadline) = relay.deadline_millis().filter(|_| is_late) {
            assert!(!gone.is_empty(), "a stage ends with its last message");
            cohort_entry(&mut self.cohorts, round, relay.end_late_stage(deadline));
        }
    }

    /// Records the end of a cohort.
    fn end(&mut self, round: u64) {
        let relay = self.relay(round);
        assert!(relay.end().is_some(), "the cohort has ended");
        let actions = self.service.end_aggregation("a", round, &relay.summed_updates(), self.now);
        self.apply(actions);
    }

    /// Aggregates the next batch.
    fn aggregate_next_cohort(&mut self) {
        let batch = self.batches.remove(0);
        let sum = self.relay(batch.round).sum().unwrap().clone();
        let base = batch.contributions[0].version;
        aggregate_sum(&self.job, &mut self.aggregator, &sum, base, batch.number, &[3; 32]).unwrap();
        let model = digest(&encode_values(self.aggregator.model()));
        let (_, actions) = self.service.aggregated(&batch, model, self.now);
        self.apply(actions);
    }

    /// The mean update of the members of a cohort without those that are gone.
    fn mean(&self, round: u64, gone: &[ClientId]) -> Vec<f64> {
        let members: Vec<&Task> =
            self.cohorts[&round].tasks.values().filter(|task| !gone.contains(&task.client)).collect();
        let sum = |place: usize| members.iter().map(|task| f64::from(update(task)[place])).sum::<f64>();
        (0..PARAMETERS).map(|place| sum(place) / members.len() as f64).collect()
    }

    fn assert_model(&self, expected: &[f64]) {
        for (found, expected) in self.aggregator.model().iter().zip(expected) {
            assert!((f64::from(*found) - expected).abs() < 1e-6, "{found}, expected {expected}");
        }
    }
}

fn cohort_entry(cohorts: &mut BTreeMap<u64, Cohort>, round: u64, entry: Option<Vec<u8>>) {
    cohorts.get_mut(&round).unwrap().entries.extend(entry);
}

const MASKED: &str =
    r#"{"strategy":{"kind":"FedBuff"},"secureAggregation":{},"clients":{"population":8,"perRound":4}}"#;

#[test]
fn overlapping_cohorts_are_exact_with_drop_outs_and_weigh_by_the_age_of_their_version() {
    for stage_of_drop_out in 0..4 {
        let mut run = Run::new(MASKED);
        run.check_in(0..8);
        assert_eq!(run.cohorts.keys().copied().collect::<Vec<_>>(), [1, 2], "two cohorts from version 0");
        let gone = [2];
        // The first is slower and loses a client; the second ends first.
        let gone_at = |stage: usize| if stage >= stage_of_drop_out { &gone[..] } else { &[] };
        for stage in 0..4 {
            if stage % 2 == 0 {
                run.stage(1, gone_at(stage / 2));
            }
            run.stage(2, &[]);
        }
        run.end(2);
        run.aggregate_next_cohort();
        let second = run.mean(2, &[]);
        run.assert_model(&second);
        // Members of the second are free again, and the next cohort trains from version 1 while the first is in progress.
        run.check_in(4..8);
        assert_eq!(run.cohorts[&3].tasks.values().map(|task| task.version).collect::<BTreeSet<_>>(), [1].into());
        for stage in 2..4 {
            run.stage(1, gone_at(stage));
        }
        run.end(1);
        run.aggregate_next_cohort();
        // A client that is gone before the unmasking is in the sum all the same.
        let first = run.mean(1, if stage_of_drop_out < 3 { &gone } else { &[] });
        let expected: Vec<f64> =
            second.iter().zip(&first).map(|(second, first)| second + first / 2.0_f64.sqrt()).collect();
        run.assert_model(&expected);
        assert_eq!(run.service.rounds().version(), 2);
    }
}

#[test]
fn cohort_below_its_threshold_aborts_without_a_request_for_shares_and_the_other_goes_on() {
    let mut run = Run::new(MASKED);
    run.check_in(0..8);
    for stage in 0..3 {
        run.stage(1, if stage == 2 { &[0, 1] } else { &[] });
        run.stage(2, &[]);
    }
    let relay = run.relay(1);
    assert_eq!(relay.end(), Some(&Err(SecureError::BelowThreshold)));
    assert!(relay.summed_updates().is_empty() && relay.sum().is_none());
    assert!((0..4).all(|client| relay.message(client, 2).is_none()), "no client was asked for shares");
    run.end(1);
    assert!(run.log.contains(&Action::Abort { round: 1, updates: 0 }));
    run.stage(2, &[]);
    run.end(2);
    run.aggregate_next_cohort();
    run.assert_model(&run.mean(2, &[]));
    assert_eq!(run.service.rounds().open_rounds(), BTreeSet::new());
    // A client of the aborted cohort is in no other until it checks in again.
    run.check_in(0..4);
    assert_eq!(run.cohorts[&3].tasks.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3]);
}

#[test]
fn over_selected_cohort_does_not_wait_for_its_slowest_clients() {
    let fields = MASKED.replace(r#""perRound":4"#, r#""perRound":6,"overSelection":20"#);
    let mut run = Run::new(&fields.replace(r#""secureAggregation":{}"#, r#""secureAggregation":{"dropOut":0.1}"#));
    run.check_in(0..8);
    let cohort = &run.cohorts[&1];
    assert_eq!((cohort.clients.len(), run.cohorts.len()), (8, 1), "six and a fifth, rounded up");
    let slow = [6, 7];
    let late = run.cohorts[&1].clients[&6].0.advertise().encode();
    run.stage(1, &slow);
    assert_eq!(run.relay(1).receive(6, &late, None, 0), Err(SecureError::NotInCohort(6)), "the keys of six are enough");
    for _ in 1..4 {
        run.stage(1, &slow);
    }
    assert_eq!(run.cohorts[&1].entries.len(), 24, "four messages of six clients, and no deadline");
    run.end(1);
    run.aggregate_next_cohort();
    run.assert_model(&run.mean(1, &slow));
}

#[test]
fn every_cohort_is_charged_even_if_it_aborts_and_its_noise_is_its_own() {
    let privacy = r#""privacy":{"epsilon":30,"delta":0.01,"noiseMultiplier":0.5,"clip":1},"strategy""#;
    let mut run = Run::new(&MASKED.replacen(r#""strategy""#, privacy, 1));
    run.check_in(0..8);
    let steps = |run: &Run| run.service.rounds().budget().unwrap().steps();
    assert_eq!(steps(&run), 2);
    run.stage(1, &[0, 1, 2]);
    run.end(1);
    assert!(run.log.contains(&Action::Abort { round: 1, updates: 0 }));
    assert_eq!(steps(&run), 2, "nothing is refunded");
    for _ in 0..4 {
        run.stage(2, &[]);
    }
    run.end(2);
    run.aggregate_next_cohort();
    let distance: f64 = run.aggregator.model().iter().map(|value| f64::from(*value)).map(|value| value * value).sum();
    // The encoding limits each value to the clip, 1; the noise has 0.5 / 4 per value.
    assert!(distance > 0.0 && run.aggregator.model().iter().all(|value| value.abs() < 2.0));
    let mean: Vec<f64> = run.mean(2, &[]).iter().map(|value| value / 8.0).collect();
    let differs =
        run.aggregator.model().iter().zip(&mean).filter(|(value, mean)| (f64::from(**value) - **mean).abs() > 1e-6);
    assert!(differs.count() >= PARAMETERS - 1, "noise is on every value");
    for round in 0..40 {
        run.check_in(0..8);
        let Some(open) = run.service.rounds().open_rounds().first().copied() else { break };
        (0..4).for_each(|_| run.stage(open, &[]));
        run.end(open);
        run.aggregate_next_cohort();
        assert!(round < 39, "the budget is never spent");
        if run.service.rounds().outcome().is_some() {
            break;
        }
    }
    assert!(matches!(run.service.rounds().outcome(), Some(Outcome::Exhausted { .. } | Outcome::Complete)));
    assert!(run.service.rounds().budget().unwrap().spent().epsilon <= 30.0);
}

#[test]
fn stage_takes_its_whole_time_and_the_next_one_begins_when_it_ends() {
    let mut run = Run::new(MASKED);
    run.check_in(0..8);
    let mut relay = run.relay(1);
    let task = run.cohorts[&1].tasks[&0].number;
    assert!(relay.has(0, task) && !relay.has(0, task + 1) && !relay.has(1, task));
    for client in 0..4 {
        let keys = run.cohorts[&1].clients[&client].0.advertise().encode();
        let entry = relay.receive(client, &keys, Some(f64::NAN), 400).unwrap().unwrap();
        let without = run.relay(1).receive(client, &keys, None, 400).unwrap().unwrap();
        assert_eq!(entry, without, "a loss that is no number is left out");
        assert_eq!(relay.end_late_stage(400), None);
    }
    assert_eq!(relay.deadline_millis(), Some(400 + STAGE_MILLIS));
    assert_eq!(relay.end_late_stage(399 + STAGE_MILLIS), None);
    assert!(relay.end_late_stage(400 + STAGE_MILLIS).is_some());
    assert_eq!(relay.end(), Some(&Err(SecureError::BelowThreshold)), "without shares");
    let late = ClientMessage::Input(Vec::new()).encode();
    assert_eq!(relay.receive(0, &late, None, 2_000), Ok(None), "a message after the end is no error");
}

#[test]
fn messages_of_one_cohort_are_refused_by_another() {
    let mut run = Run::new(MASKED);
    run.check_in(0..8);
    let keys = run.cohorts[&1].clients[&0].0.advertise();
    assert_eq!(run.relay(2).receive(0, &keys.encode(), None, 0), Err(SecureError::NotInCohort(0)));
    // The same client's keys in a later cohort are others.
    let ClientMessage::Keys(first) = keys else { panic!("keys") };
    (0..4).for_each(|_| run.stage(1, &[]));
    run.end(1);
    run.aggregate_next_cohort();
    run.check_in(0..4);
    let ClientMessage::Keys(second) = run.cohorts[&3].clients[&0].0.advertise() else { panic!("keys") };
    assert_ne!(first, second);
    let old = ClientMessage::Keys(first).encode();
    assert_eq!(run.relay(3).receive(0, &old, None, 0), Err(SecureError::InvalidSignature));
}

#[test]
fn cohorts_that_could_not_lose_a_client_or_do_not_fit_are_refused() {
    let job = |fields: &str| Job::new("a", &crate::job::tests::run(fields));
    let field = |fields: &str| job(fields).unwrap_err().field;
    let masked = |clients: &str| format!(r#"{{"secureAggregation":{{}},"strategy":{{"kind":"FedBuff"}},{clients}}}"#);
    let wide = masked(r#""clients":{"population":40,"perRound":10,"overSelection":30}"#);
    assert_eq!(field(&wide), "clients.overSelection", "0.8 of 10 of 13 are less than two thirds");
    let narrow = masked(r#""clients":{"population":40,"perRound":10,"concurrency":9}"#);
    assert_eq!(field(&narrow), "clients.concurrency");
    let many = masked(
        r#""model":{"layers":[{"name":"w","shape":[1048576]}]},"clients":{"population":40,"perRound":4,"concurrency":40}"#,
    );
    assert_eq!(field(&many), "clients.concurrency", "10 cohorts of 16 MiB");
    let masked = masked(r#""clients":{"population":40,"perRound":10,"overSelection":20}"#);
    let mode = job(&masked).unwrap().rounds.mode;
    assert_eq!(mode, Mode::Cohorts { size: 12, goal: 10, minimum: 5, cohorts: 2 });
    let sampled = r#"{"secureAggregation":{},"privacy":{"epsilon":9,"delta":0.01,"noiseMultiplier":1,"clip":1,"samplingRate":0.5}}"#;
    assert_eq!(field(sampled), "secureAggregation");
}
