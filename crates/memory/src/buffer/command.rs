//! Commands on buffers.

use super::{MAX_DEFINITION_BYTES, MAX_LISTED, MAX_NAME_BYTES, Position, Remover};
use crate::command::{Blobs, check_ids, require};
use crate::ids::{Group, MemoryId};
use crate::law::ONE;
use crate::outcome::Refusal;
use crate::{MAX_IDS, MAX_ITEM_PAYLOAD_BYTES, PartitionId};
use xxhash_rust::xxh3::xxh3_64;

/// A buffer that a command addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BufferRef {
    /// Group of its items.
    pub group: Group,
    /// Hash of its definition: a command that was prepared for another definition is refused.
    pub stamp: u64,
}

/// Limits of a buffer in a partition.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Most items in all partitions.
    pub capacity: u64,
    /// Most items in this partition.
    pub share: u64,
    /// What happens above the share.
    pub remover: Remover,
    /// Batches that may contain an item before it is removed; 0 = unlimited.
    pub max_reuse: u32,
}

impl Limits {
    /// Returns the share of a partition if all partitions hold items.
    #[must_use]
    pub const fn shared(self, partition: u32, partitions: u32) -> Self {
        self.placed(Placement { first: 0, used: partitions, partitions }, partition)
    }

    /// Returns the share of a partition: shares of the partitions that hold items differ by at most one and add up to the capacity.
    #[must_use]
    pub const fn placed(self, placement: Placement, partition: u32) -> Self {
        let Placement { first, used, partitions } = placement;
        let index = (partition + partitions - first % partitions) % partitions;
        if index >= used {
            return Self { share: 0, ..self };
        }
        let rest = (index as u64) < self.capacity % used as u64;
        Self { share: self.capacity / used as u64 + rest as u64, ..self }
    }
}

/// Which partitions hold the items of a buffer: `used` consecutive ones from `first` on, modulo the number of partitions.
///
/// A partition removes items when its own share is full. With few items per partition, chance would fill one partition while others have room,
/// so a small buffer uses few partitions; below twice [`Placement::LEAST_SHARE`] items a single one, whose removals are those of one list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// First partition that holds items.
    pub first: u32,
    /// Number of partitions that hold items, 1 to `partitions`.
    pub used: u32,
    /// Partitions of the cluster.
    pub partitions: u32,
}

impl Placement {
    /// Items that a partition holds at least, if the buffer has as many. With 1,024, batches of different sizes fill partitions alike within
    /// a few percent.
    pub const LEAST_SHARE: u64 = 1_024;

    /// Chooses the number of partitions of a buffer with this capacity; a partition has room for `most_share` items.
    pub const fn spread(capacity: u64, most_share: u64, partitions: u32) -> u32 {
        let wanted = capacity / Self::LEAST_SHARE;
        let needed = capacity.div_ceil(if most_share == 0 { 1 } else { most_share });
        let used = if wanted > needed { wanted } else { needed };
        if used == 0 {
            1
        } else if used > partitions as u64 {
            partitions
        } else {
            used as u32
        }
    }

    /// Places a buffer on `used` partitions, 0 = all; its name decides where it begins.
    pub fn new(name: &str, used: u32, partitions: u32) -> Self {
        let first = (xxh3_64(name.as_bytes()) % u64::from(partitions.max(1))) as u32;
        let used = if used == 0 || used > partitions { partitions } else { used };
        Self { first, used, partitions }
    }

    /// Returns the place of a partition, counted from the first one that holds items: below `used` for those that hold items.
    pub const fn place(&self, partition: PartitionId) -> u32 {
        (partition.0 + self.partitions - self.first) % self.partitions
    }
}

