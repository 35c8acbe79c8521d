//! Background work: snapshots, deletion of covered log, scrubbing of snapshots, expiry of sessions.
//!
//! A *round* snapshots partitions one after another: each is exported in memory between two turns and written by another thread
//! (in single-thread mode by this one). Two generations are kept; the log is deleted below the older. A backup to another disk
//! yields to writes as state transfers do: a [`Throttle`] limits its bytes, a [`TimeShare`] its engine time, and another one its
//! disk time, since syncs of the log wait for the disk.

use crate::content::{Column, Content};
use crate::payloads::scrub::{PayloadRead, PayloadScrub, PayloadsRead};
use crate::payloads::segment::SegmentFile;
use crate::payloads::{self, Compaction, Source, StoredPayload};
use crate::scrub::{Scrub, ScrubRead, ScrubResult};
use crate::snapshot_file::{self, SnapshotHead, SnapshotWriter};
use crate::stats;
use crate::store::Store;
use crate::throttle::{Throttle, TimeShare};
use crate::wal::Position;
use crate::{Disk, Error, FileHead};
use engram_memory::{Command, Digest, Lsn, Ordinal, PartitionId, Record, Term};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Most queued rounds.
const MAX_ROUNDS: usize = 8;
/// Multiples of [`crate::Options::snapshot_bytes`] of log after which idle partitions get a new record: their last records keep the
/// log from being deleted.
const PINNED_FACTOR: u64 = 4;

/// Time until a received replica state that could not be written is requested again: a full disk stays full for a while.
const INSTALL_RETRY_MS: u64 = 5_000;

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

/// Called when a requested round is finished.
pub(crate) type RoundCallback = Box<dyn FnOnce(Result<Vec<SnapshotInfo>, Error>) + Send>;

/// State of the background work.
pub(crate) struct Background {
    rounds: VecDeque<Round>,
    in_flight: bool,
    /// Exported, and waiting until the log up to it is durable.
    exported: Option<SnapshotWrite>,
    /// Received replica states, to be written.
    installs: VecDeque<SnapshotWrite>,
    /// Received replica states that could not be written, with the time at which each is requested again.
    failed_installs: VecDeque<(u64, FailedInstall)>,
    pub(crate) scrub: Scrub,
    pub(crate) payload_scrub: PayloadScrub,
    pub(crate) compaction: Compaction,
    /// Byte budget of backups, and whether there were writes at the last evaluation.
    throttle: Throttle,
    has_writes: bool,
    /// Disk time of backups, and when the job in flight began.
    disk: TimeShare,
    begun_ms: u64,
    round_at_ms: u64,
    round_at_bytes: u64,
    expire_at_ms: u64,
    /// When the last digest marker was proposed, and the partition of the next one.
    pub(crate) marked_at_ms: u64,
    pub(crate) next_marked: u32,
}

/// A received replica state that could not be written.
struct FailedInstall {
    partition: PartitionId,
    term: Term,
    from: Ordinal,
}

struct Round {
    left: VecDeque<PartitionId>,
    /// Destination of a backup; `None` = the store's own disk.
    target: Option<Arc<dyn Disk>>,
    written: Vec<SnapshotInfo>,
    failed: Option<Error>,
    done: Option<RoundCallback>,
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
    disk: Arc<dyn Disk>,
    own: bool,
    file_head: FileHead,
    head: SnapshotHead,
    content: Content,
    /// The log must be durable up to here before recovery may find the snapshot.
    needs: Position,
    /// Damaged snapshots of the partition, to be removed once this one is durable.
    damaged: Vec<Lsn>,
    /// Payload segments that the state does not need.
    unused_segments: Vec<Arc<SegmentFile>>,
    /// For a replica state received from a primary: its term and ordinal.
    install: Option<(Term, Ordinal)>,
}

/// A snapshot that was written.
pub(crate) struct WrittenSnapshot {
    info: SnapshotInfo,
    /// On the store's own disk: LSN of the older generation, if any.
    older: Option<Lsn>,
    /// Payload segments that were removed.
    removed_segments: Vec<u32>,
}

impl Background {
    pub(crate) fn new(elapsed_ms: u64, backup_bytes_per_s: u64, expiry_ms: u64) -> Self {
        Self {
            throttle: Throttle::new(backup_bytes_per_s),
            has_writes: false,
            disk: TimeShare::default(),
            begun_ms: elapsed_ms,
            rounds: VecDeque::new(),
            in_flight: false,
            exported: None,
            installs: VecDeque::new(),
            failed_installs: VecDeque::new(),
            scrub: Scrub::new(elapsed_ms),
            payload_scrub: PayloadScrub::default(),
            compaction: Compaction::default(),
            round_at_ms: elapsed_ms,
            round_at_bytes: 0,
            expire_at_ms: elapsed_ms + expiry_ms,
            marked_at_ms: elapsed_ms,
            next_marked: 0,
        }
    }

