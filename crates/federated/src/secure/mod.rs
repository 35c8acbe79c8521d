//! Secure aggregation with drop-outs (SecAgg+: Bonawitz et al. 2017, Bell et al. 2020): the server learns the sum of a cohort, no update.
//!
//! | stage | a client sends |
//! | --- | --- |
//! | keys | two X25519 public keys, signed by its identity, and a commitment to its self mask |
//! | shares | Shamir shares of its self mask and of its masking secret, sealed to each neighbour |
//! | input | its encoded update plus its self mask plus or minus a mask per neighbour, modulo 2^m |
//! | unmask | of each surviving neighbour the share of the self mask, of each dropped one the share of the masking secret |
//!
//! Invariants:
//! - **Never both kinds of shares of one client.** A client answers one signed list of survivors per round and no other.
//! - **Masks have 256-bit keys**, expanded by ChaCha20, and differ in every round.
//! - **Below a threshold nothing is revealed**: the server asks for shares only when all sums can be unmasked, and clients check it.
//! - Clients and the server are state machines whose messages and states are serializable. A client's state holds secrets: it stays on the
//!   client.
//!
//! The server is assumed to follow the protocol but to be curious; the signature makes a false list of survivors provable. A cohort is the
//! clients of one round, or those that checked in for one `FedBuff` buffer.

mod client;
mod encoding;
pub mod graph;
pub mod keys;
mod message;
pub mod relay;
mod server;
mod shamir;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

pub use self::client::SecureClient;
pub use self::keys::PublicKeyBytes;
pub use self::message::{ClientMessage, ServerMessage};
pub use self::server::{SecureAction, SecureEvent, SecureServer, SecureSum};
use crate::error::{InvalidInput, require};
use crate::model::ClientId;
use crate::random::Seed;

/// Bits of an encoded value.
const LEVEL_BITS: u32 = 16;

/// What all members of a cohort agree on for one aggregation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CohortSettings {
    /// Number of the aggregation: never reused in a run.
    pub round: u64,
    /// The clients with their identity keys (Ed25519).
    pub clients: BTreeMap<ClientId, PublicKeyBytes>,
    /// Key by which the server signs lists of survivors.
    pub server_key: PublicKeyBytes,
    /// Values per client, without the weight.
    pub parameters: usize,
    /// Values are clipped to -clip to clip before they are encoded.
    pub clip: f64,
    /// Bits of an encoded value, b: 2 to 32.
    pub level_bits: u32,
    /// Bits of the modulus, m: at least b + log2 of the number of clients, at most 64.
    pub modulus_bits: u32,
    /// Largest weight of a client, below 2^b.
    pub max_weight: u64,
    /// Neighbours per client, k.
    pub neighbours: usize,
    /// Shares that reconstruct a secret, t: more than half of k.
    pub threshold: usize,
    /// Least number of updates in a sum that may be revealed, at least 2.
    pub minimum: usize,
    /// Seed of the graph.
    pub graph_seed: Seed,
}

impl CohortSettings {
    /// Creates settings with the least modulus, and neighbours and threshold for a share `drop_out` of clients that disappear.
    ///
    /// # Errors
    /// When a number is out of its range.
    pub fn new(
        round: u64,
        clients: BTreeMap<ClientId, PublicKeyBytes>,
        server_key: PublicKeyBytes,
        parameters: usize,
        drop_out: f64,
        graph_seed: Seed,
    ) -> Result<Self, InvalidInput> {
        require((0.0..=0.34).contains(&drop_out), "dropOut", drop_out, "0 to 0.34")?;
        let (neighbours, threshold) = graph::neighbours_and_threshold(clients.len(), drop_out);
        let level_bits = LEVEL_BITS;
        let settings = Self {
            round,
            parameters,
            clip: 8.0,
            level_bits,
            modulus_bits: level_bits + sum_bits(clients.len()),
            max_weight: top_weight(level_bits),
            neighbours,
            threshold,
            minimum: (2 * clients.len()).div_ceil(3).max(2),
            graph_seed,
            clients,
            server_key,
        };
        settings.validate()?;
        Ok(settings)
    }

