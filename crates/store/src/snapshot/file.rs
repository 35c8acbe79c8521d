//! Snapshot file of a partition: header, chunks, manifest, trailer.
//!
//! ```text
//!  head      common head | partition u32 | clock u32 | lsn u64 | term u64 | memories u64 | created_ms u64 | digest u128
//!  chunks    at most 1 MiB each; kinds are defined by the state machine
//!  manifest  per chunk: kind u32 | bytes u32 | xxh3-64 u64
//!  trailer   chunks u64 | bytes of chunks u64 | xxh3-128 of head, manifest and both counts | magic
//! ```
//!
//! Invariants: every byte is covered by a checksum, and the file has no extra bytes; a snapshot appears under its name only when
//! it is durable; a chunk is returned only if its checksum matches; allocations are bounded by the file size, never by a number
//! in the file. Two generations of a partition are kept, so that a damaged one can be replaced by the older one and the log.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use engram_memory::codec::decode_ledger;
use engram_memory::{DecayClock, Digest, Lsn, PartitionId, Term};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::disk::{File, TEMPORARY_SUFFIX};
use crate::format::{self, Bytes};
use crate::state::content::Column;
use crate::{Disk, Error, FileHead};

/// Largest chunk in bytes.
pub const MAX_CHUNK_BYTES: usize = 1 << 20;
/// Kind of the chunks with the ledger (sessions, epochs, runs, settings); other kinds are defined by the caller.
pub const LEDGER: u32 = 0;
/// Snapshots kept per partition.
pub const GENERATIONS: usize = 2;

const MAGIC: [u8; 8] = *b"ENGRSNP\0";
const END_MAGIC: [u8; 8] = *b"ENGRSNPE";
const HEAD_BYTES: usize = format::HEAD_BYTES + 56;
const ENTRY_BYTES: usize = 16;
const TRAILER_BYTES: usize = 40;
const PREFIX: &str = "snapshot-";
const SUFFIX: &str = ".snap";

/// Header of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotHead {
    /// Partition.
    pub partition: PartitionId,
    /// LSN of the last command in it; committed.
    pub lsn: Lsn,
    /// Term of that command.
    pub term: Term,
    /// Decay clock.
    pub clock: DecayClock,
    /// Memories in it.
    pub memories: u64,
    /// Wall clock time of the snapshot, in milliseconds since 1970.
    pub created_ms: u64,
    /// Replica digest at `lsn`, verified after loading.
    pub digest: u128,
}

/// Manifest entry of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// Kind.
    pub kind: u32,
    /// Bytes, at most [`MAX_CHUNK_BYTES`].
    pub bytes: u32,
    /// xxh3-64 of the bytes.
    pub checksum: u64,
    /// Offset in the file.
    offset: u64,
}

/// Returns the file name of a snapshot.
pub fn name(partition: PartitionId, lsn: Lsn) -> String {
    format!("{PREFIX}{:05}-{:020}{SUFFIX}", partition.0, lsn.0)
}

/// Parses the file name of a snapshot; `None` for other files.
pub fn parse_name(name: &str) -> Option<(PartitionId, Lsn)> {
    let (partition, lsn) = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.split_once('-')?;
    let parsed = (PartitionId(partition.parse().ok()?), Lsn(lsn.parse().ok()?));
    (self::name(parsed.0, parsed.1) == name).then_some(parsed)
}

/// Lists the snapshots of a directory by partition, newest first.
///
/// # Errors
/// Those of the disk.
pub fn list(disk: &dyn Disk) -> Result<BTreeMap<PartitionId, Vec<Lsn>>, Error> {
    let names = disk.list().map_err(|source| Error::Io { operation: "list", path: disk.describe(""), source })?;
    let mut snapshots: BTreeMap<PartitionId, Vec<Lsn>> = BTreeMap::new();
    for (partition, lsn) in names.iter().filter_map(|name| parse_name(name)) {
        snapshots.entry(partition).or_default().push(lsn);
    }
    for lsns in snapshots.values_mut() {
        lsns.sort_unstable_by(|a, b| b.cmp(a));
    }
    Ok(snapshots)
}

