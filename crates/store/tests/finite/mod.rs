//! Finite features, as enforced at the API. To a store they are bits; to recall they are numbers, and the bits of a resulting NaN
//! would depend on the order of operands.

use engram_memory::{Command, Record};

/// Returns the record with finite f16 features below 2.
pub(crate) fn finite(mut record: Record) -> Record {
    if let Command::Upsert(upsert) = &mut record.command {
        upsert.features.iter_mut().skip(1).step_by(2).for_each(|high| *high &= !0x40);
    }
    record
}
