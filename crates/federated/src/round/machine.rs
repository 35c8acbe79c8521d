//! Transitions of the round state machine.

mod cohorts;
mod view;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use self::cohorts::Cohorts;
use super::{Action, Batch, Contribution, Digest, Event, Mode, Outcome, Refusal, RoundSettings, Task, UploadedUpdate};
use crate::error::{InvalidInput, require};
use crate::model::ClientId;
use crate::privacy::Mechanism;
use crate::privacy::budget::{Budget, BudgetExhausted};
use crate::random::Seed;
use crate::selection::{over_selected, poisson, uniform};
use crate::strategy::MAX_STALENESS;

/// The current round, or the current buffer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Collection {
    /// End of the round; `None` in the buffered mode.
    deadline_millis: Option<u64>,
    /// The chosen clients, with Poisson participation.
    chosen: Option<BTreeSet<ClientId>>,
}

/// Available clients in the order of their last check-in, which is also the order in which they expire.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Waiting {
    by_client: BTreeMap<ClientId, u64>,
    queue: BTreeMap<u64, (ClientId, u64)>,
    next: u64,
}

impl Waiting {
    fn insert(&mut self, client: ClientId, until_millis: u64) {
        self.remove(client);
        self.by_client.insert(client, self.next);
        self.queue.insert(self.next, (client, until_millis));
        self.next += 1;
    }

    fn remove(&mut self, client: ClientId) -> bool {
        let place = self.by_client.remove(&client);
        place.is_some_and(|place| self.queue.remove(&place).is_some())
    }

    fn expire(&mut self, now_millis: u64) {
        while let Some(first) = self.queue.first_entry().filter(|first| first.get().1 <= now_millis) {
            let (client, _) = first.remove();
            self.by_client.remove(&client);
        }
    }
}

/// Tasks in progress by number, which is also the order in which their leases end.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Leases {
    by_client: BTreeMap<ClientId, u64>,
    tasks: BTreeMap<u64, Task>,
}

impl Leases {
    fn insert(&mut self, task: Task) {
        self.by_client.insert(task.client, task.number);
        self.tasks.insert(task.number, task);
    }

    /// The task of a client whose lease has not ended.
    fn live(&self, client: ClientId, now_millis: u64) -> Option<&Task> {
        let task = self.tasks.get(self.by_client.get(&client)?)?;
        (task.expires_millis > now_millis).then_some(task)
    }

    fn remove(&mut self, client: ClientId) {
        if let Some(number) = self.by_client.remove(&client) {
            self.tasks.remove(&number);
        }
    }

    /// Removes the lease that ends first, if it ended.
    fn expire_first(&mut self, now_millis: u64) -> Option<Task> {
        let first = self.tasks.first_entry().filter(|first| first.get().expires_millis <= now_millis)?;
        let task = first.remove();
        self.by_client.remove(&task.client);
        Some(task)
    }
}

/// The state machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rounds {
    settings: RoundSettings,
    seed: Seed,
    enrolled: BTreeSet<ClientId>,
    privacy: Option<(Budget, Mechanism)>,
    /// The latest time of an event: time does not run backwards after a failover.
    now_millis: u64,
    version: u64,
    model: Digest,
    round: u64,
    aborts: u32,
    next_task: u64,
    next_batch: u64,
    waiting: Waiting,
    leases: Leases,
    collection: Option<Collection>,
    /// Accepted for the current round, in the order of arrival; each client at most once.
    pub(super) accepted: Vec<Contribution>,
    pub(super) aggregating: Option<Batch>,
    pub(super) cohorts: Cohorts,
    /// The last task of each client whose update was accepted, so that a repeated upload is acknowledged again. A client has one task at a time, and
    /// an older one is refused, never counted again: the state does not grow with the age of the run.
    receipts: BTreeMap<ClientId, (u64, Digest)>,
    outcome: Option<Outcome>,
}

