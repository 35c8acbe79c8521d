//! Scrubs snapshots: finds damage on disk while the state is still in memory.
//!
//! Every snapshot on the store's own disk, both generations, is read once per [`crate::Options::scrub_ms`], one after another with
//! even pauses, in pieces at a bounded rate, on the snapshot thread. A damaged one is rewritten from memory; its file is removed
//! only when the new one is durable. Damage is counted and reported ([`crate::Stats`]).
//!
//! Invariant: a remaining snapshot is read again within one period. It can only move from the newest to the older generation of
//! its partition, which is read next.

use super::job::JobOutput;
use crate::context::Context;
use crate::snapshot_file::{self, SnapshotReader};
use crate::stats::{self, Shared};
use crate::{Disk, Error, FileHead};
use engram_memory::{Lsn, PartitionId};
use std::sync::Arc;

/// Bytes per job, which delays snapshot writes.
const PIECE_BYTES: u64 = 4 << 20;
/// Most bytes read per second: a small load for any disk, and 2.7 TB a day.
const BYTES_PER_S: u64 = 32 << 20;
/// Poll interval while there are no snapshots.
const EMPTY_MS: u64 = 1_000;

/// Progress of scrubbing.
#[derive(Debug, Default)]
pub(crate) struct Scrub {
    due_ms: u64,
    /// Next snapshot to read: partition * generations + generation.
    slot: usize,
    /// A partially read snapshot.
    partial: Option<ScrubPosition>,
    /// Earliest start of the next snapshot.
    next_file_ms: u64,
}

/// Position in a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ScrubPosition {
    partition: PartitionId,
    lsn: Lsn,
    chunk: usize,
}

/// A piece of a snapshot to be read.
pub(crate) struct ScrubRead {
    disk: Arc<dyn Disk>,
    file_head: FileHead,
    position: ScrubPosition,
}

/// Result of reading a valid piece.
pub(crate) struct ScrubResult {
    bytes: u64,
    /// Next chunk; `None` = the snapshot is completely read.
    next: Option<usize>,
}

impl Scrub {
    pub(crate) fn new(now_ms: u64) -> Self {
        Self { due_ms: now_ms, ..Self::default() }
    }

    const fn is_due(&self, now_ms: u64) -> bool {
        now_ms >= self.due_ms
    }

    /// Returns what to read now, given the existing snapshots by slot.
    fn next(&mut self, now_ms: u64, period_ms: u64, snapshots: &[Option<Lsn>]) -> Option<ScrubPosition> {
        if period_ms == 0 || !self.is_due(now_ms) {
            return None;
        }
        let generations = snapshot_file::GENERATIONS;
        let partition = |slot: usize| PartitionId((slot / generations) as u32);
        if let Some(position) = self.partial.take() {
            let first = position.partition.0 as usize * generations;
            if snapshots[first..first + generations].contains(&Some(position.lsn)) {
                return Some(position);
            }
        }
        if now_ms < self.next_file_ms {
            self.due_ms = self.next_file_ms;
            return None;
        }
        let slots = (0..snapshots.len()).map(|step| (self.slot + step) % snapshots.len());
        let Some((slot, lsn)) = slots.into_iter().find_map(|slot| Some((slot, snapshots[slot]?))) else {
            self.due_ms = now_ms + EMPTY_MS;
            return None;
        };
        let files = snapshots.iter().flatten().count() as u64;
        self.slot = (slot + 1) % snapshots.len();
        self.next_file_ms = now_ms + (period_ms / files).max(1);
        Some(ScrubPosition { partition: partition(slot), lsn, chunk: 0 })
    }

    /// Records that `bytes` were read, and that the snapshot continues at `rest`.
    fn done(&mut self, now_ms: u64, bytes: u64, rest: Option<ScrubPosition>) {
        self.partial = rest;
        let paced_ms = now_ms + bytes * 1_000 / BYTES_PER_S;
        self.due_ms = if rest.is_some() { paced_ms } else { paced_ms.max(self.next_file_ms) };
    }
}

impl ScrubRead {
    pub(crate) fn run(&self) -> Result<ScrubResult, Error> {
        let ScrubPosition { partition, lsn, chunk } = self.position;
        let reader = SnapshotReader::open(&*self.disk, &self.file_head, &snapshot_file::name(partition, lsn))?;
        reader.check_name(partition, lsn)?;
        let (mut bytes, mut next, mut buffer) = (0, chunk, Vec::new());
        for chunk in reader.chunks().iter().skip(chunk) {
            if bytes >= PIECE_BYTES {
                return Ok(ScrubResult { bytes, next: Some(next) });
            }
            reader.read(chunk, &mut buffer)?;
            bytes += buffer.len() as u64;
            next += 1;
        }
        Ok(ScrubResult { bytes, next: None })
    }
}

