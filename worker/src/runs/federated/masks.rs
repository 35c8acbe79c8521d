//! Secure aggregation of the current round: relays the messages of the clients, and computes their sum.
//!
//! The messages are rows of a record in the order in which they were accepted. The next driver replays them and has the same state.

use super::blobs::{ContentName, Contents};
use super::{Interruption, done, failed, now_millis, patiently};
use engram_api::Code;
use engram_federated::error::InvalidInput;
use engram_federated::job::Job;
use engram_federated::round::{Digest, Refusal, Task};
use engram_federated::secure::{
    ClientMessage, CohortSettings, SecureAction, SecureError, SecureEvent, SecureServer, SecureSum,
};
use engram_federated::service::{Denial, Service, digest};
use engram_proto::v1;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use tokio::sync::oneshot;

/// Each of the four stages of a round may take this part of its deadline; the rest is for the aggregation.
const STAGES: u64 = 5;
/// Longest wait for the next message, in milliseconds.
const MAX_WAIT_MS: u32 = 30_000;

/// Row of the record.
#[derive(Serialize, Deserialize)]
enum Entry {
    Message {
        client: u64,
        message: Vec<u8>,
        loss: Option<f64>,
    },
    /// The stage ended with the clients that had answered.
    Deadline,
}

/// Client, task, hash of the masked update, and loss of each update in a sum.
pub(super) type Survivors = Vec<(u64, u64, Digest, Option<f64>)>;
type Reply = oneshot::Sender<Result<v1::ExchangeMasksResponse, Denial>>;

struct Cohort {
    settings: CohortSettings,
    tasks: BTreeMap<u64, u64>,
    server: SecureServer,
    outbox: BTreeMap<u64, Vec<Vec<u8>>>,
    inputs: BTreeMap<u64, (Digest, Option<f64>)>,
    stage_millis: u64,
    stage_end_millis: u64,
    sum: Option<SecureSum>,
    is_ended: bool,
    /// Accepted messages of all stages, by client and hash.
    accepted: BTreeSet<(u64, Digest)>,
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
    cohort: Option<Cohort>,
    /// Set once when the aggregation has ended.
    end: Option<Survivors>,
    waits: BTreeMap<u64, Wait>,
    refused: Vec<(Reply, Denial)>,
}

impl Cohort {
    fn new(
        settings: CohortSettings,
        tasks: BTreeMap<u64, u64>,
        signing: [u8; 32],
        stage_millis: u64,
    ) -> Result<Self, SecureError> {
        Ok(Self {
            server: SecureServer::new(settings.clone(), signing)?,
            settings,
            tasks,
            outbox: BTreeMap::new(),
            inputs: BTreeMap::new(),
            stage_millis,
            stage_end_millis: now_millis().saturating_add(stage_millis),
            sum: None,
            is_ended: false,
            accepted: BTreeSet::new(),
            unwritten: Vec::new(),
            written: 0,
        })
    }

    fn attached(&self) -> Vec<u8> {
        postcard::to_stdvec(&(&self.settings, &self.tasks)).expect("settings have no type that the encoding lacks")
    }

    /// Applies an entry; a refused message changes nothing.
    fn apply(&mut self, entry: &Entry) -> Result<(), SecureError> {
        let event = match entry {
            Entry::Message { client, message, loss } => {
                let decoded = ClientMessage::decode(message)?;
                if matches!(decoded, ClientMessage::Input(_)) {
                    self.inputs.entry(*client).or_insert_with(|| (digest(message), *loss));
                }
                SecureEvent::Message(*client, decoded)
            }
            Entry::Deadline => SecureEvent::Deadline,
        };
        let actions = self.server.step(event);
        if let Entry::Message { client, message, .. } = entry
            && !actions.iter().any(|action| matches!(action, SecureAction::Refuse(..)))
        {
            self.accepted.insert((*client, digest(message)));
        }
        for action in actions {
            match action {
                SecureAction::Refuse(_, error) => return Err(error),
                SecureAction::Send(client, message) => {
                    self.outbox.entry(client).or_default().push(message.encode());
                    self.stage_end_millis = now_millis().saturating_add(self.stage_millis);
                }
                SecureAction::Complete(sum) => (self.sum, self.is_ended) = (Some(sum), true),
                SecureAction::Abort(error) => {
                    tracing::warn!(round = self.settings.round, %error, "secure aggregation ended without a sum");
                    self.is_ended = true;
                }
            }
        }
        Ok(())
    }

