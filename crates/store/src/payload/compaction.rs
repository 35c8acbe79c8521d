//! Compaction: moves the payloads of segments with few live bytes to the open segment, so that the file can be removed.
//!
//! A segment is compacted when less than half of its bytes are live. A step moves a bounded number of bytes on the engine thread
//! between two turns, at a bounded rate. The file remains until no kept snapshot refers to it.

use super::{HEAD_BYTES, Payloads, Table};
use crate::state::partitions::Partitions;
use engram_memory::{MemoryId, PartitionId};
use std::collections::{BTreeSet, VecDeque};

/// Bytes moved per step.
const STEP_BYTES: u64 = 2 << 20;
/// Most bytes moved per second.
const BYTES_PER_S: u64 = 32 << 20;
/// Interval between searches for a segment to compact.
const SEARCH_MS: u64 = 1_000;

/// Progress of compaction.
#[derive(Debug, Default)]
pub(crate) struct Compaction {
    due_ms: u64,
    work: Option<Work>,
    /// Segments with damaged payloads.
    skipped: BTreeSet<(PartitionId, u32)>,
}

/// A segment that is compacted, and the items that may refer to it.
#[derive(Debug)]
struct Work {
    partition: PartitionId,
    number: u32,
    items: VecDeque<MemoryId>,
}

impl Payloads {
    /// Returns a closed segment of which less than half is live, unless nothing is.
    fn sparse_segment(&self, skipped: &BTreeSet<(PartitionId, u32)>) -> Option<(PartitionId, u32)> {
        self.tables.iter().find_map(|(&partition, table)| {
            let number = table.sparse_segment(|number| skipped.contains(&(PartitionId(partition), number)))?;
            Some((PartitionId(partition), number))
        })
    }
}

impl Table {
    fn sparse_segment(&self, is_skipped: impl Fn(u32) -> bool) -> Option<u32> {
        // Bytes that the disk does not take must not grow.
        let open = self.open.as_ref().filter(|open| open.failure.is_none())?;
        let is_sparse = |(number, segment): &(&u32, &super::Segment)| {
            let payload_bytes = u64::from(segment.bytes).saturating_sub(HEAD_BYTES as u64);
            **number != open.number
                && segment.live_bytes > 0
                && segment.live_bytes * 2 < payload_bytes
                && !is_skipped(**number)
        };
        self.segments.iter().find(is_sparse).map(|(number, _)| *number)
    }
}

impl Partitions {
    /// Returns the items of a partition that refer to a segment.
    fn items_in(&self, id: PartitionId, number: u32) -> VecDeque<MemoryId> {
        let Some(partition) = self.get_partition(id) else { return VecDeque::new() };
        let columns = &self.arena.columns;
        let slots = (0..partition.count()).map(|local| partition.slot(local));
        let refers = |slot: &u32| columns.reference(*slot).is_some_and(|reference| reference.segment == number);
        slots.filter(refers).map(|slot| columns.id(slot)).collect()
    }

    /// Moves a payload out of a segment, if it is still there. Returns its bytes; `None` if it is damaged.
    fn move_payload(&mut self, id: PartitionId, item: MemoryId, number: u32) -> Option<u64> {
        let Some((partition, arena)) = self.open_partition_mut(id) else { return Some(0) };
        let Some(slot) = partition.find(arena, item) else { return Some(0) };
        let Some(&before) = arena.columns.reference(slot).filter(|it| it.segment == number) else { return Some(0) };
        let bytes = arena.payloads.read(id, &before).ok()?;
        let (segment, offset) = arena.payloads.write(id, &bytes);
        let after = super::Reference { segment, offset, ..before };
        arena.payloads.release(id, &before);
        arena.payloads.retain(id, &after);
        arena.payloads.compacted_bytes += u64::from(after.length);
        arena.columns.set_reference(slot, after);
        Some(u64::from(after.length))
    }
}

impl Compaction {
    /// Moves some payloads out of a sparse segment, when due.
    pub(crate) fn step(&mut self, partitions: &mut Partitions, now_ms: u64) {
        if now_ms < self.due_ms {
            return;
        }
        let Some(mut work) = self.work.take().or_else(|| self.next(partitions)) else {
            self.due_ms = now_ms + SEARCH_MS;
            return;
        };
        let mut moved = 0;
        while moved < STEP_BYTES
            && let Some(item) = work.items.pop_front()
        {
            match partitions.move_payload(work.partition, item, work.number) {
                Some(bytes) => moved += bytes,
                None => {
                    self.skipped.insert((work.partition, work.number));
                }
            }
        }
        self.due_ms = now_ms + moved * 1_000 / BYTES_PER_S;
        self.work = Some(work).filter(|work| !work.items.is_empty());
    }

    fn next(&self, partitions: &Partitions) -> Option<Work> {
        let (partition, number) = partitions.arena.payloads.sparse_segment(&self.skipped)?;
        Some(Work { partition, number, items: partitions.items_in(partition, number) })
    }
}
