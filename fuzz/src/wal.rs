//! The log: its records, and recovery from arbitrary bytes.

use crate::input::Input;
use crate::segments::{assemble, head, of_records};
use engram_memory::codec::{
    DecodeError, decode_ledger, decode_record, decode_reply, encode_ledger, encode_record, encode_reply,
};
use engram_memory::{Lsn, PartitionId, Term};
use engram_store::wal::{Body, Entry, Options, Recovery, Wal, Writer};
use engram_store::{Disk as _, Error, SimDisk};
use std::sync::Arc;

/// Kept small, since every input creates some.
const SEGMENT_BYTES: u64 = 32 << 10;

/// An entry that owns its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct OwnedEntry {
    partition: PartitionId,
    term: Term,
    lsn: Lsn,
    kind: u8,
    payload: Vec<u8>,
}

impl OwnedEntry {
    fn of(entry: &Entry<'_>) -> Self {
        let (kind, payload) = match entry.body {
            Body::Command(bytes) => (1, bytes.to_vec()),
            Body::Truncate => (2, Vec::new()),
            Body::Promise { accepted } => (3, vec![u8::from(accepted)]),
            Body::Note(bytes) => (4, bytes.to_vec()),
            Body::Installed => (5, Vec::new()),
        };
        Self { partition: entry.partition, term: entry.term, lsn: entry.lsn, kind, payload }
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&(self.payload.len() as u32).to_le_bytes());
        out.push(self.kind);
        out.extend_from_slice(&self.partition.0.to_le_bytes());
        out.extend_from_slice(&self.term.0.to_le_bytes());
        out.extend_from_slice(&self.lsn.0.to_le_bytes());
        out.extend_from_slice(&self.payload);
    }
}

/// The first byte selects the kind of the rest: a record, a ledger, a reply, or log entries. Decoded values encode to the same bytes: each value
/// has one encoding.
pub(crate) fn record(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else { return };
    match kind % 4 {
        0 => again(bytes, decode_record, encode_record),
        1 => again(bytes, decode_ledger, encode_ledger),
        2 => again(bytes, decode_reply, encode_reply),
        _ => {
            let disk = SimDisk::new(1);
            of_records(&disk, bytes);
            if let Ok((.., accepted)) = open(&disk)
                // Entries that a later one reverts are not shown.
                && accepted.iter().all(|accepted| [1, 3, 4].contains(&accepted.kind))
            {
                let mut encoded = Vec::new();
                accepted.iter().for_each(|accepted| accepted.encode(&mut encoded));
                assert_eq!(encoded, bytes);
            }
        }
    }
}

fn again<T>(bytes: &[u8], decode: fn(&[u8]) -> Result<T, DecodeError>, encode: fn(&T, &mut Vec<u8>)) {
    match decode(bytes) {
        Ok(value) => {
            let mut encoded = Vec::new();
            encode(&value, &mut encoded);
            assert_eq!(encoded, bytes);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

fn open(disk: &SimDisk) -> Result<(Wal, Writer, Recovery, Vec<OwnedEntry>), Error> {
    let options = Options { segment_bytes: SEGMENT_BYTES, ..Options::default() };
    let mut accepted = Vec::new();
    let (wal, writer, recovery) = Wal::open(Arc::new(disk.clone()), head(), options, &mut |entry| {
        accepted.push(OwnedEntry::of(&entry));
        Ok(())
    })?;
    Ok((wal, writer, recovery, accepted))
}

/// The first byte selects the disk content: the rest as one segment, segments described by the rest, or a valid log that is then damaged in one
/// place.
pub(crate) fn recover(bytes: &[u8]) {
    let mut input = Input(bytes);
    let disk = SimDisk::new(1);
    match input.u8() % 3 {
        0 => {
            disk.put("wal-0000000000000001.log", input.0);
            reopen(&disk, usize::MAX);
        }
        1 => {
            let whole = assemble(&disk, &mut input);
            reopen(&disk, whole);
        }
        _ => damaged(&disk, &mut input),
    }
}

/// Recovers twice: both recoveries are equal, and nothing was left in between. At most `most` entries may be recovered.
fn reopen(disk: &SimDisk, most: usize) {
    let (wal, writer, first, accepted) = match open(disk) {
        Ok(opened) => opened,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    assert!(accepted.len() <= most, "recovered {} entries of {most} valid ones", accepted.len());
    drop((wal, writer));
    disk.kill();
    let (.., second, again) = open(disk).expect("a recovered log is valid");
    let commands =
        |accepted: Vec<OwnedEntry>| accepted.into_iter().filter(|accepted| accepted.kind == 1).collect::<Vec<_>>();
    assert_eq!(commands(again), commands(accepted));
    assert!(second.end >= first.end && second.dropped_bytes == 0, "{first:?} then {second:?}");
}

/// Writes commands, then changes up to four consecutive bytes, which a 32-bit checksum always detects: the recovered entries are a prefix of the
/// written ones.
fn damaged(disk: &SimDisk, input: &mut Input<'_>) {
    let (place, file, damage) = (input.u32(), input.u8(), input.u32().to_le_bytes());
    let (mut wal, mut writer, ..) = open(disk).expect("an empty disk");
    let mut written = Vec::new();
    let mut lsns = [0; 4];
    for _ in 0..32 {
        if input.is_empty() {
            break;
        }
        let flags = input.u8();
        let partition = usize::from(flags & 3);
        lsns[partition] += 1;
        let entry = Entry {
            partition: PartitionId(partition as u32),
            term: Term(1),
            lsn: Lsn(lsns[partition]),
            body: Body::Command(input.bytes()),
        };
        wal.append(&entry).expect("LSN and term are consecutive, and the record is small");
        written.push(OwnedEntry::of(&entry));
        if flags & 4 != 0 || input.is_empty() {
            let batch = wal.seal(&[]).expect("an entry was appended");
            writer.write(&batch, 0).expect("the disk has free space");
            wal.recycle(batch);
        }
    }
    let last = wal.seal(&[]).map(|batch| writer.write(&batch, 0));
    drop((last, writer));
    disk.kill();
    let files: Vec<String> =
        disk.list().expect("the disk does not fail").into_iter().filter(|it| it.ends_with(".log")).collect();
    let name = &files[usize::from(file) % files.len()];
    let mut bytes = disk.bytes(name);
    let place = place as usize % bytes.len();
    bytes[place..].iter_mut().zip(damage).for_each(|(byte, change)| *byte ^= change);
    disk.put(name, &bytes);
    if let Ok((.., recovery, accepted)) = open(disk) {
        assert!(written.starts_with(&accepted), "{accepted:?} is not a prefix of {written:?}");
        assert!(damage != [0; 4] || accepted == written, "{recovery:?}: the log was not damaged");
    }
}
