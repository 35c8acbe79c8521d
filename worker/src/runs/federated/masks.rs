//! Secure aggregation of the cohorts in progress: stores and relays the messages of the clients.
//!
//! A round is one cohort; with `FedBuff` there are several at a time. The messages of a cohort are rows of a record in the order in which they were
//! accepted. The next driver replays them and has the same state.

use super::blobs::{ContentName, Contents};
use super::{Interruption, done, failed, now_millis, patiently};
use engram_api::Code;
use engram_federated::error::InvalidInput;
use engram_federated::job::Job;
use engram_federated::round::{Refusal, Task};
use engram_federated::secure::relay::{Relay, SummedUpdate};
use engram_federated::secure::{SecureError, SecureSum};
use engram_federated::service::{Denial, Service};
use engram_proto::v1;
use std::collections::{BTreeMap, BTreeSet};
use tokio::sync::oneshot;

/// Each of the four stages of a cohort may take this part of its deadline; the rest is for the aggregation.
const STAGES: u64 = 5;
/// Longest wait for the next message, in milliseconds.
const MAX_WAIT_MS: u32 = 30_000;

type Reply = oneshot::Sender<Result<v1::ExchangeMasksResponse, Denial>>;

/// What a message of a client leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Exchange {
    /// An answer, now or later.
    Answered,
    /// The client has no further part in its cohort: its task has ended.
    TaskLost,
}

struct Cohort {
    relay: Relay,
    /// The end was taken by the caller.
    is_taken: bool,
    /// Rows that are not written yet, and writes so far.
    unwritten: Vec<Vec<u8>>,
    written: u64,
}

struct Wait {
    task: u64,
    received: usize,
    until_millis: u64,
    reply: Reply,
}

/// Secure aggregation of a run.
#[derive(Default)]
pub(super) struct Masks {
    /// By round.
    cohorts: BTreeMap<u64, Cohort>,
    waits: BTreeMap<u64, Wait>,
    refused: Vec<(Reply, Denial)>,
}

/// Whether a client cannot take part in its cohort any more: a stage ended without it, or it lost the keys that it had sent, as by a restart.
const fn is_lost(error: &SecureError) -> bool {
    matches!(error, SecureError::NotInCohort(_) | SecureError::WrongStage | SecureError::Conflict)
}

impl Cohort {
    const fn new(relay: Relay, written: u64) -> Self {
        Self { relay, is_taken: false, unwritten: Vec::new(), written }
    }

    /// Writes what was accepted.
    async fn write(&mut self, round: u64, contents: &Contents) -> Result<(), Interruption> {
        let name = ContentName::Masks(round);
        if self.written > 0 && self.unwritten.is_empty() {
            return Ok(());
        }
        let foundation = self.relay.foundation();
        if self.written == 0 {
            // Left from a driver that ended before the round was stored.
            patiently(|| contents.remove(std::slice::from_ref(&name))).await?;
            self.attach(name, contents, &foundation, None).await?;
        }
        for row in std::mem::take(&mut self.unwritten) {
            self.attach(name, contents, &foundation, Some(row)).await?;
        }
        Ok(())
    }

    async fn attach(
        &mut self,
        name: ContentName,
        contents: &Contents,
        foundation: &[u8],
        row: Option<Vec<u8>>,
    ) -> Result<(), Interruption> {
        let expected = self.written;
        let written = patiently(|| contents.attach(name, expected, foundation, row.clone())).await?;
        if !done(&written)? {
            return Err(Interruption::Superseded);
        }
        self.written += 1;
        Ok(())
    }
}

impl Masks {
    /// Reads the messages of the cohorts in progress, and of those that are not aggregated yet.
    pub(super) async fn open(job: &Job, contents: &Contents, service: &Service) -> Result<Self, Interruption> {
        let mut masks = Self::default();
        if job.secure.is_none() {
            return Ok(masks);
        }
        let stage_millis = job.rounds.deadline_millis / STAGES;
        for round in service.rounds().open_rounds() {
            let Some(stored) = patiently(|| contents.load(ContentName::Masks(round))).await? else { continue };
            let signing = |round| service.signing_seed(round);
            let relay = Relay::restore(&stored.attached, &stored.rows, signing, stage_millis, now_millis());
            let corrupt = |_| failed(Code::Corrupt, "the messages of secure aggregation cannot be read");
            masks.cohorts.insert(round, Cohort::new(relay.map_err(corrupt)?, stored.version));
        }
        Ok(masks)
    }

    /// Removes the cohorts of all other rounds.
    pub(super) fn retain(&mut self, rounds: &BTreeSet<u64>) {
        self.cohorts.retain(|round, _| rounds.contains(round));
    }

    /// The rounds whose messages are kept.
    pub(super) fn has(&self, round: u64) -> bool {
        self.cohorts.contains_key(&round)
    }

    /// Whether a task of a client belongs to a cohort.
    pub(super) fn knows(&self, client: u64, task: u64) -> bool {
        self.cohorts.values().any(|cohort| cohort.relay.has(client, task))
    }

    /// Whether the masked update of a task was received.
    pub(super) fn has_input(&self, client: u64, task: u64) -> bool {
        let mut cohorts = self.cohorts.values().filter(|cohort| cohort.relay.has(client, task));
        cohorts.any(|cohort| cohort.relay.has_input(client))
    }

    /// The unmasked sum of a round.
    pub(super) fn sum(&self, round: u64) -> Option<&SecureSum> {
        self.cohorts.get(&round)?.relay.sum()
    }

