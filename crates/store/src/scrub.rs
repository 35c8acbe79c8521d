//! Reads snapshots again before they are needed: what rots on a disk is found while the state that it holds is still here.
//!
//! Every snapshot of the store's own disk, both generations, is read once in [`crate::Options::scrub_ms`], one after another
//! with even pauses, in pieces at a bounded rate, on the thread that writes snapshots. A damaged one is written anew from
//! memory; its file goes only when the new one is durable. The damage is counted and told ([`crate::Stats`]).
//!
//! Invariant: a snapshot that stays is read within a period of the last time. It can only move from the newest to the older
//! generation of its partition, which is looked at right after.

use crate::background::{Job, JobDone};
use crate::snapshot_file::{self, SnapshotReader};
use crate::stats;
use crate::store::Store;
use crate::{Disk, Error, FileHead};
use engram_memory::{Lsn, PartitionId};
use std::sync::Arc;

/// Bytes read in one go: a snapshot that is to be written waits for no more.
const PIECE_BYTES: u64 = 4 << 20;
/// Bytes read per second at most: little beside what a disk of this century can do, and 2.7 TB a day.
const BYTES_PER_S: u64 = 32 << 20;
/// While there is nothing to read: how often it is looked for.
const EMPTY_MS: u64 = 1_000;

/// Where the reading stands.
#[derive(Debug, Default)]
pub(crate) struct Scrub {
    due_ms: u64,
    /// The next generation of a partition that is looked at: partition * generations + generation.
    slot: usize,
    /// A snapshot that was read in part.
    under_way: Option<Place>,
    /// Before this no other one is begun.
    next_file_ms: u64,
}

/// A place in a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    partition: PartitionId,
    lsn: Lsn,
    chunk: usize,
}

/// A piece of a snapshot to be read.
pub(crate) struct Look {
    disk: Arc<dyn Disk>,
    file_head: FileHead,
    place: Place,
}

/// What was read, all of it right.
pub(crate) struct Looked {
    bytes: u64,
    /// The chunk to go on with; `None` = the whole snapshot was read.
    next: Option<usize>,
}

impl Scrub {
    pub(crate) fn new(now_ms: u64) -> Self {
        Self { due_ms: now_ms, ..Self::default() }
    }

    const fn is_due(&self, now_ms: u64) -> bool {
        now_ms >= self.due_ms
    }