    /// Queues a received replica state, which takes precedence over snapshots.
    pub(crate) fn install(&mut self, write: SnapshotWrite) {
        self.installs.push_back(write);
    }

    /// Whether a backup round is in progress.
    pub(crate) fn writes_backup(&self) -> bool {
        self.rounds.front().is_some_and(|round| round.target.is_some())
    }
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

impl Store {
    /// Requests a snapshot of every partition with data on the store's own disk, or a backup to `target` of the visible ones:
    /// where several workers write into one directory, each writes the partitions it is primary of. `done` is called when all are
    /// durable, or with the first error.
    pub fn snapshot_all(
        &mut self,
        target: Option<Arc<dyn Disk>>,
        done: impl FnOnce(Result<Vec<SnapshotInfo>, Error>) + Send + 'static,
    ) {
        let own = target.is_none();
        let is_visible = |partition: PartitionId| !self.partitions.is_hidden(partition.0 as usize);
        let wanted = |partition| if own { self.needs_snapshot(partition) } else { is_visible(partition) };
        let left = self.partitions.iter().filter(|partition| wanted(*partition)).collect();
        self.request_round(left, target, Box::new(done));
    }

    /// Requests a backup of one partition; of none unless it is visible here.
    pub fn snapshot_one(
        &mut self,
        partition: PartitionId,
        target: Arc<dyn Disk>,
        done: impl FnOnce(Result<Vec<SnapshotInfo>, Error>) + Send + 'static,
    ) {
        let is_wanted = |it: &PartitionId| *it == partition && !self.partitions.is_hidden(it.0 as usize);
        let left = self.partitions.iter().filter(is_wanted).collect();
        self.request_round(left, Some(target), Box::new(done));
    }

    fn request_round(&mut self, left: VecDeque<PartitionId>, target: Option<Arc<dyn Disk>>, done: RoundCallback) {
        if self.background.rounds.len() >= MAX_ROUNDS {
            let source = std::io::Error::other(format!("{MAX_ROUNDS} snapshot rounds are already queued"));
            done(Err(Error::Io { operation: "snapshot", path: self.disk.describe(""), source }));
            return;
        }
        self.begin_round(left, target, Some(done));
    }

    /// Requests states again whose writes failed some time ago.
    fn retry_installs(&mut self) {
        let now_ms = self.clock.elapsed_ms();
        while let Some((_, failed)) = self.background.failed_installs.pop_front_if(|(at_ms, _)| *at_ms <= now_ms) {
            self.request_transfer_again(failed.partition, failed.from, failed.term);
        }
    }

    /// Starts what is due by the clock: expiry, digest markers, snapshot rounds, repeated transfers.
    ///
    /// # Errors
    /// Those of the disk.
    pub(crate) fn housekeeping(&mut self) -> Result<(), Error> {
        self.expire_grants();
        self.retry_installs();
        self.compact_payloads();
        self.repair_payloads()?;
        let now_ms = self.clock.elapsed_ms();
        self.propose_digest_marker(now_ms);
        if now_ms >= self.background.expire_at_ms {
            self.background.expire_at_ms = now_ms + self.options.expiry_ms;
            self.expire_sessions();
        }
        let logged = self.wal.written().0.saturating_sub(self.background.round_at_bytes);
        let due = logged >= self.options.snapshot_bytes
            || now_ms.saturating_sub(self.background.round_at_ms) >= self.options.snapshot_ms;
        if due && self.background.rounds.is_empty() {
            self.background.round_at_ms = now_ms;
            self.background.round_at_bytes = self.wal.written().0;
            let mut left: VecDeque<_> =
                self.partitions.iter().filter(|partition| self.needs_snapshot(*partition)).collect();
            left.extend(self.advance_idle_partitions());
            self.begin_round(left, None, None);
        }
        Ok(())
    }

    /// Returns the next background job: a snapshot to write, or something to scrub. Each ends in [`Store::job_done`].
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn next_job(&mut self) -> Result<Option<Job>, Error> {
        if self.background.in_flight {
            return Ok(None);
        }
        let job = match self.next_write()? {
            Some(write) => Some(Job::Write(Box::new(write))),
            None => self.next_scrub().or_else(|| self.next_payload_scrub()),
        };
        self.background.in_flight = job.is_some();
        self.background.begun_ms = self.clock.elapsed_ms();
        Ok(job)
    }

