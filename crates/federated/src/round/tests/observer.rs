//! A round state machine under observation: every action is checked against what was promised before.

use std::collections::{BTreeMap, BTreeSet};

use super::upload;
use crate::model::ClientId;
use crate::round::*;

/// The machine with what an observer of its actions knows.
pub(super) struct Observer {
    pub(super) rounds: Rounds,
    pub(super) tasks: BTreeMap<ClientId, Task>,
    pub(super) acknowledged: BTreeMap<u64, ClientId>,
    pub(super) used: BTreeSet<u64>,
    pub(super) batches: Vec<Batch>,
    pub(super) log: Vec<Action>,
}

impl Observer {
    pub(super) fn new(rounds: Rounds) -> Self {
        let (tasks, acknowledged, used) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        Self { rounds, tasks, acknowledged, used, batches: Vec::new(), log: Vec::new() }
    }

    pub(super) fn step(&mut self, event: Event, now: u64) -> Vec<Action> {
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

    pub(super) fn check_in(&mut self, client: ClientId, now: u64) -> Option<Task> {
        self.step(Event::CheckIn(client), now);
        self.tasks.get(&client).copied()
    }

    pub(super) fn send(&mut self, client: ClientId, now: u64) -> Vec<Action> {
        let task = self.tasks[&client].number;
        self.step(Event::Upload(upload(client, task)), now)
    }

    pub(super) fn check_in_all(&mut self, clients: impl IntoIterator<Item = ClientId>, now: u64) {
        for client in clients {
            self.check_in(client, now);
        }
    }

    pub(super) fn send_all(&mut self, clients: impl IntoIterator<Item = ClientId>, now: u64) {
        for client in clients {
            self.send(client, now);
        }
    }

    pub(super) fn commit(&mut self, now: u64) -> Vec<Action> {
        let batch = self.batches.last().unwrap().number;
        self.step(Event::Aggregated { batch, model: [9; 32] }, now)
    }

    /// The first task of a client.
    pub(super) fn log_task(&self, client: ClientId) -> u64 {
        let mut tasks = self.log.iter().filter_map(|action| match action {
            Action::Assign(task) if task.client == client => Some(task.number),
            _ => None,
        });
        tasks.next().expect("the client had a task")
    }

    pub(super) fn restart(&mut self) {
        let bytes = postcard::to_stdvec(&self.rounds).unwrap();
        let restored: Rounds = postcard::from_bytes(&bytes).unwrap();
        assert_eq!(restored, self.rounds);
        self.rounds = restored;
    }
}