    fn survivors(&self) -> Survivors {
        let clients = self.sum.iter().flat_map(|sum| &sum.clients);
        let survivor = |client: &u64| {
            let (content, loss) = self.inputs.get(client)?;
            Some((*client, *self.tasks.get(client)?, *content, *loss))
        };
        clients.filter_map(survivor).collect()
    }
}

impl Masks {
    /// Reads the messages of the round in progress.
    pub(super) async fn open(job: &Job, contents: &Contents, service: &Service) -> Result<Self, Interruption> {
        let mut masks = Self::default();
        if job.secure.is_none() {
            return Ok(masks);
        }
        let round = service.rounds().round();
        let Some(stored) = patiently(|| contents.load(ContentName::Masks(round))).await? else { return Ok(masks) };
        let corrupt = || failed(Code::Corrupt, "the messages of secure aggregation cannot be read");
        let (settings, tasks) = postcard::from_bytes(&stored.attached).map_err(|_| corrupt())?;
        let stage_millis = job.rounds.deadline_millis / STAGES;
        let mut cohort =
            Cohort::new(settings, tasks, service.signing_seed(round), stage_millis).map_err(|_| corrupt())?;
        for row in &stored.rows {
            let entry = postcard::from_bytes(row).map_err(|_| corrupt())?;
            cohort.apply(&entry).map_err(|_| corrupt())?;
        }
        cohort.written = stored.version;
        if cohort.is_ended {
            masks.end = Some(cohort.survivors());
        }
        masks.cohort = Some(cohort);
        Ok(masks)
    }

    /// The round of the messages.
    pub(super) fn round(&self) -> Option<u64> {
        self.cohort.as_ref().map(|cohort| cohort.settings.round)
    }

    /// Whether a task of a client belongs to the round of the messages.
    pub(super) fn knows(&self, client: u64, task: u64) -> bool {
        self.cohort.as_ref().is_some_and(|cohort| cohort.tasks.get(&client) == Some(&task))
    }

    /// The unmasked sum.
    pub(super) fn sum(&self) -> Option<&SecureSum> {
        self.cohort.as_ref()?.sum.as_ref()
    }

    pub(super) fn deadline_millis(&self) -> Option<u64> {
        let stage = self.cohort.as_ref().filter(|cohort| !cohort.is_ended).map(|cohort| cohort.stage_end_millis);
        stage.into_iter().chain(self.waits.values().map(|wait| wait.until_millis)).min()
    }

    /// Begins the aggregation of a round with the clients of its first tasks.
    pub(super) fn begin(&mut self, job: &Job, service: &Service, tasks: &[Task], _now: u64) {
        let round = service.rounds().round();
        let first: Vec<Task> = tasks.iter().filter(|task| task.round == round).copied().collect();
        if first.is_empty() || self.round() == Some(round) {
            return;
        }
        let members = first.iter().map(|task| (task.client, task.number)).collect();
        let created = service.cohort(job, &first).map_err(SecureError::from).and_then(|settings| {
            Cohort::new(settings, members, service.signing_seed(round), job.rounds.deadline_millis / STAGES)
        });
        match created {
            Ok(cohort) => self.cohort = Some(cohort),
            Err(error) => tracing::warn!(round, %error, "failed to begin secure aggregation"),
        }
    }

    /// Returns the settings that the client of a task receives; nothing where updates are not masked.
    pub(super) fn settings_for(&self, job: &Job, task: Task) -> Result<Vec<u8>, ()> {
        if job.secure.is_none() {
            return Ok(Vec::new());
        }
        let cohort = self.cohort.as_ref().filter(|cohort| cohort.tasks.get(&task.client) == Some(&task.number));
        cohort.map(|cohort| cohort.settings.encode()).ok_or(())
    }

