//! Replay buffers of a partition: commands, and the replicated state next to the items.
//!
//! An item is a memory in the group of its buffer. Its id is its handle, and is chosen here: the *position* of an item is `mix64(handle)`, and
//! positions rise with each item that a partition appends. A position is above all earlier ones of its partition, and congruent to the number
//! of the partition modulo the number of partitions, so a handle is never reused, in this partition or another, whatever was removed in between.
//! Positions begin with the time of the append: over all partitions they sort items by age.

mod command;
mod cursor;
mod table;

pub use command::{BufferCommand, BufferRef, Limits, Placement};
pub use cursor::{Cursor, LeaseError, MAX_AHEAD, Position};
pub use table::{Buffer, BufferTable, Counts, RepartitionSource};

use crate::hash::{mix64, unmix64};
use crate::ids::MemoryId;

/// Most buffers of a cluster.
pub const MAX_BUFFERS: usize = 64;
/// Most consumers of a buffer.
pub const MAX_CONSUMERS: usize = 64;
/// Longest name of a buffer or consumer, in bytes.
pub const MAX_NAME_BYTES: usize = 128;
/// Longest definition of a buffer, in bytes.
pub const MAX_DEFINITION_BYTES: usize = 64 << 10;
/// Most ids in a lease or a use: all rejections fit into an outcome.
pub const MAX_LISTED: usize = crate::outcome::MAX_REJECTIONS;
/// Start of the time in positions, in milliseconds since the Unix epoch: September 2020.
const EPOCH_MS: u64 = 1_600_000_000_000;
/// Bits of the number of an item within a millisecond.
const ROW_BITS: u32 = 12;
/// Largest order: 70 years in milliseconds.
const MAX_ORDER: u64 = (1 << 53) - 1;

/// What a full buffer does with an append.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Remover {
    /// Removes the oldest item.
    #[default]
    Fifo,
    /// Removes the newest item.
    Lifo,
    /// Removes the item with the lowest priority, the oldest among equals.
    LowestPriority,
    /// Removes the item with the highest priority, the oldest among equals.
    HighestPriority,
    /// Refuses the append.
    Refuse,
}

impl Remover {
    /// All removers.
    pub const ALL: [Self; 5] = [Self::Fifo, Self::Lifo, Self::LowestPriority, Self::HighestPriority, Self::Refuse];

    /// Returns its number in files and on the wire.
    pub const fn number(self) -> u8 {
        match self {
            Self::Fifo => 1,
            Self::Lifo => 2,
            Self::LowestPriority => 3,
            Self::HighestPriority => 4,
            Self::Refuse => 5,
        }
    }

    /// Returns the remover of a number.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|remover| remover.number() == number)
    }
}

/// Returns the order of row `row` of a batch that is appended at `now_ms`, in milliseconds since the Unix epoch: the part of a position that
/// sorts items.
pub const fn order(now_ms: u64, row: u64) -> u64 {
    let order = (now_ms.saturating_sub(EPOCH_MS) << ROW_BITS).saturating_add(row);
    if order > MAX_ORDER { MAX_ORDER } else { order }
}

/// Returns the position of `order` in a partition.
pub const fn position(order: u64, partition: u32, partitions: u32) -> Position {
    let order = if order > MAX_ORDER { MAX_ORDER } else { order };
    order * partitions as u64 + partition as u64
}

/// Returns the position of a handle.
pub const fn position_of(handle: MemoryId) -> Position {
    mix64(handle.0)
}

/// Returns the handle at a position.
pub const fn handle_at(position: Position) -> MemoryId {
    MemoryId(unmix64(position))
}

/// Returns the handles of an append of `count` items in a cluster of `partitions`, by the first.
pub fn handles(first: MemoryId, count: u64, partitions: u32) -> impl Iterator<Item = MemoryId> {
    let first = position_of(first);
    (0..count).map(move |row| handle_at(first + row * u64::from(partitions)))
}
