//! The log: its records, and its recovery from any bytes.

use crate::input::Input;
use crate::segments::{assemble, head, of_records};
use engram_memory::codec::{
    DecodeError, decode_ledger, decode_record, decode_reply, encode_ledger, encode_record, encode_reply,
};
use engram_memory::{Lsn, PartitionId, Term};
use engram_store::wal::{Body, Entry, Options, Recovery, Wal, Writer};
use engram_store::{Disk as _, Error, SimDisk};
use std::sync::Arc;

/// Small, since every input makes some.
const SEGMENT_BYTES: u64 = 32 << 10;

/// An entry that owns its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    partition: PartitionId,
    term: Term,
    lsn: Lsn,
    kind: u8,
    payload: Vec<u8>,
}

impl Seen {
    fn of(entry: &Entry<'_>) -> Self {
        let (kind, payload) = match entry.body {
            Body::Command(bytes) => (1, bytes.to_vec()),
            Body::Truncate => (2, Vec::new()),
            Body::Promise { seen } => (3, vec![u8::from(seen)]),
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

/// The first byte says what the rest is: a record, a ledger, a reply, or entries of the log. Whatever is read is written again as
/// the same bytes: one value has one encoding.
pub(crate) fn record(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else { return };
    match kind % 4 {
        0 => again(bytes, decode_record, encode_record),
        1 => again(bytes, decode_ledger, encode_ledger),
        2 => again(bytes, decode_reply, encode_reply),
        _ => {
            let disk = SimDisk::new(1);
            of_records(&disk, bytes);
            if let Ok((.., seen)) = open(&disk)
                // What a later entry undoes is not shown.
                && seen.iter().all(|seen| [1, 3, 4].contains(&seen.kind))
            {
                let mut encoded = Vec::new();
                seen.iter().for_each(|seen| seen.encode(&mut encoded));
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

fn open(disk: &SimDisk) -> Result<(Wal, Writer, Recovery, Vec<Seen>), Error> {
    let options = Options { segment_bytes: SEGMENT_BYTES, ..Options::default() };
    let mut seen = Vec::new();
    let (wal, writer, recovery) = Wal::open(Arc::new(disk.clone()), head(), options, &mut |entry| {
        seen.push(Seen::of(&entry));
        Ok(())
    })?;
    Ok((wal, writer, recovery, seen))
}

/// The first byte says what lies on the disk: the rest as one segment, segments that the rest describes, or a log that was
/// written in order and then damaged in one place.
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

/// Recovers twice: what stood the first time stands the second, and nothing was left in between. At most `most` entries have the
/// right to be shown.
fn reopen(disk: &SimDisk, most: usize) {
    let (wal, writer, first, seen) = match open(disk) {
        Ok(opened) => opened,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    assert!(seen.len() <= most, "{} entries of {most} whole ones", seen.len());
    drop((wal, writer));
    disk.kill();
    let (.., second, again) = open(disk).expect("a log that was recovered is whole");
    let commands = |seen: Vec<Seen>| seen.into_iter().filter(|seen| seen.kind == 1).collect::<Vec<_>>();
    assert_eq!(commands(again), commands(seen));
    assert!(second.end >= first.end && second.dropped_bytes == 0, "{first:?} then {second:?}");
}

/// Writes commands, then changes up to four bytes that follow each other, which a checksum of 32 bits always finds: what is
/// recovered is a prefix of what was written, or nothing.
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
        wal.append(&entry).expect("lsn and term follow, and the record is small");
        written.push(Seen::of(&entry));
        if flags & 4 != 0 || input.is_empty() {
            let batch = wal.seal(&[]).expect("something was appended");
            writer.write(&batch, 0).expect("the disk has room");
            wal.recycle(batch);
        }
    }
    let last = wal.seal(&[]).map(|batch| writer.write(&batch, 0));
    drop((last, writer));
    disk.kill();
    let files: Vec<String> =
        disk.list().expect("the disk works").into_iter().filter(|it| it.ends_with(".log")).collect();
    let name = &files[usize::from(file) % files.len()];
    let mut bytes = disk.bytes(name);
    let place = place as usize % bytes.len();
    bytes[place..].iter_mut().zip(damage).for_each(|(byte, change)| *byte ^= change);
    disk.put(name, &bytes);
    if let Ok((.., recovery, seen)) = open(disk) {
        assert!(written.starts_with(&seen), "{seen:?} is no prefix of {written:?}");
        assert!(damage != [0; 4] || seen == written, "{recovery:?}: nothing was damaged");
    }
}
