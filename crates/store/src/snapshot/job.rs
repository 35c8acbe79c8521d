//! Background jobs, which any thread can run: writing a snapshot, reading files to verify them.

use super::file::{self as snapshot_file, SnapshotHead, SnapshotWriter};
use super::scrub::{ScrubRead, ScrubResult};
use crate::payload::scrub::{PayloadRead, PayloadsRead};
use crate::payload::segment::SegmentFile;
use crate::payload::{Source, StoredPayload};
use crate::state::content::{Column, Content};
use crate::wal::Position;
use crate::{Disk, Error, FileHead};
use engram_memory::{Digest, Lsn, Ordinal, PartitionId, Term};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A snapshot that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotInfo {
    /// Partition.
    pub partition: PartitionId,
    /// LSN of the last record in it.
    pub lsn: Lsn,
    /// Term of that record.
    pub term: Term,
    /// Memories in it.
    pub memories: u64,
    /// Bytes of the file.
    pub bytes: u64,
    /// Digest of the memories in it.
    pub digest: Digest,
    /// Path of the file.
    pub path: String,
}

/// Work for any thread.
pub(crate) enum Job {
    Write(Box<SnapshotWrite>),
    Scrub(ScrubRead),
    ScrubPayloads(PayloadRead),
}

/// Result of a job.
pub(crate) enum JobOutput {
    Written(WrittenSnapshot),
    Scrubbed(ScrubResult),
    ScrubbedPayloads(PayloadsRead),
}

/// An exported partition, to be written.
pub(crate) struct SnapshotWrite {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) own: bool,
    pub(crate) file_head: FileHead,
    pub(crate) head: SnapshotHead,
    pub(crate) content: Content,
    /// The log must be durable up to here before recovery may find the snapshot.
    pub(crate) needs: Position,
    /// Damaged snapshots of the partition, to be removed once this one is durable.
    pub(crate) damaged: Vec<Lsn>,
    /// Payload segments that the state does not need.
    pub(crate) unused_segments: Vec<Arc<SegmentFile>>,
    /// For a replica state received from a primary: its term and ordinal.
    pub(crate) install: Option<(Term, Ordinal)>,
}

/// A snapshot that was written.
pub(crate) struct WrittenSnapshot {
    pub(crate) info: SnapshotInfo,
    /// On the store's own disk: LSN of the older generation, if any.
    pub(crate) older: Option<Lsn>,
    /// Payload segments that were removed.
    pub(crate) removed_segments: Vec<u32>,
}

impl Job {
    pub(crate) fn run(&self) -> Result<JobOutput, Error> {
        match self {
            Self::Write(write) => write.run().map(JobOutput::Written),
            Self::Scrub(scrub) => scrub.run().map(JobOutput::Scrubbed),
            Self::ScrubPayloads(read) => Ok(JobOutput::ScrubbedPayloads(read.run())),
        }
    }
}

impl SnapshotWrite {
    pub(crate) fn install(
        disk: Arc<dyn Disk>,
        file_head: FileHead,
        head: SnapshotHead,
        content: Content,
        from: (Term, Ordinal),
    ) -> Self {
        let (needs, damaged) = (Position::default(), Vec::new());
        let unused_segments = Vec::new();
        Self { disk, own: true, file_head, head, content, needs, damaged, unused_segments, install: Some(from) }
    }

    fn run(&self) -> Result<WrittenSnapshot, Error> {
        let mut writer = SnapshotWriter::create(&*self.disk, &self.file_head, self.head, &self.content.ledger)?;
        if let Err(error) = self.write_chunks(&mut writer) {
            writer.abandon();
            return Err(error);
        }
        let bytes = writer.finish()?;
        let SnapshotHead { partition, lsn, term, memories, .. } = self.head;
        let path = self.disk.describe(&snapshot_file::name(partition, lsn));
        // A received state is verified when it is installed and not reported as a snapshot.
        let digest = if self.install.is_some() { Digest::default() } else { self.content.memories_digest() };
        for &damaged in self.damaged.iter().filter(|damaged| **damaged != lsn) {
            // A file that remains is found again by the next scrub.
            let _ = self.disk.remove(&snapshot_file::name(partition, damaged));
        }
        let older = if self.own { snapshot_file::keep_generations(&*self.disk, partition)? } else { None };
        let removed_segments = self.remove_unused_segments();
        let info = SnapshotInfo { partition, lsn, term, memories, bytes, digest, path };
        Ok(WrittenSnapshot { info, older, removed_segments })
    }

    fn write_chunks(&self, writer: &mut SnapshotWriter<'_>) -> Result<(), Error> {
        let mut write = |(column, bytes): &(Column, Vec<u8>)| writer.chunk(column.code(), bytes);
        self.content.chunks.iter().try_for_each(&mut write)?;
        if self.own {
            let (chunks, segments) = self.content.references();
            self.sync_segments(&segments)?;
            return chunks.iter().try_for_each(&mut write);
        }
        if let Some(lost) = self.content.payloads.iter().find(|payload| payload.is_lost) {
            let path = match &lost.source {
                Source::File(file) => file.path().to_owned(),
                Source::Memory(..) => self.disk.describe("payload segment"),
            };
            let offset = lost.reference.offset.into();
            return Err(Error::Corrupt { path, offset, what: "payload checksum mismatch" });
        }
        self.content.lengths().iter().try_for_each(&mut write)?;
        let mut pieces = self.content.payload_stream();
        while let Some(piece) = pieces.next()? {
            writer.chunk(Column::Bytes.code(), &piece)?;
        }
        Ok(())
    }

    /// Makes the segments durable that the snapshot refers to, up to the given lengths.
    fn sync_segments(&self, segments: &BTreeMap<u32, u32>) -> Result<(), Error> {
        let mut files = BTreeMap::new();
        for StoredPayload { source, reference, .. } in &self.content.payloads {
            match source {
                Source::File(file) => {
                    files.entry(reference.segment).or_insert(file);
                }
                Source::Memory(_, failure) => {
                    let path = self.disk.describe("payload segment");
                    return Err(Error::write("write", path, (*failure).into()));
                }
            }
        }
        for (number, file) in &files {
            file.sync(segments.get(number).copied().unwrap_or_default())?;
        }
        if files.values().any(|file| !file.is_named()) {
            let failed = |source| Error::SyncFailed { path: self.disk.describe(""), source };
            self.disk.sync_dir().map_err(failed)?;
            files.values().for_each(|file| file.set_named());
        }
        Ok(())
    }

    /// Removes segments that neither the state nor a remaining snapshot needs. Returns their numbers.
    fn remove_unused_segments(&self) -> Vec<u32> {
        if self.unused_segments.is_empty() {
            return Vec::new();
        }
        // A snapshot that cannot be read keeps all segments.
        let Ok(needed) = snapshot_file::needed_segments(&*self.disk, &self.file_head, self.head.partition) else {
            return Vec::new();
        };
        let unused = self.unused_segments.iter().filter(|segment| !needed.contains(&segment.number));
        unused.filter(|segment| segment.remove(&*self.disk).is_ok()).map(|segment| segment.number).collect()
    }
}
