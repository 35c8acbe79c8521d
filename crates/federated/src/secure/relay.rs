//! A cohort as the server relays it: messages in, messages out, and entries to store.
//!
//! The state follows from the entries in the order in which they were accepted, so the next process that replays them has the same one.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{ClientMessage, CohortSettings, SecureAction, SecureError, SecureEvent, SecureServer, SecureSum};
use crate::content::digest;
use crate::model::ClientId;
use crate::random::Seed;
use crate::round::Digest;

/// What happened to a cohort.
#[derive(Serialize, Deserialize)]
enum Entry {
    Message {
        client: ClientId,
        message: Vec<u8>,
        loss: Option<f64>,
    },
    /// The stage ended with the clients that had answered.
    Deadline,
}

impl Entry {
    fn encode(&self) -> Vec<u8> {
        postcard::to_stdvec(self).expect("entries have no type that the encoding lacks")
    }
}

/// What all entries of a cohort refer to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Foundation {
    settings: CohortSettings,
    tasks: BTreeMap<ClientId, u64>,
    goal: usize,
}

/// An update in a sum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SummedUpdate {
    /// The client.
    pub client: ClientId,
    /// Its task.
    pub task: u64,
    /// Hash of the masked update.
    pub digest: Digest,
    /// The loss that the client stated.
    pub loss: Option<f64>,
}

/// A cohort with the messages for its clients.
pub struct Relay {
    foundation: Foundation,
    server: SecureServer,
    outbox: BTreeMap<ClientId, Vec<Vec<u8>>>,
    inputs: BTreeMap<ClientId, (Digest, Option<f64>)>,
    stage_millis: u64,
    stage_end_millis: u64,
    /// How it ended.
    end: Option<Result<SecureSum, SecureError>>,
    /// Accepted messages of all stages, by client and hash.
    accepted: BTreeSet<(ClientId, Digest)>,
}

impl Relay {
    /// Creates a cohort over the tasks of its clients. Its first stage ends with the keys of `goal` clients, each stage after `stage_millis`.
    ///
    /// # Errors
    /// The settings are invalid, or name another key than that of `signing`.
    pub fn new(
        settings: CohortSettings,
        tasks: BTreeMap<ClientId, u64>,
        goal: usize,
        signing: Seed,
        stage_millis: u64,
        now_millis: u64,
    ) -> Result<Self, SecureError> {
        Self::with(Foundation { settings, tasks, goal }, signing, stage_millis, now_millis)
    }

    fn with(foundation: Foundation, signing: Seed, stage_millis: u64, now_millis: u64) -> Result<Self, SecureError> {
        Ok(Self {
            server: SecureServer::new(foundation.settings.clone(), signing)?.with_goal(foundation.goal),
            foundation,
            outbox: BTreeMap::new(),
            inputs: BTreeMap::new(),
            stage_millis,
            stage_end_millis: now_millis.saturating_add(stage_millis),
            end: None,
            accepted: BTreeSet::new(),
        })
    }

    /// Creates the cohort again from [`Self::foundation`] and its entries. `signing` returns the key of a round.
    ///
    /// # Errors
    /// The bytes are not those of a cohort.
    pub fn restore(
        foundation: &[u8],
        entries: &[Vec<u8>],
        signing: impl FnOnce(u64) -> Seed,
        stage_millis: u64,
        now_millis: u64,
    ) -> Result<Self, SecureError> {
        let foundation: Foundation = postcard::from_bytes(foundation).map_err(|_| SecureError::InvalidVector)?;
        let signing = signing(foundation.settings.round);
        let mut relay = Self::with(foundation, signing, stage_millis, now_millis)?;
        for entry in entries {
            let entry = postcard::from_bytes(entry).map_err(|_| SecureError::InvalidVector)?;
            relay.apply(&entry, now_millis)?;
        }
        Ok(relay)
    }

    /// What is stored before the first entry.
    #[must_use]
    pub fn foundation(&self) -> Vec<u8> {
        postcard::to_stdvec(&self.foundation).expect("settings have no type that the encoding lacks")
    }

    /// What all clients agree on.
    #[must_use]
    pub const fn settings(&self) -> &CohortSettings {
        &self.foundation.settings
    }

