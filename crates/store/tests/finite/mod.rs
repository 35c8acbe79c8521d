//! Features as the edge lets them through: it takes no infinity and no NaN. To a store they are bits; to recall they are numbers, and
//! the bits of a NaN that comes of them depend on the order of a sum's operands.

use engram_memory::{Command, Record};

/// The record with f16 features that are finite, below 2.
pub(crate) fn finite(mut record: Record) -> Record {
    if let Command::Upsert(upsert) = &mut record.command {
        upsert.features.iter_mut().skip(1).step_by(2).for_each(|high| *high &= !0x40);
    }
    record
}
