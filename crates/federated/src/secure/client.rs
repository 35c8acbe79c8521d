//! The client's side of secure aggregation.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::encoding::{apply_mask, pack, quantize};
use super::keys::{Envelope, agree, public_key, sign, verify};
use super::message::{ClientMessage, KeyAdvertisement, RevealedShare, SecretShare, ServerMessage, SurvivorList};
use super::shamir::{Share, split};
use super::{CohortSettings, SecureError};
use crate::error::{InvalidInput, require};
use crate::model::{ClientId, check_vector};
use crate::random::{Seed, derive, stream};

/// Shares of one neighbour's secrets.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
struct NeighbourShares {
    self_mask: Share,
    masking_secret: Share,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
enum Stage {
    Keys,
    Shares,
    Input,
    Unmask,
}

/// A client in one aggregation. Its serialized state holds secrets and has to be stored before each message is sent: two different inputs under
/// the same masks would reveal their difference.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct SecureClient {
    settings: CohortSettings,
    client: ClientId,
    /// Seed of all secrets of this client in this round.
    secret: Seed,
    identity: Seed,
    neighbours: BTreeSet<ClientId>,
    stage: Stage,
    keys: BTreeMap<ClientId, KeyAdvertisement>,
    shares: BTreeMap<ClientId, NeighbourShares>,
    own_share: Option<Share>,
    /// The masked vector; sent again as it is.
    input: Option<Vec<u8>>,
    answered: Option<SurvivorList>,
}

impl SecureClient {
    /// Creates a client from 32 secret bytes of a cryptographic generator, used for this round only, and its Ed25519 signing seed.
    ///
    /// # Errors
    /// When the settings are invalid, or do not list this client with its key.
    pub fn new(settings: CohortSettings, client: ClientId, secret: Seed, identity: Seed) -> Result<Self, SecureError> {
        settings.validate()?;
        if settings.clients.get(&client) != Some(&super::keys::verifying_key(&identity)) {
            return Err(SecureError::NotInCohort(client));
        }
        let neighbours = settings.graph().remove(&client).unwrap_or_default();
        Ok(Self {
            secret: derive(&secret, &[b"round", &settings.round.to_le_bytes(), &client.to_le_bytes()]),
            settings,
            client,
            identity,
            neighbours,
            stage: Stage::Keys,
            keys: BTreeMap::new(),
            shares: BTreeMap::new(),
            own_share: None,
            input: None,
            answered: None,
        })
    }

    /// The message of stage 0.
    #[must_use]
    pub fn advertise(&self) -> ClientMessage {
        let mut keys = KeyAdvertisement {
            sealing: public_key(&self.secret_for(b"sealing")),
            masking: public_key(&self.secret_for(b"masking")),
            commitment: derive(&self.secret_for(b"self mask"), &[b"commitment"]),
            signature: Vec::new(),
        };
        keys.signature = sign(&self.identity, &keys.signed_bytes(self.settings.round, self.client));
        ClientMessage::Keys(keys)
    }

    /// Answers the server's message of stage 1 or 3; a repeated message has the same answer. Use `Self::mask` for stage 2.
    ///
    /// # Errors
    /// When the message is invalid or belongs to another stage, when too few clients are left, or when it asks for shares that would reveal
    /// an input. Nothing changes then.
    pub fn step(&mut self, message: ServerMessage) -> Result<ClientMessage, SecureError> {
        match message {
            ServerMessage::Keys(keys) => self.share(keys),
            ServerMessage::Shares(_) => Err(SecureError::WrongStage),
            ServerMessage::Survivors(list) => self.unmask(list),
        }
    }

    pub(super) fn secret_for(&self, purpose: &[u8]) -> Seed {
        derive(&self.secret, &[purpose])
    }

    pub(super) fn agreed(&self, purpose: &[u8], own: &[u8], other: ClientId, key: &Seed) -> Result<Seed, SecureError> {
        agree(&self.secret_for(own), key, self.settings.round, purpose, (self.client, other))
    }

    /// Stage 1: shares for all neighbours that are there.
    fn share(&mut self, keys: BTreeMap<ClientId, KeyAdvertisement>) -> Result<ClientMessage, SecureError> {
        if self.stage > Stage::Shares {
            return Err(SecureError::WrongStage);
        }
        if self.stage == Stage::Shares && keys != self.keys {
            return Err(SecureError::Conflict);
        }
        for (other, advertised) in &keys {
            let identity = self.settings.clients.get(other).filter(|_| self.neighbours.contains(other));
            let identity = identity.ok_or(SecureError::NotInCohort(*other))?;
            verify(identity, &advertised.signed_bytes(self.settings.round, *other), &advertised.signature)?;
        }
        let threshold = self.settings.threshold;
        if keys.len() + 1 < threshold {
            return Err(SecureError::BelowThreshold);
        }
        let coordinates = self.settings.coordinates();
        let receivers: Vec<ClientId> = keys.keys().copied().chain([self.client]).collect();
        let xs: Vec<u32> = receivers.iter().map(|receiver| coordinates[receiver]).collect();
        let mut rng = stream(&self.secret, "shares", 0);
        let self_masks = split(&self.secret_for(b"self mask"), threshold, &xs, &mut rng);
        let masking_secrets = split(&self.secret_for(b"masking"), threshold, &xs, &mut rng);
        let mut sealed = BTreeMap::new();
        for ((receiver, self_mask), masking_secret) in receivers.into_iter().zip(self_masks).zip(masking_secrets) {
            let Some(advertised) = keys.get(&receiver) else {
                self.own_share = Some(self_mask);
                continue;
            };
            let shares = NeighbourShares { self_mask, masking_secret };
            let plain = postcard::to_stdvec(&shares).expect("shares have no type that the encoding lacks");
            let agreed = self.agreed(b"seal", b"sealing", receiver, &advertised.sealing)?;
            let envelope = Envelope { round: self.settings.round, from: self.client, to: receiver };
            sealed.insert(receiver, envelope.seal(&agreed, &plain));
        }
        self.keys = keys;
        self.stage = Stage::Shares;
        Ok(ClientMessage::Shares(sealed))
    }