    fn next_write(&mut self) -> Result<Option<SnapshotWrite>, Error> {
        if self.replication.transfers.share.may_work(self.clock.elapsed_ms())
            && let Some(write) = self.background.installs.pop_front()
        {
            return Ok(Some(write));
        }
        if self.background.exported.is_none() && self.may_export() {
            // Only backups yield to calls; the store's own rounds do not.
            self.background.exported = if self.background.writes_backup() {
                self.charge_engine_share(Self::export_next)?
            } else {
                self.export_next()?
            };
        }
        Ok(self.background.exported.take_if(|write| self.wal.durable(write.needs)))
    }

    /// Whether the next partition of a round may be exported: a backup waits while writes need disk and engine.
    fn may_export(&mut self) -> bool {
        let (now_ms, is_backup) = (self.clock.elapsed_ms(), self.background.writes_backup());
        let Background { throttle, has_writes, disk, .. } = &mut self.background;
        if throttle.is_due(now_ms) {
            *has_writes = throttle.evaluate(now_ms, self.shared.write_us.totals(), is_backup) > 0;
        }
        let waits = is_backup && *has_writes;
        !waits
            || (throttle.may_send(now_ms) && disk.may_work(now_ms) && self.replication.transfers.share.may_work(now_ms))
    }

    /// Handles a finished job.
    ///
    /// # Errors
    /// [`Error::SyncFailed`].
    pub(crate) fn job_done(&mut self, job: &Job, result: Result<JobOutput, Error>) -> Result<(), Error> {
        self.background.in_flight = false;
        match (job, result) {
            (Job::Scrub(scrub), result) => {
                self.scrub_done(scrub, result);
                Ok(())
            }
            (Job::Write(write), Ok(JobOutput::Written(written))) => self.write_done(write, Ok(written)),
            (Job::Write(write), Err(error)) => self.write_done(write, Err(error)),
            (Job::ScrubPayloads(read), result) => {
                self.payload_scrub_done(read, result);
                Ok(())
            }
            (Job::Write(_), Ok(JobOutput::Scrubbed(_) | JobOutput::ScrubbedPayloads(_))) => Ok(()),
        }
    }

    /// Handles a finished write; deletes covered log at the end of a round.
    fn write_done(&mut self, write: &SnapshotWrite, result: Result<WrittenSnapshot, Error>) -> Result<(), Error> {
        if let Some((term, from)) = write.install {
            return match result {
                Ok(_) => self.install(&write.content, write.head, term, from),
                Err(error @ Error::SyncFailed { .. }) => Err(error),
                Err(_) => {
                    stats::add(&self.shared.failed_snapshots, 1);
                    let failed = FailedInstall { partition: write.head.partition, term, from };
                    let at_ms = self.clock.elapsed_ms() + INSTALL_RETRY_MS;
                    self.background.failed_installs.push_back((at_ms, failed));
                    Ok(())
                }
            };
        }
        let Some(round) = self.background.rounds.front_mut() else { return Ok(()) };
        match result {
            Ok(WrittenSnapshot { info, older, removed_segments }) => {
                self.partitions.arena.payloads.removed(info.partition, &removed_segments);
                stats::add(&self.shared.snapshots, 1);
                stats::add(&self.shared.snapshot_bytes, info.bytes);
                if !write.own {
                    let (now_ms, served) = (self.clock.elapsed_ms(), self.shared.served());
                    self.background.throttle.charge(info.bytes as usize);
                    self.background.disk.charge(self.background.begun_ms, now_ms, served);
                } else {
                    let state = &mut self.states[info.partition.0 as usize];
                    state.snapshots = [Some(info.lsn), older];
                    state.damaged.retain(|damaged| !write.damaged.contains(damaged));
                }
                round.written.push(info);
            }
            Err(error @ Error::SyncFailed { .. }) => return Err(error),
            Err(error) => {
                if let (Error::Corrupt { .. }, false) = (&error, write.own) {
                    let damage = payloads::describe(&error);
                    self.partitions.arena.payloads.report_damage(write.head.partition, damage);
                }
                stats::add(&self.shared.failed_snapshots, 1);
                // A full or failing disk fails the rest of the round too; the next round retries.
                round.left.clear();
                round.failed = Some(error);
            }
        }
        self.end_round_if_over();
        Ok(())
    }

    /// Snapshots a partition whose snapshot is damaged, now or with the next round.
    pub(crate) fn rewrite_snapshot(&mut self, partition: PartitionId) {
        if self.background.rounds.len() < MAX_ROUNDS {
            self.begin_round(VecDeque::from([partition]), None, None);
        }
    }