    /// Encodes the settings.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        postcard::to_stdvec(self).expect("settings have no type that the encoding lacks")
    }

    /// Decodes settings. They are checked by `SecureClient::new`.
    ///
    /// # Errors
    /// When the bytes are no settings.
    pub fn decode(bytes: &[u8]) -> Result<Self, SecureError> {
        postcard::from_bytes(bytes).map_err(|_| SecureError::InvalidVector)
    }

    /// Checks the settings; clients do so before they take part.
    ///
    /// # Errors
    /// When a number is out of the range in which sums are exact and inputs stay hidden.
    pub fn validate(&self) -> Result<(), InvalidInput> {
        let count = self.clients.len();
        require((3..=1 << 20).contains(&count), "clients", count, "3 to 1048576")?;
        require((1..=1 << 32).contains(&self.parameters), "parameters", self.parameters, "1 to 2^32")?;
        require(self.clip > 0.0 && self.clip.is_finite(), "clip", self.clip, "above 0")?;
        require((2..=32).contains(&self.level_bits), "levelBits", self.level_bits, "2 to 32")?;
        let least = self.level_bits + sum_bits(count);
        let bits = self.modulus_bits;
        require((least..=64).contains(&bits), "modulusBits", bits, &format!("{least} to 64"))?;
        let top = top_weight(self.level_bits);
        require((1..=top).contains(&self.max_weight), "maxWeight", self.max_weight, &format!("1 to {top}"))?;
        let regular = self.neighbours + 1 == count || self.neighbours.is_multiple_of(2) && self.neighbours + 1 < count;
        require(
            regular && self.neighbours >= 2,
            "neighbours",
            self.neighbours,
            "an even number of at least 2, or all others",
        )?;
        let majority = self.neighbours / 2 + 1;
        let range = format!("{majority} to {}", self.neighbours);
        require((majority..=self.neighbours).contains(&self.threshold), "threshold", self.threshold, &range)?;
        require((2..=count).contains(&self.minimum), "minimum", self.minimum, "2 to the number of clients")
    }

    /// Values of a masked vector: the parameters and the weight.
    const fn values(&self) -> usize {
        self.parameters + 1
    }

    /// The coordinate of a client's shares: its position from 1.
    fn coordinates(&self) -> BTreeMap<ClientId, u32> {
        self.clients.keys().zip(1..).map(|(client, x)| (*client, x)).collect()
    }

    /// The neighbours of each client.
    fn graph(&self) -> BTreeMap<ClientId, BTreeSet<ClientId>> {
        let clients: Vec<ClientId> = self.clients.keys().copied().collect();
        let graph = graph::random_regular(clients.len(), self.neighbours, &self.graph_seed);
        let named = |positions: BTreeSet<usize>| positions.into_iter().map(|position| clients[position]).collect();
        clients.iter().copied().zip(graph.into_iter().map(named)).collect()
    }
}

/// Bytes of the masked update of one of `clients` clients, with its weight.
pub(crate) const fn masked_bytes(parameters: usize, clients: usize) -> usize {
    encoding::packed_bytes(parameters + 1, LEVEL_BITS + sum_bits(clients))
}

/// Bits by which the sum of `clients` values is longer than one.
const fn sum_bits(clients: usize) -> u32 {
    clients.next_power_of_two().trailing_zeros()
}

const fn top_weight(level_bits: u32) -> u64 {
    encoding::top_level(level_bits)
}

/// Why a message was refused, or an aggregation aborted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SecureError {
    /// A setting or an input is out of its range.
    #[error(transparent)]
    Input(#[from] InvalidInput),
    /// The sender is not in the cohort, or was dropped.
    #[error("client {0} is not in the cohort")]
    NotInCohort(ClientId),
    /// The message belongs to another stage or round.
    #[error("message does not belong to the current stage")]
    WrongStage,
    /// A second message differs from the first.
    #[error("message differs from the one that was received before")]
    Conflict,
    /// A signature does not match its key and content.
    #[error("signature is invalid")]
    InvalidSignature,
    /// A public key is of low order.
    #[error("public key is invalid")]
    InvalidKey,
    /// A sealed message was not sealed for this receiver, or was changed.
    #[error("failed to open a sealed message")]
    InvalidSeal,
    /// A share is out of range, repeats, or does not belong to its secret.
    #[error("share is invalid")]
    InvalidShare,
    /// A masked vector has another length, or a value out of range.
    #[error("masked vector is invalid")]
    InvalidVector,
    /// Shares were requested that together with earlier ones would reveal an input.
    #[error("refused to reveal both kinds of shares of one client")]
    BothKinds,
    /// Too few clients are left; nothing is revealed.
    #[error("too few clients are left: the aggregation reveals nothing")]
    BelowThreshold,
}