    /// What is to be read now, of the snapshots that are there (by slot).
    fn next(&mut self, now_ms: u64, period_ms: u64, snapshots: &[Option<Lsn>]) -> Option<Place> {
        if period_ms == 0 || !self.is_due(now_ms) {
            return None;
        }
        let generations = snapshot_file::GENERATIONS;
        let partition = |slot: usize| PartitionId((slot / generations) as u32);
        if let Some(place) = self.under_way.take() {
            let first = place.partition.0 as usize * generations;
            if snapshots[first..first + generations].contains(&Some(place.lsn)) {
                return Some(place);
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
        Some(Place { partition: partition(slot), lsn, chunk: 0 })
    }

    /// A piece of `bytes` was read, and the snapshot goes on at `rest`.
    fn done(&mut self, now_ms: u64, bytes: u64, rest: Option<Place>) {
        self.under_way = rest;
        let paced_ms = now_ms + bytes * 1_000 / BYTES_PER_S;
        self.due_ms = if rest.is_some() { paced_ms } else { paced_ms.max(self.next_file_ms) };
    }
}

impl Look {
    pub(crate) fn run(&self) -> Result<Looked, Error> {
        let Place { partition, lsn, chunk } = self.place;
        let reader = SnapshotReader::open(&*self.disk, &self.file_head, &snapshot_file::name(partition, lsn))?;
        reader.check_name(partition, lsn)?;
        let (mut bytes, mut next, mut buffer) = (0, chunk, Vec::new());
        for chunk in reader.chunks().iter().skip(chunk) {
            if bytes >= PIECE_BYTES {
                return Ok(Looked { bytes, next: Some(next) });
            }
            reader.read(chunk, &mut buffer)?;
            bytes += buffer.len() as u64;
            next += 1;
        }
        Ok(Looked { bytes, next: None })
    }
}

impl Store {
    /// The next piece of a snapshot that is due to be read.
    pub(crate) fn next_look(&mut self) -> Option<Job> {
        let now_ms = self.clock.elapsed_ms();
        if !self.background.scrub.is_due(now_ms) {
            return None;
        }
        let snapshots: Vec<Option<Lsn>> = (self.places.iter())
            .flat_map(|place| place.snapshots.map(|snapshot| snapshot.filter(|_| place.corrupt.is_none())))
            .collect();
        let place = self.background.scrub.next(now_ms, self.options.scrub_ms, &snapshots)?;
        let (disk, file_head) = (Arc::clone(&self.disk), self.identity().head());
        Some(Job::Look(Look { disk, file_head, place }))
    }

    /// A piece was read, or cannot be.
    pub(crate) fn looked(&mut self, look: &Look, result: Result<JobDone, Error>) {
        let now_ms = self.clock.elapsed_ms();
        let Place { partition, lsn, .. } = look.place;
        match result {
            Ok(JobDone::Looked(Looked { bytes, next })) => {
                stats::add(&self.shared.scrubbed_bytes, bytes);
                stats::add(&self.shared.scrubbed_snapshots, u64::from(next.is_none()));
                let rest = next.map(|chunk| Place { chunk, ..look.place });
                self.background.scrub.done(now_ms, bytes, rest);
            }
            Ok(JobDone::Written(_)) => {}
            Err(error) => {
                self.background.scrub.done(now_ms, PIECE_BYTES, None);
                let place = &mut self.places[partition.0 as usize];
                // A copy may have come meanwhile, or what was here may have been put aside.
                if place.snapshots.contains(&Some(lsn)) {
                    let [newest, older] = place.snapshots.map(|snapshot| snapshot.filter(|other| *other != lsn));
                    place.snapshots = [newest.or(older), newest.and(older)];
                    place.damaged.push(lsn);
                    stats::add(&self.shared.damaged_snapshots, 1);
                    let told = format!("a snapshot of partition {partition} is damaged, and is written anew: {error}");
                    *self.shared.damage.write().expect(stats::UNPOISONED) = Some(told);
                    self.write_anew(partition);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR_MS: u64 = 60 * 60 * 1_000;

    #[test]
    fn every_snapshot_is_read_once_in_a_period_with_even_pauses_and_no_faster_than_the_rate() {
        let mut scrub = Scrub::new(5);
        let mut snapshots = vec![Some(Lsn(9)), Some(Lsn(4)), None, None, Some(Lsn(7)), None];
        assert!(scrub.next(4, HOUR_MS, &snapshots).is_none() && scrub.next(5, 0, &snapshots).is_none(), "0 = never");
        let (mut now_ms, mut read, mut pieces) = (5, Vec::new(), 0);
        while now_ms < 5 + 2 * HOUR_MS {
            if let Some(place) = scrub.next(now_ms, HOUR_MS, &snapshots) {
                // Each has three pieces; the middle one is not the last.
                pieces += 1;
                let rest = (place.chunk < 2).then_some(Place { chunk: place.chunk + 1, ..place });
                if rest.is_none() {
                    read.push((now_ms, place.partition.0, place.lsn.0));
                }
                scrub.done(now_ms, PIECE_BYTES, rest);
                assert!(scrub.next(now_ms + PIECE_BYTES * 1_000 / BYTES_PER_S - 1, HOUR_MS, &snapshots).is_none());
            }
            now_ms += 25;
        }
        let order: Vec<_> = read.iter().map(|(_, partition, lsn)| (*partition, *lsn)).collect();
        assert_eq!((order, pieces), ([(0, 9), (0, 4), (2, 7)].repeat(2), 18));
        assert!(read.windows(2).all(|pair| (pair[1].0 - pair[0].0).abs_diff(HOUR_MS / 3) < 1_000), "{read:?}");

        // One that is written anew while it is read in part is begun again only in its turn.
        let place = scrub.next(now_ms, HOUR_MS, &snapshots).unwrap();
        assert_eq!(place.lsn, Lsn(9));
        scrub.done(now_ms, 0, Some(Place { chunk: 1, ..place }));
        snapshots[..2].copy_from_slice(&[Some(Lsn(12)), Some(Lsn(10))]);
        assert!(scrub.next(now_ms, HOUR_MS, &snapshots).is_none());
        assert_eq!(scrub.next(now_ms + HOUR_MS / 3, HOUR_MS, &snapshots).unwrap().lsn, Lsn(10));
    }
}