impl Rounds {
    /// Creates the rounds of a run over its enrolled clients, at version 0 of the model.
    ///
    /// # Errors
    /// When a setting is out of its range, or the mechanism's sampling rate is not that of the mode.
    pub fn new(
        settings: RoundSettings,
        seed: Seed,
        enrolled: BTreeSet<ClientId>,
        privacy: Option<(Budget, Mechanism)>,
        model: Digest,
    ) -> Result<Self, InvalidInput> {
        settings.validate()?;
        require(!enrolled.is_empty(), "enrolled", 0, "at least 1 client")?;
        if let Some((_, mechanism)) = &privacy {
            mechanism.validate()?;
            let rate = if let Mode::Poisson { rate } = settings.mode { rate } else { 1.0 };
            let allowed = format!("{rate}, the probability that a client takes part");
            require(mechanism.sampling_rate == rate, "samplingRate", mechanism.sampling_rate, &allowed)?;
        }
        Ok(Self {
            settings,
            seed,
            enrolled,
            privacy,
            now_millis: 0,
            version: 0,
            model,
            round: 0,
            aborts: 0,
            next_task: 0,
            next_batch: 0,
            waiting: Waiting::default(),
            leases: Leases::default(),
            collection: None,
            accepted: Vec::new(),
            aggregating: None,
            cohorts: Cohorts::default(),
            receipts: BTreeMap::new(),
            outcome: None,
        })
    }

    /// Returns the actions that may have been lost with the process: call it once after the state was restored.
    #[must_use]
    pub fn resume(&self) -> Vec<Action> {
        self.aggregating.clone().map(Action::Aggregate).into_iter().collect()
    }

    /// Applies an event at `now_millis` of the server's clock.
    pub fn step(&mut self, event: Event, now_millis: u64) -> Vec<Action> {
        let mut actions = Vec::new();
        self.now_millis = self.now_millis.max(now_millis);
        let now_millis = self.now_millis;
        match event {
            Event::CheckIn(client) => self.check_in(client, now_millis, &mut actions),
            Event::Upload(update) => {
                let (client, result) = (update.client, self.accept(&update, now_millis));
                actions.push(result.unwrap_or_else(|refusal| Action::Refuse(client, refusal)));
            }
            Event::GiveUp { client, task } => {
                if self.leases.by_client.get(&client) == Some(&task) {
                    self.leases.remove(client);
                    actions.push(Action::Revoke { client, task });
                }
            }
            Event::Leave(client) => {
                self.waiting.remove(client);
                self.enrolled.remove(&client);
                if let Some(chosen) = self.collection.as_mut().and_then(|collection| collection.chosen.as_mut()) {
                    chosen.remove(&client);
                }
                if let Some(task) = self.leases.by_client.get(&client).copied() {
                    self.leases.remove(client);
                    actions.push(Action::Revoke { client, task });
                }
            }
            Event::Aggregated { batch, model } => self.commit(batch, model, &mut actions),
            Event::Tick => {}
            Event::CloseRound(round) => self.close_round(round, now_millis),
            Event::Stop => self.end(Outcome::Stopped, &mut actions),
        }
        self.advance(now_millis, &mut actions);
        actions
    }

    fn check_in(&mut self, client: ClientId, now: u64, actions: &mut Vec<Action>) {
        if let Some(outcome_refusal) = self.refuse_client(client) {
            actions.push(Action::Refuse(client, outcome_refusal));
        } else if let Some(task) = self.leases.live(client, now) {
            actions.push(Action::Assign(*task));
        } else if self.waiting.queue.len() >= self.settings.max_waiting && !self.waiting.by_client.contains_key(&client)
        {
            actions.push(Action::Refuse(client, Refusal::Busy));
        } else {
            self.waiting.insert(client, now.saturating_add(self.settings.check_in_millis));
            actions.push(Action::Wait(client));
        }
    }

    fn refuse_client(&self, client: ClientId) -> Option<Refusal> {
        if !self.enrolled.contains(&client) { Some(Refusal::NotEnrolled) } else { self.outcome.map(|_| Refusal::Ended) }
    }

    fn accept(&mut self, update: &UploadedUpdate, now: u64) -> Result<Action, Refusal> {
        let UploadedUpdate { client, task, digest, .. } = *update;
        if update.run != self.settings.run {
            return Err(Refusal::OtherRun);
        }
        match self.receipts.get(&client).filter(|(accepted, _)| *accepted == task) {
            Some((_, accepted)) if *accepted != digest => return Err(Refusal::Conflict),
            Some(_) => return Ok(Action::Acknowledge { client, task, repeated: true }),
            None => {}
        }
        let lease = self.leases.live(client, now).filter(|lease| lease.number == task).copied();
        if lease.is_none() && self.receipts.values().any(|(accepted, _)| *accepted == task) {
            return Err(Refusal::OtherClient);
        }
        if let Some(refusal) = self.refuse_client(client) {
            return Err(refusal);
        }
        let Task { version, round, .. } = lease.ok_or(Refusal::LeaseExpired)?;
        self.leases.remove(client);
        let staleness = self.version - version;
        if staleness > MAX_STALENESS {
            return Err(Refusal::Stale { staleness });
        }
        let contribution = Contribution { client, task, version, digest };
        self.cohorts.accepted_of(round).unwrap_or(&mut self.accepted).push(contribution);
        self.receipts.insert(client, (task, digest));
        Ok(Action::Acknowledge { client, task, repeated: false })
    }