    pub(super) fn deadline_millis(&self) -> Option<u64> {
        let stages = self.cohorts.values().filter_map(|cohort| cohort.relay.deadline_millis());
        stages.chain(self.waits.values().map(|wait| wait.until_millis)).min()
    }

    /// Begins the aggregation of the rounds of new tasks. A round that has begun takes no further client.
    pub(super) fn begin(&mut self, job: &Job, service: &Service, tasks: &[Task], now: u64) {
        let mut rounds = BTreeMap::<u64, Vec<Task>>::new();
        for task in tasks.iter().filter(|task| !self.cohorts.contains_key(&task.round)) {
            rounds.entry(task.round).or_default().push(*task);
        }
        for (round, tasks) in rounds {
            match service.relay(job, &tasks, job.rounds.deadline_millis / STAGES, now) {
                Ok(relay) => drop(self.cohorts.insert(round, Cohort::new(relay, 0))),
                Err(error) => tracing::warn!(round, %error, "failed to begin secure aggregation"),
            }
        }
    }

    /// Returns the settings that the client of a task receives; nothing where updates are not masked.
    ///
    /// # Errors
    /// The client has nothing to do for the task: the round began without it, or has its update already.
    pub(super) fn settings_for(&self, job: &Job, task: Task) -> Result<Vec<u8>, ()> {
        if job.secure.is_none() {
            return Ok(Vec::new());
        }
        let cohort = self.cohorts.get(&task.round).filter(|cohort| cohort.relay.has(task.client, task.number));
        let cohort = cohort.filter(|cohort| !cohort.relay.has_input(task.client));
        cohort.map(|cohort| cohort.relay.settings().encode()).ok_or(())
    }

    /// Takes a message of a client, and lets it wait for the next one of the server.
    pub(super) fn exchange(
        &mut self,
        client: u64,
        request: &v1::ExchangeMasksRequest,
        reply: Reply,
        now: u64,
    ) -> Exchange {
        let task = request.task;
        let Some(cohort) = self.cohorts.values_mut().find(|cohort| cohort.relay.has(client, task)) else {
            self.refused.push((reply, Refusal::LeaseExpired.into()));
            return Exchange::Answered;
        };
        if !request.message.is_empty() {
            match cohort.relay.receive(client, &request.message, request.loss, now) {
                Ok(row) => cohort.unwritten.extend(row),
                Err(error) if is_lost(&error) => {
                    self.refused.push((reply, Refusal::LeaseExpired.into()));
                    return Exchange::TaskLost;
                }
                Err(error) => {
                    let refused = InvalidInput::new("message", error, "the message of the current stage").into();
                    self.refused.push((reply, refused));
                    return Exchange::Answered;
                }
            }
        }
        let until_millis = now.saturating_add(u64::from(request.wait_ms.min(MAX_WAIT_MS)));
        self.waits.insert(client, Wait { task, received: request.received as usize, until_millis, reply });
        Exchange::Answered
    }

    /// Ends stages at their deadlines.
    pub(super) fn end_late_stages(&mut self, now: u64) {
        for cohort in self.cohorts.values_mut() {
            cohort.unwritten.extend(cohort.relay.end_late_stage(now));
        }
    }

    /// Returns the rounds whose aggregation has ended, with the updates in the sum; each once.
    pub(super) fn take_ended(&mut self) -> Vec<(u64, Vec<SummedUpdate>)> {
        let mut ended = Vec::new();
        for (round, cohort) in &mut self.cohorts {
            if let Some(end) = cohort.relay.end().filter(|_| !cohort.is_taken) {
                if let Err(error) = end {
                    tracing::warn!(round, %error, "secure aggregation ended without a sum");
                }
                cohort.is_taken = true;
                ended.push((*round, cohort.relay.summed_updates()));
            }
        }
        ended
    }

    /// Writes what was accepted.
    pub(super) async fn write_messages(&mut self, contents: &Contents) -> Result<(), Interruption> {
        for (round, cohort) in &mut self.cohorts {
            cohort.write(*round, contents).await?;
        }
        Ok(())
    }

    /// Answers the clients for which there is something, and those that waited long enough.
    pub(super) fn send_messages(&mut self) {
        for (reply, denial) in self.refused.drain(..) {
            drop(reply.send(Err(denial)));
        }
        let now = now_millis();
        for (client, wait) in std::mem::take(&mut self.waits) {
            match self.answer(client, &wait, now) {
                Some(answer) => drop(wait.reply.send(answer)),
                None => drop(self.waits.insert(client, wait)),
            }
        }
    }

    fn answer(&self, client: u64, wait: &Wait, now: u64) -> Option<Result<v1::ExchangeMasksResponse, Denial>> {
        let cohort = self.cohorts.values().find(|cohort| cohort.relay.has(client, wait.task));
        let Some(Cohort { relay, .. }) = cohort else { return Some(Err(Refusal::LeaseExpired.into())) };
        if let Some(message) = relay.message(client, wait.received) {
            let message = message.to_vec().into();
            return Some(Ok(v1::ExchangeMasksResponse { message, ..v1::ExchangeMasksResponse::default() }));
        }
        if relay.end().is_some() {
            let is_counted = relay.sum().is_some_and(|sum| sum.clients.contains(&client));
            let counted = Ok(v1::ExchangeMasksResponse { complete: true, ..v1::ExchangeMasksResponse::default() });
            return Some(if is_counted { counted } else { Err(Refusal::LeaseExpired.into()) });
        }
        (wait.until_millis <= now).then(|| Ok(v1::ExchangeMasksResponse::default()))
    }
}
