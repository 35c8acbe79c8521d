//! Reads the log back: everything is checked before anything is shown.
//!
//! Two passes over the segments. The first checks heads, chains, checksums and lsns, tells a torn tail from rot, and
//! notes what later entries undo; the second shows the entries that stand. A log that is refused was shown to nobody.

use std::collections::BTreeMap;

use engram_memory::{Lsn, PartitionId, Term};

use super::batch::Carried;
use super::positions::Positions;
use super::segment::{self, Segment};
use super::{Body, Contents, Entry, Position, Visit, record};
use crate::{Disk, Error, FileHead};

/// What was found in the log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovery {
    /// End of the last whole batch.
    pub end: Position,
    /// Highest position known to have been synced before this start. Between it and `end` a loss of power may have taken
    /// batches; in mode `sync` that is one batch at most.
    pub synced_through: Position,
    /// Bytes behind `end` that were something, but not a whole batch: a torn write, or the last batch damaged, which no
    /// later one seals and which may therefore have been acknowledged. They were dropped; tell the operator.
    pub dropped_bytes: u64,
    /// Why the log ends there, when `dropped_bytes` is not 0.
    pub dropped_because: Option<&'static str>,
    /// Segments read.
    pub segments: u64,
    /// Batches read.
    pub batches: u64,
    /// Entries read, undone ones included.
    pub entries: u64,
    /// Commands that later entries undo.
    pub undone: u64,
    /// Highest commit that a batch names, with the term, per partition.
    pub commits: BTreeMap<PartitionId, (Term, Lsn)>,
}

/// Everything that the log goes on with.
pub(super) struct Recovered {
    pub(super) recovery: Recovery,
    pub(super) positions: Positions,
    pub(super) segments: Vec<Contents>,
    pub(super) next: Next,
}

/// What the next segment begins with.
pub(super) struct Next {
    pub(super) index: u64,
    pub(super) starts_at: u64,
    pub(super) carried: Carried,
    /// The newest segment so far, to be cut to its end once the next one says where that is.
    pub(super) before: Option<Segment>,
    /// Bytes behind that end which were something.
    pub(super) dropped_bytes: u64,
}

/// A later entry that undoes commands.
struct Undo {
    /// Entries before it in the log.
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
) -> Result<Recovered, Error> {
    let segments = open_all(disk, head)?;
    let mut first = FirstPass::default();
    let mut recovery = Recovery { segments: segments.len() as u64, ..Recovery::default() };
    for (at, segment) in segments.iter().enumerate() {
        let next = segments.get(at + 1);
        let through = next.map(|next| next.head.starts_at);
        first.contents.push(Contents {
            index: segment.head.index,
            starts_at: segment.head.starts_at,
            highest: BTreeMap::new(),
        });
        let end = segment.walk(through, &mut |header, records| {
            recovery.batches += 1;
            for (partition, term, lsn) in header.commits() {
                let known = recovery.commits.entry(partition).or_default();
                *known = (*known).max((term, lsn));
            }
            let offset = segment.offset(header.position);
            each(records, &segment.path, offset, &mut |entry| first.note(&entry))
        })?;
        let corrupt = |what| Error::Corrupt { path: segment.path.clone(), offset: segment.offset(end.position), what };
        recovery.end = Position(end.position);
        match through {
            // The next segment was begun only after all of this one was durable.
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
                // The process before may have ended because a sync failed, which forgets what it should have covered: what was
                // read here is in memory then and nowhere else, and only what is written again is covered by this sync.
                segment.write_again(synced_through, end.position)?;
                segment.file.sync_data().map_err(|source| Error::SyncFailed { path: segment.path.clone(), source })?;
            }
        }
    }
    if segments.is_empty() && sealed_at.is_some_and(|sealed| sealed.0 > 0) {
        let what = "the clean mark says where it ends, but it is not there";
        return Err(Error::Corrupt { path: disk.describe(&segment::name(1)), offset: 0, what });
    }
    recovery.entries = first.entries;
    let commits = &recovery.commits;
    recovery.undone = show(&segments, recovery.end.0, &first.undone, &mut |entry| visit(entry, commits))?;
    let next = Next {
        index: segments.last().map_or(1, |newest| newest.head.index + 1),
        starts_at: recovery.end.0,
        carried: first.carried,
        before: segments.into_iter().next_back(),
        dropped_bytes: recovery.dropped_bytes,
    };
    Ok(Recovered { recovery, positions: first.positions, segments: first.contents, next })
}

/// Opens all segments, the oldest first.
fn open_all(disk: &dyn Disk, head: &FileHead) -> Result<Vec<Segment>, Error> {
    let listed = disk.list().map_err(|source| Error::Io { operation: "list", path: disk.describe(""), source })?;
    let mut segments: Vec<Segment> = Vec::new();
    for index in listed.iter().filter_map(|name| segment::index_of(name)) {
        let segment = Segment::open(disk, head, index)?;
        if let Some(before) = segments.last() {
            let corrupt = |what| Error::Corrupt { path: segment.path.clone(), offset: 0, what };
            if before.head.index + 1 != index {
                return Err(corrupt("the segment before it is missing"));
            }
            if before.head.starts_at > segment.head.starts_at {
                return Err(corrupt("it begins before the segment before it"));
            }
        }
        segments.push(segment);
    }
    Ok(segments)
}

/// What the first pass gathers.
#[derive(Default)]
struct FirstPass {
    entries: u64,
    positions: Positions,
    carried: Carried,
    contents: Vec<Contents>,
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
            // Whatever was there before, of any lsn and any term.
            Body::Installed => self.undone.entry(entry.partition).or_default().push(undo(Lsn(0), Term(u64::MAX))),
            Body::Promise { .. } | Body::Note(_) => {}
        }
        self.entries += 1;
        Ok(())
    }
}

/// Shows every entry that stands; returns how many commands do not.
fn show(
    segments: &[Segment],
    end: u64,
    undone: &BTreeMap<PartitionId, Vec<Undo>>,
    visit: &mut dyn FnMut(Entry<'_>) -> Result<(), Error>,
) -> Result<u64, Error> {
    let (mut number, mut dropped) = (0, 0);
    for (at, segment) in segments.iter().enumerate() {
        let through = segments.get(at + 1).map_or(end, |next| next.head.starts_at);
        let shown = segment.walk(Some(through), &mut |header, records| {
            let offset = segment.offset(header.position);
            each(records, &segment.path, offset, &mut |entry| {
                let here = number;
                number += 1;
                let is_undone = |undo: &Undo| undo.number > here && entry.lsn > undo.after && entry.term < undo.below;
                let undos = undone.get(&entry.partition).map_or(&[][..], |undos| undos);
                if matches!(entry.body, Body::Command(_)) && undos.iter().any(is_undone) {
                    dropped += 1;
                    return Ok(());
                }
                visit(entry)
            })
        })?;
        if shown.position != through {
            let offset = segment.offset(shown.position);
            return Err(Error::Corrupt { path: segment.path.clone(), offset, what: "it changed while it was read" });
        }
    }
    Ok(dropped)
}

/// Decodes the records of a batch whose checksum is right.
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