/// A change of the buffers of a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BufferCommand {
    /// Creates a buffer; accepted again with the same content.
    Define {
        /// Group of its items; `None` = the highest free one.
        group: Option<Group>,
        /// Name.
        name: String,
        /// Schema and settings, opaque to the partition.
        definition: Vec<u8>,
        /// Limits.
        limits: Limits,
    },
    /// Removes a buffer and its items.
    Drop {
        /// The buffer.
        buffer: BufferRef,
    },
    /// Appends items.
    Append {
        /// The buffer.
        buffer: BufferRef,
        /// Lowest position of the first item, of this partition.
        from: Position,
        /// Weight in units per item.
        weights: Vec<u32>,
        /// Payload per item, not empty.
        payloads: Blobs,
    },
    /// Sets weights; handles of removed items are reported.
    SetWeights {
        /// The buffer.
        buffer: BufferRef,
        /// Handles.
        ids: Vec<MemoryId>,
        /// Weight in units per handle.
        weights: Vec<u32>,
    },
    /// Removes items; handles of removed items are reported.
    Delete {
        /// The buffer.
        buffer: BufferRef,
        /// Handles.
        ids: Vec<MemoryId>,
    },
    /// Counts a batch.
    Use {
        /// The buffer.
        buffer: BufferRef,
        /// Items drawn, with repetition.
        sampled: u64,
        /// The drawn items, each once, if their uses are limited; at most [`MAX_LISTED`]. Those that are used up are removed, missing ones
        /// are reported.
        ids: Vec<MemoryId>,
    },
    /// Leases items to a consumer; those that are done, leased or removed are reported.
    Lease {
        /// The buffer.
        buffer: BufferRef,
        /// Name of the consumer.
        consumer: String,
        /// Handles, at most [`MAX_LISTED`].
        ids: Vec<MemoryId>,
        /// Time of the primary, in milliseconds since the Unix epoch: leases that end before are over.
        now_ms: u64,
        /// When the leases end.
        until_ms: u64,
    },
    /// Records that leased items are done; those that are not leased are reported.
    Acknowledge {
        /// The buffer.
        buffer: BufferRef,
        /// Name of the consumer.
        consumer: String,
        /// Handles.
        ids: Vec<MemoryId>,
    },
}

impl BufferCommand {
    /// Returns the buffer that must exist; `None` for a definition.
    pub const fn buffer(&self) -> Option<BufferRef> {
        match self {
            Self::Define { .. } => None,
            Self::Drop { buffer }
            | Self::Append { buffer, .. }
            | Self::SetWeights { buffer, .. }
            | Self::Delete { buffer, .. }
            | Self::Use { buffer, .. }
            | Self::Lease { buffer, .. }
            | Self::Acknowledge { buffer, .. } => Some(*buffer),
        }
    }

    /// Returns the ids that it names.
    pub fn ids(&self) -> &[MemoryId] {
        match self {
            Self::SetWeights { ids, .. }
            | Self::Delete { ids, .. }
            | Self::Use { ids, .. }
            | Self::Lease { ids, .. }
            | Self::Acknowledge { ids, .. } => ids,
            Self::Define { .. } | Self::Drop { .. } | Self::Append { .. } => &[],
        }
    }

    /// Returns the number of items that it appends.
    pub fn appended(&self) -> usize {
        if let Self::Append { weights, .. } = self { weights.len() } else { 0 }
    }

    /// Checks what types do not enforce.
    ///
    /// # Errors
    /// [`Refusal::Malformed`].
    pub fn check(&self) -> Result<(), Refusal> {
        let name_fits = |name: &str| (1..=MAX_NAME_BYTES).contains(&name.len());
        check_ids(self.ids())?;
        match self {
            Self::Define { name, definition, limits, .. } => {
                require(name_fits(name), "buffer name: 1 to 128 bytes")?;
                require(definition.len() <= MAX_DEFINITION_BYTES, "definition: at most 64 KiB")?;
                require(limits.share <= limits.capacity, "share: at most the capacity")
            }
            Self::Append { weights, payloads, .. } => check_items(weights, payloads),
            Self::SetWeights { ids, weights, .. } => {
                require(ids.len() == weights.len(), "weights: one per handle")?;
                check_weights(weights)
            }
            Self::Use { ids, .. } => require(ids.len() <= MAX_LISTED, "handles: at most 64"),
            Self::Lease { consumer, ids, .. } => {
                require(name_fits(consumer), "consumer name: 1 to 128 bytes")?;
                require(ids.len() <= MAX_LISTED, "handles: at most 64")
            }
            Self::Acknowledge { consumer, .. } => require(name_fits(consumer), "consumer name: 1 to 128 bytes"),
            Self::Drop { .. } | Self::Delete { .. } => Ok(()),
        }
    }
}

fn check_items(weights: &[u32], payloads: &Blobs) -> Result<(), Refusal> {
    require(weights.len() <= MAX_IDS, "items: at most 65,536")?;
    require(payloads.len() == weights.len(), "payloads: one per item")?;
    let fits = |payload: &[u8]| (1..=MAX_ITEM_PAYLOAD_BYTES).contains(&payload.len());
    require(payloads.iter().all(fits), "payload: 1 to 4,194,304 bytes")?;
    check_weights(weights)
}

fn check_weights(weights: &[u32]) -> Result<(), Refusal> {
    require(weights.iter().all(|&units| units <= ONE), "weight: 0 to 2^30 units")
}
