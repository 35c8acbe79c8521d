//! Segment file of the log: a header page, then batches.
//!
//! Header page: the common file header, then `uuid u128 | index u64 | starts_at u64 | carried u64 | zeros | crc32c u32`. A segment
//! appears under its name only when header and carried batch are durable; `starts_at` is the end of the previous segment.

use std::io;

use super::batch::{Batch, HEADER_BYTES, Header, Link, MAX_HEADER_BYTES, PAGE};
use crate::disk::{File, TEMPORARY_SUFFIX};
use crate::format::{self, Bytes};
use crate::{Disk, Error, FileHead};

const MAGIC: [u8; 8] = *b"ENGRWAL\0";
const PREFIX: &str = "wal-";
const SUFFIX: &str = ".log";
/// Bytes that recovery reads at once; larger batches are read as a whole.
const WINDOW_BYTES: usize = 1 << 20;
const ZEROS: [u8; PAGE] = [0; PAGE];
/// Upper bound of numbers in a header: larger than any log, and sums of two positions fit a u64.
const IMPOSSIBLE: u64 = 1 << 62;

/// Returns the file name of a segment.
pub(super) fn name(index: u64) -> String {
    format!("{PREFIX}{index:016x}{SUFFIX}")
}

/// Parses the file name of a segment; `None` for other files.
pub(super) fn index_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
    (digits.len() == 16).then(|| u64::from_str_radix(digits, 16).ok())?
}

/// Whether a file of this name is a segment.
pub(crate) fn is_log_file(name: &str) -> bool {
    index_of(name).is_some()
}

/// Header of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    /// Random uuid of this segment; seeds its checksums.
    pub(super) uuid: u128,
    /// Index of the segment, dense.
    pub(super) index: u64,
    /// Position of its first batch: the end of the previous segment.
    pub(super) starts_at: u64,
    /// Bytes of the carried batch.
    pub(super) carried: u64,
}

impl Head {
    fn encode(&self, file_head: &FileHead) -> Vec<u8> {
        let mut page = Vec::with_capacity(PAGE);
        format::encode(&MAGIC, file_head, &mut page);
        page.extend_from_slice(&self.uuid.to_le_bytes());
        page.extend_from_slice(&self.index.to_le_bytes());
        page.extend_from_slice(&self.starts_at.to_le_bytes());
        page.extend_from_slice(&self.carried.to_le_bytes());
        page.resize(PAGE - 4, 0);
        page.extend_from_slice(&crc32c::crc32c(&page).to_le_bytes());
        page
    }

    /// Decodes and verifies a header page; also returns its checksum.
    fn decode(page: &[u8], path: &str) -> Result<(FileHead, Self, u32), Error> {
        let corrupt = |what| Error::Corrupt { path: path.into(), offset: 0, what };
        format::check_version(page, &MAGIC, path, |page| page.len() == PAGE && format::has_valid_crc(page))?;
        let (covered, crc) = page.split_last_chunk().ok_or(corrupt("truncated header"))?;
        let crc = u32::from_le_bytes(*crc);
        if page.len() != PAGE || !format::has_valid_crc(page) {
            return Err(corrupt("header checksum mismatch"));
        }
        let mut bytes = Bytes(covered);
        let file_head = format::decode(&mut bytes, &MAGIC, path)?;
        let mut read =
            || Some(Self { uuid: bytes.u128()?, index: bytes.u64()?, starts_at: bytes.u64()?, carried: bytes.u64()? });
        let head = read().ok_or(corrupt("truncated header"))?;
        if [head.index, head.starts_at, head.carried].iter().any(|number| *number >= IMPOSSIBLE) {
            return Err(corrupt("invalid numbers in the header"));
        }
        Ok((file_head, head, crc))
    }

    fn seed(&self) -> u32 {
        crc32c::crc32c(&self.uuid.to_le_bytes())
    }
}

/// An open segment.
pub(super) struct Segment {
    pub(super) path: String,
    pub(super) file: Box<dyn File>,
    pub(super) head: Head,
    pub(super) seed: u32,
    /// Checksum of the header, to which the first batch is chained.
    pub(super) head_crc: u32,
    /// Length of the file.
    pub(super) file_bytes: u64,
}

/// Visits a batch and the bytes of its records.
pub(super) type Visit<'a> = dyn FnMut(&Header<'_>, &[u8]) -> Result<(), Error> + 'a;