    fn commit(&mut self, batch: u64, model: Digest, actions: &mut Vec<Action>) {
        // A repeated report names an older batch.
        if self.aggregating.as_ref().is_none_or(|current| current.number != batch) {
            return;
        }
        self.aggregating = None;
        self.version += 1;
        self.model = model;
        self.aborts = 0;
        if self.version >= self.settings.versions && self.outcome.is_none() {
            self.end(Outcome::Complete, actions);
        } else if self.is_buffered() && self.collection.is_some() {
            // The next buffer is charged before it is released.
            self.collection = None;
        }
    }

    fn close_round(&mut self, round: u64, now: u64) {
        let current = self.collection.as_mut().filter(|_| round == self.round);
        let deadline = current.and_then(|collection| collection.deadline_millis.as_mut());
        if let Some(deadline) = deadline.or_else(|| self.cohorts.deadline_of(round)) {
            *deadline = now;
        }
    }

    const fn is_buffered(&self) -> bool {
        matches!(self.settings.mode, Mode::Buffered { .. })
    }

    /// Everything that follows from the state and the time.
    fn advance(&mut self, now: u64, actions: &mut Vec<Action>) {
        self.waiting.expire(now);
        self.expire_leases(now, actions);
        if self.outcome.is_some() {
            return;
        }
        if matches!(self.settings.mode, Mode::Cohorts { .. }) {
            return self.advance_cohorts(now, actions);
        }
        self.close(now, actions);
        if self.collection.is_none() && (self.aggregating.is_none() || self.is_buffered()) {
            self.open(now, actions);
        }
        if self.collection.is_some() {
            self.fill(now, actions);
            // Poisson participation may choose no client.
            self.close(now, actions);
        }
    }

    fn expire_leases(&mut self, now: u64, actions: &mut Vec<Action>) {
        while let Some(task) = self.leases.expire_first(now) {
            actions.push(Action::Revoke { client: task.client, task: task.number });
        }
    }

    /// Ends the current round when it has its updates or is over.
    fn close(&mut self, now: u64, actions: &mut Vec<Action>) {
        let Some(collection) = &self.collection else { return };
        let late = collection.deadline_millis.is_some_and(|deadline| deadline <= now);
        let count = self.accepted.len();
        match self.settings.mode {
            Mode::Synchronous { target, minimum, .. } => {
                if count >= target as usize || late && count >= minimum as usize {
                    self.aggregate(count, actions);
                } else if late {
                    self.abort(actions);
                }
            }
            Mode::Poisson { .. } => {
                if late || collection.chosen.as_ref().is_some_and(|chosen| chosen.len() == count) {
                    self.aggregate(count, actions);
                }
            }
            Mode::Buffered { buffer, .. } => {
                self.discard_stale(actions);
                if self.accepted.len() >= buffer as usize && self.aggregating.is_none() {
                    self.aggregate(buffer as usize, actions);
                }
            }
            Mode::Cohorts { .. } => {}
        }
    }

    fn discard_stale(&mut self, actions: &mut Vec<Action>) {
        let version = self.version;
        let stale = self.accepted.extract_if(.., |accepted| version - accepted.version > MAX_STALENESS);
        actions.extend(stale.map(Action::Discard));
    }

    fn aggregate(&mut self, count: usize, actions: &mut Vec<Action>) {
        let contributions: Vec<Contribution> = self.accepted.drain(..count).collect();
        if !self.is_buffered() {
            self.collection = None;
            self.revoke_all(actions);
        }
        self.begin_batch(self.round, contributions, actions);
    }

    fn begin_batch(&mut self, round: u64, contributions: Vec<Contribution>, actions: &mut Vec<Action>) {
        let batch = Batch { number: self.next_batch, round, version: self.version, contributions };
        self.next_batch += 1;
        self.aggregating = Some(batch.clone());
        actions.push(Action::Aggregate(batch));
    }

    fn abort(&mut self, actions: &mut Vec<Action>) {
        actions.push(Action::Abort { round: self.round, updates: self.accepted.len() as u32 });
        actions.extend(self.accepted.drain(..).map(Action::Discard));
        self.collection = None;
        self.revoke_all(actions);
        self.aborts += 1;
        if self.aborts >= self.settings.max_aborts {
            self.end(Outcome::TooManyAborts, actions);
        }
    }

