//! What the state of the rounds shows.

use std::collections::BTreeSet;

use super::Rounds;
use crate::model::ClientId;
use crate::privacy::budget::Budget;
use crate::round::{Digest, Outcome, Task};

impl Rounds {
    /// Hash of the current model.
    #[must_use]
    pub const fn model(&self) -> Digest {
        self.model
    }

    /// The number of aggregations so far.
    #[must_use]
    pub const fn version(&self) -> u64 {
        self.version
    }

    /// How the run ended, if it did.
    #[must_use]
    pub const fn outcome(&self) -> Option<Outcome> {
        self.outcome
    }

    /// The budget with its charges.
    #[must_use]
    pub fn budget(&self) -> Option<&Budget> {
        self.privacy.as_ref().map(|(budget, _)| budget)
    }

    /// Number of clients with a lease.
    #[must_use]
    pub fn training(&self) -> usize {
        self.leases.tasks.len()
    }

    /// The number of rounds that were started.
    #[must_use]
    pub const fn round(&self) -> u64 {
        self.round
    }

    /// Number of updates that were accepted for the current round.
    #[must_use]
    pub const fn accepted_count(&self) -> usize {
        self.accepted.len()
    }

    /// Rounds and cohorts in progress, and those whose updates are not aggregated yet.
    #[must_use]
    pub fn open_rounds(&self) -> BTreeSet<u64> {
        let current = self.collection.as_ref().map(|_| self.round);
        let batch = self.aggregating.as_ref().map(|batch| batch.round);
        current.into_iter().chain(batch).chain(self.cohorts.numbers()).collect()
    }

    /// Number of available clients without a task.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.queue.len()
    }

    /// A task whose lease was not ended by an event, by its number.
    #[must_use]
    pub fn task(&self, number: u64) -> Option<&Task> {
        self.leases.tasks.get(&number)
    }

    /// Whether the last update of a client that was accepted is that for a task.
    #[must_use]
    pub fn has_receipt(&self, client: ClientId, task: u64) -> bool {
        self.receipts.get(&client).is_some_and(|(accepted, _)| *accepted == task)
    }

    /// The tasks in progress.
    pub fn tasks(&self) -> impl Iterator<Item = &Task> {
        self.leases.tasks.values()
    }

    /// Tasks whose accepted updates are kept: those of the current round and of the batch in progress.
    pub fn kept_tasks(&self) -> impl Iterator<Item = u64> {
        let batch = self.aggregating.iter().flat_map(|batch| &batch.contributions);
        self.accepted.iter().chain(batch).map(|contribution| contribution.task)
    }

    /// Versions of the model that clients may download: the current one, and those of tasks in progress.
    #[must_use]
    pub fn versions_in_use(&self) -> BTreeSet<u64> {
        self.leases.tasks.values().map(|task| task.version).chain([self.version]).collect()
    }

    /// The next time at which `Event::Tick` has an effect.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        let round = self.collection.as_ref().and_then(|collection| collection.deadline_millis);
        let lease = self.leases.tasks.first_key_value().map(|(_, task)| task.expires_millis);
        lease.into_iter().chain(round).chain(self.cohorts.next_deadline()).min()
    }
}
