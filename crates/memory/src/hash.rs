//! Partition hash, key hash and the order-free digest.

use crate::ids::{Group, MemoryId, PartitionId};
use crate::law::Weight;
use crate::settings::FeatureType;
use sha2::{Digest as _, Sha256};
use std::fmt;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// Finalizer of splitmix64 (Steele, Lea, Flood 2014) without the increment. A bijection on u64.
pub const fn mix64(id: u64) -> u64 {
    let mut z = id;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Inverse of [`mix64`].
pub const fn unmix64(hash: u64) -> u64 {
    let mut z = hash;
    z = (z ^ (z >> 31) ^ (z >> 62)).wrapping_mul(0x3196_42B2_D24D_8EC3);
    z = (z ^ (z >> 27) ^ (z >> 54)).wrapping_mul(0x96DE_1B17_3F11_9089);
    z ^ (z >> 30) ^ (z >> 60)
}

/// Returns the partition of a memory: `mix64(id) mod partitions`. Within a partition the low bits of `mix64` are therefore not
/// uniform; an index must use others.
///
/// # Panics
/// When `partitions` is 0.
pub const fn partition_of(id: MemoryId, partitions: u32) -> PartitionId {
    PartitionId((mix64(id.0) % partitions as u64) as u32)
}

/// Returns the id of a string key: the first eight bytes of its SHA-256, big-endian. Key bytes are stored and compared too, so
/// correctness does not depend on the hash.
pub fn key_id(key: &[u8]) -> MemoryId {
    let hash = Sha256::digest(key);
    let mut first = [0; 8];
    first.copy_from_slice(&hash[..8]);
    MemoryId(u64::from_be_bytes(first))
}

/// Digest of a set of memories: the wrapping 128-bit sum of one hash per memory, independent of order, partition and node. 0 for
/// the empty set. Not cryptographic.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Digest(pub u128);

impl Digest {
    /// Adds one memory. `content` is [`content_hash`] of its features and payload.
    pub fn add(&mut self, id: MemoryId, weight: Weight, group: Group, content: u128) {
        self.0 = self.0.wrapping_add(memory_hash(id, weight, group, content));
    }

    /// Adds the memories of another set.
    pub fn merge(&mut self, other: Self) {
        self.0 = self.0.wrapping_add(other.0);
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

/// XXH3-128 of the 32-byte record (id, weight, group, content hash), little-endian.
pub fn memory_hash(id: MemoryId, weight: Weight, group: Group, content: u128) -> u128 {
    let mut record = [0; 32];
    record[..8].copy_from_slice(&id.0.to_le_bytes());
    record[8..12].copy_from_slice(&weight.units().to_le_bytes());
    record[12..16].copy_from_slice(&u32::from(group.0).to_le_bytes());
    record[16..].copy_from_slice(&content.to_le_bytes());
    xxh3_128(&record)
}

/// Hash of a memory's content: XXH3-128 of (dtype, dimension, payload length, feature bits, payload); 0 without content. An empty
/// payload is no payload.
///
/// `features` are the stored bits, little-endian; `None` for a memory without features.
pub fn content_hash(features: Option<(FeatureType, &[u8])>, payload: &[u8]) -> u128 {
    let (dtype, dimension, bits) = match features {
        Some((dtype, bits)) if !bits.is_empty() => (dtype.code(), (bits.len() / dtype.bytes()) as u32, bits),
        _ if payload.is_empty() => return 0,
        _ => (0, 0, [].as_slice()),
    };
    let mut hasher = Xxh3::new();
    hasher.update(&dtype.to_le_bytes());
    hasher.update(&dimension.to_le_bytes());
    hasher.update(&(payload.len() as u64).to_le_bytes());
    hasher.update(bits);
    hasher.update(payload);
    hasher.digest128()
}