/// Removes all but the newest [`GENERATIONS`] snapshots of a partition, and returns the LSN up to which the log is no longer
/// needed: that of the oldest one kept, `None` while there are fewer.
///
/// # Errors
/// Those of the disk.
pub fn keep_generations(disk: &dyn Disk, partition: PartitionId) -> Result<Option<Lsn>, Error> {
    let lsns = list(disk)?.remove(&partition).unwrap_or_default();
    let old = lsns.get(GENERATIONS..).unwrap_or_default();
    for &lsn in old {
        let name = name(partition, lsn);
        let failed = |source| Error::Io { operation: "remove", path: disk.describe(&name), source };
        disk.remove(&name).map_err(failed)?;
    }
    if !old.is_empty() {
        disk.sync_dir().map_err(|source| Error::SyncFailed { path: disk.describe(""), source })?;
    }
    Ok(lsns.get(GENERATIONS - 1).copied())
}

/// Returns the numbers of the payload segments that the snapshots of a partition refer to.
///
/// # Errors
/// A snapshot cannot be read.
pub(crate) fn needed_segments(
    disk: &dyn Disk,
    head: &FileHead,
    partition: PartitionId,
) -> Result<BTreeSet<u32>, Error> {
    let (mut segments, mut bytes) = (BTreeSet::new(), Vec::new());
    for lsn in list(disk)?.remove(&partition).unwrap_or_default() {
        let reader = SnapshotReader::open(disk, head, &name(partition, lsn))?;
        for chunk in reader.chunks().iter().filter(|chunk| chunk.kind == Column::Segments.code()) {
            reader.read(chunk, &mut bytes)?;
            segments.extend(bytes.chunks_exact(8).filter_map(|row| Bytes(row).u32()));
        }
    }
    Ok(segments)
}

/// A damaged snapshot that was skipped.
#[derive(Debug)]
pub struct RejectedSnapshot {
    /// Its lsn.
    pub lsn: Lsn,
    /// The damage.
    pub error: Error,
}

/// Opens the newest valid snapshot of a partition, and returns the damaged newer ones. The log is kept from the older generation
/// on, so it continues any snapshot opened here.
///
/// # Errors
/// [`Error::OtherCluster`] and the like, [`Error::UnknownFormat`], failures to read: an older snapshot would not help. Damage is
/// no error here.
pub fn newest_valid(
    disk: &dyn Disk,
    head: &FileHead,
    partition: PartitionId,
) -> Result<(Option<SnapshotReader>, Vec<RejectedSnapshot>), Error> {
    let mut rejected = Vec::new();
    for lsn in list(disk)?.remove(&partition).unwrap_or_default() {
        let opened = SnapshotReader::open(disk, head, &name(partition, lsn)).and_then(|reader| {
            reader.verify()?;
            reader.check_name(partition, lsn)?;
            Ok(reader)
        });
        match opened {
            Ok(reader) => return Ok((Some(reader), rejected)),
            Err(error @ Error::Corrupt { .. }) => rejected.push(RejectedSnapshot { lsn, error }),
            Err(error) => return Err(error),
        }
    }
    Ok((None, rejected))
}

/// Writes one snapshot.
pub struct SnapshotWriter<'d> {
    disk: &'d dyn Disk,
    file: Box<dyn File>,
    name: String,
    path: String,
    head: Vec<u8>,
    manifest: Vec<u8>,
    chunks: u64,
    end: u64,
}

impl<'d> SnapshotWriter<'d> {
    /// Creates the snapshot of `snapshot.partition` at `snapshot.lsn`, with the ledger as its first chunks.
    ///
    /// # Errors
    /// [`Error::DiskFull`] and those of the disk. The temporary file is removed at the next start.
    pub fn create(disk: &'d dyn Disk, head: &FileHead, snapshot: SnapshotHead, ledger: &[u8]) -> Result<Self, Error> {
        let name = name(snapshot.partition, snapshot.lsn);
        let path = disk.describe(&name);
        let temporary = format!("{name}{TEMPORARY_SUFFIX}");
        let _ = disk.remove(&temporary);
        let file = disk.create(&temporary).map_err(|source| Error::write("create", path.clone(), source))?;
        let head = encode_head(head, &snapshot);
        let mut writer = Self { disk, file, name, path, head, manifest: Vec::new(), chunks: 0, end: HEAD_BYTES as u64 };
        writer.write(0, &writer.head)?;
        for chunk in ledger.chunks(MAX_CHUNK_BYTES) {
            writer.chunk(LEDGER, chunk)?;
        }
        Ok(writer)
    }