/// End of the batches of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct End {
    /// Position in the log.
    pub(super) position: u64,
    /// Why no batch follows.
    pub(super) why: &'static str,
    /// Highest `synced_through` of the batches.
    pub(super) synced_through: u64,
}

/// Data after the last complete batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Remains {
    /// Highest `synced_through` of a valid header there; 0 = none.
    pub(super) synced_through: u64,
    /// Bytes up to the last non-zero one.
    pub(super) bytes: u64,
}

impl Segment {
    /// Creates a durable segment of at least `bytes` with `batch` as its first.
    pub(super) fn create(
        disk: &dyn Disk,
        file_head: &FileHead,
        head: Head,
        bytes: u64,
        batch: Option<&Batch>,
    ) -> Result<(Self, u32), Error> {
        let name = name(head.index);
        let temporary = format!("{name}{TEMPORARY_SUFFIX}");
        // May remain from an earlier attempt.
        let _ = disk.remove(&temporary);
        let created = Self::create_as(disk, &temporary, file_head, head, bytes, batch).and_then(|created| {
            let failed = |source| Error::write("name", disk.describe(&name), source);
            disk.rename(&temporary, &name).map_err(failed)?;
            disk.sync_dir().map_err(|source| Error::SyncFailed { path: disk.describe(""), source })?;
            Ok(created)
        });
        if created.is_err() {
            // A remaining temporary file is removed at the next start.
            let _ = disk.remove(&temporary);
        }
        let (mut segment, chain) = created?;
        segment.path = disk.describe(&name);
        Ok((segment, chain))
    }

