//! The server's side of secure aggregation.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::encoding::{add_values, apply_mask, dequantize, top_level, unpack};
use super::keys::{agree, public_key, sign, verify, verifying_key};
use super::message::{ClientMessage, KeyAdvertisement, RevealedShare, ServerMessage, SurvivorList};
use super::shamir::{Share, combine};
use super::{CohortSettings, SecureError};
use crate::error::InvalidInput;
use crate::model::ClientId;
use crate::random::{Seed, derive};

/// Which message the server waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum ServerStage {
    Keys,
    Shares,
    Input,
    Unmask,
    Ended,
}

/// What happens to the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SecureEvent {
    /// An authenticated client sent a message.
    Message(ClientId, ClientMessage),
    /// The deadline of the stage passed: go on with the clients that answered.
    Deadline,
}

/// What the caller has to do.
#[derive(Debug, Clone, PartialEq)]
pub enum SecureAction {
    /// Send a message.
    Send(ClientId, ServerMessage),
    /// Refuse a client's message.
    Refuse(ClientId, SecureError),
    /// The sum of the survivors.
    Complete(SecureSum),
    /// The aggregation ended and revealed nothing.
    Abort(SecureError),
}

/// The unmasked sum of a cohort.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SecureSum {
    /// Clients in the sum.
    pub clients: BTreeSet<ClientId>,
    /// Sum of the weights.
    pub weight: u64,
    /// Sum of value times weight over the largest weight.
    pub scaled: Vec<f64>,
    /// The largest weight.
    pub max_weight: u64,
}

impl SecureSum {
    /// Mean weighted by the clients' weights, as `FedAvg` takes it.
    #[must_use]
    pub fn weighted_mean(&self) -> Vec<f64> {
        let divisor = self.weight as f64 / self.max_weight as f64;
        self.scaled.iter().map(|value| value / divisor).collect()
    }

    /// Sum of weighted values over the number of clients, as `FedBuff` takes it.
    #[must_use]
    pub fn mean_over_clients(&self) -> Vec<f64> {
        self.scaled.iter().map(|value| value / self.clients.len() as f64).collect()
    }
}

/// The server in one aggregation. Inputs are added when they arrive; none is kept.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct SecureServer {
    settings: CohortSettings,
    signing: Seed,
    /// Keys with which the first stage ends.
    goal: usize,
    graph: BTreeMap<ClientId, BTreeSet<ClientId>>,
    stage: ServerStage,
    /// Clients whose message of this stage is expected.
    expected: BTreeSet<ClientId>,
    /// Hash of the message of each client in this stage.
    received: BTreeMap<ClientId, Seed>,
    keys: BTreeMap<ClientId, KeyAdvertisement>,
    /// Sealed shares by receiver, then sender.
    sealed: BTreeMap<ClientId, BTreeMap<ClientId, Vec<u8>>>,
    /// Clients that shared their secrets.
    sharers: BTreeSet<ClientId>,
    sum: Vec<u64>,
    survivors: BTreeSet<ClientId>,
    /// Revealed shares by the owner of the secret.
    revealed: BTreeMap<ClientId, Vec<Share>>,
}

impl SecureServer {
    /// Creates the server of an aggregation with its Ed25519 signing seed.
    ///
    /// # Errors
    /// When the settings are invalid or name another server key.
    pub fn new(settings: CohortSettings, signing: Seed) -> Result<Self, SecureError> {
        settings.validate()?;
        if settings.server_key != verifying_key(&signing) {
            return Err(InvalidInput::new("serverKey", "another key", "the key of the server's signing seed").into());
        }
        Ok(Self {
            signing,
            goal: settings.clients.len(),
            graph: settings.graph(),
            stage: ServerStage::Keys,
            expected: settings.clients.keys().copied().collect(),
            received: BTreeMap::new(),
            keys: BTreeMap::new(),
            sealed: BTreeMap::new(),
            sharers: BTreeSet::new(),
            sum: vec![0; settings.values()],
            survivors: BTreeSet::new(),
            revealed: BTreeMap::new(),
            settings,
        })
    }

    /// Lets the aggregation go on without the slowest clients: the first stage ends with the keys of `goal` of them.
    #[must_use]
    pub fn with_goal(mut self, goal: usize) -> Self {
        self.goal = goal.min(self.settings.clients.len());
        self
    }

    /// Applies an event. A stage ends when all expected messages are there, or at its deadline.
    pub fn step(&mut self, event: SecureEvent) -> Vec<SecureAction> {
        match event {
            SecureEvent::Message(client, message) => match self.receive(client, message) {
                Err(error) => vec![SecureAction::Refuse(client, error)],
                Ok(()) if self.stage != ServerStage::Ended && self.has_enough_messages() => self.end_stage(),
                Ok(()) => Vec::new(),
            },
            SecureEvent::Deadline if self.stage == ServerStage::Ended => Vec::new(),
            SecureEvent::Deadline => self.end_stage(),
        }
    }

