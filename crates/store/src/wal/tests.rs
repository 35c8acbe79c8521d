//! Tests of the log on a simulated disk.

mod arbitrary;
mod cuts;
mod faults;
mod flips;
mod power;
mod replay;

use std::sync::Arc;

use engram_memory::{ClusterId, FeatureShape, Law, Lsn, PartitionId, Shape, StoreId, Term, mix64};

use super::recovery::recover;
use super::{Body, Entry, Options, Position, Recovery, Wal, Writer};
use crate::{Disk, Error, FileHead, SimDisk};

/// Small, so that a log of a few hundred kilobytes has many segments.
const SEGMENT_BYTES: u64 = 64 << 10;

fn head() -> FileHead {
    let shape = Shape { partitions: 8, law: Law::Linear, features: FeatureShape::NONE };
    FileHead { cluster: ClusterId(7), store: StoreId(11), shape }
}

fn options() -> Options {
    Options { segment_bytes: SEGMENT_BYTES, ..Options::default() }
}

/// An entry that owns its bytes, for comparison.
#[derive(Debug, Clone, PartialEq, Eq)]
struct OwnedEntry {
    partition: u32,
    term: u64,
    lsn: u64,
    kind: &'static str,
    payload: Vec<u8>,
}

impl OwnedEntry {
    fn command(partition: u32, lsn: u64, payload: Vec<u8>) -> Self {
        Self { partition, term: 1, lsn, kind: "command", payload }
    }

    fn of(entry: &Entry<'_>) -> Self {
        let kind = match entry.body {
            Body::Command(_) => "command",
            Body::Truncate => "truncate",
            Body::Promise { .. } => "promise",
            Body::Note(_) => "note",
            Body::Installed => "installed",
        };
        let payload = entry.body.payload().to_vec();
        Self { partition: entry.partition.0, term: entry.term.0, lsn: entry.lsn.0, kind, payload }
    }

    fn entry(&self) -> Entry<'_> {
        let body = match self.kind {
            "command" => Body::Command(&self.payload),
            "truncate" => Body::Truncate,
            "promise" => Body::Promise { accepted: self.payload == [1] },
            "note" => Body::Note(&self.payload),
            _ => Body::Installed,
        };
        Entry { partition: PartitionId(self.partition), term: Term(self.term), lsn: Lsn(self.lsn), body }
    }
}

/// Pseudo-random numbers from a seed.
struct Draw(u64);

impl Draw {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix64(self.0) % bound
    }

    fn bytes(&mut self, most: u64) -> Vec<u8> {
        (0..self.below(most + 1)).map(|_| self.below(256) as u8).collect()
    }
}

fn open(disk: &SimDisk) -> (Wal, Writer, Recovery, Vec<OwnedEntry>) {
    try_open(disk, options()).unwrap()
}

fn try_open(disk: &SimDisk, options: Options) -> Result<(Wal, Writer, Recovery, Vec<OwnedEntry>), Error> {
    let mut replayed = Vec::new();
    let (wal, writer, recovery) = Wal::open(Arc::new(disk.clone()), head(), options, &mut |entry| {
        replayed.push(OwnedEntry::of(&entry));
        Ok(())
    })?;
    Ok((wal, writer, recovery, replayed))
}

/// Reads the log without continuing it.
fn read(disk: &SimDisk, sealed_at: Option<Position>) -> Result<(Recovery, Vec<OwnedEntry>), Error> {
    let mut replayed = Vec::new();
    let recovered = recover(disk, &head(), sealed_at, &mut |entry, _| {
        replayed.push(OwnedEntry::of(&entry));
        Ok(())
    })?;
    Ok((recovered.recovery, replayed))
}

fn write(wal: &mut Wal, writer: &mut Writer, entries: &[OwnedEntry]) -> Result<Position, Error> {
    for entry in entries {
        wal.append(&entry.entry())?;
    }
    let batch = wal.seal(&[(PartitionId(0), Term(1), Lsn(1))]).expect("something was appended");
    let written = writer.write(&batch, 0);
    match &written {
        Ok(_) => wal.recycle(batch),
        Err(_) => wal.withdraw(batch),
    }
    written
}

/// A written log: its batches of commands, and the end of each.
struct Log {
    disk: SimDisk,
    batches: Vec<(Vec<OwnedEntry>, Position)>,
    writer: Writer,
}

impl Log {
    /// Writes `records` commands of up to 64 bytes, in batches of up to `most`.
    fn of(records: usize, most: u64, seed: u64) -> Self {
        let disk = SimDisk::new(seed);
        let (mut wal, mut writer, ..) = open(&disk);
        let mut draw = Draw(seed);
        let mut lsns = [0; 8];
        let (mut batches, mut written) = (Vec::new(), 0);
        while written < records {
            let count = (1 + draw.below(most) as usize).min(records - written);
            let mut entries = Vec::new();
            for _ in 0..count {
                let partition = draw.below(8);
                lsns[partition as usize] += 1;
                entries.push(OwnedEntry::command(partition as u32, lsns[partition as usize], draw.bytes(64)));
            }
            let end = write(&mut wal, &mut writer, &entries).unwrap();
            batches.push((entries, end));
            written += count;
        }
        Self { disk, batches, writer }
    }

    /// Returns the commands of all batches that end at or before `position`.
    fn through(&self, position: Position) -> Vec<OwnedEntry> {
        self.batches.iter().filter(|(_, end)| *end <= position).flat_map(|(entries, _)| entries.clone()).collect()
    }

    /// Returns the names of the segments, oldest first.
    fn segments(&self) -> Vec<String> {
        self.disk.list().unwrap().into_iter().filter(|name| super::is_log_file(name)).collect()
    }
}