    /// Takes a message of a client, and lets it wait for the next one of the server.
    pub(super) fn exchange(&mut self, client: u64, request: &v1::ExchangeMasksRequest, reply: Reply, now: u64) {
        let task = request.task;
        let Some(cohort) = self.cohort.as_mut().filter(|cohort| cohort.tasks.get(&client) == Some(&task)) else {
            return self.refused.push((reply, Refusal::LeaseExpired.into()));
        };
        if !request.message.is_empty() && !cohort.is_ended {
            let entry = Entry::Message {
                client,
                message: request.message.to_vec(),
                loss: request.loss.filter(|loss| loss.is_finite()),
            };
            let is_known = cohort.accepted.contains(&(client, digest(&request.message)));
            if !is_known {
                if let Err(error) = cohort.apply(&entry) {
                    let refused = InvalidInput::new("message", error, "the message of the current stage").into();
                    return self.refused.push((reply, refused));
                }
                cohort
                    .unwritten
                    .push(postcard::to_stdvec(&entry).expect("entries have no type that the encoding lacks"));
            }
        }
        if cohort.is_ended && self.end.is_none() {
            self.end = Some(cohort.survivors());
        }
        let until_millis = now.saturating_add(u64::from(request.wait_ms.min(MAX_WAIT_MS)));
        self.waits.insert(client, Wait { task, received: request.received as usize, until_millis, reply });
    }

    /// Ends a stage at its deadline.
    pub(super) fn end_late_stage(&mut self, now: u64) {
        let Some(cohort) = self.cohort.as_mut().filter(|cohort| !cohort.is_ended) else { return };
        if cohort.stage_end_millis > now {
            return;
        }
        let entry = Entry::Deadline;
        // A deadline is never refused.
        let _ = cohort.apply(&entry);
        cohort.stage_end_millis = cohort.stage_end_millis.max(now.saturating_add(cohort.stage_millis));
        cohort.unwritten.push(postcard::to_stdvec(&entry).expect("entries have no type that the encoding lacks"));
        if cohort.is_ended {
            self.end = Some(cohort.survivors());
        }
    }

    /// Returns the updates in the sum, once, when the aggregation has ended.
    pub(super) const fn take_end(&mut self) -> Option<Survivors> {
        self.end.take()
    }

    /// Writes what was accepted.
    pub(super) async fn write_messages(&mut self, contents: &Contents) -> Result<(), Interruption> {
        let Some(cohort) = &mut self.cohort else { return Ok(()) };
        let name = ContentName::Masks(cohort.settings.round);
        let attached = cohort.attached();
        if cohort.written == 0 {
            // Left from a driver that ended before the round was stored.
            patiently(|| contents.remove(std::slice::from_ref(&name))).await?;
            let written = patiently(|| contents.attach(name, 0, &attached, None)).await?;
            if !done(&written)? {
                return Err(Interruption::Superseded);
            }
            cohort.written = 1;
        }
        for row in std::mem::take(&mut cohort.unwritten) {
            let expected = cohort.written;
            let written = patiently(|| contents.attach(name, expected, &attached, Some(row.clone()))).await?;
            if !done(&written)? {
                return Err(Interruption::Superseded);
            }
            cohort.written += 1;
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
        let cohort = self.cohort.as_ref().filter(|cohort| cohort.tasks.get(&client) == Some(&wait.task));
        let Some(cohort) = cohort else { return Some(Err(Refusal::LeaseExpired.into())) };
        if let Some(message) = cohort.outbox.get(&client).and_then(|messages| messages.get(wait.received)) {
            let message = message.clone().into();
            return Some(Ok(v1::ExchangeMasksResponse { message, ..v1::ExchangeMasksResponse::default() }));
        }
        if cohort.is_ended {
            let is_counted = cohort.sum.as_ref().is_some_and(|sum| sum.clients.contains(&client));
            let counted = Ok(v1::ExchangeMasksResponse { complete: true, ..v1::ExchangeMasksResponse::default() });
            return Some(if is_counted { counted } else { Err(Refusal::LeaseExpired.into()) });
        }
        (wait.until_millis <= now).then(|| Ok(v1::ExchangeMasksResponse::default()))
    }
}
