//! Scrubs payloads: reads and verifies all that the state refers to once per [`crate::Options::scrub_ms`], at a bounded rate, on the
//! snapshot thread; and repairs damaged ones from another replica.
//!
//! There is no second copy of a payload on a disk, so a replica with a damaged one is rebuilt from its primary. A primary transfers
//! its leadership to an in-sync replica first. Without another in-sync replica, reads of the item fail with its id, and a state transfer leaves
//! its payload out: the item is then damaged on all replicas until it is deleted, and nothing else waits for it.

use super::{Source, StoredPayload};
use crate::Error;
use crate::state::partitions::Partitions;
use engram_cluster::Replica;
use engram_memory::{MemoryId, Ordinal, PartitionId, Term};
use std::collections::BTreeMap;

/// Bytes per job, which delays snapshot writes.
const PIECE_BYTES: u64 = 4 << 20;
/// Most bytes read per second: a small load for any disk.
const BYTES_PER_S: u64 = 32 << 20;
/// Slots searched for payloads at once.
const SEARCHED_SLOTS: u32 = 65_536;
/// Interval between searches while there are no payloads.
const EMPTY_MS: u64 = 1_000;
/// Interval between attempts to transfer the leadership of a damaged replica.
const RETRY_MS: u64 = 1_000;

/// Progress of scrubbing, and replicas with damaged payloads.
#[derive(Debug, Default)]
pub(crate) struct PayloadScrub {
    due_ms: u64,
    begun_ms: u64,
    /// The partition that is read, and the slot before which it is continued; scans go down, as those of reads.
    partition: u32,
    before: Option<u32>,
    damaged: BTreeMap<PartitionId, DamagedReplica>,
}

/// A replica to be rebuilt.
#[derive(Debug)]
struct DamagedReplica {
    what: String,
    /// When its leadership is transferred again, if it is the primary.
    retry_ms: u64,
}

/// Payloads to be read.
pub(crate) struct PayloadRead {
    partition: PartitionId,
    payloads: Vec<StoredPayload>,
}

/// Result of a read: its bytes, and the payloads that are damaged.
pub(crate) struct PayloadsRead {
    bytes: u64,
    damaged: Vec<(StoredPayload, Error)>,
}

impl PayloadScrub {
    /// Does not repair a partition any more: no other replica has its damaged payloads.
    pub(crate) fn forget(&mut self, partition: PartitionId) {
        self.damaged.remove(&partition);
    }
}

impl PayloadRead {
    pub(crate) fn run(&self) -> PayloadsRead {
        let mut read = PayloadsRead { bytes: 0, damaged: Vec::new() };
        for payload in &self.payloads {
            read.bytes += u64::from(payload.reference.length);
            if let Err(error) = payload.read() {
                read.damaged.push((payload.clone(), error));
            }
        }
        read
    }
}

impl Partitions {
    /// Returns payloads in files of a partition before a slot, of about a piece, and the slot before which to continue.
    fn payloads_before(&mut self, id: PartitionId, before: Option<u32>) -> (Vec<StoredPayload>, Option<u32>) {
        let Some(partition) = self.get_partition(id) else { return (Vec::new(), None) };
        let end = before.map_or(partition.count(), |before| before.min(partition.count()));
        let start = end.saturating_sub(SEARCHED_SLOTS);
        let (mut payloads, mut bytes) = (Vec::new(), 0);
        for row in (start..end).rev() {
            if bytes >= PIECE_BYTES {
                return (payloads, Some(row + 1));
            }
            let Some(&reference) = self.arena.columns.reference(partition.slot(row)) else { continue };
            if let Some(source @ Source::File(_)) = self.arena.payloads.source(id, &reference) {
                bytes += u64::from(reference.length);
                let is_lost = self.arena.payloads.is_lost(id, &reference);
                payloads.push(StoredPayload { row, reference, content: 0, source, is_lost });
            }
        }
        (payloads, (start > 0).then_some(start))
    }

    /// Returns the item that refers to this place.
    fn item_of(&self, id: PartitionId, payload: &StoredPayload) -> Option<MemoryId> {
        let partition = self.get_partition(id)?;
        let columns = &self.arena.columns;
        let mut slots = (0..partition.count()).map(|local| partition.slot(local));
        slots.find(|slot| columns.reference(*slot) == Some(&payload.reference)).map(|slot| columns.id(slot))
    }
}