    /// Keys of `goal` clients are enough only if none of these would be removed.
    fn has_enough_messages(&self) -> bool {
        let count = self.received.len();
        let answered = || self.received.keys().copied().collect();
        count == self.expected.len()
            || self.stage == ServerStage::Keys
                && count >= self.goal
                && self.with_enough_neighbours(answered()).is_ok_and(|kept| kept.len() == count)
    }

    fn receive(&mut self, client: ClientId, message: ClientMessage) -> Result<(), SecureError> {
        if !self.expected.contains(&client) {
            return Err(SecureError::NotInCohort(client));
        }
        let hash = derive(&message.encode(), &[b"message"]);
        if let Some(first) = self.received.get(&client) {
            return if *first == hash { Ok(()) } else { Err(SecureError::Conflict) };
        }
        match (self.stage, message) {
            (ServerStage::Keys, ClientMessage::Keys(keys)) => self.receive_keys(client, keys)?,
            (ServerStage::Shares, ClientMessage::Shares(sealed)) => self.receive_shares(client, sealed)?,
            (ServerStage::Input, ClientMessage::Input(packed)) => {
                let bits = self.settings.modulus_bits;
                add_values(&mut self.sum, &unpack(&packed, self.settings.values(), bits)?, bits);
            }
            (ServerStage::Unmask, ClientMessage::Unmask(shares)) => self.receive_unmasking(client, shares)?,
            _ => return Err(SecureError::WrongStage),
        }
        self.received.insert(client, hash);
        Ok(())
    }

    fn receive_keys(&mut self, client: ClientId, keys: KeyAdvertisement) -> Result<(), SecureError> {
        let identity = &self.settings.clients[&client];
        verify(identity, &keys.signed_bytes(self.settings.round, client), &keys.signature)?;
        self.keys.insert(client, keys);
        Ok(())
    }

    fn receive_shares(&mut self, client: ClientId, sealed: BTreeMap<ClientId, Vec<u8>>) -> Result<(), SecureError> {
        let neighbours = self.graph[&client].intersection(&self.expected);
        if !neighbours.eq(sealed.keys()) {
            return Err(SecureError::InvalidShare);
        }
        for (receiver, sealed) in sealed {
            self.sealed.entry(receiver).or_default().insert(client, sealed);
        }
        Ok(())
    }

    fn receive_unmasking(
        &mut self,
        client: ClientId,
        shares: BTreeMap<ClientId, RevealedShare>,
    ) -> Result<(), SecureError> {
        let coordinate = self.settings.coordinates()[&client];
        let mut valid = Vec::new();
        for (owner, revealed) in shares {
            let neighbour = owner == client || self.graph[&client].contains(&owner);
            let share = match revealed {
                RevealedShare::SelfMask(share) if self.survivors.contains(&owner) => share.0,
                RevealedShare::MaskingSecret(share) if !self.survivors.contains(&owner) => share.0,
                _ => return Err(SecureError::BothKinds),
            };
            share.validate(coordinate)?;
            if !neighbour || !self.sharers.contains(&owner) {
                return Err(SecureError::InvalidShare);
            }
            valid.push((owner, share));
        }
        for (owner, share) in valid {
            self.revealed.entry(owner).or_default().push(share);
        }
        Ok(())
    }

    fn end_stage(&mut self) -> Vec<SecureAction> {
        let answered: BTreeSet<ClientId> = std::mem::take(&mut self.received).into_keys().collect();
        let result = match self.stage {
            ServerStage::Keys => self.send_keys(answered),
            ServerStage::Shares => self.send_shares(answered),
            ServerStage::Input => self.send_survivors(answered),
            ServerStage::Unmask => self.unmask().map(|sum| vec![SecureAction::Complete(sum)]),
            ServerStage::Ended => Ok(Vec::new()),
        };
        match result {
            Ok(actions) => {
                self.stage = match self.stage {
                    ServerStage::Keys => ServerStage::Shares,
                    ServerStage::Shares => ServerStage::Input,
                    ServerStage::Input => ServerStage::Unmask,
                    ServerStage::Unmask | ServerStage::Ended => ServerStage::Ended,
                };
                actions
            }
            Err(error) => {
                self.stage = ServerStage::Ended;
                vec![SecureAction::Abort(error)]
            }
        }
    }

    fn send_keys(&mut self, answered: BTreeSet<ClientId>) -> Result<Vec<SecureAction>, SecureError> {
        // A client without enough neighbours could not be unmasked.
        self.expected = self.with_enough_neighbours(answered)?;
        let neighbours = |client: &ClientId| {
            let present = self.graph[client].intersection(&self.expected);
            ServerMessage::Keys(present.map(|other| (*other, self.keys[other].clone())).collect())
        };
        Ok(self.expected.iter().map(|client| SecureAction::Send(*client, neighbours(client))).collect())
    }

