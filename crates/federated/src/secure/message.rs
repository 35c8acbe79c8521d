//! Messages of secure aggregation.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::shamir::Share;
use super::{PublicKeyBytes, SecureError};
use crate::model::ClientId;
use crate::random::Seed;

/// Public keys of a client for one round.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyAdvertisement {
    /// X25519 key for sealed shares.
    pub(super) sealing: PublicKeyBytes,
    /// X25519 key for masks.
    pub(super) masking: PublicKeyBytes,
    /// Hash of the self mask's seed, by which the server checks what it reconstructs.
    pub(super) commitment: Seed,
    /// Ed25519 signature of the client's identity.
    pub(super) signature: Vec<u8>,
}

impl KeyAdvertisement {
    /// What the identity signs.
    pub(super) fn signed_bytes(&self, round: u64, client: ClientId) -> Vec<u8> {
        let mut bytes = b"engram-secure-aggregation-keys".to_vec();
        bytes.extend(round.to_le_bytes());
        bytes.extend(client.to_le_bytes());
        for key in [&self.sealing, &self.masking, &self.commitment] {
            bytes.extend(key);
        }
        bytes
    }
}

/// Who is in the sum. Signed by the server: two different lists of one round prove that it misbehaved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SurvivorList {
    /// Clients whose input is in the sum.
    pub(super) survivors: BTreeSet<ClientId>,
    /// Clients that shared their secrets and dropped out.
    pub(super) dropped: BTreeSet<ClientId>,
    /// Ed25519 signature of the server.
    pub(super) signature: Vec<u8>,
}

impl SurvivorList {
    /// What the server signs.
    pub(super) fn signed_bytes(&self, round: u64) -> Vec<u8> {
        let mut bytes = b"engram-secure-aggregation-survivors".to_vec();
        bytes.extend(round.to_le_bytes());
        for clients in [&self.survivors, &self.dropped] {
            bytes.extend((clients.len() as u64).to_le_bytes());
            clients.iter().for_each(|client| bytes.extend(client.to_le_bytes()));
        }
        bytes
    }
}

/// The share of one secret, revealed to the server.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum RevealedShare {
    /// Of the self mask of a survivor.
    SelfMask(SecretShare),
    /// Of the masking secret of a dropped client.
    MaskingSecret(SecretShare),
}

/// A Shamir share; its content is not printed.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretShare(pub(super) Share);

impl std::fmt::Debug for SecretShare {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SecretShare({})", self.0.x)
    }
}

impl std::fmt::Debug for RevealedShare {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::SelfMask(share) => write!(f, "SelfMask({share:?})"),
            Self::MaskingSecret(share) => write!(f, "MaskingSecret({share:?})"),
        }
    }
}

/// From a client to the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClientMessage {
    /// Stage 0.
    Keys(KeyAdvertisement),
    /// Stage 1: sealed shares by receiver.
    Shares(BTreeMap<ClientId, Vec<u8>>),
    /// Stage 2: the masked vector, packed.
    Input(Vec<u8>),
    /// Stage 3: shares by the client whose secret they belong to.
    Unmask(BTreeMap<ClientId, RevealedShare>),
}

/// From the server to a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ServerMessage {
    /// Keys of the neighbours.
    Keys(BTreeMap<ClientId, KeyAdvertisement>),
    /// Sealed shares by sender.
    Shares(BTreeMap<ClientId, Vec<u8>>),
    /// The request to unmask.
    Survivors(SurvivorList),
}

impl ServerMessage {
    /// Encodes the message.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        postcard::to_stdvec(self).expect("messages have no type that the encoding lacks")
    }

    /// Decodes a message.
    ///
    /// # Errors
    /// When the bytes are no message.
    pub fn decode(bytes: &[u8]) -> Result<Self, SecureError> {
        postcard::from_bytes(bytes).map_err(|_| SecureError::InvalidVector)
    }
}

impl ClientMessage {
    /// Encodes the message.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        postcard::to_stdvec(self).expect("messages have no type that the encoding lacks")
    }

    /// Decodes a message.
    ///
    /// # Errors
    /// When the bytes are no message.
    pub fn decode(bytes: &[u8]) -> Result<Self, SecureError> {
        postcard::from_bytes(bytes).map_err(|_| SecureError::InvalidVector)
    }
}