    /// Adds a chunk.
    ///
    /// # Errors
    /// [`Error::ChunkTooLarge`]; [`Error::DiskFull`] and those of the disk.
    pub fn chunk(&mut self, kind: u32, bytes: &[u8]) -> Result<(), Error> {
        if bytes.len() > MAX_CHUNK_BYTES {
            return Err(Error::ChunkTooLarge { bytes: bytes.len(), limit: MAX_CHUNK_BYTES });
        }
        self.write(self.end, bytes)?;
        self.manifest.extend_from_slice(&kind.to_le_bytes());
        self.manifest.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        self.manifest.extend_from_slice(&xxh3_64(bytes).to_le_bytes());
        self.chunks += 1;
        self.end += bytes.len() as u64;
        Ok(())
    }

    /// Finishes the snapshot, durable under its name when this returns. Returns its size in bytes.
    ///
    /// # Errors
    /// [`Error::DiskFull`], [`Error::SyncFailed`] and those of the disk.
    pub fn finish(self) -> Result<u64, Error> {
        let mut tail = self.manifest.clone();
        tail.extend_from_slice(&self.chunks.to_le_bytes());
        tail.extend_from_slice(&(self.end - HEAD_BYTES as u64).to_le_bytes());
        tail.extend_from_slice(&digest(&self.head, &tail).to_le_bytes());
        tail.extend_from_slice(&END_MAGIC);
        self.write(self.end, &tail)?;
        let sync_failed = |source| Error::SyncFailed { path: self.path.clone(), source };
        self.file.sync_data().map_err(sync_failed)?;
        let temporary = format!("{}{TEMPORARY_SUFFIX}", self.name);
        let failed = |source| Error::write("name", self.path.clone(), source);
        self.disk.rename(&temporary, &self.name).map_err(failed)?;
        self.disk.sync_dir().map_err(sync_failed)?;
        Ok(self.end + tail.len() as u64)
    }

    /// Abandons an unfinished snapshot and removes its file.
    pub fn abandon(self) {
        // A remaining temporary file is removed at the next start.
        let _ = self.disk.remove(&format!("{}{TEMPORARY_SUFFIX}", self.name));
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.file.write_at(offset, bytes).map_err(|source| Error::write("write", self.path.clone(), source))
    }
}

/// Reads one snapshot.
pub struct SnapshotReader {
    file: Box<dyn File>,
    path: String,
    file_head: FileHead,
    head: SnapshotHead,
    chunks: Vec<Chunk>,
}

impl SnapshotReader {
    /// Opens a snapshot of any store of this cluster and verifies header and manifest; chunks are verified as they are read.
    ///
    /// # Errors
    /// [`Error::Corrupt`]; [`Error::OtherCluster`], [`Error::OtherShape`], [`Error::UnknownFormat`]; those of the disk.
    pub fn open(disk: &dyn Disk, head: &FileHead, name: &str) -> Result<Self, Error> {
        let reader = Self::open_any(disk, name)?;
        head.check_cluster(&reader.file_head, &reader.path)?;
        Ok(reader)
    }

    /// Opens a snapshot of any cluster: the caller checks [`Self::file_head`].
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_any(disk: &dyn Disk, name: &str) -> Result<Self, Error> {
        let path = disk.describe(name);
        let failed = |source: io::Error| Error::read(path.clone(), source);
        let file = disk.open(name).map_err(failed)?;
        let file_bytes = file.len().map_err(failed)?;
        let mut head = vec![0; HEAD_BYTES.min(file_bytes as usize)];
        file.read_at(0, &mut head).map_err(failed)?;
        // Read before the version is checked: the checksum that covers the version is there.
        let manifest = read_manifest(&*file, file_bytes, &path);
        let is_intact = |head: &[u8]| manifest.as_ref().is_ok_and(|manifest| has_valid_checksum(head, manifest));
        format::check_version(&head, &MAGIC, &path, is_intact)?;
        let (file_head, snapshot, chunks) = decode(&head, &manifest?, &path)?;
        Ok(Self { file, path, file_head, head: snapshot, chunks })
    }