    /// Removes clients with fewer than t neighbours, themselves included, until none is left.
    fn with_enough_neighbours(&self, mut clients: BTreeSet<ClientId>) -> Result<BTreeSet<ClientId>, SecureError> {
        loop {
            let enough =
                |client: &ClientId| self.graph[client].intersection(&clients).count() + 1 >= self.settings.threshold;
            let kept: BTreeSet<ClientId> = clients.iter().copied().filter(enough).collect();
            if kept.len() < self.settings.minimum {
                return Err(SecureError::BelowThreshold);
            }
            if kept.len() == clients.len() {
                return Ok(kept);
            }
            clients = kept;
        }
    }

    fn send_shares(&mut self, answered: BTreeSet<ClientId>) -> Result<Vec<SecureAction>, SecureError> {
        self.expected = self.with_enough_neighbours(answered)?;
        self.sharers.clone_from(&self.expected);
        let mut sealed = std::mem::take(&mut self.sealed);
        let mut delivery = |client: &ClientId| {
            let mut shares = sealed.remove(client).unwrap_or_default();
            shares.retain(|sender, _| self.sharers.contains(sender));
            ServerMessage::Shares(shares)
        };
        Ok(self.expected.iter().map(|client| SecureAction::Send(*client, delivery(client))).collect())
    }

    /// Asks for shares only if every secret that is needed can be reconstructed.
    fn send_survivors(&mut self, answered: BTreeSet<ClientId>) -> Result<Vec<SecureAction>, SecureError> {
        self.survivors = answered;
        let dropped: BTreeSet<ClientId> = self.sharers.difference(&self.survivors).copied().collect();
        let near = |client: &ClientId| self.graph[client].intersection(&self.survivors).count();
        let threshold = self.settings.threshold;
        let revealable = self.survivors.iter().all(|client| near(client) + 1 >= threshold)
            && dropped.iter().all(|client| near(client) == 0 || near(client) >= threshold);
        if self.survivors.len() < self.settings.minimum || !revealable {
            return Err(SecureError::BelowThreshold);
        }
        self.expected.clone_from(&self.survivors);
        let mut list = SurvivorList { survivors: self.survivors.clone(), dropped, signature: Vec::new() };
        list.signature = sign(&self.signing, &list.signed_bytes(self.settings.round));
        let request = ServerMessage::Survivors(list);
        Ok(self.survivors.iter().map(|client| SecureAction::Send(*client, request.clone())).collect())
    }

    fn unmask(&mut self) -> Result<SecureSum, SecureError> {
        let dropped: Vec<ClientId> = self.sharers.difference(&self.survivors).copied().collect();
        // All secrets first: a failure leaves no partial result.
        let self_masks: Vec<Seed> =
            self.survivors.iter().map(|client| self.self_mask(*client)).collect::<Result<_, _>>()?;
        let mut pair_masks = Vec::new();
        for client in dropped {
            pair_masks.extend(self.pair_masks(client)?);
        }
        let mut sum = self.sum.clone();
        let bits = self.settings.modulus_bits;
        for key in &self_masks {
            apply_mask(&mut sum, key, true, bits);
        }
        for (key, subtract) in &pair_masks {
            apply_mask(&mut sum, key, *subtract, bits);
        }
        self.decode(&sum)
    }

    fn reconstruct(&self, client: ClientId) -> Result<Seed, SecureError> {
        let shares = self.revealed.get(&client).map_or(&[][..], Vec::as_slice);
        combine(shares, self.settings.threshold)
    }

    fn self_mask(&self, client: ClientId) -> Result<Seed, SecureError> {
        let secret = self.reconstruct(client)?;
        let commitment = derive(&secret, &[b"commitment"]);
        if commitment == self.keys[&client].commitment { Ok(secret) } else { Err(SecureError::InvalidShare) }
    }

    /// The masks that the surviving neighbours of a dropped client share with it, each with the sign that removes it.
    fn pair_masks(&self, client: ClientId) -> Result<Vec<(Seed, bool)>, SecureError> {
        let mut masks = Vec::new();
        let survivors: Vec<ClientId> = self.graph[&client].intersection(&self.survivors).copied().collect();
        if survivors.is_empty() {
            return Ok(masks);
        }
        let secret = self.reconstruct(client)?;
        if public_key(&secret) != self.keys[&client].masking {
            return Err(SecureError::InvalidShare);
        }
        for survivor in survivors {
            let other = &self.keys[&survivor].masking;
            let key = agree(&secret, other, self.settings.round, b"mask", (client, survivor))?;
            // The survivor subtracted the mask if its number is the larger one.
            masks.push((key, client > survivor));
        }
        Ok(masks)
    }

    fn decode(&self, sum: &[u64]) -> Result<SecureSum, SecureError> {
        let CohortSettings { clip, level_bits, max_weight, .. } = self.settings;
        let count = self.survivors.len();
        let (weight, values) = sum.split_last().expect("the vector ends with the weight");
        let top = top_level(level_bits) * count as u64;
        if values.iter().any(|value| *value > top) || !(count as u64..=max_weight * count as u64).contains(weight) {
            return Err(SecureError::InvalidVector);
        }
        let scaled = values.iter().map(|value| dequantize(*value, count, clip, level_bits)).collect();
        Ok(SecureSum { clients: self.survivors.clone(), weight: *weight, scaled, max_weight })
    }
}
