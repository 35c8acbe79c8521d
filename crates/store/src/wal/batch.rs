//! Batch of the group commit: header, records, padding to a page.
//!
//! ```text
//!  0  magic u32            16  position u64         32  prev_crc u32     44  0 u32
//!  4  crc u32 of 8..end    24  synced_through u64   36  body_crc u32     48  commits * (partition u32, term u64, lsn u64)
//!  8  len u32              12  commits u32          40  records u32          records, padding of zeros
//! ```
//!
//! Both checksums are crc32c seeded by the segment; body_crc covers records and padding, so every byte is covered. len counts
//! everything and is a whole number of pages.

use std::collections::BTreeMap;

use engram_memory::{Lsn, MAX_PARTITIONS, PartitionId, Term};

use super::positions::{Positions, Tail};
use super::{Body, Entry, record};
use crate::format::Bytes;

/// Batches begin and end on a multiple of this: devices and the page cache write at least this unit, so a torn write never damages
/// the previous batch.
pub(super) const PAGE: usize = 4_096;
/// Bytes of a header without commits.
pub(super) const HEADER_BYTES: usize = 48;
const COMMIT_BYTES: usize = 20;
/// Most bytes of a header.
pub(super) const MAX_HEADER_BYTES: usize = HEADER_BYTES + COMMIT_BYTES * MAX_PARTITIONS as usize;
const MAGIC: u32 = u32::from_le_bytes(*b"EBAT");

/// The newest promise and note of each partition, which are carried over to every new segment.
#[derive(Debug, Clone, Default)]
pub(super) struct CarryOver(BTreeMap<PartitionId, PartitionCarryOver>);

#[derive(Debug, Clone, Default)]
struct PartitionCarryOver {
    promise: Option<(Term, bool)>,
    note: Option<(Term, Vec<u8>)>,
}

impl CarryOver {
    pub(super) fn note(&mut self, entry: &Entry<'_>) {
        match entry.body {
            Body::Promise { accepted } => {
                self.0.entry(entry.partition).or_default().promise = Some((entry.term, accepted));
            }
            Body::Note(bytes) => {
                self.0.entry(entry.partition).or_default().note = Some((entry.term, bytes.to_vec()));
            }
            Body::Command(_) | Body::Truncate | Body::Installed => {}
        }
    }

    pub(super) fn merge(&mut self, newer: &Self) {
        for (partition, newer) in &newer.0 {
            let carry = self.0.entry(*partition).or_default();
            carry.promise = newer.promise.or(carry.promise);
            if newer.note.is_some() {
                carry.note.clone_from(&newer.note);
            }
        }
    }

    /// Returns a batch with these entries; `None` if there are none.
    pub(super) fn batch(&self) -> Option<Batch> {
        let mut batch = Batch::default();
        for (&partition, carry) in &self.0 {
            let lsn = Lsn(0);
            if let Some((term, accepted)) = carry.promise {
                batch.push(&Entry { partition, term, lsn, body: Body::Promise { accepted } }, None);
            }
            if let Some((term, bytes)) = &carry.note {
                batch.push(&Entry { partition, term: *term, lsn, body: Body::Note(bytes) }, None);
            }
        }
        batch.seal(&[]);
        (!batch.is_empty()).then_some(batch)
    }
}

/// Records of one group commit, ready to be written.
#[derive(Debug, Default)]
pub struct Batch {
    body: Vec<u8>,
    record_bytes: usize,
    commits: Vec<(PartitionId, Term, Lsn)>,
    touched: BTreeMap<PartitionId, PartitionChange>,
    carried: CarryOver,
}

/// Effect of a batch on a partition's log.
#[derive(Debug)]
struct PartitionChange {
    before: Option<Tail>,
    highest: Option<Lsn>,
}

/// Links a batch to its segment and predecessor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Link {
    /// Checksum seed of the segment.
    pub(super) seed: u32,
    /// Position of the batch in the log.
    pub(super) position: u64,
    /// Checksum of the previous header, or of the segment's header.
    pub(super) prev_crc: u32,
}

impl Batch {
    pub(super) fn push(&mut self, entry: &Entry<'_>, before: Option<Tail>) {
        record::encode(entry, &mut self.body);
        self.record_bytes = self.body.len();
        self.carried.note(entry);
        if let Body::Command(_) | Body::Truncate | Body::Installed = entry.body {
            let touched = self.touched.entry(entry.partition).or_insert(PartitionChange { before, highest: None });
            if let Body::Command(_) = entry.body {
                touched.highest = touched.highest.max(Some(entry.lsn));
            }
        }
    }

    /// Sets the commits and adds padding.
    pub(super) fn seal(&mut self, commits: &[(PartitionId, Term, Lsn)]) {
        assert!(commits.len() <= MAX_PARTITIONS as usize, "one commit per partition");
        self.commits = commits.to_vec();
        self.body.truncate(self.record_bytes);
        let header_bytes = HEADER_BYTES + COMMIT_BYTES * commits.len();
        self.body.resize((header_bytes + self.record_bytes).next_multiple_of(PAGE) - header_bytes, 0);
    }

    /// Returns an empty batch, which seals everything synced before it.
    pub(super) fn empty() -> Self {
        let mut batch = Self::default();
        batch.seal(&[]);
        batch
    }

    pub(super) fn is_empty(&self) -> bool {
        self.record_bytes == 0
    }

    /// Returns the bytes of the records including their headers, without padding.
    pub fn record_bytes(&self) -> usize {
        self.record_bytes
    }

    /// Returns the size in the log.
    pub fn len_bytes(&self) -> u64 {
        (HEADER_BYTES + COMMIT_BYTES * self.commits.len() + self.body.len()) as u64
    }