    /// Returns the path.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the common file header.
    pub fn file_head(&self) -> FileHead {
        self.file_head
    }

    /// Returns the snapshot header.
    pub fn head(&self) -> SnapshotHead {
        self.head
    }

    /// Returns the manifest, in file order.
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Returns the bytes of all chunks.
    pub fn bytes(&self) -> u64 {
        self.chunks.iter().map(|chunk| u64::from(chunk.bytes)).sum()
    }

    /// Reads a chunk into `bytes`, replacing its content, and verifies it.
    ///
    /// # Errors
    /// [`Error::Corrupt`], with `bytes` empty; those of the disk.
    pub fn read(&self, chunk: &Chunk, bytes: &mut Vec<u8>) -> Result<(), Error> {
        bytes.clear();
        bytes.resize(chunk.bytes as usize, 0);
        let read = self.file.read_at(chunk.offset, bytes);
        read.map_err(|source| Error::read(self.path.clone(), source))?;
        if xxh3_64(bytes) == chunk.checksum {
            return Ok(());
        }
        bytes.clear();
        Err(Error::Corrupt { path: self.path.clone(), offset: chunk.offset, what: "chunk checksum mismatch" })
    }

    /// Reads the ledger's bytes.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn ledger(&self) -> Result<Vec<u8>, Error> {
        let (mut ledger, mut bytes) = (Vec::new(), Vec::new());
        for chunk in self.chunks.iter().filter(|chunk| chunk.kind == LEDGER) {
            self.read(chunk, &mut bytes)?;
            ledger.extend_from_slice(&bytes);
        }
        Ok(ledger)
    }

    /// Returns the digest of the memories alone at [`SnapshotHead::lsn`]: the digest of the header without clock and ledger.
    /// Verified by loading.
    ///
    /// # Errors
    /// As [`Self::read`]; [`Error::Corrupt`] if the ledger cannot be decoded.
    pub fn memories_digest(&self) -> Result<Digest, Error> {
        let what = "ledger cannot be decoded";
        let ledger = decode_ledger(&self.ledger()?);
        let ledger = ledger.map_err(|_| Error::Corrupt { path: self.path.clone(), offset: 0, what })?;
        Ok(Digest(self.head.digest.wrapping_sub(ledger.digest(self.head.clock))))
    }

    /// Reads and verifies every chunk.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn verify(&self) -> Result<(), Error> {
        let mut bytes = Vec::new();
        self.chunks.iter().try_for_each(|chunk| self.read(chunk, &mut bytes))
    }

    /// Checks that the file name matches the header.
    pub(crate) fn check_name(&self, partition: PartitionId, lsn: Lsn) -> Result<(), Error> {
        if (self.head.partition, self.head.lsn) == (partition, lsn) {
            return Ok(());
        }
        Err(Error::Corrupt { path: self.path.clone(), offset: 0, what: "file name does not match the header" })
    }
}

/// Checksum of everything but the chunks; `tail` is the manifest and the counts after it.
fn digest(head: &[u8], tail: &[u8]) -> u128 {
    let mut hasher = Xxh3::new();
    hasher.update(head);
    hasher.update(tail);
    hasher.digest128()
}

fn encode_head(head: &FileHead, snapshot: &SnapshotHead) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEAD_BYTES);
    format::encode(&MAGIC, head, &mut bytes);
    bytes.extend_from_slice(&snapshot.partition.0.to_le_bytes());
    bytes.extend_from_slice(&snapshot.clock.units().to_le_bytes());
    bytes.extend_from_slice(&snapshot.lsn.0.to_le_bytes());
    bytes.extend_from_slice(&snapshot.term.0.to_le_bytes());
    bytes.extend_from_slice(&snapshot.memories.to_le_bytes());
    bytes.extend_from_slice(&snapshot.created_ms.to_le_bytes());
    bytes.extend_from_slice(&snapshot.digest.to_le_bytes());
    bytes
}