    fn create_as(
        disk: &dyn Disk,
        name: &str,
        file_head: &FileHead,
        head: Head,
        bytes: u64,
        batch: Option<&Batch>,
    ) -> Result<(Self, u32), Error> {
        let path = disk.describe(name);
        let failed = |operation| move |source| (operation, source);
        let page = head.encode(file_head);
        let head_crc = crc32c::crc32c(&page[..PAGE - 4]);
        let (mut chain, mut header) = (head_crc, Vec::new());
        let file_bytes = bytes.max(PAGE as u64 + head.carried);
        let mut write = || {
            let file = disk.create(name).map_err(failed("create"))?;
            file.preallocate(file_bytes).map_err(failed("preallocate"))?;
            file.write_at(0, &page).map_err(failed("write"))?;
            if let Some(batch) = batch {
                let link = Link { seed: head.seed(), position: head.starts_at, prev_crc: head_crc };
                chain = batch.header(link, head.starts_at, &mut header);
                file.write_at(PAGE as u64, &header).map_err(failed("write"))?;
                file.write_at((PAGE + header.len()) as u64, batch.body()).map_err(failed("write"))?;
            }
            Ok(file)
        };
        let written: Result<_, (&'static str, io::Error)> = write();
        let file = written.map_err(|(operation, source)| Error::write(operation, path.clone(), source))?;
        file.sync_data().map_err(|source| Error::SyncFailed { path: path.clone(), source })?;
        Ok((Self { path, file, head, seed: head.seed(), head_crc, file_bytes }, chain))
    }

    /// Opens a segment and checks its owner.
    pub(super) fn open(disk: &dyn Disk, file_head: &FileHead, index: u64) -> Result<Self, Error> {
        let name = name(index);
        let path = disk.describe(&name);
        let failed = |source| Error::read(path.clone(), source);
        let file = disk.open(&name).map_err(failed)?;
        let file_bytes = file.len().map_err(failed)?;
        let mut page = vec![0; PAGE.min(file_bytes as usize)];
        file.read_at(0, &mut page).map_err(failed)?;
        let (found_head, head, head_crc) = Head::decode(&page, &path)?;
        file_head.check(&found_head, &path)?;
        if head.index != index {
            return Err(Error::Corrupt { path, offset: 0, what: "header names another segment" });
        }
        Ok(Self { path, file, head, seed: head.seed(), head_crc, file_bytes })
    }

    /// Returns the file offset of a position in the log.
    pub(super) fn offset(&self, position: u64) -> u64 {
        PAGE as u64 + (position - self.head.starts_at)
    }

    /// Visits the batches in order, with their records, until one is invalid or `through` is reached.
    pub(super) fn walk(&self, through: Option<u64>, visit: &mut Visit<'_>) -> Result<End, Error> {
        let mut window = Window::new(self);
        let mut link = Link { seed: self.seed, position: self.head.starts_at, prev_crc: self.head_crc };
        let mut synced_through = self.head.starts_at + self.head.carried;
        loop {
            let end = |why| End { position: link.position, why, synced_through };
            if through.is_some_and(|through| link.position >= through) {
                return Ok(end("the next segment begins here"));
            }
            let offset = self.offset(link.position);
            let header = match Header::decode(window.bytes(offset, MAX_HEADER_BYTES)?, self.seed) {
                Ok(header) => header,
                Err(why) => return Ok(end(why)),
            };
            if let Err(why) = header.check_link(link) {
                return Ok(end(why));
            }
            // The file may end before the batch does: only the existing bytes are allocated.
            let len = header.len as usize;
            let batch = window.bytes(offset, len)?;
            let header = match Header::decode(batch, self.seed) {
                Ok(header) => header,
                Err(why) => return Ok(end(why)),
            };
            match header.records(batch, self.seed) {
                Ok(records) => visit(&header, records)?,
                Err(why) => return Ok(end(why)),
            }
            synced_through = synced_through.max(header.synced_through);
            link = Link { seed: self.seed, position: link.position + len as u64, prev_crc: header.crc };
        }
    }

    /// Rewrites the bytes between two positions unchanged.
    pub(super) fn rewrite(&self, from: u64, to: u64) -> Result<(), Error> {
        let mut window = Window::new(self);
        let mut offset = self.offset(from.max(self.head.starts_at));
        let end = self.offset(to);
        while offset < end {
            let bytes = window.bytes(offset, (end - offset).min(WINDOW_BYTES as u64) as usize)?;
            let written = self.file.write_at(offset, bytes);
            written.map_err(|source| Error::write("write", self.path.clone(), source))?;
            offset += bytes.len() as u64;
        }
        Ok(())
    }

    /// Scans the pages from `position` on, where there is no complete batch, for valid headers.
    pub(super) fn remains(&self, position: u64) -> Result<Remains, Error> {
        let mut window = Window::new(self);
        let mut remains = Remains::default();
        let start = self.offset(position);
        let mut offset = start;
        while offset < self.file_bytes {
            let page = window.bytes(offset, PAGE)?;
            let len = page.len() as u64;
            // Most pages here are preallocated and never written: compared as a whole, not byte by byte.
            if page != &ZEROS[..page.len()] {
                let last = page.iter().rposition(|&byte| byte != 0).expect("the page is not all zeros");
                remains.bytes = offset - start + last as u64 + 1;
                let header = Header::decode(window.bytes(offset, MAX_HEADER_BYTES)?, self.seed);
                if let Ok(header) = header
                    && header.position == position + (offset - start)
                {
                    remains.synced_through = remains.synced_through.max(header.synced_through);
                }
            }
            offset += len;
        }
        Ok(remains)
    }
}

/// A buffered part of a segment.
struct Window<'a> {
    segment: &'a Segment,
    start: u64,
    bytes: Vec<u8>,
}

impl<'a> Window<'a> {
    fn new(segment: &'a Segment) -> Self {
        const { assert!(WINDOW_BYTES > MAX_HEADER_BYTES && HEADER_BYTES < PAGE) }
        Self { segment, start: 0, bytes: Vec::new() }
    }

    /// Returns `len` bytes at `offset`, fewer at the end of the file.
    fn bytes(&mut self, offset: u64, len: usize) -> Result<&[u8], Error> {
        let len = self.segment.file_bytes.saturating_sub(offset).min(len as u64) as usize;
        let is_cached = offset >= self.start && offset + len as u64 <= self.start + self.bytes.len() as u64;
        if !is_cached {
            let take = self.segment.file_bytes.saturating_sub(offset).min(len.max(WINDOW_BYTES) as u64);
            self.bytes.resize(take as usize, 0);
            self.start = offset;
            let read = self.segment.file.read_at(offset, &mut self.bytes);
            read.map_err(|source| Error::read(self.segment.path.clone(), source))?;
        }
        let from = (offset - self.start) as usize;
        Ok(&self.bytes[from..from + len])
    }
}
