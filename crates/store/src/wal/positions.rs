//! End of each partition's log: the rules for appended and replayed entries.

use std::collections::BTreeMap;

use engram_memory::{Lsn, PartitionId, Term};

use super::{Body, Entry};
use crate::Error;

/// End of a partition's log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tail {
    /// Last LSN; 0 = none yet.
    pub lsn: Lsn,
    /// Term of the last record or installed snapshot; 0 after a truncation, until a record follows.
    pub term: Term,
}

/// Ends of all partitions' logs.
#[derive(Debug, Clone, Default)]
pub(super) struct Positions(BTreeMap<PartitionId, Tail>);

impl Positions {
    pub(super) fn get(&self, partition: PartitionId) -> Option<Tail> {
        self.0.get(&partition).copied()
    }

    /// Advances a partition by one entry. Its first command may have any LSN but 0: older ones may have been deleted.
    pub(super) fn admit(&mut self, entry: &Entry<'_>) -> Result<(), Error> {
        let tail_before = self.get(entry.partition);
        let tail = tail_before.unwrap_or_default();
        let next = match entry.body {
            Body::Command(_) => {
                let follows =
                    entry.lsn.0 != 0 && (tail_before.is_none() || tail.lsn.0.checked_add(1) == Some(entry.lsn.0));
                (follows && entry.term >= tail.term).then_some(Tail { lsn: entry.lsn, term: entry.term })
            }
            Body::Truncate => {
                let is_allowed = entry.lsn >= tail.lsn || entry.term > tail.term;
                // Records of terms between the last kept and the truncating one may follow: the new primary's older records.
                // If the kept records were deleted, the log ends at the LSN of the entry.
                let lsn = tail_before.map_or(entry.lsn, |tail| tail.lsn.min(entry.lsn));
                let cut = Tail { lsn, term: Term(0) };
                (is_allowed && entry.term >= tail.term).then_some(cut)
            }
            Body::Installed => Some(Tail { lsn: entry.lsn, term: entry.term }),
            Body::Promise { .. } | Body::Note(_) => return Ok(()),
        };
        let not_dense = || Error::NotDense {
            partition: entry.partition,
            last: tail.lsn,
            last_term: tail.term,
            found: entry.lsn,
            term: entry.term,
        };
        self.0.insert(entry.partition, next.ok_or_else(not_dense)?);
        Ok(())
    }

    pub(super) fn continue_after(&mut self, partition: PartitionId, tail: Tail) {
        self.0.entry(partition).or_insert(tail);
    }

    /// Restores the position of a partition.
    pub(super) fn restore(&mut self, partition: PartitionId, tail: Option<Tail>) {
        match tail {
            Some(tail) => self.0.insert(partition, tail),
            None => self.0.remove(&partition),
        };
    }
}