/// Reads manifest and trailer.
fn read_manifest(file: &dyn File, file_bytes: u64, path: &str) -> Result<Vec<u8>, Error> {
    let failed = |source: io::Error| Error::read(path.to_owned(), source);
    let corrupt = |offset, what| Error::Corrupt { path: path.into(), offset, what };
    let trailer_at = file_bytes.checked_sub(TRAILER_BYTES as u64).filter(|&at| at >= HEAD_BYTES as u64);
    let trailer_at = trailer_at.ok_or(corrupt(0, "file is too short"))?;
    let mut trailer = [0; TRAILER_BYTES];
    file.read_at(trailer_at, &mut trailer).map_err(failed)?;
    let manifest_at = manifest_at(&trailer, trailer_at).map_err(|what| corrupt(trailer_at, what))?;
    let mut manifest = vec![0; (trailer_at - manifest_at) as usize + TRAILER_BYTES];
    file.read_at(manifest_at, &mut manifest).map_err(failed)?;
    Ok(manifest)
}

/// Whether the checksum in the trailer matches header and manifest.
fn has_valid_checksum(head: &[u8], manifest: &[u8]) -> bool {
    let split = manifest.split_at_checked(manifest.len().saturating_sub(24));
    split.is_some_and(|(tail, checksum)| Bytes(checksum).u128() == Some(digest(head, tail)))
}

/// Returns the offset of the manifest, from the trailer alone.
fn manifest_at(trailer: &[u8; TRAILER_BYTES], trailer_at: u64) -> Result<u64, &'static str> {
    const IMPOSSIBLE: &str = "trailer does not match the file length";
    let mut bytes = Bytes(trailer);
    let (chunks, chunk_bytes) = bytes.u64().zip(bytes.u64()).ok_or(IMPOSSIBLE)?;
    if trailer[TRAILER_BYTES - 8..] != END_MAGIC {
        return Err("wrong magic number in the trailer");
    }
    let manifest_bytes = chunks.checked_mul(ENTRY_BYTES as u64).ok_or(IMPOSSIBLE)?;
    let at = trailer_at.checked_sub(manifest_bytes).ok_or(IMPOSSIBLE)?;
    if at.checked_sub(HEAD_BYTES as u64) == Some(chunk_bytes) { Ok(at) } else { Err(IMPOSSIBLE) }
}

/// Decodes and verifies header and manifest; `manifest` includes the trailer.
fn decode(head: &[u8], manifest: &[u8], path: &str) -> Result<(FileHead, SnapshotHead, Vec<Chunk>), Error> {
    let corrupt = |what| Error::Corrupt { path: path.into(), offset: 0, what };
    let short = || corrupt("file is too short");
    if !has_valid_checksum(head, manifest) {
        return Err(corrupt("checksum mismatch of header and manifest"));
    }
    let (tail, _) = manifest.split_at_checked(manifest.len().saturating_sub(24)).ok_or_else(short)?;
    let mut rest = Bytes(head);
    let file_head = format::decode(&mut rest, &MAGIC, path)?;
    let mut read = || {
        Some(SnapshotHead {
            partition: PartitionId(rest.u32()?),
            clock: DecayClock::from_units(rest.u32()?)?,
            lsn: Lsn(rest.u64()?),
            term: Term(rest.u64()?),
            memories: rest.u64()?,
            created_ms: rest.u64()?,
            digest: rest.u128()?,
        })
    };
    let snapshot = read().ok_or_else(|| corrupt("invalid values in the header"))?;
    let entries = tail.get(..tail.len().saturating_sub(16)).ok_or_else(short)?;
    let (mut chunks, mut offset) = (Vec::with_capacity(entries.len() / ENTRY_BYTES), HEAD_BYTES as u64);
    for entry in entries.chunks_exact(ENTRY_BYTES) {
        let mut entry = Bytes(entry);
        let mut read = || Some((entry.u32()?, entry.u32()?, entry.u64()?));
        let (kind, bytes, checksum) = read().ok_or_else(short)?;
        if bytes as usize > MAX_CHUNK_BYTES {
            return Err(corrupt("a chunk exceeds the limit"));
        }
        chunks.push(Chunk { kind, bytes, checksum, offset });
        offset += u64::from(bytes);
    }
    if offset - HEAD_BYTES as u64 != Bytes(&tail[entries.len() + 8..]).u64().ok_or_else(short)? {
        return Err(corrupt("chunk sizes do not match the file length"));
    }
    Ok((file_head, snapshot, chunks))
}