/// A damaged snapshot.
pub(crate) struct ScrubOutcome {
    pub(crate) partition: PartitionId,
    pub(crate) lsn: Lsn,
    pub(crate) error: Error,
}

impl Scrub {
    /// Returns the next piece that is due to be read. `snapshots`: by slot.
    pub(crate) fn next_read(
        &mut self,
        context: &Context,
        snapshots: impl FnOnce() -> Vec<Option<Lsn>>,
    ) -> Option<ScrubRead> {
        let now_ms = context.now_ms();
        if !self.is_due(now_ms) {
            return None;
        }
        let position = self.next(now_ms, context.options.scrub_ms, &snapshots())?;
        Some(ScrubRead { disk: Arc::clone(&context.disk), file_head: context.file_head, position })
    }

    /// Handles the result of reading a piece; returns the snapshot if it is damaged.
    pub(crate) fn finish(
        &mut self,
        read: &ScrubRead,
        result: Result<JobOutput, Error>,
        now_ms: u64,
        shared: &Shared,
    ) -> Option<ScrubOutcome> {
        let ScrubPosition { partition, lsn, .. } = read.position;
        match result {
            Ok(JobOutput::Scrubbed(ScrubResult { bytes, next })) => {
                stats::add(&shared.scrubbed_bytes, bytes);
                stats::add(&shared.scrubbed_snapshots, u64::from(next.is_none()));
                let rest = next.map(|chunk| ScrubPosition { chunk, ..read.position });
                self.done(now_ms, bytes, rest);
                None
            }
            Ok(JobOutput::Written(_) | JobOutput::ScrubbedPayloads(_)) => None,
            Err(error) => {
                self.done(now_ms, PIECE_BYTES, None);
                Some(ScrubOutcome { partition, lsn, error })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR_MS: u64 = 60 * 60 * 1_000;

    #[test]
    fn every_snapshot_is_read_once_per_period_evenly_and_within_the_rate_limit() {
        let mut scrub = Scrub::new(5);
        let mut snapshots = vec![Some(Lsn(9)), Some(Lsn(4)), None, None, Some(Lsn(7)), None];
        assert!(scrub.next(4, HOUR_MS, &snapshots).is_none() && scrub.next(5, 0, &snapshots).is_none(), "0 = never");
        let (mut now_ms, mut read, mut pieces) = (5, Vec::new(), 0);
        while now_ms < 5 + 2 * HOUR_MS {
            if let Some(position) = scrub.next(now_ms, HOUR_MS, &snapshots) {
                // Each snapshot has three pieces.
                pieces += 1;
                let rest = (position.chunk < 2).then_some(ScrubPosition { chunk: position.chunk + 1, ..position });
                if rest.is_none() {
                    read.push((now_ms, position.partition.0, position.lsn.0));
                }
                scrub.done(now_ms, PIECE_BYTES, rest);
                assert!(scrub.next(now_ms + PIECE_BYTES * 1_000 / BYTES_PER_S - 1, HOUR_MS, &snapshots).is_none());
            }
            now_ms += 25;
        }
        let order: Vec<_> = read.iter().map(|(_, partition, lsn)| (*partition, *lsn)).collect();
        assert_eq!((order, pieces), ([(0, 9), (0, 4), (2, 7)].repeat(2), 18));
        assert!(read.windows(2).all(|pair| (pair[1].0 - pair[0].0).abs_diff(HOUR_MS / 3) < 1_000), "{read:?}");

        // A partially read snapshot that is replaced is read again only in its turn.
        let position = scrub.next(now_ms, HOUR_MS, &snapshots).unwrap();
        assert_eq!(position.lsn, Lsn(9));
        scrub.done(now_ms, 0, Some(ScrubPosition { chunk: 1, ..position }));
        snapshots[..2].copy_from_slice(&[Some(Lsn(12)), Some(Lsn(10))]);
        assert!(scrub.next(now_ms, HOUR_MS, &snapshots).is_none());
        assert_eq!(scrub.next(now_ms + HOUR_MS / 3, HOUR_MS, &snapshots).unwrap().lsn, Lsn(10));
    }
}
