//! A payload segment: an append-only file with the payloads of items of one partition.
//!
//! ```text
//!  head      common head | partition u32 | segment u32 | crc32c u32 of the bytes before
//!  payloads  without framing: snapshots refer to them by offset, length and xxh3-64
//! ```
//!
//! Bytes that no snapshot refers to have no meaning: a torn end after a crash is never read.

use crate::disk::File;
use crate::format;
use crate::{Disk, Error, FileHead};
use bytes::Bytes;
use engram_memory::PartitionId;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: [u8; 8] = *b"ENGRPAY\0";
/// Bytes of the header.
pub(crate) const HEAD_BYTES: usize = format::HEAD_BYTES + 12;
const PREFIX: &str = "payload-";
const SUFFIX: &str = ".seg";

/// Returns the file name of a segment.
pub(crate) fn name(partition: PartitionId, number: u32) -> String {
    format!("{PREFIX}{:05}-{number:010}{SUFFIX}", partition.0)
}

/// Parses the file name of a segment; `None` for other files.
pub(crate) fn parse_name(name: &str) -> Option<(PartitionId, u32)> {
    let (partition, number) = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.split_once('-')?;
    let parsed = (PartitionId(partition.parse().ok()?), number.parse().ok()?);
    (self::name(parsed.0, parsed.1) == name).then_some(parsed)
}

/// Encodes the header of a segment.
pub(crate) fn encode_head(head: &FileHead, partition: PartitionId, number: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEAD_BYTES);
    format::encode(&MAGIC, head, &mut bytes);
    bytes.extend_from_slice(&partition.0.to_le_bytes());
    bytes.extend_from_slice(&number.to_le_bytes());
    bytes.extend_from_slice(&crc32c::crc32c(&bytes).to_le_bytes());
    bytes
}

/// The file of a segment, shared with background jobs. It is created when its first bytes are written.
pub(crate) struct SegmentFile {
    pub(crate) number: u32,
    name: String,
    path: String,
    file: OnceLock<Box<dyn File>>,
    /// Bytes that are durable.
    synced: AtomicU64,
    /// Whether its name is durable.
    is_named: AtomicBool,
}

impl std::fmt::Debug for SegmentFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

impl SegmentFile {
    /// Returns a segment without a file.
    pub(crate) fn new(disk: &dyn Disk, partition: PartitionId, number: u32) -> Self {
        let name = name(partition, number);
        let path = disk.describe(&name);
        let (file, synced, is_named) = (OnceLock::new(), AtomicU64::new(0), AtomicBool::new(false));
        Self { number, name, path, file, synced, is_named }
    }

    /// Opens an existing segment; returns its length, `None` if its header is damaged or of another store.
    pub(crate) fn open(
        disk: &dyn Disk,
        head: &FileHead,
        partition: PartitionId,
        number: u32,
    ) -> Result<(Self, Option<u32>), Error> {
        let segment = Self::new(disk, partition, number);
        let failed = |source| Error::read(segment.path.clone(), source);
        let file = disk.open(&segment.name).map_err(failed)?;
        let bytes = file.len().map_err(failed)?;
        let mut found = vec![0; HEAD_BYTES];
        let is_long = bytes >= HEAD_BYTES as u64;
        if is_long {
            file.read_at(0, &mut found).map_err(failed)?;
        }
        let is_valid = is_long && found == encode_head(head, partition, number);
        segment.is_named.store(true, Ordering::Relaxed);
        let _ = segment.file.set(file);
        let bytes = u32::try_from(bytes).ok().filter(|_| is_valid);
        Ok((segment, bytes))
    }

    /// Returns the path for messages.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// Writes bytes at an offset, creating the file if necessary.
    pub(crate) fn write(&self, disk: &dyn Disk, offset: u32, bytes: &[u8]) -> std::io::Result<()> {
        if self.file.get().is_none() {
            let _ = self.file.set(disk.create(&self.name)?);
        }
        let file = self.file.get().ok_or(std::io::ErrorKind::NotFound)?;
        file.write_at(u64::from(offset), bytes)
    }

    /// Reads bytes without verifying them.
    pub(crate) fn read(&self, offset: u32, length: u32) -> std::io::Result<Vec<u8>> {
        let file = self.file.get().ok_or(std::io::ErrorKind::NotFound)?;
        let mut bytes = vec![0; length as usize];
        file.read_at(u64::from(offset), &mut bytes)?;
        Ok(bytes)
    }

    /// Reads and verifies a payload.
    ///
    /// # Errors
    /// [`Error::Corrupt`]; those of the disk.
    pub(crate) fn read_payload(&self, offset: u32, length: u32, hash: u64) -> Result<Bytes, Error> {
        let bytes = self.read(offset, length).map_err(|source| Error::read(self.path.clone(), source))?;
        if xxh3_64(&bytes) == hash {
            return Ok(bytes.into());
        }
        Err(Error::Corrupt { path: self.path.clone(), offset: offset.into(), what: "payload checksum mismatch" })
    }

    /// Makes the first `bytes` durable.
    ///
    /// # Errors
    /// [`Error::SyncFailed`].
    pub(crate) fn sync(&self, bytes: u32) -> Result<(), Error> {
        if self.synced.load(Ordering::Acquire) >= u64::from(bytes) {
            return Ok(());
        }
        let failed = |source| Error::SyncFailed { path: self.path.clone(), source };
        let file = self.file.get().ok_or_else(|| failed(std::io::ErrorKind::NotFound.into()))?;
        // Read before the sync, which covers at least these bytes.
        let written = file.len().map_err(failed)?;
        file.sync_data().map_err(failed)?;
        self.synced.fetch_max(written, Ordering::AcqRel);
        Ok(())
    }

    /// Whether the name is durable.
    pub(crate) fn is_named(&self) -> bool {
        self.is_named.load(Ordering::Acquire)
    }

    /// Records that the directory was synced after the file was created.
    pub(crate) fn set_named(&self) {
        self.is_named.store(true, Ordering::Release);
    }

    /// Removes the file, if it exists.
    pub(crate) fn remove(&self, disk: &dyn Disk) -> std::io::Result<()> {
        match self.file.get() {
            Some(_) => disk.remove(&self.name),
            None => Ok(()),
        }
    }
}
