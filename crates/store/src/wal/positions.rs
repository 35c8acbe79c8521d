//! Where each partition's log stands: the rules that an appended and a replayed entry must both obey.

use std::collections::BTreeMap;

use engram_memory::{Lsn, PartitionId, Term};

use super::{Body, Entry};
use crate::Error;

/// End of a partition's log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tail {
    /// The last lsn; 0 = none yet.
    pub lsn: Lsn,
    /// The term of the last record or of the copy that replaced it; 0 after a cut, until a record follows.
    pub term: Term,
}

/// The ends of all partitions' logs.
#[derive(Debug, Clone, Default)]
pub(super) struct Positions(BTreeMap<PartitionId, Tail>);

impl Positions {
    pub(super) fn get(&self, partition: PartitionId) -> Option<Tail> {
        self.0.get(&partition).copied()
    }

    /// Moves a partition on by one entry. Its first command may have any lsn but 0: older ones may have been deleted.
    pub(super) fn admit(&mut self, entry: &Entry<'_>) -> Result<(), Error> {
        let known = self.get(entry.partition);
        let tail = known.unwrap_or_default();
        let next = match entry.body {
            Body::Command(_) => {
                let follows = entry.lsn.0 != 0 && (known.is_none() || tail.lsn.0.checked_add(1) == Some(entry.lsn.0));
                (follows && entry.term >= tail.term).then_some(Tail { lsn: entry.lsn, term: entry.term })
            }
            Body::Truncate => {
                let may = entry.lsn >= tail.lsn || entry.term > tail.term;
                // Records of terms between the one that stays and the one that cuts may follow: the new primary's older ones.
                // What it leaves, where that was deleted, ends where it says.
                let lsn = known.map_or(entry.lsn, |tail| tail.lsn.min(entry.lsn));
                let cut = Tail { lsn, term: Term(0) };
                (may && entry.term >= tail.term).then_some(cut)
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

    /// Sets a partition back to where it stood.
    pub(super) fn restore(&mut self, partition: PartitionId, tail: Option<Tail>) {
        match tail {
            Some(tail) => self.0.insert(partition, tail),
            None => self.0.remove(&partition),
        };
    }
}
