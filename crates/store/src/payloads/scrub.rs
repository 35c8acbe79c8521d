//! Scrubs payloads: reads and verifies all that the state refers to once per [`crate::Options::scrub_ms`], at a bounded rate, on the
//! snapshot thread; and repairs damaged ones from another replica.
//!
//! There is no second copy of a payload on a disk, so a replica with a damaged one is rebuilt from its primary. A primary transfers
//! its leadership to an in-sync replica first. Without another in-sync replica, reads of the item fail with its id, and a state transfer leaves
//! its payload out: the item is then damaged on all replicas until it is deleted, and nothing else waits for it.

use super::{Source, StoredPayload};
use crate::Error;
use crate::background::{Job, JobOutput};
use crate::partitions::Partitions;
use crate::stats;
use crate::store::Store;
use engram_memory::{MemoryId, Ordinal, PartitionId};
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

impl Store {
    /// Returns the next payloads that are due to be read.
    pub(crate) fn next_payload_scrub(&mut self) -> Option<Job> {
        let now_ms = self.clock.elapsed_ms();
        let scrub = &mut self.background.payload_scrub;
        if self.options.scrub_ms == 0 || now_ms < scrub.due_ms {
            return None;
        }
        if self.partitions.arena.payloads.partitions().is_empty() {
            scrub.due_ms = now_ms + EMPTY_MS;
            return None;
        }
        while scrub.partition < self.options.shape.partitions {
            let partition = PartitionId(scrub.partition);
            let (payloads, before) = match self.partitions.arena.payloads.has_live(partition) {
                true => self.partitions.payloads_before(partition, scrub.before),
                false => (Vec::new(), None),
            };
            scrub.before = before;
            scrub.partition += u32::from(before.is_none());
            if !payloads.is_empty() {
                return Some(Job::ScrubPayloads(PayloadRead { partition, payloads }));
            }
        }
        scrub.partition = 0;
        scrub.due_ms = (scrub.begun_ms + self.options.scrub_ms).max(now_ms + EMPTY_MS);
        scrub.begun_ms = scrub.due_ms;
        None
    }

    /// Handles the result of reading payloads.
    pub(crate) fn payload_scrub_done(&mut self, read: &PayloadRead, result: Result<JobOutput, Error>) {
        let Ok(JobOutput::ScrubbedPayloads(PayloadsRead { bytes, damaged })) = result else { return };
        stats::add(&self.shared.scrubbed_bytes, bytes);
        self.background.payload_scrub.due_ms = self.clock.elapsed_ms() + bytes * 1_000 / BYTES_PER_S;
        // The item may have been removed or moved meanwhile.
        for (payload, error) in damaged {
            let Some(id) = self.partitions.item_of(read.partition, &payload) else { continue };
            let payloads = &mut self.partitions.arena.payloads;
            if !payloads.mark_damaged(read.partition, &payload.reference) {
                payloads.report_damage(read.partition, format!("item {id}: {}", super::describe(&error)));
            }
        }
    }

    /// Rebuilds replicas with damaged payloads.
    ///
    /// # Errors
    /// Those of the disk.
    pub(crate) fn repair_payloads(&mut self) -> Result<(), Error> {
        stats::add(&self.shared.damaged_payloads, self.partitions.arena.payloads.take_found());
        for (partition, what) in self.partitions.arena.payloads.take_damages() {
            *self.shared.damage.write() = Some(format!("a payload of partition {partition} is damaged: {what}"));
            let damaged = &mut self.background.payload_scrub.damaged;
            if damaged.contains_key(&partition) {
                continue;
            }
            damaged.insert(partition, DamagedReplica { what, retry_ms: 0 });
        }
        if self.options.replication.replicas <= 1 {
            return Ok(());
        }
        let due: Vec<PartitionId> = self.background.payload_scrub.damaged.keys().copied().collect();
        due.into_iter().try_for_each(|partition| self.repair_replica(partition))
    }

    fn repair_replica(&mut self, partition: PartitionId) -> Result<(), Error> {
        let (now_ms, own) = (self.clock.elapsed_ms(), self.options.replication.ordinal);
        let state = &self.states[partition.0 as usize];
        let damaged = &mut self.background.payload_scrub.damaged;
        let is_being_repaired = state.corrupt.is_some() || !self.partitions.contains(partition);
        let (Some(entry), Some(replica)) = (state.replica.entry(), damaged.get_mut(&partition)) else { return Ok(()) };
        if is_being_repaired {
            damaged.remove(&partition);
            return Ok(());
        }
        let (primary, term) = (entry.primary, state.replica.promised());
        if state.replica.primary_term().is_none() {
            if primary == own || state.replica.entry().is_none_or(|entry| entry.term != term) {
                // The map is about to change.
                return Ok(());
            }
            let what = std::mem::take(&mut replica.what);
            damaged.remove(&partition);
            return self.discard_replica(partition, primary, term, &what);
        }
        let successor: Option<Ordinal> = entry.isr.iter().map(|member| member.ordinal).find(|it| *it != own);
        if now_ms >= replica.retry_ms
            && let Some(to) = successor
        {
            replica.retry_ms = now_ms + RETRY_MS;
            self.transfer_leadership(partition, to);
        }
        Ok(())
    }
}