/// How a replica with damaged payloads is repaired.
pub(crate) enum Repair {
    /// Discards the replica, which its primary at this term rebuilds.
    Discard { partition: PartitionId, primary: Ordinal, term: Term, what: String },
    /// Transfers the leadership to an in-sync replica first.
    TransferLeadership(PartitionId, Ordinal),
}

impl PayloadScrub {
    /// Returns the next payloads that are due to be read.
    pub(crate) fn next(
        &mut self,
        now_ms: u64,
        period_ms: u64,
        count: u32,
        partitions: &mut Partitions,
    ) -> Option<PayloadRead> {
        if period_ms == 0 || now_ms < self.due_ms {
            return None;
        }
        if partitions.arena.payloads.partitions().is_empty() {
            self.due_ms = now_ms + EMPTY_MS;
            return None;
        }
        while self.partition < count {
            let partition = PartitionId(self.partition);
            let (payloads, before) = match partitions.arena.payloads.has_live(partition) {
                true => partitions.payloads_before(partition, self.before),
                false => (Vec::new(), None),
            };
            self.before = before;
            self.partition += u32::from(before.is_none());
            if !payloads.is_empty() {
                return Some(PayloadRead { partition, payloads });
            }
        }
        self.partition = 0;
        self.due_ms = (self.begun_ms + period_ms).max(now_ms + EMPTY_MS);
        self.begun_ms = self.due_ms;
        None
    }

    /// Handles the result of reading payloads.
    pub(crate) fn finish(
        &mut self,
        read: &PayloadRead,
        output: PayloadsRead,
        partitions: &mut Partitions,
        now_ms: u64,
    ) {
        self.due_ms = now_ms + output.bytes * 1_000 / BYTES_PER_S;
        // The item may have been removed or moved meanwhile.
        for (payload, error) in output.damaged {
            let Some(id) = partitions.item_of(read.partition, &payload) else { continue };
            let payloads = &mut partitions.arena.payloads;
            if !payloads.mark_damaged(read.partition, &payload.reference) {
                payloads.report_damage(read.partition, format!("item {id}: {}", super::describe(&error)));
            }
        }
    }

    /// Records that a replica has damaged payloads, unless that is known.
    pub(crate) fn add_damaged(&mut self, partition: PartitionId, what: String) {
        self.damaged.entry(partition).or_insert(DamagedReplica { what, retry_ms: 0 });
    }

    /// Returns how to repair the damaged replicas now. `state_of`: the replica, and whether it is being repaired.
    pub(crate) fn repairs<'a>(
        &mut self,
        now_ms: u64,
        own: Ordinal,
        state_of: impl Fn(PartitionId) -> (&'a Replica, bool),
    ) -> Vec<Repair> {
        let due: Vec<PartitionId> = self.damaged.keys().copied().collect();
        due.into_iter().filter_map(|partition| self.repair(partition, now_ms, own, state_of(partition))).collect()
    }

    fn repair(
        &mut self,
        partition: PartitionId,
        now_ms: u64,
        own: Ordinal,
        (replica, is_being_repaired): (&Replica, bool),
    ) -> Option<Repair> {
        let (entry, damaged) = (replica.entry()?, self.damaged.get_mut(&partition)?);
        if is_being_repaired {
            self.damaged.remove(&partition);
            return None;
        }
        let (primary, term) = (entry.primary, replica.promised());
        if replica.primary_term().is_none() {
            if primary == own || entry.term != term {
                // The map is about to change.
                return None;
            }
            let what = std::mem::take(&mut damaged.what);
            self.damaged.remove(&partition);
            return Some(Repair::Discard { partition, primary, term, what });
        }
        let to = entry.isr.iter().map(|member| member.ordinal).find(|it| *it != own);
        if now_ms < damaged.retry_ms {
            return None;
        }
        to.map(|to| {
            damaged.retry_ms = now_ms + RETRY_MS;
            Repair::TransferLeadership(partition, to)
        })
    }
}

impl PayloadsRead {
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }
}