    /// Whether a task of a client belongs to the cohort.
    #[must_use]
    pub fn has(&self, client: ClientId, task: u64) -> bool {
        self.foundation.tasks.get(&client) == Some(&task)
    }

    /// Whether the masked update of a client was received: it is part of the sum, whatever the client does next.
    #[must_use]
    pub fn has_input(&self, client: ClientId) -> bool {
        self.inputs.contains_key(&client)
    }

    /// The unmasked sum.
    #[must_use]
    pub fn sum(&self) -> Option<&SecureSum> {
        self.end.as_ref()?.as_ref().ok()
    }

    /// How the cohort ended, if it did.
    #[must_use]
    pub const fn end(&self) -> Option<&Result<SecureSum, SecureError>> {
        self.end.as_ref()
    }

    /// When the stage ends; `None` after the last one.
    #[must_use]
    pub fn deadline_millis(&self) -> Option<u64> {
        self.end.is_none().then_some(self.stage_end_millis)
    }

    /// The message of the server to a client after `received` others.
    #[must_use]
    pub fn message(&self, client: ClientId, received: usize) -> Option<&[u8]> {
        self.outbox.get(&client)?.get(received).map(Vec::as_slice)
    }

    /// Receives a message. Returns the entry to store; nothing for one that was received before, or comes after the end.
    ///
    /// # Errors
    /// The message is refused; nothing changes.
    pub fn receive(
        &mut self,
        client: ClientId,
        message: &[u8],
        loss: Option<f64>,
        now_millis: u64,
    ) -> Result<Option<Vec<u8>>, SecureError> {
        if self.end.is_some() || self.accepted.contains(&(client, digest(message))) {
            return Ok(None);
        }
        let entry = Entry::Message { client, message: message.to_vec(), loss: loss.filter(|loss| loss.is_finite()) };
        self.apply(&entry, now_millis)?;
        Ok(Some(entry.encode()))
    }

    /// Ends the stage if its time is over. Returns the entry to store.
    pub fn end_late_stage(&mut self, now_millis: u64) -> Option<Vec<u8>> {
        if self.end.is_some() || self.stage_end_millis > now_millis {
            return None;
        }
        let entry = Entry::Deadline;
        // A deadline is never refused.
        let _ = self.apply(&entry, now_millis);
        self.stage_end_millis = self.stage_end_millis.max(now_millis.saturating_add(self.stage_millis));
        Some(entry.encode())
    }

    /// Applies an entry; a refused message changes nothing.
    fn apply(&mut self, entry: &Entry, now_millis: u64) -> Result<(), SecureError> {
        let (event, sender) = match entry {
            Entry::Message { client, message, .. } => {
                (SecureEvent::Message(*client, ClientMessage::decode(message)?), Some((*client, digest(message))))
            }
            Entry::Deadline => (SecureEvent::Deadline, None),
        };
        let is_input = matches!(event, SecureEvent::Message(_, ClientMessage::Input(_)));
        let actions = self.server.step(event);
        if let Some(SecureAction::Refuse(_, error)) = actions.first() {
            return Err(error.clone());
        }
        self.accepted.extend(sender);
        if let (Entry::Message { loss, .. }, Some((client, content)), true) = (entry, sender, is_input) {
            self.inputs.insert(client, (content, *loss));
        }
        for action in actions {
            match action {
                SecureAction::Refuse(..) => {}
                SecureAction::Send(client, message) => {
                    self.outbox.entry(client).or_default().push(message.encode());
                    self.stage_end_millis = now_millis.saturating_add(self.stage_millis);
                }
                SecureAction::Complete(sum) => self.end = Some(Ok(sum)),
                SecureAction::Abort(error) => self.end = Some(Err(error)),
            }
        }
        Ok(())
    }

    /// The updates in the sum.
    #[must_use]
    pub fn summed_updates(&self) -> Vec<SummedUpdate> {
        let clients = self.sum().into_iter().flat_map(|sum| &sum.clients);
        let update = |client: &ClientId| {
            let (digest, loss) = *self.inputs.get(client)?;
            Some(SummedUpdate { client: *client, task: *self.foundation.tasks.get(client)?, digest, loss })
        };
        clients.filter_map(update).collect()
    }
}
