//! Encoding of an entry: `len u32 | type u8 | partition u32 | term u64 | lsn u64 | payload`; len is that of the payload.

use engram_memory::{Lsn, MAX_RECORD_BYTES, PartitionId, Term};

use super::{Body, Entry};
use crate::format::Bytes;

/// Bytes before the payload.
pub(super) const HEADER_BYTES: usize = 25;

const COMMAND: u8 = 1;
const TRUNCATE: u8 = 2;
const PROMISE: u8 = 3;
const NOTE: u8 = 4;
const INSTALLED: u8 = 5;

impl<'a> Body<'a> {
    fn code(self) -> u8 {
        match self {
            Self::Command(_) => COMMAND,
            Self::Truncate => TRUNCATE,
            Self::Promise { .. } => PROMISE,
            Self::Note(_) => NOTE,
            Self::Installed => INSTALLED,
        }
    }

    pub(super) fn payload(self) -> &'a [u8] {
        match self {
            Self::Command(bytes) | Self::Note(bytes) => bytes,
            Self::Truncate | Self::Installed => &[],
            Self::Promise { accepted: false } => &[0],
            Self::Promise { accepted: true } => &[1],
        }
    }
}

/// Appends an entry.
pub(super) fn encode(entry: &Entry<'_>, out: &mut Vec<u8>) {
    let payload = entry.body.payload();
    debug_assert!(payload.len() <= MAX_RECORD_BYTES, "checked by append");
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    header[4] = entry.body.code();
    header[5..9].copy_from_slice(&entry.partition.0.to_le_bytes());
    header[9..17].copy_from_slice(&entry.term.0.to_le_bytes());
    header[17..].copy_from_slice(&entry.lsn.0.to_le_bytes());
    out.extend_from_slice(&header);
    out.extend_from_slice(payload);
}

/// Decodes the next entry from the front of `bytes`, which is unchanged on error.
pub(super) fn decode<'a>(bytes: &mut &'a [u8]) -> Result<Entry<'a>, &'static str> {
    const SHORT: &str = "truncated record";
    let mut rest = Bytes(bytes);
    let mut header = || Some((rest.u32()?, rest.u8()?, rest.u32()?, rest.u64()?, rest.u64()?));
    let (len, code, partition, term, lsn) = header().ok_or(SHORT)?;
    if len as usize > MAX_RECORD_BYTES {
        return Err("record exceeds the limit");
    }
    let payload = rest.take(len as usize).ok_or(SHORT)?;
    let body = match (code, payload) {
        (COMMAND, command) => Body::Command(command),
        (TRUNCATE, []) => Body::Truncate,
        (PROMISE, [0]) => Body::Promise { accepted: false },
        (PROMISE, [1]) => Body::Promise { accepted: true },
        (NOTE, entry) => Body::Note(entry),
        (INSTALLED, []) => Body::Installed,
        _ => return Err("record has an unknown type or an invalid payload"),
    };
    *bytes = rest.0;
    Ok(Entry { partition: PartitionId(partition), term: Term(term), lsn: Lsn(lsn), body })
}