    /// Stage 2: opens the neighbours' shares and masks `values` times `weight / max_weight`. Repeated calls return the first vector.
    ///
    /// # Errors
    /// When the message, the values or the weight are invalid, or too few neighbours are left. Nothing changes then.
    pub fn mask(&mut self, message: &ServerMessage, values: &[f32], weight: u64) -> Result<ClientMessage, SecureError> {
        let ServerMessage::Shares(sealed) = message else { return Err(SecureError::WrongStage) };
        if let Some(input) = &self.input {
            return Ok(ClientMessage::Input(input.clone()));
        }
        if self.stage != Stage::Shares {
            return Err(SecureError::WrongStage);
        }
        self.check_input(values, weight)?;
        if sealed.len() + 1 < self.settings.threshold {
            return Err(SecureError::BelowThreshold);
        }
        self.shares = self.open(sealed)?;
        let mut vector = self.encode(values, weight);
        self.add_masks(&mut vector)?;
        let input = pack(&vector, self.settings.modulus_bits);
        self.input = Some(input.clone());
        self.stage = Stage::Input;
        Ok(ClientMessage::Input(input))
    }

    fn check_input(&self, values: &[f32], weight: u64) -> Result<(), InvalidInput> {
        check_vector("values", values, self.settings.parameters)?;
        let range = format!("1 to {}", self.settings.max_weight);
        require((1..=self.settings.max_weight).contains(&weight), "weight", weight, &range)
    }

    fn open(&self, sealed: &BTreeMap<ClientId, Vec<u8>>) -> Result<BTreeMap<ClientId, NeighbourShares>, SecureError> {
        let own_coordinate = self.settings.coordinates()[&self.client];
        let open = |(sender, sealed): (&ClientId, &Vec<u8>)| {
            let keys = self.keys.get(sender).ok_or(SecureError::NotInCohort(*sender))?;
            let agreed = self.agreed(b"seal", b"sealing", *sender, &keys.sealing)?;
            let envelope = Envelope { round: self.settings.round, from: *sender, to: self.client };
            let plain = envelope.open(&agreed, sealed)?;
            let shares: NeighbourShares = postcard::from_bytes(&plain).map_err(|_| SecureError::InvalidShare)?;
            shares.self_mask.validate(own_coordinate)?;
            shares.masking_secret.validate(own_coordinate)?;
            Ok((*sender, shares))
        };
        sealed.iter().map(open).collect()
    }

    pub(super) fn encode(&self, values: &[f32], weight: u64) -> Vec<u64> {
        let CohortSettings { clip, level_bits, max_weight, .. } = self.settings;
        let mut rng = stream(&self.secret, "rounding", 0);
        let scale = weight as f64 / max_weight as f64;
        let encoded = values.iter().map(|value| {
            let clipped = f64::from(*value).clamp(-clip, clip);
            quantize(clipped * scale, clip, level_bits, &mut rng)
        });
        encoded.chain([weight]).collect()
    }

    /// Adds the self mask, and for each neighbour that shared its secrets the mask of the pair: the larger number subtracts.
    fn add_masks(&self, vector: &mut [u64]) -> Result<(), SecureError> {
        let bits = self.settings.modulus_bits;
        apply_mask(vector, &self.secret_for(b"self mask"), false, bits);
        for other in self.shares.keys() {
            let key = self.agreed(b"mask", b"masking", *other, &self.keys[other].masking)?;
            apply_mask(vector, &key, *other < self.client, bits);
        }
        Ok(())
    }

    /// Stage 3: one share per neighbour, of the self mask if the list has it as a survivor, of the masking secret if it dropped out.
    fn unmask(&mut self, list: SurvivorList) -> Result<ClientMessage, SecureError> {
        if self.stage < Stage::Input {
            return Err(SecureError::WrongStage);
        }
        verify(&self.settings.server_key, &list.signed_bytes(self.settings.round), &list.signature)?;
        if self.answered.as_ref().is_some_and(|answered| *answered != list)
            || list.survivors.intersection(&list.dropped).next().is_some()
        {
            return Err(SecureError::BothKinds);
        }
        let near = self.shares.keys().filter(|neighbour| list.survivors.contains(neighbour)).count();
        let known = list.survivors.iter().all(|survivor| self.settings.clients.contains_key(survivor));
        if !known || !list.survivors.contains(&self.client) {
            return Err(SecureError::NotInCohort(self.client));
        }
        if list.survivors.len() < self.settings.minimum || near + 1 < self.settings.threshold {
            return Err(SecureError::BelowThreshold);
        }
        let mut revealed = BTreeMap::new();
        for (neighbour, shares) in &self.shares {
            if list.survivors.contains(neighbour) {
                revealed.insert(*neighbour, RevealedShare::SelfMask(SecretShare(shares.self_mask.clone())));
            } else if list.dropped.contains(neighbour) {
                revealed.insert(*neighbour, RevealedShare::MaskingSecret(SecretShare(shares.masking_secret.clone())));
            }
        }
        if let Some(own) = &self.own_share {
            revealed.insert(self.client, RevealedShare::SelfMask(SecretShare(own.clone())));
        }
        self.answered = Some(list);
        self.stage = Stage::Unmask;
        Ok(ClientMessage::Unmask(revealed))
    }
}