    fn begin_round(&mut self, left: VecDeque<PartitionId>, target: Option<Arc<dyn Disk>>, done: Option<RoundCallback>) {
        self.background.rounds.push_back(Round { left, target, written: Vec::new(), failed: None, done });
        if !self.background.in_flight && self.background.exported.is_none() {
            self.end_round_if_over();
        }
    }

    fn end_round_if_over(&mut self) {
        while self.background.rounds.front().is_some_and(|round| round.left.is_empty()) {
            let Some(round) = self.background.rounds.pop_front() else { return };
            if round.target.is_none() && round.failed.is_none() {
                self.delete_covered_log();
            }
            if let Some(done) = round.done {
                done(round.failed.map_or(Ok(round.written), Err));
            }
        }
    }

    fn export_next(&mut self) -> Result<Option<SnapshotWrite>, Error> {
        while let Some(round) = self.background.rounds.front_mut() {
            let Some(partition) = round.left.pop_front() else {
                self.end_round_if_over();
                continue;
            };
            let target = round.target.clone();
            let own = target.is_none();
            let needed = !own || self.needs_snapshot(partition);
            let content = if needed { self.partitions.export(partition)? } else { None };
            let Some(content) = content else {
                self.end_round_if_over();
                continue;
            };
            let state = &self.states[partition.0 as usize];
            let head = SnapshotHead {
                partition,
                lsn: state.applied,
                term: state.applied_term,
                clock: content.clock,
                memories: content.memories,
                created_ms: self.clock.now_ms(),
                digest: content.digest.0,
            };
            let disk = target.unwrap_or_else(|| Arc::clone(&self.disk));
            let (file_head, needs) = (self.identity().head(), self.wal.written());
            let damaged = if own { state.damaged.clone() } else { Vec::new() };
            let unused_segments = if own { self.partitions.arena.payloads.unused(partition) } else { Vec::new() };
            return Ok(Some(SnapshotWrite {
                disk,
                own,
                file_head,
                head,
                content,
                needs,
                damaged,
                unused_segments,
                install: None,
            }));
        }
        Ok(None)
    }

    /// Whether the newest snapshot of a partition is outdated or one is damaged.
    fn needs_snapshot(&self, partition: PartitionId) -> bool {
        let state = &self.states[partition.0 as usize];
        state.applied > Lsn(0) && (state.snapshots[0] != Some(state.applied) || !state.damaged.is_empty())
    }

    fn delete_covered_log(&mut self) {
        let covered: BTreeMap<PartitionId, Lsn> = (self.states.iter().enumerate())
            .filter_map(|(partition, state)| Some((PartitionId(partition as u32), state.snapshots[1]?)))
            .collect();
        match self.wal.delete_below(&covered) {
            Ok(bytes) => stats::add(&self.shared.deleted_log_bytes, bytes),
            // Remaining segments cost space and are deleted after the next round.
            Err(_) => stats::add(&self.shared.failed_snapshots, 1),
        }
    }

    /// If idle partitions keep much log from being deleted, gives each a record that changes nothing, so that this round writes a
    /// newer generation. Returns these partitions.
    fn advance_idle_partitions(&mut self) -> Vec<PartitionId> {
        if self.wal.bytes() < self.options.snapshot_bytes.saturating_mul(PINNED_FACTOR) {
            return Vec::new();
        }
        let idle: Vec<PartitionId> = (self.partitions.iter())
            .filter(|partition| {
                let state = &self.states[partition.0 as usize];
                state.applied > Lsn(0) && state.pending.is_empty() && !self.needs_snapshot(*partition)
            })
            .collect();
        for &partition in &idle {
            let before_ms = self.partitions.ledger(partition).map_or(0, |ledger| ledger.sessions.watermark_ms());
            self.propose(partition, Record::bare(Command::ExpireSessions { before_ms }), None);
        }
        idle
    }

    fn expire_sessions(&mut self) {
        let Some(before_ms) = self.session_clock.expire_before_ms() else { return };
        let due: Vec<PartitionId> = (self.partitions.iter())
            .filter(|partition| self.serving(*partition).is_some())
            .filter(|partition| {
                let sessions = self.partitions.ledger(*partition).map(|ledger| &ledger.sessions);
                sessions.is_some_and(|sessions| !sessions.is_empty() && sessions.watermark_ms() < before_ms)
            })
            .collect();
        for partition in due {
            self.propose(partition, Record::bare(Command::ExpireSessions { before_ms }), None);
        }
    }
}