    pub(super) fn capacity(&self) -> usize {
        self.body.capacity()
    }

    pub(super) fn clear(&mut self) {
        self.body.clear();
        self.record_bytes = 0;
        self.commits.clear();
        self.touched.clear();
        self.carried = CarryOver::default();
    }

    /// Restores the positions of the partitions before this batch.
    pub(super) fn restore(&self, positions: &mut Positions) {
        for (partition, touched) in &self.touched {
            positions.restore(*partition, touched.before);
        }
    }

    pub(super) fn body(&self) -> &[u8] {
        &self.body
    }

    pub(super) fn carried(&self) -> &CarryOver {
        &self.carried
    }

    /// Returns the highest LSN of each partition with commands in it.
    pub(super) fn highest(&self) -> impl Iterator<Item = (PartitionId, Lsn)> + '_ {
        self.touched.iter().filter_map(|(partition, touched)| Some((*partition, touched.highest?)))
    }

    /// Writes the header into `out`, replacing its content; returns its checksum, which links the next batch.
    pub(super) fn header(&self, link: Link, synced_through: u64, out: &mut Vec<u8>) -> u32 {
        let len = u32::try_from(self.len_bytes()).expect("a batch is far below 4 GiB");
        out.clear();
        out.extend_from_slice(&MAGIC.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&len.to_le_bytes());
        out.extend_from_slice(&(self.commits.len() as u32).to_le_bytes());
        out.extend_from_slice(&link.position.to_le_bytes());
        out.extend_from_slice(&synced_through.to_le_bytes());
        out.extend_from_slice(&link.prev_crc.to_le_bytes());
        out.extend_from_slice(&crc32c::crc32c_append(link.seed, &self.body).to_le_bytes());
        out.extend_from_slice(&(self.record_bytes as u32).to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        for (partition, term, lsn) in &self.commits {
            out.extend_from_slice(&partition.0.to_le_bytes());
            out.extend_from_slice(&term.0.to_le_bytes());
            out.extend_from_slice(&lsn.0.to_le_bytes());
        }
        let crc = crc32c::crc32c_append(link.seed, &out[8..]);
        out[4..8].copy_from_slice(&crc.to_le_bytes());
        crc
    }
}

/// A validated header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header<'a> {
    pub(super) crc: u32,
    pub(super) len: u32,
    pub(super) position: u64,
    pub(super) synced_through: u64,
    pub(super) prev_crc: u32,
    body_crc: u32,
    records: u32,
    commits: &'a [u8],
}

impl<'a> Header<'a> {
    /// Decodes a header from the front of `bytes`, which may be longer or, at the end of a file, too short. Does not allocate.
    pub(super) fn decode(bytes: &'a [u8], seed: u32) -> Result<Self, &'static str> {
        const SHORT: &str = "truncated batch header";
        let mut rest = Bytes(bytes);
        if rest.u32().ok_or(SHORT)? != MAGIC {
            return Err("no batch header");
        }
        let crc = rest.u32().ok_or(SHORT)?;
        let covered = rest.0;
        let len = rest.u32().ok_or(SHORT)?;
        let commits = rest.u32().ok_or(SHORT)?;
        if commits > MAX_PARTITIONS {
            return Err("batch header with too many commits");
        }
        let header_bytes = HEADER_BYTES + COMMIT_BYTES * commits as usize;
        let covered = covered.get(..header_bytes - 8).ok_or(SHORT)?;
        if crc32c::crc32c_append(seed, covered) != crc {
            return Err("batch header checksum mismatch");
        }
        let position = rest.u64().ok_or(SHORT)?;
        let synced_through = rest.u64().ok_or(SHORT)?;
        let prev_crc = rest.u32().ok_or(SHORT)?;
        let body_crc = rest.u32().ok_or(SHORT)?;
        let records = rest.u32().ok_or(SHORT)?;
        let reserved = rest.u32().ok_or(SHORT)?;
        let commits = rest.take(COMMIT_BYTES * commits as usize).ok_or(SHORT)?;
        let pages = (header_bytes as u64 + u64::from(records)).next_multiple_of(PAGE as u64);
        if u64::from(len) != pages || reserved != 0 || synced_through > position {
            return Err("inconsistent batch header");
        }
        Ok(Self { crc, len, position, synced_through, prev_crc, body_crc, records, commits })
    }

    /// Returns the size of the header.
    pub(super) fn header_bytes(&self) -> usize {
        HEADER_BYTES + self.commits.len()
    }

    /// Checks that the batch continues its segment.
    pub(super) fn check_link(&self, link: Link) -> Result<(), &'static str> {
        if self.position != link.position {
            Err("batch has another position")
        } else if self.prev_crc != link.prev_crc {
            Err("batch does not follow the previous one")
        } else {
            Ok(())
        }
    }

    /// Verifies the body of the complete `batch` and returns its records.
    pub(super) fn records<'b>(&self, batch: &'b [u8], seed: u32) -> Result<&'b [u8], &'static str> {
        let body = batch.get(self.header_bytes()..self.len as usize).ok_or("truncated batch")?;
        if crc32c::crc32c_append(seed, body) != self.body_crc {
            return Err("batch checksum mismatch");
        }
        Ok(&body[..self.records as usize])
    }

    /// Returns the commits known when it was written.
    pub(super) fn commits(&self) -> impl Iterator<Item = (PartitionId, Term, Lsn)> + 'a {
        self.commits.chunks_exact(COMMIT_BYTES).filter_map(|bytes| {
            let mut bytes = Bytes(bytes);
            Some((PartitionId(bytes.u32()?), Term(bytes.u64()?), Lsn(bytes.u64()?)))
        })
    }
}
