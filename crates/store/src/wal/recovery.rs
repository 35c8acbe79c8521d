//! Recovers the log: verifies everything before replaying anything.
//!
//! Two passes over the segments. The first verifies headers, chains, checksums and LSNs, distinguishes a torn tail from
//! corruption, and collects what later entries undo; the second replays the remaining entries.

use std::collections::BTreeMap;

use engram_memory::{Lsn, PartitionId, Term};

use super::batch::CarryOver;
use super::positions::Positions;
use super::segment::{self, Segment};
use super::{Body, Entry, Position, SegmentContents, Visit, record};
use crate::{Disk, Error, FileHead};

/// Result of recovering the log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovery {
    /// End of the last complete batch.
    pub end: Position,
    /// Highest position known to have been synced before this start. Batches between it and `end` may have been lost in a power
    /// loss; in mode `sync` at most one.
    pub synced_through: Position,
    /// Non-zero bytes after `end` that are no complete batch: a torn write, or a damaged last batch that no later one seals and that
    /// may therefore have been acknowledged. They were dropped, which has to be reported to the operator.
    pub dropped_bytes: u64,
    /// Why the log ends there, if `dropped_bytes` is not 0.
    pub dropped_because: Option<&'static str>,
    /// Segments read.
    pub segments: u64,
    /// Batches read.
    pub batches: u64,
    /// Entries read, including undone ones.
    pub entries: u64,
    /// Commands that later entries undo.
    pub undone: u64,
    /// Highest recorded commit with its term, per partition.
    pub commits: BTreeMap<PartitionId, (Term, Lsn)>,
}

/// State from which the log continues.
pub(super) struct RecoveredLog {
    pub(super) recovery: Recovery,
    pub(super) positions: Positions,
    pub(super) segments: Vec<SegmentContents>,
    pub(super) next: NextSegment,
}

/// Parameters of the next segment.
pub(super) struct NextSegment {
    pub(super) index: u64,
    pub(super) starts_at: u64,
    pub(super) carried: CarryOver,
    /// Newest existing segment, truncated to its end once the next one records that.
    pub(super) before: Option<Segment>,
    /// Dropped bytes after that end.
    pub(super) dropped_bytes: u64,
}

/// A later entry that undoes commands.
struct Undo {
    /// Number of entries before it in the log.
    number: u64,
    /// Commands above this lsn ...
    after: Lsn,
    /// ... of terms below this one.
    below: Term,
}

pub(super) fn recover(
    disk: &dyn Disk,
    head: &FileHead,
    sealed_at: Option<Position>,
    visit: &mut Visit<'_>,
) -> Result<RecoveredLog, Error> {
    let segments = open_all(disk, head)?;
    let mut first = FirstPass::default();
    let mut recovery = Recovery { segments: segments.len() as u64, ..Recovery::default() };
    for (at, segment) in segments.iter().enumerate() {
        let next = segments.get(at + 1);
        let through = next.map(|next| next.head.starts_at);
        first.contents.push(SegmentContents {
            index: segment.head.index,
            starts_at: segment.head.starts_at,
            highest: BTreeMap::new(),
        });
        let end = segment.walk(through, &mut |header, records| {
            recovery.batches += 1;
            for (partition, term, lsn) in header.commits() {
                let newest = recovery.commits.entry(partition).or_default();
                *newest = (*newest).max((term, lsn));
            }
            let offset = segment.offset(header.position);
            each(records, &segment.path, offset, &mut |entry| first.note(&entry))
        })?;
        let corrupt = |what| Error::Corrupt { path: segment.path.clone(), offset: segment.offset(end.position), what };
        recovery.end = Position(end.position);
        match through {
            // The next segment was started only after all of this one was durable.
            Some(through) if end.position != through => return Err(corrupt(end.why)),
            Some(_) => {}
            None => {
                let remains = segment.remains(end.position)?;
                let sealed = sealed_at.unwrap_or_default().0;
                let synced_through = end.synced_through.max(remains.synced_through).max(sealed);
                if synced_through > end.position {
                    return Err(corrupt(end.why));
                }
                recovery.synced_through = Position(synced_through);
                recovery.dropped_bytes = remains.bytes;
                recovery.dropped_because = (remains.bytes > 0).then_some(end.why);
                // A failed sync may have ended the previous process and discarded its dirty pages: the data read here may exist in
                // memory only, and only rewritten data is covered by this sync.
                segment.rewrite(synced_through, end.position)?;
                segment.file.sync_data().map_err(|source| Error::SyncFailed { path: segment.path.clone(), source })?;
            }
        }
    }
    if segments.is_empty() && sealed_at.is_some_and(|sealed| sealed.0 > 0) {
        let what = "the log is missing, although a clean mark records its end";
        return Err(Error::Corrupt { path: disk.describe(&segment::name(1)), offset: 0, what });
    }
    recovery.entries = first.entries;
    let commits = &recovery.commits;
    recovery.undone = replay(&segments, recovery.end.0, &first.undone, &mut |entry| visit(entry, commits))?;
    let next = NextSegment {
        index: segments.last().map_or(1, |newest| newest.head.index + 1),
        starts_at: recovery.end.0,
        carried: first.carried,
        before: segments.into_iter().next_back(),
        dropped_bytes: recovery.dropped_bytes,
    };
    Ok(RecoveredLog { recovery, positions: first.positions, segments: first.contents, next })
}