    fn revoke_all(&mut self, actions: &mut Vec<Action>) {
        let leases = std::mem::take(&mut self.leases);
        actions
            .extend(leases.tasks.into_values().map(|task| Action::Revoke { client: task.client, task: task.number }));
    }

    fn end(&mut self, outcome: Outcome, actions: &mut Vec<Action>) {
        if self.outcome.is_some() {
            return;
        }
        self.outcome = Some(outcome);
        self.collection = None;
        self.waiting = Waiting::default();
        actions.extend(self.accepted.drain(..).chain(self.cohorts.drain()).map(Action::Discard));
        self.revoke_all(actions);
        actions.push(Action::End(outcome));
    }

    /// Starts the next round when enough clients are available, after charging the budget.
    fn open(&mut self, now: u64, actions: &mut Vec<Action>) {
        if self.outcome.is_some() {
            return;
        }
        let least = if let Mode::Synchronous { target, .. } = self.settings.mode { target as usize } else { 1 };
        // Buffered: clients that train already belong to the next buffer.
        let running = if self.is_buffered() { self.leases.tasks.len() + self.accepted.len() } else { 0 };
        if self.waiting.queue.len() + running < least {
            return;
        }
        if let Err(exhausted) = self.charge() {
            return self.end(exhausted.into(), actions);
        }
        self.round += 1;
        let chosen = match self.settings.mode {
            Mode::Poisson { rate } => Some(poisson(&self.enrolled, rate, &self.seed, self.round)),
            _ => None,
        };
        let deadline_millis = (!self.is_buffered()).then(|| now.saturating_add(self.settings.deadline_millis));
        self.collection = Some(Collection { deadline_millis, chosen });
        if let Mode::Synchronous { target, over_selection_percent, .. } = self.settings.mode {
            let available: BTreeSet<ClientId> = self.waiting.by_client.keys().copied().collect();
            let count = over_selected(target, over_selection_percent);
            for client in uniform(&available, count, &self.seed, self.round) {
                self.assign(client, now, actions);
            }
        }
    }

    /// Charges the budget with a round.
    fn charge(&mut self) -> Result<(), BudgetExhausted> {
        self.privacy.as_mut().map_or(Ok(()), |(budget, mechanism)| budget.charge(*mechanism))
    }

    /// Assigns tasks to available clients as far as the mode allows.
    fn fill(&mut self, now: u64, actions: &mut Vec<Action>) {
        let places = match self.settings.mode {
            // A client that the masks of the others do not cover cannot take part.
            Mode::Synchronous { .. } if self.settings.is_masked => 0,
            Mode::Synchronous { target, over_selection_percent, .. } => over_selected(target, over_selection_percent)
                .saturating_sub(self.leases.tasks.len() + self.accepted.len()),
            Mode::Poisson { .. } => usize::MAX,
            Mode::Cohorts { .. } => 0,
            Mode::Buffered { concurrency, buffer } => {
                let bound = concurrency as usize + buffer as usize;
                let free = (concurrency as usize).saturating_sub(self.leases.tasks.len());
                free.min(bound.saturating_sub(self.leases.tasks.len() + self.accepted.len()))
            }
        };
        if places == 0 || self.waiting.queue.is_empty() {
            return;
        }
        let chosen = self.collection.as_ref().and_then(|collection| collection.chosen.as_ref());
        let taken: BTreeSet<ClientId> = self.accepted.iter().map(|accepted| accepted.client).collect();
        let free = |client: &ClientId| !taken.contains(client) && chosen.is_none_or(|chosen| chosen.contains(client));
        let waiting = self.waiting.queue.values().map(|(client, _)| *client);
        let clients: Vec<ClientId> = waiting.filter(free).take(places).collect();
        for client in clients {
            self.assign(client, now, actions);
        }
    }

    fn assign(&mut self, client: ClientId, now: u64, actions: &mut Vec<Action>) {
        self.waiting.remove(client);
        let end = self.collection.as_ref().and_then(|collection| collection.deadline_millis).unwrap_or(u64::MAX);
        let expires_millis = now.saturating_add(self.settings.lease_millis).min(end);
        let task = Task {
            client,
            number: self.next_task,
            round: self.round,
            version: self.version,
            model: self.model,
            expires_millis,
        };
        self.next_task += 1;
        self.leases.insert(task);
        actions.push(Action::Assign(task));
    }
}