/// Opens all segments, oldest first.
fn open_all(disk: &dyn Disk, head: &FileHead) -> Result<Vec<Segment>, Error> {
    let names = disk.list().map_err(|source| Error::Io { operation: "list", path: disk.describe(""), source })?;
    let mut segments: Vec<Segment> = Vec::new();
    for index in names.iter().filter_map(|name| segment::index_of(name)) {
        let segment = Segment::open(disk, head, index)?;
        if let Some(before) = segments.last() {
            let corrupt = |what| Error::Corrupt { path: segment.path.clone(), offset: 0, what };
            if before.head.index + 1 != index {
                return Err(corrupt("the previous segment is missing"));
            }
            if before.head.starts_at > segment.head.starts_at {
                return Err(corrupt("it begins before the previous segment"));
            }
        }
        segments.push(segment);
    }
    Ok(segments)
}

/// Results of the first pass.
#[derive(Default)]
struct FirstPass {
    entries: u64,
    positions: Positions,
    carried: CarryOver,
    contents: Vec<SegmentContents>,
    undone: BTreeMap<PartitionId, Vec<Undo>>,
}

impl FirstPass {
    fn note(&mut self, entry: &Entry<'_>) -> Result<(), Error> {
        self.positions.admit(entry)?;
        self.carried.note(entry);
        let undo = |after, below| Undo { number: self.entries, after, below };
        match entry.body {
            Body::Command(_) => {
                let contents = self.contents.last_mut().expect("a segment is being read");
                let highest = contents.highest.entry(entry.partition).or_default();
                *highest = (*highest).max(entry.lsn);
            }
            Body::Truncate => self.undone.entry(entry.partition).or_default().push(undo(entry.lsn, entry.term)),
            // Undoes everything before, of any LSN and term.
            Body::Installed => self.undone.entry(entry.partition).or_default().push(undo(Lsn(0), Term(u64::MAX))),
            Body::Promise { .. } | Body::Note(_) => {}
        }
        self.entries += 1;
        Ok(())
    }
}

/// Replays every entry that is not undone; returns the number of undone commands.
fn replay(
    segments: &[Segment],
    end: u64,
    undone: &BTreeMap<PartitionId, Vec<Undo>>,
    visit: &mut dyn FnMut(Entry<'_>) -> Result<(), Error>,
) -> Result<u64, Error> {
    let (mut number, mut dropped) = (0, 0);
    for (at, segment) in segments.iter().enumerate() {
        let through = segments.get(at + 1).map_or(end, |next| next.head.starts_at);
        let walked = segment.walk(Some(through), &mut |header, records| {
            let offset = segment.offset(header.position);
            each(records, &segment.path, offset, &mut |entry| {
                let here = number;
                number += 1;
                let is_undone = |undo: &Undo| undo.number > here && entry.lsn > undo.after && entry.term < undo.below;
                let partition_undos = undone.get(&entry.partition).map_or(&[][..], |partition_undos| partition_undos);
                if matches!(entry.body, Body::Command(_)) && partition_undos.iter().any(is_undone) {
                    dropped += 1;
                    return Ok(());
                }
                visit(entry)
            })
        })?;
        if walked.position != through {
            let offset = segment.offset(walked.position);
            return Err(Error::Corrupt {
                path: segment.path.clone(),
                offset,
                what: "the file changed while it was read",
            });
        }
    }
    Ok(dropped)
}

/// Decodes the records of a verified batch.
fn each(
    mut records: &[u8],
    path: &str,
    offset: u64,
    visit: &mut dyn FnMut(Entry<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    while !records.is_empty() {
        let entry = record::decode(&mut records).map_err(|what| Error::Corrupt { path: path.into(), offset, what })?;
        visit(entry)?;
    }
    Ok(())
}
